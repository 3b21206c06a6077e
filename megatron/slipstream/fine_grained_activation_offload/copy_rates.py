# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Bandwidth of the link: of copies between iterations, and of those timed during iterations.

[Note: Rates beside computation]
Bandwidth is measured between two iterations, while the device is idle. During an iteration, kernels
use the same device memory, launches use the same link, and other processes copy from the same host
memory. In a MoE model that keeps an H200 busy, copies took 5 to 8% longer than measured, enough to
stall compute where copies nearly fill a pass. A plan rebuilt from an iteration's times uses the
rates of that iteration's copies. They include the traffic of the host's other GPUs.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple, Optional

from megatron.slipstream.fine_grained_activation_offload.activation_store import ActivationStore
from megatron.slipstream.fine_grained_activation_offload.backend import (
    Backend,
    Bytes,
    Copy,
    Stream,
    nbytes_of,
)
from megatron.slipstream.fine_grained_activation_offload.copy_streams import CopyStreams
from megatron.slipstream.fine_grained_activation_offload.host_pool import HostMemoryFull
from megatron.slipstream.plan.model import BYTES_PER_MS_AT_1_GB_PER_S
from megatron.slipstream.plan.trace import Bandwidth

MIN_NBYTES = 64 << 20
"""Minimum bytes copied one way in an iteration: with fewer, latency dominates the rate."""

BANDWIDTH_NBYTES = 64 << 20
"""Bytes copied to measure the link, half of them each way: about a millisecond."""

NUM_RATES = 3
"""Number of measurements of a rate. Other traffic can only lower a rate, so the best one counts."""

SLOW_SHARE = 0.97
"""Fraction of the link's bandwidth below which copies count as slowed; kernels cost less."""

SLOWDOWN_OUT, SLOWDOWN_BACK = 0.011, 0.007
"""Slowdown of computation that overlaps a copy to the host, and back, as fractions of the copy's
time: docs/design/overhead.md, "Copies in the background". A measured overhead includes it."""


class CopyTime(NamedTuple):
    """Copies that ran back to back in one direction, with their times."""

    is_out: bool
    nbytes: int
    start_ms: float
    stop_ms: float


def measure_link(store: ActivationStore) -> Optional[Bandwidth]:
    """Measure the bandwidth of copies between two iterations, in memory of a store.

    Blocks the host for about ten copies. None if memory is short, or the backend takes no times.
    """
    pool = store.host_pool
    if pool.allocated_bytes < BANDWIDTH_NBYTES:
        return None  # Almost nothing moves, so no memory is pinned for a measurement.
    memory = store.backend.allocate_scratch(BANDWIDTH_NBYTES)
    if memory is None:
        return None
    try:
        allocation = pool.allocate(BANDWIDTH_NBYTES)
    except HostMemoryFull:
        return None
    device, host = Bytes(memory, 0, BANDWIDTH_NBYTES), allocation.buffer.first(BANDWIDTH_NBYTES)
    bandwidth = measure_bandwidth(store.backend, store.copy_streams, device, host)
    pool.free(allocation)
    return bandwidth


def measure_bandwidth(
    backend: Backend, streams: CopyStreams, device: Bytes, host: Bytes
) -> Optional[Bandwidth]:
    """Measure bandwidth, each way alone and both at once; None if the backend takes no times.

    Blocks the host for about ten copies between ``device`` and ``host``, unused memory of the same
    length.
    """
    streams.begin_measurement()
    half = device.nbytes // 2
    to, source = (Bytes(part.storage, part.start + half, half) for part in (device, host))
    out = ((host.first(half), device.first(half)), streams.d2h)
    back = ((to, source), streams.h2d)

    def rates(*copies: tuple[Copy, Stream]) -> list[float]:
        return _rates(backend, streams, copies)

    rates(out, back)  # The first copies of a process take longer.
    alone = [rates(out), rates(back)]
    both = rates(out, back)
    if not both or not all(alone):
        return None
    return Bandwidth(alone[0][0], alone[1][0], both[0], both[1])


def _rates(
    backend: Backend, streams: CopyStreams, copies: Sequence[tuple[Copy, Stream]]
) -> list[float]:
    """Return the bandwidth of each of several concurrent copies, in 1e9 bytes per second."""
    rates: list[list[float]] = []
    for _ in range(NUM_RATES):
        starts = [backend.timed_event(stream) for _, stream in copies]
        for copy, stream in copies:
            backend.run_copies([copy], stream)
        stops = [backend.timed_event(stream) for _, stream in copies]
        streams.finish()
        if starts[0] is None:
            return []
        times = [backend.elapsed_ms(start, stop) for start, stop in zip(starts, stops, strict=True)]
        rates.append(
            [
                nbytes_of(copy) / ms / BYTES_PER_MS_AT_1_GB_PER_S
                for (copy, _), ms in zip(copies, times, strict=True)
                if ms
            ]
        )
    return [max(of_one) for of_one in zip(*rates, strict=True)]


def are_slow(beside_compute: Bandwidth, measured: Bandwidth) -> bool:
    """Return whether copies in either direction are slower during iterations than between them."""
    return (
        beside_compute.d2h_gb_per_s < SLOW_SHARE * measured.d2h_gb_per_s
        or beside_compute.h2d_gb_per_s < SLOW_SHARE * measured.h2d_gb_per_s
    )


def rates_beside_compute(
    measured: Bandwidth, iterations: Sequence[Sequence[CopyTime]]
) -> Bandwidth:
    """Return the bandwidth during these iterations.

    For each direction, these are the measured rates, which also give the slowdown while the other
    direction is busy, times the median factor by which the iterations' copies differ from them; 1
    for a direction with few copies.
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
