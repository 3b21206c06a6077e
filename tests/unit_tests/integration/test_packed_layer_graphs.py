# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Packed sequences in graphs of layers, imitated without a GPU: a replay runs the layer again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from banked_gpt import compare_layer_bank, random_sizes
from model_case import DENSE_MODULES, MOE_MODULES, ModelCase
from ranks import run_ranks
from replayed_gpt import EXPERT_BIAS, LayersReplayed, compare_layers, compare_two_models
from shared_documents import Setting

from megatron.slipstream.context_parallel.limits import RankLimits

DENSE = ModelCase("dense", is_packed=True, micro_batch_size=1)
MOE = ModelCase("moe", is_packed=True, micro_batch_size=1)
CASES = {
    "dense": (DENSE, ()),
    "dense, attention": (DENSE, ("attn",)),
    "dense, MLP": (DENSE, ("mlp",)),
    "MoE, attention": (MOE, ("attn",)),
    "MoE, router": (MOE, ("moe_router",)),
    "MoE, attention and router": (MOE, ("attn", "moe_router")),
    "MoE, dispatch": (
        ModelCase("moe", is_packed=True, micro_batch_size=1, overrides=EXPERT_BIAS),
        ("attn", "moe_router", "moe_preprocess"),
    ),
    "mixed": (ModelCase("mixed", is_packed=True, micro_batch_size=1), ("attn", "moe_router")),
    "MLA": (ModelCase("mla", is_packed=True, micro_batch_size=1), ()),
    "hybrid": (
        ModelCase("hybrid", is_packed=True, micro_batch_size=1),
        ("attn", "moe_router"),
    ),
    "hybrid, dense": (
        ModelCase(
            "hybrid",
            num_layers=3,
            is_packed=True,
            micro_batch_size=1,
            overrides={"num_moe_experts": None, "moe_ffn_hidden_size": None},
        ),
        ("attn", "mlp"),
    ),
}


def check(
    num_ranks: int,
    case: ModelCase,
    scope: Sequence[str],
    counts: Sequence[int],
    offload_modules: Sequence[str] = (),
) -> list[LayersReplayed]:
    results = run_ranks(num_ranks, compare_layers, case, scope, counts, offload_modules, "cpu-lazy")
    for result in results:
        assert result.difference is None
        assert (result.moved_bytes > 0) == bool(offload_modules)
        assert result.num_host_pools == (result.num_sets if offload_modules else 0)
    return results


@pytest.mark.parametrize("case, scope", CASES.values(), ids=CASES)
def test_one_rank(case: ModelCase, scope: Sequence[str]) -> None:
    (result,) = check(1, case, scope, (2, 3, 1))
    assert result.num_sets == 1
    assert result.num_poisoned == 4


PIPELINES = {
    "PP2": (ModelCase("dense", pp=2, is_packed=True, micro_batch_size=1), (), (1, 2)),
    "PP2, MoE": (
        ModelCase("moe", pp=2, is_packed=True, micro_batch_size=1),
        ("attn", "moe_router"),
        (1, 2),
    ),
    "PP2 VPP2": (
        ModelCase("dense", num_layers=8, pp=2, vpp=2, is_packed=True, micro_batch_size=1),
        ("attn",),
        (4, 6),
    ),
}


@pytest.mark.parametrize("case, scope, num_sets", PIPELINES.values(), ids=PIPELINES)
def test_numbers_of_micro_batches_change(
    case: ModelCase, scope: Sequence[str], num_sets: Sequence[int]
) -> None:
    results = check(2, case, scope, (4, 2, 6))
    assert sorted(result.num_sets for result in results) == sorted(num_sets)


@pytest.mark.parametrize("name", ["dense", "MoE, attention and router", "MLA"])
def test_offloading_inside(name: str) -> None:
    case, scope = CASES[name]
    modules = MOE_MODULES if case.kind == "moe" else DENSE_MODULES
    (result,) = check(1, case, scope, (2, 1, 3), modules)
    assert result.num_sets == 1
    assert result.reported_bytes == 3 * result.moved_bytes, "of each micro-batch"


def test_offloading_inside_of_a_pipeline() -> None:
    case, scope, _ = PIPELINES["PP2 VPP2"]
    check(2, case, scope, (4, 2, 6), DENSE_MODULES)


PER_TOKEN = {"calculate_per_token_loss": True}
SMALL: dict[str, Any] = {"num_layers": 3, "seq_length": 64, "micro_batch_size": 1}
TWO = RankLimits(2, tokens_per_rank=32, max_sequences=4)
BANKS = {
    "dense": (2, ModelCase(**SMALL, overrides={**PER_TOKEN, "hidden_dropout": 0.1}), ()),
    "MoE": (2, ModelCase("moe", **SMALL, overrides=PER_TOKEN), ("attn", "moe_router")),
    "MLA": (2, ModelCase("mla", **SMALL, overrides=PER_TOKEN), ("attn",)),
    "PP2": (4, ModelCase(pp=2, **{**SMALL, "num_layers": 4}, overrides=PER_TOKEN), ()),
}


def on_two(case: ModelCase) -> Setting:
    lengths = (61, 29, 17, 9)
    return Setting(case, TWO, lengths, {1: [(1, [1]), (1, [2])], 2: [(2, [0])]})


@pytest.mark.parametrize(
    "name, offload_modules",
    [*((name, ()) for name in BANKS), ("dense", DENSE_MODULES), ("PP2", DENSE_MODULES)],
    ids=str,
)
def test_sizes_change(name: str, offload_modules: Sequence[str]) -> None:
    num_ranks, case, scope = BANKS[name]
    steps = random_sizes((1, 2), 6, most=3)
    arguments = (on_two(case), scope, steps, offload_modules, "cpu-lazy")
    for found in run_ranks(num_ranks, compare_layer_bank, *arguments):
        assert found.difference is None
        assert (found.moved_bytes > 0) == bool(offload_modules)


def test_two_models_of_a_process() -> None:
    """An actor and a critic: each has graphs, an engine and a plan of its own."""
    dense, moe = CASES["dense"], CASES["MoE, attention and router"]
    cases = ((*dense, ("core_attn",)), (*moe, ("qkv_linear",)))
    ((differences, moved),) = run_ranks(1, compare_two_models, cases, (2, 3, 1, 2), "cpu-lazy")
    assert differences == [None, None]
    assert moved == [["core_attn"], ["qkv_linear"]]
