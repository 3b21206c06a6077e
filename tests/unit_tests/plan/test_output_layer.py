# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The output layer's marks let memory go as late as the loss needs it, and no later."""

from __future__ import annotations

from dataclasses import replace

import pytest
from make_trace import DEFAULT_NBYTES, Model, one_pass, timed, with_saved_bytes_as_memory

from megatron.slipstream.plan.build import Action, ActionKind, Plan, build_plan
from megatron.slipstream.plan.check import check_plan
from megatron.slipstream.plan.policy import PolicyOptions
from megatron.slipstream.plan.render import render_plan
from megatron.slipstream.plan.simulate import simulate
from megatron.slipstream.plan.trace import StepKind, Trace

NUM_LAYERS = 5
GB_PER_S = DEFAULT_NBYTES / 3e6  # 3 ms a storage; a layer takes 2
LOSS_BYTES = 50 * DEFAULT_NBYTES


def _trace(has_output: bool, peak_at: StepKind) -> Trace:
    """Memory is highest after a mark of the output layer; without marks, in that of both."""
    trace = one_pass(Model(num_layers=NUM_LAYERS, has_output=has_output))
    last = max(i for i, step in enumerate(trace.steps) if step.kind is not StepKind.BACKWARD_USE)
    times = [1.0] * len(trace.steps)
    at = last
    if has_output:
        times[last - 2 : last + 1] = [2.0, 3.0, 4.0]
        at = trace.step_index[peak_at, trace.steps[last].key]
    else:
        times[last] = 9.0
    trace = with_saved_bytes_as_memory(timed(trace, times, GB_PER_S))
    memory = list(trace.memory)
    peak = memory[at].peak_bytes + LOSS_BYTES
    memory[at] = replace(memory[at], peak_bytes=peak)
    return replace(trace, memory=tuple(memory))


def _plan(trace: Trace) -> Plan:
    plan = build_plan(trace, PolicyOptions())
    check_plan(plan)
    return plan


def _waits_for_room_ms(plan: Plan) -> float:
    waits = (stall for stall in simulate(plan).stalls if isinstance(stall.cause, Action))
    return sum(wait.ms for wait in waits if wait.cause.kind is ActionKind.FREE)


@pytest.mark.parametrize(
    ("peak_at", "gained_ms"), [(StepKind.OUTPUT_START, 2.0), (StepKind.OUTPUT_END, 5.0)]
)
def test_copies_run_on_until_the_output_layer_needs_the_room(
    peak_at: StepKind, gained_ms: float
) -> None:
    without, marked = (_plan(_trace(has_output, peak_at)) for has_output in (False, True))
    assert marked.peak_bytes() == without.peak_bytes()
    assert marked.moved_nbytes == without.moved_nbytes
    last = max(group.free_step for group in marked.groups if group.moves)
    assert marked.trace.steps[last].kind is peak_at
    assert _waits_for_room_ms(without) == pytest.approx(4.0)
    assert _waits_for_room_ms(marked) == pytest.approx(max(0.0, 4.0 - gained_ms))
    assert simulate(marked).stall_ms < simulate(without).stall_ms


def test_marks_of_the_output_layer_are_no_groups() -> None:
    plan = _plan(_trace(True, StepKind.OUTPUT_END))
    assert len(plan.groups) == NUM_LAYERS
    assert "output_layer" not in render_plan(plan)
    assert str(plan.trace.steps[2 * NUM_LAYERS]) == "0.output_layer:OS"
