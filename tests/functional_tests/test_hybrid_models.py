# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A ``HybridModel`` of attention, MLPs and experts with each feature: the bits of the engine off.

Packed batches and dynamic context parallelism are in test_packed_training, whole trainings with
multi-token prediction in test_pretrain, graphs in test_chunk_graphs and test_packed_layer_graphs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Optional

import pytest
from model_case import DENSE_MODULES, MOE_MODULES, ModelCase
from ranks import run_ranks
from timed_backend import take_times_on_cpu
from tiny_gpt import (
    Comparison,
    build_chunks,
    compare_on_ranks,
    first_difference,
    initialize,
    make_config,
    train,
)

from megatron.slipstream.fine_grained_activation_offload.markers import CHECKPOINT_INPUTS

HYBRID = ModelCase("hybrid")
FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "moe_act"]}
CORE_ATTENTION = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
DROPOUT = {"attention_dropout": 0.1, "hidden_dropout": 0.1}

CASES: dict[str, tuple[ModelCase, dict[str, Any]]] = {
    "sync-free experts": (replace(HYBRID, sync_free_experts=True), {}),
    "EP2": (replace(HYBRID, ep=2), {}),
    "TP2, dense": (replace(HYBRID, tp=2, pattern="*-"), {}),
    "bf16, dropout": (replace(HYBRID, bf16=True, overrides=DROPOUT), {}),
    "core attention recomputed": (replace(HYBRID, overrides=CORE_ATTENTION), {}),
    "EP2, sync-free experts": (replace(HYBRID, ep=2, sync_free_experts=True), {}),
    "PP2 VPP2, stages divided by |": (
        replace(HYBRID, pp=2, vpp=2, pattern="*-*E|*-*E|*E*-|*-*E", num_layers=16),
        {},
    ),
    "norms and activation functions recomputed": (replace(HYBRID, overrides=SELECTIVE), {}),
    "inputs of checkpoints": (replace(HYBRID, overrides=FULL), {"offload_checkpoint_inputs": True}),
}


@pytest.mark.parametrize("name", CASES)
def test_training_is_the_same_with_the_engine(name: str) -> None:
    case, offload = CASES[name]
    num_ranks, counts = max(case.pp, case.ep, case.tp), (2, 2, 4) if case.pp > 1 else (1, 2, 2)
    modules = MOE_MODULES if case.has_experts else DENSE_MODULES
    results = compare_on_ranks(num_ranks, case, modules, "cpu-lazy", counts, offload)
    assert [result.difference for result in results] == [None] * num_ranks
    for result in results:
        assert result.moved_bytes > 0
        assert result.num_late == 0
        assert (CHECKPOINT_INPUTS in result.moved_modules) == bool(offload)


def test_full_recomputation_without_moved_inputs() -> None:
    (result,) = compare_on_ranks(1, replace(HYBRID, overrides=FULL), MOE_MODULES, "cpu", (1, 2, 2))
    assert result.difference is None
    assert result.moved_bytes == 0


def _memory(case: ModelCase, modules: tuple[str, ...], **goal: Any) -> Comparison:
    counts = (1,) * (12 if goal else 3)
    (result,) = compare_on_ranks(1, case, modules, "cpu", counts, goal, True)
    assert result.difference is None
    return result


def test_a_target_for_the_peak_moves_less(monkeypatch: pytest.MonkeyPatch) -> None:
    take_times_on_cpu(monkeypatch)
    most = _memory(HYBRID, MOE_MODULES)
    target_bytes = most.reported_baseline_bytes - most.peak_drop_bytes // 2
    result = _memory(HYBRID, MOE_MODULES, offload_target_memory_gib=target_bytes / (1 << 30))
    assert result.is_timed
    assert 0 < result.moved_bytes < most.moved_bytes
    assert most.peak_drop_bytes // 2 <= result.peak_drop_bytes < most.peak_drop_bytes


SAME = {
    "dense": (ModelCase(num_layers=4), "*-", DENSE_MODULES),
    "experts": (ModelCase("moe", num_layers=4), "*E", MOE_MODULES),
}


@pytest.mark.parametrize("name", SAME)
def test_plans_are_those_of_the_same_gpt_model(name: str) -> None:
    """Its losses and gradients are in test_chunk_graphs."""
    gpt, pattern, modules = SAME[name]
    hybrid = replace(gpt, kind="hybrid", pattern=pattern, num_layers=2 * gpt.num_layers)
    ours, theirs = _memory(hybrid, modules), _memory(gpt, modules)
    for figure in ("moved_bytes", "freed_bytes", "planned_drop_bytes", "peak_drop_bytes"):
        assert getattr(ours, figure) == getattr(theirs, figure) > 0
    assert ours.moved_modules == theirs.moved_modules


def _attached(rank: int, world_size: int, port: int) -> tuple[Optional[str], int]:
    """Train without the engine and with ``attach()``; the first difference, and bytes moved."""
    from megatron.slipstream.attached.handle import attach
    from megatron.slipstream.options.fields import OffloadConfig

    initialize(HYBRID, rank, world_size, port)
    counts = (2, 2, 2)
    config = make_config(HYBRID)
    expected = train(HYBRID, config, build_chunks(HYBRID, config), counts)
    chunks = build_chunks(HYBRID, config)
    attached = attach(
        chunks[0],
        "decoder.layers.*",
        OffloadConfig(offload_backend="cpu-lazy"),
        min_offloaded_tensor_size=1,
    )
    difference = first_difference(expected, train(HYBRID, config, chunks, counts))
    return difference, attached.report().ranks[0].d2h_bytes


def test_attach() -> None:
    ((difference, moved_bytes),) = run_ranks(1, _attached)
    assert difference is None
    assert moved_bytes > 0
