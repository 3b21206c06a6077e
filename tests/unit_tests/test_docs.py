# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The documentation matches the code, and its links work."""

from __future__ import annotations

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from doc_pages import blocks_of, commands_in

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
WRITING = {"--frontier", "--html", "--json", "--output", "--timeline"}
"""Options that name a file to be written."""
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


def check_pages(root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, root / "tools" / "generate_docs.py", "--check"],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def copy_of_sources(folder: Path) -> Path:
    """Copy the pages, and the sources of generated pages."""
    for name in ("megatron/slipstream", "tools", "docs/user-guide"):
        for path in (path for glob in ("*.py", "*.md") for path in (ROOT / name).rglob(glob)):
            copy = folder / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
    return folder


def test_the_generated_pages_are_what_the_source_says() -> None:
    result = check_pages(ROOT)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    "file, pattern, replacement",
    [
        ("config.py", r'( = [^\n]+\n    """)', r"\1Now: "),
        ("config.py", r"(: int = )\d+", r"\g<1>99"),
        ("model_rules.py", r'("core_attn": ")', r"\1the "),
    ],
    ids=["docstring", "default", "module"],
)
def test_a_change_of_the_configuration_makes_the_page_stale(
    tmp_path: Path, file: str, pattern: str, replacement: str
) -> None:
    source = copy_of_sources(tmp_path) / "megatron" / "slipstream" / file
    text, num_changes = re.subn(pattern, replacement, source.read_text())
    assert num_changes
    source.write_text(text)
    result = check_pages(tmp_path)
    assert result.returncode == 1
    assert "docs/user-guide/options.md" in result.stderr
    assert "run ./run python tools/generate_docs.py" in result.stderr


def test_an_option_without_a_docstring_cannot_be_documented(tmp_path: Path) -> None:
    source = copy_of_sources(tmp_path) / "megatron" / "slipstream" / "config.py"
    text = source.read_text()
    head = "    def __post_init__"
    assert head in text
    source.write_text(text.replace(head, "    offload_margin: int = 0\n\n" + head))
    assert "OffloadConfig.offload_margin has no docstring" in check_pages(tmp_path).stderr


@pytest.mark.releases
def test_documented_defaults_of_megatron_core_are_those_of_the_installed_one() -> None:
    from megatron.slipstream.integration.frameworks.options import defaults_of_later_options

    spec = importlib.util.find_spec("megatron.core")
    if spec is None or spec.origin is None:
        pytest.skip("megatron-core is not installed")
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import generate_docs
    finally:
        sys.path.remove(str(ROOT / "tools"))
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
    for option in generate_docs.MEGATRON_OPTIONS:
        default = repr(option.default)
        assert defaults[option.name] == written.get(default, default), option.name


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_to_files(page: Path) -> None:
    links = [link.partition("#")[0] for link in LINK.findall(page.read_text())]
    local = [link for link in links if link and "://" not in link]
    assert [link for link in local if not (page.parent / link).exists()] == []
