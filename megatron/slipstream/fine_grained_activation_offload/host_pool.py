# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Pinned host memory: buffers that are reused only with the events to wait for.

Buffers of any size are cut out of a few large slabs, since pinning memory takes long. Where they
lie is decided by ``plan.host_layout``, whose invariant is what keeps the pool small: free memory
side by side is one range, so memory that served buffers of one size serves those of any other.

A buffer and the events of the last copies of its bytes travel together in a
:class:`HostAllocation`.
The pool never waits: the next user's copy does (edge E2 of ``copy_streams``).

[Note: Waste of host memory]
What is pinned beyond what was asked for has three parts. *Slack*: a buffer is as long as its size
class, less than a sixteenth longer than a request of 8 KiB or more. *Unusable*: what was free, but
in no range long enough, when a slab had to be added. *Spare*: what of the last slab has not been
needed yet, or is not needed any more; it goes once plans are settled (``host_shrink``). Waste is
the first two. While buffers are only allocated, as in a forward pass, a slab cannot serve the next
one only if what is left of it is shorter, which is a sixteenth of a slab that was made for such
buffers; so waste stays below an eighth of what is in use. Where forward and backward alternate and
sizes vary, free ranges of odd lengths lie between used ones as well, and no pool that cannot move
buffers can promise a bound for every order of requests. The tests show it for the pipeline
schedules, with sizes that vary from buffer to buffer and from step to
step: below an eighth from about thirty buffers on, on average a twentieth.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

import torch

from megatron.slipstream.fine_grained_activation_offload.backend import Backend, Bytes
from megatron.slipstream.plan.host_layout import FreeRanges, size_class_bytes
from megatron.slipstream.plan.render import format_bytes

logger = logging.getLogger(__name__)

BUFFERS_PER_SLAB = 16
"""A new slab holds at least so many buffers of the size that it is added for."""


class HostMemoryFull(Exception):
    """A buffer would take the pool past its limit, or the system has refused it memory."""


@dataclass
class HostAllocation:
    """A host buffer in use."""

    buffer: Bytes
    """As long as the size class of the request, at a multiple of 512 bytes."""
    last_use: tuple[Any, ...] = ()
    """The signals after the last copies that read or write bytes of the buffer; empty if there
    were none."""


class _InUse(NamedTuple):
    """What the pool knows of a buffer that is out."""

    allocation: HostAllocation
    slab: int
    start: int
    nbytes: int
    """As it was asked for."""


class HostPool:
    """Lends host buffers.

    Args:
        backend: Where slabs come from.
        limit_bytes: See :attr:`limit_bytes`.
    """

    def __init__(self, backend: Backend, limit_bytes: Optional[int] = None) -> None:
        self._backend = backend
        self.limit_bytes = limit_bytes
        """The most memory that the pool may hold; None for no limit. Once the system has refused
        memory, what the pool held then."""
        self.was_refused = False
        """Whether the system has refused memory."""
        self._slabs: list[torch.Tensor] = []
        self._slab_bytes: list[Bytes] = []
        self._free = FreeRanges()
        self._in_use: dict[int, _InUse] = {}
        """Every buffer that is out, by the identity of its allocation."""
        self._returned: deque[HostAllocation] = deque()
        """Given back, and not yet free: see :meth:`free`."""
        self._is_busy = False
        self.allocated_bytes = 0
        """Host memory that the pool holds, in use or not."""
        self.in_use_bytes = 0
        """Bytes of the buffers in use now."""
        self.high_water_bytes = 0
        """The most bytes that were in use at once."""
        self._peak_in_use_bytes = 0
        self._requested_bytes = 0
        self._high_water_requested_bytes = 0
        self._unusable_bytes = 0
        """Bytes that were free when the last slab was added."""

    @property
    def num_slabs(self) -> int:
        """Slabs that the pool holds: constant in steady state."""
        return len(self._slabs)

    @property
    def waste_bytes(self) -> int:
        """Slack and unusable memory at the high-water mark: [Note: Waste of host memory]."""
        slack = self.high_water_bytes - self._high_water_requested_bytes
        return slack + min(self._unusable_bytes, self.allocated_bytes - self.high_water_bytes)

    def allocate(self, nbytes: int) -> HostAllocation:
        """A buffer of at least ``nbytes`` bytes.

        Raises:
            HostMemoryFull: There is none, and the pool may not or cannot grow.
        """
        if self._returned:
            self._take_back()
        self._is_busy = True
        try:
            return self._allocate_span(nbytes)
        finally:
            self._is_busy = False

    def reserve(self, nbytes: int) -> None:
        """Hold ``nbytes`` bytes more, if the system gives them, and from then on no more."""
        with contextlib.suppress(HostMemoryFull):
            self._add_slab(nbytes)
        self.limit_bytes = self.allocated_bytes

    def free(self, allocation: HostAllocation) -> None:
        """Return a buffer. Its ``last_use`` may still lie ahead.

        Called in the middle of any other method, too: a storage gives its buffer back when it is
        deleted, and one that an exception left in a cycle is deleted whenever Python collects
        garbage. The buffer is then free a little later.
        """
        self._returned.append(allocation)
        self._take_back()

    def close(self) -> None:
        """Return all memory to the system. Every copy must have completed (edge E7)."""
        self._in_use.clear()
        self._free = FreeRanges()
        self._slab_bytes.clear()
        while self._slabs:
            self._backend.free_host(self._slabs.pop())
        self.allocated_bytes = self.in_use_bytes = self.high_water_bytes = 0
        self._requested_bytes = self._high_water_requested_bytes = self._unusable_bytes = 0
        self._peak_in_use_bytes = 0

    def take_peak_in_use(self) -> int:
        """The most bytes that were in use at once since this was last asked."""
        most, self._peak_in_use_bytes = self._peak_in_use_bytes, self.in_use_bytes
        return most

    def trim_to(self, nbytes: int) -> None:
        """Hold one slab of ``nbytes`` bytes in place of all others.

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
        allocation = HostAllocation(Bytes(storage, offset + span.start, size), span.events)
        self._in_use[id(allocation)] = _InUse(allocation, span.slab, span.start, nbytes)
        self.in_use_bytes += size
        self._requested_bytes += nbytes
        if self.in_use_bytes > self._peak_in_use_bytes:
            self._peak_in_use_bytes = self.in_use_bytes
            if self.in_use_bytes > self.high_water_bytes:
                self.high_water_bytes = self.in_use_bytes
                self._high_water_requested_bytes = self._requested_bytes
        return allocation

    def _take_back(self) -> None:
        """Free what was given back, unless a method is at work on the free memory."""
        if self._is_busy:
            return
        self._is_busy = True
        try:
            while self._returned:
                self._free_buffer(self._returned.popleft())
        finally:
            self._is_busy = False

    def _free_buffer(self, allocation: HostAllocation) -> None:
        in_use = self._in_use.pop(id(allocation), None)
        if in_use is None:
            return  # Allocated before the pool was closed, so it is not of the pool any more.
        size = allocation.buffer.nbytes
        self.in_use_bytes -= size
        self._requested_bytes -= in_use.nbytes
        self._free.put(in_use.slab, in_use.start, in_use.start + size, allocation.last_use)

    def _grow(self, size: int) -> None:
        """Add a slab with room for a buffer of ``size``."""
        slab_bytes = max(self._backend.host_slab_bytes, BUFFERS_PER_SLAB * size)
        slab_bytes -= slab_bytes % size  # The rest would serve no other buffer of this size.
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
        self._unusable_bytes = self.allocated_bytes - self.in_use_bytes
        self._slabs.append(slab)
        self._slab_bytes.append(Bytes.of(slab))
        self._free.add_slab(slab.numel())
        self.allocated_bytes += slab.numel()

    def _refuse(self, slab_bytes: int, error: Exception) -> None:
        """Ask for no more: each attempt takes long, and the system has none to spare."""
        self.was_refused = True
        self.limit_bytes = self.allocated_bytes
        logger.warning(
            "host memory: %s more, beside the %s held, cannot be had (%s); what does not fit stays "
            "on the device from now on. Give the job more host memory (a container's limit and "
            "locked memory count), or set offload_host_memory_limit_bytes to what it can have",
            format_bytes(slab_bytes),
            format_bytes(self.allocated_bytes),
            str(error).partition("\n")[0] or type(error).__name__,
        )
