# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Bandwidth of the link while a model computes, from copies timed in its iterations.

[Note: Rates beside computation]
Bandwidth is measured between two iterations, where nothing else happens. During one, kernels use
the same device memory, launches go over the same link, and other processes copy from the same host
memory: in an expert model that keeps an H200 busy copies took 5 to 8% longer than measured, as much
as makes compute wait where the copies of a pass nearly fill it. A plan that is made again from an
iteration's times is made for the rates of that iteration's copies.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from megatron.slipstream.plan.model import BYTES_PER_MS_AT_1_GB_PER_S
from megatron.slipstream.plan.trace import Bandwidth

MIN_NBYTES = 64 << 20
"""In one direction of an iteration: fewer tell more about the start of copies than their rate."""


class CopyTime(NamedTuple):
    """Copies that ran one after another in one direction, and when."""

    is_out: bool
    """Whether they went to the host."""
    nbytes: int
    start_ms: float
    stop_ms: float


def rates_beside_compute(
    measured: Bandwidth, iterations: Sequence[Sequence[CopyTime]]
) -> Bandwidth:
    """Bandwidth in iterations like these.

    Args:
        measured: Between iterations. How much slower copies are while others go the other way is
            taken from here.
        iterations: The copies of each.

    Returns:
        For each direction the measured rates times one factor, by which they tell best how long the
        copies took; 1 for a direction that hardly copies.
    """
    shares = []
    for is_out, rates in ((True, measured[0::2]), (False, measured[1::2])):
        of_each = [_share(*rates, is_out, copies) for copies in iterations]
        shares.append(statistics.median(of_each) if of_each else 1.0)
    return Bandwidth(*(rate * share for rate, share in zip(measured, shares * 2, strict=True)))


def _share(
    alone_gb_per_s: float, both_gb_per_s: float, is_out: bool, copies: Sequence[CopyTime]
) -> float:
    """Bytes that went one way, by those that would have gone at the measured rates meanwhile."""
    own = [copy for copy in copies if copy.is_out is is_out]
    others = [copy for copy in copies if copy.is_out is not is_out]
    nbytes = sum(copy.nbytes for copy in own)
    if nbytes < MIN_NBYTES:
        return 1.0
    total_ms = sum(copy.stop_ms - copy.start_ms for copy in own)
    both_ms = sum(
        max(0.0, min(copy.stop_ms, other.stop_ms) - max(copy.start_ms, other.start_ms))
        for copy in own
        for other in others
    )
    expected = alone_gb_per_s * (total_ms - both_ms) + both_gb_per_s * both_ms
    return nbytes / BYTES_PER_MS_AT_1_GB_PER_S / expected if expected > 0 else 1.0
