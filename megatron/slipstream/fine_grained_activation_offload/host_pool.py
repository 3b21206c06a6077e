# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Pinned host memory: buffers that are reused only together with the events to wait for.

Buffers of any size are cut from a few large slabs, since pinning memory is slow.
``plan.host_layout`` decides their addresses; its invariant keeps the pool small: adjacent free
memory is one range, so memory freed by buffers of one size can serve any other size.

A buffer and the events of the last copies of its bytes travel together in a
:class:`HostAllocation`. The pool never waits: the next user's copy does (edge E2 of
``plan.edges``).

[Note: Layouts]
An iteration that follows its plan requests the same buffers as the previous one, in the same order.
So their layout is computed once (``plan.host_layout.lay_out``), including which storages used each
buffer's bytes before, and the pool allocates them without a search:
:meth:`HostPool.allocate_planned`. Meanwhile the free ranges are not updated; the first unplanned
request rebuilds them from the buffers in use. A planned buffer is not given out while an earlier
user of its bytes is still to be allocated or freed. So each user of a byte waits for the previous
one, as planned, and the first user waits for all copies of earlier iterations.

[Note: Copies without a signal]
An exception (device memory runs out, the user interrupts) may come between a copy and its signal.
The buffer, and the device memory that the copy writes, may then be in use until the host has waited
for the copy streams. Such a buffer says so in ``in_flight``. When it is freed, it stays in use
until :meth:`HostPool.recover`, which the engine calls before the next iteration. That also frees
buffers that an exception has left without an owner.

[Note: Interrupts of the pool]
An exception may come while free ranges change, also in a destructor, where Python only reports it.
The pool then stays busy: it allocates nothing, and buffers that are freed wait, until
:meth:`HostPool.recover` has waited for all copies and builds the ranges from the buffers in use.

[Note: Waste of host memory]
Pinned memory beyond the requested bytes has three parts. *Slack*: requests are rounded up to a size
class, by less than a sixteenth for 8 KiB or more. *Unusable*: memory that was free when a slab was
added, but in ranges that were too short. *Spare*: the part of the last slab that is not needed yet,
or no longer; it is freed once plans are settled (``lifecycle``). Waste is the first two. While
buffers are only allocated, as in a forward pass, a slab cannot hold the next buffer only if its
remainder is shorter than the buffer, which is a sixteenth of a slab added for that size; so waste
stays below an eighth of the memory in use. If forward and backward alternate and sizes vary, free
ranges of odd lengths also lie between used ones, and no pool that cannot move buffers can guarantee
a bound for every order of requests. The tests show it for the pipeline schedules, with sizes that
vary between buffers and between steps: below an eighth from about thirty buffers on, and a
twentieth on average.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional
from weakref import WeakSet

import torch

from megatron.slipstream.fine_grained_activation_offload.backend import Backend, Bytes
from megatron.slipstream.plan.host_layout import FreeRanges, HostLayout, size_class_bytes
from megatron.slipstream.plan.render import format_bytes

logger = logging.getLogger(__name__)

BUFFERS_PER_SLAB = 16
"""Minimum number of buffers, of the size that a new slab is added for, that fit in it."""


class ProcessLimit(NamedTuple):
    """The limit on pinned host memory of a process."""

    nbytes: int
    is_default: bool = False
    """Whether the user has set no limit."""

    def describe(self, share_bytes: Optional[int] = None) -> str:
        """Name the limit and who set it, for one that may use ``share_bytes`` of it."""
        limit = format_bytes(self.nbytes)
        text = f"offload_host_memory_limit_bytes={self.nbytes} ({limit})"
        if self.is_default:
            text = (
                f"the default of offload_host_memory_limit_bytes, {limit} (most of the host memory "
                "that was available)"
            )
        if share_bytes is not None and share_bytes < self.nbytes:
            text += f", {format_bytes(share_bytes)} of it for this use,"
        return text


class HostMemoryFull(Exception):
    """A buffer would exceed the pool's limit, or the system has refused memory."""


@dataclass
class HostAllocation:
    """A host buffer in use."""

    buffer: Bytes
    """As long as the request's size class, at a multiple of 512 bytes."""
    last_use: tuple[Any, ...] = ()
    """The signals after the last copies that read or write bytes of the buffer, if any."""
    in_flight: Optional[torch.UntypedStorage] = None
    """Device memory of copies of the buffer for which there is no signal yet: [Note: Copies without
    a signal]."""
    owner: Optional[weakref.ref[Any]] = None
    """The storage that holds the buffer."""

    @property
    def is_lost(self) -> bool:
        """Whether no storage holds it, so that nothing will free it."""
        owner = None if self.owner is None else self.owner()
        return owner is None or owner.allocation is not self


class InUse(NamedTuple):
    """A buffer in use, and its address."""

    allocation: HostAllocation
    slab: int
    start: int
    stop: int
    nbytes: int


class HostUsage:
    """Counts the bytes of host buffers in use, now and at the peak."""

    def __init__(self) -> None:
        self.in_use = 0
        self.requested = 0
        """Requested bytes of the buffers in use."""
        self.peak = 0
        """Peak bytes in use since :meth:`HostPool.take_peak_in_use`."""
        self.high_water = 0
        """Peak bytes in use."""
        self.high_water_requested = 0

    def add(self, size: int, nbytes: int) -> None:
        self.in_use += size
        self.requested += nbytes
        if self.in_use > self.peak:
            self.peak = self.in_use
            if self.in_use > self.high_water:
                self.high_water = self.in_use
                self.high_water_requested = self.requested

    def remove(self, size: int, nbytes: int) -> None:
        self.in_use -= size
        self.requested -= nbytes


class Layout:
    """The layout of an iteration's buffers, by index in ``Trace.storages``: [Note: Layouts]."""

    def __init__(self, buffers: HostLayout, slabs: list[Bytes], usage: HostUsage) -> None:
        self._buffers = buffers
        self._slabs = slabs
        self._usage = usage
        self.is_followed = False
        """Whether all requests since :meth:`begin` were as planned."""
        self._allocations: dict[int, HostAllocation] = {}
        """Allocations of this iteration by storage, including freed ones."""
        self._in_use: dict[int, InUse] = {}
        """Buffers in use, by the identity of the allocation."""
        self._newest: dict[Any, Any] = {}
        self._carried: tuple[Any, ...] = ()
        """The signals after the last copies of earlier iterations."""

    @property
    def newest(self) -> tuple[Any, ...]:
        """The signals after the last copies of freed buffers, one per stream."""
        return tuple(self._newest.values())

    def begin(self, carried: Iterable[Any]) -> None:
        """Begin an iteration, with no buffer in use.

        ``carried`` are the signals after the last copies of earlier iterations.
        """
        self.is_followed = True
        self._allocations.clear()
        self._newest = {}
        self._note_last_use(carried)
        self._carried = self.newest

    def allocate(self, storage: int, nbytes: int) -> Optional[HostAllocation]:
        """Return the buffer of ``Trace.storages[storage]``, whose length must be as planned.

        None if it is not planned, or if its bytes are still in use.
        """
        buffer = self._buffers.get(storage)
        if buffer is None or storage in self._allocations:
            return None
        start, stop, used_before, slab = buffer
        if stop - start != size_class_bytes(nbytes):
            return None  # Sizes vary from one iteration to the next.
        events = self._carried
        for earlier in used_before:
            before = self._allocations.get(earlier)
            if before is None or id(before) in self._in_use:
                return None
            events = (*events, *before.last_use)
        memory, offset, _ = self._slabs[slab]
        allocation = HostAllocation(Bytes(memory, offset + start, stop - start), events)
        self._allocations[storage] = allocation
        self._in_use[id(allocation)] = InUse(allocation, slab, start, stop, nbytes)
        self._usage.add(stop - start, nbytes)
        return allocation

    def has(self, allocation: HostAllocation) -> bool:
        """Return whether the buffer belongs to this layout and is in use."""
        return id(allocation) in self._in_use

    def free(self, allocation: HostAllocation) -> None:
        in_use = self._in_use.pop(id(allocation))
        self._note_last_use(allocation.last_use)
        self._usage.remove(in_use.stop - in_use.start, in_use.nbytes)

    def take_in_use(self) -> list[InUse]:
        """Return the buffers in use, which the layout then no longer holds."""
        in_use, self._in_use = list(self._in_use.values()), {}
        return in_use

    @property
    def is_idle(self) -> bool:
        return not self._in_use

    @property
    def has_lost(self) -> bool:
        return any(item.allocation.is_lost for item in self._in_use.values())

    def free_lost(self) -> None:
        """Free the buffers that no storage holds. No copy may be using them."""
        for item in list(self._in_use.values()):
            if item.allocation.is_lost:
                item.allocation.last_use = ()
                self.free(item.allocation)

    def _note_last_use(self, signals: Iterable[Any]) -> None:
        for signal in signals:
            known = self._newest.get(signal.stream)
            if known is None or known.position < signal.position:
                self._newest[signal.stream] = signal


class _PythonClasses(NamedTuple):
    HostUsage: type[HostUsage] = HostUsage
    HostAllocation: type[HostAllocation] = HostAllocation
    Layout: type[Layout] = Layout


_PYTHON_CLASSES = _PythonClasses()
_generations = itertools.count()


class HostPool:
    """Allocates host buffers; ``native`` is the module with the C++ classes, if they are used."""

    def __init__(
        self, backend: Backend, limit_bytes: Optional[int] = None, native: Any = None
    ) -> None:
        self._backend = backend
        self._classes = _PYTHON_CLASSES if native is None else native
        self.limit_bytes = limit_bytes
        """Maximum bytes that the pool may hold; None for no limit. Once the system has refused
        memory, the bytes that the pool held at that time."""
        self.process_limit: Optional[ProcessLimit] = None
        """The limit that :attr:`limit_bytes` is a share of; None if nothing else shares it."""
        self.part_of: Optional[HostPool] = None
        """The pool within whose share this one holds memory; None if it has a share itself."""
        self.parts: WeakSet[HostPool] = WeakSet()
        """The pools of CUDA graphs within this one's share; their bytes are not in
        ``limit_bytes``."""
        self.was_refused = False
        """Whether the system has refused memory."""
        self._slabs: list[torch.Tensor] = []
        self._slab_bytes: list[Bytes] = []
        self._free = FreeRanges()
        self._in_use: dict[int, InUse] = {}
        """Buffers in use, by the identity of the allocation, except those of :attr:`layout`."""
        self._returned: deque[HostAllocation] = deque()
        """Returned buffers that are not yet free: see :meth:`free`."""
        self._unsettled: list[HostAllocation] = []
        """Returned buffers that copies may still use: [Note: Copies without a signal]."""
        self._is_busy = False
        """Whether free memory is changing, or an exception has interrupted that."""
        self.layout: Any = None
        """The :class:`Layout` being followed; None after an unplanned request."""
        self.allocated_bytes = 0
        """Host memory that the pool holds, in use or not."""
        self._usage: Any = self._classes.HostUsage()
        self._unusable_bytes = 0
        """Bytes that were free when the last slab was added."""
        self.generation = next(_generations)
        """A number unique to each set of slabs, across all pools."""

    @property
    def num_slabs(self) -> int:
        return len(self._slabs)

    @property
    def in_use_bytes(self) -> int:
        return int(self._usage.in_use)

    @property
    def held_bytes(self) -> int:
        """Bytes of the share that cannot be given to others."""
        return self.allocated_bytes + self.parts_bytes

    @property
    def parts_bytes(self) -> int:
        return sum(part.allocated_bytes for part in self.parts)

    @property
    def high_water_bytes(self) -> int:
        return int(self._usage.high_water)

    @property
    def slab_lengths(self) -> tuple[int, ...]:
        """The length of each slab in bytes, for :meth:`follow`."""
        return tuple(slab.nbytes for slab in self._slab_bytes)

    @property
    def follows_layout(self) -> bool:
        """Whether all requests since :meth:`follow` were as planned."""
        return self.layout is not None

    @property
    def waste_bytes(self) -> int:
        """Slack and unusable memory at the high-water mark: [Note: Waste of host memory]."""
        slack = self.high_water_bytes - self._usage.high_water_requested
        return slack + min(self._unusable_bytes, self.allocated_bytes - self.high_water_bytes)

    def allocate(self, nbytes: int) -> HostAllocation:
        """Allocate at least ``nbytes`` bytes.

        Raises:
            HostMemoryFull: The pool cannot grow, or an exception has interrupted one of its
                methods: [Note: Interrupts of the pool].
        """
        if self._is_busy:
            raise HostMemoryFull
        if self._returned:
            self._take_back()
        self._is_busy = True
        try:
            self._leave_layout()
            allocation = self._allocate_span(nbytes)
        except HostMemoryFull:
            self._is_busy = False
            raise
        self._is_busy = False
        return allocation

    def make_layout(self, buffers: HostLayout) -> Any:
        """Return a :class:`Layout` for :meth:`follow`, from one for :attr:`slab_lengths`."""
        return self._classes.Layout(buffers, list(self._slab_bytes), self._usage)

    def follow(self, layout: Any) -> bool:
        """Begin an iteration with a layout of this :attr:`generation`: [Note: Layouts].

        Return whether that is possible: no buffer may be in use.
        """
        if self.in_use_bytes:
            return False
        known = self.layout
        carried = self._free.events() if known is None else known.newest
        if known is not None:
            known.is_followed = False
        layout.begin(carried)
        self.layout = layout
        return True

    def allocate_planned(self, storage: int, nbytes: int) -> Any:
        """Return the buffer of a storage in the layout being followed; None if it has none."""
        return None if self.layout is None else self.layout.allocate(storage, nbytes)

    def _leave_layout(self) -> None:
        """Stop following the layout: rebuild the free ranges from the buffers in use."""
        layout, self.layout = self.layout, None
        if layout is None:
            return
        layout.is_followed = False
        for in_use in layout.take_in_use():
            self._in_use[id(in_use[0])] = InUse(*in_use)
        self._build_free(layout.newest)

    def _build_free(self, events: tuple[Any, ...]) -> None:
        """Build the free ranges from the buffers in use; events end the last copies of the rest."""
        self._free = FreeRanges()
        in_use = sorted((item.slab, item.start, item.stop) for item in self._in_use.values())
        for number, slab in enumerate(self._slab_bytes):
            self._free.add_slab(slab.nbytes, is_free=False)
            free_from = 0
            for _, start, stop in (item for item in in_use if item[0] == number):
                if free_from < start:
                    self._free.put(number, free_from, start, events)
                free_from = stop
            if free_from < slab.nbytes:
                self._free.put(number, free_from, slab.nbytes, events)

    def become_part_of(self, whole: HostPool) -> None:
        """Hold memory for CUDA graphs within the share of another pool from now on."""
        self.part_of = whole
        whole.parts.add(self)

    def reserve(self, nbytes: int) -> None:
        """Add ``nbytes`` bytes, if limit and system allow it, and make the total the new limit."""
        whole, before = self._whole, self.allocated_bytes
        if whole is not None and whole.limit_bytes is not None:
            nbytes = min(nbytes, whole.limit_bytes - whole.allocated_bytes)
        if nbytes > 0:
            with contextlib.suppress(HostMemoryFull):
                self._add_slab(nbytes)
        self.limit_bytes = self.allocated_bytes
        if whole is not None and whole.limit_bytes is not None:
            whole.limit_bytes -= self.allocated_bytes - before

    @property
    def _whole(self) -> Optional[HostPool]:
        """The pool that this one is one of the parts of."""
        whole = self.part_of
        return whole if whole is not None and self in whole.parts else None

    def free(self, allocation: HostAllocation) -> None:
        """Free a buffer. Its ``last_use`` may still be pending.

        May be called inside any other method: a storage frees its buffer when it is deleted, and
        the garbage collector may delete a storage in a reference cycle left by an exception. The
        buffer is then freed slightly later.
        """
        if allocation.in_flight is not None:
            self._unsettled.append(allocation)
            return
        self._returned.append(allocation)
        self._take_back()

    @property
    def is_idle(self) -> bool:
        """Whether no buffer is in use, and no exception has interrupted a method."""
        # An interrupt may have come between a buffer and its count.
        is_unused = not (self._usage.in_use or self._in_use or self._is_busy)
        return is_unused and (self.layout is None or self.layout.is_idle)

    def recover(self, finish: Callable[[], None]) -> None:
        """Free the buffers that an exception has left in use. Call between iterations.

        ``finish`` blocks the host until every copy has completed (edge E7).
        """
        was_interrupted = self._is_busy
        lost = [item.allocation for item in self._in_use.values() if item.allocation.is_lost]
        layout_has_lost = self.layout is not None and self.layout.has_lost
        if self._unsettled or lost or layout_has_lost or was_interrupted:
            finish()
            if was_interrupted and self.layout is None:
                self._build_free(())
            self._is_busy = False
            unsettled, self._unsettled = self._unsettled, []
            for allocation in {id(one): one for one in (*unsettled, *lost)}.values():
                allocation.in_flight, allocation.last_use = None, ()
                self.free(allocation)
            if self.layout is not None:
                self.layout.free_lost()
        self._take_back()
        if not self._in_use and (self.layout is None or self.layout.is_idle):
            # An interrupt may have come between a buffer and its count.
            self._usage.remove(self._usage.in_use, self._usage.requested)

    def close(self) -> None:
        """Return all memory to the system. Every copy must have completed (edge E7)."""
        whole = self._whole
        if whole is not None and whole.limit_bytes is not None:
            whole.limit_bytes += self.allocated_bytes
        self._in_use.clear()
        self._unsettled.clear()
        if self.layout is not None:
            self.layout.is_followed = False
            self.layout = None
        self._free = FreeRanges()
        self._slab_bytes.clear()
        self.generation = next(_generations)
        while self._slabs:
            self._backend.free_host(self._slabs.pop())
        self.allocated_bytes = self._unusable_bytes = 0
        self._usage = self._classes.HostUsage()

    def take_peak_in_use(self) -> int:
        """Return the peak bytes in use since the last call."""
        most: int = self._usage.peak
        self._usage.peak = self._usage.in_use
        return most

    def trim_to(self, nbytes: int) -> None:
        """Replace all slabs with one of ``nbytes`` bytes.

        Nothing may be in use, and every copy must have completed (edge E7). If the system refuses
        the slab, the pool grows again as buffers are allocated.
        """
        assert self.in_use_bytes == 0
        self.close()
        if nbytes:
            with contextlib.suppress(RuntimeError, MemoryError):
                self._hold(self._backend.allocate_host(nbytes))

    def _allocate_span(self, nbytes: int) -> HostAllocation:
        size = size_class_bytes(nbytes)
        span = self._free.take(size)
        if span is None:
            self._grow(size)
            span = self._free.take(size)
            assert span is not None
        storage, offset, _ = self._slab_bytes[span.slab]
        buffer, stop = Bytes(storage, offset + span.start, size), span.start + size
        allocation: HostAllocation = self._classes.HostAllocation(buffer, span.events)
        self._in_use[id(allocation)] = InUse(allocation, span.slab, span.start, stop, nbytes)
        self._usage.add(size, nbytes)
        return allocation

    def _take_back(self) -> None:
        """Free returned buffers, unless a method is changing the free memory."""
        if self._is_busy:
            return
        self._is_busy = True
        while self._returned:
            self._free_buffer(self._returned[0])
            self._returned.popleft()
        self._is_busy = False

    def _free_buffer(self, allocation: HostAllocation) -> None:
        if self.layout is not None and self.layout.has(allocation):
            self.layout.free(allocation)
            return
        in_use = self._in_use.pop(id(allocation), None)
        if in_use is None:
            return  # Allocated before the pool was closed, so it no longer belongs to the pool.
        # A layout that was left is not followed again within the iteration.
        self._usage.remove(in_use.stop - in_use.start, in_use.nbytes)
        self._free.put(in_use.slab, in_use.start, in_use.stop, allocation.last_use)

    def _grow(self, size: int) -> None:
        slab_bytes = max(self._backend.host_slab_bytes, BUFFERS_PER_SLAB * size)
        slab_bytes -= slab_bytes % size  # The remainder could not hold a buffer of this size.
        if self.limit_bytes is not None:
            slab_bytes = min(slab_bytes, self.limit_bytes - self.allocated_bytes)
        if slab_bytes < size:
            raise HostMemoryFull
        self._add_slab(slab_bytes)

    def _add_slab(self, slab_bytes: int) -> None:
        try:
            slab = self._backend.allocate_host(slab_bytes)
        except (RuntimeError, MemoryError) as error:
            self._refuse(slab_bytes, error)
            raise HostMemoryFull from error
        self._hold(slab)

    def _hold(self, slab: torch.Tensor) -> None:
        self._leave_layout()
        self._unusable_bytes = self.allocated_bytes - self.in_use_bytes
        self._slabs.append(slab)
        self._slab_bytes.append(Bytes.of(slab))
        self.generation = next(_generations)
        self._free.add_slab(slab.numel())
        self.allocated_bytes += slab.numel()

    def _refuse(self, slab_bytes: int, error: Exception) -> None:
        """Stop requesting memory: each attempt is slow, and the system has too little."""
        self.was_refused = True
        self.limit_bytes = self.allocated_bytes
        logger.warning(
            "host memory: %s more, beside the %s held, could not be pinned (%s); what does not fit "
            "stays on the device from now on. Give the job more host memory (a container's limit "
            "and locked memory count), or set offload_host_memory_limit_bytes to what it can have",
            format_bytes(slab_bytes),
            format_bytes(self.allocated_bytes),
            str(error).partition("\n")[0] or type(error).__name__,
        )
