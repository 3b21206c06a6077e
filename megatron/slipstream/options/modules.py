# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Modules for ``offload_modules`` that Slipstream marks itself, and their rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from megatron.slipstream.options.rules import Predicate, Rule, option_rule

OWN_MODULES: Mapping[str, str] = {
    "mlp_fc1": "first linear layer of a dense MLP (saves the normalised input, [s, b, h]; "
    "Transformer Engine's, which contains the norm, the norm's input too)",
    "mlp_act": "activation function of a dense MLP (saves the first linear layer's output)",
    "mlp_fc2": "second linear layer of a dense MLP (saves the activation function's output)",
    "expert_fc2": "second grouped GEMM of the experts (saves the activation function's output)",
    "shared_experts": "shared experts as a whole",
    "mla_down_proj": "projections of multi-latent attention from the layer's input to latent "
    "queries, keys and values (save the normalised input, [s, b, h])",
    "mla_up_proj": "norms and projections of the latent queries, keys and values (save them)",
    "gdn_in_proj": "input projection of a gated delta net (saves the normalised input, [s, b, h]; "
    "Transformer Engine's, which contains the norm, the norm's input too)",
    "gdn_rule": "convolution, gated delta rule and gated norm of a gated delta net (save queries, "
    "keys, values, gates and the rule's output)",
    "gdn_out_proj": "output projection of a gated delta net (saves the gated norm's output)",
    "mamba_in_proj": "norm and input projection of a Mamba layer (save their inputs, [s, b, h])",
    "mamba_scan": "convolution, scan and gated norm of a Mamba layer (save the input projection's "
    "output and the scan's)",
    "mamba_out_proj": "output projection of a Mamba layer (saves the gated norm's output)",
    "embedding": "embedding (saves the mask of its dropout)",
    "output_layer": "final norm and output layer (save their inputs, [s, b, h])",
}
"""Names of modules that Slipstream marks, with the tensors saved for backward."""

OF_DENSE_MLP = frozenset({"mlp_fc1", "mlp_act", "mlp_fc2"})
OUTSIDE_LAYERS = frozenset({"embedding", "output_layer"})
OF_LATENT_ATTENTION = frozenset({"mla_down_proj", "mla_up_proj"})
OF_GATED_DELTA_NET = frozenset({"gdn_in_proj", "gdn_rule", "gdn_out_proj"})
OF_MAMBA = frozenset({"mamba_in_proj", "mamba_scan", "mamba_out_proj"})


def own_modules(facts: Any) -> list[str]:
    """Return the names in ``offload_modules`` that megatron-core does not mark."""
    return [name for name in getattr(facts, "offload_modules", None) or () if name in OWN_MODULES]


def has_only_expert_layers(facts: Any) -> bool:
    """Whether every layer of a model without a pattern has experts."""
    pattern = facts.moe_layer_freq
    is_every_one = pattern == 1 or (isinstance(pattern, list) and all(pattern))
    has_pattern = facts.hybrid_layer_pattern or facts.is_hybrid_model
    return bool(facts.num_moe_experts) and not has_pattern and is_every_one


def has_layers(facts: Any, letters: str) -> bool:
    """Whether the hybrid pattern has layers of any of these letters."""
    return bool({*letters} & {*(facts.hybrid_layer_pattern or "")})


def _lacks_layers(facts: Any, letters: str) -> bool:
    """Whether the model is known to have no layers of these letters in a pattern."""
    is_known = facts.lacks("hybrid_layer_pattern") or bool(facts.hybrid_layer_pattern)
    return is_known and not has_layers(facts, letters)


def _refused(names: Iterable[str], when: Predicate, text: str) -> Rule:
    """Return the rule that some modules cannot move under a condition: 'where: because; cure'."""
    where, _, text = text.partition(": ")
    because, _, cure = text.partition("; ")
    listed = sorted(names)
    return option_rule(
        "offload_modules",
        lambda f: f.fine_grained_activation_offloading and when(f),
        lambda f: not {*listed} & {*own_modules(f)},
        f"offload_modules={{offload_modules}} is not supported {where} because {because}",
        f"remove {', '.join(listed)}" + (f", or {cure}" if cure else ""),
    )


def _if_recomputed(names: Iterable[str], module: str) -> Rule:
    """Return the rule that modules cannot move inside one of ``recompute_modules``."""
    return _refused(
        names,
        lambda f: f.recompute_granularity == "selective" and module in (f.recompute_modules or ()),
        f"with {module!r} in recompute_modules: what backward computes again saves nothing inside; "
        f"remove {module!r} from recompute_modules",
    )


def _if_on(names: Iterable[str], option: str, because: str) -> Rule:
    """Return the rule that modules cannot move with an option."""
    text = f"with {option}=True: {because}; set {option}=False"
    return _refused(names, lambda f: getattr(f, option), text)


def _if_lacking(names: Iterable[str], option: str, because: str, letters: str = "") -> Rule:
    """Return the rule for models without an option, which layers of these letters set, too."""
    return _refused(
        names,
        lambda f: f.lacks(option) and not has_layers(f, letters),
        f"without {option}: {because}",
    )


OWN_MODULE_RULES: tuple[Rule, ...] = (
    _refused(
        OWN_MODULES,
        lambda f: f.offload_engine != "slipstream",
        "with offload_engine='megatron': that engine moves only what megatron-core marks; "
        "set offload_engine='slipstream'",
    ),
    _refused(
        OWN_MODULES,
        lambda f: f.cuda_graph_impl == "local",
        "with cuda_graph_impl='local': only megatron-core's expert modules move outside of its "
        "graphs; set cuda_graph_impl='transformer_engine'",
    ),
    _refused(
        OUTSIDE_LAYERS,
        lambda f: f.cuda_graph_granularity == "chunk",
        "with cuda_graph_granularity='chunk': these modules run outside of the graphs, which hold "
        "the host memory; set cuda_graph_granularity='layer'",
    ),
    _refused(
        OF_DENSE_MLP,
        has_only_expert_layers,
        "with moe_layer_freq={moe_layer_freq}: no layer has a dense MLP then",
    ),
    _if_recomputed(OF_DENSE_MLP, "mlp"),
    _if_on(
        (*OF_DENSE_MLP, "expert_fc2"),
        "use_transformer_engine_op_fuser",
        "fused operations run in place of these modules",
    ),
    _refused(
        ("expert_fc2",),
        lambda f: not f.num_moe_experts or f.lacks("moe_grouped_gemm"),
        "without moe_grouped_gemm: only the grouped experts have one second GEMM",
    ),
    _if_recomputed(("expert_fc2", "shared_experts"), "moe"),
    _if_on(("expert_fc2",), "moe_paged_stash", "the stash holds what the experts save"),
    _if_lacking(
        ("shared_experts",),
        "moe_shared_expert_intermediate_size",
        "the model has no shared experts then",
    ),
    _if_recomputed(("shared_experts",), "shared_experts"),
    _if_on(
        ("shared_experts",),
        "moe_shared_expert_overlap",
        "they run in pieces on a stream of their own then",
    ),
    _if_lacking(
        OF_LATENT_ATTENTION,
        "multi_latent_attention",
        "other attention has no such projections; name qkv_linear",
        "+D",
    ),
    _if_recomputed(("mla_up_proj",), "mla_up_proj"),
    _refused(
        OF_GATED_DELTA_NET,
        lambda f: f.experimental_attention_variant != "gated_delta_net" and _lacks_layers(f, "G"),
        "with hybrid_layer_pattern={hybrid_layer_pattern}: no layer has a gated delta net then",
    ),
    _refused(
        OF_MAMBA,
        lambda f: _lacks_layers(f, "M"),
        "with hybrid_layer_pattern={hybrid_layer_pattern}: no layer is a Mamba layer then",
    ),
)
"""Requirements on Slipstream's own modules. Where the checked object lacks an option, as while
settings are checked before a model is known, the rules about that option hold."""
