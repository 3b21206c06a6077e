# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The drop of the device peak by a plan, and each module's part of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from make_trace import Model, one_pass, with_saved_bytes_as_memory

from megatron.slipstream.plan.actions import Plan
from megatron.slipstream.plan.build import build_plan
from megatron.slipstream.plan.candidates import PolicyOptions
from megatron.slipstream.plan.peak import peak_drop, present_bytes
from megatron.slipstream.plan.trace import MemoryReading, Trace

SIZES = {"a": 1000, "b": 300}


def _plan(trace: Trace) -> Plan:
    return build_plan(trace, PolicyOptions())


@pytest.fixture
def trace() -> Trace:
    """Four layers of two modules in one pass."""
    model = Model(
        num_layers=4,
        modules=("core_attn", "mlp_norm"),
        saves={index: (f"{index}",) for index in range(8)},
        nbytes={f"{index}": SIZES["ab"[index % 2]] for index in range(8)},
    )
    return one_pass(model)


def test_the_drop_is_that_between_the_peaks(trace: Trace) -> None:
    plan = _plan(with_saved_bytes_as_memory(trace, other_bytes=5000))
    drop = peak_drop(plan)
    assert (drop.without_bytes, drop.planned_bytes) == plan.peak_bytes()
    assert sum(drop.by_module.values()) == drop.nbytes == plan.peak_drop_bytes
    assert 0 < drop.nbytes <= plan.moved_nbytes


def test_each_module_answers_for_what_is_away_at_the_peak(trace: Trace) -> None:
    # The same height at every step, so that the plan's peak is where the least is offloaded.
    level = tuple(MemoryReading(9000, 9000, 0) for _ in trace.steps)
    plan = _plan(replace(trace, memory=level))
    assert peak_drop(plan).by_module == {"core_attn": 0, "mlp_norm": 0}
    # Only one step counts: the bytes offloaded then, by module.
    step = max(range(len(trace.steps)), key=plan.absent_bytes.__getitem__)
    peak = tuple(
        MemoryReading(9000, 50_000 if at == step else 9000, 0) for at in range(len(trace.steps))
    )
    plan = replace(plan, trace=replace(trace, memory=peak))
    away = {"core_attn": 0, "mlp_norm": 0}
    for storage in plan.storages:
        if storage.gone_step(trace) <= step < storage.h2d_step:
            away[trace.groups[storage.index].name] += storage.nbytes
    assert peak_drop(plan).by_module == away
    assert sum(away.values()) == plan.absent_bytes[step] > 0


def test_what_the_peak_moves_by_is_shared_out(trace: Trace) -> None:
    plan = _plan(with_saved_bytes_as_memory(trace))
    step = plan.absent_bytes.index(max(plan.absent_bytes))
    other = 0  # Before the first commit nothing is offloaded.
    levels = [100 * (at == step) for at in range(len(trace.steps))]
    levels[step], levels[other] = 10_000, 9_000
    memory = tuple(MemoryReading(level, level, 0) for level in levels)
    drop = peak_drop(replace(plan, trace=replace(trace, memory=memory)))
    assert drop.nbytes == 1000
    assert sum(drop.by_module.values()) == 1000
    assert drop.by_module["core_attn"] > drop.by_module["mlp_norm"] > 0


def test_without_readings_it_is_that_of_saved_storages(trace: Trace) -> None:
    plan = _plan(trace)
    drop = peak_drop(plan)
    assert drop.without_bytes == 4 * 1300
    assert 0 < drop.nbytes == sum(drop.by_module.values()) <= plan.moved_nbytes


def test_a_trace_without_steps_has_no_peak() -> None:
    assert peak_drop(_plan(Trace((), (), ()))).nbytes == 0


def test_gradients_that_stay_are_there_at_every_step(trace: Trace) -> None:
    memory = tuple(
        MemoryReading(0, peak_bytes=100 + 10 * at, absent_bytes=7, peak_beside_gradients_bytes=100)
        for at in range(len(trace.steps))
    )
    plan = _plan(replace(trace, memory=memory))
    assert present_bytes(plan, 5000).tolist() == [5107.0] * len(memory)
    assert present_bytes(plan).tolist() == [107.0 + 10 * at for at in range(len(memory))]
