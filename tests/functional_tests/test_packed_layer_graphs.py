# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Packed sequences in Transformer Engine's CUDA graphs of layers.

Losses, gradients, random numbers and expert statistics equal those of eager runs, bit by bit.
Without a GPU, graphs are imitated: a replay runs the layer again.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from banked_gpt import compare_layer_bank
from gpu_models import FUSED_ROPE, MLA_SIZES, on_gpu
from model_case import DENSE_MODULES, GDN_MODULES, MAMBA_MODULES, MOE_MODULES, ModelCase
from ranks import TIMEOUT_S, run_ranks
from replayed_gpt import EXPERT_BIAS, LayersReplayed, compare_layers, compare_two_models
from shared_documents import Setting
from state_space_layers import GATED_DELTA_NET, MAMBA

from megatron.slipstream.context_parallel.limits import RankLimits

pytestmark = pytest.mark.timeout(TIMEOUT_S + 60)

FLAT_BYTES = 1 << 20
"""By which the memory of tensors may grow in the second half of a training."""


def packed(kind: str, num_layers: int = 3, **overrides: Any) -> ModelCase:
    return ModelCase(
        kind, num_layers=num_layers, is_packed=True, micro_batch_size=1, overrides=overrides
    )


ON_CPU = {
    "dense": packed("dense"),
    "MoE": packed("moe"),
    "MoE with bias": packed("moe", **EXPERT_BIAS),
    "mixed": packed("mixed", 4),
    "MLA": packed("mla"),
    "hybrid": packed("hybrid", 4),
    "hybrid, dense": replace(packed("hybrid", 3, mtp_num_layers=1), pattern="*-*/*-"),
    "hybrid, MLA": replace(packed("hybrid", 3), pattern="+-"),
}
MOE_ON_GPU = on_gpu(
    ModelCase("moe", is_packed=True), moe_permute_fusion=True, **EXPERT_BIAS, **FUSED_ROPE
)
ON_GPU = {
    "dense": on_gpu(ModelCase(is_packed=True), hidden_dropout=0.1, **FUSED_ROPE),
    "MoE": MOE_ON_GPU,
    "MoE with bias": MOE_ON_GPU,
    "MLA": on_gpu(ModelCase("mla", is_packed=True), **MLA_SIZES, rope_type="yarn", **FUSED_ROPE),
    "hybrid": on_gpu(ModelCase("hybrid", num_layers=8, is_packed=True), **FUSED_ROPE),
    "hybrid, dense": on_gpu(
        ModelCase("hybrid", num_layers=3, pattern="*-*/*-", is_packed=True),
        mtp_num_layers=1,
        **FUSED_ROPE,
    ),
    "hybrid, MLA": on_gpu(
        ModelCase("hybrid", num_layers=3, pattern="+-", is_packed=True),
        **MLA_SIZES,
        rope_type="yarn",
        **FUSED_ROPE,
    ),
}
ROUTED = ("attn", "moe_router")
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    # name: (the model, captured parts of each layer; the whole layer if empty)
    "dense": ("dense", ()),
    "dense, attention": ("dense", ("attn",)),
    "dense, MLP": ("dense", ("mlp",)),
    "MoE, attention": ("MoE", ("attn",)),
    "MoE, router": ("MoE", ("moe_router",)),
    "MoE, attention and router": ("MoE", ROUTED),
    "MoE, dispatch": ("MoE with bias", (*ROUTED, "moe_preprocess")),
    "mixed": ("mixed", ROUTED),
    "MLA": ("MLA", ()),
    "hybrid": ("hybrid", ROUTED),
    "hybrid, dense": ("hybrid, dense", ("attn", "mlp")),
    "hybrid, MLA": ("hybrid, MLA", ()),
}
FIFTY = ("dense", "MoE, attention and router", "MLA")


def case_of(name: str, models: Mapping[str, ModelCase], **changes: Any) -> tuple[ModelCase, Any]:
    model, scope = CASES[name]
    return replace(models[model], **changes), scope


def random_counts(num_iterations: int, step: int = 1) -> tuple[int, ...]:
    """Random numbers of micro-batches, multiples of ``step``, up to 8."""
    draw = random.Random(5)
    return tuple(step * draw.randint(1, 8 // step) for _ in range(num_iterations))


def modules_of(case: ModelCase) -> Sequence[str]:
    return MOE_MODULES if case.kind == "moe" else DENSE_MODULES


def check(
    num_ranks: int,
    case: ModelCase,
    scope: Sequence[str],
    counts: Sequence[int],
    offload_modules: Sequence[str] = (),
    backend: str = "auto",
) -> list[LayersReplayed]:
    results = run_ranks(num_ranks, compare_layers, case, scope, counts, offload_modules, backend)
    for result in results:
        assert result.difference is None
        assert not result.were_too_few
        assert (result.moved_bytes > 0) == bool(offload_modules)
        assert result.num_host_pools == (result.num_sets if offload_modules else 0)
        assert result.num_poisoned == (sum(counts[1:]) if case.pp == 1 else 0)
        if result.allocated_bytes:
            # Every second iteration ends with an evaluation, whose exchanges leave some memory.
            middle = len(result.allocated_bytes) // 2
            before, after = result.allocated_bytes[1:middle], result.allocated_bytes[middle:]
            assert max(after) - max(before) <= FLAT_BYTES
    return results


def check_two_models(models: Mapping[str, ModelCase], counts: Sequence[int], backend: str) -> None:
    """An actor and a critic: each has graphs, an engine and a plan of its own."""
    dense, moe = case_of("dense", models), case_of("MoE, attention and router", models)
    cases = ((*dense, ("core_attn",)), (*moe, ("qkv_linear",)))
    ((differences, moved),) = run_ranks(1, compare_two_models, cases, counts, backend)
    assert differences == [None, None]
    assert moved == [["core_attn"], ["qkv_linear"]]


@pytest.mark.parametrize("name", [name for name in CASES if name not in (*FIFTY, "MoE, attention")])
def test_one_rank(name: str) -> None:
    (result,) = check(1, *case_of(name, ON_CPU), (1, 2, 1))
    assert result.num_sets == 1


@pytest.mark.parametrize(
    "name, layout, num_sets, is_offloading",
    [
        ("dense", {"num_layers": 2, "pp": 2}, [1, 2], False),
        (
            "hybrid, dense",
            {"num_layers": 8, "pp": 2, "vpp": 2, "pattern": "*-|*-|*-|*-"},
            [4, 6],
            True,
        ),
    ],
    ids=["PP2", "PP2 VPP2, hybrid, offloading"],
)
def test_numbers_of_micro_batches_change(
    name: str, layout: dict[str, Any], num_sets: Sequence[int], is_offloading: bool
) -> None:
    case, scope = case_of(name, ON_CPU, **layout)
    modules = DENSE_MODULES if is_offloading else ()
    results = check(2, case, scope, (4, 2, 6), modules, "cpu-lazy")
    if (
        is_offloading
    ):  # The first rank's chunks are equal: 12 passes, and 6 sets of the same graphs.
        assert results[0].reported_bytes == 2 * results[0].moved_bytes
    assert sorted(result.num_sets for result in results) == num_sets


def _with_one_set(*arguments: Any) -> LayersReplayed:
    from megatron.slipstream.integration.graphs import packed_layers

    with patch.object(packed_layers, "chunk_slots", lambda config: (1,)):
        return compare_layers(*arguments)


def test_a_schedule_with_more_micro_batches_in_flight_than_sets() -> None:
    case, scope = case_of("dense", ON_CPU, num_layers=4, pp=2)
    results = run_ranks(2, _with_one_set, case, scope, (2, 1, 3), DENSE_MODULES, "cpu-lazy")
    assert [(result.difference, result.num_sets) for result in results] == [(None, 1)] * 2
    assert [result.were_too_few for result in results] == [True, False]


@pytest.mark.parametrize("name", FIFTY)
def test_offloading_inside(name: str) -> None:
    case, scope = case_of(name, ON_CPU)
    (result,) = check(1, case, scope, (1, 1, 2), modules_of(case), "cpu-lazy")
    assert result.num_sets == 1
    assert result.reported_bytes == 2 * result.moved_bytes, "of each micro-batch"


PER_TOKEN = {"calculate_per_token_loss": True}
SMALL: dict[str, Any] = {"num_layers": 2, "seq_length": 64, "micro_batch_size": 1}
TWO = RankLimits(2, tokens_per_rank=32, max_sequences=4)
BANKS: dict[str, tuple[int, ModelCase, tuple[str, ...], Sequence[str]]] = {
    "MoE": (2, ModelCase("moe", **SMALL, overrides=PER_TOKEN), ROUTED, ()),
    "MLA": (2, ModelCase("mla", **SMALL, overrides=PER_TOKEN), ("attn",), ()),
    "hybrid, offloading": (
        2,
        ModelCase("hybrid", **{**SMALL, "num_layers": 8}, overrides=PER_TOKEN),
        ("attn", "mlp", "moe_router"),
        DENSE_MODULES,
    ),
    "PP2, offloading": (
        4,
        ModelCase(
            pp=2, **{**SMALL, "num_layers": 4}, overrides={**PER_TOKEN, "hidden_dropout": 0.1}
        ),
        (),
        DENSE_MODULES,
    ),
}


@pytest.mark.parametrize("name", BANKS)
def test_sizes_change(name: str) -> None:
    num_ranks, case, scope, modules = BANKS[name]
    setting = Setting(case, TWO, (61, 29, 17, 9), {1: [(1, [1]), (1, [2])], 2: [(2, [0])]})
    arguments = (setting, scope, ((1, 2), (2, 1, 1), (1, 2)), modules, "cpu-lazy")
    for found in run_ranks(num_ranks, compare_layer_bank, *arguments):
        assert found.difference is None
        assert not found.were_too_few
        assert (found.moved_bytes > 0) == bool(modules)


STATE_SPACE = {"pattern": "*GM-", "num_layers": 4, "overrides": {**GATED_DELTA_NET, **MAMBA}}
UNPACKED = {
    "dense": ("dense", (), {}),
    "hybrid, whole layers": ("hybrid", (), {"pattern": "*-"}),
    "hybrid, MLP": ("hybrid", (*ROUTED, "mlp"), {}),
    "hybrid, MLA": ("hybrid", ("attn",), {"pattern": "+-"}),
    "hybrid, Mamba, gated delta nets": ("hybrid", (), STATE_SPACE),
    "hybrid, Mamba": ("hybrid", ("mamba",), {**STATE_SPACE, "num_layers": 8}),
}


@pytest.mark.parametrize("name", UNPACKED)
def test_layers_without_packed_sequences(name: str) -> None:
    kind, scope, options = UNPACKED[name]
    case = ModelCase(kind, micro_batch_size=1, bf16=True, **options)  # as megatron-core captures
    modules = DENSE_MODULES
    if kind == "hybrid":
        modules += GDN_MODULES + MAMBA_MODULES
    arguments = (case, scope, (1, 2, 1), modules, "cpu-lazy")
    (result,) = run_ranks(1, compare_layers, *arguments)
    assert result.difference is None
    assert result.reported_bytes == result.moved_bytes > 0, "of the only micro-batch"


def test_two_models_of_a_process() -> None:
    check_two_models(ON_CPU, (1, 2, 1), "cpu-lazy")


# With a GPU: graphs of Transformer Engine.


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in CASES if CASES[name][0] in ON_GPU])
def test_one_gpu(name: str) -> None:
    check(1, *case_of(name, ON_GPU), random_counts(50 if name in FIFTY else 8))


@pytest.mark.gpu
@pytest.mark.parametrize("name", FIFTY)
def test_offloading_inside_on_one_gpu(name: str) -> None:
    case, scope = case_of(name, ON_GPU, num_layers=6)
    check(1, case, scope, random_counts(10), modules_of(case))


@pytest.mark.gpus2
@pytest.mark.parametrize("name", FIFTY[:2])
@pytest.mark.parametrize("vpp", [None, 2], ids=["PP2", "PP2 VPP2"])
@pytest.mark.parametrize("is_offloading", [False, True], ids=["", "offloading"])
def test_pipelines(name: str, vpp: int, is_offloading: bool) -> None:
    case, scope = case_of(name, ON_GPU, pp=2, vpp=vpp, num_layers=8)
    modules = DENSE_MODULES if is_offloading else ()
    num_sets = [r.num_sets for r in check(2, case, scope, random_counts(20, 2), modules)]
    assert sorted(num_sets) == ([1, 2] if vpp is None else [4, 6])


LAYOUTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "TP2, sequence parallel": ("dense", {"tp": 2}, {"sequence_parallel": True}),
    "TP2, sequence parallel, MoE": (FIFTY[1], {"tp": 2}, {"sequence_parallel": True}),
    "CP2": ("dense", {"cp": 2}, {}),
    "CP2, MLA": ("MLA", {"cp": 2}, {}),
    "EP2": (FIFTY[1], {"ep": 2}, {}),
}


@pytest.mark.gpus2
@pytest.mark.parametrize("name", LAYOUTS)
def test_other_layouts(name: str) -> None:
    of, layout, overrides = LAYOUTS[name]
    case, scope = case_of(of, ON_GPU, **layout)
    case = replace(case, overrides={**case.overrides, **overrides})
    check(2, case, scope, random_counts(20))


@pytest.mark.gpu
def test_two_models_on_one_gpu() -> None:
    check_two_models(ON_GPU, random_counts(10), "auto")
