# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Models to run with and without CUDA graphs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from model_case import ModelCase

from benchmarks.case import Case, Variant
from benchmarks.engine_cases import DENSE, MOE, SMALL, SMOKE


def _case(
    comparison: str, name: str, about: str, model: ModelCase, moved: str = "-", **options: Any
) -> Case:
    """Create a case with one set of modules; '-' means none."""
    model = replace(model, te_rng_tracker=True)  # CUDA graphs need it to draw random numbers
    variants = (Variant(tuple(moved.split())),)
    return Case(name, about, model, variants, comparison=comparison, **options)


_graphs, _chunk = partial(_case, "layer_graphs"), partial(_case, "chunk_graphs")
_ATTENTION = "core_attn attn_proj qkv_linear"
_LAUNCH_BOUND = ModelCase(
    num_layers=16,
    hidden_size=1024,
    num_attention_heads=16,
    seq_length=4096,
    micro_batch_size=1,
    vocab_size=8192,
    bf16=True,
)

GRAPH_CASES: tuple[Case, ...] = (
    _graphs(
        "graphs_dense",
        "the dense case, attention and MLP captured",
        DENSE,
        _ATTENTION,
        captured=("attn", "mlp"),
    ),
    _graphs(
        "graphs_moe",
        "the moe case, attention and router captured; what moves is in graphs",
        MOE,
        "core_attn",
        captured=("attn", "moe_router"),
    ),
    _graphs(
        "graphs_moe_experts",
        "the same; what experts save moves too, outside of graphs",
        MOE,
        "core_attn attn_proj expert_fc1 moe_act",
        captured=("attn", "moe_router"),
    ),
    _graphs(
        "graphs_small",
        "16 layers of hidden 1024, 4096 tokens: the GPU waits for launches; whole layers",
        replace(SMALL, seq_length=4096, micro_batch_size=1),
        _ATTENTION,
    ),
    _chunk(
        "chunk_thd",
        "16 layers of hidden 1024, 4096 packed tokens: the GPU waits for launches",
        replace(_LAUNCH_BOUND, is_packed=True, overrides={"apply_rope_fusion": True}),
        num_micro_batches=4,
    ),
    _chunk(
        "layers_thd_moe",
        "8 layers of hidden 1024 with 8 experts, top 2, no token dropped, 4096 packed tokens; of "
        "each layer attention, router and dispatch are captured",
        replace(
            _LAUNCH_BOUND,
            kind="moe",
            num_layers=8,
            is_packed=True,
            overrides={"num_moe_experts": 8, "moe_permute_fusion": True, "apply_rope_fusion": True},
        ),
        num_micro_batches=4,
        captured=("attn", "moe_router", "moe_preprocess"),
    ),
    _chunk(
        "chunk_small", "the same, one sequence of 4096 tokens", _LAUNCH_BOUND, num_micro_batches=4
    ),
    _chunk(
        "chunk_large",
        "8 layers of hidden 4096, 8192 tokens: the GPU never waits",
        replace(
            _LAUNCH_BOUND, num_layers=8, hidden_size=4096, num_attention_heads=32, seq_length=8192
        ),
    ),
    _chunk(
        "chunk_experts",
        "8 layers of hidden 1024 with 4 experts, dropped and padded to capacity",
        replace(
            _LAUNCH_BOUND,
            kind="moe",
            num_layers=8,
            overrides={
                "moe_expert_capacity_factor": 1.25,
                "moe_pad_expert_input_to_capacity": True,
                "moe_permute_fusion": True,
            },
        ),
        num_micro_batches=4,
        captured=("attn",),
    ),
    _chunk(
        "chunk_dropless",
        "the moe case with sync-free experts, which drop no token",
        replace(MOE, sync_free_experts=True),
        captured=None,
    ),
    _chunk(
        "chunk_dropless_long",
        "the same with sequence 16384, micro-batch 1 and vocabulary 8192: its GPU is busy",
        replace(MOE, seq_length=16384, micro_batch_size=1, vocab_size=8192, sync_free_experts=True),
        "core_attn expert_fc1",
        captured=None,
    ),
    _graphs(
        "smoke_graphs",
        "three tiny layers; without a GPU the ways without graphs only",
        replace(SMOKE, bf16=True),
        _ATTENTION,
        captured=("attn", "mlp"),
        offload={"min_offloaded_tensor_size": 1},
        needs_gpu=False,
    ),
    _chunk(
        "smoke_chunk",
        "two tiny layers; without a GPU graphs are imitated",
        ModelCase(num_layers=2, bf16=True),
        captured=None,
        needs_gpu=False,
    ),
    _chunk(
        "smoke_dropless",
        "the same with sync-free experts",
        ModelCase("moe", num_layers=2, bf16=True, sync_free_experts=True),
        "core_attn expert_fc1",
        offload={"min_offloaded_tensor_size": 1},
        captured=None,
        needs_gpu=False,
    ),
)
