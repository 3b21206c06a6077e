# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Models whose modules are offloaded, by megatron-core's built-in engine and by ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from model_case import DENSE_MODULES, MOE_MODULES, ModelCase

from benchmarks.case import AUTO, HOST, NOTHING, Case, Variant


def _variants(all_modules: Sequence[str], sets: str = "") -> tuple[Variant, ...]:
    """Return ``sets``, between commas, then all modules, also with the planner's choice."""
    return (*_each(sets), Variant(tuple(all_modules), AUTO))


def _each(sets: str, tunings: Mapping[str, Any] = NOTHING) -> tuple[Variant, ...]:
    return tuple(Variant(tuple(names.split()), tunings) for names in sets.split(",") if names)


# The GPU cases use Llama 2's vocabulary; a larger one only adds memory and time that no engine
# affects.
DENSE = ModelCase(
    num_layers=8,
    hidden_size=4096,
    num_attention_heads=32,
    seq_length=8192,
    micro_batch_size=1,
    vocab_size=32000,
    bf16=True,
    overrides={"ffn_hidden_size": 14336, "num_query_groups": 8, "apply_rope_fusion": True},
)
LLAMA3_8B = replace(
    DENSE,
    num_layers=32,
    vocab_size=128256,
    overrides={
        **DENSE.overrides,
        "cross_entropy_loss_fusion": True,
        "cross_entropy_fusion_impl": "te",
    },
)
MOE = ModelCase(
    kind="moe",
    num_layers=8,
    hidden_size=2048,
    num_attention_heads=16,
    seq_length=4096,
    micro_batch_size=2,
    vocab_size=32000,
    bf16=True,
    overrides={
        "num_query_groups": 4,
        "num_moe_experts": 16,
        "moe_router_topk": 4,
        "moe_ffn_hidden_size": 2048,
        "moe_permute_fusion": True,
        "apply_rope_fusion": True,
    },
)
MLA_MOE = replace(
    MOE,
    kind="mla",
    overrides={
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_head_dim": 128,
        "qk_pos_emb_head_dim": 64,
        "v_head_dim": 128,
        "ffn_hidden_size": 10944,
        "moe_layer_freq": [0, 1, 1, 1, 1, 1, 1, 1],
        "num_moe_experts": 32,
        "moe_router_topk": 6,
        "moe_ffn_hidden_size": 1408,
        "moe_shared_expert_intermediate_size": 2816,
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.01,
        "moe_permute_fusion": True,
    },
)
# The layout that megatron-core's PR 1752 was measured with, in steps of 1.26 s, and a sequence
# length for which H200s take about as long: four of them took 1.7 s with sequence length 8192.
# Micro-batches are larger than those of 'moe', which is launch-bound.
_EXPERT_PIPELINE = replace(MOE, num_layers=16, seq_length=6144, pp=2, vpp=2)
_EXPERT_PIPELINE_VARIANTS = (
    *_each("qkv_linear, core_attn, expert_fc1, moe_act"),
    Variant(("qkv_linear", "core_attn", "expert_fc1", "moe_act"), AUTO, has_defaults=False),
)
_PIPELINE = replace(DENSE, num_layers=16, seq_length=4096, pp=2)
_PIPELINE_VARIANTS = _variants(DENSE_MODULES, "core_attn, core_attn attn_proj")
# Tensors of 4 MiB, whose kernels take longer to launch than to run.
SMALL = replace(
    DENSE,
    num_layers=16,
    hidden_size=1024,
    num_attention_heads=16,
    seq_length=1024,
    micro_batch_size=2,
    overrides={"ffn_hidden_size": 4096, "num_query_groups": 4, "apply_rope_fusion": True},
)
SMOKE = ModelCase(num_layers=3)

_pipeline = partial(Case, num_micro_batches=8)
_smoke = partial(Case, offload={"min_offloaded_tensor_size": 1}, needs_gpu=False)

# If Transformer Engine fuses a norm into the next linear layer (attn_norm, and mlp_norm of a dense
# layer), the module alone has nothing to move, so it is measured only among all modules.
ENGINE_CASES: tuple[Case, ...] = (
    Case(
        "dense",
        "8 layers, hidden 4096, 32 heads, 8 KV groups, ffn 14336, sequence 8192, micro-batch 1",
        DENSE,
        _variants(
            DENSE_MODULES,
            "qkv_linear, core_attn, core_attn attn_proj, qkv_linear core_attn attn_proj",
        ),
    ),
    Case(
        "moe",
        "8 layers, hidden 2048, 16 heads, 4 KV groups, 16 experts of width 2048, top 4, sequence "
        "4096, micro-batch 2",
        MOE,
        _variants(
            MOE_MODULES,
            "qkv_linear, core_attn, mlp_norm, expert_fc1, moe_act, core_attn attn_proj, "
            "core_attn expert_fc1, expert_fc1 moe_act, core_attn attn_proj expert_fc1 moe_act",
        ),
    ),
    Case(
        "moe_long",
        "the moe case with sequence 16384: its GPU is busy where that of 'moe' waits for the host",
        replace(MOE, seq_length=16384),
        _variants(MOE_MODULES, "core_attn expert_fc1, moe_act"),
    ),
    Case(
        "long",
        "the dense case with sequence 32768",
        replace(DENSE, seq_length=32768),
        _variants(DENSE_MODULES, "core_attn, core_attn attn_proj"),
    ),
    Case(
        "llama3_8b",
        "Llama-3-8B: 32 layers of the dense case, vocabulary 128,256, fused cross entropy, which "
        "benchmarks.fit measures",
        LLAMA3_8B,
        _variants(DENSE_MODULES),
        num_micro_batches=1,
    ),
    Case(
        "mla_moe",
        "8 layers like DeepSeek-V2's: hidden 2048, 16 heads, MLA (q_lora 768, kv_lora 512), 32 "
        "experts of width 1408, top 6, a shared expert, the first layer dense, sequence 4096, "
        "micro-batch 2",
        MLA_MOE,
        _variants(MOE_MODULES, "core_attn, core_attn attn_proj, expert_fc1, moe_act"),
    ),
    Case(
        "moe_host",
        "the moe case, with the engine's work in C++ and in Python, and with groups that all stay",
        MOE,
        _each("core_attn, expert_fc1, core_attn expert_fc1, moe_act", HOST),
    ),
    Case(
        "mla_moe_host",
        "the mla_moe case, likewise",
        MLA_MOE,
        _each("core_attn, core_attn attn_proj", HOST),
    ),
    _pipeline(
        "pp2",
        "16 dense layers of hidden 4096 on two pipeline stages, sequence 4096, 8 micro-batches",
        _PIPELINE,
        _PIPELINE_VARIANTS,
    ),
    _pipeline(
        "pp2_vpp2",
        "the same with two model chunks a stage, interleaved",
        replace(_PIPELINE, vpp=2),
        _PIPELINE_VARIANTS,
    ),
    Case(
        "moe_ep2",
        "the moe case with its experts on two GPUs, two micro-batches each",
        replace(MOE, dp=2, ep=2),
        _EXPERT_PIPELINE_VARIANTS,
    ),
    _pipeline(
        "moe_ep4_pp2_vpp2",
        "16 layers of the moe case, sequence 6144, micro-batch 2, 8 micro-batches, on eight GPUs: "
        "DP 4, EP 4, PP 2 (ranks 0 to 3 are the first stage), two model chunks a stage",
        replace(_EXPERT_PIPELINE, dp=4, ep=4),
        _EXPERT_PIPELINE_VARIANTS,
    ),
    Case(
        "moe_ep4_pp2_vpp2_short",
        "the same with sequence 256, micro-batch 1 and a small vocabulary, tensors of as many "
        "fewer elements moving: for the memory of its eight ranks where they share a GPU",
        replace(_EXPERT_PIPELINE, dp=4, ep=4, seq_length=256, micro_batch_size=1, vocab_size=4096),
        (*_EXPERT_PIPELINE_VARIANTS[:-1], Variant(_EXPERT_PIPELINE_VARIANTS[-1].modules)),
        num_micro_batches=8,
        offload={"min_offloaded_tensor_size": 2**20 // 48},
    ),
    Case(
        "small",
        "16 dense layers of hidden 1024, sequence 1024, micro-batch 2: too small to gain from "
        "offloading",
        SMALL,
        _variants(DENSE_MODULES, "core_attn attn_proj"),
        num_micro_batches=4,
    ),
    _smoke(
        "smoke",
        "three tiny layers, for trying the suite without a GPU; its times mean nothing",
        SMOKE,
        (
            Variant(("core_attn", "attn_proj")),
            Variant(DENSE_MODULES, {"lag2": {"offload_release_lag": 2}}),
        ),
    ),
    _smoke(
        "smoke_pp2",
        "the same on two pipeline stages, each a process",
        replace(SMOKE, num_layers=6, pp=2),
        (Variant(("core_attn", "attn_proj")),),
        num_micro_batches=4,
    ),
    _smoke(
        "smoke_ep2_pp2_vpp2",
        "four tiny expert layers with DP 2, EP 2, PP 2 and two chunks a stage, on four processes",
        replace(SMOKE, kind="moe", num_layers=4, pp=2, vpp=2, dp=2, ep=2),
        _EXPERT_PIPELINE_VARIANTS,
        num_micro_batches=4,
    ),
)
