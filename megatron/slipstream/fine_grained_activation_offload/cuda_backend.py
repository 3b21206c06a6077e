# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""An NVIDIA GPU, through ``torch.cuda`` and the driver."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import cached_property
from typing import Any, Optional

import torch

from megatron.slipstream.fine_grained_activation_offload import peak_statistics
from megatron.slipstream.fine_grained_activation_offload.backend import (
    Backend,
    Copy,
    Event,
    Here,
    Stream,
    page_aligned,
)

EVENTS_PER_STREAM = 64
MAX_STREAMS_TRIED = 64
"""Twice the number of torch's streams per device and priority."""
WORK_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Environment variable for the number of device queues over which the driver spreads streams."""

# The functions behind torch.cuda.Event's methods.
_record_event = torch._C._CudaEventBase.record
_wait_event = torch._C._CudaEventBase.wait


class CudaBackend(Backend):
    """An NVIDIA GPU through ``torch.cuda``.

    [Note: Events are reused]
    Creating an event costs the host several microseconds, so each stream has a ring of them. A
    stream still waiting for an event when it is reused waits for a later point of the recording
    stream, which covers the earlier one and has already been issued, so it cannot deadlock.
    Captured events are always new, since nothing outside the capture may wait for them.
    """

    name = "cuda"
    device_type = "cuda"
    takes_time = True
    # Pinning blocks the host and other driver calls, so pin rarely, in sizes that GPU hosts can
    # afford.
    host_slab_bytes = 256 << 20

    def __init__(self) -> None:
        self._registered: dict[int, weakref.finalize[Any, Any]] = {}
        self._events: dict[Hashable, Iterator[Event]] = {}
        """Rings of events by stream id: [Note: Events are reused]."""
        self._streams: dict[Hashable, Stream] = {}
        """Cached torch stream objects: creating one takes the host longer than launching a
        kernel."""
        self._made: set[Hashable] = set()
        """Ids of the streams that :meth:`new_stream` has created."""
        self._captures = False

    @cached_property
    def _memcpy(self) -> Callable[[int, int, int, int], int]:
        """The driver's asynchronous copy: (destination, source, bytes, stream) -> status."""
        memcpy = ctypes.CDLL("libcuda.so.1").cuMemcpyAsync
        pointer = ctypes.c_void_p
        memcpy.argtypes = (pointer, pointer, ctypes.c_size_t, pointer)
        return memcpy

    @property
    def cure_of_slow_copies(self) -> Optional[str]:  # type: ignore[override]
        """None if the variable is set.

        [Note: Waiting streams slow copies down]
        Transformer Engine issues the experts' GEMMs on four streams that wait for the compute
        stream, and copies are up to a tenth slower while these wait. With one device queue they are
        not (docs/design/overhead.md, "One queue"). CUDA reads the variable when it starts.
        """
        if WORK_QUEUES in os.environ:
            return None
        return (
            f"set {WORK_QUEUES}=1 before training starts, as megatron-core requires for tensor and "
            "context parallelism up to Hopper; its FSDP needs more: then set 8, the driver's "
            "default, which also disables this warning"
        )

    def manages(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda

    def new_stream(self) -> Stream:
        # torch hands out 32 streams round-robin, so a "new" one may be one of ours or the current
        # one, which would serialize concurrent work.
        for _ in range(MAX_STREAMS_TRIED):
            stream = torch.cuda.Stream()
            stream_id = self.stream_id(stream)
            if stream_id not in self._made and stream_id != self.current_stream_id():
                self._made.add(stream_id)
                return stream
        raise RuntimeError(f"torch returns no unused stream ({len(self._made)} are ours)")

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
        # Not keyed by the stream object, whose hash is a Python function.
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
        # Call the driver directly: torch's copy_ takes the host twice as long, for checks that are
        # useless here, and MoE models are launch-bound already.
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

    def allocate_scratch(self, nbytes: int) -> Optional[torch.UntypedStorage]:
        try:
            return self.allocate_device(nbytes, torch.device("cuda"))
        except torch.OutOfMemoryError:
            return None

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        # Registered rather than allocated by torch's pinned allocator, which rounds up to a power
        # of two and never frees (https://github.com/pytorch/pytorch/issues/95823).
        buffer = page_aligned(nbytes)
        address = buffer.data_ptr()
        status = torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)
        try:
            torch.cuda.check_error(status)
        except RuntimeError:
            _forget_last_error()
            raise
        # If the buffer is never freed explicitly, its addresses return to the system while still
        # registered, and could not be registered again.
        forgotten = weakref.finalize(buffer, _unregister_forgotten, address)
        forgotten.atexit = False
        self._registered[address] = forgotten
        return buffer

    def free_host(self, buffer: torch.Tensor) -> None:
        self._registered.pop(buffer.data_ptr()).detach()
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr()))

    def memory(self) -> Optional[tuple[int, int]]:
        stats = peak_statistics.read(torch.cuda.current_device())["allocated_bytes"]["all"]
        return stats["current"], stats["peak"]

    def _reset_peak(self) -> None:
        peak_statistics.reset(torch.cuda.current_device())

    def obtainable_bytes(self) -> Optional[int]:
        return peak_statistics.obtainable_bytes()

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def begin_graph(self) -> None:
        self._captures = True

    def end_graph(self) -> None:
        self._captures = False

    def profiler_range(self, label: str) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.nvtx.range(label)

    def timed_event(self, stream: Stream) -> Event:
        # Each replay records a graph's external events. Older torch releases, which cannot time
        # graphs, may not support the argument.
        external = {"external": True} if self._captures else {}
        event = torch.cuda.Event(enable_timing=True, **external)
        event.record(stream)
        return event

    def elapsed_ms(self, start: Event, stop: Event) -> Optional[float]:
        return start.elapsed_time(stop) if start.query() and stop.query() else None


def _forget_last_error() -> None:
    """Clear the CUDA runtime's last error after its exception has been handled.

    The runtime keeps a failed call's error until it is read, which torch does after the next kernel
    launch, even if the launch succeeds.
    """
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda").add_(1)


def _unregister_forgotten(address: int) -> None:
    torch.cuda.synchronize()  # edge E7: a copy may still be using it
    torch.cuda.cudart().cudaHostUnregister(address)
