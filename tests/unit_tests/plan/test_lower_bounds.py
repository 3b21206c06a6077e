# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The physical bound of hand-made traces. ``test_search`` tests that no plan is below it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from make_trace import Model, one_f_one_b, one_pass, trace_of, with_saved_bytes_as_memory

from megatron.slipstream.plan.actions import Plan
from megatron.slipstream.plan.build import build_plan
from megatron.slipstream.plan.candidates import PolicyOptions
from megatron.slipstream.plan.lower_bounds import physical_bound_ms
from megatron.slipstream.plan.trace import Bandwidth, MemoryReading, Trace
from megatron.slipstream.plan.walk import simulate

# A thousand bytes take 1 ms to the host and 2 ms to the device.
BANDWIDTH = Bandwidth(1e-3, 0.5e-3, 1e-9, 1e-9)
OPTIONS = PolicyOptions()


def timed(trace: Trace, step_ms: float | Sequence[float]) -> Trace:
    each = step_ms if isinstance(step_ms, Sequence) else [step_ms] * len(trace.steps)
    return replace(trace, step_ms=tuple(each), bandwidth=BANDWIDTH)


def three_layers(
    nbytes: tuple[int, int], loss_ms: float, first_backward_ms: float, micro_batches: int = 1
) -> Trace:
    """Layers of 1 ms and a loss, during which memory is at its peak.

    Groups 0 and 1 can move: they commit 2.0 and 1.0 ms before the loss, and group 2 right
    before it. After the last layer's backward all others have time.
    """
    sizes = {f"own {group}": size for group, size in enumerate((*nbytes, 1000))}
    trace = trace_of(one_f_one_b(1, 0, micro_batches), Model(num_layers=3, nbytes=sizes))
    step_ms = [0.5] * 5 + [loss_ms, first_backward_ms, 100.0, 100.0]
    peaks = [50_000 if step == 5 else 10_000 for step in range(9)]
    memory = tuple(MemoryReading(peak, peak, 0) for peak in peaks * micro_batches)
    return replace(timed(trace, step_ms * micro_batches), memory=memory)


def moving_two(trace: Trace) -> Plan:
    plan = build_plan(trace, OPTIONS)
    assert {group.key.group for group in plan.groups if group.moves} == {0, 1}
    return plan


def waits_ms(of: Plan | Trace) -> float:
    trace = of.trace if isinstance(of, Plan) else of
    return physical_bound_ms(of) - sum(trace.step_ms)


def test_where_copies_have_time_the_bound_is_compute() -> None:
    trace = timed(one_pass(Model(num_layers=2)), 10.0)
    assert waits_ms(trace) == pytest.approx(0)


def test_what_is_away_at_the_peak_has_gone_and_has_to_come_back() -> None:
    # Without stalls. One of four groups is computed or used; in the plan, one more is copied out.
    trace = with_saved_bytes_as_memory(timed(one_pass(Model(num_layers=4)), 0.0))
    assert waits_ms(trace) == pytest.approx(3 * 1.0 + 3 * 2.0)
    assert waits_ms(build_plan(trace, OPTIONS)) == pytest.approx(2 * 1.0 + 2 * 2.0)


def test_what_commits_last_has_the_least_time_to_leave() -> None:
    # Both groups' 2.1 ms would fit into the 2.2 ms from the first one's commit to the loss's end.
    plan = moving_two(three_layers((500, 1600), loss_ms=0.2, first_backward_ms=100.0))
    assert waits_ms(plan) == pytest.approx(1.6 - (1.0 + 0.2))


def test_copies_out_come_one_after_the_other() -> None:
    # The second group's 0.9 ms would fit.
    plan = moving_two(three_layers((2000, 900), loss_ms=0.2, first_backward_ms=100.0))
    assert waits_ms(plan) == pytest.approx(2.9 - (2.0 + 0.2))


def test_what_is_used_first_has_the_least_time_to_return() -> None:
    plan = moving_two(three_layers((500, 900), loss_ms=0.2, first_backward_ms=1.0))
    assert waits_ms(plan) == pytest.approx(0.9 / 0.5 - (0.2 + 1.0))


def test_the_time_of_the_peak_serves_copies_out_or_back_but_not_both() -> None:
    # Out 1.0 + 0.4 ms of 1.6, back 0.4 + 1.0 of 3.2; the bound counts the 0.4 ms for both.
    plan = moving_two(three_layers((500, 1600), loss_ms=0.4, first_backward_ms=1.0))
    assert waits_ms(plan) == pytest.approx(1.6 + 3.2 - (1.0 + 0.4 + 1.0))


def test_a_plan_acts_at_marks_and_waits_longer() -> None:
    plan = moving_two(three_layers((500, 1600), loss_ms=0.2, first_backward_ms=100.0))
    assert simulate(plan).stall_ms == pytest.approx(1.6 - 1.0)
    assert simulate(plan).total_ms == pytest.approx(physical_bound_ms(plan) + 0.2)


def test_each_micro_batch_has_its_own_waits() -> None:
    plan = moving_two(three_layers((500, 1600), 0.2, 100.0, micro_batches=3))
    assert waits_ms(plan) == pytest.approx(3 * (1.6 - (1.0 + 0.2)))


def test_a_plan_is_bound_by_the_peak_that_it_reaches() -> None:
    # 400 bytes would be enough: the first group's copies hide.
    trace = three_layers((500, 1600), loss_ms=0.2, first_backward_ms=100.0)
    plan = build_plan(trace, PolicyOptions(target_memory_bytes=50_000 - 400))
    assert {group.key.group for group in plan.groups if group.moves} == {0}
    assert waits_ms(plan) == pytest.approx(0)
    assert waits_ms(trace) > 0


def test_what_is_held_outside_or_never_used_leaves_no_memory() -> None:
    for model in (
        Model(num_layers=2, saves={0: ["a"], 1: ["b"]}, held_outside=["a", "b"]),
        Model(num_layers=2, without_use=[0, 1]),
    ):
        assert waits_ms(timed(one_pass(model), 0.0)) == 0


def test_without_times_or_bandwidth_there_is_no_bound() -> None:
    trace = one_pass(Model())
    with pytest.raises(ValueError, match="no compute times"):
        physical_bound_ms(replace(trace, bandwidth=BANDWIDTH))
    with pytest.raises(ValueError, match="no bandwidth"):
        physical_bound_ms(replace(trace, step_ms=(1.0,) * len(trace.steps)))
