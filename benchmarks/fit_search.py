# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Searches the longest sequence that fits, with few measurements. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Optional

from benchmarks.rows import Row

MAX_FACTOR = 8
"""The most by which a prediction extrapolates."""


class NotMeasured(Exception):
    """A point failed for another reason than memory."""


def find_longest(
    measure: Callable[[int], Row], known: Mapping[int, Row], unit: int, start: Optional[int] = None
) -> tuple[int, int]:
    """Return the longest multiple of ``unit`` tokens that fits, and the next, which dies.

    Args:
        measure: Returns the row of a number of tokens.
        known: Rows by tokens; ``measure`` may add to them.
        unit: Tokens.
        start: The first guess; None to predict it.

    Raises:
        NotMeasured: A point failed for another reason than memory.
    """
    rows = dict(known)
    for number in range(100):
        low = max((n for n, row in rows.items() if "error" not in row), default=0)
        high = min((n for n, row in rows.items() if "error" in row), default=None)
        first = low // unit + 1
        if high is not None and first * unit >= high:
            return low // unit * unit, high
        last = -(-high // unit) - 1 if high is not None else None
        guess = start // unit if start and not number else predict_longest(rows) // unit
        if last is not None:
            # Predictions fail where the curve bends; halving ends.
            guess = (first + last) // 2 if number > 2 else min(guess, last)
        tokens = max(guess, first) * unit
        rows[tokens] = measure(tokens)
        if "error" in rows[tokens] and not rows[tokens]["dies"]:
            raise NotMeasured(f"{tokens} tokens: {rows[tokens]['error']}")
    raise NotMeasured("100 lengths were not enough")


def predict_longest(rows: Mapping[int, Row]) -> int:
    """Return the tokens at which reserved memory reaches the device's, by a line; 0 if unknown."""
    fits = sorted(tokens for tokens, row in rows.items() if "error" not in row)
    if not fits:
        return 0
    row = rows[fits[-1]]
    per_token = (row["reserved_bytes"] - row["resident_bytes"]) / fits[-1]
    if per_token <= 0:
        return 0
    predicted = int((row["device_bytes"] - row["resident_bytes"]) / per_token)
    return min(predicted, MAX_FACTOR * fits[-1])
