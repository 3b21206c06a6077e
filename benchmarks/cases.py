# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""What is measured: models, and for each the sets of modules that move. Needs no torch."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from model_case import DENSE_MODULES, MOE_MODULES, ModelCase

NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Variant:
    """A set of modules that move."""

    modules: tuple[str, ...]
    tunings: Mapping[str, Mapping[str, Any]] = NOTHING
    """Settings of Slipstream that are measured beside its defaults: a name, and options of
    ``OffloadConfig``. The tuning ``x`` is the engine ``slipstream:x`` in commands and results."""
    has_defaults: bool = True
    """Whether Slipstream is measured with its defaults too: each of its engines pins host memory of
    its own."""

    @property
    def name(self) -> str:
        """As in commands and results."""
        return "+".join(self.modules)


def short_name(variant: str) -> str:
    """A variant's name for people: 'all' for all modules that a kind of model can have."""
    names = frozenset(variant.split("+"))
    if names in (frozenset(DENSE_MODULES), frozenset(MOE_MODULES)):
        return "all"
    return variant.replace("+", " ")


@dataclass(frozen=True)
class Case:
    """A model and what is measured of it."""

    name: str
    about: str
    model: ModelCase
    variants: tuple[Variant, ...]
    num_micro_batches: int = 2
    offload: Mapping[str, Any] = NOTHING
    """Offloading options of megatron-core beside the modules, the same for both engines."""
    needs_gpu: bool = True

    @property
    def num_ranks(self) -> int:
        """Processes, and with GPUs the number of them."""
        return self.model.pp * self.model.tp * self.model.cp * self.model.dp


FIGURES = ("memory", "compute", "host", "copies")
"""What is found out beside step times: device memory, the compute time between marks (for the
bound), host time, copies as the profiler sees them."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long to go on with each variant, and what to find out."""

    min_iterations: int = 10
    max_iterations: int = 100
    seconds: float = 30.0
    """For the iterations that are timed."""
    num_warmups: int = 4
    """Iterations of each engine before any is measured: the other one fills its pool, and the
    allocator comes to rest."""
    max_planning: int = 250
    """Iterations of ours before those, at most. It goes on until its plan is settled: after the
    first ones it plans anew up to three times, and tries out what a plan for an allowed overhead
    costs."""
    planning_seconds: float = 120.0
    """For those, of each engine of ours."""
    num_memory_iterations: int = 3
    """Of each engine alone, after as many others but two at most."""
    figures: tuple[str, ...] = FIGURES


AUTO = {"auto": {"offload_max_overhead_percent": "auto"}}
"""Slipstream chooses what moves, among the variant's modules."""


def _variants(all_modules: Sequence[str], *sets: str) -> tuple[Variant, ...]:
    """``sets`` in the order given, then all modules, those last with the planner's choice too."""
    chosen = [Variant(tuple(names.split())) for names in sets]
    return (*chosen, Variant(tuple(all_modules), AUTO))


# The vocabulary of the GPU cases is that of Llama 2; a larger one only adds memory and time that no
# engine touches.
_DENSE = ModelCase(
    num_layers=8,
    hidden_size=4096,
    num_attention_heads=32,
    seq_length=8192,
    micro_batch_size=1,
    vocab_size=32000,
    bf16=True,
    overrides={"ffn_hidden_size": 14336, "num_query_groups": 8, "apply_rope_fusion": True},
)
_MOE = ModelCase(
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
_MLA_MOE = ModelCase(
    kind="mla",
    num_layers=8,
    hidden_size=2048,
    num_attention_heads=16,
    seq_length=4096,
    micro_batch_size=2,
    vocab_size=32000,
    bf16=True,
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
# The layout that PR 1752 of megatron-core was measured with, where a step took 1.26 s. Reckoned for
# a step of about 1.2 s: the case 'moe' does 3 * (8 layers * 0.138 + vocabulary 0.131) = 3.7 GFLOP a
# token (in a layer: experts 101 MFLOP, causal attention 17, its linears 21) for 16384 tokens in
# 122 ms of kernels on one H200, that is 0.5 PFLOP/s. Here a rank has 8 of 16 layers and 8
# micro-batches of 12288 tokens of sequence 6144 (attention: 25): 8 * 12288 * 3 * 8 * 0.147 GFLOP
# take 0.69 s, the vocabulary on the last stage 0.08 s, filling and emptying the pipeline
# 1 / (2 chunks * 8 micro-batches) = 6%, and moving tokens between the ranks of the experts (64 KiB
# a token and layer, 3/4 of them to other GPUs, at 300 GB/s) 0.13 s: 0.95 s in all. Four H200s, with
# half of the tokens going to other GPUs, took 1.7 s where 1.3 s had been reckoned in the same way
# (sequence 8192), so that 1.2 s are to be expected. Micro-batches are larger than those of 'moe',
# whose GPU waits for the host.
_EXPERT_PIPELINE = replace(_MOE, num_layers=16, seq_length=6144, pp=2, vpp=2)
_EXPERT_PIPELINE_VARIANTS = (
    *(Variant((name,)) for name in ("qkv_linear", "core_attn", "expert_fc1", "moe_act")),
    Variant(("qkv_linear", "core_attn", "expert_fc1", "moe_act"), AUTO, has_defaults=False),
)
_PIPELINE = replace(_DENSE, num_layers=16, seq_length=4096, pp=2)
_PIPELINE_VARIANTS = _variants(DENSE_MODULES, "core_attn", "core_attn attn_proj")
_FULL = replace(
    _DENSE,
    overrides={
        **_DENSE.overrides,
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
)
# The module moves nothing of layers that are recomputed as a whole; megatron-core asks for one.
_INPUTS = (
    Variant(("core_attn",), {"inputs": {"offload_checkpoint_inputs": True}}, has_defaults=False),
)
# Tensors of 4 MiB, which take longer to launch than to compute.
_SMALL = replace(
    _DENSE,
    num_layers=16,
    hidden_size=1024,
    num_attention_heads=16,
    seq_length=1024,
    micro_batch_size=2,
    overrides={"ffn_hidden_size": 4096, "num_query_groups": 4, "apply_rope_fusion": True},
)
_SMOKE = ModelCase(num_layers=3)

# Where Transformer Engine has fused a norm into the linear after it (attn_norm, and mlp_norm of a
# dense layer), the module alone has nothing to move and is measured only as one of all.
CASES: tuple[Case, ...] = (
    Case(
        "dense",
        "8 layers, hidden 4096, 32 heads, 8 KV groups, ffn 14336, sequence 8192, micro-batch 1",
        _DENSE,
        _variants(
            DENSE_MODULES,
            "qkv_linear",
            "core_attn",
            "core_attn attn_proj",
            "qkv_linear core_attn attn_proj",
        ),
    ),
    Case(
        "moe",
        "8 layers, hidden 2048, 16 heads, 4 KV groups, 16 experts of width 2048, top 4, sequence "
        "4096, micro-batch 2",
        _MOE,
        _variants(
            MOE_MODULES,
            "qkv_linear",
            "core_attn",
            "mlp_norm",
            "expert_fc1",
            "moe_act",
            "core_attn attn_proj",
            "core_attn expert_fc1",
            "expert_fc1 moe_act",
            "core_attn attn_proj expert_fc1 moe_act",
        ),
    ),
    Case(
        "moe_long",
        "the moe case with sequence 16384: its GPU is busy where that of 'moe' waits for the host",
        replace(_MOE, seq_length=16384),
        _variants(MOE_MODULES, "core_attn expert_fc1", "moe_act"),
    ),
    Case(
        "long",
        "the dense case with sequence 32768",
        replace(_DENSE, seq_length=32768),
        _variants(DENSE_MODULES, "core_attn", "core_attn attn_proj"),
    ),
    Case(
        "full",
        "the dense case, each layer recomputed as a whole: the inputs of the checkpoints move",
        _FULL,
        _INPUTS,
    ),
    Case(
        "full_long",
        "the same with sequence 32768",
        replace(_FULL, seq_length=32768),
        _INPUTS,
    ),
    Case(
        "mla_moe",
        "8 layers like DeepSeek-V2's: hidden 2048, 16 heads, MLA (q_lora 768, kv_lora 512), 32 "
        "experts of width 1408, top 6, a shared expert, the first layer dense, sequence 4096, "
        "micro-batch 2",
        _MLA_MOE,
        _variants(MOE_MODULES, "core_attn", "core_attn attn_proj", "expert_fc1", "moe_act"),
    ),
    Case(
        "pp2",
        "16 dense layers of hidden 4096 on two pipeline stages, sequence 4096, 8 micro-batches",
        _PIPELINE,
        _PIPELINE_VARIANTS,
        num_micro_batches=8,
    ),
    Case(
        "pp2_vpp2",
        "the same with two model chunks a stage, interleaved",
        replace(_PIPELINE, vpp=2),
        _PIPELINE_VARIANTS,
        num_micro_batches=8,
    ),
    Case(
        "moe_ep4_pp2_vpp2",
        "16 layers of the moe case, sequence 6144, micro-batch 2, 8 micro-batches, on eight GPUs: "
        "DP 4, EP 4, PP 2 (ranks 0 to 3 are the first stage), two model chunks a stage",
        replace(_EXPERT_PIPELINE, dp=4, ep=4),
        _EXPERT_PIPELINE_VARIANTS,
        num_micro_batches=8,
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
        "moe_ep2_pp2_vpp2",
        "moe_ep4_pp2_vpp2 on four GPUs: DP 2, EP 2, PP 2 (ranks 0 and 1 are the first stage)",
        replace(_EXPERT_PIPELINE, dp=2, ep=2),
        _EXPERT_PIPELINE_VARIANTS,
        num_micro_batches=8,
    ),
    Case(
        "moe_ep4",
        "its ranks of one stage on four GPUs: 8 layers, DP 4, EP 4, no pipeline",
        replace(_EXPERT_PIPELINE, num_layers=8, pp=1, vpp=None, dp=4, ep=4),
        _EXPERT_PIPELINE_VARIANTS,
        num_micro_batches=8,
    ),
    Case(
        "small",
        "16 dense layers of hidden 1024, sequence 1024, micro-batch 2: too small to gain from "
        "offloading",
        _SMALL,
        _variants(DENSE_MODULES, "core_attn attn_proj"),
        num_micro_batches=4,
    ),
    Case(
        "smoke",
        "three tiny layers, for trying the suite without a GPU; its times mean nothing",
        _SMOKE,
        (
            Variant(("core_attn", "attn_proj")),
            Variant(DENSE_MODULES, {"lag2": {"offload_release_lag": 2}}),
        ),
        offload={"min_offloaded_tensor_size": 1},
        needs_gpu=False,
    ),
    Case(
        "smoke_pp2",
        "the same on two pipeline stages, each a process",
        replace(_SMOKE, num_layers=6, pp=2),
        (Variant(("core_attn", "attn_proj")),),
        num_micro_batches=4,
        offload={"min_offloaded_tensor_size": 1},
        needs_gpu=False,
    ),
    Case(
        "smoke_ep2_pp2_vpp2",
        "four tiny expert layers in the layout of moe_ep2_pp2_vpp2, on four processes",
        replace(_SMOKE, kind="moe", num_layers=4, pp=2, vpp=2, dp=2, ep=2),
        _EXPERT_PIPELINE_VARIANTS,
        num_micro_batches=4,
        offload={"min_offloaded_tensor_size": 1},
        needs_gpu=False,
    ),
)


def find_case(name: str) -> Case:
    """The case called ``name``.

    Raises:
        ValueError: There is none; names the nearest.
    """
    cases = {case.name: case for case in CASES}
    if name in cases:
        return cases[name]
    near = difflib.get_close_matches(name, cases, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"--case {name} is not a case; {hint}Cases: {', '.join(cases)}")


def select_variants(case: Case, chosen: Sequence[str]) -> tuple[Variant, ...]:
    """The case's variants for these sets of modules, in the order given; all of them for none.

    Args:
        case: The case.
        chosen: Sets such as 'core_attn+attn_proj'; a comma does as well as a plus. 'all' is the
            case's last variant. Sets that the case does not list are made.

    Raises:
        ValueError: A name is not a module.
    """
    # Here and not above, so that importing this file needs megatron.slipstream for nothing else.
    from megatron.slipstream.config import check_module_names

    if not chosen:
        return case.variants
    known = {frozenset(variant.modules): variant for variant in case.variants}
    variants = []
    for text in chosen:
        names = tuple(filter(None, text.replace(",", "+").split("+")))
        if names == ("all",):
            variants.append(case.variants[-1])
            continue
        check_module_names(names)
        variants.append(known.get(frozenset(names), Variant(names)))
    return tuple(variants)


def engine_labels(variant: Variant, chosen: Sequence[str]) -> tuple[str, ...]:
    """The engines to measure for a variant: 'off' first, then those that ``chosen`` names.

    'slipstream' chooses its tunings too; 'slipstream:auto' that one only.
    """
    tunings = [f"slipstream:{name}" for name in variant.tunings]
    labels = ("megatron", *(["slipstream"] if variant.has_defaults else []), *tunings)
    picked = [label for label in labels if {label, label.partition(":")[0]} & set(chosen)]
    return ("off", *picked)
