# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The guide for moving Slipstream into megatron-core names every module, and existing targets."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megatron" / "slipstream"
GUIDE = ROOT / "docs" / "design" / "upstream.md"

NO_PLACE = ("stays here", "goes away")


def rows() -> list[tuple[list[str], str]]:
    """For each row of the table, the modules and folders and their targets."""
    lines = [line for line in GUIDE.read_text().splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    assert all(len(row) == 3 for row in cells)
    return [(re.findall(r"`([^`]+)`", here), there) for here, there, _ in cells]


def test_every_module_has_its_place_in_the_guide_once() -> None:
    named = Counter(name for here, _ in rows() for name in here)
    assert [name for name, number in named.items() if number > 1] == []
    assert sorted(name for name in named if not (PACKAGE / name).exists()) == []
    folders = tuple(name for name in named if name.endswith("/"))
    modules = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py")}
    missing = sorted(
        name
        for name in modules - set(named)
        if not name.endswith("__init__.py") and not name.startswith(folders)
    )
    assert not missing, f"say in docs/design/upstream.md where these would land: {missing}"


def test_every_place_exists_in_megatron_core_or_is_called_new() -> None:
    spec = importlib.util.find_spec("megatron.core")
    if spec is None or spec.origin is None:
        pytest.skip("needs megatron-core installed")
    megatron = Path(spec.origin).parents[1]
    for _, there in rows():
        places = re.findall(r"`([^`]+)`", there)
        assert bool(places) != (there in NO_PLACE), there
        for place in places:
            assert (megatron / place).exists() != ("(new)" in there), place
