# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Messages that pages quote, with dots where a value stands, are written by a file of the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SOURCES = [*sorted((ROOT / "megatron").rglob("*.py")), ROOT / "run"]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
VALUE = "\0"


def texts_of(path: Path) -> Iterator[str]:
    """Yield the string literals of a source file, with values as VALUE."""
    if path.suffix != ".py":
        yield path.read_text(encoding="utf-8")
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        yield "".join(
            part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else VALUE
            for part in parts
        )


@cache
def code() -> list[str]:
    """The texts of each source file."""
    return [
        "\n".join(
            re.sub(r"%[-.\d]*[a-z]|\{[^{}]*\}", VALUE, " ".join(text.split()))
            for text in texts_of(path)
            if len(text) > 1
        )
        for path in SOURCES
    ]


def pieces_of(quoted: str) -> list[str]:
    """The words of a message between its values; numbers in an example are values."""
    quoted = " ".join(quoted.removeprefix("attach(): ").split())
    parts = re.split(r"…|(?<![\w.])\d[\d.]*%?(?![\w.])", quoted)
    return [part.strip() for part in parts if len(part.split()) > 1]


def quotes() -> Iterator[str]:
    """Yield what pages quote: texts with dots, and the warnings that one page explains."""
    for page in PAGES:
        yield from re.findall(r"`([^`\n]*…[^`\n]*)`", page.read_text(encoding="utf-8"))
    page = ROOT / "docs" / "user-guide" / "troubleshooting.md"
    section = page.read_text(encoding="utf-8").partition("## What warnings mean")[2]
    for row in section.partition("\n## ")[0].splitlines():
        if row.startswith("| `"):
            yield from re.findall(r"`([^`]+)`", row.split("|")[1])


QUOTED = {quoted for quoted in quotes() if pieces_of(quoted)}


@pytest.mark.parametrize("quoted", sorted(QUOTED))
def test_a_quoted_message_is_one_of_the_codes(quoted: str) -> None:
    pieces = pieces_of(quoted)
    assert any(all(piece in text for piece in pieces) for text in code()), (
        "no file writes all of it"
    )


def test_pages_quote_messages() -> None:
    assert len(QUOTED) >= 16
