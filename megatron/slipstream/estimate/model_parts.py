# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Sizes and training options of a model by megatron-core's names, or ``tp``, ``pp``, ``ep``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal, Optional, get_args

AttentionBackend = Literal["fused", "flash", "unfused", "local"]
ATTENTION_BACKENDS: tuple[AttentionBackend, ...] = get_args(AttentionBackend)
ContextParallelism = Literal["p2p", "all_gather", "a2a", "a2a+p2p"]
Precision = Literal["bf16", "fp16", "fp32"]
QUANTIZED_BYTES: dict[str, float] = {
    **{"tensorwise": 1.0, "delayed": 1.0},
    **{"blockwise": 1 + 4 / 128, "mxfp8": 1 + 1 / 32},
}
"""Bytes per element of what a linear layer keeps of its input, with scales, by ``fp8_recipe``."""
BYTES_OF: dict[str, int] = {"bf16": 2, "fp16": 2, "fp32": 4}
LayerKind = Literal["*-", "*E", "*", "-", "E", "M", "G", "/"]
"""What a layer consists of, in the letters of megatron-core's ``hybrid_layer_pattern``: ``*``
attention, ``-`` an MLP, ``E`` experts, ``M`` Mamba, ``G`` a gated delta net. A layer of a GPT model
has two of them, of a hybrid model one. What begins the prediction of a further token (``/``) counts
as a layer of its own, before the layers that predict it."""
RECOMPUTE_MODULES = (
    *("core_attn", "layernorm", "moe_act", "mla_up_proj", "mlp", "moe", "shared_experts"),
)

MAX_LAYERS = 10_000
"""Upper limit on the number of layers; setting up a plan with more would take minutes."""

MAX_SIZE = 1 << 27
"""Upper limit on every other number. No training has a sequence of more tokens."""


@dataclass(frozen=True)
class LatentAttention:
    """Multi-latent attention, with megatron-core's option names."""

    q_lora_rank: Optional[int]
    """None if queries are projected directly from the hidden state."""
    kv_lora_rank: int
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    v_head_dim: int


@dataclass(frozen=True)
class Experts:
    """The mixture-of-experts layers; even routing is assumed."""

    num_experts: int
    topk: int
    ffn_hidden_size: int
    shared_ffn_hidden_size: int = 0
    """Width of all shared experts together; 0 without shared experts."""
    num_groups: Optional[int] = None
    """Groups of experts (``moe_router_num_groups``); None without group-limited routing."""
    group_topk: Optional[int] = None
    """Groups among whose experts a token's are chosen (``moe_router_group_topk``)."""


@dataclass(frozen=True)
class Mamba:
    """The Mamba layers of a hybrid model."""

    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int
    """Groups of heads that share what goes into and comes out of their states."""


@dataclass(frozen=True)
class GatedDeltaNet:
    """The gated delta nets of a hybrid model."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel_dim: int


@dataclass(frozen=True)
class Parallelism:
    """How the model is divided among ranks."""

    tp: int = 1
    sequence_parallel: bool = False
    cp: int = 1
    cp_comm_type: ContextParallelism = "p2p"
    pp: int = 1
    vpp: Optional[int] = None
    """Model chunks of each rank in the interleaved schedule; None without interleaving."""
    group_size: Optional[int] = None
    """``microbatch_group_size_per_vp_stage``; None means ``pp``."""
    ep: int = 1
    etp: int = 1
    dp: int = 1
    shards_optimizer: bool = True
    """Whether ``dp * cp`` ranks divide the optimizer's state (megatron's distributed optimizer)."""

    @property
    def num_gpus(self) -> int:
        return self.tp * self.cp * self.pp * self.dp


PARALLELISM = {
    "tp": "tensor_model_parallel_size",
    "sequence_parallel": "sequence_parallel",
    "cp": "context_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "group_size": "microbatch_group_size_per_vp_stage",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "dp": "data_parallel_size",
}
"""The option of each field of a :class:`Parallelism`."""

OPTIONS_OF: Mapping[type, Mapping[str, str]] = {
    Parallelism: PARALLELISM,
    Experts: {
        "num_experts": "num_moe_experts",
        "topk": "moe_router_topk",
        "ffn_hidden_size": "moe_ffn_hidden_size",
        "shared_ffn_hidden_size": "moe_shared_expert_intermediate_size",
        "num_groups": "moe_router_num_groups",
        "group_topk": "moe_router_group_topk",
    },
    **{
        part: {each.name: prefix + each.name for each in fields(part)}
        for part, prefix in ((LatentAttention, ""), (Mamba, "mamba_"), (GatedDeltaNet, "linear_"))
    },
}
"""Megatron's option of each field of these parts."""


@dataclass(frozen=True)
class Optimizer:
    """Bytes per parameter of gradients and of the state of Adam."""

    gradient_bytes: int = 4
    """Megatron accumulates in float32 unless ``grad_reduce_in_bf16`` says otherwise."""
    main_bytes: int = 4
    """Of the main copy of a 16-bit weight."""
    moment_bytes: int = 8
    """Of both moments."""
    host_share: float = 0.0
    """Share of the parameters whose optimizer runs on the host (``optimizer_cpu_offload``)."""
    weight_bytes: Optional[float] = None
    """Bytes per weight with its quantized copies, by rows and by columns; None for the precision of
    activations."""
