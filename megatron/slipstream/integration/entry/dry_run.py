# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Parse and check the flags of a training command without training.

For ``slipstream doctor``, which shows everything that training would refuse, and ``slipstream
plan``, which plans what the flags describe. No model is built, and no global state changes except
what the CPU shims replace.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Optional

from megatron.slipstream.integration.cpu import cpu_only
from megatron.slipstream.integration.entry import arguments, checks, validation
from megatron.slipstream.launcher import launcher_number
from megatron.slipstream.options.rules import Finding, check_by, finding_of
from megatron.slipstream.options.training import REFUSED_BY_MEGATRON


class Checked(NamedTuple):
    """Findings about the flags of a command."""

    args: Optional[Any]
    """Arguments as megatron parsed and completed them; None if it failed."""
    num_processes: int = 1
    """Number of processes that the flags were checked for."""
    findings: tuple[Finding, ...] = ()


def check_flags(flags: Sequence[str], num_processes: Optional[int] = None) -> Checked:
    """Parse flags with megatron's own parser and ours, and run every check on them.

    Without a GPU, installs the training shims for the rest of the process.

    Args:
        flags: Flags of the training script.
        num_processes: Number of training processes; None for the number that this process's
            launcher sets, or else the minimum for the model parallelism.
    """
    num_processes = num_processes or launcher_number("WORLD_SIZE", 0)
    with as_in_training():
        arguments.use_one_device_queue(flags)
        cpu_only.install_training_shims()
        try:
            defaults = arguments.defaults_of_machine(flags)
            args = parse_for(flags, num_processes, defaults)
        except ValueError as error:
            return Checked(None, findings=(finding_of(error),))
        findings = check_by(lambda: validation.apply_tokenizer(args), "tokenizer_json")
        findings += checks.check_options(args, flags) + checks.check_run(args)
        refusal = _refusal_of_megatron(args)
        if refusal is not None and not _is_of_an_option_in(refusal, findings):
            findings.append(REFUSED_BY_MEGATRON.found(message=refusal))
        if refusal is None:
            # Options by former names now have the present ones.
            findings += [f for f in checks.check_options(args) if f not in findings]
    return Checked(args, args.world_size, tuple(findings))


def parse_for(
    flags: Sequence[str], num_processes: Optional[int], defaults: Sequence[str] = ()
) -> Any:
    """Parse the arguments for this number of processes; None for the minimum.

    Raises:
        ValueError: The flags cannot be parsed.
    """
    args = arguments.parse(flags, defaults)
    args.world_size = num_processes or _fewest_processes(args)
    return args


def _fewest_processes(args: Any) -> int:
    """Smallest number that both the dense and the expert group sizes divide."""
    pipeline = args.pipeline_model_parallel_size
    dense = args.tensor_model_parallel_size * args.context_parallel_size * pipeline
    expert_tensor = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    return math.lcm(dense, expert_tensor * args.expert_model_parallel_size * pipeline)


def _refusal_of_megatron(args: Any) -> Optional[str]:
    """Return the first error of megatron's validation and of the configuration it creates."""
    try:
        from megatron.slipstream.integration.entry import providers

        validation.validate(args)
        providers.model_config(args)
    except AssertionError as error:
        return str(validation.refused_by_megatron(error))
    except ValueError as error:
        return str(error)
    # Megatron's code may raise any exception on unexpected input.
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _is_of_an_option_in(refusal: str, findings: Iterable[Finding]) -> bool:
    """Whether an error in ``findings``, which includes a fix, names an option in ``refusal``."""
    named = (_named(finding.text) for finding in findings if finding.severity == "error")
    return bool(_named(refusal) & set().union(*named))


def _named(text: str) -> set[str]:
    """Return the options named in a text, except names that could be ordinary words."""
    return {word for word in re.findall(r"\w+", text) if "_" in word}


@contextlib.contextmanager
def as_in_training(**variables: str) -> Iterator[None]:
    """Run megatron's code as in training, without output or lasting environment variables.

    Args:
        variables: Environment variables that a launcher sets in addition to the usual ones.
    """
    usual = {"NVTE_CPU_OFFLOAD_V1": "1", "RANK": "0", "WORLD_SIZE": "1"}
    before, level, sink = dict(os.environ), logging.root.manager.disable, io.StringIO()
    for name, value in {**usual, **variables}.items():
        os.environ.setdefault(name, value)
    logging.disable(logging.CRITICAL)
    try:
        # Megatron's warnings concern a real training.
        with (
            warnings.catch_warnings(action="ignore"),
            contextlib.redirect_stdout(sink),
            contextlib.redirect_stderr(sink),
        ):
            yield
    finally:
        logging.disable(level)
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
