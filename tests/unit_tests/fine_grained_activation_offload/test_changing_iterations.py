# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Iterations that are not like the one before: what is measured, planned and reported of them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Optional

import pytest
import torch
from hand_driven import LAZY_NATIVE
from host_bound import Engine, HostBound, train
from marked_group import offload_group
from timed_backend import TimedBackend
from toy_model import make_chunks, make_manager, run_schedule

from megatron.slipstream.fine_grained_activation_offload import plan_cache
from megatron.slipstream.fine_grained_activation_offload.engine import OffloadEngine
from megatron.slipstream.fine_grained_activation_offload.plan_cache import (
    Phase,
    PlanCache,
)
from megatron.slipstream.fine_grained_activation_offload.report import Report
from megatron.slipstream.integration.seam.manager import PipelineOffloadManager
from megatron.slipstream.plan.candidates import PolicyOptions
from megatron.slipstream.report_page.findings import findings


def accumulation(count: int) -> str:
    """So many micro-batches, one after another."""
    return " ".join(f"F0.{index} B0.{index}" for index in range(count))


def make_engine(options: Optional[PolicyOptions] = None) -> PipelineOffloadManager:
    return PipelineOffloadManager(OffloadEngine(TimedBackend(), options or PolicyOptions()))


def run(manager: PipelineOffloadManager, counts: list[int], num_layers: int = 3) -> None:
    chunks = make_chunks(1, num_layers)
    for count in counts:
        run_schedule(chunks, accumulation(count), manager)


def num_passes(manager: PipelineOffloadManager) -> int:
    """Of the last iteration's plan."""
    assert manager.plan is not None
    return len({group.key.chunk_pass for group in manager.plan.groups})


def problems(manager: PipelineOffloadManager) -> list[str]:
    found = findings(Report([manager.report]))
    return [finding.message for finding, _ in found if finding.severity == "warning"]


def test_an_iteration_that_departs_uses_no_measurement_up() -> None:
    manager = make_engine()
    run(manager, [4, 2, 4, 4] * 5)
    run(manager, [4] * 30)
    assert manager.plan is not None
    assert manager.plan.trace.step_ms
    assert manager.is_settled


def test_counts_that_alternate_are_planned_from_times() -> None:
    manager = make_engine()
    run(manager, [2, 4] * 30)
    for _ in range(2):
        assert manager.plan is not None
        assert manager.plan.trace.step_ms
        assert manager.is_settled
        run(manager, [2 if num_passes(manager) == 4 else 4])


def test_a_count_that_came_once_in_between_is_not_expected_again() -> None:
    manager = make_engine()
    run(manager, [4, 4, 2])
    for _ in range(4):
        run(manager, [4])
        assert manager.engine.lifecycle.next.plan is manager.plan
        assert num_passes(manager) == 4


def test_a_count_that_came_after_another_twice_is_expected_again() -> None:
    manager = make_engine()
    run(manager, [4, 2, 4, 2, 4])
    assert manager.engine.lifecycle.next is not None
    assert len({group.key.chunk_pass for group in manager.engine.lifecycle.next.plan.groups}) == 2


@pytest.mark.parametrize("backend", ["cpu-lazy", LAZY_NATIVE])
def test_no_plan_of_other_options_is_followed(backend: str) -> None:
    """Not even if an iteration departs to one, or records the same steps."""
    manager = make_manager(backend)
    enter, fraction = manager.init_model_chunk_offload_handler, 1.0

    def entering(*arguments: Any, **options: Any) -> None:
        enter(*arguments, **options, activation_offload_fraction=fraction)

    manager.init_model_chunk_offload_handler = entering  # type: ignore[method-assign]
    for fraction, counts in ((1.0, [2, 1, 2, 2]), (0.5, [2, 1, 2, 1]), (1.0, [1, 2])):
        for count in counts:
            run(manager, [count])
            assert manager.plan is not None
            assert manager.plan.options.activation_offload_fraction == fraction


def test_figures_are_those_of_the_last_iterations_plan() -> None:
    engine = Engine(HostBound(copy_ms=0.001), 1.0)
    train(engine)
    engine.finish_report()
    report = engine.report
    assert report.tried_percent is not None
    assert report.measured_ms > 0
    run(engine, [8] * 2)
    engine.finish_report()
    assert (report.measured_ms, report.tried_percent, report.step_ms) == (0.0, None, [])
    assert all(item.stall_ms == 0 for item in report.modules.values())


def test_a_plan_that_is_no_longer_followed_is_no_measure_of_what_declines() -> None:
    engine = Engine(HostBound(copy_ms=1.0), 1.0)
    train(engine)
    engine.finish_report()
    assert engine.num_moving == 0
    assert "The iteration takes longer than planned" not in problems(engine)


def test_what_declined_for_few_micro_batches_is_asked_again_for_many() -> None:
    engine = Engine(HostBound(copy_ms=1.0), 1.0)
    train(engine)
    assert engine.num_moving == 0
    num_plans = engine.report.num_plans
    run(engine, [16] * 3)
    assert engine.report.num_plans > num_plans
    assert num_passes(engine) == 16
    assert engine.num_moving > 0, "until times tell that it cannot pay either"
    train(engine, 2)
    assert engine.num_moving == 0, "what is known of three stays known"


class WithMemory(TimedBackend):
    """Its device memory can be read."""

    def memory(self) -> tuple[int, int]:
        return 1_000_000_000, 1_000_001_000

    def reset_peak_memory(self) -> None:
        pass


def test_memory_is_read_of_every_kind_of_iteration() -> None:
    manager = PipelineOffloadManager(
        OffloadEngine(WithMemory(), PolicyOptions(target_memory_bytes=10**9))
    )
    for count in (2, 4):
        run(manager, [count] * 20)
        manager.finish_report()
        assert manager.plan is not None
        assert len(manager.plan.trace.memory) == len(manager.plan.trace.steps)
        assert manager.report.planned_peak_bytes > 0
        assert not any("is not followed" in note for note in manager.plan.notes)


def test_a_pass_that_failed_before_its_first_mark_leaves_nothing() -> None:
    manager = make_manager("cpu")
    run(manager, [2] * 4)
    num_plans = manager.report.num_plans
    manager.init_model_chunk_offload_handler(0, None, None, 1)  # Out of memory in the embedding.
    run(manager, [2] * 3)
    assert manager.report.num_plans == num_plans
    assert len(manager.engine.lifecycle.plans) == 1


def test_options_that_change_within_an_iteration_lose_none_of_its_steps() -> None:
    manager = make_engine()
    chunks = make_chunks(2)
    schedule = "F0.0 F1.0 B1.0 B0.0"
    enter, fraction = manager.init_model_chunk_offload_handler, 1.0

    def entering(*arguments: Any, **options: Any) -> None:
        options["activation_offload_fraction"] = fraction
        enter(*arguments, **options)

    manager.init_model_chunk_offload_handler = entering  # type: ignore[method-assign]
    for _ in range(3):
        run_schedule(chunks, schedule, manager)
    assert manager.plan is not None
    steps = manager.plan.trace.steps

    def changing(*arguments: Any, **options: Any) -> None:
        nonlocal fraction
        fraction = 0.5 if manager.engine.now.num_steps else 1.0
        entering(*arguments, **options)

    manager.init_model_chunk_offload_handler = changing  # type: ignore[method-assign]
    run_schedule(chunks, schedule, manager)
    assert manager.plan.trace.steps == steps


@pytest.mark.parametrize("is_native", [False, True], ids=["Python", "C++"])
def test_what_a_plan_keeps_is_in_the_plan_of_an_iteration_that_departs_from_it(
    is_native: bool,
) -> None:
    """The engine does not look at what kept groups save: the plan's trace tells."""
    saved = []
    for counts in ([3], [2, 2, 3]):
        manager = PipelineOffloadManager(OffloadEngine(TimedBackend(), is_native=is_native))
        enter = manager.init_model_chunk_offload_handler
        manager.init_model_chunk_offload_handler = partial(  # type: ignore[method-assign]
            enter, activation_offload_fraction=0.5
        )
        run(manager, counts)
        plan = manager.plan
        assert plan is not None
        moving = [group.moves for group in plan.groups]
        assert True in moving
        assert False in moving
        trace = plan.trace
        saved.append(
            [[trace.storages[index].nbytes for index in group.storages] for group in trace.groups]
        )
    assert saved[0] == saved[1]


def test_a_run_that_ends_without_the_engine_tells_what_moved_with_it() -> None:
    engine = Engine(HostBound(copy_ms=0.001), 1.0)
    chunks = make_chunks(1)
    moved, seen = 0, False
    for _ in range(60):
        copied = engine.clock.num_copies
        run_schedule(chunks, accumulation(3), engine)
        is_left_out = engine.clock.num_copies == copied
        assert engine.report.is_left_out is is_left_out
        if is_left_out:
            seen = True
            assert engine.report.d2h_bytes == moved > 0
            assert "Nothing moves" not in problems(engine)
        moved = engine.report.d2h_bytes
    assert seen


def test_only_an_iteration_like_the_last_two_leaves_the_cache_as_it_is() -> None:
    manager = make_engine()
    run(manager, [1, 2])
    cache = PlanCache()
    one, two = map(cache.put, manager.engine.lifecycle.plans.plans())
    is_repeated = []
    for entry in (one, one, one, two, one, one, one):
        cache.note_order(entry, 1)
        is_repeated.append(cache.is_repeated(one, 1))
    assert is_repeated == [False, False, True, False, False, False, True]
    assert not cache.is_repeated(one, 2), "another number of passes"
    assert not cache.is_repeated(two, 1)
    plan, one.phase = one.plan, Phase.SETTLED
    assert cache.put(replace(plan)) is one, "a plan made again has the entry of the former one"
    assert one.plan is not plan
    assert one.phase is Phase.WARM_UP
    cache.forget(one)
    assert one not in cache
    assert two in cache
    cache.clear()
    assert two not in cache


def test_the_plan_that_was_used_last_is_forgotten_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_cache, "MAX_PLANS", 4)
    manager = make_engine()
    run(manager, [1] * 4, num_layers=1)
    num_plans = manager.report.num_plans
    for count in range(2, 8):
        run(manager, [count, 1], num_layers=1)
    assert manager.report.num_plans == num_plans + 6, "one for each other count"
    assert len(manager.engine.lifecycle.plans) == 4


def test_no_clock_is_kept_where_nothing_takes_time() -> None:
    manager = make_manager("cpu")
    run(manager, [2] * 12)
    assert manager.engine.lifecycle._clocks == []


def test_a_group_whose_end_departs_from_the_plan_is_released_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager = make_manager("cpu", release_lag=2)
    fallback, waiting = manager.engine.executor._fallback, []
    come_to_group = fallback.come_to_group

    def watching(*arguments: Any) -> None:
        come_to_group(*arguments)
        waiting.append([group.name for group in fallback._waiting])

    def iteration(*commits: str) -> None:
        manager.init_model_chunk_offload_handler(0, None, None, 1)
        x, marks = torch.randn(8, 8, requires_grad=True), {}
        for name in ("first", "second"):
            with offload_group(manager, name) as marks[name]:
                x = x * x
        for name in commits:
            x = marks[name].commit(x)
        x.sum().backward()
        manager.reset()

    for _ in range(2):
        iteration("first", "second")
    monkeypatch.setattr(fallback, "come_to_group", watching)
    iteration("second", "first")
    assert waiting[0] == ["second"]
