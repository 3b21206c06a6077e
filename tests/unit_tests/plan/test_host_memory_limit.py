# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A plan uses no more host memory at once than the limit, and keeps no group without need."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from make_trace import Model, interleaved, keys, one_f_one_b, one_pass, timed, trace_of

from megatron.slipstream.plan.actions import Plan
from megatron.slipstream.plan.build import build_plan
from megatron.slipstream.plan.candidates import (
    HELD_BY_KEPT,
    HOST_MEMORY,
    PolicyOptions,
)
from megatron.slipstream.plan.check import check_plan
from megatron.slipstream.plan.host_layout import size_class_bytes
from megatron.slipstream.plan.trace import GroupKey, Trace, bytes_by_step

BUFFER = 8192
"""Buffer size of every storage without another size."""
SIZES = {f"own {group}": BUFFER for group in range(64)}


def plan(trace: Trace, limit_bytes: int | None, **options: int) -> Plan:
    return build_plan(trace, PolicyOptions(host_memory_limit_bytes=limit_bytes, **options))


def kept(plan: Plan) -> set[GroupKey]:
    return {group.key for group in plan.groups if group.reason == HOST_MEMORY}


def moving(plan: Plan) -> set[GroupKey]:
    return {group.key for group in plan.groups if group.moves}


EIGHT_LAYERS = one_pass(Model(num_layers=8, nbytes=SIZES))
"""Seven groups move, and all of them are on the host when forward ends."""


def test_a_limit_that_suffices_changes_nothing_but_itself() -> None:
    free, limited = plan(EIGHT_LAYERS, None), plan(EIGHT_LAYERS, 7 * BUFFER)
    assert limited.groups == free.groups
    assert limited.storages == free.storages


@pytest.mark.parametrize("num_fitting", range(7))
@pytest.mark.parametrize("spare_bytes", [0, BUFFER - 1])
def test_the_groups_whose_backward_comes_soonest_stay(num_fitting: int, spare_bytes: int) -> None:
    limited = plan(EIGHT_LAYERS, num_fitting * BUFFER + spare_bytes)
    # The last layers of a forward pass are the first of its backward.
    assert moving(limited) == keys(0, range(num_fitting))
    assert kept(limited) == keys(0, range(num_fitting, 7))
    assert limited.num_kept_for_host_memory == 7 - num_fitting
    assert limited.peak_host_bytes == num_fitting * BUFFER
    assert limited.needed_host_bytes == 7 * BUFFER


def test_a_timed_plan_keeps_to_the_limit_too() -> None:
    trace = timed(EIGHT_LAYERS, 1.0, 1.0)
    assert plan(trace, None).peak_host_bytes > 3 * BUFFER
    limited = plan(trace, 3 * BUFFER)
    check_plan(limited)
    assert 0 < limited.peak_host_bytes <= 3 * BUFFER
    assert kept(limited)


def test_host_memory_is_counted_in_whole_buffers() -> None:
    odd = BUFFER + 1
    assert size_class_bytes(odd) > odd
    trace = one_pass(Model(num_layers=4, nbytes=dict.fromkeys(SIZES, odd)))
    assert kept(plan(trace, 3 * size_class_bytes(odd))) == set()
    assert kept(plan(trace, 3 * size_class_bytes(odd) - 1)) == keys(0, {2})


def test_host_memory_is_lent_from_the_copy_out_until_the_copy_back_starts() -> None:
    free = plan(one_pass(Model(num_layers=3, nbytes=SIZES)), None)
    # Groups 0 and 1 are copied out at steps 1 and 3, and back at steps 7 and 6.
    intervals = [(s.d2h_step, s.h2d_step, size_class_bytes(s.nbytes)) for s in free.storages]
    in_use = bytes_by_step(len(free.trace.steps), intervals)
    assert [nbytes // BUFFER for nbytes in in_use] == [0, 1, 1, 2, 2, 2, 1, 0, 0]


def test_memory_that_has_come_back_serves_the_next_micro_batch() -> None:
    # With one stage each micro-batch is reloaded before the next one starts.
    trace = trace_of(one_f_one_b(1, 0, 4), Model(num_layers=4, nbytes=SIZES))
    assert kept(plan(trace, 3 * BUFFER)) == set()
    assert kept(plan(trace, 2 * BUFFER)) == {GroupKey(index, 2) for index in range(4)}


def test_in_a_pipeline_every_micro_batch_keeps_as_many() -> None:
    trace = trace_of(one_f_one_b(4, 0, 12), Model(num_layers=6, nbytes=SIZES))
    free = plan(trace, None)
    limited = plan(trace, free.needed_host_bytes // 2)
    numbers = [sum(key.chunk_pass == index for key in kept(limited)) for index in range(12)]
    # Micro-batches that are followed by another one; the last ones run while the pipeline drains.
    assert max(numbers[:8]) - min(numbers[:8]) <= 1
    assert sum(numbers) > 0


def test_a_group_that_stays_keeps_its_storage_from_others() -> None:
    # Groups 5 and 6 hold one storage. Group 5 copies it out, and has no room.
    trace = one_pass(Model(num_layers=8, saves={5: ("x",), 6: ("x",)}, nbytes={**SIZES, "x": 8192}))
    limited = plan(trace, 5 * BUFFER)
    assert limited.group_by_key[GroupKey(0, 5)].reason == HOST_MEMORY
    assert limited.group_by_key[GroupKey(0, 6)].reason == HELD_BY_KEPT
    assert moving(limited) == keys(0, range(5))


def test_a_group_without_host_memory_at_the_peak_is_not_kept_for_it() -> None:
    trace = trace_of(one_f_one_b(1, 0, 2), Model(num_layers=4, nbytes=SIZES))
    small = dataclasses.replace(
        trace,
        storages=tuple(
            dataclasses.replace(storage, nbytes=4096 if storage.holders[0].chunk_pass else BUFFER)
            for storage in trace.storages
        ),
    )
    assert {key.chunk_pass for key in kept(plan(small, 2 * BUFFER))} == {0}


def test_what_other_policies_keep_needs_no_host_memory() -> None:
    options = PolicyOptions(activation_offload_fraction=0.5, host_memory_limit_bytes=4 * BUFFER)
    limited = build_plan(EIGHT_LAYERS, options)
    assert limited.needed_host_bytes == 4 * BUFFER
    assert kept(limited) == set()


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    pipeline=st.sampled_from([(pp, rank) for pp in (1, 2, 4) for rank in range(pp)]),
    vp_size=st.integers(1, 3),
    num_layers=st.integers(1, 3),
    share=st.floats(0.0, 1.2),
    lag=st.integers(0, 3),
    depth=st.integers(0, 3),
    seed=st.integers(0, 1 << 20),
)
def test_no_plan_lends_more_than_its_limit(
    pipeline: tuple[int, int],
    vp_size: int,
    num_layers: int,
    share: float,
    lag: int,
    depth: int,
    seed: int,
) -> None:
    rng = random.Random(seed)
    labels = "abcdefgh"
    groups = range(2 * num_layers)
    model = Model(
        num_layers=num_layers,
        modules=("core_attn", "attn_proj"),
        saves={g: rng.sample(labels, rng.randint(1, 3)) for g in groups if rng.random() < 0.7},
        nbytes={label: rng.randint(1, 1 << 20) for label in labels},
        one_for_all_passes=rng.sample(labels, rng.randint(0, 1)),
    )
    pp_size, pp_rank = pipeline
    schedule = (
        one_f_one_b(pp_size, pp_rank, 2 * pp_size)
        if vp_size == 1
        else interleaved(pp_size, pp_rank, pp_size, vp_size)
    )
    trace = trace_of(schedule, model)
    free = plan(trace, None, release_lag=lag, prefetch_depth=depth)
    limit_bytes = int(share * free.needed_host_bytes)
    limited = plan(trace, limit_bytes, release_lag=lag, prefetch_depth=depth)
    assert limited.needed_host_bytes == free.needed_host_bytes == free.peak_host_bytes
    # The pool's own figure, from following the plan step by step.
    assert check_plan(limited).peak_host_bytes == limited.peak_host_bytes <= limit_bytes
    assert moving(limited) <= moving(free)
    assert (kept(limited) == set()) == (limit_bytes >= free.needed_host_bytes)


def test_a_large_iteration_is_decided_in_little_time() -> None:
    """Ten thousand groups, most of which stay: a quadratic decision would take minutes."""
    trace = trace_of(one_f_one_b(4, 0, 64), Model(num_layers=160))
    assert plan(trace, 100 * size_class_bytes(1)).num_kept_for_host_memory > 9000
