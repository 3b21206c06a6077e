# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""When a plan is measured, and when it is good enough."""

from __future__ import annotations

from dataclasses import replace

import pytest
from make_trace import DEFAULT_NBYTES, Model, one_pass, timed, with_saved_bytes_as_memory
from timed_backend import TimedBackend

from megatron.slipstream.fine_grained_activation_offload.cost_trial import (
    MARGIN,
    MIN_PAIRS,
    CostTrial,
)
from megatron.slipstream.fine_grained_activation_offload.engine import OffloadEngine
from megatron.slipstream.fine_grained_activation_offload.plan_cache import Phase, PlanEntry
from megatron.slipstream.fine_grained_activation_offload.step_clock import (
    MAX_ROUNDS,
    NUM_TIMED,
    NUM_WARMUPS,
    Times,
)
from megatron.slipstream.integration.seam.manager import PipelineOffloadManager
from megatron.slipstream.plan.actions import Plan
from megatron.slipstream.plan.build import build_plan
from megatron.slipstream.plan.candidates import PolicyOptions
from megatron.slipstream.plan.trace import Bandwidth, MemoryReading
from megatron.slipstream.plan.walk import simulate

PLANNED_MS = 100.0


def _plan() -> Plan:
    trace = with_saved_bytes_as_memory(one_pass(Model(num_layers=4)), 10_000)
    return build_plan(trace, PolicyOptions())


def _followed(plan: Plan, ms: float, peak_share: float) -> PlanEntry:
    """A plan made from times, and what following it took."""
    peaks = plan.peak_bytes()
    assert peaks is not None
    peak = round(peaks[1] * peak_share)
    readings = tuple(MemoryReading(peak, peak, 0) for _ in plan.trace.steps)
    entry = PlanEntry(plan, plan.trace.steps_key, planned_ms=PLANNED_MS, num_rounds=1)
    entry.times = [Times((ms,), (), {})] * 3
    entry.memory = readings
    return entry


@pytest.mark.parametrize(
    "ms, peak_share, is_as_predicted",
    [(100.0, 1.0, True), (103.0, 1.0, False), (100.0, 1.01, False), (100.0, 0.99, False)],
)
def test_a_plan_is_good_enough_if_time_and_peak_are_what_it_said(
    ms: float, peak_share: float, is_as_predicted: bool
) -> None:
    assert _followed(_plan(), ms, peak_share).is_as_predicted is is_as_predicted


def test_without_a_reading_time_decides_alone() -> None:
    assert replace(_followed(_plan(), 100.0, 1.5), memory=()).is_as_predicted


@pytest.mark.parametrize(("num_trials", "counts_waits"), [(1, False), (2, True)])
def test_waits_that_a_plan_foresaw_are_no_cost_of_its_groups_at_first(
    num_trials: int, counts_waits: bool
) -> None:
    off_ms, percent = 100.0, 30.0
    trace = one_pass(Model(num_layers=8))
    trace = timed(trace, off_ms / len(trace.steps), DEFAULT_NBYTES / 12e6)
    trace = with_saved_bytes_as_memory(trace, 10_000)
    options = PolicyOptions(max_overhead_percent=20.0)
    plan = build_plan(trace, options)
    waits_ms = simulate(plan).stall_ms
    assert 5 < waits_ms <= 20
    trial = CostTrial(20.0)
    for _ in range(MIN_PAIRS + 1):
        trial.note_with(off_ms * (1 + percent / 100))
        trial.note_without(off_ms)
    manager = PipelineOffloadManager(OffloadEngine(TimedBackend(), options))
    lifecycle = manager.engine.lifecycle
    entry = lifecycle.plans.put(plan)
    entry.planned_ms, entry.num_trials = PLANNED_MS, num_trials
    num_moving = entry.num_moving
    lifecycle._leave_trial(entry, trial, is_affordable=False)
    assert entry in lifecycle.plans
    costs_ms = (1 + MARGIN) * (percent - (0 if counts_waits else waits_ms))
    assert entry.plan.trace.ms_per_moved_group == pytest.approx(costs_ms / num_moving)
    moved_gb = plan.moved_nbytes / 1e9
    assert entry.plan.trace.ms_per_moved_gb == pytest.approx(costs_ms / moved_gb)
    assert entry.num_trials == num_trials


def test_times_of_replays_replace_those_of_iterations() -> None:
    """Eager iterations of another plan are no measure of what a group costs in a graph."""
    manager = PipelineOffloadManager(OffloadEngine(TimedBackend()))
    trace = one_pass(Model(num_layers=4))
    manager.engine.lifecycle.planner._bandwidth = Bandwidth(50.0, 40.0, 50.0, 40.0)
    entry = manager.engine.lifecycle.planner.make(trace)
    entry.num_rounds, entry.earlier = MAX_ROUNDS, ((0, 1e-3),)
    entry.times = [Times((1e3,) * len(trace.steps), (), {})]
    times = [Times((3.0,) * len(trace.steps), (), {})] * NUM_TIMED
    num_moving = entry.num_moving
    manager.engine.lifecycle.last = entry
    manager.engine.lifecycle.plan_for_replays(times)
    trace = entry.plan.trace
    assert set(trace.step_ms) == {3.0}
    assert trace.ms_per_moved_group == 0.0
    assert entry.earlier == ((num_moving, pytest.approx(3.0 * len(trace.steps))),)
    assert entry.num_rounds <= 1


def test_a_lower_target_needs_no_recording() -> None:
    manager = PipelineOffloadManager(OffloadEngine(TimedBackend()))
    lifecycle = manager.engine.lifecycle
    trace = timed(one_pass(Model(num_layers=8)), 100.0, 1.0)
    trace = with_saved_bytes_as_memory(trace, 10_000)
    high, low = (10_000 + share * DEFAULT_NBYTES * 8 // 10 for share in (8, 5))
    lifecycle.change_target(high)
    entry = lifecycle.next = lifecycle.last = lifecycle.planner.make(trace)
    peaks = []
    for target in (high + 1, high, low):
        lifecycle.lower_target(target)
        assert lifecycle.next is entry
        peaks.append(max(entry.plan.device_bytes))
    assert lifecycle.planner.options.target_memory_bytes == low
    assert peaks[0] == peaks[1] > low >= peaks[2]


@pytest.mark.parametrize("num_rounds", [0, 1, 2])
def test_memory_is_read_in_every_round_before_anything_is_timed(num_rounds: int) -> None:
    entry = PlanEntry(plan := _plan(), plan.trace.steps_key, num_rounds=num_rounds)
    phases = []
    for _ in range(NUM_WARMUPS + NUM_TIMED + 2):
        phases.append(entry.phase)
        entry.note_followed()
    measured = [Phase.MEMORY_READ, *[Phase.TIMED] * NUM_TIMED]
    assert phases == [Phase.WARM_UP] * (NUM_WARMUPS - 1) + measured + [Phase.TIMES_READ] * 2


@pytest.mark.parametrize("phase", [Phase.TRIAL, Phase.SETTLED, Phase.DECLINED])
def test_iterations_alone_end_no_later_phase(phase: Phase) -> None:
    entry = PlanEntry(plan := _plan(), plan.trace.steps_key, phase=phase)
    for _ in range(10):
        entry.note_followed()
    assert entry.phase is phase
