# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Pages show the options, messages and releases of the code."""

from __future__ import annotations

import ast
import dataclasses
import re

from doc_pages import ROOT

from megatron.slipstream.options.chunk_graphs import CHUNK_GRAPH_RULES
from megatron.slipstream.options.context_parallel import DYNAMIC_RULES
from megatron.slipstream.options.experts import EXPERT_RULES
from megatron.slipstream.options.fields import GROUPS, RULES
from megatron.slipstream.options.packing import PACKING_RULES
from megatron.slipstream.options.tiles import TILE_RULES

USER_GUIDE = ROOT / "docs" / "user-guide"


# --- options --------------------------------------------------------------------------------------


RULES_OF_PAGES = {
    "options.md": RULES,
    "packed-sequences.md": PACKING_RULES,
    "dynamic-context-parallel.md": DYNAMIC_RULES,
    "sync-free-experts.md": EXPERT_RULES,
    "sequence-tiles.md": TILE_RULES,
    "chunk-cuda-graphs.md": CHUNK_GRAPH_RULES,
}
"""The rules whose options each page lists."""


def test_every_option_that_a_rule_refuses_is_on_the_page_of_its_feature() -> None:
    num_rules = 0
    missing = []
    for page, rules in RULES_OF_PAGES.items():
        text = (USER_GUIDE / page).read_text(encoding="utf-8")
        for rule in rules:
            num_rules += 1
            names = (rule.name, "--" + rule.name.replace("_", "-"))
            if not any(re.search(rf"(?<![\w-]){name}(?![\w-])", text) for name in names):
                missing.append((page, rule.name))
    assert num_rules > 70
    assert missing == []


def test_every_flag_of_the_parser_has_a_heading() -> None:
    page = (USER_GUIDE / "options.md").read_text(encoding="utf-8")
    fields = [field.name for cls, _ in GROUPS for field in dataclasses.fields(cls)]
    assert len(fields) > 15
    flags = ["--" + name.replace("_", "-") for name in fields]
    assert [flag for flag in flags if f"\n### `{flag}`\n" not in page] == []


# --- compatibility --------------------------------------------------------------------------------


def test_releases_are_those_that_are_tested() -> None:
    # Read from the source: importing it takes seconds.
    source = (ROOT / "megatron/slipstream/patches/releases.py").read_text(encoding="utf-8")
    (tested,) = re.findall(r"^TESTED_RELEASES = (.*)$", source, re.M)
    page = (USER_GUIDE / "compatibility.md").read_text(encoding="utf-8")
    assert f"\n| | {' | '.join(ast.literal_eval(tested))} |\n" in page
