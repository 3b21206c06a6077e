# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Bandwidth of the link while a model computes, from copies timed in its iterations.

[Note: Rates beside computation]
Bandwidth is measured between two iterations, while the device is idle. During an iteration, kernels
use the same device memory, launches use the same link, and other processes copy from the same host
memory: in an expert model that keeps an H200 busy, copies took 5 to 8% longer than measured, enough
to stall compute where copies nearly fill a pass. A plan that is rebuilt from an iteration's times
uses the rates of that iteration's copies.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from megatron.slipstream.plan.model import BYTES_PER_MS_AT_1_GB_PER_S
from megatron.slipstream.plan.trace import Bandwidth

MIN_NBYTES = 64 << 20
"""Minimum bytes in one direction of an iteration: with fewer, latency dominates the rate."""


SLOWDOWN_OUT, SLOWDOWN_BACK = 0.011, 0.007
"""By how much computation takes longer beside a copy to the host, and back, as fractions of the
copy's time: docs/design/overhead.md, "Copies in the background". Where an overhead is measured,
this is part of it."""


class CopyTime(NamedTuple):
    """Copies that ran one after another in one direction, with their times."""

    is_out: bool
    """Whether they copied to the host."""
    nbytes: int
    start_ms: float
    stop_ms: float


def rates_beside_compute(
    measured: Bandwidth, iterations: Sequence[Sequence[CopyTime]]
) -> Bandwidth:
    """Bandwidth in iterations like these.

    Args:
        measured: Rates between iterations. They also give the slowdown while the other direction
            is busy.
        iterations: The copies of each iteration.

    Returns:
        For each direction the measured rates times one factor that fits the copies' times best; 1
        for a direction with few copies.
    """
    shares = []
    for is_out, rates in ((True, measured[0::2]), (False, measured[1::2])):
        of_each = [_share(*rates, is_out, copies) for copies in iterations]
        shares.append(statistics.median(of_each) if of_each else 1.0)
    return Bandwidth(*(rate * share for rate, share in zip(measured, shares * 2, strict=True)))


def slowdown_ms_per_gb(bandwidth: Bandwidth) -> float:
    """By how much a moved GB (1e9 bytes, out and back) slows computation down, in milliseconds."""
    slowdown = SLOWDOWN_OUT / bandwidth.d2h_gb_per_s + SLOWDOWN_BACK / bandwidth.h2d_gb_per_s
    return slowdown * 1e9 / BYTES_PER_MS_AT_1_GB_PER_S


def _share(
    alone_gb_per_s: float, both_gb_per_s: float, is_out: bool, copies: Sequence[CopyTime]
) -> float:
    """Bytes copied one way, divided by those expected at the measured rates in the same time."""
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
