# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Requirements on megatron-core's own offloading options, and their effect with CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from megatron.slipstream.options.facts import Facts
from megatron.slipstream.options.modules import (
    OWN_MODULE_RULES,
    OWN_MODULES,
    has_layers,
    has_only_expert_layers,
)
from megatron.slipstream.options.rules import (
    Condition,
    Finding,
    Predicate,
    Rule,
    check_rules,
    nearest_name,
    option_rule,
    value_rule,
)

MODULE_NAMES: Mapping[str, str] = {
    "attn_norm": "input layer norm (saves the layer input, [s, b, h])",
    "qkv_linear": "query/key/value projection (saves the normalised input, [s, b, h])",
    "core_attn": "core attention (saves q, k, v and the attention output)",
    "attn_proj": "attention output projection (saves the attention output, [s, b, h])",
    "mlp_norm": "pre-MLP layer norm (saves the attention block's output, [s, b, h])",
    "expert_fc1": "first grouped GEMM of the experts (saves the permuted tokens)",
    "moe_act": "activation function of the experts (saves the first GEMM's output)",
    "fused_group_mlp": "the experts' fused grouped MLP (Transformer Engine operation fuser; from "
    "megatron-core 0.19 on)",
    "gdp_qkv": "causal convolution and query/key/value preparation of a gated delta product (saves "
    "their input; from megatron-core 0.20 on)",
    **OWN_MODULES,
}
"""Names for ``offload_modules`` with the tensors saved for backward: modules that megatron-core
0.19.2 marks, and our own."""

MOE_MODULE_NAMES = frozenset({"expert_fc1", "moe_act", "fused_group_mlp"})


def _offloading(facts: Any) -> bool:
    return bool(facts.fine_grained_activation_offloading)


def _offloading_with_graphs(facts: Any) -> bool:
    return _offloading(facts) and graph_impl(facts) != "none"


def offloads_with_our_engine(facts: Any) -> bool:
    """Whether activations move, and Slipstream moves them; ``facts`` may be arguments."""
    return _offloading(facts) and facts.offload_engine == "slipstream"


def _modules(facts: Any) -> set[str]:
    return set(facts.offload_modules or ())


def graph_impl(facts: Any) -> str:
    """Return megatron-core's CUDA graph implementation; 'none' also if it has no such option."""
    return str(getattr(facts, "cuda_graph_impl", None) or "none")


def graphed_modules(facts: Any) -> frozenset[str]:
    """Return the parts of each layer that CUDA graphs capture; empty means the whole layer."""
    given = getattr(facts, "cuda_graph_modules", None)
    return frozenset(getattr(module, "name", module) for module in given or ())


def moves_in_layer_graphs(facts: Any) -> bool:
    """Whether activations move inside Transformer Engine's graphs of layers."""
    return graph_impl(facts) == "transformer_engine" and _offloading(facts)


def modules_at_the_edge_of_graphs(facts: Any) -> list[str]:
    """Return the ``offload_modules`` whose tensors are graph inputs or outputs in some layers.

    They stay there: a graph keeps its inputs and outputs in static memory, so moving them frees
    nothing.
    """
    if not moves_in_layer_graphs(facts):
        return []
    captured = graphed_modules(facts)
    at_the_edge = set()
    if not captured or "attn" in captured:
        at_the_edge.add("attn_norm")  # saves the layer's input
    if "moe_router" in captured or len(captured & {"attn", "mlp"}) == 1:
        at_the_edge.add("mlp_norm")  # saves the output of attention's graph
    return [name for name in facts.offload_modules if name in at_the_edge]


CHECKPOINTED_MODULES: Mapping[str, str] = {
    "core_attn": "attn",
    "mlp": "mlp",
    "moe": "moe",
    "shared_experts": "moe_router",
}
"""Names for ``recompute_modules`` that megatron-core checkpoints as a whole, and the part of a
layer for ``cuda_graph_modules`` that contains them. Of other modules, it recomputes outputs without
keeping inputs of their own."""


def _is_captured(name: str, facts: Any) -> bool:
    """Whether checkpoints of this module are inside Transformer Engine's graphs."""
    captured = graphed_modules(facts) or {CHECKPOINTED_MODULES[name]}
    return graph_impl(facts) == "transformer_engine" and CHECKPOINTED_MODULES[name] in captured


def _is_checkpointed(name: str, facts: Any) -> bool:
    """Whether the model has modules of this name that run in checkpoints outside of graphs."""
    pattern = facts.hybrid_layer_pattern
    exists = {
        "core_attn": not pattern or has_layers(facts, "*+D"),
        "mlp": has_layers(facts, "-") if pattern else not has_only_expert_layers(facts),
        "moe": has_layers(facts, "E") if pattern else bool(facts.num_moe_experts),
    }
    has_shared = bool(facts.moe_shared_expert_intermediate_size)
    exists["shared_experts"] = exists["moe"] and has_shared
    return exists[name] and not _is_captured(name, facts)


def keeps_checkpoint_inputs(options: Any) -> bool:
    """Whether any checkpoint of the model keeps inputs that can move."""
    facts = Facts.of(options)
    if facts.mlp_sequence_tiles != 1:
        return True
    if facts.recompute_granularity != "selective":
        return bool(facts.recompute_granularity == "full")
    recomputed = facts.recompute_modules or ("core_attn",)  # megatron-core's default
    return any(
        name in recomputed and _is_checkpointed(name, facts) for name in CHECKPOINTED_MODULES
    )


def _moves_checkpoint_inputs(facts: Any) -> bool:
    return offloads_with_our_engine(facts) and bool(facts.offload_checkpoint_inputs)


CHECKPOINT_RULES: tuple[Rule, ...] = (
    option_rule(
        "offload_checkpoint_inputs",
        _moves_checkpoint_inputs,
        lambda f: f.recompute_granularity is not None or keeps_checkpoint_inputs(f),
        "offload_checkpoint_inputs=True is not supported without recomputation because no "
        "checkpoint keeps inputs then",
        "set recompute_granularity='full', or leave it out",
    ),
    option_rule(
        "offload_checkpoint_inputs",
        lambda f: _moves_checkpoint_inputs(f) and f.recompute_granularity is not None,
        keeps_checkpoint_inputs,
        "offload_checkpoint_inputs=True is not supported with recompute_modules="
        "{recompute_modules} of this model because no checkpoint outside of CUDA graphs keeps "
        "inputs then",
        "name one of " + ", ".join(CHECKPOINTED_MODULES) + " that the model has in "
        "recompute_modules, set recompute_granularity='full', or leave it out",
    ),
)


_with_offloading = Condition("with offloading", _offloading)

LAYER_GRAPH_RULES: tuple[Rule, ...] = (
    _with_offloading(
        "cuda_graph_impl",
        "one graph of the whole iteration leaves no step to plan from and no layer to tell the "
        "engine where it is",
        "set cuda_graph_impl='transformer_engine'",
        lambda f: f.cuda_graph_impl != "full_iteration",
    ),
    Condition("with offload_modules={offload_modules}", _offloading)(
        "cuda_graph_impl",
        "only expert modules outside of its graphs can move",
        "set cuda_graph_impl='transformer_engine', or name parts of the layer in "
        "cuda_graph_modules and no other modules than " + ", ".join(sorted(MOE_MODULE_NAMES)),
        lambda f: (
            f.cuda_graph_impl != "local"
            or (_modules(f) <= MOE_MODULE_NAMES and bool(graphed_modules(f)))
        ),
    ),
    option_rule(
        "cuda_graph_modules",
        _offloading_with_graphs,
        lambda f: "moe" not in graphed_modules(f),
        "cuda_graph_modules contains 'moe', which is not supported with offloading because "
        "megatron-core marks no groups inside it",
        "remove 'moe' or set 'moe_router'",
    ),
    Condition("with offloading", _offloading_with_graphs)(
        "cuda_graph_warmup_steps",
        "what moves inside graphs is planned from the steps before them",
        "set at least 1",
        lambda f: f.cuda_graph_warmup_steps > 0,
    ),
)

MODEL_RULES: tuple[Rule, ...] = (
    option_rule(
        "offload_modules",
        _offloading,
        lambda f: bool(f.offload_modules),
        "fine_grained_activation_offloading=True needs at least one module to move",
        "set offload_modules to some of: " + ", ".join(MODULE_NAMES),
    ),
    option_rule(
        "offload_modules",
        _offloading,
        lambda f: "attn_proj" not in _modules(f) or "core_attn" in _modules(f),
        "offload_modules contains 'attn_proj' without 'core_attn', which is not supported "
        "because attn_proj saves core_attn's output and core_attn's backward reads it too",
        "add 'core_attn'",
    ),
    option_rule(
        "offload_modules",
        _offloading,
        lambda f: f.num_moe_experts or not MOE_MODULE_NAMES & _modules(f),
        "offload_modules={offload_modules} names expert modules, but the model has no experts "
        "(num_moe_experts is not set)",
        "remove " + ", ".join(sorted(MOE_MODULE_NAMES)),
    ),
    value_rule(
        "activation_offload_fraction",
        lambda fraction: 0.0 <= fraction <= 1.0,
        "is outside [0, 1]",
        "set the fraction of each chunk's groups to move",
        _offloading,
    ),
    value_rule(
        "min_offloaded_tensor_size",
        lambda size: size >= 0,
        "is negative",
        "set a number of elements (not bytes), 0 to move every tensor",
        _offloading,
    ),
    value_rule(
        "delta_offload_bytes_across_pp_ranks",
        lambda delta: delta >= 0,
        "is negative",
        "set how many bytes more each later pipeline rank keeps on the device",
        _offloading,
    ),
    value_rule(
        "fine_grained_offloading_max_inflight_offloads",
        lambda copies: (copies or 0) >= 0,
        "is negative",
        "set how many copies out of each module (0 or more) compute need not have waited for, or "
        "leave it out for no limit",
        _offloading,
    ),
    Condition("without cuda_graph_impl='transformer_engine'", offloads_with_our_engine)(
        "delay_offload_until_cuda_graph",
        "there is no other graph to wait for",
        "set cuda_graph_impl='transformer_engine', or leave it out",
        lambda f: not f.delay_offload_until_cuda_graph or f.cuda_graph_impl == "transformer_engine",
    ),
    _with_offloading("cpu_offloading", "both would move the same tensors"),
    *LAYER_GRAPH_RULES,
)


_UNKNOWN_MODULE = Rule(
    "offload_modules",
    "error",
    "offload_modules contains {name!r}, which is not a module that can move",
    "{hint}Known modules: " + ", ".join(MODULE_NAMES),
)


def check_module_names(names: Iterable[str]) -> list[Finding]:
    """Return a finding for each unknown module name, with the nearest known one."""
    findings = []
    for name in names:
        if name not in MODULE_NAMES:
            hint = nearest_name(name, MODULE_NAMES, cutoff=0.4)
            parts = name.replace(",", " ").split()
            if len(parts) > 1 and set(parts) <= MODULE_NAMES.keys():
                hint = f"separate names by spaces: {' '.join(parts)}. "
            findings.append(_UNKNOWN_MODULE.found(name=name, hint=hint))
    return findings


def check_model_options(options: Any) -> list[Finding]:
    """Check megatron-core's offloading options as given to the model."""
    facts = Facts.of(options)
    unknown = check_module_names(facts.offload_modules or ()) if _offloading(facts) else []
    return unknown + check_rules((*OWN_MODULE_RULES, *MODEL_RULES), facts)


def _in_graphs_of_layers(facts: Any) -> bool:
    return moves_in_layer_graphs(facts) and offloads_with_our_engine(facts)


def _in_graphs_of_chunks(facts: Any) -> bool:
    return facts.cuda_graph_granularity == "chunk" and offloads_with_our_engine(facts)


def _without_effect(
    where: str, when: Predicate, option: str, default: Any, because: str, holds: str
) -> Rule:
    """Return the warning that ``option`` does nothing inside some graphs."""
    return Rule(
        option,
        "warning",
        f"{option}={{{option}}} has no effect inside CUDA graphs of {where} because {because}; "
        f"{holds}",
        f"set {option}={default}, its default, if that is not enough",
        when,
        lambda facts: getattr(facts, option) in (None, default),
    )


_NEIGHBOURS = (
    "the next graph copies out what a layer saved, and the one before its backward copies it back"
)
_NO_RANGES = "a replay runs no host code that could name a range"
_NO_SUMS = "comparing bytes blocks the host, which a graph cannot"

GRAPH_RULES: tuple[Rule, ...] = (
    *(
        _without_effect(
            *("layers", _in_graphs_of_layers, option, default, because),
            "it holds for what moves outside of them",
        )
        for option, default, because in (
            ("offload_release_lag", 1, _NEIGHBOURS),
            ("offload_prefetch_depth", 1, _NEIGHBOURS),
            ("fine_grained_offloading_max_inflight_offloads", None, _NEIGHBOURS),
            ("offload_nvtx_ranges", False, _NO_RANGES),
            ("offload_verify", 0, _NO_SUMS),
        )
    ),
    _without_effect(
        *("chunks", _in_graphs_of_chunks, "offload_nvtx_ranges", False, _NO_RANGES),
        "it holds for the passes before them",
    ),
    _without_effect(
        *("chunks", lambda f: _in_graphs_of_chunks(f) and f.has_gpu, "offload_verify", 0, _NO_SUMS),
        "it holds for the iterations before them and the first passes that they are planned from",
    ),
    Rule(
        "offload_checkpoint_inputs",
        "warning",
        "recompute_granularity=full with offload_checkpoint_inputs={offload_checkpoint_inputs} and "
        "offload_engine={offload_engine} moves nothing because a layer that is recomputed as a "
        "whole saves its input only, which stays",
        "set offload_checkpoint_inputs=True and offload_engine=slipstream to move it",
        lambda f: _offloading(f) and f.recompute_granularity == "full",
        lambda f: f.offload_checkpoint_inputs and f.offload_engine == "slipstream",
    ),
)
"""Options that do nothing in replays, or beside others."""

CHECKPOINTS_IN_GRAPHS = Rule(
    "offload_checkpoint_inputs",
    "warning",
    "offload_checkpoint_inputs=True has no effect on {names} in recompute_modules because a "
    "checkpoint inside CUDA graphs keeps its inputs on the device",
    "leave these parts of the layer out of cuda_graph_modules, or take offload_checkpoint_inputs "
    "out if no other checkpoints are left",
)


def check_options_in_graphs(options: Any, **more: Any) -> list[Finding]:
    """Return a warning for each option that does nothing inside the CUDA graphs that are chosen."""
    facts = Facts.of(options, **more)
    findings = check_rules(GRAPH_RULES, facts)
    if _in_graphs_of_layers(facts) and facts.offload_checkpoint_inputs:
        recomputed = facts.recompute_modules or ()
        names = [n for n in recomputed if n in CHECKPOINTED_MODULES and _is_captured(n, facts)]
        if names and facts.recompute_granularity == "selective":
            findings.append(CHECKPOINTS_IN_GRAPHS.found(names=", ".join(names)))
    return findings
