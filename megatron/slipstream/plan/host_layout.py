# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The allocator behind the engine's pinned host pool: buffer offsets only, no memory.

[Note: Free ranges]
Every method of :class:`FreeRanges` maintains these invariants:

- Each byte of each slab is either taken or in exactly one free range, and no two free ranges of a
  slab are adjacent. So adjacent free memory can serve one longer buffer, and once everything is
  freed each slab is a single range again.
- Each free byte that was used before belongs to a :class:`Use` with the events that end its last
  copies. The next user of a range gets the events of exactly the bytes that it takes, so it does
  not wait for copies of neighbouring bytes.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, Optional, cast

MIN_BUFFER_BYTES = 4096
BUFFER_ALIGNMENT_BYTES = 512
"""Buffers start and end at multiples of this, like device allocations."""
CLASSES_PER_OCTAVE = 16


@functools.lru_cache(maxsize=4096)  # A plan requests the same sizes repeatedly.
def size_class_bytes(nbytes: int) -> int:
    """Return the buffer size for a request of ``nbytes``: less than 6.25% larger from 8 KiB on.

    Each power of two is divided into :data:`CLASSES_PER_OCTAVE` equal steps, so that sizes that
    vary between iterations, such as tokens per expert, leave holes that can be reused.
    """
    nbytes = max(nbytes, MIN_BUFFER_BYTES)
    step = max(BUFFER_ALIGNMENT_BYTES, (1 << (nbytes.bit_length() - 1)) // CLASSES_PER_OCTAVE)
    return -(-nbytes // step) * step


# The free ranges of slabs.


class Use(NamedTuple):
    """The events that end the last copies of bytes ``[start, stop)`` of a slab."""

    start: int
    stop: int
    events: tuple[Hashable, ...]


class Span(NamedTuple):
    """An allocation: bytes ``[start, stop)`` of a slab, with the events to wait for."""

    slab: int
    start: int
    stop: int
    events: tuple[Hashable, ...]


class _FreeRange(NamedTuple):
    nbytes: int
    serial: int
    """Increases with the time when the range was last freed. It is unique, so free ranges sort by
    length, then oldest first."""
    slab: int
    start: int
    stop: int
    uses: tuple[Use, ...]
    """In order; bytes between them have never been used."""


class FreeRanges:
    """Best-fit allocator with coalescing: splits the shortest free range that is long enough.

    Among ranges of equal length, it splits the one that has been free the longest, since its last
    copy has most likely ended.
    """

    def __init__(self) -> None:
        self._by_size: list[_FreeRange] = []
        """All free ranges, sorted."""
        self._by_start: dict[tuple[int, int], _FreeRange] = {}
        self._by_stop: dict[tuple[int, int], _FreeRange] = {}
        self._serials = itertools.count()
        self._num_slabs = 0

    def add_slab(self, nbytes: int, is_free: bool = True) -> int:
        """Add an unused slab and return its number: 0, 1, 2, ...

        Args:
            nbytes: Length of the slab.
            is_free: False if the whole slab is taken.
        """
        slab = self._num_slabs
        self._num_slabs += 1
        if is_free:
            self._insert(_FreeRange(nbytes, next(self._serials), slab, 0, nbytes, ()))
        return slab

    def take(self, nbytes: int) -> Optional[Span]:
        """Allocate ``nbytes`` bytes; return None if no free range is long enough."""
        place = bisect.bisect_left(self._by_size, (nbytes,))
        if place == len(self._by_size):
            return None
        free = self._by_size.pop(place)
        _, serial, slab, start, stop, uses = free
        del self._by_start[slab, start]
        del self._by_stop[slab, stop]
        cut = start + nbytes
        if cut == stop:
            return Span(slab, start, stop, _distinct(uses))
        first = 0  # first use that extends beyond the cut
        while first < len(uses) and uses[first].stop <= cut:
            first += 1
        taken = first < len(uses) and uses[first].start < cut
        # The remainder keeps its age, since its bytes were not touched.
        left = (uses[first]._replace(start=cut), *uses[first + 1 :]) if taken else uses[first:]
        self._insert(_FreeRange(stop - cut, serial, slab, cut, stop, left))
        return Span(slab, start, cut, _distinct(uses[: first + taken]))

    def put(self, slab: int, start: int, stop: int, events: tuple[Hashable, ...]) -> None:
        """Free allocated bytes; ``events`` mark the end of their last copies."""
        uses: tuple[Use, ...] = (Use(start, stop, events),) if events else ()
        before = self._by_stop.get((slab, start))
        if before is not None:
            self._remove(before)
            start, uses = before.start, before.uses + uses
        after = self._by_start.get((slab, stop))
        if after is not None:
            self._remove(after)
            stop, uses = after.stop, uses + after.uses
        self._insert(_FreeRange(stop - start, next(self._serials), slab, start, stop, uses))

    def events(self) -> tuple[Hashable, ...]:
        """Return the events that end the last copies of the free bytes."""
        return _distinct([use for free in self._by_size for use in free.uses])

    def ranges(self) -> list[tuple[int, int, int]]:
        """Return all free ranges as (slab, start, stop), sorted."""
        return sorted((free.slab, free.start, free.stop) for free in self._by_size)

    def _insert(self, free: _FreeRange) -> None:
        bisect.insort(self._by_size, free)
        self._by_start[free.slab, free.start] = free
        self._by_stop[free.slab, free.stop] = free

    def _remove(self, free: _FreeRange) -> None:
        del self._by_size[bisect.bisect_left(self._by_size, free)]
        del self._by_start[free.slab, free.start]
        del self._by_stop[free.slab, free.stop]


def _distinct(uses: Sequence[Use]) -> tuple[Hashable, ...]:
    if len(uses) == 1 and len(uses[0].events) < 2:
        return uses[0].events
    return tuple(dict.fromkeys(itertools.chain.from_iterable(use.events for use in uses)))


# The host pool over one iteration.


_ENDLESS_BYTES = 1 << 62


class HostBuffer(NamedTuple):
    """Bytes ``[start, stop)`` of a slab that hold a storage."""

    start: int
    stop: int
    used_before: tuple[int, ...]
    """The storages whose H2D copies the buffer's first copy waits for (edge E2)."""
    slab: int = 0


class HostLedger:
    """A model of the host pool over one iteration.

    Args:
        slabs: The length of each slab in bytes. The default is one unbounded slab: where slabs end
            depends on earlier requests to the pool, which a plan cannot know. So more memory is
            contiguous than in the engine, and more buffers overlap several earlier ones.
    """

    def __init__(self, slabs: Sequence[int] = (_ENDLESS_BYTES,)) -> None:
        self._free = FreeRanges()
        for nbytes in slabs:
            self._free.add_slab(nbytes)
        self._freed: list[tuple[HostBuffer, int]] = []
        """Buffers to free before the next allocation. Often none follows: forward allocates, and
        backward frees."""
        self.in_use_bytes = 0
        """Bytes of the buffers currently in use."""

    def allocate(self, nbytes: int) -> HostBuffer:
        """Allocate a buffer of at least ``nbytes`` bytes.

        Raises:
            MemoryError: No free range is long enough.
        """
        for buffer, storage in self._freed:
            self._free.put(buffer.slab, buffer.start, buffer.stop, (storage,))
        self._freed.clear()
        span = self._free.take(size_class_bytes(nbytes))
        if span is None:
            raise MemoryError(f"no slab has {nbytes} contiguous free bytes")
        self.in_use_bytes += span.stop - span.start
        before = cast(tuple[int, ...], span.events)
        return HostBuffer(span.start, span.stop, before, span.slab)

    def free(self, buffer: HostBuffer, storage: int) -> None:
        """Free the buffer of ``storage``, whose H2D copy has been issued."""
        self.in_use_bytes -= buffer.stop - buffer.start
        self._freed.append((buffer, storage))


class HostRequest(NamedTuple):
    """A request to the pool: allocate a storage's buffer, or free it."""

    storage: int
    nbytes: int
    """Length of the buffer to allocate; 0 to free it."""


HostLayout = Mapping[int, HostBuffer]
"""The buffer of each moving storage of an iteration, by index in ``Trace.storages``."""


def lay_out(requests: Sequence[HostRequest], slabs: Sequence[int]) -> Optional[HostLayout]:
    """Return the layout that the engine's allocator gives the buffers of an iteration.

    Args:
        requests: Requests of the iteration, which starts with no buffer in use.
        slabs: The length of each slab in bytes.

    Returns:
        The layout; None if the slabs are too small.
    """
    ledger = HostLedger(slabs)
    layout: dict[int, HostBuffer] = {}
    for storage, nbytes in requests:
        if not nbytes:
            ledger.free(layout[storage], storage)
            continue
        try:
            layout[storage] = ledger.allocate(nbytes)
        except MemoryError:
            return None
    return layout


_STEPS = 64
"""The search for the slab length advances by ``1 / _STEPS`` of the peak in use."""


def slab_bytes_for(iterations: Sequence[Sequence[HostRequest]]) -> int:
    """Return the length of a slab in which each of these iterations can allocate its buffers.

    This is the shortest such length, searched from the peak in use upwards in steps of 1/64 of that
    peak; gaps between buffers make up the excess over the peak. 0 if nothing moves.

    Args:
        iterations: Each starts with no buffer in use, and they run one at a time.
    """
    nbytes = most = max(map(_most_in_use_bytes, iterations), default=0)
    step = -(-most // _STEPS // BUFFER_ALIGNMENT_BYTES) * BUFFER_ALIGNMENT_BYTES
    while any(lay_out(requests, [nbytes]) is None for requests in iterations):
        nbytes += step
    return nbytes


def _most_in_use_bytes(requests: Sequence[HostRequest]) -> int:
    in_use: dict[int, int] = {}
    total = most = 0
    for storage, nbytes in requests:
        total += nbytes or -in_use[storage]
        most = max(most, total)
        in_use[storage] = nbytes
    return most
