# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Random tests draw the same in each run, so that a change is not refused by luck."""

from __future__ import annotations

import re
from pathlib import Path

from hypothesis import given, settings, strategies as st

TESTS = Path(__file__).resolve().parents[1]


def drawn_in_a_run() -> list[int]:
    drawn: list[int] = []

    @settings(max_examples=20)
    @given(number=st.integers())
    def draw(number: int) -> None:
        drawn.append(number)

    draw()
    return drawn


def test_two_runs_draw_the_same() -> None:
    first = drawn_in_a_run()
    assert len(set(first)) > 10
    assert drawn_in_a_run() == first


def test_no_test_draws_by_itself() -> None:
    """For other draws there are seeds (``random_seeds.py``)."""
    word = "derandomize"
    others = [
        path.name
        for path in TESTS.rglob("*.py")
        if path != Path(__file__) and re.search(rf"{word}\s*=\s*False", path.read_text())
    ]
    assert others == []
