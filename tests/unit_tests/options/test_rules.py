# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Every rule of every table: a case breaks it; its cures and what nearly breaks it are accepted.

The cases are in tests/support/rule_cases.py; a rule without one fails here.
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import pytest
from rule_cases import EXPERTS, RANK_CAPACITY, TABLES, TOGETHER, Case, Table

from megatron.slipstream import options
from megatron.slipstream.integration.seam import compat
from megatron.slipstream.options.context_parallel import check_dynamic_context_parallel
from megatron.slipstream.options.facts import Facts
from megatron.slipstream.options.packing import check_packing
from megatron.slipstream.options.rules import Finding, Rule, check_rules


def violated(rules: Any, facts: Facts) -> list[int]:
    return [i for i, rule in enumerate(rules) if rule.when(facts) and not rule.requires(facts)]


def cases() -> Iterator[Any]:
    for name, table in TABLES.items():
        for index, (rule, case) in enumerate(zip(table.rules, table.cases, strict=False)):
            yield pytest.param(table, index, case, id=f"{name}-{index}-{rule.name}")


def is_table(rows: tuple[object, ...]) -> bool:
    """Whether these are rules with a requirement, not only texts of other checks."""
    rules = [row for row in rows if isinstance(row, Rule)]
    return rules != [] and any(r.requires is not Rule._field_defaults["requires"] for r in rules)


def test_every_table_of_rules_has_a_case_for_each_rule() -> None:
    modules = [
        import_module(f"{options.__name__}.{module.name}")
        for module in pkgutil.iter_modules(options.__path__)
    ] + [compat]
    found = {
        f"{module.__name__}.{name}": value
        for module in modules
        for name, value in vars(module).items()
        if name[0] != "_" and isinstance(value, tuple) and is_table(value)
    }
    # One that is part of another table has its cases there.
    rules = {name: {*map(id, value)} for name, value in found.items()}
    tables = {
        id(value): name
        for name, value in found.items()
        if not any(rules[name] < other for other in rules.values())
    }
    assert tables.keys() == {id(table.rules) for table in TABLES.values()}, tables.values()
    for name, table in TABLES.items():
        assert len(table.cases) == len(table.rules), name
        assert check_rules((*table.rules, *TOGETHER), Facts(table.valid)) == [], name


@pytest.mark.parametrize("table, index, case", cases())
def test_a_rule_refuses_what_breaks_it_and_accepts_its_cures(
    table: Table, index: int, case: Case
) -> None:
    rule, broken = table.rules[index], {**table.valid, **case.broken}
    assert violated(table.rules, Facts(broken)) == [index]
    (finding,) = check_rules(table.rules, Facts(broken))
    assert finding.rule == rule.name
    assert not re.search("[{}]", finding.text)
    assert re.match("(set|use|leave|add|remove|name|train|build) ", finding.cure)
    told = {rule.name, *case.broken, *case.cures[0]}
    assert any(option in finding.text for option in told)
    for cure in case.cures:
        assert check_rules((*table.rules, *TOGETHER), Facts(broken, cure)) == []
    is_off = table.off and not table.off.keys() & case.broken.keys()
    nearly = case.nearly or (table.off if is_off else case.cures[0])
    assert index not in violated(table.rules, Facts(broken, nearly))


def of_tables(field: str) -> list[Any]:
    return [
        pytest.param(table, case, id=f"{name}-{index}")
        for name, table in TABLES.items()
        for index, case in enumerate(getattr(table, field))
    ]


def check_all(table: Table, options: Mapping[str, Any]) -> list[Finding]:
    """The findings of the table's rules and of all others, and those about limits of packs."""
    facts = Facts(table.valid, options)
    findings = check_rules((*table.rules, *TOGETHER), facts)
    return findings or [*check_packing(facts), *check_dynamic_context_parallel(facts)]


@pytest.mark.parametrize("table, case", of_tables("refused"))
def test_other_ways_to_break_a_rule(table: Table, case: tuple[Mapping[str, Any], str]) -> None:
    options, text = case
    findings = check_all(table, options)
    assert any(text in finding.text for finding in findings), findings
    assert all(finding.cure for finding in findings)


@pytest.mark.parametrize("table, options", of_tables("accepted"))
def test_what_goes_together(table: Table, options: Mapping[str, Any]) -> None:
    assert check_all(table, options) == []


@pytest.mark.parametrize("table, index, case", cases())
def test_every_option_that_a_cure_names_is_tried(table: Table, index: int, case: Case) -> None:
    tried = {option for cure in case.cures for option in cure}
    known = {rule.name for table in TABLES.values() for rule in table.rules} | EXPERTS.keys()
    known |= RANK_CAPACITY.keys() | {"cuda_graph_granularity", "dynamic_context_parallel"}
    words = set(re.findall(r"[a-z0-9]+(?:_[a-z0-9]+)+", table.rules[index].cure))
    # Sizes that determine other options, and names of choices.
    assert words & known <= tried | case.broken.keys() | {"offload_modules"}
