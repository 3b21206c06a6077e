# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""By how much computation is slower than in an iteration that waits for copies.

[Note: A device that waits is faster]
While computation waits for copies, a GPU draws less power, and then runs at a higher clock than its
limit on power allows in the long run. On H200s, steps took 4 to 9% longer than was planned from an
iteration that moved all that may, and waited for that, and less than 0.5% longer than was planned
from one without waits. So times of iterations that wait are too short for a plan without waits.
"""

from __future__ import annotations

MAX_PACE = 1.25
"""The most by which clocks are assumed to differ; a larger difference has another cause."""
MIN_WAITS = 0.02
"""Difference of the shares of two iterations spent in waits, below which clocks are the same."""


def is_alike(waits: float, other_waits: float) -> bool:
    """Return whether the device has the same clock in two iterations.

    Args:
        waits: The share of an iteration in which computation waited for copies.
        other_waits: That of the other one.
    """
    return abs(waits - other_waits) < MIN_WAITS


def pace(own_ms: float, waited_ms: float, expected_ms: float) -> float:
    """Return by how much slower computation is without waits than in an iteration; 1 or more.

    Args:
        own_ms: The iteration's time without waits.
        waited_ms: The time for which computation waited for copies.
        expected_ms: What the first should be, by times of iterations that waited less.
    """
    if own_ms <= 0 or is_alike(waited_ms / (own_ms + waited_ms), 0.0):
        return 1.0
    ratio = expected_ms / own_ms
    return ratio if 1.0 < ratio <= MAX_PACE else 1.0
