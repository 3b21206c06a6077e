# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The documentation matches the code, and its links work."""

from __future__ import annotations

import ast
import importlib.util
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal, Optional, Union

import pytest
from doc_pages import blocks_of, commands_in

from megatron.slipstream.options import model
from megatron.slipstream.options.fields import DEFAULTS
from tools import generate_docs

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
WRITING = {"--frontier", "--html", "--json", "--output", "--timeline"}
"""Options that name a file to be written."""
LINKING = [*PAGES, *sorted((ROOT / "benchmarks").rglob("*.md"))]
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


def test_the_generated_pages_are_what_the_source_says() -> None:
    assert generate_docs.main(["--check"]) == 0


def test_a_change_of_the_source_makes_a_page_stale(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(model.MODULE_NAMES, "core_attn", "something else")
    assert generate_docs.main(["--check"]) == 1
    error = capsys.readouterr().err
    assert "docs/user-guide/options.md: not what the source says" in error
    assert "run ./run python tools/generate_docs.py" in error


@dataclass
class Options:
    mode: Optional[Literal["auto", "off"]] = "auto"
    """When to do
    it."""
    size: Union[float, Literal["auto"], None] = None
    """How large."""


@dataclass
class Undocumented:
    size: int = 0


def test_options_are_documented_from_the_source_of_their_class() -> None:
    assert generate_docs.fields_of(Options) == [
        ("mode", "`auto`, `off`", "auto", "When to do it."),
        ("size", "`float`, `auto`", None, "How large."),
    ]
    with pytest.raises(ValueError, match=r"Undocumented\.size has no docstring"):
        generate_docs.fields_of(Undocumented)


@pytest.mark.releases
def test_documented_defaults_of_megatron_core_are_those_of_the_installed_one() -> None:
    from megatron.slipstream.integration.seam.compat import defaults_of_later_options

    spec = importlib.util.find_spec("megatron.core")
    if spec is None or spec.origin is None:
        pytest.skip("megatron-core is not installed")
    # Read from the source: importing it takes seconds.
    source = Path(spec.origin).parent / "transformer" / "transformer_config.py"
    defaults = {
        ast.unparse(node.target): ast.unparse(node.value)
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.AnnAssign) and node.value is not None
    }
    later = defaults_of_later_options()
    assert len(later.keys() & defaults.keys()) in (0, len(later)), "older and later in one release"
    defaults = {name: repr(default) for name, default in later.items()} | defaults
    written = {"1048576": "1024 * 1024", "[]": "field(default_factory=list)"}
    for name, default in DEFAULTS.items():
        assert defaults[name] == written.get(repr(default), repr(default)), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_command_of_a_page_writes_over_the_documentation(page: Path) -> None:
    words = [
        word
        for block in blocks_of(page)
        if block.language == "bash"
        for command in commands_in(block.text)
        for word in command
    ]
    written = [path for option, path in pairwise(words) if option in WRITING or option == ">"]
    assert [path for path in written if path.startswith("docs/")] == []


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_to_files(page: Path) -> None:
    links = [link.partition("#")[0] for link in LINK.findall(page.read_text())]
    local = [link for link in links if link and "://" not in link]
    assert [link for link in local if not (page.parent / link).exists()] == []
