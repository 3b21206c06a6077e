# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Facts have declared names, each of an option that exists, and rules read no others."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import string
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from megatron.core.transformer import TransformerConfig
from rule_cases import TABLES

from megatron.slipstream.integration.entry.model_arguments import PLAN_RULES
from megatron.slipstream.options.facts import DEFAULTS, NAMES, Facts
from megatron.slipstream.options.fields import DEFAULTS as MEGATRON_OPTIONS, GROUPS
from megatron.slipstream.options.rules import Rule
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
    "release": "a fact of megatron-core",
    "is_since_0_19": "a fact of megatron-core",
    "state_gib": "an option of slipstream plan",
}
RULES = [*PLAN_RULES, *(rule for table in TABLES.values() for rule in table.rules)]


def read_by_name() -> Iterator[tuple[str, str]]:
    """File and name of each option that may be absent."""
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        if "getattr(" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
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


@pytest.mark.skipif(not releases.is_since("0.19"), reason="options of the newest release")
def test_an_option_that_may_be_absent_is_one_of_the_newest_release() -> None:
    found = set(read_by_name())
    assert len(found) > 15
    known = options() | NO_OPTIONS.keys()
    assert [(file, name) for file, name in sorted(found) if name not in known] == []


def facts_read_by(path: Path) -> set[str]:
    """The attributes that a file reads of facts."""
    return {
        node.attr
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("f", "facts")
    } - {name for name in vars(Facts) if name[0] != "_"}


@cache
def read_by_file() -> dict[str, set[str]]:
    """The facts that each file with rules reads."""
    paths = (
        *sorted((PACKAGE / "options").glob("*.py")),
        PACKAGE / "integration/seam/compat.py",
        PACKAGE / "integration/entry/checks.py",
        PACKAGE / "integration/entry/model_arguments.py",
    )
    # The facts of the process are a class of their own.
    return {path.name: facts_read_by(path) for path in paths if path.name != "preflight.py"}


def named_in(rule: Rule) -> set[str]:
    """The option that a rule is about, the facts that its text shows, and those read by name."""
    texts = (string.Formatter().parse(text) for text in (rule.message, rule.cure))
    shown = {field for parts in texts for _, field, _, _ in parts if field}
    return {rule.name, *shown, *read_as_strings(rule.when), *read_as_strings(rule.requires)}


def read_as_strings(predicate: Any) -> Iterator[str]:
    """The names in variables called ``option`` of a predicate and of those that it calls."""
    code = getattr(predicate, "__code__", None)
    values = [cell.cell_contents for cell in getattr(predicate, "__closure__", None) or ()]
    for variable, value in zip(code.co_freevars if code else (), values, strict=True):
        if variable == "option":
            yield value
        elif callable(value):
            yield from read_as_strings(value)


def test_rules_read_declared_facts_only() -> None:
    undeclared = {file: names - NAMES for file, names in read_by_file().items()}
    assert {file: names for file, names in undeclared.items() if names} == {}


def test_rules_name_and_show_declared_facts_only() -> None:
    assert len(RULES) > 200
    assert {rule.name: named_in(rule) - NAMES for rule in RULES if named_in(rule) - NAMES} == {}


def test_a_declared_fact_is_one_that_a_rule_reads() -> None:
    read = set().union(*read_by_file().values(), *map(named_in, RULES))
    assert NAMES - read == set()


@pytest.mark.skipif(not releases.is_since("0.19"), reason="options of the newest release")
def test_a_declared_fact_is_an_option_of_the_newest_release() -> None:
    assert NAMES - options() - set(NO_OPTIONS) == set()


def test_defaults_are_those_of_the_fields() -> None:
    ours = [field for group, _ in GROUPS for field in dataclasses.fields(group)]
    assert {f.name: f.default for f in ours if f.name in DEFAULTS} == {
        f.name: DEFAULTS[f.name] for f in ours if f.name in DEFAULTS
    }
    assert MEGATRON_OPTIONS.items() >= {
        (name, DEFAULTS[name]) for name in DEFAULTS.keys() & MEGATRON_OPTIONS.keys()
    }


@pytest.mark.parametrize(
    "read",
    [
        lambda facts: facts.offload_modlues,
        lambda facts: facts["offload_modlues"],
        lambda facts: facts.lacks("offload_modlues"),
        lambda facts: facts.fill("{offload_modlues}"),
    ],
)
def test_a_misspelt_fact_is_an_error_also_if_a_source_has_it(read: Any) -> None:
    for facts in (Facts(), Facts(offload_modlues=["core_attn"])):
        with pytest.raises(AttributeError, match="'offload_modlues' is no fact"):
            read(facts)
