# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The lines that the pages about frameworks tell users to add, so that tests can run them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "user-guide" / "frameworks"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str, language: str, containing: str = "") -> list[str]:
    """The code blocks of a page in one language that contain a text.

    Raises:
        AssertionError: There is no such block.
    """
    text = (FOLDER / f"{page}.md").read_text()
    found = [code for name, code in BLOCK.findall(text) if name == language and containing in code]
    assert found, f"{page}.md has no {language} block with {containing!r}"
    return found


def words(page: str, containing: str) -> list[str]:
    """The words of the command in a shell block."""
    (block,) = blocks(page, "bash", containing)
    return shlex.split(block.replace("\\\n", " "), comments=True)


def variables(page: str, containing: str) -> dict[str, str]:
    """Variables that a shell block exports."""
    (block,) = blocks(page, "bash", containing)
    exported = [line.removeprefix("export ") for line in block.splitlines() if "export " in line]
    return dict(shlex.split(line, comments=True)[0].split("=", 1) for line in exported)
