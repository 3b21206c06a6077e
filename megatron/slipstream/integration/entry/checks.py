# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""All checks of the training arguments, run before megatron's own bare assertions.

Training stops at the first error, ``slipstream doctor`` shows all of them, and ``slipstream plan``
uses those of :func:`check_options`, which do not depend on the machine.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.slipstream.estimate.file_errors import require_distinct, require_writable
from megatron.slipstream.integration.entry.flag_names import given_flags
from megatron.slipstream.integration.seam import compat
from megatron.slipstream.options import datasets, preflight
from megatron.slipstream.options.budget import BUDGET_RULES
from megatron.slipstream.options.chunk_graphs import CHUNK_GRAPH_RULES
from megatron.slipstream.options.context_parallel import check_dynamic_context_parallel
from megatron.slipstream.options.engine import RULES
from megatron.slipstream.options.experts import EXPERT_RULES
from megatron.slipstream.options.facts import Facts
from megatron.slipstream.options.fields import OffloadConfig, OffloadOptions
from megatron.slipstream.options.model import (
    CHECKPOINT_RULES,
    check_model_options,
    check_options_in_graphs,
    modules_at_the_edge_of_graphs,
    moves_in_layer_graphs,
)
from megatron.slipstream.options.packing import check_corpora, check_packing
from megatron.slipstream.options.rules import Finding, check_by, check_rules, finding_of
from megatron.slipstream.options.tiles import TILE_RULES
from megatron.slipstream.options.training import (
    MACHINE_RULES,
    NO_EFFECT,
    NO_EFFECT_ON_MEGATRON,
    NO_FILES,
    NOTHING_TO_MOVE,
    SCHEDULE_RULES,
    STAYS,
)


def check_options(args: Any, argv: Sequence[str] = ()) -> list[Finding]:
    """Return findings about parsed options, on any machine; ``argv`` are their flags."""
    has_gpu = torch.cuda.is_available()
    capability = torch.cuda.get_device_capability() if has_gpu else None
    facts = Facts(args, has_gpu=has_gpu, capability=capability)
    return [
        *compat.check_release(facts),
        *check_model_options(facts),
        *check_rules((*CHECKPOINT_RULES, *BUDGET_RULES, *RULES), facts),
        *check_packing(facts),
        *check_dynamic_context_parallel(facts),
        *check_rules((*EXPERT_RULES, *TILE_RULES, *CHUNK_GRAPH_RULES), facts),
        *_check_what_moves(facts),
        *check_options_in_graphs(facts),
        *unused_flags(args, argv),
        *_unused_interval(args, argv),
    ]


def check_run(args: Any) -> list[Finding]:
    """Return findings that prevent training on this machine: devices, data, files."""
    facts = Facts(args, has_gpu=torch.cuda.is_available())
    findings = check_rules((*MACHINE_RULES, *SCHEDULE_RULES), facts)
    return findings + _check_data(args) + _check_outputs(args)


def check_process(args: Any, facts: preflight.ProcessFacts) -> list[Finding]:
    """Return findings about this process that conflict with the options."""
    findings = preflight.check_process(facts, args.fine_grained_activation_offloading)
    return findings + (preflight.check_graphs(facts) if moves_in_layer_graphs(args) else [])


# Options


def _check_what_moves(facts: Facts) -> list[Finding]:
    if not facts.fine_grained_activation_offloading:
        return []
    names = modules_at_the_edge_of_graphs(facts)
    findings = [STAYS.found(names=", ".join(names))] if names else []
    is_own = facts.offload_engine == "slipstream"
    if facts.recompute_granularity == "full" and not (is_own and facts.offload_checkpoint_inputs):
        needed = "offload_checkpoint_inputs=True"
        needed = needed if is_own else f"offload_engine=slipstream and {needed}"
        findings.append(NOTHING_TO_MOVE.found(needed=needed))
    return findings


def unused_flags(args: Any, argv: Sequence[str]) -> list[Finding]:
    """Return a finding about flags without effect: offloading is off, or another engine's.

    Not an error: users leave flags in place to compare training with and without offloading, or
    the two engines. A settings file applies to all runs, so its options do not count.
    """
    own = tuple(field.name for field in dataclasses.fields(OffloadConfig))
    if not args.fine_grained_activation_offloading:
        rule, options = NO_EFFECT, (*OffloadOptions.__annotations__, *own)
    elif args.offload_engine == "megatron":
        rule, options = NO_EFFECT_ON_MEGATRON, own
    else:
        return []
    given = given_flags(argv)
    unused = [name for name in options if "--" + name.replace("_", "-") in given]
    unused = [name for name in unused if rule is NO_EFFECT or name != "offload_engine"]
    return [rule.found(names=", ".join(unused))] if unused else []


def _unused_interval(args: Any, argv: Sequence[str]) -> list[Finding]:
    is_own = args.fine_grained_activation_offloading and args.offload_engine == "slipstream"
    of_engine = args.offload_report_path, args.offload_trace_path
    if args.run_record_path or (is_own and any(of_engine)):
        return []
    is_given = "--output-interval" in given_flags(argv)
    return [NO_FILES.found(interval=args.output_interval)] if is_given else []


def _check_data(args: Any) -> list[Finding]:
    try:
        blends = dataset_prefixes(args)
    except ValueError as error:
        return [finding_of(error, "data_path")]
    # The range of token IDs is known here only for the tokenizer of preprocessed text.
    vocab_size = args.vocab_size if args.tokenizer_type == "NullTokenizer" else None
    findings = check_corpora(args, blends)
    for prefix in dict.fromkeys(itertools.chain.from_iterable(blends)):
        findings += datasets.check_dataset(prefix, vocab_size)
    return findings


def dataset_prefixes(args: Any) -> list[list[str]]:
    """Return the path prefixes of the datasets that each split blends, without their weights.

    Raises:
        ValueError: Neither data nor mock data was requested, or the list of paths is unreadable.
    """
    from megatron.training.utils import get_blend_and_blend_per_split

    if args.mock_data:
        return []
    try:
        blend, per_split = get_blend_and_blend_per_split(args)
    except OSError as error:
        raise ValueError(
            f"the list of data paths {error.filename} cannot be read ({error.strerror}); set "
            "data_args_path or per_split_data_args_path to a file that exists"
        ) from error
    blends = [blend] if blend is not None else [b for b in per_split or () if b is not None]
    if not blends:
        raise ValueError(
            "data_path is not set, so there is nothing to train on; set --data-path to the prefix "
            "of a dataset made by tools/preprocess_text.py, or --mock-data"
        )
    return [prefixes for prefixes, _ in blends]


def _check_outputs(args: Any) -> list[Finding]:
    options = ("offload_report_path", "offload_trace_path", "run_record_path")
    paths = {name: Path(getattr(args, name)) for name in options if getattr(args, name) is not None}
    findings = check_by(partial(require_distinct, paths))
    for option, path in paths.items():
        findings += check_by(partial(require_writable, option, path), option)
    return findings
