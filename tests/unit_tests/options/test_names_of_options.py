# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""An option that is read by name exists: ``getattr`` with a default, or a rule, hides a slip."""

from __future__ import annotations

import argparse
import ast
import dataclasses
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from megatron.core.transformer import TransformerConfig
from rule_cases import TABLES

from megatron.slipstream.integration.entry.model_arguments import PLAN_RULES
from megatron.slipstream.options.facts import DEFAULTS, Facts
from megatron.slipstream.patches import releases

PACKAGE = Path(__file__).parents[3] / "megatron" / "slipstream"
HOLDERS = {"args", "config", "facts", "f", "saved", "options", "c"}
"""Names of objects with options."""

OF_MODELS = {field.name for field in dataclasses.fields(TransformerConfig)}


@cache
def options() -> set[str]:
    """The names of all options: of models, and of the training script's parser."""
    from megatron.slipstream.integration.cpu import cpu_only

    cpu_only.install_training_shims()
    from megatron.training.arguments import add_megatron_arguments

    from megatron.slipstream.integration.entry.arguments import add_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    add_arguments(parser)
    return OF_MODELS | {action.dest for action in parser._actions}


NO_OPTIONS = {
    "external_cuda_graph": "a former flag, which megatron still parses",
    "padded_vocab_size": "megatron's validation sets it",
    "iteration": "set while training",
    "curr_iteration": "set while training",
    "finalize": "a method of Megatron-Bridge's providers",
    "hint_for_unknown": "an attribute of a parser of our command line",
    "unpack_hook": "of a saved tensor",
    "has_gpu": "a fact of the machine",
    "capability": "a fact of the GPU",
    "data_parallel_size": "megatron's validation sets it",
}


def read_by_name() -> Iterator[tuple[str, str]]:
    """File and name of each option that may be absent."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(
                    func=ast.Name(id="getattr"),
                    args=[
                        ast.Name(id=holder) | ast.Attribute(attr=holder),
                        ast.Constant(value=str(name)),
                        _,
                    ],
                ) if holder in HOLDERS:
                    yield str(path.relative_to(PACKAGE)), name
                # Facts have every attribute; those of the process are a class of their own.
                case ast.Attribute(value=ast.Name(id="f" | "facts"), attr=name) if (
                    path.parent.name == "options"
                    and path.name != "preflight.py"
                    and not hasattr(Facts, name)
                ):
                    yield str(path.relative_to(PACKAGE)), name


FOUND = sorted(set(read_by_name()))


@pytest.mark.skipif(not releases.models_pass_their_rank(), reason="options of the newest release")
@pytest.mark.parametrize("file, name", FOUND)
def test_an_option_that_may_be_absent_is_one_of_the_newest_release(file: str, name: str) -> None:
    assert name in options() or name in NO_OPTIONS


def test_a_default_is_of_an_option() -> None:
    assert DEFAULTS.keys() - options() - set(NO_OPTIONS) == set()


def test_options_are_found() -> None:
    assert len(FOUND) > 15


@pytest.mark.skipif(not releases.models_pass_their_rank(), reason="options of the newest release")
def test_a_rule_is_about_an_option_that_there_is() -> None:
    """Facts make None of an option that nothing has, so its rule would never speak."""
    names = {rule.name for rule in PLAN_RULES}
    for table in TABLES.values():
        names |= {rule.name for rule in table.rules}
        names |= {name for case in table.cases for name in case.broken}
    assert names - options() - set(NO_OPTIONS) == set()
