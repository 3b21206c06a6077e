# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Simulated times, against times that were worked out by hand.

One pass of three layers has nine steps. Groups 0 and 1 move; their storages of 1e6 bytes take 1 ms
at 1 GB/s. Copies out start at steps 1 and 3 and are waited for at 3 and 5; copies back start at
steps 6 (group 1) and 7 (group 0) and are waited for one step later.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from make_trace import Model, one_f_one_b, one_pass, trace_of

from megatron.slipstream.plan.build import Plan, build_plan
from megatron.slipstream.plan.check import PlanError, Rule, check_plan
from megatron.slipstream.plan.operations import EDGES, EdgeRule, OpKind
from megatron.slipstream.plan.policy import PolicyOptions
from megatron.slipstream.plan.simulate import MemoryAt, Simulation, simulate
from megatron.slipstream.plan.trace import GroupKey

MB = 10**6
LABELS = [f"own {group}" for group in range(12)]
THREE_LAYERS = build_plan(
    one_pass(Model(num_layers=3, nbytes=dict.fromkeys(LABELS, MB))), PolicyOptions()
)


def run(
    plan: Plan = THREE_LAYERS, ms: float = 1.0, d2h: float = math.inf, h2d: float = math.inf
) -> Simulation:
    """Every step takes ``ms``."""
    return simulate(plan, [ms] * len(plan.trace.steps), d2h, h2d)


def stalls(simulation: Simulation) -> dict[str, float]:
    return {str(stall.cause): stall.ms for stall in simulation.stalls}


def test_infinite_bandwidth_stalls_nothing() -> None:
    simulation = run()
    assert simulation.stalls == ()
    assert simulation.total_ms == simulation.compute_ms == 9.0
    assert simulation.d2h_busy_ms == simulation.h2d_busy_ms == 0.0


def test_a_copy_out_that_is_as_fast_as_compute_stalls_nothing() -> None:
    # Two steps of 1 ms hide a copy of 2 ms.
    simulation = run(d2h=0.5)
    assert simulation.stalls == ()
    assert simulation.total_ms == 9.0
    assert simulation.d2h_busy_ms == 4.0


def test_a_slower_copy_out_stalls_where_its_memory_is_let_go() -> None:
    # 5 ms from step 1 at 1 ms to 6 ms, waited for at 3 ms. So step 3 is at 6 ms, the next copy
    # ends at 11 ms and is waited for at 8 ms.
    simulation = run(d2h=0.2)
    assert stalls(simulation) == {"0.0.core_attn:FREE": 3.0, "0.1.core_attn:FREE": 3.0}
    assert simulation.stall_ms == 6.0
    assert simulation.total_ms == 15.0


def test_a_copy_back_that_is_as_fast_as_compute_stalls_nothing() -> None:
    simulation = run(h2d=1.0)
    assert simulation.stalls == ()
    assert simulation.h2d_busy_ms == 2.0


def test_a_slower_copy_back_stalls_at_the_use() -> None:
    # 3 ms from step 6 at 6 ms to 9 ms, waited for at 7 ms. The next starts at 7 ms behind it, ends
    # at 12 ms and is waited for when step 7, from 9 ms on, has ended at 10 ms.
    simulation = run(h2d=1 / 3)
    assert stalls(simulation) == pytest.approx({"0.1.core_attn:BU": 2.0, "0.0.core_attn:BU": 2.0})
    assert simulation.total_ms == pytest.approx(13.0)


def test_copies_of_one_direction_queue_behind_each_other() -> None:
    # With more depth both copies back start at step 6; the second ends at 12 ms all the same.
    plan = build_plan(THREE_LAYERS.trace, PolicyOptions(prefetch_depth=2))
    assert run(plan, h2d=1 / 3).total_ms == pytest.approx(13.0)


def test_the_two_directions_do_not_queue_behind_each_other() -> None:
    trace = trace_of(one_f_one_b(2, 0, 4), Model(num_layers=3, nbytes=dict.fromkeys(LABELS, MB)))
    plan = build_plan(trace, PolicyOptions(prefetch_depth=3))
    both = run(plan, d2h=1.0, h2d=0.5)
    assert both.d2h_busy_ms + both.h2d_busy_ms == pytest.approx(27.0)
    # The copies back alone are as late.
    assert stalls(both) == stalls(run(plan, h2d=0.5))


def test_a_longer_lag_hides_a_slower_copy_out() -> None:
    plan = build_plan(
        one_pass(Model(num_layers=6, nbytes=dict.fromkeys(LABELS, MB))),
        PolicyOptions(activation_offload_fraction=0.2),
    )
    patient = build_plan(plan.trace, replace(plan.options, release_lag=3))
    assert run(plan, d2h=0.2).stall_ms == 3.0
    assert run(patient, d2h=0.2).stall_ms == 0.0


def test_the_durations_are_those_of_the_steps() -> None:
    # Only the time from step 1 to step 3 hides the first copy out.
    step_ms = [100.0, 1.5, 0.5, 100.0, 100.0, 100.0, 100.0, 100.0, 100.0]
    simulation = simulate(THREE_LAYERS, step_ms, 0.2, 1.0)
    assert stalls(simulation) == {"0.0.core_attn:FREE": 3.0}
    assert simulation.compute_ms == 702.0
    assert simulation.total_ms == 705.0


def test_memory_over_time() -> None:
    buffer = 31 * 32768  # The classes above 512 KiB are 32 KiB apart.
    simulation = run(d2h=0.2)
    assert simulation.memory == (
        MemoryAt(0.0, MB, 0),
        MemoryAt(1.0, MB, buffer),
        MemoryAt(2.0, 2 * MB, buffer),
        MemoryAt(6.0, MB, 2 * buffer),
        MemoryAt(7.0, 2 * MB, 2 * buffer),
        MemoryAt(11.0, MB, 2 * buffer),
        MemoryAt(12.0, 2 * MB, 2 * buffer),
        MemoryAt(13.0, 2 * MB, buffer),
        MemoryAt(14.0, MB, 0),
    )


@pytest.mark.parametrize("gb_per_s", [0.1, 1.0, math.inf])
def test_the_peaks_are_those_of_the_check_at_any_speed(gb_per_s: float) -> None:
    # Memory is let go and taken at places of the compute queue, not at times.
    simulation, facts = run(d2h=gb_per_s, h2d=gb_per_s), check_plan(THREE_LAYERS)
    assert simulation.peak_device_bytes == facts.peak_device_bytes
    assert simulation.peak_host_bytes == facts.peak_host_bytes


def test_a_wait_of_a_queue_that_waits_for_it_is_a_deadlock() -> None:
    circle = EdgeRule("circle", OpKind.COPY_OUT, OpKind.START_OUT)
    with pytest.raises(
        PlanError, match=r"stand still at 0\.0\.core_attn:D2H \(START_OUT\)"
    ) as caught:
        simulate(THREE_LAYERS, [1.0] * 9, 1.0, 1.0, (*EDGES, circle))
    assert caught.value.rule is Rule.NO_CYCLE


def test_an_empty_plan_takes_no_time() -> None:
    trace = replace(THREE_LAYERS.trace, steps=(), groups=(), storages=())
    simulation = simulate(build_plan(trace, PolicyOptions()), [], 1.0, 1.0)
    assert simulation.total_ms == simulation.stall_ms == 0.0
    assert simulation.peak_device_bytes == simulation.peak_host_bytes == 0


def test_a_plan_that_cannot_be_followed_is_not_timed() -> None:
    groups = tuple(
        replace(group, free_step=0) if group.key == GroupKey(0, 0) else group
        for group in THREE_LAYERS.groups
    )
    with pytest.raises(PlanError):
        run(replace(THREE_LAYERS, groups=groups))


@pytest.mark.parametrize(
    "step_ms, d2h, h2d, match",
    [
        ([1.0] * 8, 1.0, 1.0, "step_ms has 8 entries, the trace 9 steps"),
        ([1.0] * 8 + [-1.0], 1.0, 1.0, "negative"),
        ([1.0] * 9, 0.0, 1.0, "d2h_gb_per_s=0.0"),
        ([1.0] * 9, 1.0, -1.0, "h2d_gb_per_s=-1.0"),
        ([1.0] * 9, math.nan, 1.0, "d2h_gb_per_s=nan"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    step_ms: list[float], d2h: float, h2d: float, match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        simulate(THREE_LAYERS, step_ms, d2h, h2d)
