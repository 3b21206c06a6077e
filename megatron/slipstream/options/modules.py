# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Modules that Slipstream marks itself, beside those that megatron-core marks, and their rules.

Their names are given in ``offload_modules`` like megatron-core's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from megatron.slipstream.options.rules import Finding, Predicate, Rule, check_rules, option_rule

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
    "embedding": "embedding (saves the mask of its dropout)",
    "output_layer": "final norm and output layer (save their inputs, [s, b, h])",
}
"""Names of modules that Slipstream marks, with the tensors saved for backward."""

OF_DENSE_MLP = frozenset({"mlp_fc1", "mlp_act", "mlp_fc2"})
OUTSIDE_LAYERS = frozenset({"embedding", "output_layer"})
OF_LATENT_ATTENTION = frozenset({"mla_down_proj", "mla_up_proj"})


def own_modules(facts: Any) -> list[str]:
    """Return the names in ``offload_modules`` that megatron-core does not mark.

    Args:
        facts: Has megatron-core's option names.
    """
    return [name for name in getattr(facts, "offload_modules", None) or () if name in OWN_MODULES]


def _recomputes(*names: str) -> Predicate:
    """Return whether backward recomputes one of these ``recompute_modules``."""
    return lambda f: (
        getattr(f, "recompute_granularity", None) == "selective"
        and bool({*names} & {*(getattr(f, "recompute_modules", None) or ())})
    )


def _lacks(option: str) -> Predicate:
    """Return whether a model is known to lack what an option sets."""
    return lambda f: not getattr(f, option, True)


def _has_only_expert_layers(facts: Any) -> bool:
    pattern = getattr(facts, "moe_layer_freq", 0)
    is_gpt = not getattr(facts, "hybrid_layer_pattern", None)
    is_every_one = pattern == 1 or (isinstance(pattern, list) and all(pattern))
    return bool(facts.num_moe_experts) and is_gpt and is_every_one


def _refused(
    names: Iterable[str], when: Predicate, where: str, because: str, cure: str = ""
) -> Rule:
    """Return the rule that some modules cannot move under a condition.

    Args:
        names: The modules.
        when: Whether the condition holds.
        where: The condition in words, after 'is not supported'.
        because: The reason.
        cure: What else to set than other modules; empty if nothing else helps.
    """
    listed = sorted(names)
    return option_rule(
        "offload_modules",
        lambda f: bool(f.fine_grained_activation_offloading) and when(f),
        lambda f: not {*listed} & {*own_modules(f)},
        f"offload_modules={{offload_modules}} is not supported {where} because {because}",
        f"remove {', '.join(listed)}" + (f", or {cure}" if cure else ""),
    )


_NOTHING_SAVED = "what backward computes again saves nothing inside"

OWN_MODULE_RULES: tuple[Rule, ...] = (
    _refused(
        OWN_MODULES,
        lambda f: getattr(f, "offload_engine", "slipstream") != "slipstream",
        "with offload_engine='megatron'",
        "that engine moves only what megatron-core marks",
        "set offload_engine='slipstream'",
    ),
    _refused(
        OWN_MODULES,
        lambda f: getattr(f, "cuda_graph_impl", None) == "local",
        "with cuda_graph_impl='local'",
        "only megatron-core's expert modules move outside of its graphs",
        "set cuda_graph_impl='transformer_engine'",
    ),
    _refused(
        OUTSIDE_LAYERS,
        lambda f: getattr(f, "cuda_graph_granularity", None) == "chunk",
        "with cuda_graph_granularity='chunk'",
        "these modules run outside of the graphs, which hold the host memory",
        "set cuda_graph_granularity='layer'",
    ),
    _refused(
        OF_DENSE_MLP,
        _has_only_expert_layers,
        "with moe_layer_freq={moe_layer_freq}",
        "no layer has a dense MLP then",
    ),
    _refused(
        OF_DENSE_MLP,
        _recomputes("mlp"),
        "with 'mlp' in recompute_modules",
        _NOTHING_SAVED,
        "remove 'mlp' from recompute_modules",
    ),
    _refused(
        (*OF_DENSE_MLP, "expert_fc2"),
        lambda f: getattr(f, "use_transformer_engine_op_fuser", False),
        "with use_transformer_engine_op_fuser=True",
        "fused operations run in place of these modules",
        "set use_transformer_engine_op_fuser=False",
    ),
    _refused(
        ("expert_fc2",),
        lambda f: not f.num_moe_experts or _lacks("moe_grouped_gemm")(f),
        "without moe_grouped_gemm",
        "only the grouped experts have one second GEMM",
    ),
    _refused(
        ("expert_fc2", "shared_experts"),
        _recomputes("moe"),
        "with 'moe' in recompute_modules",
        _NOTHING_SAVED,
        "remove 'moe' from recompute_modules",
    ),
    _refused(
        ("expert_fc2",),
        lambda f: getattr(f, "moe_paged_stash", False),
        "with moe_paged_stash=True",
        "the stash holds what the experts save",
        "set moe_paged_stash=False",
    ),
    _refused(
        ("shared_experts",),
        _lacks("moe_shared_expert_intermediate_size"),
        "without moe_shared_expert_intermediate_size",
        "the model has no shared experts then",
    ),
    _refused(
        ("shared_experts",),
        _recomputes("shared_experts"),
        "with 'shared_experts' in recompute_modules",
        _NOTHING_SAVED,
        "remove 'shared_experts' from recompute_modules",
    ),
    _refused(
        ("shared_experts",),
        lambda f: getattr(f, "moe_shared_expert_overlap", False),
        "with moe_shared_expert_overlap=True",
        "they run in pieces on a stream of their own then",
        "set moe_shared_expert_overlap=False",
    ),
    _refused(
        OF_LATENT_ATTENTION,
        _lacks("multi_latent_attention"),
        "without multi_latent_attention",
        "other attention has no such projections",
        "name qkv_linear",
    ),
    _refused(
        ("mla_up_proj",),
        _recomputes("mla_up_proj"),
        "with 'mla_up_proj' in recompute_modules",
        _NOTHING_SAVED,
        "remove 'mla_up_proj' from recompute_modules",
    ),
)
"""Requirements on Slipstream's own modules. Where the checked object lacks an option, as while
settings are checked before a model is known, the rules about that option hold."""


def check_own_modules(facts: Any) -> list[Finding]:
    """Return a finding for each module of ours that cannot move with these options.

    Args:
        facts: Has megatron-core's option names.
    """
    given = SimpleNamespace(**{"moe_layer_freq": None, **vars(facts)})
    return check_rules(OWN_MODULE_RULES, given)
