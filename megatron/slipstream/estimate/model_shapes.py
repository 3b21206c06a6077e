# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A model and its training, from which :mod:`layers` derives saved bytes and times.

Names are megatron-core's, or ``tp``, ``pp``, ``ep``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Literal, NamedTuple, Optional, get_args

from megatron.slipstream.plan.settings import NOTHING, WHOLE_LAYER, Assignment, LayerSetting
from megatron.slipstream.plan.tiles import CrossEntropy

AttentionBackend = Literal["fused", "flash", "unfused", "local"]
ATTENTION_BACKENDS: tuple[AttentionBackend, ...] = get_args(AttentionBackend)
ContextParallelism = Literal["p2p", "all_gather", "a2a", "a2a+p2p"]
Precision = Literal["bf16", "fp16", "fp32"]
QUANTIZED_BYTES: dict[str, float] = {
    **{"tensorwise": 1.0, "delayed": 1.0},
    **{"blockwise": 1 + 4 / 128, "mxfp8": 1 + 1 / 32},
}
"""Bytes per element of what a linear layer keeps of its input, with scales, by ``fp8_recipe``."""
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


class Chunk(NamedTuple):
    """One model chunk: virtual pipeline stage ``vp_stage`` of pipeline rank ``pp_rank``."""

    pp_rank: int
    vp_stage: int
    layers: tuple[int, ...]
    is_first: bool
    is_last: bool


@dataclass(frozen=True)
class ModelShape:
    """A GPT or hybrid model and how it is trained; raises ``ValueError`` if options are invalid."""

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
    deterministic_mode: bool = False
    """Whether fused attention is deterministic: [Note: Deterministic attention] in ``layers``."""
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
        for message in _problems(self):
            raise ValueError(message)

    @property
    def query_groups(self) -> int:
        return self.num_query_groups or self.num_attention_heads

    @property
    def sequence(self) -> int:
        """Tokens of a sequence on a context-parallel rank."""
        return self.seq_length // self.parallelism.cp

    @property
    def num_further_tokens(self) -> int:
        return self.layer_kinds.count("/")

    @property
    def head_dim(self) -> int:
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def element_bytes(self) -> int:
        return 4 if self.precision == "fp32" else 2

    @property
    def linear_input_bytes(self) -> float:
        """Bytes per element of the input that a linear layer saves."""
        return QUANTIZED_BYTES[self.fp8_recipe] if self.fp8_recipe else self.element_bytes

    @property
    def heads(self) -> int:
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
        """Rows and width of the activation function of an MLP or of a rank's experts.

        Routing is even: as many tokens arrive from other ranks as are sent. Ranks that shard an
        expert's weights (ETP) all have the same rows.
        """
        if "E" not in kind:
            return self.tokens, self.ffn_hidden_size // self.parallelism.tp
        assert self.experts is not None
        etp = self.parallelism.etp
        return self.region_tokens * self.experts.topk * etp, self.experts.ffn_hidden_size // etp

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
    def hidden_numel(self) -> int:
        """Elements of the hidden states of a micro-batch in norms and residuals."""
        return self.region_tokens * self.hidden_size

    @property
    def hidden_bytes(self) -> int:
        return self.hidden_numel * self.element_bytes

    @property
    def uses_transformer_engine(self) -> bool:
        return self.attention_backend != "local"

    def kind_of(self, layer: int) -> LayerKind:
        if self.layer_kinds:
            return self.layer_kinds[layer]
        return "*-" if self.experts is None else "*E"

    def recomputes(self, module: str) -> bool:
        """Return whether backward recomputes a module on its own, outside of a whole layer."""
        return module in self.recompute_modules

    def with_setting(self, setting: LayerSetting) -> ModelShape:
        if setting == self.recompute_modules and not self.layer_settings:
            return self
        return replace(self, recompute_modules=setting, layer_settings=())

    @cached_property
    def plain(self) -> ModelShape:
        return self.with_setting(NOTHING)

    def setting_of(self, layer: int) -> LayerSetting:
        if self.kind_of(layer) == "/":
            return NOTHING
        return self.layer_settings[layer] if self.layer_settings else self.recompute_modules

    def kind_and_setting(self, layer: int) -> tuple[LayerKind, LayerSetting]:
        return self.kind_of(layer), self.setting_of(layer)

    @cached_property
    def checkpoint_starts(self) -> frozenset[int]:
        """The layers that start a checkpoint if whole layers are recomputed."""
        step = self.layers_per_checkpoint
        return frozenset(layer for chunk in self.chunks for layer in chunk.layers[::step])

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
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
        return tuple(chunk for chunk in self.chunks if chunk.pp_rank == pp_rank)


def has_feed_forward(kind: LayerKind) -> bool:
    """Return whether layers of a kind have an MLP or experts."""
    return kind[-1] in "-E"


def _problems(shape: ModelShape) -> Iterator[str]:
    """Yield what no model has, each with its cure; later ones assume that none came before.

    Other choices are checked where they are read.
    """
    for name, size in _sizes(shape):
        limit = MAX_LAYERS if name == "num_layers" else MAX_SIZE
        if size < 1:
            yield f"{name}={size} must be positive; set 1 or more"
        if size > limit:
            yield f"{name}={size} is too large to plan; set {limit} or less"
    for name in sorted(shape.recompute_modules - {WHOLE_LAYER, *RECOMPUTE_MODULES}):
        yield (
            f"recompute_modules contains {name!r}, which is not modelled; "
            f"set some of {', '.join(RECOMPUTE_MODULES)}"
        )
    if shape.recomputes("mla_up_proj") and shape.latent_attention is None:
        yield (
            "recompute_modules contains 'mla_up_proj', but the model has no multi-latent "
            "attention; remove it"
        )
    par, exchanges = shape.parallelism, get_args(ContextParallelism)
    if par.cp_comm_type not in exchanges:
        given = f"cp_comm_type={par.cp_comm_type!r}"
        yield f"{given} is not modelled; set one of {', '.join(exchanges)}"
    for name, value, by, divisor in _shares(shape):
        if value % divisor:
            cure = _cure(name, value, by, divisor)
            yield f"{name}={value} is not a multiple of {by}={divisor}; {cure}"
    if max(shape.query_groups, par.tp) % min(shape.query_groups, par.tp):
        yield (
            f"num_query_groups={shape.query_groups} and tensor_model_parallel_size={par.tp} "
            "must divide one another; change one of them"
        )
    # A hybrid_layer_pattern gives num_layers, too.
    kinds, given = shape.layer_kinds, "moe_layer_freq"
    if kinds and len(kinds) != shape.num_layers:
        yield (
            f"{given} has {len(kinds)} entries, but num_layers={shape.num_layers}; give one entry "
            "per layer"
        )
    if shape.experts is None and any("E" in kind for kind in kinds):
        given = given if {*kinds} <= {"*E", "*-"} else "hybrid_layer_pattern"
        yield f"{given} names layers with experts, but num_experts is not set; set it"
    for is_wrong, what, other, why, cure in _conflicts(shape):
        if is_wrong:
            yield f"{what} is not supported with {other} because {why}; {cure}"
    if not shape.layers_per_chunk and shape.num_layers % (par.pp * (par.vpp or 1)):
        yield (
            f"num_layers={shape.num_layers} cannot be divided evenly among "
            f"pipeline_model_parallel_size={par.pp} times {par.vpp or 1} chunks; set "
            "decoder_first_pipeline_num_layers or decoder_last_pipeline_num_layers"
        )


def _sizes(shape: ModelShape) -> Iterator[tuple[str, int]]:
    """Yield every whole number that is set, by megatron's name."""
    parts = (shape, shape.parallelism, shape.latent_attention, shape.gated_delta_net, shape.mamba,
             shape.experts)  # fmt: skip
    for part in parts:
        for each in fields(part) if part is not None else ():
            size = getattr(part, each.name)
            # 0 is the default of a model without shared experts.
            is_unset = size is None or (size, each.name) == (0, "shared_ffn_hidden_size")
            if each.type in ("int", "Optional[int]") and not is_unset:
                name = OPTIONS_OF.get(type(part), {}).get(each.name, each.name)
                yield _OTHER_NAMES.get(name, name), size


_OTHER_NAMES = {"num_moe_experts": "num_experts", "layers_per_checkpoint": "recompute_num_layers"}


def _conflicts(shape: ModelShape) -> list[tuple[bool, str, str, str, str]]:
    """Return whether two options exclude each other, the options, why, and the cure."""
    par, backend = shape.parallelism, f"attention_backend={shape.attention_backend!r}"
    is_fused = shape.attention_backend in ("fused", "flash")
    found = [
        (par.cp > 1 and not is_fused, f"context_parallel_size={par.cp}", backend,
         "only Transformer Engine's fused kernels are divided", "set 'fused' or 'flash'"),
        (is_fused and shape.precision == "fp32", backend, "precision='fp32'",
         "its kernels have 16-bit inputs", "set 'unfused' or 'local'"),
        (shape.layers_per_checkpoint > 1 and shape.num_further_tokens > 0,
         f"recompute_num_layers={shape.layers_per_checkpoint}",
         f"mtp_num_layers={shape.num_further_tokens}",
         "megatron-core checkpoints each prediction alone", "set 1"),
        (par.vpp is not None and par.pp == 1, f"virtual_pipeline_model_parallel_size={par.vpp}",
         "pipeline_model_parallel_size=1", "only the chunks of several stages can be interleaved",
         "leave it out"),
    ]  # fmt: skip
    if (experts := shape.experts) is None:
        return found
    num_groups = experts.num_groups or 1
    group_topk = experts.group_topk or num_groups
    eligible = group_topk * (experts.num_experts // num_groups)
    topk, count = f"moe_router_topk={experts.topk}", f"num_experts={experts.num_experts}"
    chosen, groups = f"moe_router_group_topk={group_topk}", f"moe_router_num_groups={num_groups}"
    return [
        *found,
        (par.tp > 1 and not par.sequence_parallel, f"tensor_model_parallel_size={par.tp}",
         "experts without sequence_parallel", "megatron-core requires it", "set sequence_parallel"),
        (experts.topk > experts.num_experts, topk, count,
         "a token is sent to an expert at most once", "change one of them"),
        (group_topk > num_groups, chosen, groups,
         "a group is chosen at most once", "change one of them"),
        (experts.topk > eligible, topk, chosen,
         f"these groups have {eligible} experts ({count} in {groups})", "change one of them"),
    ]  # fmt: skip


def _cure(name: str, value: int, by: str, divisor: int) -> str:
    """Return the nearest size that is divided evenly."""
    if name == "seq_length":
        return f"set seq_length to {-(-value // divisor) * divisor}"
    if " " in by:
        return "change one of them"
    smaller = range(min(value, divisor, _MAX_TRIED), 0, -1)
    return f"set {by} to {next(size for size in smaller if value % size == 0)}"


_MAX_TRIED = 100_000


def _shares(shape: ModelShape) -> Iterator[tuple[str, int, str, int]]:
    """Yield sizes with what has to divide them."""
    par, experts = shape.parallelism, shape.experts
    heads, tensor = shape.num_attention_heads, "tensor_model_parallel_size"
    yield "num_attention_heads", heads, tensor, par.tp
    yield "ffn_hidden_size", shape.ffn_hidden_size, tensor, par.tp
    yield "num_attention_heads", heads, "num_query_groups", shape.query_groups
    if shape.kv_channels is None and shape.latent_attention is None:
        yield "hidden_size", shape.hidden_size, "num_attention_heads", heads
    if par.cp > 1:
        # To balance load, each context-parallel rank gets a part of both sequence halves.
        yield "seq_length", shape.seq_length, "2 * context_parallel_size", 2 * par.cp
    if par.sequence_parallel:
        name = f"{tensor} (sequence_parallel)"
        yield "seq_length / context_parallel_size", shape.sequence, name, par.tp
    if (mamba := shape.mamba) is not None:
        count, groups = mamba.num_heads, mamba.num_groups
        yield "mamba_num_heads", count, f"{tensor} * context_parallel_size", par.tp * par.cp
        yield "mamba_num_groups", groups, tensor, par.tp
        yield "mamba_num_heads", count, "mamba_num_groups", groups
    if (net := shape.gated_delta_net) is not None:
        keys, values = net.num_key_heads, net.num_value_heads
        yield "linear_num_key_heads", keys, f"{tensor} * context_parallel_size", par.tp * par.cp
        yield "linear_num_value_heads", values, "linear_num_key_heads", keys
    if experts is None:
        return
    shared = experts.shared_ffn_hidden_size
    yield "num_experts", experts.num_experts, "expert_model_parallel_size", par.ep
    yield "num_experts", experts.num_experts, "moe_router_num_groups", experts.num_groups or 1
    yield "moe_ffn_hidden_size", experts.ffn_hidden_size, "expert_tensor_parallel_size", par.etp
    yield "moe_shared_expert_intermediate_size", shared, tensor, par.tp
