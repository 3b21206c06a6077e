# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A training that is planned before it runs: its model by megatron's options; what may move."""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, field, fields, replace
from types import SimpleNamespace
from typing import Any, Optional

from megatron.slipstream.estimate.layers import (
    CHECKPOINT_INPUTS,
    MEGATRON_MODULES,
    MODULES,
    marked_modules,
)
from megatron.slipstream.estimate.model_shapes import (
    OPTIONS_OF,
    PARALLELISM,
    Experts,
    GatedDeltaNet,
    LatentAttention,
    LayerKind,
    Mamba,
    ModelShape,
    Parallelism,
)
from megatron.slipstream.estimate.model_state import state_bytes
from megatron.slipstream.estimate.synthetic import DEFAULT_MIN_NUMEL
from megatron.slipstream.options.model import check_model_options
from megatron.slipstream.options.rules import require
from megatron.slipstream.plan.candidates import PolicyOptions
from megatron.slipstream.plan.settings import NOTHING, WHOLE

_SAME_NAMES = (
    *("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "num_query_groups"),
    *("kv_channels", "gated_linear_unit", "normalization", "qk_layernorm", "hidden_dropout"),
    *("bias_activation_fusion", "apply_rope_fusion", "attention_softmax_in_fp32"),
    *("deterministic_mode", "attention_dropout", "vocab_size", "seq_length", "micro_batch_size"),
)
"""Fields of a :class:`ModelShape` that are named like the option."""

ChunkCounts = tuple[tuple[int, ...], ...]
"""Layers of each model chunk, ``[pp rank][virtual stage]``."""


def shape_of_options(options: Any, **more: Any) -> ModelShape:
    """Return the shape that megatron's options describe, which ``more`` completes and overrides.

    What is missing has the default of :class:`ModelShape`. Raises ``ValueError``, which names the
    option and the fix, if the shape is invalid.
    """
    shape = ModelShape(**(shape_fields(options) | more))
    if shape.recompute_modules != WHOLE or getattr(options, "recompute_method", "") != "block":
        return shape
    count = options.recompute_num_layers
    whole = {layer for chunk in shape.chunks for layer in chunk.layers[:count]}
    settings = tuple(WHOLE if layer in whole else NOTHING for layer in range(shape.num_layers))
    return replace(shape, recompute_modules=NOTHING, layer_settings=settings)


def shape_fields(options: Any) -> dict[str, Any]:
    """Return the fields of a :class:`ModelShape` that megatron's options give."""
    found = {name: getattr(options, name) for name in _SAME_NAMES if hasattr(options, name)}
    if hasattr(options, "untie_embeddings_and_output_weights"):
        is_shared = not options.untie_embeddings_and_output_weights
        found["share_embeddings_and_output_weights"] = is_shared
    if hasattr(options, "bf16"):
        found["precision"] = "bf16" if options.bf16 else "fp16" if options.fp16 else "fp32"
    if getattr(options, "fp8", None):
        found["fp8_recipe"] = options.fp8_recipe
    if getattr(options, "cross_entropy_loss_fusion", None):
        found["cross_entropy"] = options.cross_entropy_fusion_impl
    if getattr(options, "recompute_method", None) == "uniform":
        found["layers_per_checkpoint"] = options.recompute_num_layers
    if granularity := getattr(options, "recompute_granularity", None):
        is_whole = granularity == "full"
        found["recompute_modules"] = WHOLE if is_whole else frozenset(options.recompute_modules)
    if any(hasattr(options, name) for name in PARALLELISM.values()):
        found["parallelism"] = parallelism_of_options(options)
    found["window_size"] = _window(options)
    is_latent = getattr(options, "multi_latent_attention", False)
    found["latent_attention"] = part_of(LatentAttention, options) if is_latent else None
    found["experts"], found["layer_kinds"] = _experts(options)
    return found


def pattern_fields(options: Any, pattern: str, counts: ChunkCounts) -> dict[str, Any]:
    """Return the fields of a hybrid model's :class:`ModelShape` that its pattern gives.

    ``pattern`` is megatron-core's ``hybrid_layer_pattern`` of ``*`` and ``+`` (attention, and
    latent attention, which no model has both of), ``-``, ``E``, ``M``, ``G``, ``|`` between model
    chunks, and ``/`` before the layers that predict a further token. ``counts`` are the layers of
    each chunk where the pattern does not divide them.
    """
    main, *further = pattern.replace("+", "*").split("/")
    segments = main.split("|")
    if len(segments) > 1:
        pp = options.pipeline_model_parallel_size
        counts = tuple(tuple(map(len, segments[rank::pp])) for rank in range(pp))
    # The last chunk predicts further tokens. A separator without letters behind it means nothing.
    ends = "".join("/" + letters for letters in further if letters)
    *others, last = counts
    mamba = gated_delta_net = None
    if "M" in pattern:
        heads = options.mamba_num_heads or 2 * options.hidden_size // options.mamba_head_dim
        mamba = part_of(Mamba, options, num_heads=heads)
    if "G" in pattern:
        gated_delta_net = part_of(GatedDeltaNet, options)
    found: dict[str, Any] = {
        "num_layers": sum(map(len, segments)) + len(ends),
        "layer_kinds": (*"".join(segments), *ends),
        "layers_per_chunk": (*others, (*last[:-1], last[-1] + len(ends))),
        "mamba": mamba,
        "gated_delta_net": gated_delta_net,
    }
    if "+" in pattern:  # Its latent vectors have no norms.
        return found | {"qk_layernorm": False}
    return found | {"latent_attention": None}


def _window(options: Any) -> Optional[int]:
    window = getattr(options, "window_size", None)
    is_everywhere = getattr(options, "window_attn_skip_freq", None) is None
    return int(window[0]) if window and is_everywhere and window[0] > 0 else None


def _experts(options: Any) -> tuple[Optional[Experts], tuple[LayerKind, ...]]:
    """Return the experts, and what each layer has if only some of them have experts."""
    if not getattr(options, "num_moe_experts", None):
        return None, ()
    frequency = getattr(options, "moe_layer_freq", 1)
    if isinstance(frequency, int):
        frequency = [layer % frequency == 0 for layer in range(options.num_layers)]
    experts: Experts = part_of(Experts, options)
    return experts, tuple("*E" if has_experts else "*-" for has_experts in frequency)


def parallelism_of_options(options: Any, **more: Any) -> Parallelism:
    """Return how megatron's options divide a model among ranks; ``more`` overrides them."""
    found: Parallelism = part_of(Parallelism, options, **more)
    if getattr(options, "expert_tensor_parallel_size", 1):
        return found
    return replace(found, etp=found.tp)


def part_of(part: Any, options: Any, **more: Any) -> Any:
    """Return a part of a shape that megatron's options describe; ``more`` overrides them."""
    given = {field: getattr(options, name, None) for field, name in OPTIONS_OF[part].items()} | more
    defaults = {each.name for each in fields(part) if each.default is not MISSING}
    unset = {field for field in defaults if given.get(field) is None}
    return part(**{field: value for field, value in given.items() if field not in unset})


@dataclass(frozen=True)
class Configured:
    """A model, its schedule, and the modules that may be offloaded."""

    title: str
    """A description for the user."""
    shape: ModelShape
    modules: tuple[str, ...]
    num_micro_batches: int
    min_numel: int = DEFAULT_MIN_NUMEL
    policy: PolicyOptions = field(default_factory=PolicyOptions)
    notes: tuple[str, ...] = ()
    ranks_per_host: Optional[int] = None
    """Ranks that share a host's memory; None for 8, or all if there are fewer."""
    state_gib: Optional[float] = None
    """Weights, gradients and optimizer of a rank; None derives them from the parameters."""

    @property
    def num_ranks_of_host(self) -> int:
        return self.ranks_per_host or min(8, self.shape.parallelism.num_gpus)

    def state_bytes(self, pp_rank: int) -> int:
        if self.state_gib is not None:
            return int(self.state_gib * 2**30)
        return state_bytes(self.shape, pp_rank)

    def __post_init__(self) -> None:
        if self.num_micro_batches < 1:
            raise ValueError(
                f"--num-micro-batches={self.num_micro_batches} must be positive; set 1 or more"
            )
        par = self.shape.parallelism
        ranks = par.dp * par.tp * par.cp
        if ranks % (par.ep * par.etp):
            raise ValueError(
                f"data_parallel_size={par.dp} is not supported with "
                f"expert_model_parallel_size={par.ep} because experts are divided among "
                f"{par.ep * par.etp} ranks, and a pipeline stage has {ranks}; set "
                f"data_parallel_size={fewest_data_parallel_ranks(par)}, or a multiple of it"
            )
        check_modules(self.shape, self.modules)


def usable_modules(shape: ModelShape) -> tuple[str, ...]:
    """Return the modules that may move unless others are named, in layer order.

    These are those that megatron-core marks in any layer of the model; of state-space layers, which
    it does not mark, those that Slipstream does. 'core_attn' is included even if not marked, since
    megatron-core requires it with 'attn_proj'. The inputs of recomputed layers are included.
    """
    found = {name for layer in range(shape.num_layers) for name in marked_modules(shape, layer)}
    found.add("core_attn")
    return tuple(name for name in (CHECKPOINT_INPUTS, *MEGATRON_MODULES) if name in found)


def default_micro_batches(parallelism: Parallelism) -> int:
    """Return enough micro-batches to reach a steady state: two rounds of the pipeline."""
    if parallelism.pp == 1:
        return 2
    return 2 * max(parallelism.pp, parallelism.group_size or 0)


def fewest_data_parallel_ranks(parallelism: Parallelism) -> int:
    """Return the smallest ``dp`` with which both dense and expert group sizes divide the ranks."""
    dense, experts = parallelism.tp * parallelism.cp, parallelism.ep * parallelism.etp
    return max(1, math.lcm(dense, experts) // max(1, dense))


def check_modules(shape: ModelShape, modules: tuple[str, ...]) -> None:
    """Raise ``ValueError`` if modules are unknown here or to megatron-core, or save nothing."""
    # Only the rules about modules and experts apply here.
    experts = shape.experts
    facts = SimpleNamespace(
        fine_grained_activation_offloading=True,
        offload_modules=[name for name in modules if name != CHECKPOINT_INPUTS],
        num_moe_experts=experts and experts.num_experts,
        moe_shared_expert_intermediate_size=experts and experts.shared_ffn_hidden_size,
        activation_offload_fraction=1.0,
        min_offloaded_tensor_size=0,
        delta_offload_bytes_across_pp_ranks=0,
        cpu_offloading=False,
    )
    require(check_model_options(facts))
    for name in modules:
        if name not in (CHECKPOINT_INPUTS, *MODULES):
            raise ValueError(
                f"offload_modules contains {name!r}, whose sizes are not modelled; "
                f"use {', '.join(MODULES)}, or plan a recorded trace"
            )
    if shape.recomputes("moe") and {"expert_fc1", "moe_act"} & set(modules):
        raise ValueError(
            "offload_modules contains expert modules, which is not supported with 'moe' in "
            "recompute_modules because experts then save no tensors; remove one of them"
        )
