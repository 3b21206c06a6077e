# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Checks the flags of a training command."""

from __future__ import annotations

from megatron.slipstream import preflight
from megatron.slipstream.doctor.check import Check, Seen, Topic, not_checked
from megatron.slipstream.doctor.facts import Command, Facts
from megatron.slipstream.estimate.training_command import Words
from megatron.slipstream.model_rules import (
    NO_EFFECT,
    NO_EFFECT_ON_MEGATRON,
    NO_FILES,
    NOTHING_TO_MOVE,
    REFUSED_BY_MEGATRON,
    STAYS,
)


def check_command(words: Words) -> Command:
    """Parse and check the flags. Imports megatron-core, which takes seconds."""
    from megatron.slipstream.integration.entry.dry_run import check_flags

    num_processes = words.ranks_per_host and words.ranks_per_host * words.num_hosts
    checked = check_flags(words.flags, num_processes)
    args = checked.args
    if args is None:
        return Command(checked.findings, checked.num_processes)
    captures_chunks = args.cuda_graph_granularity == "chunk"
    return Command(
        checked.findings,
        checked.num_processes,
        offloads=args.fine_grained_activation_offloading,
        graphs="chunk" if captures_chunks else args.cuda_graph_impl or "none",
        has_experts=bool(args.num_experts),
        is_deterministic=args.deterministic_mode,
        host_memory_limit_bytes=args.offload_host_memory_limit_bytes,
    )


def _flags(facts: Facts) -> Seen:
    if facts.command is None and "command" in facts.unseen:
        return not_checked(facts.unseen["command"])
    if facts.command is None:
        return Seen("none given (slipstream doctor -- FLAGS checks those of a training)")
    offloads = "with offloading" if facts.command.offloads else "without offloading"
    processes = f"{facts.command.num_processes} process"
    plural = "es" if facts.command.num_processes > 1 else ""
    return Seen(f"a training {offloads}, on {processes}{plural}", facts.command.findings)


TOPIC = Topic(
    "Training command",
    (
        Check(
            "Flags",
            "training stops at the first wrong flag; the doctor finds all at once",
            _flags,
            (
                *(REFUSED_BY_MEGATRON, STAYS, NO_EFFECT, NO_EFFECT_ON_MEGATRON, NO_FILES),
                NOTHING_TO_MOVE,
                preflight.DATASET_MISSING,
                preflight.DATASET_CORRUPT,
                preflight.TOKEN_OUTSIDE_VOCABULARY,
            ),
        ),
    ),
)
