# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""An error explains itself: it names what is not supported, the reason and what to set instead."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "megatron" / "slipstream"


def texts(tree: ast.AST) -> Iterator[str]:
    """Strings of a source, with '…' for values filled in at run time."""
    inner = {id(n) for s in ast.walk(tree) if isinstance(s, ast.JoinedStr) for n in ast.walk(s)}
    for node in ast.walk(tree):
        match node:
            case ast.JoinedStr(values=parts):
                yield "".join(p.value if isinstance(p, ast.Constant) else "…" for p in parts)
            case ast.Constant(value=str(text)) if id(node) not in inner:
                yield text


def test_every_error_of_what_is_not_supported_has_its_reason_and_cure() -> None:
    sources = (path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py")))
    raised = [
        text
        for source in sources
        if "supported" in source  # To parse the others takes most of the time.
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Raise) and node.exc is not None
        for text in texts(node.exc)
        if "not supported" in text
    ]
    assert len(raised) > 20
    assert [text for text in raised if not re.search(r"because .+; (\w|…)", text)] == []
