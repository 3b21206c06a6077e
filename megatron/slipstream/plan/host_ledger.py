# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Which bytes of host memory the engine's pool would lend, and who had them before."""

from __future__ import annotations

from typing import NamedTuple

from megatron.slipstream.plan.host_memory import size_class_bytes
from megatron.slipstream.plan.host_ranges import FreeRanges

_ENDLESS_BYTES = 1 << 62


class HostBuffer(NamedTuple):
    """Bytes ``[start, stop)`` that were in use for a storage."""

    start: int
    stop: int
    lent_before: tuple[int, ...]
    """The storages whose copies back the pool gives the user to wait for (edge E2)."""


class HostLedger:
    """The pool of an iteration as numbers.

    It is the engine's allocator over one slab without an end: where slabs end depends on what the
    pool has served before, which a plan cannot know. So more memory lies side by side than in the
    engine, and more buffers have parts of several earlier ones.
    """

    def __init__(self) -> None:
        self._free = FreeRanges()
        self._slab = self._free.add_slab(_ENDLESS_BYTES)
        self.in_use_bytes = 0
        """Bytes of the buffers in use now."""

    def allocate(self, nbytes: int) -> HostBuffer:
        """Lend a buffer of at least ``nbytes`` bytes."""
        span = self._free.take(size_class_bytes(nbytes))
        assert span is not None
        self.in_use_bytes += span.stop - span.start
        before = tuple(event for event in span.events if isinstance(event, int))
        return HostBuffer(span.start, span.stop, before)

    def free(self, buffer: HostBuffer, storage: int) -> None:
        """Take back the buffer of ``storage``, whose copy back has been issued."""
        self.in_use_bytes -= buffer.stop - buffer.start
        self._free.put(self._slab, buffer.start, buffer.stop, (storage,))
