# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Iterations are timed once they are warm, stalls are told apart, and the plan is made again."""

from __future__ import annotations

from typing import Optional

import pytest
from timed_backend import TimedBackend
from toy_model import SCHEDULES, all_equal, make_chunks, run_schedule

from megatron.slipstream.fine_grained_activation_offload import copy_rates
from megatron.slipstream.fine_grained_activation_offload.backend import Event, Stream
from megatron.slipstream.fine_grained_activation_offload.copy_streams import Stall
from megatron.slipstream.fine_grained_activation_offload.cpu_backends import (
    CpuBackend,
    LazyCpuBackend,
)
from megatron.slipstream.fine_grained_activation_offload.engine import OffloadEngine
from megatron.slipstream.fine_grained_activation_offload.step_clock import (
    MAX_ROUNDS,
    NUM_TIMED,
    NUM_WARMUPS,
    StepClock,
    ms_per_group,
)
from megatron.slipstream.integration.seam.manager import PipelineOffloadManager
from megatron.slipstream.plan.candidates import PolicyOptions


class TimedAdversary(TimedBackend, LazyCpuBackend):
    """The same, with copies that run as late as the waits allow."""


class CountingBackend(TimedBackend):
    """Counts how often the time is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.num_events = 0

    def timed_event(self, stream: Stream) -> Event:
        self.num_events += 1
        return super().timed_event(stream)


class ScriptedBackend(CpuBackend):
    """Each event is at the next of the given times."""

    def __init__(self, times_ms: list[float]) -> None:
        super().__init__()
        self._times_ms = iter(times_ms)

    def timed_event(self, stream: Stream) -> Event:
        return next(self._times_ms)

    def elapsed_ms(self, start: Event, stop: Event) -> Optional[float]:
        return float(stop - start)


def test_waits_for_copies_are_no_part_of_a_steps_own_time() -> None:
    backend = ScriptedBackend([0, 10, 30, 60])
    clock = StepClock(backend)
    clock.note_step()
    clock.timings.stalls.append(Stall("core_attn", 2, 5))
    clock.note_step()
    clock.timings.stalls += [Stall("moe_act", 11, 12), Stall("core_attn", 20, 27)]
    clock.note_step()
    clock.note_step()
    times = clock.read()
    assert times is not None
    assert times.step_ms == (7, 12, 30)
    assert times.stall_ms == (3, 8, 0)
    assert times.stall_ms_by_module == {"core_attn": 10, "moe_act": 1}
    assert times.total_ms == 60


def test_where_streams_have_no_time_nothing_is_read() -> None:
    clock = StepClock(CpuBackend())
    clock.note_step()
    clock.note_step()
    assert clock.read() is None


@pytest.mark.parametrize(
    "schedule, max_overhead_percent",
    [*((name, None) for name in SCHEDULES), *(("interleaved first of two", p) for p in (0.0, 1e9))],
)
def test_no_missing_wait_is_forgiven_in_plans_from_times(
    schedule: str, max_overhead_percent: Optional[float]
) -> None:
    chunks = make_chunks(2, num_layers=2)
    expected = run_schedule(chunks, SCHEDULES[schedule], None)
    options = PolicyOptions(max_overhead_percent=max_overhead_percent)
    manager = PipelineOffloadManager(OffloadEngine(TimedAdversary(), options))
    for _ in range(4 * (NUM_WARMUPS + NUM_TIMED) + 2):
        assert all_equal(expected, run_schedule(chunks, SCHEDULES[schedule], manager))
    assert manager.plan is not None
    assert manager.plan.trace.step_ms
    assert manager.report.total.num_late == 0


@pytest.mark.parametrize("schedule", ["accumulation", "1F1B first of two"])
def test_the_plan_is_made_again_from_times_and_still_right(schedule: str) -> None:
    chunks = make_chunks(1)
    expected = run_schedule(chunks, SCHEDULES[schedule], None)
    manager = PipelineOffloadManager(OffloadEngine(TimedBackend()))
    recorded = 1
    for iteration in range(recorded + NUM_WARMUPS + NUM_TIMED + 3):
        assert all_equal(expected, run_schedule(chunks, SCHEDULES[schedule], manager))
        assert manager.plan is not None
        is_timed = iteration + 1 >= recorded + NUM_WARMUPS + NUM_TIMED
        assert (len(manager.plan.trace.step_ms) > 0) is is_timed
    assert manager.plan.trace.bandwidth is not None
    assert all(rate > 0 for rate in manager.plan.trace.bandwidth)
    assert 2 <= manager.report.num_plans <= 4
    assert manager.report.planned_ms > 0
    assert manager.report.total.d2h_copies > 0


def test_what_the_device_has_not_ended_is_read_later() -> None:
    chunks = make_chunks(1)
    backend = TimedBackend()
    manager = PipelineOffloadManager(OffloadEngine(backend))
    backend.has_come = False
    for _ in range(12):
        run_schedule(chunks, SCHEDULES["accumulation"], manager)
    assert manager.plan is not None
    assert manager.plan.trace.step_ms == ()
    backend.has_come = True
    run_schedule(chunks, SCHEDULES["accumulation"], manager)
    assert len(manager.plan.trace.step_ms) == len(manager.plan.trace.steps)


def test_once_plans_are_settled_nothing_is_timed() -> None:
    chunks = make_chunks(1)
    backend = CountingBackend()
    manager = PipelineOffloadManager(OffloadEngine(backend))
    for _ in range((MAX_ROUNDS + 3) * (NUM_WARMUPS + NUM_TIMED)):
        if manager.is_settled:
            break
        run_schedule(chunks, SCHEDULES["accumulation"], manager)
    assert manager.is_settled
    assert manager.report.total.d2h_copies > 0
    assert backend.num_events > 0
    backend.num_events = 0
    run_schedule(chunks, SCHEDULES["accumulation"], manager)
    assert backend.num_events == 0


def test_an_iteration_that_departs_is_not_taken_for_its_plans_time() -> None:
    chunks = make_chunks(1)
    manager = PipelineOffloadManager(OffloadEngine(TimedBackend()))
    for _ in range(6):
        run_schedule(chunks, SCHEDULES["accumulation"], manager)
        run_schedule(chunks, SCHEDULES["1F1B first of two"], manager)
    for entry in manager.engine.lifecycle.plans._entries.values():
        assert len(entry.plan.trace.step_ms) in (0, len(entry.plan.trace.steps))


def test_the_report_tells_stalls_by_module() -> None:
    chunks = make_chunks(1)
    manager = PipelineOffloadManager(OffloadEngine(TimedBackend()))
    for _ in range(NUM_WARMUPS + 3):
        run_schedule(chunks, SCHEDULES["accumulation"], manager)
    manager.finish_report()
    assert manager.report.measured_ms > 0
    assert any(counters.stall_ms > 0 for counters in manager.report.modules.values())


def test_what_a_group_costs_is_the_slope_between_plans_that_differ_enough() -> None:
    assert ms_per_group([(70, 200.0)]) == 0
    assert ms_per_group([(70, 200.0), (66, 190.0)]) == 0
    assert ms_per_group([(70, 200.0), (20, 175.0)]) == pytest.approx(0.5)
    assert ms_per_group([(70, 200.0), (20, 205.0)]) == 0, "noise, or waits that cool the device"
    assert ms_per_group([(70, 200.0), (20, 175.0), (0, 165.0)]) == pytest.approx(0.5)


def test_plans_that_move_nearly_as_much_do_not_tell_what_a_group_costs() -> None:
    assert ms_per_group([(92, 455.0), (83, 430.0)]) == 0
    assert ms_per_group([(92, 455.0), (69, 430.0)]) == pytest.approx(25 / 23)
    assert ms_per_group([(92, 455.0), (60, 290.0)]) == 0, "without groups: less than no time"


def test_no_memory_is_pinned_for_a_measurement_alone() -> None:
    class SmallSlabs(TimedBackend):
        host_slab_bytes = CpuBackend.host_slab_bytes

    chunks = make_chunks(1)
    manager = PipelineOffloadManager(OffloadEngine(SmallSlabs()))
    for _ in range(NUM_WARMUPS + NUM_TIMED + 3):
        run_schedule(chunks, SCHEDULES["accumulation"], manager)
    assert manager.plan is not None
    assert manager.plan.trace.bandwidth is None
    assert manager.store.host_pool.allocated_bytes < copy_rates.BANDWIDTH_NBYTES
