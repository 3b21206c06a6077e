# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The flags of a training command, parsed and checked without a training.

For ``slipstream doctor``, which shows all that a training would refuse, and ``slipstream plan``,
which plans what the flags describe. No model is built, and nothing is made global except what the
CPU shims replace.
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

from megatron.slipstream.integration import arguments, checks, cpu_only, validation
from megatron.slipstream.launcher import launcher_number
from megatron.slipstream.model_rules import REFUSED_BY_MEGATRON
from megatron.slipstream.rules import Finding, check_by, finding_of


class Checked(NamedTuple):
    """Findings about the flags of a command."""

    args: Optional[Any]
    """As megatron has parsed and completed them; None if it could not."""
    num_processes: int = 1
    """That they were checked for."""
    findings: tuple[Finding, ...] = ()


def check_flags(flags: Sequence[str], num_processes: Optional[int] = None) -> Checked:
    """Parse flags with megatron's own parser and ours, and run every check of them.

    Replaces what a training without a GPU replaces, for the rest of the process.

    Args:
        flags: Those of the training script.
        num_processes: How many processes the training has; None for as many as the launcher of
            this process says, or else the fewest that the model parallelism needs.
    """
    num_processes = num_processes or launcher_number("WORLD_SIZE", 0)
    with as_in_training():
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
    return Checked(args, args.world_size, tuple(findings))


def parse_for(
    flags: Sequence[str], num_processes: Optional[int], defaults: Sequence[str] = ()
) -> Any:
    """The arguments of a training of so many processes, None for the fewest that it needs.

    Raises:
        ValueError: The flags cannot be parsed.
    """
    args = arguments.parse(flags, defaults)
    args.world_size = num_processes or _fewest_processes(args)
    return args


def _fewest_processes(args: Any) -> int:
    """The least number that the groups of dense layers and those of experts divide."""
    pipeline = args.pipeline_model_parallel_size
    dense = args.tensor_model_parallel_size * args.context_parallel_size * pipeline
    expert_tensor = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    return math.lcm(dense, expert_tensor * args.expert_model_parallel_size * pipeline)


def _refusal_of_megatron(args: Any) -> Optional[str]:
    """The first thing that megatron's own validation refuses, with the configuration it makes."""
    try:
        from megatron.slipstream.integration import providers

        validation.validate(args)
        providers.model_config(args)
    except AssertionError as error:
        return str(validation.refused_by_megatron(error))
    except ValueError as error:
        return str(error)
    # Megatron's code fails in any way on what it did not expect.
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _is_of_an_option_in(refusal: str, findings: Iterable[Finding]) -> bool:
    """Whether the text names an option that one of the errors names, which has the cure."""
    named = (_named(finding.text) for finding in findings if finding.severity == "error")
    return bool(_named(refusal) & set().union(*named))


def _named(text: str) -> set[str]:
    """The options in a text, as far as their names could not be other words."""
    return {word for word in re.findall(r"\w+", text) if "_" in word}


# The process


@contextlib.contextmanager
def as_in_training(**variables: str) -> Iterator[None]:
    """Megatron's code can run inside as in a training; it prints nothing and leaves no variables.

    Args:
        variables: Of the environment, that a launcher sets beside the usual ones.
    """
    usual = {"NVTE_CPU_OFFLOAD_V1": "1", "RANK": "0", "WORLD_SIZE": "1"}
    before = dict(os.environ)
    for name, value in {**usual, **variables}.items():
        os.environ.setdefault(name, value)
    try:
        with _quiet():
            yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Nothing is printed, warned about or logged: megatron's warnings are about a training."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    sink = io.StringIO()
    try:
        with (
            warnings.catch_warnings(action="ignore"),
            contextlib.redirect_stdout(sink),
            contextlib.redirect_stderr(sink),
        ):
            yield
    finally:
        logging.disable(level)
