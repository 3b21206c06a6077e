# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The physical bound of hand-made traces."""

from __future__ import annotations

from dataclasses import replace

import pytest
from make_trace import DEFAULT_NBYTES, Model, one_f_one_b, one_pass, trace_of

from megatron.slipstream.plan.bound import phases, physical_bound_ms
from megatron.slipstream.plan.build import build_plan
from megatron.slipstream.plan.policy import PolicyOptions
from megatron.slipstream.plan.trace import Bandwidth, Trace

# A thousand bytes take 1 ms to the host and 2 ms to the device.
BANDWIDTH = Bandwidth(1e-3, 0.5e-3, 1e-9, 1e-9)
OPTIONS = PolicyOptions()


def timed(trace: Trace, ms: float) -> Trace:
    return replace(trace, step_ms=(ms,) * len(trace.steps), bandwidth=BANDWIDTH)


def test_phases_are_runs_of_forward_and_backward_marks() -> None:
    # Two micro-batches of two layers on the last stage: F B F B.
    trace = timed(trace_of(one_f_one_b(1, 0, 2), Model(num_layers=2)), 1.0)
    found = phases(trace)
    assert [phase.is_forward for phase in found] == [True, False, True, False]
    assert [phase.first_step for phase in found] == [0, 4, 6, 10]
    assert [phase.compute_ms for phase in found] == [4, 2, 4, 2]
    assert [phase.d2h_bytes for phase in found] == [2 * DEFAULT_NBYTES, 0, 2 * DEFAULT_NBYTES, 0]
    assert [phase.h2d_bytes for phase in found] == [0, 2 * DEFAULT_NBYTES, 0, 2 * DEFAULT_NBYTES]


def test_bound_is_compute_where_copies_are_shorter() -> None:
    trace = timed(one_pass(Model(num_layers=2)), 10.0)
    assert physical_bound_ms(trace) == pytest.approx(sum(trace.step_ms))


def test_bound_is_the_copies_where_compute_is_shorter() -> None:
    trace = timed(one_pass(Model(num_layers=2)), 0.001)
    assert physical_bound_ms(trace) == pytest.approx(2 * 1.0 + 2 * 2.0)


def test_each_phase_has_its_own_maximum() -> None:
    # Four steps of compute in forward exceed its copies, two in backward do not.
    trace = timed(one_pass(Model(num_layers=2)), 0.75)
    assert physical_bound_ms(trace) == pytest.approx(4 * 0.75 + 2 * 2.0)


def test_a_plan_is_bound_by_what_it_moves_only() -> None:
    trace = timed(one_pass(Model(num_layers=4)), 0.001)
    plan = build_plan(trace, OPTIONS)
    moved = plan.moved_nbytes
    assert 0 < moved < 4 * DEFAULT_NBYTES
    assert sum(phase.d2h_bytes for phase in phases(plan)) == moved
    assert sum(phase.h2d_bytes for phase in phases(plan)) == moved
    assert physical_bound_ms(plan) == pytest.approx(3.0 * moved / DEFAULT_NBYTES)


def test_shared_storages_count_once_and_those_held_outside_not_at_all() -> None:
    model = Model(num_layers=2, saves={0: ["shared"], 1: ["shared", "held"]}, held_outside=["held"])
    (forward, backward) = phases(timed(one_pass(model), 1.0))
    assert forward.d2h_bytes == backward.h2d_bytes == DEFAULT_NBYTES


def test_a_group_that_backward_never_reaches_counts_nothing() -> None:
    model = Model(num_layers=2, without_use=[0])
    (forward, backward) = phases(timed(one_pass(model), 1.0))
    assert forward.d2h_bytes == backward.h2d_bytes == DEFAULT_NBYTES


def test_without_times_or_bandwidth_there_is_no_bound() -> None:
    trace = one_pass(Model())
    with pytest.raises(ValueError, match="no compute times"):
        physical_bound_ms(replace(trace, bandwidth=BANDWIDTH))
    with pytest.raises(ValueError, match="no bandwidth"):
        physical_bound_ms(replace(trace, step_ms=(1.0,) * len(trace.steps)))
