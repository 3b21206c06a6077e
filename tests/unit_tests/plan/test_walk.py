# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Simulated times, compared with times computed by hand.

One pass of three layers has nine steps. Groups 0 and 1 move; their storages of 1e6 bytes take 1 ms
at 1 GB/s. Copies out start at steps 1 and 3 and are waited for at 3 and 5; copies back start at
steps 6 (group 1) and 7 (group 0) and are waited for one step later.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
from make_trace import Model, one_f_one_b, one_pass, trace_of

from megatron.slipstream.plan.actions import GroupPlan, Plan, StoragePlan
from megatron.slipstream.plan.build import build_plan
from megatron.slipstream.plan.candidates import PolicyOptions
from megatron.slipstream.plan.check import PlanError, SafetyProperty, check_plan
from megatron.slipstream.plan.edges import EDGES, EdgeRule, OpKind, Queue
from megatron.slipstream.plan.trace import (
    Bandwidth,
    GroupKey,
    GroupTrace,
    Step,
    StepKind,
    StorageTrace,
    Trace,
)
from megatron.slipstream.plan.walk import MemoryAt, Simulation, simulate

MB = 10**6
LABELS = [f"own {group}" for group in range(12)]
THREE_LAYERS = build_plan(
    one_pass(Model(num_layers=3, nbytes=dict.fromkeys(LABELS, MB))), PolicyOptions()
)


def measured(plan: Plan, step_ms: Sequence[float], *gb_per_s: float) -> Plan:
    """The plan with times, and with bandwidth: d2h and h2d alone, then both at once if slower."""
    bandwidth = Bandwidth(*(gb_per_s if len(gb_per_s) == 4 else 2 * gb_per_s))
    trace = replace(plan.trace, step_ms=tuple(step_ms), bandwidth=bandwidth)
    return replace(plan, trace=trace)


def run(plan: Plan = THREE_LAYERS, d2h: float = math.inf, h2d: float = math.inf) -> Simulation:
    """Every step takes 1 ms."""
    return simulate(measured(plan, [1.0] * len(plan.trace.steps), d2h, h2d))


def stalls(simulation: Simulation) -> dict[str, float]:
    return {str(stall.cause): stall.ms for stall in simulation.stalls}


FREES = {"0.0.core_attn:FREE": 3.0, "0.1.core_attn:FREE": 3.0}
USES = {"0.1.core_attn:BU": 2.0, "0.0.core_attn:BU": 2.0}


@pytest.mark.parametrize(
    "gb_per_s, expected, total_ms, busy_ms",
    [
        ({}, {}, 9.0, (0.0, 0.0)),
        # Two steps of 1 ms hide a copy of 2 ms, and one a copy of 1 ms.
        ({"d2h": 0.5}, {}, 9.0, (4.0, 0.0)),
        ({"h2d": 1.0}, {}, 9.0, (0.0, 2.0)),
        # 5 ms from step 1 at 1 ms to 6 ms, waited for at 3 ms. So step 3 is at 6 ms, the next copy
        # ends at 11 ms and is waited for at 8 ms.
        ({"d2h": 0.2}, FREES, 15.0, (10.0, 0.0)),
        # 3 ms from step 6 at 6 ms to 9 ms, waited for at 7 ms. The next starts at 7 ms behind it,
        # ends at 12 ms and is waited for when step 7, from 9 ms on, has ended at 10 ms.
        ({"h2d": 1 / 3}, USES, 13.0, (0.0, 6.0)),
    ],
)
def test_a_copy_stalls_compute_by_the_time_that_it_is_late(
    gb_per_s: dict[str, float],
    expected: dict[str, float],
    total_ms: float,
    busy_ms: tuple[float, float],
) -> None:
    simulation = run(**gb_per_s)
    assert stalls(simulation) == pytest.approx(expected)
    assert simulation.compute_ms == 9.0
    assert simulation.total_ms == pytest.approx(total_ms)
    assert simulation.stall_ms == pytest.approx(total_ms - 9.0)
    assert (simulation.d2h_busy_ms, simulation.h2d_busy_ms) == pytest.approx(busy_ms)


def test_copies_of_one_direction_queue_behind_each_other() -> None:
    # With more depth both copies back start at step 6; the second still ends at 12 ms.
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
    simulation = simulate(measured(THREE_LAYERS, step_ms, 0.2, 1.0))
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
    # Memory is released and allocated at points of the compute queue, not at times.
    simulation, facts = run(d2h=gb_per_s, h2d=gb_per_s), check_plan(THREE_LAYERS)
    assert simulation.peak_device_bytes == facts.peak_device_bytes
    assert simulation.peak_host_bytes == facts.peak_host_bytes


def test_a_wait_of_a_queue_that_waits_for_it_is_a_deadlock() -> None:
    circle = EdgeRule("circle", OpKind.COPY_OUT, OpKind.START_OUT)
    with pytest.raises(PlanError, match=r"deadlock at 0\.0\.core_attn:D2H \(START_OUT\)") as caught:
        simulate(measured(THREE_LAYERS, [1.0] * 9, 1.0, 1.0), (*EDGES, circle))
    assert caught.value.rule is SafetyProperty.NO_CYCLE


def test_an_empty_plan_takes_no_time() -> None:
    trace = replace(THREE_LAYERS.trace, steps=(), groups=(), storages=())
    simulation = simulate(measured(build_plan(trace, PolicyOptions()), [], 1.0, 1.0))
    assert simulation.total_ms == simulation.stall_ms == 0.0
    assert simulation.overhead_percent == 0.0
    assert simulation.peak_device_bytes == simulation.peak_host_bytes == 0
    assert simulation.spans == ()


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
        ([1.0] * 8, 1.0, 1.0, "step_ms has 8 entries for 9 steps"),
        ([1.0] * 8 + [-1.0], 1.0, 1.0, r"an entry -1\.0"),
        ([1.0] * 8 + [math.nan], 1.0, 1.0, "an entry nan"),
        ([1.0] * 8 + [math.inf], 1.0, 1.0, "an entry inf"),
        ([1.0] * 9, 0.0, 1.0, r"bandwidth\.d2h_gb_per_s=0\.0 must be above 0"),
        ([1.0] * 9, 1.0, -1.0, r"bandwidth\.h2d_gb_per_s=-1\.0 must be above 0"),
        ([1.0] * 9, math.nan, 1.0, r"bandwidth\.d2h_gb_per_s=nan must be above 0"),
    ],
)
def test_measurements_that_make_no_sense_are_refused(
    step_ms: list[float], d2h: float, h2d: float, match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        simulate(measured(THREE_LAYERS, step_ms, d2h, h2d))


@pytest.mark.parametrize(
    ("step_ms", "match"),
    [
        ((), r"step_ms has 0 entries .* record the trace on a GPU"),
        ((1.0,) * 9, r"bandwidth is None.* or set bandwidth with"),
    ],
)
def test_a_trace_without_measurements_says_how_to_get_them(
    step_ms: tuple[float, ...], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        simulate(replace(THREE_LAYERS, trace=replace(THREE_LAYERS.trace, step_ms=step_ms)))


# --- both directions at once ----------------------------------------------------------------------


def both_ways(d2h_ms: float, h2d_ms: float, bandwidth: Bandwidth) -> Simulation:
    """The copy back of one group and the copy out of the next start together at 100 ms."""
    keys = GroupKey(0, 0), GroupKey(1, 0)
    kinds = StepKind.FORWARD_START, StepKind.FORWARD_COMMIT, StepKind.BACKWARD_USE
    start, commit, use = (lambda key, kind=kind: Step(kind, key, "m") for kind in kinds)
    steps = (
        *(start(keys[0]), commit(keys[0]), start(keys[1]), commit(keys[1])),
        *(use(keys[0]), use(keys[1])),
    )
    sizes = (int(h2d_ms * MB), int(d2h_ms * MB))
    storages = tuple(StorageTrace(size, (key,)) for size, key in zip(sizes, keys, strict=True))
    groups = tuple(GroupTrace(key, "m", 0, (index,)) for index, key in enumerate(keys))
    trace = Trace(steps, groups, storages, step_ms=(0.0, 100.0, 0.0, 0.0, 0.0, 0.0))
    plans = (
        GroupPlan(keys[0], "m", True, "", {}, sizes[0], 1, 2, 3, 4),
        GroupPlan(keys[1], "m", True, "", {}, sizes[1], 3, 4, 5, 5),
    )
    moves = (
        StoragePlan(0, sizes[0], 1, 2, 3, 4),
        StoragePlan(1, sizes[1], 3, 4, 5, 5),
    )
    plan = Plan(replace(trace, bandwidth=bandwidth), PolicyOptions(), plans, moves)
    check_plan(plan)
    return simulate(plan)


def spans_of(simulation: Simulation, queue: Queue) -> list[tuple[str, float, float]]:
    found = [span for span in simulation.spans if span.queue is queue]
    return [(span.action, span.start_ms, span.end_ms) for span in found]


def test_both_directions_at_once_run_at_the_lower_rates() -> None:
    # Both start at 100 ms. At half of the rates 4 ms of work take 8 ms.
    simulation = both_ways(4.0, 4.0, Bandwidth(1.0, 1.0, 0.5, 0.5))
    assert spans_of(simulation, Queue.H2D)[0] == ("0.0.m:H2D", 100.0, 108.0)
    assert spans_of(simulation, Queue.D2H)[1] == ("1.0.m:D2H", 100.0, 108.0)


@pytest.mark.parametrize(
    "d2h_ms, h2d_ms, d2h_end, h2d_end",
    [
        # H2D runs at half its rate until it ends at 104; by then D2H has copied 3 of its 6.
        (6.0, 2.0, 107.0, 104.0),
        # D2H runs at three quarters of its rate until it ends at 104, H2D has copied 2 of its 7.
        (3.0, 7.0, 104.0, 109.0),
    ],
)
def test_the_rate_rises_when_the_other_direction_ends(
    d2h_ms: float, h2d_ms: float, d2h_end: float, h2d_end: float
) -> None:
    simulation = both_ways(d2h_ms, h2d_ms, Bandwidth(1.0, 1.0, 0.75, 0.5))
    assert spans_of(simulation, Queue.D2H)[1][2] == pytest.approx(d2h_end)
    assert spans_of(simulation, Queue.H2D)[0][2] == pytest.approx(h2d_end)


def test_a_copy_that_starts_slows_the_one_that_runs() -> None:
    # In steady state forward's copies out meet backward's copies back, at all sorts of times.
    trace = trace_of(one_f_one_b(2, 0, 4), Model(num_layers=3, nbytes=dict.fromkeys(LABELS, MB)))
    plan = build_plan(trace, PolicyOptions(release_lag=0, prefetch_depth=3))
    times = [1.0] * len(trace.steps)
    alone = simulate(measured(plan, times, 0.3, 0.3))
    shared = simulate(measured(plan, times, 0.3, 0.3, 0.2, 0.2))
    overlap_ms = 0.0
    for out in (span for span in shared.spans if span.queue is Queue.D2H):
        both_ms = sum(
            max(0.0, min(out.end_ms, back.end_ms) - max(out.start_ms, back.start_ms))
            for back in shared.spans
            if back.queue is Queue.H2D
        )
        overlap_ms += both_ms
        # In all of them the bytes add up, whenever the other direction started or ended.
        assert out.nbytes == pytest.approx(
            (both_ms * 0.2 + (out.end_ms - out.start_ms - both_ms) * 0.3) * MB
        )
    assert overlap_ms > 1.0
    assert shared.total_ms > alone.total_ms


# --- times of operations --------------------------------------------------------------------------


def test_spans_are_the_steps_and_the_copies() -> None:
    simulation = run(d2h=0.5, h2d=1.0)
    compute = [span for span in simulation.spans if span.queue is Queue.COMPUTE]
    assert [span.action for span in compute] == [str(step) for step in THREE_LAYERS.trace.steps]
    assert [(span.start_ms, span.end_ms, span.nbytes) for span in compute] == [
        (float(step), step + 1.0, 0) for step in range(9)
    ]
    assert spans_of(simulation, Queue.D2H) == [
        ("0.0.core_attn:D2H", 1.0, 3.0),
        ("0.1.core_attn:D2H", 3.0, 5.0),
    ]
    assert spans_of(simulation, Queue.H2D) == [
        ("0.1.core_attn:H2D", 6.0, 7.0),
        ("0.0.core_attn:H2D", 7.0, 8.0),
    ]
    assert {span.nbytes for span in simulation.spans if span.queue is not Queue.COMPUTE} == {MB}


def test_a_stall_lies_between_the_spans_of_compute() -> None:
    simulation = run(d2h=0.2)
    assert [(stall.start_ms, stall.ms) for stall in simulation.stalls] == [(3.0, 3.0), (8.0, 3.0)]
    edges = [(s.start_ms, s.end_ms) for s in simulation.spans if s.queue is Queue.COMPUTE]
    gaps = [(end, start - end) for (_, end), (start, _) in zip(edges, edges[1:], strict=False)]
    assert [gap for gap in gaps if gap[1]] == [(3.0, 3.0), (8.0, 3.0)]


def test_stalls_by_module_and_overhead() -> None:
    simulation = run(d2h=0.2)
    assert simulation.stall_ms_by_module == {"core_attn": 6.0}
    assert simulation.overhead_percent == pytest.approx(100 * 6 / 9)


def test_ten_thousand_steps_take_a_fraction_of_a_second() -> None:
    # 0.25 s on the machine that this was written on; the planner simulates dozens of plans.
    trace = trace_of(one_f_one_b(4, 0, 16), Model(100, ("core_attn", "attn_proj")))
    plan = measured(build_plan(trace, PolicyOptions()), [0.5] * len(trace.steps), 50, 50, 40, 40)
    start = time.process_time()
    simulation = simulate(plan)
    assert time.process_time() - start < 2.0
    assert len(simulation.memory) == 9600
