# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The model and its training that megatron's options describe, wherever they come from."""

from __future__ import annotations

from dataclasses import MISSING, fields, replace
from typing import Any, Optional

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
    if shape.recompute_modules != WHOLE or options.recompute_method != "block":
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


def parallelism_of_options(options: Any) -> Parallelism:
    """Return how megatron's options divide a model among ranks."""
    found: Parallelism = part_of(Parallelism, options)
    if getattr(options, "expert_tensor_parallel_size", 1):
        return found
    return replace(found, etp=found.tp)


def part_of(part: Any, options: Any, **more: Any) -> Any:
    """Return a part of a shape that megatron's options describe; ``more`` overrides them."""
    given = {field: getattr(options, name, None) for field, name in OPTIONS_OF[part].items()} | more
    defaults = {each.name for each in fields(part) if each.default is not MISSING}
    unset = {field for field in defaults if given.get(field) is None}
    return part(**{field: value for field, value in given.items() if field not in unset})
