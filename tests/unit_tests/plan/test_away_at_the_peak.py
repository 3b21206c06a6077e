# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Before any timing, groups are offloaded at the peak, if a mark allows it."""

from __future__ import annotations

from dataclasses import replace

from make_trace import DEFAULT_NBYTES, Model, one_pass, with_saved_bytes_as_memory

from megatron.slipstream.plan.actions import Plan
from megatron.slipstream.plan.build import build_plan
from megatron.slipstream.plan.candidates import PolicyOptions
from megatron.slipstream.plan.check import check_plan
from megatron.slipstream.plan.trace import GroupKey, Step, StepKind, Trace

NUM_LAYERS = 4


def _trace(peak: tuple[StepKind, int], with_ends: bool = True) -> Trace:
    """One pass of four groups, with the peak right after one mark."""
    trace = one_pass(Model(num_layers=NUM_LAYERS))
    steps: list[Step] = []
    for step in trace.steps:
        steps.append(step)
        if step.kind is StepKind.BACKWARD_USE and with_ends:
            steps.append(step._replace(kind=StepKind.BACKWARD_END))
    trace = with_saved_bytes_as_memory(replace(trace, steps=tuple(steps)))
    memory = list(trace.memory)
    place = trace.step_index[peak[0], GroupKey(0, peak[1])]
    high = memory[place].peak_bytes + 100 * DEFAULT_NBYTES
    memory[place] = replace(memory[place], allocated_bytes=high, peak_bytes=high)
    return replace(trace, memory=tuple(memory))


def _plan(trace: Trace) -> Plan:
    plan = build_plan(trace, PolicyOptions())
    check_plan(plan)
    return plan


def test_a_copy_back_waits_for_the_end_of_the_group_that_has_the_peak() -> None:
    trace = _trace((StepKind.BACKWARD_USE, 3))
    plan = _plan(trace)
    end = trace.step_index[StepKind.BACKWARD_END, GroupKey(0, 3)]
    assert plan.group_by_key[GroupKey(0, 2)].h2d_step == end
    assert plan.peak_drop_bytes == 3 * DEFAULT_NBYTES
    # The others start where backward reaches the previous group.
    before = trace.step_index[StepKind.BACKWARD_USE, GroupKey(0, 2)]
    assert plan.group_by_key[GroupKey(0, 1)].h2d_step == before


def test_without_an_end_it_starts_at_the_use_before() -> None:
    trace = _trace((StepKind.BACKWARD_USE, 3), with_ends=False)
    plan = _plan(trace)
    use = trace.step_index[StepKind.BACKWARD_USE, GroupKey(0, 3)]
    assert plan.group_by_key[GroupKey(0, 2)].h2d_step == use
    assert plan.peak_drop_bytes == 2 * DEFAULT_NBYTES


def test_memory_goes_before_the_peak_of_the_next_group() -> None:
    trace = _trace((StepKind.FORWARD_START, 3))
    plan = _plan(trace)
    start = trace.step_index[StepKind.FORWARD_START, GroupKey(0, 3)]
    assert plan.group_by_key[GroupKey(0, 2)].free_step == start
    assert plan.peak_drop_bytes == 3 * DEFAULT_NBYTES
    # Without a peak, the copy out has the time of a whole group.
    commit = trace.step_index[StepKind.FORWARD_COMMIT, GroupKey(0, 2)]
    assert plan.group_by_key[GroupKey(0, 1)].free_step == commit
