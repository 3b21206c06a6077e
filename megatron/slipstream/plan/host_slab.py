# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""How much host memory iterations take that follow their plans, as one slab."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.slipstream.plan.host_memory import BUFFER_ALIGNMENT_BYTES
from megatron.slipstream.plan.host_ranges import FreeRanges, Span
from megatron.slipstream.plan.operations import OpKind, Schedule

_STEPS = 64
"""Into so many parts the most that is in use is divided, to find how much more it takes."""


def slab_bytes_for(schedules: Sequence[Schedule]) -> int:
    """The length of a slab from which each of these iterations can allocates all its buffers.

    It is at least what is in use at once, and more only by what lies between buffers then; next to
    the shortest, in steps of a 64th. 0 if nothing moves.

    Args:
        schedules: Of iterations that begin with nothing in use, and run one at a time.
    """
    nbytes = most = max((n for schedule in schedules for n in schedule.host_bytes), default=0)
    step = -(-most // _STEPS // BUFFER_ALIGNMENT_BYTES) * BUFFER_ALIGNMENT_BYTES
    while not all(_fits(schedule, nbytes) for schedule in schedules):
        nbytes += step
    return nbytes


def _fits(schedule: Schedule, nbytes: int) -> bool:
    """Whether the engine's allocator finds room for every buffer in a slab of this length."""
    free = FreeRanges()
    slab = free.add_slab(nbytes)
    in_use: dict[int, Span] = {}
    for operation in schedule.operations:
        for storage in operation.storages:
            if operation.kind is OpKind.COPY_OUT:
                buffer = schedule.buffers[storage]
                span = free.take(buffer.stop - buffer.start)
                if span is None:
                    return False
                in_use[storage] = span
            elif operation.kind is OpKind.COPY_IN:
                span = in_use.pop(storage)
                free.put(slab, span.start, span.stop, ())
    return True
