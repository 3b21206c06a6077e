# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The pages of the documentation, their examples, and the commands in these."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Optional

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>[^\n`]*)\n(?P<text>.*?)^(?P=indent)```", re.M | re.S
)
_NOT_RUN = re.compile(r"<!-- not run: (?P<why>[^\n]+) -->\s*\Z")
_COMMAND = re.compile(r"(\$ |\./run|slipstream|python|pip|pytest|torchrun|--)")
_END_OF_COMMAND = {"&&", "||", "|", ";", "&", ">", ">>", "2>&1", "<"}
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9_-]*")


class Block(NamedTuple):
    """A fenced example."""

    language: str
    text: str
    line: int
    not_run: Optional[str]
    """The reason in the comment above it why it does not run."""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks_of(page: Path) -> Iterator[Block]:
    content = page.read_text(encoding="utf-8")
    for match in _FENCE.finditer(content):
        text = re.sub(rf"^{match['indent']}", "", match["text"], flags=re.M)
        language = match["language"].strip()
        if language in ("sh", "shell", "console") or (not language and _COMMAND.match(text)):
            language = "bash"
        marked = _NOT_RUN.search(content, 0, match.start())
        line = content.count("\n", 0, match.start()) + 1
        yield Block(language, text, line, marked["why"] if marked else None)


def commands_in(text: str) -> Iterator[list[str]]:
    """The words of each command of a shell example, without placeholders."""
    for line in text.replace("\\\n", " ").splitlines():
        words: list[str] = []
        for word in [*shlex.split(line.removeprefix("$ "), comments=True), ";"]:
            if word not in _END_OF_COMMAND:
                words.append(word)
                continue
            while words and re.fullmatch(r"\w+=.*", words[0]):
                del words[0]
            if words and word not in (">", ">>", "<"):
                yield [w for w in words if w != "..." and not w.startswith("$")]
                words = []
            elif word in (">", ">>", "<"):
                words.append(word)


def inline_code(page: Path) -> list[str]:
    """Text between backquotes in a page, without examples."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    return re.findall(r"(?<!`)`([^`]+)`(?!`)", text)
