# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A plan is followed only under the assignment it was made with, whatever the marks."""

from __future__ import annotations

import pytest
from hand_driven import LAZY_NATIVE
from toy_model import all_equal, make_chunks, make_manager, micro_batch, run_schedule

from megatron.slipstream.integration.seam.manager import PipelineOffloadManager
from megatron.slipstream.plan.actions import Plan
from megatron.slipstream.plan.settings import NOTHING, WHOLE, Assignment, LayerSetting

KEEP: Assignment = (NOTHING, NOTHING, NOTHING)
MLP: Assignment = (LayerSetting(("mlp",)), NOTHING, NOTHING)
ROWS = {KEEP: 7, MLP: 3}
"""Both have the same marks; a group saves fewer bytes with ``MLP``."""
ONE, TWO = "F0.0 B0.0", "F0.0 B0.0 F0.1 B0.1"


def run(manager: PipelineOffloadManager, assignment: Assignment, *schedules: str) -> list[Plan]:
    """Iterations with this assignment; returns the plan that each followed, or that it gave."""
    chunks, plans = make_chunks(), []
    manager.engine.change_assignment(assignment)
    for schedule in schedules:
        expected = run_schedule(chunks, schedule, None, ROWS[assignment])
        assert all_equal(expected, run_schedule(chunks, schedule, manager, ROWS[assignment]))
        assert manager.plan is not None
        plans.append(manager.plan)
    return plans


@pytest.mark.parametrize("backend", ["cpu-lazy", LAZY_NATIVE])
def test_each_assignment_has_its_own_plan(backend: str) -> None:
    manager = make_manager(backend)
    first, *others = run(manager, KEEP, *[ONE] * 4)
    assert all(plan is first for plan in others)
    second, *others = run(manager, MLP, *[ONE] * 4)
    assert all(plan is second for plan in others)
    assert second.trace.steps == first.trace.steps
    assert second.trace.steps_key != first.trace.steps_key
    assert [first.trace.assignment, second.trace.assignment] == [KEEP, MLP]
    assert second.moved_nbytes < first.moved_nbytes
    # Both are still there.
    assert run(manager, KEEP, ONE) == [first]
    assert run(manager, MLP, ONE) == [second]
    assert manager.report.num_plans == 2


@pytest.mark.parametrize("backend", ["cpu-lazy", LAZY_NATIVE])
def test_an_iteration_that_departs_takes_no_plan_of_another_assignment(backend: str) -> None:
    manager = make_manager(backend)
    run(manager, KEEP, ONE, TWO, ONE, TWO)
    run(manager, MLP, ONE, ONE, ONE, ONE)
    chunk, rows = make_chunks(), ROWS[MLP]
    for _ in range(2):  # One that left marks out cannot be planned.
        run_schedule(chunk, TWO, manager, rows)
    assert manager.plan is not None
    assert manager.plan.trace.assignment == MLP
    assert len(manager.plan.trace.group_by_key) == 12


def test_the_order_of_iterations_says_nothing_across_assignments() -> None:
    manager = make_manager("cpu")
    for _ in range(3):
        for assignment in (KEEP, MLP):
            (plan,) = run(manager, assignment, ONE)
            assert manager.engine.lifecycle.next.plan is plan


@pytest.mark.parametrize("backend", ["cpu", LAZY_NATIVE])
def test_marks_are_left_out_under_each_assignment(backend: str) -> None:
    """[Note: Silent groups]: an assignment whose iterations are all alike needs no spare marks."""
    manager = make_manager(backend)
    run(manager, KEEP, *[ONE] * 3)
    run(manager, MLP, *[ONE] * 3)
    cache = manager.engine.lifecycle.plans
    entry = manager.engine.lifecycle.last
    assert entry is not None
    assert cache.is_only(entry)
    cache.note_departure()
    assert not cache.is_only(entry)
    manager.engine.change_assignment(KEEP)
    assert manager.plan is not None
    entry = manager.engine.lifecycle.last
    assert entry is not None
    assert cache.is_only(entry)


def test_what_was_held_outside_is_found_again() -> None:
    """Positions in groups stand for other storages under another assignment."""
    manager = make_manager("cpu")
    run(manager, KEEP, ONE)
    recorder = manager.engine.recorder
    recorder.held_outside.update(
        (stage, group, position)
        for stage in (0,)
        for group in range(6)
        for position in range(4)  # type: ignore[misc]
    )
    (plan,) = run(manager, MLP, ONE)
    assert plan.moved_nbytes > 0


@pytest.mark.parametrize("backend", ["cpu", LAZY_NATIVE])
def test_an_assignment_does_not_change_within_an_iteration(backend: str) -> None:
    manager = make_manager(backend)
    run(manager, KEEP, ONE, ONE)
    (chunk,) = make_chunks()
    loss = chunk(micro_batch(0), manager).sum()
    with pytest.raises(RuntimeError, match="after the schedule has returned"):
        manager.engine.change_assignment(MLP)
    manager.engine.change_assignment(KEEP)  # It is that one.
    loss.backward()
    with pytest.raises(RuntimeError, match="after the schedule has returned"):
        manager.engine.change_assignment(MLP)
    manager.reset()
    manager.engine.change_assignment(MLP)


def test_an_assignment_changes_after_an_iteration_that_failed() -> None:
    manager = make_manager("cpu")
    run(manager, KEEP, ONE)
    (chunk,) = make_chunks()
    loss = chunk(micro_batch(0), manager).sum()
    del loss
    manager.engine.change_assignment((WHOLE, WHOLE, WHOLE))
    assert manager.plan is None
