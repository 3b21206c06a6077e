# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Packed sequences in Transformer Engine's CUDA graphs of layers, on a GPU.

Losses, gradients, random numbers and expert statistics equal those of eager runs, bit by bit.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from gpu_models import FUSED_ROPE, MLA_SIZES, on_gpu
from model_case import DENSE_MODULES, MOE_MODULES, ModelCase
from ranks import TIMEOUT_S, run_ranks
from replayed_gpt import EXPERT_BIAS, LayersReplayed, compare_layers, compare_two_models

pytestmark = pytest.mark.timeout(TIMEOUT_S + 60)

FLAT_BYTES = 1 << 20
"""By which the memory of tensors may grow in the second half of a training."""
DROPLESS = {"moe_permute_fusion": True, **EXPERT_BIAS}
NO_EXPERTS = {"num_moe_experts": None, "moe_ffn_hidden_size": None}
DENSE = on_gpu(ModelCase(is_packed=True), hidden_dropout=0.1, **FUSED_ROPE)
MOE = on_gpu(ModelCase("moe", is_packed=True), **DROPLESS, **FUSED_ROPE)
MLA = on_gpu(ModelCase("mla", is_packed=True), **MLA_SIZES, rope_type="yarn", **FUSED_ROPE)
CASES = {
    "dense": (DENSE, ()),
    "dense, attention": (DENSE, ("attn",)),
    "dense, MLP": (DENSE, ("mlp",)),
    "MoE, attention": (MOE, ("attn",)),
    "MoE, router": (MOE, ("moe_router",)),
    "MoE, attention and router": (MOE, ("attn", "moe_router")),
    "MoE, dispatch": (MOE, ("attn", "moe_router", "moe_preprocess")),
    "MLA": (MLA, ()),
    "hybrid": (
        on_gpu(ModelCase("hybrid", num_layers=8, is_packed=True), **FUSED_ROPE),
        ("attn", "moe_router"),
    ),
    "hybrid, dense": (
        on_gpu(ModelCase("hybrid", num_layers=3, is_packed=True), **NO_EXPERTS, **FUSED_ROPE),
        ("attn", "mlp"),
    ),
}
FIFTY = ("dense", "MoE, attention and router", "MLA")


def counts(num_iterations: int, step: int = 1) -> tuple[int, ...]:
    """Random numbers of micro-batches, multiples of ``step``, up to 8."""
    draw = random.Random(5)
    return tuple(step * draw.randint(1, 8 // step) for _ in range(num_iterations))


def check(
    num_ranks: int,
    case: ModelCase,
    scope: Sequence[str],
    counts: Sequence[int],
    offload_modules: Sequence[str] = (),
) -> list[LayersReplayed]:
    results = run_ranks(num_ranks, compare_layers, case, scope, counts, offload_modules)
    for result in results:
        assert result.difference is None
        assert (result.moved_bytes > 0) == bool(offload_modules)
        assert result.num_host_pools == (result.num_sets if offload_modules else 0)
        assert result.num_poisoned == (sum(counts[1:]) if case.pp == 1 else 0)
        # Every second iteration ends with an evaluation, whose exchanges leave some memory.
        middle = len(result.allocated_bytes) // 2
        before, after = result.allocated_bytes[1:middle], result.allocated_bytes[middle:]
        assert max(after) - max(before) <= FLAT_BYTES
    return results


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_one_gpu(name: str) -> None:
    check(1, *CASES[name], counts(50 if name in FIFTY else 8))


@pytest.mark.gpu
@pytest.mark.parametrize("name", FIFTY)
def test_offloading_inside(name: str) -> None:
    case, scope = CASES[name]
    modules = MOE_MODULES if case.kind == "moe" else DENSE_MODULES
    check(1, replace(case, num_layers=6), scope, counts(10), modules)


@pytest.mark.gpus2
@pytest.mark.parametrize("name", ["dense", "MoE, attention and router"])
@pytest.mark.parametrize("vpp", [None, 2], ids=["PP2", "PP2 VPP2"])
@pytest.mark.parametrize("is_offloading", [False, True], ids=["", "offloading"])
def test_pipelines(name: str, vpp: int, is_offloading: bool) -> None:
    case, scope = CASES[name]
    case = replace(case, pp=2, vpp=vpp, num_layers=8)
    modules = DENSE_MODULES if is_offloading else ()
    num_sets = [r.num_sets for r in check(2, case, scope, counts(50, 2), modules)]
    assert sorted(num_sets) == ([1, 2] if vpp is None else [4, 6])


LAYOUTS = {
    "TP2, sequence parallel": ("dense", {"tp": 2}, {"sequence_parallel": True}),
    "TP2, sequence parallel, MoE": (
        "MoE, attention and router",
        {"tp": 2},
        {"sequence_parallel": True},
    ),
    "CP2": ("dense", {"cp": 2}, {}),
    "CP2, MLA": ("MLA", {"cp": 2}, {}),
    "EP2": ("MoE, attention and router", {"ep": 2}, {}),
}


@pytest.mark.gpus2
@pytest.mark.parametrize("name", LAYOUTS)
def test_other_layouts(name: str) -> None:
    of, layout, overrides = LAYOUTS[name]
    case, scope = CASES[of]
    case = ModelCase(**{**vars(case), **layout, "overrides": {**case.overrides, **overrides}})
    check(2, case, scope, counts(50))


@pytest.mark.gpu
def test_two_models_of_a_process() -> None:
    dense, moe = CASES["dense"], CASES["MoE, attention and router"]
    cases = ((*dense, ("core_attn",)), (*moe, ("qkv_linear",)))
    ((differences, moved),) = run_ranks(1, compare_two_models, cases, counts(10))
    assert differences == [None, None]
    assert moved == [["core_attn"], ["qkv_linear"]]
