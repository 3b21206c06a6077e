# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""With marks of no group, memory is freed right before the loss and reloaded right after it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from make_trace import DEFAULT_NBYTES, Model, one_pass, timed, with_saved_bytes_as_memory

from megatron.slipstream.plan.actions import Action, ActionKind, Plan
from megatron.slipstream.plan.build import build_plan
from megatron.slipstream.plan.candidates import PolicyOptions
from megatron.slipstream.plan.check import check_plan
from megatron.slipstream.plan.lower_bounds import physical_bound_ms
from megatron.slipstream.plan.render import render_plan
from megatron.slipstream.plan.trace import StepKind, Trace
from megatron.slipstream.plan.walk import simulate

NUM_LAYERS = 5
COPY_MS = 4.5
"""Copy time of a storage in ms; a layer takes 2 ms."""
LOSS_BYTES = 50 * DEFAULT_NBYTES
MS_FROM = {
    StepKind.FORWARD_COMMIT: 2.0,  # The last one.
    StepKind.OUTPUT_START: 3.0,
    StepKind.OUTPUT_END: 4.0,
    StepKind.BACKWARD_START: 1.0,
    StepKind.OUTPUT_BACKWARD_START: 6.0,
    StepKind.OUTPUT_BACKWARD_END: 1.0,
}


def _trace(has_output: bool, peak_at: StepKind, copy_ms: float = COPY_MS) -> Trace:
    """Memory peaks after a mark of no group, or without such marks after the last commit."""
    trace = one_pass(Model(num_layers=NUM_LAYERS, has_output=has_output))
    last = 2 * NUM_LAYERS - 1
    times = [1.0] * len(trace.steps)
    at = last
    if has_output:
        times[last : last + len(MS_FROM)] = MS_FROM.values()
        at = next(i for i, step in enumerate(trace.steps) if step.kind is peak_at)
    else:
        times[last] = sum(MS_FROM.values())
    trace = with_saved_bytes_as_memory(timed(trace, times, DEFAULT_NBYTES / copy_ms / 1e6))
    memory = list(trace.memory)
    peak = memory[at].peak_bytes + LOSS_BYTES
    memory[at] = replace(memory[at], peak_bytes=peak)
    return replace(trace, memory=tuple(memory))


def _plan(trace: Trace) -> Plan:
    plan = build_plan(trace, PolicyOptions())
    check_plan(plan)
    return plan


def _waits_ms(plan: Plan) -> tuple[float, float]:
    """Bytes that must be free, and bytes to reload."""
    stalls = simulate(plan).stalls
    room = sum(
        stall.ms
        for stall in stalls
        if isinstance(stall.cause, Action) and stall.cause.kind is ActionKind.FREE
    )
    return room, sum(stall.ms for stall in stalls) - room


@pytest.mark.parametrize(
    ("peak_at", "gained_ms"),
    [
        (StepKind.OUTPUT_START, 2.0),
        (StepKind.OUTPUT_END, 5.0),
        (StepKind.BACKWARD_START, 9.0),
        (StepKind.OUTPUT_BACKWARD_START, 10.0),
    ],
)
def test_copies_run_on_until_the_loss_needs_the_room(peak_at: StepKind, gained_ms: float) -> None:
    without, marked = (_plan(_trace(has_output, peak_at)) for has_output in (False, True))
    assert marked.peak_bytes() == without.peak_bytes()
    assert marked.moved_nbytes == without.moved_nbytes
    last = max(group.free_step for group in marked.groups if group.moves)
    assert marked.trace.steps[last].kind is peak_at
    assert _waits_ms(without)[0] == pytest.approx(10.0)
    assert _waits_ms(marked)[0] == pytest.approx(max(0.0, 10.0 - gained_ms))
    assert simulate(marked).stall_ms < simulate(without).stall_ms


@pytest.mark.parametrize(
    ("peak_at", "back_at", "gained_ms"),
    [
        (StepKind.OUTPUT_END, StepKind.BACKWARD_START, 8.0),
        (StepKind.BACKWARD_START, StepKind.OUTPUT_BACKWARD_START, 7.0),
        (StepKind.OUTPUT_BACKWARD_START, StepKind.OUTPUT_BACKWARD_END, 1.0),
    ],
)
def test_copies_come_back_as_soon_as_the_loss_leaves_room(
    peak_at: StepKind, back_at: StepKind, gained_ms: float
) -> None:
    without, marked = (_plan(_trace(has_output, peak_at)) for has_output in (False, True))
    first = min(group.h2d_step for group in marked.groups if group.moves)
    assert marked.trace.steps[first].kind is back_at
    back_ms = [_waits_ms(plan)[1] for plan in (without, marked)]
    assert back_ms[0] - back_ms[1] == pytest.approx(gained_ms)


def test_the_bound_knows_better_where_the_peak_is() -> None:
    """Without the marks, the peak may be at either end of the interval between the groups."""
    plans = [_plan(_trace(has_output, StepKind.OUTPUT_START, 3.5)) for has_output in (False, True)]
    bounds = [physical_bound_ms(plan) for plan in plans]
    assert bounds[1] - bounds[0] == pytest.approx(1.0)
    assert simulate(plans[1]).total_ms == pytest.approx(bounds[1] + MS_FROM[StepKind.OUTPUT_START])


def test_these_marks_are_no_groups() -> None:
    plan = _plan(_trace(True, StepKind.OUTPUT_END))
    assert len(plan.groups) == NUM_LAYERS
    assert "output_layer" not in render_plan(plan)
    steps = [str(step) for step in plan.trace.steps[2 * NUM_LAYERS :][:5]]
    assert steps[:2] == ["0.output_layer:OS", "0.output_layer:OE"]
    assert steps[2:] == ["0.backward:BS", "0.output_layer:OB", "0.output_layer:OD"]
