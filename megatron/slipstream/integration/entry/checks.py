# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""From flags to checked arguments: for training, and without one for doctor and plan.

Options are checked after parsing, before megatron's own bare assertions, and again after megatron's
validation, which completes them. Training stops at the first error, ``slipstream doctor`` shows all
of them, and ``slipstream plan`` uses those of :func:`check_options`, which do not depend on the
machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import logging
import math
import os
import re
import traceback
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Optional
from unittest import mock

import torch

from megatron.slipstream.estimate.file_errors import require_distinct, require_writable
from megatron.slipstream.integration.cpu import cpu_only
from megatron.slipstream.integration.entry import arguments
from megatron.slipstream.integration.graphs import goals
from megatron.slipstream.integration.seam import compat
from megatron.slipstream.launcher import launcher_number
from megatron.slipstream.options import datasets, model, preflight, rules
from megatron.slipstream.options.budget import BUDGET_RULES
from megatron.slipstream.options.chunk_graphs import CHUNK_GRAPH_RULES
from megatron.slipstream.options.context_parallel import check_dynamic_context_parallel
from megatron.slipstream.options.engine import RULES
from megatron.slipstream.options.experts import EXPERT_RULES
from megatron.slipstream.options.facts import Facts
from megatron.slipstream.options.fields import OffloadConfig, OffloadOptions
from megatron.slipstream.options.packing import check_corpora, check_packing
from megatron.slipstream.options.tiles import TILE_RULES
from megatron.slipstream.options.training import (
    MACHINE_RULES,
    NO_EFFECT,
    NO_EFFECT_ON_MEGATRON,
    REFUSED_BY_MEGATRON,
    SCHEDULE_RULES,
    STAYS,
)

# Training


def parse_and_validate(argv: Sequence[str]) -> Any:
    """Parse arguments, check them, validate them with megatron, and set them as global.

    Raises ``ValueError`` with the first error, which names option, value and remedy.
    """
    # A broken Transformer Engine breaks the import of megatron-core; report it first.
    facts = preflight.collect()
    rules.require(preflight.check_process(facts, offloading=False))
    if not torch.cuda.is_available():
        # Megatron warns at import about every GPU package that is absent, and torch's data loader
        # about memory it cannot pin; without a GPU both are expected.
        warnings.filterwarnings("ignore", message=".*(not installed|transformer-engine|pin_memory)")
    on_cpu = cpu_only.install_training_shims()
    cpu_only.skip_helper_compilation()
    args = arguments.parse(argv, arguments.defaults_of_machine(argv))
    if not on_cpu and args.fine_grained_activation_offloading:
        cpu_only.tolerate_missing_affinity_tools()
    arguments.apply_tokenizer(args)
    before = check_options(args, argv)
    rules.require(before)
    rules.require(check_run(args))
    rules.require(preflight.check_process(facts, args.fine_grained_activation_offloading))
    if model.moves_in_layer_graphs(args):
        rules.require(preflight.check_graphs(facts))
    if args.cuda_graph_granularity == "chunk":
        from megatron.slipstream.integration.graphs.chunks import prepare_arguments

        prepare_arguments(args)
    goals.prepare_arguments(args)
    if args.use_checkpoint_args:
        from megatron.training.checkpointing import load_args_from_checkpoint

        with naming_refusals():
            load_args_from_checkpoint(args, load_arg="pretrained_checkpoint")
            load_args_from_checkpoint(args)
    validate(args)
    # Check again: options may come from a checkpoint, or have been given by former names.
    rules.require(f for f in check_options(args) if f not in before)
    from megatron.training.global_vars import set_global_variables

    set_global_variables(args)
    return args


def validate(args: Any) -> None:
    """Run megatron's own validation, which completes the arguments, or raises ``ValueError``.

    With offloading, megatron requires Transformer Engine. Nothing needs it without a GPU, so the
    flag is then off during the check.
    """
    from megatron.training.arguments import validate_args

    offloading = args.fine_grained_activation_offloading
    args.fine_grained_activation_offloading = offloading and torch.cuda.is_available()
    try:
        with naming_refusals():
            validate_args(args, {})
    finally:
        args.fine_grained_activation_offloading = offloading


@contextlib.contextmanager
def naming_refusals() -> Iterator[None]:
    """Raise megatron's assertions as ``ValueError``; one without a message quotes the check."""
    try:
        yield
    except AssertionError as error:
        test = traceback.extract_tb(error.__traceback__)[-1].line or "an unnamed check"
        missing = re.fullmatch(r"assert args\.(\w+) is not None", test)
        cure = f"; set --{missing[1].replace('_', '-')}" if missing else ""
        raise ValueError(
            str(error) or f"megatron refuses the arguments because of its check: {test}{cure}"
        ) from error


# Doctor and plan


class Checked(NamedTuple):
    """Findings about the flags of a command."""

    args: Optional[Any]
    """Arguments as megatron parsed and completed them; None if it failed."""
    num_processes: int = 1
    """Number of processes that the flags were checked for."""
    findings: tuple[rules.Finding, ...] = ()


def check_flags(flags: Sequence[str], num_processes: Optional[int] = None) -> Checked:
    """Parse flags with megatron's own parser and ours, and run every check on them.

    Without a GPU, installs the training shims for the rest of the process. ``num_processes`` is by
    default what this process's launcher sets, or else the minimum for the model parallelism.
    """
    num_processes = num_processes or launcher_number("WORLD_SIZE", 0)
    with as_in_training():
        arguments.use_one_device_queue(flags)
        cpu_only.install_training_shims()
        try:
            defaults = arguments.defaults_of_machine(flags)
            args = parse_for(flags, num_processes, defaults)
        except ValueError as error:
            return Checked(None, findings=(rules.finding_of(error),))
        findings = rules.check_by(lambda: arguments.apply_tokenizer(args), "tokenizer_json")
        findings += check_options(args, flags) + check_run(args)
        refusal = _refusal_of_megatron(args)
        # An error in the findings, which includes a fix, may name the same option.
        errors = " ".join(finding.text for finding in findings if finding.severity == "error")
        if refusal is not None and not _options_in(refusal) & _options_in(errors):
            findings.append(REFUSED_BY_MEGATRON.found(message=refusal))
        if refusal is None:
            # Options by former names now have the present ones.
            findings += [f for f in check_options(args) if f not in findings]
    return Checked(args, args.world_size, tuple(findings))


def parse_for(
    flags: Sequence[str], num_processes: Optional[int], defaults: Sequence[str] = ()
) -> Any:
    """Parse the arguments for this number of processes; None for the minimum."""
    args = arguments.parse(flags, defaults)
    # At least as many as both the dense and the expert group sizes divide.
    pipeline = args.pipeline_model_parallel_size
    dense = args.tensor_model_parallel_size * args.context_parallel_size * pipeline
    expert_tensor = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    experts = expert_tensor * args.expert_model_parallel_size * pipeline
    args.world_size = num_processes or math.lcm(dense, experts)
    return args


def _refusal_of_megatron(args: Any) -> Optional[str]:
    """Return the first error of megatron's validation and of the configuration it creates."""
    try:
        from megatron.slipstream.integration.entry import providers

        validate(args)
        with naming_refusals():
            providers.model_config(args)
    except ValueError as error:
        return str(error)
    # Megatron's code may raise any exception on unexpected input.
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _options_in(text: str) -> set[str]:
    """Return the options named in a text, except names that could be ordinary words."""
    return {word for word in re.findall(r"\w+", text) if "_" in word}


@contextlib.contextmanager
def as_in_training(**variables: str) -> Iterator[None]:
    """Run megatron's code as in training and with ``variables``; no output, and nothing lasts."""
    usual = {"NVTE_CPU_OFFLOAD_V1": "1", "RANK": "0", "WORLD_SIZE": "1"}
    level, sink = logging.root.manager.disable, io.StringIO()
    logging.disable(logging.CRITICAL)
    try:
        # Megatron's warnings concern a real training.
        with (
            mock.patch.dict(os.environ, {**usual, **variables, **os.environ}),
            warnings.catch_warnings(action="ignore"),
            contextlib.redirect_stdout(sink),
            contextlib.redirect_stderr(sink),
        ):
            yield
    finally:
        logging.disable(level)


# Findings


def check_options(args: Any, argv: Sequence[str] = ()) -> list[rules.Finding]:
    """Return findings about parsed options, on any machine; ``argv`` are their flags."""
    has_gpu = torch.cuda.is_available()
    capability = torch.cuda.get_device_capability() if has_gpu else None
    facts = Facts(args, has_gpu=has_gpu, capability=capability)
    at_the_edge = ", ".join(model.modules_at_the_edge_of_graphs(facts))
    return [
        *compat.check_release(facts),
        *model.check_model_options(facts),
        *rules.check_rules((*model.CHECKPOINT_RULES, *BUDGET_RULES, *RULES), facts),
        *check_packing(facts),
        *check_dynamic_context_parallel(facts),
        *rules.check_rules((*EXPERT_RULES, *TILE_RULES, *CHUNK_GRAPH_RULES), facts),
        *([STAYS.found(names=at_the_edge)] if at_the_edge else []),
        *model.check_options_in_graphs(facts),
        *_unused_flags(args, argv),
    ]


def check_run(args: Any) -> list[rules.Finding]:
    """Return findings that prevent training on this machine: devices, data, files."""
    facts = Facts(args, has_gpu=torch.cuda.is_available())
    findings = rules.check_rules((*MACHINE_RULES, *SCHEDULE_RULES), facts)
    findings += _check_data(args)
    options = ("offload_report_path", "offload_trace_path", "run_record_path")
    paths = {name: Path(getattr(args, name)) for name in options if getattr(args, name) is not None}
    findings += rules.check_by(partial(require_distinct, paths))
    for option, path in paths.items():
        findings += rules.check_by(partial(require_writable, option, path), option)
    return findings


def _unused_flags(args: Any, argv: Sequence[str]) -> list[rules.Finding]:
    """Return a finding about flags without effect: offloading is off, or another engine's.

    Not an error: users leave flags in place to compare training with and without offloading, or
    the two engines. A settings file applies to all runs, so its options do not count.
    """
    options = [field.name for field in dataclasses.fields(OffloadConfig)]
    if not args.fine_grained_activation_offloading:
        rule, options = NO_EFFECT, [*OffloadOptions.__annotations__, *options]
    elif args.offload_engine == "megatron":
        rule = NO_EFFECT_ON_MEGATRON
        options.remove("offload_engine")
    else:
        return []
    given = rules.given_flags(argv)
    unused = [name for name in options if rules.as_flag(name) in given]
    return [rule.found(names=", ".join(unused))] if unused else []


def _check_data(args: Any) -> list[rules.Finding]:
    try:
        blends = dataset_prefixes(args)
    except ValueError as error:
        return [rules.finding_of(error, "data_path")]
    # The range of token IDs is known here only for the tokenizer of preprocessed text.
    vocab_size = args.vocab_size if args.tokenizer_type == "NullTokenizer" else None
    findings = check_corpora(args, blends)
    for prefix in dict.fromkeys(itertools.chain.from_iterable(blends)):
        findings += datasets.check_dataset(prefix, vocab_size)
    return findings


def dataset_prefixes(args: Any) -> list[list[str]]:
    """Return the path prefixes of the datasets that each split blends, without their weights.

    Raises ``ValueError`` if there is neither data nor mock data, or a list of paths is unreadable.
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
