# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A model and its training, from which saved bytes and times are derived.

:mod:`layers` derives what each part of a layer saves and computes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple, Optional

from megatron.slipstream.estimate.model_parts import (
    BYTES_OF,
    QUANTIZED_BYTES,
    AttentionBackend,
    Experts,
    GatedDeltaNet,
    LatentAttention,
    LayerKind,
    Mamba,
    Optimizer,
    Parallelism,
    Precision,
)
from megatron.slipstream.estimate.shape_checks import problems
from megatron.slipstream.plan.settings import NOTHING, Assignment, LayerSetting
from megatron.slipstream.plan.tiles import CrossEntropy


class Chunk(NamedTuple):
    """One model chunk: virtual pipeline stage ``vp_stage`` of pipeline rank ``pp_rank``."""

    pp_rank: int
    vp_stage: int
    layers: tuple[int, ...]
    """Indices of its layers in the model, from 0."""
    is_first: bool
    """Whether it holds the embedding."""
    is_last: bool
    """Whether it holds the output layer."""


@dataclass(frozen=True)
class ModelShape:
    """A GPT or hybrid model and how it is trained.

    Raises:
        ValueError: The options are invalid or inconsistent; the message names the option and the
            fix.
    """

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

    def __post_init__(self) -> None:
        for message in problems(self):
            raise ValueError(message)

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

    @property
    def head_dim(self) -> int:
        """``kv_channels`` with its default."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def element_bytes(self) -> int:
        """Bytes per activation element."""
        return BYTES_OF[self.precision]

    @property
    def linear_input_bytes(self) -> float:
        """Bytes per element of the input that a linear layer saves."""
        return QUANTIZED_BYTES[self.fp8_recipe] if self.fp8_recipe else self.element_bytes

    @property
    def heads(self) -> int:
        """Query heads on a rank."""
        return self.num_attention_heads // self.parallelism.tp

    @property
    def groups(self) -> int:
        """Key-value heads on a rank; with fewer groups than ranks, each rank has a copy of one."""
        return max(1, self.query_groups // self.parallelism.tp)

    @property
    def attention_sizes(self) -> tuple[int, int, int]:
        """Heads of keys and values on a rank, and the width of a key and of a value."""
        latent = self.latent_attention
        if latent is None:
            return self.groups, self.head_dim, self.head_dim
        return self.heads, latent.qk_head_dim + latent.qk_pos_emb_head_dim, latent.v_head_dim

    def feed_forward_sizes(self, kind: LayerKind) -> tuple[int, int]:
        """Rows and width of the activation function of an MLP or of a rank's experts."""
        if "E" in kind:
            return self.expert_tokens, self._experts.ffn_hidden_size // self.parallelism.etp
        return self.tokens, self.ffn_hidden_size // self.parallelism.tp

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch in a rank's attention and MLP."""
        return self.sequence * self.micro_batch_size

    @property
    def region_tokens(self) -> int:
        """Tokens of a micro-batch in norms and residuals, which sequence parallelism shards."""
        is_divided = self.parallelism.sequence_parallel
        return self.tokens // (self.parallelism.tp if is_divided else 1)

    @property
    def expert_tokens(self) -> int:
        """Input rows of a rank's experts with even routing.

        Each of a rank's tokens is sent to ``topk`` experts, and as many arrive from other ranks;
        ranks that shard an expert's weights (ETP) all have the same input rows.
        """
        return self.region_tokens * self._experts.topk * self.parallelism.etp

    @property
    def uses_transformer_engine(self) -> bool:
        """Whether layers are built from Transformer Engine's modules."""
        return self.attention_backend != "local"

    def kind_of(self, layer: int) -> LayerKind:
        """Return what a layer consists of."""
        if self.layer_kinds:
            return self.layer_kinds[layer]
        return "*-" if self.experts is None else "*E"

    @cached_property
    def kinds(self) -> dict[LayerKind, int]:
        """The kinds of layers, each with the index of its first layer."""
        found: dict[LayerKind, int] = {}
        for layer in range(self.num_layers):
            found.setdefault(self.kind_of(layer), layer)
        return found

    def recomputes(self, module: str) -> bool:
        """Return whether backward recomputes a module on its own, outside of a whole layer."""
        return module in self.recompute_modules

    def with_setting(self, setting: LayerSetting) -> ModelShape:
        """Return the same model with one setting for all layers."""
        if setting == self.recompute_modules and not self.layer_settings:
            return self
        return replace(self, recompute_modules=setting, layer_settings=())

    @cached_property
    def plain(self) -> ModelShape:
        """The same model without recomputation."""
        return self.with_setting(NOTHING)

    def setting_of(self, layer: int) -> LayerSetting:
        """Return what backward recomputes of a layer."""
        if self.kind_of(layer) == "/":
            return NOTHING
        return self.layer_settings[layer] if self.layer_settings else self.recompute_modules

    @cached_property
    def checkpoint_starts(self) -> frozenset[int]:
        """The layers that start a checkpoint if whole layers are recomputed."""
        step = self.layers_per_checkpoint
        return frozenset(layer for chunk in self.chunks for layer in chunk.layers[::step])

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """All model chunks, in layer order."""
        pp, num_stages = self.parallelism.pp, self.parallelism.vpp or 1
        found = []
        first = 0
        for stage in range(num_stages):
            for rank in range(pp):
                count = self.num_layers // (pp * num_stages)
                if self.layers_per_chunk:
                    count = self.layers_per_chunk[rank][stage]
                layers = tuple(range(first, first + count))
                first += count
                is_last = (rank, stage) == (pp - 1, num_stages - 1)
                found.append(Chunk(rank, stage, layers, rank == stage == 0, is_last))
        return tuple(found)

    def chunks_of(self, pp_rank: int) -> tuple[Chunk, ...]:
        """Return the chunks of a pipeline rank, by virtual stage."""
        return tuple(chunk for chunk in self.chunks if chunk.pp_rank == pp_rank)

    @property
    def _experts(self) -> Experts:
        if self.experts is None:
            raise ValueError("the model has no experts (num_experts is not set)")
        return self.experts


def has_feed_forward(kind: LayerKind) -> bool:
    """Return whether layers of a kind have an MLP or experts."""
    return kind[-1] in "-E"
