# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The interface between the engine and a device: streams, events, memory and copies.

The engine never calls ``torch.cuda`` directly: all device operations go through a
:class:`Backend`. :mod:`cuda_backend` is for GPUs; :mod:`cpu_backends` has two devices simulated in
host memory.
"""

from __future__ import annotations

import contextlib
import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Optional, Protocol

import torch

Stream = Any
Event = Any
Here = tuple[Hashable, Stream]

POISON_BYTE = 0xFF
"""A float whose bytes are all ones is NaN in every IEEE format, bf16 and both fp8 formats."""


class Bytes(NamedTuple):
    """Bytes ``[start, start + nbytes)`` of a storage, cheaper than a tensor: each copy has one."""

    storage: torch.UntypedStorage
    start: int
    nbytes: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Bytes:
        itemsize = tensor.element_size()
        start = int(tensor.storage_offset()) * itemsize
        return cls(tensor.untyped_storage(), start, tensor.numel() * itemsize)

    @property
    def address(self) -> int:
        return self.storage.data_ptr() + self.start

    def first(self, nbytes: int) -> Bytes:
        return Bytes(self.storage, self.start, nbytes)

    def view(self) -> torch.Tensor:
        """Return a uint8 tensor ``[nbytes]`` that shares the memory."""
        empty = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
        return empty.set_(self.storage, self.start, (self.nbytes,), (1,))


Copy = tuple[Bytes, Bytes]
"""Destination and source. If one is longer, such as a host buffer, only its first bytes are
copied."""


def nbytes_of(copy: Copy) -> int:
    """Return the number of bytes copied."""
    destination, source = copy
    return min(destination.nbytes, source.nbytes)


class MemoryMeter(Protocol):
    """Counts device memory without a GPU's allocator."""

    @property
    def allocated_bytes(self) -> int:
        """Bytes allocated now."""

    @property
    def peak_bytes(self) -> int:
        """The most bytes allocated at once since :meth:`reset_peak`."""

    def reset_peak(self) -> None:
        """Start a new peak."""


class GradientWatch(Protocol):
    """Tracks the gradients of the models being trained."""

    def count(self) -> int:
        """Return the bytes of the parameters' current gradients."""

    def begin(self, come: Callable[[int], None]) -> None:
        """Call ``come`` once for each gradient that appears from now on, with its bytes."""

    def end(self) -> None:
        """Undo :meth:`begin`."""


class Backend(ABC):
    """The engine's view of a device. Streams and events are opaque to the engine."""

    name: str
    device_type: str
    host_slab_bytes = 1 << 20
    """The minimum size for :meth:`allocate_host`."""
    takes_time = False
    """Whether :meth:`timed_event` records times."""
    names_ranges = False
    """Whether :meth:`profiler_range` is worth calling."""
    _past_peaks: Mapping[str, int] = {"": 0}
    """The highest peak discarded by :meth:`reset_peak_memory` since :meth:`begin_peak`, by name."""
    gradients: Optional[GradientWatch] = None
    """None if the parameters are unknown."""
    poisons_dropped = False
    """Whether dropped device memory is filled with NaN if it has no other reference."""
    cure_of_slow_copies: Optional[str] = None
    """A setting that makes copies as fast during iterations as between them."""

    @abstractmethod
    def manages(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is in this backend's device memory."""

    @abstractmethod
    def new_stream(self) -> Stream:
        """Return a copy stream that runs concurrently with the compute stream."""

    @abstractmethod
    def current_stream(self) -> Stream:
        """Return the current stream. Never cache it: it changes."""

    @abstractmethod
    def stream_id(self, stream: Stream) -> Hashable:
        """Return an id, equal for two stream objects if and only if they are the same stream."""

    def current_stream_id(self) -> Hashable:
        """Return the :meth:`stream_id` of :meth:`current_stream`, as cheaply as possible."""
        return self.stream_id(self.current_stream())

    def here(self) -> Here:
        """Return the current stream and its id. Never cache it: it changes."""
        return self.current_stream_id(), self.current_stream()

    @abstractmethod
    def record(self, stream: Stream) -> Event:
        """Return an event that completes when all work now in ``stream`` has completed."""

    @abstractmethod
    def wait(self, stream: Stream, event: Event) -> None:
        """Make later work in ``stream`` wait for ``event``, without blocking the host."""

    @abstractmethod
    def wait_on_host(self, stream: Stream) -> None:
        """Block the host until all work now in ``stream`` is done."""

    @abstractmethod
    def run_copies(self, copies: Sequence[Copy], stream: Stream) -> None:
        """Enqueue ``copies`` on ``stream`` in order, without blocking the host."""

    @abstractmethod
    def hold(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Keep the tensor's memory from being reallocated before ``stream`` reaches this point.

        Only for streams other than the one for which the memory was allocated.
        """

    def allocate_device(self, nbytes: int, device: torch.device) -> torch.UntypedStorage:
        """Allocate uninitialized device memory that the current stream may use immediately."""
        # On the current (compute) stream on purpose: the caching allocator has a pool per stream,
        # and compute could not reuse memory from a copy stream's pool.
        return torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()

    def allocate_scratch(self, nbytes: int) -> Optional[torch.UntypedStorage]:
        """Allocate device memory for measurements; None if too little, or nothing to time."""
        return None

    @abstractmethod
    def allocate_host(self, nbytes: int) -> torch.Tensor:
        """Allocate uninitialized, page-aligned uint8 host memory for asynchronous copies.

        Raises ``RuntimeError`` (or ``MemoryError``) if there is too little memory.
        """

    @abstractmethod
    def free_host(self, buffer: torch.Tensor) -> None:
        """Free a buffer from :meth:`allocate_host`. No copy may be using it."""

    @abstractmethod
    def run_on(self, stream: Stream, work: Callable[[], object]) -> None:
        """Enqueue the operations that ``work`` issues on ``stream``."""

    def drop_device(self, storage: torch.UntypedStorage) -> None:
        """Call right before deleting the engine's last reference to ``storage``."""
        if self.poisons_dropped and num_uses(storage) == 1:
            poison(storage)

    def empty_device(self, storage: torch.UntypedStorage) -> None:
        """Free the memory of ``storage``, which others reference but no longer read."""
        if self.poisons_dropped:
            poison(storage)
        storage.resize_(0)

    def drop_host_contents(self, copies: Sequence[Copy], stream: Stream) -> None:
        """Declare unneeded the host buffers that ``copies``, already in ``stream``, read from."""

    def memory(self) -> Optional[tuple[int, int]]:
        """Return device bytes allocated now and at the peak; None if they are not counted."""
        return None

    def reset_peak_memory(self) -> None:
        reading = self.memory()
        if reading is not None:
            past = self._past_peaks.items()
            self._past_peaks = {name: max(nbytes, reading[1]) for name, nbytes in past}
            self._reset_peak()

    def _reset_peak(self) -> None:
        """Start a new peak at the bytes allocated now."""

    def begin_peak(self, name: str = "") -> int:
        """Start a peak that, unlike :meth:`memory`'s, survives :meth:`reset_peak_memory`.

        Peaks of other names go on. Returns the device bytes allocated now; 0 if not counted.
        """
        self.reset_peak_memory()
        self._past_peaks = {**self._past_peaks, name: 0}
        reading = self.memory()
        return 0 if reading is None else reading[0]

    def peak_bytes(self, name: str = "") -> int:
        """Return the peak device bytes since :meth:`begin_peak`; 0 if they are not counted."""
        past_bytes, reading = self._past_peaks[name], self.memory()
        return past_bytes if reading is None else max(past_bytes, reading[1])

    def obtainable_bytes(self) -> Optional[int]:
        """Return the device bytes that the process has or could allocate; None if unlimited."""
        return None

    def is_capturing(self) -> bool:
        """Return whether the current stream is being captured in a CUDA graph."""
        return False

    def begin_graph(self) -> None:
        """Note that a CUDA graph capture begins."""

    def end_graph(self) -> None:
        """Note that the capture has ended."""

    def profiler_range(self, label: str) -> contextlib.AbstractContextManager[Any]:
        """Return a context that labels its host work in profiles."""
        return contextlib.nullcontext()

    def timed_event(self, stream: Stream) -> Event:
        """Record an event with timing; None if streams have no meaningful time."""
        return None

    def elapsed_ms(self, start: Event, stop: Event) -> Optional[float]:
        """Return milliseconds between two timed events; None until both have completed."""
        return None


def page_aligned(nbytes: int) -> torch.Tensor:
    """Allocate page-aligned host memory, as pinning and NUMA placement require.

    Returns: uint8 of shape ``[nbytes]``, on huge pages where the kernel has them: pinning takes
    half the time, since it spends most of it on touching pages.
    """
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def num_uses(storage: torch.UntypedStorage) -> int:
    """Count references to the memory: one for all Python storage objects, one per tensor."""
    return int(torch._C._storage_Use_Count(storage._cdata))


def poison(storage: torch.UntypedStorage) -> None:
    """Fill the memory with NaN."""
    Bytes(storage, 0, storage.nbytes()).view().fill_(POISON_BYTE)
