# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A slab of the computed size suffices: the pool allocates all buffers of a plan from it."""

from __future__ import annotations

import random

import pytest
from make_trace import Model, interleaved, one_f_one_b, trace_of

from megatron.slipstream.fine_grained_activation_offload.cpu_backends import CpuBackend
from megatron.slipstream.fine_grained_activation_offload.host_pool import HostPool
from megatron.slipstream.plan.actions import Plan
from megatron.slipstream.plan.build import build_plan
from megatron.slipstream.plan.candidates import PolicyOptions
from megatron.slipstream.plan.edges import OpKind
from megatron.slipstream.plan.host_layout import slab_bytes_for
from megatron.slipstream.plan.operations import Schedule, derive_schedule


def plan_of(seed: int, num_micro_batches: int = 4) -> Plan:
    """Plans with buffers of many sizes, some shared by groups, some with longer lifetimes."""
    draw = random.Random(seed)
    pp_size, vp_size = draw.choice([(1, 1), (2, 1), (4, 1), (2, 2)])
    schedule = (
        one_f_one_b(pp_size, 0, num_micro_batches)
        if vp_size == 1
        else interleaved(pp_size, 0, num_micro_batches, vp_size)
    )
    num_groups = draw.randint(2, 6)
    labels = [f"s{index}" for index in range(2 * num_groups)]
    model = Model(
        num_layers=num_groups,
        saves={group: draw.sample(labels, draw.randint(1, 3)) for group in range(num_groups)},
        nbytes={label: draw.randint(1, 1 << draw.randint(12, 20)) for label in labels},
    )
    return build_plan(trace_of(schedule, model), PolicyOptions(release_lag=draw.randint(0, 2)))


def run(pool: HostPool, schedule: Schedule) -> None:
    """Allocate and free as the iteration does."""
    in_use = {}
    for operation in schedule.operations:
        for storage in operation.storages:
            if operation.kind is OpKind.COPY_OUT:
                buffer = schedule.buffers[storage]
                in_use[storage] = pool.allocate(buffer.stop - buffer.start)
            elif operation.kind is OpKind.COPY_IN:
                pool.free(in_use.pop(storage))


@pytest.mark.parametrize("seed", range(60))
def test_all_buffers_of_an_iteration_come_from_the_slab_again_and_again(seed: int) -> None:
    schedules = [derive_schedule(plan_of(seed)), derive_schedule(plan_of(seed + 1000, 8))]
    nbytes = slab_bytes_for([schedule.host_requests() for schedule in schedules])
    most = max(max(schedule.host_bytes) for schedule in schedules)
    assert most <= nbytes <= 1.5 * most + 1024
    pool = HostPool(CpuBackend(), limit_bytes=nbytes)
    pool.trim_to(nbytes)
    for _ in range(3):
        for schedule in schedules:
            run(pool, schedule)
    assert pool.num_slabs == 1
    assert pool.high_water_bytes == most


def test_what_lies_between_buffers_counts() -> None:
    schedules = [derive_schedule(plan_of(seed)) for seed in range(60)]
    assert any(slab_bytes_for([one.host_requests()]) > max(one.host_bytes) for one in schedules), (
        "else the sum of what is in use would do, and this would show nothing"
    )


def test_where_nothing_moves_no_host_memory_is_needed() -> None:
    plan = build_plan(plan_of(0).trace, PolicyOptions(activation_offload_fraction=0.0))
    assert slab_bytes_for([derive_schedule(plan).host_requests()]) == 0
    assert slab_bytes_for([]) == 0
