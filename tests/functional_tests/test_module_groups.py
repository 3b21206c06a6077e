# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Modules that megatron-core does not mark move, with the same bits, on both paths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from model_case import GDN_MODULES, MAMBA_MODULES, MLP_MODULES, OWN_MODULES, SHARED_EXPERTS
from ranks import run_ranks
from state_space_layers import GATED_DELTA_NET, MAMBA, OF_GPT
from tiny_gpt import (
    DENSE_MODULES,
    MOE_MODULES,
    Comparison,
    ModelCase,
    build_chunks,
    compare,
    compare_on_ranks,
    initialize,
    make_config,
    run_step,
    skip_without_model,
)

DENSE = ModelCase("dense", num_layers=3, overrides={"hidden_dropout": 0.1})
MOE = ModelCase("moe", num_layers=3, overrides=SHARED_EXPERTS)
MIXED = ModelCase("mixed", overrides=SHARED_EXPERTS)
MLA = ModelCase("mla", num_layers=3)
STATE_SPACE = ModelCase(
    "hybrid",
    num_layers=7,
    pattern="*GM-",
    overrides={**GATED_DELTA_NET, **MAMBA, "hidden_dropout": 0.1},
)
FIRST_TWO_LAYERS = {
    "recompute_granularity": "full",
    "recompute_method": "block",
    "recompute_num_layers": 2,
}

ALONE = (
    (DENSE, (*MLP_MODULES, "output_layer")),
    (MOE, ("expert_fc2", "shared_experts")),
    (MLA, ("mla_down_proj", "mla_up_proj")),
    (replace(STATE_SPACE, num_layers=4, pattern="GM"), (*GDN_MODULES, *MAMBA_MODULES)),
    (ModelCase("dense", num_layers=3, overrides=OF_GPT), GDN_MODULES),
)


def all_modules(kind: str) -> tuple[str, ...]:
    marked = MOE_MODULES if kind in ("moe", "mixed") else DENSE_MODULES
    return (*marked, *OWN_MODULES[kind])


TWO_STEPS = (1, 1)
"""The plan is made and followed; where all modules move together, it is followed again, and
iterations have several micro-batches."""


def check(
    case: ModelCase,
    modules: Sequence[str],
    native: str = "auto",
    counts: Sequence[int] = (2, 2, 2),
    num_ranks: int = 1,
    reads_memory: bool = False,
    **offload: Any,
) -> Comparison:
    """Compare on a backend with late copies. Returns the result of the first rank."""
    options = {"offload_native": native, **offload}
    arguments = (case, modules, "cpu-lazy", counts, options, reads_memory)
    results = compare_on_ranks(num_ranks, *arguments)
    assert [result.difference for result in results] == [None] * num_ranks
    assert {result.is_native for result in results} == {native == "auto"}
    return results[0]


def compare_each(
    rank: int, world_size: int, port: int, case: ModelCase, names: Sequence[str]
) -> list[Comparison]:
    settings = ("cpu-lazy", TWO_STEPS, {"offload_native": "auto"}, True)
    return [compare(rank, world_size, port, case, (name,), *settings) for name in names]


@pytest.mark.parametrize("case, names", ALONE, ids=lambda value: getattr(value, "kind", ""))
def test_each_module_alone(case: ModelCase, names: Sequence[str]) -> None:
    (results,) = run_ranks(1, compare_each, case, names)
    for name, result in zip(names, results, strict=True):
        assert result.difference is None
        assert result.is_native
        assert result.moved_modules == (name,)
        assert result.freed_bytes == result.moved_bytes > 0
        assert result.peak_drop_bytes == result.planned_drop_bytes


@pytest.mark.parametrize(
    "case, native",
    [
        *(
            pytest.param(case, "auto", marks=pytest.mark.releases)
            for case in (MIXED, MLA, STATE_SPACE)
        ),
        *((case, "auto") for case in (DENSE, MOE)),
        (MIXED, "off"),
    ],
    ids=lambda value: getattr(value, "kind", value),
)
def test_all_modules_together(case: ModelCase, native: str) -> None:
    modules = all_modules(case.kind)
    result = check(case, modules, native, reads_memory=True)
    # Without dropout the embedding saves nothing but the tokens, which the loss holds too.
    assert {*modules} - {*result.moved_modules} <= {"embedding"}
    has_dropout = "hidden_dropout" in case.overrides
    assert ("embedding" in result.moved_modules) == has_dropout
    assert result.num_late == 0
    assert result.peak_drop_bytes == result.planned_drop_bytes > 0


VARIANTS = {
    "bf16": replace(DENSE, bf16=True),
    "layer norm and bias": ModelCase(
        "dense", num_layers=3, overrides={"normalization": "LayerNorm", "add_bias_linear": True}
    ),
    "no gate": ModelCase("dense", num_layers=3, overrides={"gated_linear_unit": False}),
    "MLP in chunks": ModelCase("dense", num_layers=3, overrides={"mlp_chunks_for_training": 2}),
    "further tokens": ModelCase("dense", num_layers=3, overrides={"mtp_num_layers": 1}),
    "sync-free experts": replace(MOE, sync_free_experts=True),
    "latent queries": ModelCase("mla", num_layers=3, overrides={"q_lora_rank": None}),
    "full recomputation of two layers": replace(
        DENSE, num_layers=4, overrides=DENSE.overrides | FIRST_TWO_LAYERS
    ),
    "full recomputation of two layers, hybrid": replace(
        STATE_SPACE,
        num_layers=8,
        pattern="--GMGM--",
        overrides=STATE_SPACE.overrides | FIRST_TWO_LAYERS,
    ),
}


OF_ANY_RELEASE = "bf16", "layer norm and bias", "no gate"
"""What differs from other models by types, sizes or functions only."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in OF_ANY_RELEASE else [pytest.mark.releases])
        for name in VARIANTS
    ],
)
def test_variants(name: str) -> None:
    case = VARIANTS[name]
    result = check(case, all_modules(case.kind), counts=TWO_STEPS)
    state_space = {*GDN_MODULES, *MAMBA_MODULES} & {*OWN_MODULES[case.kind]}
    assert state_space | {*MLP_MODULES} <= {*result.moved_modules} or case.kind == "moe"


@pytest.mark.releases
def test_latent_attention_of_a_hybrid_model() -> None:
    case = ModelCase("hybrid", num_layers=4, pattern="+-")
    skip_without_model(case)
    result = check(case, all_modules("mla"), reads_memory=True)
    latent = {"attn_norm", "core_attn", "attn_proj", "mla_down_proj", "mla_up_proj", "output_layer"}
    assert latent <= {*result.moved_modules}
    assert result.num_late == 0
    assert result.peak_drop_bytes == result.planned_drop_bytes > 0


RECOMPUTED = {
    "dense": (("layernorm",),),
    "moe": (("core_attn", "layernorm", "moe_act"),),
    "mla": (("layernorm",), ("mla_up_proj",), ("mlp",)),
}
SAVES_NOTHING = {
    "mlp": {*MLP_MODULES},
    "mla_up_proj": {"mla_up_proj"},
    "layernorm": {"qkv_linear", "mla_down_proj", "mlp_fc1", "output_layer"},
    "core_attn": {"core_attn"},
    "moe_act": {"expert_fc2"},
}
"""Modules of which nothing may move beside a recomputed one, or that are refused."""


@pytest.mark.releases
@pytest.mark.parametrize(
    "case, recomputed",
    [(case, names) for case in (DENSE, MOE, MLA) for names in RECOMPUTED[case.kind]],
    ids=lambda value: value.kind if isinstance(value, ModelCase) else "+".join(value),
)
def test_recomputation_beside(case: ModelCase, recomputed: Sequence[str]) -> None:
    refused = {"mlp": {*MLP_MODULES}, "mla_up_proj": {"mla_up_proj"}}
    left_out = set().union(*(refused.get(name, ()) for name in recomputed))
    modules = [name for name in all_modules(case.kind) if name not in left_out]
    more = {"recompute_granularity": "selective", "recompute_modules": list(recomputed)}
    case = replace(case, overrides={**case.overrides, **more})
    result = check(case, modules, counts=TWO_STEPS)
    empty = set().union(*(SAVES_NOTHING[name] for name in recomputed))
    assert {*modules} - {*result.moved_modules} <= empty | {"embedding"}


TWO_RANKS = {
    "PP2 VPP2": (replace(DENSE, pp=2, vpp=2, num_layers=8), (2, 2, 4)),
    "TP2": (ModelCase("dense", tp=2, overrides={"normalization": "LayerNorm"}), (1, 2, 2)),
    "EP2": (replace(MOE, ep=2), (1, 2, 2)),
    "PP2 GM": (replace(STATE_SPACE, pp=2, num_layers=8, pattern="*GM-|*GM-"), (3, 2, 3)),
}
"""Each schedule and kind of group once."""


@pytest.mark.releases
@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_ranks(name: str) -> None:
    case, counts = TWO_RANKS[name]
    result = check(case, all_modules(case.kind), counts=counts, num_ranks=2)
    assert {*OWN_MODULES[case.kind]} - {*result.moved_modules} <= {"embedding", "output_layer"}


def saved_bytes(case: ModelCase) -> int:
    """Bytes of the storages, other than parameters, that one forward saves without an engine."""
    initialize(case)
    config = make_config(case)
    chunks = build_chunks(case, config)
    parameters = {p.untyped_storage()._cdata for chunk in chunks for p in chunk.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            saved[storage._cdata] = storage  # kept alive, so that none is counted twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        run_step(case, config, chunks, 0, 1)
    return sum(storage.nbytes() for storage in saved.values())


def shares_of_a_layer(
    rank: int, world_size: int, port: int, case: ModelCase, sets: Sequence[Sequence[str]]
) -> list[float]:
    """Moved over saved bytes of a layer for each set of modules, from models of 3 and 4 layers."""
    sizes = [replace(case, num_layers=num_layers) for num_layers in (3, 4)]
    saved = [saved_bytes(size) for size in sizes]
    shares = []
    for modules in sets:
        results = [compare(0, 1, 0, size, modules, "cpu", (1, 1)) for size in sizes]
        moved = [result.moved_bytes for result in results]
        shares.append((moved[1] - moved[0]) / (saved[1] - saved[0]))
    return shares


# Wide MLPs and short sequences, as in a large model: attention on a CPU saves all its scores.
@pytest.mark.parametrize(
    "case, at_first, at_last",
    [
        (ModelCase("dense", seq_length=16, overrides={"ffn_hidden_size": 512}), 0.3, 0.97),
        (ModelCase("mla", seq_length=16), 0.5, 0.97),
        (replace(MOE, seq_length=16), 0.75, 0.9),
        (ModelCase("hybrid", pattern="G", overrides=GATED_DELTA_NET), 0.1, 0.97),
        (ModelCase("hybrid", pattern="M", overrides=MAMBA), 0.1, 0.97),
    ],
    ids=["dense", "mla", "moe", "G", "M"],
)
def test_nearly_all_that_a_layer_saves_moves(
    case: ModelCase, at_first: float, at_last: float
) -> None:
    marked = MOE_MODULES if case.kind == "moe" else DENSE_MODULES
    sets = (marked, all_modules(case.kind))
    ((before, after),) = run_ranks(1, shares_of_a_layer, case, sets)
    print(f"{case.kind}: {before:.2f} -> {after:.2f}")
    assert before < at_first
    assert after > at_last
