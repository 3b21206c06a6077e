# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""For the doctor: the flags of a training command, checked as training does, but all at once.

Training stops at the first thing that is wrong (``arguments.check``); here every check runs, and
what each raises is collected. No model is built, and nothing is made global except what the CPU
shims replace.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import math
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional

import torch

from megatron.slipstream import preflight
from megatron.slipstream.config import (
    MODEL_RULES,
    RULES,
    check_module_names,
    check_rules,
    launcher_number,
    modules_at_the_edge_of_graphs,
)
from megatron.slipstream.context_parallel.options import check_dynamic_context_parallel
from megatron.slipstream.integration import arguments, compat, cpu_only
from megatron.slipstream.packed_sequences.options import check_corpora, check_packing


class Checked(NamedTuple):
    """What is wrong with the flags of a command."""

    args: Optional[Any]
    """As megatron has parsed and completed them; None if it could not."""
    num_processes: int = 1
    """That they were checked for."""
    graphs: str = "none"
    """``cuda_graph_impl`` as given."""
    refusals: tuple[str, ...] = ()
    """What we refuse, each with its cure after the first semicolon."""
    refusal_of_megatron: Optional[str] = None
    findings: tuple[preflight.Finding, ...] = ()
    """About datasets."""
    stays: tuple[str, ...] = ()
    """Of ``offload_modules``, those that stay in the layers that graphs capture."""
    unused: tuple[str, ...] = ()
    """Options of the engine that were given as flags, while it is not switched on."""


def check_flags(flags: Sequence[str], num_processes: Optional[int] = None) -> Checked:
    """Parse flags with megatron's own parser and ours, and run every check of them.

    Replaces what a training without a GPU replaces, for the rest of the process.

    Args:
        flags: Those of the training script.
        num_processes: How many processes the training has; None for as many as the launcher of
            this process says, or else the fewest that the model parallelism needs.
    """
    num_processes = num_processes or launcher_number("WORLD_SIZE", 0)
    # Megatron's warnings and tables are about a training that starts.
    with _quiet(), _environment({"NVTE_CPU_OFFLOAD_V1": "1", "RANK": "0", "WORLD_SIZE": "1"}):
        try:
            args = _parse(flags)
        except ValueError as error:
            return Checked(None, refusals=(str(error),))
        args.world_size = num_processes or _fewest_processes(args)
        graphs = getattr(args, "cuda_graph_impl", None) or "none"
        stays = modules_at_the_edge_of_graphs(args)
        refusals, findings = _check(args)
        refusal = _refusal_of_megatron(args)
        if refusal is not None and _is_of_an_option_in(refusal, refusals):
            refusal = None  # ours has the cure
    return Checked(
        args,
        args.world_size,
        graphs,
        tuple(refusals),
        refusal,
        tuple(findings),
        tuple(stays),
        tuple(arguments.unused_flags(args, flags)),
    )


def _parse(flags: Sequence[str]) -> Any:
    if any(flag.split("=")[0] == "--yaml-cfg" for flag in flags):
        arguments.parse_and_validate(flags)  # which refuses it before anything else
    if {"-h", "--help", "--help-all"} & set(flags):
        raise ValueError("the flags ask for help, so there is nothing to check; leave --help out")
    on_cpu = cpu_only.install_training_shims()
    from megatron.training import arguments as megatron_arguments

    defaults = arguments._cpu_defaults(flags) if on_cpu else arguments._gpu_defaults(flags)
    with arguments._process_arguments([*defaults, *flags]):
        return megatron_arguments.parse_args(arguments.add_arguments)


def _fewest_processes(args: Any) -> int:
    """What divides into the groups of dense layers, and into those of experts."""
    pipeline = args.pipeline_model_parallel_size
    dense = args.tensor_model_parallel_size * args.context_parallel_size * pipeline
    expert_tensor = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    return math.lcm(dense, expert_tensor * args.expert_model_parallel_size * pipeline)


# Checks


def _check(args: Any) -> tuple[list[str], list[preflight.Finding]]:
    """All that training refuses of the arguments, in its order, and what is wrong with the data."""
    findings: list[preflight.Finding] = []

    def check_data() -> None:
        vocab_size = args.vocab_size if args.tokenizer_type == "NullTokenizer" else None
        blends = arguments._dataset_prefixes(args)
        for prefix in dict.fromkeys(itertools.chain.from_iterable(blends)):
            findings.extend(preflight.check_dataset(prefix, vocab_size))
        check_corpora(args, blends)

    def check_engine() -> None:
        if args.fine_grained_activation_offloading:
            arguments._check_engine(args, args)

    steps: list[Callable[[], object]] = [
        lambda: arguments._apply_tokenizer(args),
        lambda: compat.check_options(args),
        *_rules(args),
        lambda: check_packing(args),
        lambda: check_dynamic_context_parallel(args),
        check_engine,
        lambda: arguments._check_device(args),
        lambda: arguments.check_evaluation(args),
        lambda: arguments._check_packed_attention(args),
        check_data,
        lambda: arguments._check_outputs(args),
    ]
    # Should training check more than is named here, that is found once the rest is right.
    if not (refusals := list(dict.fromkeys(_refusals(steps)))) and not findings:
        refusals = list(_refusals([lambda: arguments.check(args, _no_facts())]))
    refusals += _refusals([lambda: arguments._prepare_chunk_graphs(args)])
    return refusals, findings


def _rules(args: Any) -> Iterator[Callable[[], object]]:
    """A step for each name in ``offload_modules`` and for each rule of the tables."""
    if args.fine_grained_activation_offloading:
        for name in args.offload_modules or ():
            yield lambda name=name: check_module_names([name])  # type: ignore[misc]
    for rules, facts in ((MODEL_RULES, arguments._model_facts(args)), (RULES, args)):
        for rule in rules:
            yield lambda rule=rule, facts=facts: check_rules([rule], facts)  # type: ignore[misc]


def _no_facts() -> preflight.Facts:
    """Of a process with which nothing is wrong: the doctor has looked at this one already."""
    return preflight.Facts("", None, None, None, None, None, None, None, True)


def _refusals(steps: Iterable[Callable[[], object]]) -> Iterator[str]:
    for step in steps:
        try:
            step()
        except ValueError as error:
            yield str(error)


def _refusal_of_megatron(args: Any) -> Optional[str]:
    """The first thing that megatron's own validation refuses, with the configuration it makes."""
    offloading = args.fine_grained_activation_offloading
    try:
        from megatron.training.arguments import validate_args

        from megatron.slipstream.integration import providers

        # As in training: without a GPU there is no Transformer Engine, which it would ask for.
        args.fine_grained_activation_offloading = offloading and torch.cuda.is_available()
        validate_args(args, {})
        args.fine_grained_activation_offloading = offloading
        compat.complete_arguments(args)
        providers.model_config(args)
    except AssertionError as error:
        return str(arguments.refused_by_megatron(error))
    except ValueError as error:
        return str(error)
    # Megatron's code fails in any way on what it did not expect.
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        args.fine_grained_activation_offloading = offloading
    return None


def _is_of_an_option_in(refusal: str, refusals: Iterable[str]) -> bool:
    """Whether the text names an option that one of the others names."""
    return bool(_named(refusal) & set().union(*map(_named, refusals)))


def _named(text: str) -> set[str]:
    """The options in a text, as far as their names could not be other words."""
    return {word for word in re.findall(r"\w+", text) if "_" in word}


# The process


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Nothing is printed, warned about or logged inside."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    sink = io.StringIO()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(sink):
            warnings.simplefilter("ignore")
            with contextlib.redirect_stderr(sink):
                yield
    finally:
        logging.disable(level)


@contextlib.contextmanager
def _environment(defaults: Mapping[str, str]) -> Iterator[None]:
    """With variables as the training script or its launcher sets them; as before afterwards."""
    before = dict(os.environ)
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
