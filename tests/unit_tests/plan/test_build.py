# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The actions of a plan at each step.

Most traces here are one pass of ``n`` layers with one group each, whose steps are easily counted:
group ``g`` starts at step ``2 * g``, commits at ``2 * g + 1`` and is used at ``3 * n - 1 - g``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import replace

import pytest
from make_trace import DEFAULT_NBYTES, Model, keys, one_f_one_b, one_pass, trace_of

from megatron.slipstream.plan.actions import Plan, StoragePlan
from megatron.slipstream.plan.build import build_plan
from megatron.slipstream.plan.candidates import (
    BACKWARD_FOLLOWS,
    HELD_BY_KEPT,
    HELD_OUTSIDE,
    LINGERS,
    NO_TIME,
    PolicyOptions,
)
from megatron.slipstream.plan.check import check_plan
from megatron.slipstream.plan.trace import GroupKey, MemoryReading, StepKind, Trace


def plan_one_pass(model: Model, lag: int = 1, depth: int = 1) -> Plan:
    return build_plan(one_pass(model), PolicyOptions(release_lag=lag, prefetch_depth=depth))


def moving(plan: Plan) -> set[GroupKey]:
    return {group.key for group in plan.groups if group.moves}


def actions_by_step(plan: Plan) -> dict[int, list[str]]:
    """The actions of the steps that have any, as the text that logs and pictures show."""
    return {step: [str(action) for action in due] for step, due in enumerate(plan.actions) if due}


# One group, one storage.


def test_the_whole_plan_of_three_layers() -> None:
    plan = plan_one_pass(Model(num_layers=3))
    assert [str(step) for step in plan.trace.steps[:2]] == ["0.0.core_attn:FS", "0.0.core_attn:FC"]
    assert moving(plan) == keys(0, {0, 1})
    assert plan.group_by_key[GroupKey(0, 2)].reason == BACKWARD_FOLLOWS
    assert plan.storages == (
        StoragePlan(0, DEFAULT_NBYTES, d2h_step=1, free_step=3, h2d_step=7, use_step=8),
        StoragePlan(1, DEFAULT_NBYTES, d2h_step=3, free_step=5, h2d_step=6, use_step=7),
    )
    assert actions_by_step(plan) == {
        1: ["0.0.core_attn:D2H"],
        3: ["0.1.core_attn:D2H", "0.0.core_attn:FREE"],
        5: ["0.1.core_attn:FREE"],
        6: ["0.1.core_attn:H2D"],
        7: ["0.0.core_attn:H2D"],
    }
    assert plan.moved_nbytes == 2 * DEFAULT_NBYTES
    assert plan.absent_bytes == tuple(DEFAULT_NBYTES * num for num in (0, 0, 0, 1, 1, 2, 1, 0, 0))


@pytest.mark.parametrize("lag", [0, 1, 2, 3])
def test_memory_is_let_go_release_lag_commits_after_its_own(lag: int) -> None:
    plan = plan_one_pass(Model(num_layers=8), lag=lag)
    first = plan.group_by_key[GroupKey(0, 0)]
    assert plan.trace.steps[first.free_step].kind is StepKind.FORWARD_COMMIT
    assert plan.trace.steps[first.free_step].key == GroupKey(0, lag)


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_a_copy_back_starts_prefetch_depth_uses_ahead_of_its_own(depth: int) -> None:
    plan = plan_one_pass(Model(num_layers=8), depth=depth)
    first = plan.group_by_key[GroupKey(0, 0)]
    assert plan.trace.steps[first.h2d_step].kind is StepKind.BACKWARD_USE
    assert plan.trace.steps[first.h2d_step].key == GroupKey(0, depth)


def test_lag_and_depth_count_the_groups_of_all_passes() -> None:
    # A warm-up stage: the commits and uses of another micro-batch hide the copies of this one.
    trace = trace_of(one_f_one_b(2, 0, 2), Model(num_layers=2))
    plan = build_plan(trace, PolicyOptions(release_lag=2, prefetch_depth=2))
    last_of_first = plan.group_by_key[GroupKey(0, 1)]
    first_of_first = plan.group_by_key[GroupKey(0, 0)]
    last_of_second = plan.group_by_key[GroupKey(1, 1)]
    assert trace.steps[last_of_first.free_step].key == GroupKey(1, 1)
    assert trace.steps[first_of_first.h2d_step].key == GroupKey(0, 1)
    assert not last_of_second.moves
    assert last_of_second.reason == NO_TIME


def test_the_first_uses_copy_back_at_the_first_use_of_all() -> None:
    # There is no earlier use to start them at.
    trace = trace_of(one_f_one_b(2, 0, 2), Model(num_layers=3))
    plan = build_plan(trace, PolicyOptions(prefetch_depth=2))
    first_use = trace.step_index[StepKind.BACKWARD_USE, GroupKey(0, 2)]
    for key in sorted(keys(0, {0, 1, 2})):
        assert plan.group_by_key[key].h2d_step == first_use


def test_a_group_that_would_be_let_go_after_the_last_commit_stays() -> None:
    plan = plan_one_pass(Model(num_layers=4), lag=2)
    assert moving(plan) == keys(0, {0, 1})
    assert plan.group_by_key[GroupKey(0, 2)].reason == NO_TIME


# The order of the actions of one step.


def test_without_lag_a_copy_out_comes_before_its_free() -> None:
    plan = plan_one_pass(Model(num_layers=3), lag=0)
    assert actions_by_step(plan)[1] == ["0.0.core_attn:D2H", "0.0.core_attn:FREE"]


def test_copies_back_of_one_step_come_in_the_order_of_their_use() -> None:
    # They share a stream: the copy that backward waits for must not queue behind the others.
    trace = trace_of(one_f_one_b(2, 0, 2), Model(num_layers=3))
    plan = build_plan(trace, PolicyOptions(prefetch_depth=2))
    first_use = trace.step_index[StepKind.BACKWARD_USE, GroupKey(0, 2)]
    assert actions_by_step(plan)[first_use] == [
        "0.2.core_attn:H2D",
        "0.1.core_attn:H2D",
        "0.0.core_attn:H2D",
    ]


# Storages that groups share.


def test_a_shared_storage_moves_once_for_all_its_groups() -> None:
    plan = plan_one_pass(Model(num_layers=5, saves={0: ("x",), 1: ("x", "y")}))
    (shared,) = (storage for storage in plan.storages if storage.index == 0)
    first, second = (plan.group_by_key[GroupKey(0, group)] for group in (0, 1))
    assert shared.d2h_step == first.commit_step
    assert shared.free_step == second.free_step > first.free_step
    assert shared.h2d_step == second.h2d_step < first.h2d_step
    assert shared.use_step == second.use_step < first.use_step


def test_a_shared_storage_counts_for_the_group_that_saved_it_first() -> None:
    model = Model(num_layers=4, saves={0: ("x",), 1: ("x", "y")}, nbytes={"x": 5, "y": 7})
    plan = plan_one_pass(model)
    assert [group.moved_nbytes for group in plan.groups] == [5, 7, DEFAULT_NBYTES, 0]
    assert plan.moved_nbytes == 12 + DEFAULT_NBYTES


def test_a_storage_stays_if_one_of_its_groups_stays() -> None:
    # Group 3 is the last layer; copying "x" out would free nothing.
    plan = plan_one_pass(Model(num_layers=4, saves={1: ("x", "y"), 3: ("x",)}))
    group = plan.group_by_key[GroupKey(0, 1)]
    assert group.moves
    assert group.kept_storages == {0: HELD_BY_KEPT}
    assert group.moved_nbytes == DEFAULT_NBYTES


def test_a_storage_stays_if_something_else_holds_it() -> None:
    model = Model(num_layers=3, saves={0: ("x", "y")}, held_outside=("y",))
    plan = plan_one_pass(model)
    group = plan.group_by_key[GroupKey(0, 0)]
    assert group.moves
    assert group.kept_storages == {1: HELD_OUTSIDE}
    assert [storage.index for storage in plan.storages] == [0, 2]


@pytest.mark.parametrize(
    "model, reason",
    [
        (Model(num_layers=3, saves={0: ("x",)}, held_outside=("x",)), HELD_OUTSIDE),
        (Model(num_layers=3, saves={0: ("x",), 2: ("x",)}), HELD_BY_KEPT),
    ],
    ids=["held-outside", "held-by-a-group-that-stays"],
)
def test_a_group_none_of_whose_storages_moves_stays(model: Model, reason: str) -> None:
    plan = plan_one_pass(model)
    group = plan.group_by_key[GroupKey(0, 0)]
    assert not group.moves
    assert group.reason == reason


@pytest.mark.parametrize("lag, depth", [(0, 0), (1, 1)])
def test_a_shared_storage_stays_if_it_is_needed_before_all_have_let_go(
    lag: int, depth: int
) -> None:
    # Each of the two groups alone has time to move. But the second pass releases the storage only
    # after the first pass's backward needs it.
    model = Model(num_layers=3, saves={0: ("table", "own")}, one_for_all_passes=("table",))
    options = PolicyOptions(release_lag=lag, prefetch_depth=depth)
    plan = build_plan(trace_of(one_f_one_b(1, 0, 2), model), options)
    for key in (GroupKey(0, 0), GroupKey(1, 0)):
        assert plan.group_by_key[key].moves
        assert plan.group_by_key[key].kept_storages == {0: NO_TIME}
    assert 0 not in {storage.index for storage in plan.storages}


def test_a_storage_of_all_passes_is_away_only_while_none_needs_it() -> None:
    # Both micro-batches go forward before either goes backward.
    model = Model(num_layers=3, saves={0: ("table",)}, one_for_all_passes=("table",))
    trace = trace_of(one_f_one_b(2, 0, 2), model)
    (table,) = (s for s in build_plan(trace, PolicyOptions()).storages if s.index == 0)
    assert trace.steps[table.d2h_step].key == GroupKey(0, 0)
    assert trace.steps[table.free_step].key == GroupKey(1, 1)
    assert trace.steps[table.h2d_step].key == GroupKey(0, 1)
    assert trace.steps[table.use_step].key == GroupKey(0, 0)


def test_a_group_that_encloses_others_is_let_go_after_its_own_commit() -> None:
    # megatron-core's 'attn_norm' commits after 'core_attn' although it started first.
    model = Model(num_layers=3, modules=("attn_norm", "core_attn"), encloses=True)
    plan = plan_one_pass(model)
    norm, core = (plan.group_by_key[GroupKey(0, group)] for group in (0, 1))
    assert core.commit_step < core.free_step == norm.commit_step < norm.free_step
    # Backward reaches it first, so it is reloaded first.
    assert norm.h2d_step < core.h2d_step == norm.use_step < core.use_step


# Memory.


def with_readings(trace: Trace, peaks: list[int], absent: list[int]) -> Trace:
    readings = (MemoryReading(peak, peak, away) for peak, away in zip(peaks, absent, strict=True))
    return dataclasses.replace(trace, memory=tuple(readings))


PEAKS = [10_000 + nbytes for nbytes in (0, 1000, 1000, 2000, 2000, 3300, 3000, 2000, 0)]


def test_the_planned_peak_takes_off_what_is_away_at_each_step() -> None:
    trace = with_readings(one_pass(Model(num_layers=3)), PEAKS, [0] * 9)
    plan = build_plan(trace, PolicyOptions())
    # The peak was at step 5; with 2000 bytes offloaded there, it is at step 6 or 7.
    assert plan.peak_bytes() == (13_300, 12_000)
    assert plan.peak_drop_bytes == 1_300


def test_a_recorded_iteration_that_moved_is_put_back_first() -> None:
    # The same iteration, measured while the engine had these bytes on the host.
    absent = [0, 0, 0, 900, 900, 1800, 900, 0, 0]
    read = [peak - away for peak, away in zip(PEAKS, absent, strict=True)]
    trace = with_readings(one_pass(Model(num_layers=3)), read, absent)
    assert build_plan(trace, PolicyOptions()).peak_bytes() == (13_300, 12_000)


def test_the_peak_between_steps_counts_and_not_the_level_after_them() -> None:
    readings = [MemoryReading(peak - 10_000, peak, 0) for peak in PEAKS]
    trace = dataclasses.replace(one_pass(Model(num_layers=3)), memory=tuple(readings))
    assert build_plan(trace, PolicyOptions()).peak_bytes() == (13_300, 12_000)


def test_there_is_no_peak_without_readings() -> None:
    plan = plan_one_pass(Model(num_layers=3))
    assert plan.peak_bytes() is None
    assert plan.peak_drop_bytes is None


def test_a_peak_outside_the_managed_groups_drops_by_nothing() -> None:
    trace = with_readings(one_pass(Model(num_layers=3)), [99_999] + [10_000] * 8, [0] * 9)
    assert build_plan(trace, PolicyOptions()).peak_drop_bytes == 0


# Unusual iterations.


def test_an_empty_iteration_has_an_empty_plan() -> None:
    plan = build_plan(Trace((), (), ()), PolicyOptions())
    assert (plan.groups, plan.storages, plan.actions, plan.absent_bytes) == ((), (), (), ())
    assert plan.moved_nbytes == 0


def test_a_group_that_never_committed_stays() -> None:
    trace = one_pass(Model(num_layers=4))
    steps = tuple(step for step in trace.steps if str(step) != "0.0.core_attn:FC")
    plan = build_plan(dataclasses.replace(trace, steps=steps), PolicyOptions())
    assert moving(plan) == keys(0, {1, 2})


# Memory that lingers.


def _lingering(readings: Sequence[int]) -> Plan:
    """The first group's storage is held by something else until backward begins."""
    trace = one_pass(Model(num_layers=4))
    first_use = next(i for i, s in enumerate(trace.steps) if s.kind is StepKind.BACKWARD_USE)
    storages = (replace(trace.storages[0], lingers_until=first_use), *trace.storages[1:])
    memory = tuple(MemoryReading(0, reading, 0) for reading in readings)
    return build_plan(replace(trace, storages=storages, memory=memory), PolicyOptions())


def test_what_lingers_past_the_peak_stays() -> None:
    num_steps = len(one_pass(Model(num_layers=4)).steps)
    peak_in_forward = [9000 if step < num_steps // 2 else 5000 for step in range(num_steps)]
    plan = _lingering(peak_in_forward)
    assert 0 not in {storage.index for storage in plan.storages}
    assert plan.group_by_key[GroupKey(0, 0)].reason == LINGERS


def test_what_lingers_moves_if_that_lowers_the_peak_and_counts_from_when_it_is_gone() -> None:
    trace = one_pass(Model(num_layers=4))
    first_use = next(i for i, s in enumerate(trace.steps) if s.kind is StepKind.BACKWARD_USE)
    peak_in_backward = [9000 if step == first_use else 5000 for step in range(len(trace.steps))]
    plan = _lingering(peak_in_backward)
    (storage,) = (item for item in plan.storages if item.index == 0)
    assert storage.free_step < storage.gone_step(plan.trace) == first_use
    without = replace(plan, storages=tuple(s for s in plan.storages if s.index != 0))
    at = storage.gone_step(plan.trace)
    assert plan.absent_bytes[at] == without.absent_bytes[at] + storage.nbytes
    assert plan.absent_bytes[:at] == without.absent_bytes[:at]
    check_plan(plan)
