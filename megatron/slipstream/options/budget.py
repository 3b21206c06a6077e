# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""What ``activation_memory_budget`` does not go with, and the options that it implies."""

from __future__ import annotations

from typing import Any

from megatron.slipstream.options.facts import Facts
from megatron.slipstream.options.model import MODULE_NAMES, MOE_MODULE_NAMES
from megatron.slipstream.options.modules import OWN_MODULE_RULES
from megatron.slipstream.options.rules import Rule, check_rules, option_rule
from megatron.slipstream.options.tiles import TILE_RULES


def has_budget(options: Any) -> bool:
    """Whether the options, facts or arguments, have a budget that this engine follows."""
    facts = Facts.of(options)
    return facts.offload_engine == "slipstream" and facts.activation_memory_budget is not None


def _budget_rule(option: str, because: str, *off: str) -> Rule:
    return option_rule(
        "activation_memory_budget",
        has_budget,
        lambda facts: getattr(facts, option) in (None, False, *off),
        f"activation_memory_budget={{activation_memory_budget}} is not supported with "
        f"{option}={{{option}}} because {because}",
        f"leave {option} or activation_memory_budget out",
    )


GATHERED = (
    "it gathers and frees a layer's parameters by hooks of the layer, which is not tested with "
    "layers whose settings change"
)
"""Why FSDP is refused."""
OTHER_PASSES = (
    "its ranks run different numbers of passes, so they cannot agree on settings before each one"
)
"""Why megatron-core's hybrid context parallelism is refused."""

BUDGET_RULES: tuple[Rule, ...] = (
    _budget_rule(
        *("recompute_granularity", "the budget decides which layers are recomputed as a whole"),
        "selective",
    ),
    _budget_rule(
        "cuda_graph_impl",
        "a captured layer keeps what it recomputes, and one that is recomputed as a whole cannot "
        "be captured",
        "none",
    ),
    _budget_rule(
        "cuda_graph_granularity",
        "a captured chunk keeps what its layers recompute, and is captured before the budget has "
        "settled that",
        "layer",
    ),
    _budget_rule(
        "overlap_moe_expert_parallel_comm",
        "layers then run node by node, and none can be recomputed as a whole",
    ),
    _budget_rule("use_megatron_fsdp", GATHERED),
    _budget_rule("use_torch_fsdp2", GATHERED),
    _budget_rule("hybrid_context_parallel", OTHER_PASSES),
)


def complete_arguments(args: Any) -> None:
    """Set the options that a budget implies in megatron's arguments, where the user gave none."""
    if not has_budget(args):
        return
    args.fine_grained_activation_offloading = True
    if args.offload_modules:
        return
    args.offload_modules = movable_modules(Facts.of(args))


def movable_modules(facts: Facts) -> list[str]:
    """Return all names for ``offload_modules`` that a model has, and its tiles allow."""
    absent = {"gdp_qkv"}  # Of layers that no option names.
    if not facts.use_transformer_engine_op_fuser:
        absent.add("fused_group_mlp")
    if not facts.num_experts:
        absent |= MOE_MODULE_NAMES
    moving = Facts.of(facts, fine_grained_activation_offloading=True)

    def is_refused(name: str) -> bool:
        found = check_rules((*OWN_MODULE_RULES, *TILE_RULES), moving, offload_modules=[name])
        return any(finding.rule == "offload_modules" for finding in found)

    return [name for name in MODULE_NAMES if name not in absent and not is_refused(name)]
