# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Host staging memory: buffers that are lent out, and lent again only with the event to wait for.

A buffer and the event of its last reader or writer travel together in a :class:`HostLease`. The
pool never waits: the next borrower's copy does (edge E2 of ``copy_streams``).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Optional

import torch

from megatron.slipstream.fine_grained_activation_offload.backend import Backend, Event

MIN_BUFFER_BYTES = 4096
CLASSES_PER_OCTAVE = 8


@dataclass
class HostLease:
    """A borrowed host buffer."""

    buffer: torch.Tensor
    """uint8, at least as long as was asked for."""
    last_use: Optional[Event] = None
    """Completes when the last copy that reads or writes the buffer has; None if there was none."""


def size_class_bytes(nbytes: int) -> int:
    """The buffer size that serves a request of ``nbytes``: less than 12.5% larger.

    Each power of two is divided into :data:`CLASSES_PER_OCTAVE` equal steps, so that sizes which
    vary from iteration to iteration, as tokens per expert do, share buffers.
    """
    nbytes = max(nbytes, MIN_BUFFER_BYTES)
    step = max(1, (1 << (nbytes.bit_length() - 1)) // CLASSES_PER_OCTAVE)
    return -(-nbytes // step) * step


class HostPool:
    """Lends host buffers by size class."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._free: dict[int, deque[HostLease]] = {}
        self._all: dict[int, torch.Tensor] = {}
        """Every buffer that the pool answers for, by address."""
        self.allocated_bytes = 0
        """Host memory that the pool holds, lent or not."""
        self.lent_bytes = 0
        """Bytes of the buffers now lent."""
        self.high_water_bytes = 0
        """The most bytes that were lent at once."""
        self.num_allocations = 0
        """Buffers ever allocated: constant in steady state."""

    def borrow(self, nbytes: int) -> HostLease:
        """A buffer of at least ``nbytes`` bytes.

        The oldest free one comes first, so that its last reader has most likely finished.
        """
        size = size_class_bytes(nbytes)
        free = self._free.get(size)
        if free:
            lease = free.popleft()
        else:
            lease = HostLease(self._backend.allocate_host(size))
            self._all[lease.buffer.data_ptr()] = lease.buffer
            self.allocated_bytes += size
            self.num_allocations += 1
        self.lent_bytes += size
        self.high_water_bytes = max(self.high_water_bytes, self.lent_bytes)
        return lease

    def give_back(self, lease: HostLease) -> None:
        """Return a buffer. Its ``last_use`` may still lie ahead."""
        if self._all.get(lease.buffer.data_ptr()) is not lease.buffer:
            return  # Lent before the pool was closed, so it is no staging memory any more.
        size = lease.buffer.numel()
        self.lent_bytes -= size
        self._free.setdefault(size, deque()).append(lease)

    def close(self) -> None:
        """Return all memory to the system. Every copy must have completed (edge E7)."""
        self._free.clear()
        while self._all:
            self._backend.free_host(self._all.popitem()[1])
        self.allocated_bytes = self.lent_bytes = 0
