# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Bandwidth of the link while a model computes, from copies timed during iterations.

[Note: Rates beside computation]
Bandwidth is measured between two iterations, while the device is idle. During an iteration, kernels
use the same device memory, launches use the same link, and other processes copy from the same host
memory. In a MoE model that keeps an H200 busy, copies took 5 to 8% longer than measured, enough to
stall compute where copies nearly fill a pass. A plan rebuilt from an iteration's times uses the
rates of that iteration's copies.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from megatron.slipstream.plan.model import BYTES_PER_MS_AT_1_GB_PER_S
from megatron.slipstream.plan.trace import Bandwidth

MIN_NBYTES = 64 << 20
"""Minimum bytes copied one way in an iteration: with fewer, latency dominates the rate."""


SLOWDOWN_OUT, SLOWDOWN_BACK = 0.011, 0.007
"""Slowdown of computation that overlaps a copy to the host, and back, as fractions of the copy's
time: docs/design/overhead.md, "Copies in the background". A measured overhead includes it."""


class CopyTime(NamedTuple):
    """Copies that ran back to back in one direction, with their times."""

    is_out: bool
    """Whether they copied to the host."""
    nbytes: int
    start_ms: float
    stop_ms: float


def rates_beside_compute(
    measured: Bandwidth, iterations: Sequence[Sequence[CopyTime]]
) -> Bandwidth:
    """Return the bandwidth during these iterations.

    Args:
        measured: Rates between iterations. They also give the slowdown while the other direction
            is busy.
        iterations: The copies of each iteration.

    Returns:
        For each direction, the measured rates times the median factor by which the iterations'
        copies differ from them; 1 for a direction with few copies.
    """
    shares = []
    for is_out, rates in ((True, measured[0::2]), (False, measured[1::2])):
        of_each = [_share(*rates, is_out, copies) for copies in iterations]
        shares.append(statistics.median(of_each) if of_each else 1.0)
    return Bandwidth(*(rate * share for rate, share in zip(measured, shares * 2, strict=True)))


def slowdown_ms_per_gb(bandwidth: Bandwidth) -> float:
    """Return how much moving a GB (1e9 bytes, out and back) slows computation down, in ms."""
    slowdown = SLOWDOWN_OUT / bandwidth.d2h_gb_per_s + SLOWDOWN_BACK / bandwidth.h2d_gb_per_s
    return slowdown * 1e9 / BYTES_PER_MS_AT_1_GB_PER_S


def _share(
    alone_gb_per_s: float, both_gb_per_s: float, is_out: bool, copies: Sequence[CopyTime]
) -> float:
    """Return bytes copied one way, divided by those expected at the rates in the same time."""
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
