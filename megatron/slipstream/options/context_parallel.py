# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The flags of dynamic context parallelism, and the options that they are incompatible with."""

from __future__ import annotations

from typing import Any

from megatron.slipstream.context_parallel.limits import rank_limits
from megatron.slipstream.options.facts import Facts
from megatron.slipstream.options.rules import (
    Condition,
    Finding,
    Rule,
    check_rules,
    finding_of,
    option_rule,
)


def _is_on(facts: Any) -> bool:
    return bool(facts.dynamic_context_parallel)


_unsupported = Condition("with dynamic_context_parallel", _is_on)


def _needs_it(option: str, default: Any) -> Rule:
    return option_rule(
        option,
        lambda facts: not _is_on(facts),
        lambda facts: getattr(facts, option) in (None, default),
        f"{option}={{{option}}} has no effect without dynamic_context_parallel",
        f"set dynamic_context_parallel, or leave {option} out",
    )


DYNAMIC_RULES: tuple[Rule, ...] = (
    _needs_it("min_dynamic_context_parallel_size", 1),
    _needs_it("max_dynamic_context_parallel_size", None),
    _needs_it("dynamic_context_parallel_verify", False),
    *_unsupported.rows(
        """
        sequence_packing in balanced: sizes are chosen when documents of a batch are balanced;
            set balanced
        calculate_per_token_loss in True: tokens of larger groups would weigh more;
            set calculate_per_token_loss=True
        cp_comm_type: other exchanges need groups or numbers of heads that not every size has;
            set p2p
        hierarchical_context_parallel_sizes: its process groups are created for one size
        mtp_num_layers: multi-token prediction shifts tokens within groups of the static size
        hybrid_layer_pattern: multi-token prediction shifts tokens within groups of the static size;
            leave the parts after / out
        """,
        # One name, or a list.
        cp_comm_type=lambda f: f.cp_comm_type in (None, "p2p") or {*f.cp_comm_type} <= {"p2p"},
        hybrid_layer_pattern=lambda f: "/" not in (f.hybrid_layer_pattern or ""),
    ),
    _unsupported(
        "cuda_graph_impl",
        "those graphs are captured with one size",
        "set transformer_engine, or leave it out and set cuda_graph_granularity=chunk; both "
        "capture graphs of every size",
        ("none", "transformer_engine"),
    ),
    *_unsupported.rows(
        """
        use_megatron_fsdp: megatron-core has no process groups of changing size for it
        fp8_dot_product_attention fp8_multi_head_attention: keys and values would be exchanged in
            FP8 with scales that only the ranks of the static group share
        """
    ),
)


POSITIONS = Rule(
    "max_position_embeddings",
    "error",
    "max_position_embeddings={given} is not supported with dynamic_context_parallel and groups of "
    "up to {largest} ranks because documents have up to {longest} tokens",
    "set it to {longest}, or set a smaller max_dynamic_context_parallel_size",
)


ONE_SIZE = Rule(
    "one-context-parallel-size",
    "warning",
    "dynamic_context_parallel=True has no effect because no size above 1 divides the number of "
    "data- and context-parallel ranks ({num_ranks}), so documents of more than {longest} tokens "
    "are cut",
    "train on an even number of them, or leave dynamic_context_parallel out",
)


def check_dynamic_context_parallel(options: Any) -> list[Finding]:
    """Check the arguments of dynamic context parallelism; ``check_packing`` those of packing."""
    facts = Facts.of(options)
    findings = check_rules(DYNAMIC_RULES, facts)
    if findings or not (_is_on(facts) and facts.data_parallel_size):
        return findings
    try:
        limits = rank_limits(facts)
    except ValueError as error:
        return [finding_of(error, "max_dynamic_context_parallel_size")]
    longest, given = limits.largest * limits.tokens_per_rank, facts.max_position_embeddings
    if facts.position_embedding_type == "learned_absolute" and given < longest:
        findings.append(POSITIONS.found(given=given, largest=limits.largest, longest=longest))
    # A largest size of 1 may be the user's choice.
    if limits.largest == 1 and facts.max_dynamic_context_parallel_size is None:
        findings.append(ONE_SIZE.found(num_ranks=limits.num_ranks, longest=longest))
    return findings
