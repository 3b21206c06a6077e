# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Thousands of models, schedules and options: every plan is proved safe, and none deadlocks.

``SLIPSTREAM_RANDOM_PLANS`` is the number of cases, in thousands. They run in chunks, each with its
own seed, so that a chunk stays far below the time limit of a test. Most are small, since few groups
suffice for most faults; some are as large as the ranges allow within :data:`LARGE`.
"""

from __future__ import annotations

import math
import os
import random
from collections import Counter
from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings, strategies as st
from make_trace import (
    Model,
    Schedule,
    interleaved,
    one_f_one_b,
    timed,
    trace_of,
    with_saved_bytes_as_memory,
)
from random_seeds import first_seed

from megatron.slipstream.plan.actions import Plan
from megatron.slipstream.plan.build import build_plan
from megatron.slipstream.plan.candidates import PolicyOptions
from megatron.slipstream.plan.check import check_plan
from megatron.slipstream.plan.operations import derive_schedule, device_bytes
from megatron.slipstream.plan.trace import Bandwidth, Trace
from megatron.slipstream.plan.walk import simulate

NUM_PLANS = int(os.environ.get("SLIPSTREAM_RANDOM_PLANS", "1000"))
CASES_PER_CHUNK = 1_000
NUM_CHUNKS = max(1, NUM_PLANS // CASES_PER_CHUNK)
FIRST_SEED = first_seed()

SMALL, LARGE = 52, 640
"""The most groups of an iteration, in most cases and in one of :data:`LARGE_EVERY`."""
LARGE_EVERY = 40

MODULES = (
    *("attn_norm", "qkv_linear", "core_attn", "attn_proj"),
    *("mlp_norm", "expert_fc1", "moe_act"),
)


class Case(NamedTuple):
    """One drawn case. Everything else follows from ``details``, a seed."""

    pp_size: int
    pp_rank: int
    vp_size: int
    """1 is the non-interleaved schedule."""
    num_rounds: int
    """Micro-batches; with an interleaved schedule, a multiple of ``pp_size``."""
    num_layers: int
    num_modules: int
    encloses: bool
    release_lag: int
    prefetch_depth: int
    fraction: float
    delta_bytes: int
    details: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw within a budget of groups, which all factors share."""
    budget = LARGE if draw(st.integers(0, LARGE_EVERY - 1)) == LARGE_EVERY - 1 else SMALL
    pp_size = draw(st.integers(1, 8))
    pp_rank = draw(st.integers(0, pp_size - 1))
    vp_size = draw(st.integers(1, 4))
    most = 32 if vp_size == 1 else 32 // pp_size
    # A few micro-batches leave room for a model.
    num_rounds = min(most, draw(st.integers(1, 8) | st.integers(1, most)))
    num_passes = num_rounds * (1 if vp_size == 1 else vp_size * pp_size)
    while num_rounds > 1 and num_passes > budget // 6:
        num_passes -= num_passes // num_rounds
        num_rounds -= 1
    budget = max(4, budget // num_passes)
    num_layers = draw(st.integers(1, min(6, budget)))
    num_modules = draw(st.integers(1, min(7, budget // num_layers)))
    return Case(
        pp_size,
        pp_rank,
        vp_size,
        num_rounds,
        num_layers,
        num_modules,
        encloses=draw(st.booleans()),
        release_lag=draw(st.sampled_from([0, 1, 1, 2, 3, 6])),
        prefetch_depth=draw(st.sampled_from([0, 1, 1, 2, 3, 6])),
        fraction=draw(st.sampled_from([1.0, 1.0, 1.0, 0.75, 0.5, 0.1])),
        delta_bytes=draw(st.sampled_from([0, 0, 0, 0, 1, 1 << 20, 1 << 30])),
        details=draw(st.integers(0, 2**32 - 1)),
    )


def schedule_of(case: Case) -> Schedule:
    if case.vp_size == 1:
        return one_f_one_b(case.pp_size, case.pp_rank, case.num_rounds)
    num_micro_batches = case.num_rounds * case.pp_size
    return interleaved(case.pp_size, case.pp_rank, num_micro_batches, case.vp_size)


def model_of(case: Case, rng: random.Random) -> Model:
    """Own storages, some shared by neighbours or by all, held outside, or never used."""
    num_groups = case.num_layers * case.num_modules
    labels = [f"s{index}" for index in range(num_groups + 2)]

    def some(probability: float) -> list[str]:
        return [label for label in labels if rng.random() < probability]

    saves = {}
    for group in range(num_groups):
        near = labels[max(0, group - 2) : group + 3]
        saves[group] = rng.sample(near, rng.randint(0, min(3, len(near))))
    return Model(
        num_layers=case.num_layers,
        modules=MODULES[: case.num_modules],
        encloses=case.encloses,
        saves={} if rng.random() < 0.3 else saves,
        nbytes={label: rng.randint(1, 1 << rng.randint(0, 33)) for label in labels},
        one_for_all_passes=some(rng.choice([0.0, 0.1, 0.2])),
        held_outside=some(rng.choice([0.0, 0.0, 0.2])),
        without_use=[g for g in range(num_groups) if rng.random() < 0.02],
        has_output=rng.random() < 0.5,
    )


def plan_of(case: Case, rng: random.Random) -> Plan:
    trace = trace_of(schedule_of(case), model_of(case, rng), case.pp_rank)
    options = PolicyOptions(case.fraction, case.delta_bytes, case.release_lag, case.prefetch_depth)
    # Plans for a goal take many rounds, so these cases take half of the test's time.
    if rng.random() < 0.2:
        trace, options = with_times(trace, options, rng)
    plan = build_plan(trace, options)
    if rng.random() < 0.2:
        limit = int(rng.uniform(0.3, 1.0) * plan.needed_host_bytes)
        plan = build_plan(trace, replace(options, host_memory_limit_bytes=limit))
    return plan


def with_times(
    trace: Trace, options: PolicyOptions, rng: random.Random
) -> tuple[Trace, PolicyOptions]:
    """Times and memory readings for the timed planner, with or without a target."""
    step_ms = [rng.choice([0.0, 0.1, 1.0, 10.0]) for _ in trace.steps]
    trace = timed(trace, step_ms, rng.choice([0.1, 1.0, 25.0, 400.0]))
    trace = with_saved_bytes_as_memory(trace, rng.randint(0, 1 << 30))
    kind = rng.choice(["all", "all", "all", "all", "target", "overhead"])
    if kind == "target":
        peak = max((reading.peak_bytes for reading in trace.memory), default=0)
        return trace, replace(options, target_memory_bytes=int(rng.random() * peak))
    if kind == "overhead":
        return trace, replace(options, max_overhead_percent=rng.choice([0.0, 1.0, 20.0]))
    return trace, options


def assert_safe(plan: Plan) -> None:
    """Check that the plan is proved, and that the facts agree with its statements."""
    facts = check_plan(plan)
    present = device_bytes(plan.trace, ())
    with_plan = [b - absent for b, absent in zip(present, plan.absent_bytes, strict=True)]
    assert facts.peak_device_bytes == max(with_plan, default=0)
    assert min(with_plan, default=0) >= 0
    assert facts.peak_host_bytes == plan.peak_host_bytes >= max(plan.absent_bytes, default=0)


def assert_ends(plan: Plan, rng: random.Random) -> None:
    """Check that it runs to its end at any speeds, within the bounds of its work."""
    step_ms = tuple(rng.choice([0.0, 0.1, 1.0, 10.0]) for _ in plan.trace.steps)
    d2h, h2d = (rng.choice([0.1, 1.0, 25.0, 400.0, math.inf]) for _ in range(2))
    share = rng.choice([0.5, 0.8, 1.0])  # Fraction of each direction's rate while both are busy.
    bandwidth = Bandwidth(d2h, h2d, share * d2h, share * h2d)
    trace = replace(plan.trace, step_ms=step_ms, bandwidth=bandwidth)
    simulation = simulate(replace(plan, trace=trace))
    near = {"rel": 1e-9, "abs": 1e-9}
    for rate, busy_ms in ((d2h, simulation.d2h_busy_ms), (h2d, simulation.h2d_busy_ms)):
        alone_ms = plan.moved_nbytes / (rate * 1e6)
        assert busy_ms >= alone_ms - 1e-9 * alone_ms - 1e-9
        assert busy_ms <= alone_ms / share + 1e-9 * alone_ms + 1e-9
        if share == 1.0:
            assert busy_ms == pytest.approx(alone_ms, **near)
    d2h_ms, h2d_ms = simulation.d2h_busy_ms, simulation.h2d_busy_ms
    # The queues are never idle all at once, and each needs its own time.
    slack = 1e-6 * simulation.total_ms + 1e-9
    assert simulation.total_ms >= max(sum(step_ms), d2h_ms, h2d_ms) - slack
    assert simulation.total_ms <= sum(step_ms) + d2h_ms + h2d_ms + slack
    # Backward needs every copy, so compute ends last; it always computes or stalls.
    assert simulation.total_ms == pytest.approx(sum(step_ms) + simulation.stall_ms, **near)
    if math.isinf(d2h) and math.isinf(h2d):
        assert simulation.stalls == ()


def count_features(plan: Plan, seen: Counter[str]) -> None:
    """Features of the cases, so that a chunk in which nothing moves cannot pass."""
    schedule = derive_schedule(plan)
    holders = [plan.trace.storages[storage.index].holders for storage in plan.storages]
    seen["cases"] += 1
    seen["moves"] += bool(plan.storages)
    seen["shares"] += any(len(keys) > 1 for keys in holders)
    passes = [{key.chunk_pass for key in keys} for keys in holders]
    seen["shares among passes"] += any(len(indices) > 1 for indices in passes)
    seen["keeps some of a group"] += any(group.kept_storages for group in plan.groups)
    earlier = [buffer.used_before for buffer in schedule.buffers.values()]
    seen["reuses a buffer"] += any(earlier)
    seen["reuses parts of several"] += any(len(storages) > 1 for storages in earlier)
    seen["keeps for host memory"] += plan.num_kept_for_host_memory > 0
    seen["is timed"] += bool(plan.trace.step_ms)
    seen["has a target"] += bool(plan.trace.step_ms) and plan.bound is not None
    seen["is large"] += len(plan.groups) > SMALL
    acting = (step for step, due in zip(plan.trace.steps, plan.actions, strict=True) if due)
    seen["acts at the output layer"] += not all(step.is_of_group for step in acting)


@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_every_plan_is_safe_and_ends(chunk: int) -> None:
    seen: Counter[str] = Counter()

    print(f"chunk {chunk} of seed {FIRST_SEED}")

    @seed(FIRST_SEED + chunk)
    @settings(
        max_examples=CASES_PER_CHUNK,
        deadline=None,
        database=None,
        # Shrinking a plan takes long; the case as found has all that is needed to reproduce it.
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases())
    def run(case: Case) -> None:
        rng = random.Random(case.details)
        plan = plan_of(case, rng)
        assert_safe(plan)
        assert_ends(plan, rng)
        count_features(plan, seen)

    run()
    print(f"chunk {chunk}: {dict(seen)}")
    assert seen["cases"] >= CASES_PER_CHUNK
    assert seen["moves"] >= CASES_PER_CHUNK // 2
    for feature, least in (
        ("shares", 50),
        ("shares among passes", 1),
        ("keeps some of a group", 50),
        ("reuses a buffer", 50),
        ("reuses parts of several", 10),
        ("keeps for host memory", 20),
        ("is timed", 150),
        ("has a target", 40),
        ("is large", 4),
        ("acts at the output layer", 15),
    ):
        assert seen[feature] >= least, feature
