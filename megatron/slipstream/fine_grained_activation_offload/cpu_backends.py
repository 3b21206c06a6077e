# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Devices simulated in host memory: a simple one and an adversarial one.

``cpu`` copies immediately, in order. ``cpu-lazy`` runs a copy only when something waits for it, and
poisons memory that must not be read, so that an engine with a missing wait computes NaN instead of
being right by luck.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Optional

import torch

from megatron.slipstream.fine_grained_activation_offload.backend import (
    POISON_BYTE,
    Backend,
    Bytes,
    Copy,
    Event,
    MemoryMeter,
    Stream,
    nbytes_of,
    num_uses,
    page_aligned,
)

_COMPLETED = object()
"""The event of work that is complete when it is recorded."""


class CpuBackend(Backend):
    """A device simulated in host memory; every copy runs immediately, in program order."""

    name = "cpu"
    device_type = "cpu"

    def __init__(self) -> None:
        self.meter: Optional[MemoryMeter] = None
        """Device memory meter, if set; it excludes the engine's host buffers."""

    def manages(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu"

    def new_stream(self) -> Stream:
        return object()

    def current_stream(self) -> Stream:
        return None

    def stream_id(self, stream: Stream) -> Hashable:
        return id(stream)

    def record(self, stream: Stream) -> Event:
        return _COMPLETED

    def wait(self, stream: Stream, event: Event) -> None:
        pass

    def wait_on_host(self, stream: Stream) -> None:
        pass

    def run_on(self, stream: Stream, work: Callable[[], object]) -> None:
        work()

    def run_copies(self, copies: Sequence[Copy], stream: Stream) -> None:
        for copy in copies:
            _copy(*copy, nbytes_of(copy))

    def hold(self, tensor: torch.Tensor, stream: Stream) -> None:
        pass

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        return page_aligned(nbytes)  # By no operation of torch, so the meter does not count it.

    def free_host(self, buffer: torch.Tensor) -> None:
        pass

    def memory(self) -> Optional[tuple[int, int]]:
        return (self.meter.allocated_bytes, self.meter.peak_bytes) if self.meter else None

    def _reset_peak(self) -> None:
        if self.meter is not None:
            self.meter.reset_peak()


class _LazyEvent(NamedTuple):
    """A point in a stream: after ``position`` operations (or ticks, for compute)."""

    stream: _LazyStream
    position: int


class _LazyStream:
    """A stream whose operations run, in FIFO order, only when something waits for them."""

    def __init__(self, is_compute: bool = False) -> None:
        self.is_compute = is_compute
        self.pending: deque[Any] = deque()
        self.num_done = 0
        self.num_recorded = 1 if is_compute else 0
        """Compute only: number of recorded events, its ticks. It starts ahead of ``compute_seen``,
        since something has been computed before the first copy."""
        self.host_waited = 0
        """Number of operations that the host, rather than another stream, has waited for."""
        self.last_uses: dict[int, int] = {}
        """The last operation that uses each slab of host memory, by address of its storage."""
        self.compute_seen = 0
        """Copy streams only: the latest compute event that later operations wait for."""

    def run_until(self, position: int) -> None:
        while self.num_done < position:
            operation = self.pending.popleft()
            self.num_done += 1
            operation()


class _LazyCopy:
    def __init__(self, copy: Copy, ordered: bool) -> None:
        self.copy = copy
        self.ordered = ordered

    def __call__(self) -> None:
        destination, source = self.copy
        # A source discarded in the meantime, such as an output to be recomputed, has no bytes.
        if self.ordered and source.storage.nbytes() > 0:
            _copy(destination, source, nbytes_of(self.copy))
        else:
            _poison(destination.first(nbytes_of(self.copy)))


class LazyCpuBackend(CpuBackend):
    """The adversary: copies run as late as the waits allow, and other faults raise or give NaN.

    - A copy runs only when the compute stream, the host, or another copy that runs, waits for an
      event recorded after it. Until then its destination holds NaN or older bytes.
    - A copy enqueued on a stream that does not wait for the newest compute event writes NaN: its
      source may not have been computed, or its destination may still be in use.
    - Device memory that the engine drops is filled with NaN if it has no other reference, so a
      pending copy out copies NaN.
    - Dropping device memory that a pending copy in has yet to write raises ``RuntimeError``: the
      copy would overwrite whatever the memory is used for next. So does freeing host memory before
      the host has waited for every copy that uses it.
    """

    name = "cpu-lazy"

    def __init__(self) -> None:
        super().__init__()
        self._compute = _LazyStream(is_compute=True)
        self._streams: list[_LazyStream] = []
        self._slabs: set[int] = set()
        """Allocated host memory, by the address of its storage."""

    def new_stream(self) -> Stream:
        stream = _LazyStream()
        self._streams.append(stream)
        return stream

    def current_stream(self) -> Stream:
        return self._compute

    def record(self, stream: _LazyStream) -> Event:
        if stream.is_compute:
            stream.num_recorded += 1
            return _LazyEvent(stream, stream.num_recorded)
        return _LazyEvent(stream, stream.num_done + len(stream.pending))

    def wait(self, stream: _LazyStream, event: _LazyEvent) -> None:
        if stream.is_compute:
            if not event.stream.is_compute:
                event.stream.run_until(event.position)
        elif event.stream.is_compute:
            stream.compute_seen = max(stream.compute_seen, event.position)
        elif event.stream is not stream:
            stream.pending.append(lambda: event.stream.run_until(event.position))

    def wait_on_host(self, stream: _LazyStream) -> None:
        if not stream.is_compute:
            stream.run_until(stream.num_done + len(stream.pending))
            stream.host_waited = stream.num_done

    def run_on(self, stream: _LazyStream, work: Callable[[], object]) -> None:
        stream.pending.append(work)

    def run_copies(self, copies: Sequence[Copy], stream: _LazyStream) -> None:
        ordered = stream.compute_seen == self._compute.num_recorded
        stream.pending.extend(_LazyCopy(copy, ordered) for copy in copies)
        for copy in copies:
            for side in copy:
                if side.storage._cdata in self._slabs:
                    self._note_use(side.storage, stream)

    def allocate_device(self, nbytes: int, device: torch.device) -> torch.UntypedStorage:
        storage = super().allocate_device(nbytes, device)
        _poison(Bytes(storage, 0, nbytes))
        return storage

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        slab = super().allocate_host(nbytes).fill_(POISON_BYTE)
        self._slabs.add(slab.untyped_storage()._cdata)
        return slab

    def free_host(self, buffer: torch.Tensor) -> None:
        slab = buffer.untyped_storage()._cdata
        self._slabs.discard(slab)
        # A wait on the compute stream is not enough: the host runs ahead of it.
        if any(stream.last_uses.pop(slab, 0) > stream.host_waited for stream in self._streams):
            raise RuntimeError("host memory returned before the host waited for the copy streams")

    def _note_use(self, slab: torch.UntypedStorage, stream: _LazyStream) -> None:
        stream.last_uses[slab._cdata] = stream.num_done + len(stream.pending)

    def drop_device(self, storage: torch.UntypedStorage) -> None:
        pending = self._pending_copies(storage)
        if any(to.storage._cdata == storage._cdata for to, _ in pending):
            raise RuntimeError("device memory dropped while a copy has yet to write it")
        # The single use is the caller's storage object, which pending copies hold as well.
        if num_uses(storage) == 1:
            _poison(Bytes(storage, 0, storage.nbytes()))

    def empty_device(self, storage: torch.UntypedStorage) -> None:
        if any(to.storage._cdata == storage._cdata for to, _ in self._pending_copies(storage)):
            raise RuntimeError("device memory emptied while a copy has yet to write it")
        # A pending copy out finds no bytes, and writes NaN.
        _poison(Bytes(storage, 0, storage.nbytes()))
        super().empty_device(storage)

    def drop_host_contents(self, copies: Sequence[Copy], stream: _LazyStream) -> None:
        for _, buffer in copies:
            stream.pending.append(lambda buffer=buffer: _poison(buffer))
            self._note_use(buffer.storage, stream)

    def _pending_copies(self, storage: torch.UntypedStorage) -> list[Copy]:
        return [
            operation.copy
            for stream in self._streams
            for operation in stream.pending
            if isinstance(operation, _LazyCopy)
            and any(side.storage._cdata == storage._cdata for side in operation.copy)
        ]


# An operation of torch takes ten times as long: a meter sees it, and it needs tensors.


def _copy(destination: Bytes, source: Bytes, nbytes: int) -> None:
    ctypes.memmove(_address(destination, nbytes), _address(source, nbytes), nbytes)


def _poison(memory: Bytes) -> None:
    ctypes.memset(_address(memory, memory.nbytes), POISON_BYTE, memory.nbytes)


def _address(memory: Bytes, nbytes: int) -> int:
    end, held = memory.start + nbytes, memory.storage.nbytes()
    if end > held:
        raise RuntimeError(f"bytes {memory.start} to {end} of a storage of {held} bytes")
    return memory.address
