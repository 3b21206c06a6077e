# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The sizes and training options of a model, as they are given.

Names are megatron-core's, abbreviated as usual (``tp``, ``pp``, ``ep``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Optional

from megatron.slipstream.plan.settings import NOTHING, Assignment, LayerSetting

AttentionBackend = Literal["fused", "flash", "unfused", "local"]
ATTENTION_BACKENDS: tuple[AttentionBackend, ...] = ("fused", "flash", "unfused", "local")
ContextParallelism = Literal["p2p", "all_gather", "a2a", "a2a+p2p"]
CONTEXT_PARALLELISMS: tuple[ContextParallelism, ...] = ("p2p", "all_gather", "a2a", "a2a+p2p")
CrossEntropy = Literal["unfused", "native", "te"]
CROSS_ENTROPIES: tuple[CrossEntropy, ...] = ("unfused", "native", "te")
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
"""megatron-core's ``recompute_modules`` that are modelled."""

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
    """Width of each expert."""
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
    """Heads of queries and of keys."""
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
        """Ranks of the training."""
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


@dataclass(frozen=True)
class ModelFields:
    """The fields of a :class:`~megatron.slipstream.estimate.model_shapes.ModelShape`, unchecked."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    ffn_hidden_size: int
    """Width of dense layers. With ``gated_linear_unit`` the first projection is twice as wide."""
    vocab_size: int
    seq_length: int
    """Tokens per sequence, before context parallelism splits it."""
    micro_batch_size: int = 1
    num_query_groups: Optional[int] = None
    """Heads of keys and values; None means ``num_attention_heads``."""
    kv_channels: Optional[int] = None
    """Size of a head; None means ``hidden_size / num_attention_heads``."""
    gated_linear_unit: bool = True
    """Whether the activation function is gated, as in SwiGLU."""
    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    qk_layernorm: bool = False
    share_embeddings_and_output_weights: bool = False
    window_size: Optional[int] = None
    """Attention window in tokens; None means the whole sequence. It affects only times."""
    latent_attention: Optional[LatentAttention] = None
    experts: Optional[Experts] = None
    mamba: Optional[Mamba] = None
    gated_delta_net: Optional[GatedDeltaNet] = None
    layer_kinds: tuple[LayerKind, ...] = ()
    """Of each layer; empty means attention and, if there are any, experts, else an MLP in all."""
    precision: Precision = "bf16"
    fp8_recipe: Optional[str] = None
    """The recipe of linear layers that compute in fp8; None if they do not."""
    attention_backend: AttentionBackend = "fused"
    """``fused``, ``flash`` and ``unfused`` are Transformer Engine's implementations of core
    attention, in layers built from its modules; ``local`` is a layer built from megatron-core's
    plain PyTorch modules (``--transformer-impl local``) as they run without a GPU."""
    cross_entropy: CrossEntropy = "unfused"
    """The loss: ``cross_entropy_fusion_impl``, or ``unfused`` without cross_entropy_loss_fusion."""
    bias_activation_fusion: bool = True
    """Whether the activation function is one kernel (megatron's ``--no-bias-swiglu-fusion`` turns
    it off)."""
    apply_rope_fusion: bool = True
    attention_softmax_in_fp32: bool = False
    """Applies to ``local`` core attention."""
    attention_dropout: float = 0.0
    """Applies to ``unfused`` and ``local`` core attention."""
    hidden_dropout: float = 0.0
    recompute_modules: LayerSetting = NOTHING
    """What backward recomputes of every layer: ``recompute_modules`` of
    ``recompute_granularity='selective'``, or the whole layer (``'full'``)."""
    layer_settings: Assignment = ()
    """The setting of each layer, in the order of the model, if they differ."""
    layers_per_checkpoint: int = 1
    """Layers that one checkpoint of whole layers recomputes (``recompute_num_layers`` of
    ``recompute_method='uniform'``); only the first layer of each saves its input."""
    mlp_sequence_tiles: bool = False
    """Whether MLPs and experts are computed by tiles (``'auto'``), each again in backward."""
    loss_sequence_tiles: bool = False
    """Whether the output layer and the loss are, too."""
    optimizer: Optimizer = field(default_factory=Optimizer)
    parallelism: Parallelism = field(default_factory=Parallelism)
    layers_per_chunk: tuple[tuple[int, ...], ...] = ()
    """Layers of each chunk, ``[pp rank][virtual stage]``; empty divides them evenly."""

    @property
    def query_groups(self) -> int:
        """``num_query_groups`` with its default."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def sequence(self) -> int:
        """Tokens of a sequence on a context-parallel rank."""
        return self.seq_length // self.parallelism.cp

    @property
    def num_further_tokens(self) -> int:
        """Predictions of further tokens (``mtp_num_layers``)."""
        return self.layer_kinds.count("/")
