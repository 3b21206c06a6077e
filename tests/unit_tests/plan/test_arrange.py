# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""When groups move if times are known.

The hand-made traces are one pass of ``n`` layers with one group each: group ``g`` commits at step
``2 * g + 1`` and is used at ``3 * n - 1 - g``. Every step takes 1 ms, so that step ``i`` is reached
at ``i`` ms, and a group has 1 MB: at 1 GB/s its copy takes 1 ms.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st
from make_trace import Model, one_f_one_b, one_pass, timed, trace_of

from megatron.slipstream.plan.arrange import Timing, arrange, margin_ms, replay
from megatron.slipstream.plan.build import build_plan
from megatron.slipstream.plan.candidates import HELD_BY_KEPT, NOT_WORTH_THE_WAIT, PolicyOptions
from megatron.slipstream.plan.check import check_plan
from megatron.slipstream.plan.model import IterationModel
from megatron.slipstream.plan.move_all import (
    MAX_SHARE_GIVEN_UP,
    MIN_SHARE_OF_COMPUTE,
    MIN_SHARE_OF_STALLS,
    TIME_FOR_MEMORY,
)
from megatron.slipstream.plan.trace import Bandwidth, GroupKey, Trace
from megatron.slipstream.plan.walk import simulate

MB = 10**6
MEGABYTES = {f"own {group}": MB for group in range(16)}


def layers(num_layers: int, gb_per_s: float = 1.0, both_gb_per_s: float = 0.0) -> IterationModel:
    model = Model(num_layers=num_layers, nbytes=MEGABYTES)
    return IterationModel(timed(one_pass(model), 1.0, gb_per_s, both_gb_per_s))


def all_but_last(iteration: IterationModel) -> frozenset[GroupKey]:
    return frozenset(group.key for group in iteration.trace.groups[:-1])


def steps_of(timing: Timing) -> dict[int, tuple[int, int]]:
    return {key.group: steps for key, steps in timing.steps.items()}


def test_memory_goes_at_the_first_step_after_the_copy_and_its_margin() -> None:
    # The copy of group 0 runs from 1 to 1.9 ms: with the margin it has ended by step 2.
    iteration = layers(4, gb_per_s=1 / 0.9)
    assert steps_of(arrange(iteration, all_but_last(iteration)))[0][0] == 2
    # It ends at exactly 2 ms, which is too close to step 2.
    iteration = layers(4)
    assert steps_of(arrange(iteration, all_but_last(iteration)))[0][0] == 3


def test_a_copy_back_starts_at_the_last_step_from_which_it_surely_arrives() -> None:
    iteration = layers(4, gb_per_s=1 / 0.9)
    steps = steps_of(arrange(iteration, all_but_last(iteration)))
    # Group 0 is used at step 11.
    assert steps[0][1] == 10
    iteration = layers(4)
    assert steps_of(arrange(iteration, all_but_last(iteration)))[0][1] == 9


def test_a_schedule_that_stalls_too_long_ends_early() -> None:
    iteration = layers(8, gb_per_s=0.3)
    moving, limit_bytes = all_but_last(iteration), 2.0 * MB
    whole = arrange(iteration, moving, limit_bytes)
    assert arrange(iteration, moving, limit_bytes, whole.stall_ms).steps == whole.steps
    ended = arrange(iteration, moving, limit_bytes, whole.stall_ms / 2)
    assert whole.stall_ms / 2 < ended.stall_ms < whole.stall_ms
    assert ended.peak_bytes == math.inf


@pytest.mark.parametrize("copy_ms, expected_ms", [(0.1, 0.05), (1.0, 0.05), (10.0, 0.5)])
def test_the_margin_is_part_of_the_copy_and_never_less_than_events_cost(
    copy_ms: float, expected_ms: float
) -> None:
    assert margin_ms(copy_ms) == pytest.approx(expected_ms)


def test_copies_queue_so_that_later_groups_leave_later() -> None:
    # 3 ms a copy, 2 ms from commit to commit: they end at 4, 7, 10, 13 ms.
    iteration = layers(8, gb_per_s=1 / 3)
    frees = [
        steps[0]
        for _, steps in sorted(steps_of(arrange(iteration, all_but_last(iteration))).items())
    ]
    assert frees[:4] == [5, 8, 11, 14]


def test_copies_back_are_early_enough_for_those_behind_them() -> None:
    # 1.9 ms a copy, 1 ms from use to use, group 0's at step 23: group 1's has to end when group
    # 0's starts, and so on.
    iteration = layers(8, gb_per_s=1 / 1.9)
    steps = steps_of(arrange(iteration, frozenset(GroupKey(0, group) for group in range(3))))
    assert [steps[group][1] for group in range(3)] == [21, 19, 17]


def test_nothing_is_waited_for_without_a_limit_where_the_link_is_fast_enough() -> None:
    iteration = layers(8, gb_per_s=2.0)
    timing = arrange(iteration, all_but_last(iteration))
    assert timing.stall_ms == 0
    assert timing.stalled == {}


def test_a_limit_makes_memory_go_before_its_copy_has_ended() -> None:
    # 3.5 ms per copy out: the last of four ends when the last group commits, at 15 ms.
    trace = layers(8).trace
    iteration = IterationModel(replace(trace, bandwidth=Bandwidth(1 / 3.5, 10.0, 1 / 3.5, 10.0)))
    moving = frozenset(GroupKey(0, group) for group in range(4))
    free = arrange(iteration, moving)
    limited = arrange(iteration, moving, limit_bytes=4 * MB)
    assert (free.peak_bytes, free.stall_ms) == (5 * MB, 0)
    assert limited.peak_bytes == 4 * MB
    assert limited.stall_ms > 0


def test_a_limit_that_cannot_be_met_gives_the_lowest_peak() -> None:
    iteration = layers(6, gb_per_s=1 / 4)
    lowest = (iteration.present_bytes - iteration.most_absent_bytes(all_but_last(iteration))).max()
    assert arrange(iteration, all_but_last(iteration), limit_bytes=0).peak_bytes == lowest


def test_while_both_directions_are_busy_their_lower_rates_count() -> None:
    trace = trace_of(one_f_one_b(2, 0, 4), Model(num_layers=4, nbytes=MEGABYTES))
    moving = frozenset(group.key for group in trace.groups)
    starts = []
    for both_gb_per_s in (0.6, 0.3):
        timing = arrange(IterationModel(timed(trace, 1.0, 0.6, both_gb_per_s)), moving)
        starts.append(sum(h2d for _, h2d in timing.steps.values()))
    assert starts[1] < starts[0]


# Against the simulator, which times the engine's own operations.


@st.composite
def iterations(draw: st.DrawFn) -> IterationModel:
    rng = random.Random(draw(st.integers(0, 2**32)))
    num_layers, modules = draw(st.integers(1, 5)), ("qkv_linear", "core_attn")
    num_groups = 2 * num_layers
    labels = [f"s{index}" for index in range(num_groups)]
    saves = {
        g: rng.sample(labels[max(0, g - 1) : g + 2], rng.randint(0, 2)) for g in range(num_groups)
    }
    model = Model(
        num_layers=num_layers,
        modules=modules,
        encloses=draw(st.booleans()),
        saves={} if draw(st.booleans()) else saves,
        nbytes={label: rng.randint(1, 64 << 20) for label in labels},
        one_for_all_passes=labels[:1] if draw(st.booleans()) else (),
    )
    trace = trace_of(one_f_one_b(draw(st.integers(1, 4)), 0, draw(st.integers(1, 5))), model)
    step_ms = tuple(rng.choice([0.0, 0.3, 1.0, 7.0]) for _ in trace.steps)
    d2h, h2d = (rng.choice([1.0, 12.0, 50.0, math.inf]) for _ in range(2))
    bandwidth = Bandwidth(d2h, h2d, 0.8 * d2h, 0.7 * h2d)
    return IterationModel(replace(trace, step_ms=step_ms, bandwidth=bandwidth))


any_iteration = settings(max_examples=150, deadline=None)


def trace_without_times(trace: Trace) -> Trace:
    return replace(trace, step_ms=(), bandwidth=None)


@any_iteration
@given(iteration=iterations(), lag=st.integers(0, 3), depth=st.integers(0, 3))
def test_a_replay_takes_as_long_as_the_simulated_operations(
    iteration: IterationModel, lag: int, depth: int
) -> None:
    options = PolicyOptions(release_lag=lag, prefetch_depth=depth)
    plan = replace(build_plan(trace_without_times(iteration.trace), options), trace=iteration.trace)
    steps = {group.key: (group.free_step, group.h2d_step) for group in plan.groups if group.moves}
    timing = replay(iteration, list(steps), steps)
    assert timing.stall_ms == pytest.approx(simulate(plan).stall_ms, rel=1e-9, abs=1e-6)
    assert list(timing.absent_bytes) == list(plan.absent_bytes)


@any_iteration
@given(iteration=iterations(), share=st.floats(0.0, 1.1))
def test_an_arrangement_is_what_its_replay_finds_and_keeps_to_the_limit(
    iteration: IterationModel, share: float
) -> None:
    moving = [group.key for group in iteration.trace.groups]
    limit = share * iteration.present_bytes.max(initial=0.0)
    timing = arrange(iteration, moving, limit)
    again = replay(iteration, timing.steps.keys(), timing.steps)
    assert again.stall_ms == pytest.approx(timing.stall_ms, rel=1e-9, abs=1e-9)
    assert again.peak_bytes == timing.peak_bytes
    present = iteration.present_bytes
    lowest = (present - iteration.most_absent_bytes(moving)).max(initial=0.0)
    assert timing.peak_bytes <= max(limit, lowest)


@any_iteration
@given(iteration=iterations(), lag=st.integers(0, 2), depth=st.integers(0, 2))
def test_by_time_the_peak_is_next_to_no_higher_and_waiting_no_longer_than_by_count_but_for_memory(
    iteration: IterationModel, lag: int, depth: int
) -> None:
    options = PolicyOptions(release_lag=lag, prefetch_depth=depth)
    by_count = build_plan(trace_without_times(iteration.trace), options)
    by_count = replace(by_count, trace=iteration.trace)
    by_time = build_plan(iteration.trace, options)
    check_plan(by_time)
    counted, planned = simulate(by_count), simulate(by_time)
    # Longer waits are the cost of memory that counting does not save.
    drop_bytes = iteration.present_bytes.max(initial=0.0) - planned.peak_device_bytes
    more_bytes = counted.peak_device_bytes - planned.peak_device_bytes
    more_share = more_bytes / drop_bytes + MAX_SHARE_GIVEN_UP if more_bytes > 0 else 0.0
    price_ms = TIME_FOR_MEMORY * iteration.compute_ms * more_share
    assert planned.stall_ms <= counted.stall_ms + price_ms + 1e-5
    assert planned.peak_device_bytes <= counted.peak_device_bytes + MAX_SHARE_GIVEN_UP * (
        iteration.present_bytes.max(initial=0.0) - counted.peak_device_bytes
    )
    if counted.stall_ms <= MIN_SHARE_OF_COMPUTE * iteration.compute_ms:
        assert planned.peak_device_bytes <= counted.peak_device_bytes
    moved = {group.key for group in by_count.groups if group.moves}
    kept = {group.reason for group in by_time.groups if group.key in moved and not group.moves}
    assert kept <= {NOT_WORTH_THE_WAIT, HELD_BY_KEPT}
    if planned.stall_ms > (1 - MIN_SHARE_OF_STALLS) * counted.stall_ms:
        assert not kept
