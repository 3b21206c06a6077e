# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Measures the bandwidth of the link between device and host memory by timing copies."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Optional

from megatron.slipstream.fine_grained_activation_offload.activation_store import ActivationStore
from megatron.slipstream.fine_grained_activation_offload.backend import (
    Backend,
    Bytes,
    Copy,
    Stream,
    nbytes_of,
)
from megatron.slipstream.fine_grained_activation_offload.copy_streams import CopyStreams
from megatron.slipstream.fine_grained_activation_offload.host_pool import (
    HostAllocation,
    HostMemoryFull,
)
from megatron.slipstream.fine_grained_activation_offload.rank_barrier import RankBarrier
from megatron.slipstream.plan.model import BYTES_PER_MS_AT_1_GB_PER_S
from megatron.slipstream.plan.trace import Bandwidth

NUM_RATES = 3
"""Number of measurements of a rate. Other traffic can only lower a rate, so the best one counts. If
the ranks of a host measure together, the median counts, since other ranks' copies may not have
begun during the first measurement, and may have ended during the last."""

NUM_BARRIERS = 4
"""Barriers of a host's ranks per measurement: both ways, each way alone, both ways."""

BANDWIDTH_NBYTES = 64 << 20
"""Bytes copied to measure the link, half of them each way: about a millisecond."""


class LinkBandwidth:
    """Measures the link, using memory of a store."""

    def __init__(self, store: ActivationStore) -> None:
        self._store = store
        self._has_measured = False
        """Ranks synchronize only for the first measurement."""

    def measure(self) -> Optional[Bandwidth]:
        """Measure the bandwidth of copies; None if impossible. Blocks the host for a while.

        The first time, the ranks of this host measure simultaneously, if all get here within a few
        seconds, since in training they copy at the same time.
        """
        barrier = None if self._has_measured else RankBarrier()
        self._has_measured = True
        in_use = self._allocate()
        if in_use is None:
            if barrier is not None:
                barrier.attend(NUM_BARRIERS)  # Other ranks must not wait for this one.
            return None
        device, allocation = in_use
        store = self._store
        host = allocation.buffer.first(BANDWIDTH_NBYTES)
        bandwidth = measure_bandwidth(store.backend, store.copy_streams, device, host, barrier)
        store.host_pool.free(allocation)
        return bandwidth

    def _allocate(self) -> Optional[tuple[Bytes, HostAllocation]]:
        """Allocate device and host memory to copy between; None if there is too little."""
        pool = self._store.host_pool
        if pool.allocated_bytes < BANDWIDTH_NBYTES:
            return None  # Almost nothing moves, so no memory is pinned for a measurement.
        device = self._store.backend.allocate_scratch(BANDWIDTH_NBYTES)
        if device is None:
            return None
        try:
            return Bytes(device, 0, BANDWIDTH_NBYTES), pool.allocate(BANDWIDTH_NBYTES)
        except HostMemoryFull:
            return None


def measure_bandwidth(
    backend: Backend,
    streams: CopyStreams,
    device: Bytes,
    host: Bytes,
    barrier: Optional[RankBarrier] = None,
) -> Optional[Bandwidth]:
    """Measure bandwidth, each way alone and both at once; None if time cannot be measured.

    Blocks the host for about ten copies.

    Args:
        backend: The backend of ``streams``.
        streams: The copy streams.
        device: Unused device memory.
        host: Unused host memory of that length.
        barrier: Barrier of this host's ranks, to measure together; None to measure alone.
    """
    streams.begin_measurement()
    half = device.nbytes // 2
    to, source = (Bytes(part.storage, part.start + half, half) for part in (device, host))
    out = ((host.first(half), device.first(half)), streams.d2h)
    back = ((to, source), streams.h2d)

    def rates(*copies: tuple[Copy, Stream]) -> list[float]:
        return _rates(backend, streams, copies, barrier)

    rates(out, back)  # The first copies of a process take longer.
    alone = [rates(out), rates(back)]
    both = rates(out, back)
    if not both or not all(alone):
        return None
    return Bandwidth(alone[0][0], alone[1][0], both[0], both[1])


def _rates(
    backend: Backend,
    streams: CopyStreams,
    copies: Sequence[tuple[Copy, Stream]],
    barrier: Optional[RankBarrier],
) -> list[float]:
    """Return the bandwidth of each of several concurrent copies, in 1e9 bytes per second."""
    if barrier is not None:
        barrier.meet()
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
    choose = max if barrier is None or barrier.is_alone else statistics.median
    return [choose(of_one) for of_one in zip(*rates, strict=True)]
