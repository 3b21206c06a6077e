# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Messages that pages quote, with dots where a value stands, are written by the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SOURCES = [*(ROOT / "megatron").rglob("*.py"), ROOT / "run"]
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


CODE = "\n".join(
    re.sub(r"%[-.\d]*[a-z]|\{[^{}]*\}", VALUE, text)
    for path in SOURCES
    for text in texts_of(path)
    if len(text) > 1
)


def pieces_of(quoted: str) -> list[str]:
    """The words of a message between its values; numbers in an example are values."""
    parts = re.split(r"…|(?<![\w.])\d[\d.]*%?(?![\w.])", " ".join(quoted.split()))
    return [part.strip() for part in parts if len(part.split()) > 1]


QUOTED = {
    quoted
    for page in PAGES
    for quoted in re.findall(r"`([^`\n]*…[^`\n]*)`", page.read_text(encoding="utf-8"))
    if pieces_of(quoted)
}


@pytest.mark.parametrize("quoted", sorted(QUOTED))
def test_a_quoted_message_is_one_of_the_codes(quoted: str) -> None:
    for piece in pieces_of(quoted):
        assert piece in CODE, f"no code writes {piece!r}"


def test_pages_quote_messages() -> None:
    assert len(QUOTED) >= 8
