# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Streams, events, memory and copies on a GPU, and two imitations of them in host memory.

The engine never names ``torch.cuda``: everything it does to a device goes through a
:class:`Backend`. ``cuda`` is the real one. ``cpu`` copies at once, in order. ``cpu-lazy`` is the
adversary: it runs a copy only when somebody waits for it and poisons what must not be read, so
that an engine with a missing wait computes NaN instead of being right by luck.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Optional, Protocol

import torch

Stream = Any
Event = Any
Here = tuple[Hashable, Stream]
"""A stream, with its id before it."""

POISON_BYTE = 0xFF
"""A float whose bytes are all ones is NaN in every IEEE format, bf16 and both fp8 formats."""


class Bytes(NamedTuple):
    """Bytes ``[start, start + nbytes)`` of a storage.

    Cheaper than a tensor: the engine makes one for every copy.
    """

    storage: torch.UntypedStorage
    start: int
    nbytes: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Bytes:
        """The memory of a contiguous tensor."""
        itemsize = tensor.element_size()
        start = int(tensor.storage_offset()) * itemsize
        return cls(tensor.untyped_storage(), start, tensor.numel() * itemsize)

    @property
    def address(self) -> int:
        """Of the first byte."""
        return self.storage.data_ptr() + self.start

    def first(self, nbytes: int) -> Bytes:
        """The first ``nbytes`` of them."""
        return Bytes(self.storage, self.start, nbytes)

    def view(self) -> torch.Tensor:
        """A uint8 tensor ``[nbytes]`` that shares the memory."""
        empty = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
        return empty.set_(self.storage, self.start, (self.nbytes,), (1,))


Copy = tuple[Bytes, Bytes]
"""Destination and source. One of them may be longer, as a host buffer is: then it begins with the
bytes that are copied."""


def nbytes_of(copy: Copy) -> int:
    """How many bytes it moves."""
    destination, source = copy
    return min(destination.nbytes, source.nbytes)


class MemoryMeter(Protocol):
    """Counts device memory where no GPU's allocator does."""

    @property
    def allocated_bytes(self) -> int:
        """Bytes alive now."""

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were alive at once since :meth:`reset_peak`."""

    def reset_peak(self) -> None:
        """Forget the peak so far."""

    def excluded(self) -> contextlib.AbstractContextManager[Any]:
        """Storages created inside are host memory and not counted."""


class Backend(ABC):
    """What the engine needs of a device. Streams and events are opaque to the engine."""

    name: str
    host_slab_bytes = 1 << 20
    """The least host memory to ask :meth:`allocate_host` for."""
    takes_time = False
    """Whether :meth:`timed_event` takes the time."""
    names_ranges = False
    """Whether :meth:`profiler_range` is worth calling."""
    _past_peak_bytes = 0
    """The highest peak that :meth:`reset_peak_memory` has ended since :meth:`begin_peak`."""
    poisons_dropped = False
    """Whether device memory that the engine drops, and nobody else holds, is filled with NaN."""

    @abstractmethod
    def manages(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies in this backend's device memory."""

    @abstractmethod
    def new_stream(self) -> Stream:
        """A stream for copies that runs beside the compute stream."""

    @abstractmethod
    def current_stream(self) -> Stream:
        """The stream that the caller's operations go to. Ask each time: it changes."""

    @abstractmethod
    def stream_id(self, stream: Stream) -> Hashable:
        """Equal for two stream objects if and only if they are the same queue of work."""

    def current_stream_id(self) -> Hashable:
        """:meth:`stream_id` of :meth:`current_stream`, as cheaply as possible."""
        return self.stream_id(self.current_stream())

    def here(self) -> Here:
        """The current stream. Ask each time: it changes."""
        return self.current_stream_id(), self.current_stream()

    @abstractmethod
    def record(self, stream: Stream) -> Event:
        """An event that completes when all work now in ``stream`` has."""

    @abstractmethod
    def wait(self, stream: Stream, event: Event) -> None:
        """Work put into ``stream`` from here on runs after ``event``. The host does not block."""

    @abstractmethod
    def wait_on_host(self, stream: Stream) -> None:
        """Block the host until all work now in ``stream`` is done."""

    @abstractmethod
    def run_copies(self, copies: Sequence[Copy], stream: Stream) -> None:
        """Put ``copies`` into ``stream`` in order. The host does not block."""

    @abstractmethod
    def hold(self, tensor: torch.Tensor, stream: Stream) -> None:
        """When the tensor's memory has gone, nobody gets it before ``stream`` has come so far.

        Only for streams other than the one that the memory was allocated for.
        """

    @abstractmethod
    def allocate_device(self, nbytes: int, device: torch.device) -> torch.UntypedStorage:
        """Uninitialised device memory that the current stream may use at once."""

    def allocate_scratch(self, nbytes: int) -> Optional[torch.UntypedStorage]:
        """Device memory for measurements; None where there is none to spare, or nothing to time."""
        return None

    @abstractmethod
    def allocate_host(self, nbytes: int) -> torch.Tensor:
        """Uninitialised host memory that copies can run from and to asynchronously, uint8.

        It begins on a page.

        Raises:
            RuntimeError: There is none to be had (or ``MemoryError``).
        """

    @abstractmethod
    def free_host(self, buffer: torch.Tensor) -> None:
        """Return a buffer of :meth:`allocate_host`. No copy may be using it."""

    @abstractmethod
    def run_on(self, stream: Stream, work: Callable[[], object]) -> None:
        """Put the operations that ``work`` calls into ``stream``."""

    def drop_device(self, storage: torch.UntypedStorage) -> None:
        """The engine gives up its last reference to ``storage``, which the caller then deletes."""
        if self.poisons_dropped and _num_uses(storage) == 1:
            _poison(storage)

    def drop_host_contents(self, copies: Sequence[Copy], stream: Stream) -> None:
        """Nobody needs what host buffers hold that ``copies``, now in ``stream``, have read."""

    def memory(self) -> Optional[tuple[int, int]]:
        """Device bytes allocated now and at most, or None where nothing counts them."""
        return None

    def reset_peak_memory(self) -> None:
        """From here on, :meth:`memory`'s peak is that of the time since."""
        reading = self.memory()
        if reading is not None:
            self._past_peak_bytes = max(self._past_peak_bytes, reading[1])
            self._reset_peak()

    def _reset_peak(self) -> None:
        """Begin a new peak at what is allocated now."""

    def begin_peak(self) -> int:
        """Begin a peak that goes on over :meth:`reset_peak_memory`, which ends any other.

        Returns:
            Device bytes allocated now; 0 where nothing counts them.
        """
        self.reset_peak_memory()
        self._past_peak_bytes = 0
        reading = self.memory()
        return 0 if reading is None else reading[0]

    def peak_bytes(self) -> int:
        """The most device bytes allocated at once since :meth:`begin_peak`; 0 if nobody counts."""
        reading = self.memory()
        return self._past_peak_bytes if reading is None else max(self._past_peak_bytes, reading[1])

    def obtainable_bytes(self) -> Optional[int]:
        """Device bytes that the process has or could still get; None where there is no limit."""
        return None

    def is_capturing(self) -> bool:
        """Whether what is put into the current stream is captured in a CUDA graph."""
        return False

    def begin_graph(self) -> None:
        """What is put into streams from here on is captured in a CUDA graph."""

    def end_graph(self) -> None:
        """Nothing is captured any more."""

    def profiler_range(self, label: str) -> contextlib.AbstractContextManager[Any]:
        """Names the host work inside, in profiles."""
        return contextlib.nullcontext()

    def timed_event(self, stream: Stream) -> Event:
        """An event that takes the time; None where time on a stream means nothing."""
        return None

    def elapsed_ms(self, start: Event, stop: Event) -> Optional[float]:
        """Milliseconds between two timed events, or None if they have not both completed."""
        return None


class CudaBackend(Backend):
    """An NVIDIA GPU through ``torch.cuda``.

    [Note: Events are used again]
    Making an event takes the host several microseconds, so each stream has a ring of them. Whoever
    still waits for an event when its turn comes again waits for a later point of the same stream,
    which covers the earlier one, and which has been issued by then: no circle can come of it.
    Captured events are new ones, since nobody outside of the capture may wait for them.
    """

    name = "cuda"
    takes_time = True
    # Pinning blocks the host, and other calls of the driver, so it is done seldom, and in pieces
    # that hosts of GPUs can spare.
    host_slab_bytes = 256 << 20

    def __init__(self) -> None:
        self.place_host_memory: Optional[Callable[[int, int], None]] = None
        """Called with address and length (bytes) of new host memory before anybody touches it."""
        self._registered: dict[int, weakref.finalize[Any, Any]] = {}
        self._events: dict[Hashable, Iterator[Event]] = {}
        """By id of the stream: [Note: Events are used again]."""
        self._streams: dict[Hashable, Stream] = {}
        """torch's objects for streams that were current once: making one takes the host longer than
        to launch a kernel."""
        self._made: set[Hashable] = set()
        """Ids of the streams that :meth:`new_stream` has made."""
        self._captures = False

    @cached_property
    def _memcpy(self) -> Callable[[int, int, int, int], int]:
        """The driver's asynchronous copy: destination, source, bytes, stream; returns a status."""
        memcpy = ctypes.CDLL("libcuda.so.1").cuMemcpyAsync
        pointer = ctypes.c_void_p
        memcpy.argtypes = (pointer, pointer, ctypes.c_size_t, pointer)
        return memcpy

    def manages(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda

    def new_stream(self) -> Stream:
        # torch hands out 32 streams in turn, so a "new" one may be one of ours, or the current one:
        # then what is to run at the same time would run one after the other.
        for _ in range(MAX_STREAMS_TRIED):
            stream = torch.cuda.Stream()
            stream_id = self.stream_id(stream)
            if stream_id not in self._made and stream_id != self.current_stream_id():
                self._made.add(stream_id)
                return stream
        raise RuntimeError(
            f"torch gives no stream that is not in use already ({len(self._made)} are ours)"
        )

    def current_stream(self) -> Stream:
        return self.here()[1]

    def here(self) -> Here:
        stream_id = self.current_stream_id()
        stream = self._streams.get(stream_id)
        if stream is None:
            stream = torch.cuda.current_stream()
            self._streams[self.stream_id(stream)] = stream
        return stream_id, stream

    def stream_id(self, stream: Stream) -> Hashable:
        return (stream.device_index, stream.cuda_stream)

    def record(self, stream: Stream) -> Event:
        if self._captures:
            captured = torch.cuda.Event()
            _record_event(captured, stream)
            return captured
        # Not by the stream object, whose hash is a function in Python.
        stream_id = (stream.device_index, stream.cuda_stream)
        events = self._events.get(stream_id)
        if events is None:
            ring = [torch.cuda.Event() for _ in range(EVENTS_PER_STREAM)]
            events = self._events[stream_id] = itertools.cycle(ring)
        event = next(events)
        _record_event(event, stream)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        _wait_event(event, stream)

    def wait_on_host(self, stream: Stream) -> None:
        stream.synchronize()

    def run_on(self, stream: Stream, work: Callable[[], object]) -> None:
        with torch.cuda.stream(stream):
            work()

    def current_stream_id(self) -> Hashable:
        device = torch._C._cuda_getDevice()
        return (device, torch._C._cuda_getCurrentRawStream(device))

    def run_copies(self, copies: Sequence[Copy], stream: Stream) -> None:
        # Of the driver itself: torch's copy_ takes the host twice as long, for checks that are of
        # no use here, and a model of experts waits for the host as it is.
        handle, memcpy = stream.cuda_stream, self._memcpy
        for (to, to_start, to_nbytes), (source, start, nbytes) in copies:
            status = memcpy(
                to.data_ptr() + to_start,
                source.data_ptr() + start,
                nbytes if nbytes < to_nbytes else to_nbytes,
                handle,
            )
            if status != 0:
                raise RuntimeError(f"the CUDA driver refused a copy with error {status}")

    def hold(self, tensor: torch.Tensor, stream: Stream) -> None:
        tensor.record_stream(stream)

    def allocate_device(self, nbytes: int, device: torch.device) -> torch.UntypedStorage:
        # On the current (compute) stream on purpose: the caching allocator keeps a pool per
        # stream, and memory of a copy stream's pool could not serve the computation again.
        return torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()

    def allocate_scratch(self, nbytes: int) -> Optional[torch.UntypedStorage]:
        try:
            return self.allocate_device(nbytes, torch.device("cuda"))
        except torch.OutOfMemoryError:
            return None

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        # Registered rather than asked of torch's pinned allocator, which rounds up to a power of
        # two and keeps what it has got (https://github.com/pytorch/pytorch/issues/95823).
        buffer = _page_aligned(nbytes)
        address = buffer.data_ptr()
        if self.place_host_memory is not None:
            self.place_host_memory(address, nbytes)
        status = torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)
        try:
            torch.cuda.check_error(status)
        except RuntimeError:
            _forget_last_error()
            raise
        # Should nobody return the buffer: its addresses go back to the system with it, and could
        # not be registered again as long as they are.
        forgotten = weakref.finalize(buffer, _unregister_forgotten, address)
        forgotten.atexit = False
        self._registered[address] = forgotten
        return buffer

    def free_host(self, buffer: torch.Tensor) -> None:
        self._registered.pop(buffer.data_ptr()).detach()
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr()))

    def memory(self) -> Optional[tuple[int, int]]:
        stats = torch.cuda.memory_stats_as_nested_dict()["allocated_bytes"]["all"]
        return stats["current"], stats["peak"]

    def _reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def obtainable_bytes(self) -> Optional[int]:
        free, _ = torch.cuda.mem_get_info()
        return int(free) + torch.cuda.memory_reserved()

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def begin_graph(self) -> None:
        self._captures = True

    def end_graph(self) -> None:
        self._captures = False

    def profiler_range(self, label: str) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.nvtx.range(label)

    def timed_event(self, stream: Stream) -> Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def elapsed_ms(self, start: Event, stop: Event) -> Optional[float]:
        return start.elapsed_time(stop) if start.query() and stop.query() else None


EVENTS_PER_STREAM = 64
MAX_STREAMS_TRIED = 64
"""Twice what torch has for each device and priority."""

# What torch.cuda.Event's methods call in the end.
_record_event = torch._C._CudaEventBase.record
_wait_event = torch._C._CudaEventBase.wait


_COMPLETED = object()
"""The event of work that is done by the time it is recorded."""


def _forget_last_error() -> None:
    """Let nobody else stumble over an error that has been raised and is being handled.

    The runtime keeps a failed call's error until somebody takes it, which torch does after the
    next kernel launch, whatever that launch did.
    """
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda").add_(1)


def _page_aligned(nbytes: int) -> torch.Tensor:
    """Host memory that begins on a page, as pinning and placing it on a node want it."""
    memory = torch.empty(nbytes + mmap.PAGESIZE, dtype=torch.uint8)
    start = -memory.data_ptr() % mmap.PAGESIZE
    return memory[start : start + nbytes]


def _unregister_forgotten(address: int) -> None:
    torch.cuda.synchronize()  # a copy may still be using it
    torch.cuda.cudart().cudaHostUnregister(address)


class CpuBackend(Backend):
    """Device and host both in host memory; every copy runs at once, in program order."""

    name = "cpu"

    def __init__(self) -> None:
        self.meter: Optional[MemoryMeter] = None
        """Set to read device memory from; engine host buffers are kept out of its count."""

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
            nbytes = nbytes_of(copy)
            destination, source = (side.first(nbytes).view() for side in copy)
            destination.copy_(source)

    def hold(self, tensor: torch.Tensor, stream: Stream) -> None:
        pass

    def allocate_device(self, nbytes: int, device: torch.device) -> torch.UntypedStorage:
        return torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        with self.meter.excluded() if self.meter is not None else contextlib.nullcontext():
            return _page_aligned(nbytes)

    def free_host(self, buffer: torch.Tensor) -> None:
        pass

    def memory(self) -> Optional[tuple[int, int]]:
        return (self.meter.allocated_bytes, self.meter.peak_bytes) if self.meter else None

    def _reset_peak(self) -> None:
        if self.meter is not None:
            self.meter.reset_peak()


def _num_uses(storage: torch.UntypedStorage) -> int:
    """References to the memory: one for all Python storage objects, one for each tensor."""
    return int(torch._C._storage_Use_Count(storage._cdata))


def _poison(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    Bytes(storage, 0, storage.nbytes()).view().fill_(POISON_BYTE)
    return storage


class _LazyEvent(NamedTuple):
    """A point in a stream: after ``position`` of its operations (or ticks, for compute)."""

    stream: _LazyStream
    position: int


class _LazyStream:
    """A copy stream whose operations run when somebody waits for them; FIFO."""

    def __init__(self, is_compute: bool = False) -> None:
        self.is_compute = is_compute
        self.pending: deque[Any] = deque()
        self.num_done = 0
        self.num_recorded = 1 if is_compute else 0
        """Compute only: how many events were recorded, which numbers its points in time. It starts
        ahead of ``compute_seen``: something has been computed before the first copy."""
        self.host_waited = 0
        """How many of its operations the host has waited for, rather than another stream."""
        self.last_uses: dict[int, int] = {}
        """By slab of host memory (address of its storage), the last operation that uses it."""
        self.compute_seen = 0
        """Copy streams only: the latest compute event that work put in from here on runs after."""

    def run_until(self, position: int) -> None:
        while self.num_done < position:
            operation = self.pending.popleft()
            self.num_done += 1
            operation()


class _LazyCopy:
    """A copy that has been put into a lazy stream."""

    def __init__(self, copy: Copy, ordered: bool) -> None:
        self.copy = copy
        self.ordered = ordered

    def __call__(self) -> None:
        destination, source = self.copy
        written = destination.first(nbytes_of(self.copy)).view()
        # A source that has been emptied meanwhile, as a recomputed output is, has no bytes.
        if self.ordered and source.storage.nbytes() > 0:
            written.copy_(source.first(written.numel()).view())
        else:
            written.fill_(POISON_BYTE)


class LazyCpuBackend(CpuBackend):
    """The adversary: copies run as late as the waits allow, and nothing else is forgiven.

    - A copy runs only when the compute stream, the host, or a copy that is itself run, waits for
      an event recorded after it. Until then its destination holds NaN or older bytes.
    - A copy put into a stream that does not wait for the newest compute event writes NaN: its
      source may not have been computed, or its destination may still be in use.
    - Device memory that the engine drops is filled with NaN if nobody else holds it, so that a
      copy out that has not run yet copies NaN.
    - Dropping device memory that a copy in has yet to write raises ``RuntimeError``: the copy
      would overwrite whatever the memory is used for next. So does returning host memory without
      the host having waited for every copy that uses it.
    """

    name = "cpu-lazy"

    def __init__(self) -> None:
        super().__init__()
        self._compute = _LazyStream(is_compute=True)
        self._streams: list[_LazyStream] = []
        self._slabs: set[int] = set()
        """Host memory that has been given out, by the address of its storage."""

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
        return _poison(super().allocate_device(nbytes, device))

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        slab = super().allocate_host(nbytes).fill_(POISON_BYTE)
        self._slabs.add(slab.untyped_storage()._cdata)
        return slab

    def free_host(self, buffer: torch.Tensor) -> None:
        slab = buffer.untyped_storage()._cdata
        self._slabs.discard(slab)
        # That the compute stream has waited is not enough: the host runs ahead of it.
        if any(stream.last_uses.pop(slab, 0) > stream.host_waited for stream in self._streams):
            raise RuntimeError("host memory returned before the host waited for the copy streams")

    def _note_use(self, slab: torch.UntypedStorage, stream: _LazyStream) -> None:
        stream.last_uses[slab._cdata] = stream.num_done + len(stream.pending)

    def drop_device(self, storage: torch.UntypedStorage) -> None:
        pending = self._pending_copies(storage)
        if any(to.storage._cdata == storage._cdata for to, _ in pending):
            raise RuntimeError("device memory dropped while a copy has yet to write it")
        # The one use is the caller's storage object, which the pending copies hold as well.
        if _num_uses(storage) == 1:
            _poison(storage)

    def drop_host_contents(self, copies: Sequence[Copy], stream: _LazyStream) -> None:
        for _, buffer in copies:
            stream.pending.append(lambda buffer=buffer: buffer.view().fill_(POISON_BYTE))
            self._note_use(buffer.storage, stream)

    def _pending_copies(self, storage: torch.UntypedStorage) -> list[Copy]:
        return [
            operation.copy
            for stream in self._streams
            for operation in stream.pending
            if isinstance(operation, _LazyCopy)
            and any(side.storage._cdata == storage._cdata for side in operation.copy)
        ]


def make_backend(name: str) -> Backend:
    """The backend of that name; 'auto' is 'cuda' where torch sees a GPU, else 'cpu'.

    Raises:
        ValueError: 'cuda' was asked for and torch sees no GPU, or the name is unknown.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "offload_backend='cuda' is not supported here because torch sees no GPU; set "
            "offload_backend='auto', or 'cpu' to imitate one in host memory"
        )
    kinds = {kind.name: kind for kind in (CudaBackend, CpuBackend, LazyCpuBackend)}
    if name not in kinds:
        known = ", ".join(repr(kind) for kind in kinds)
        raise ValueError(f"offload_backend={name!r} is unknown; set 'auto', {known}")
    return kinds[name]()
