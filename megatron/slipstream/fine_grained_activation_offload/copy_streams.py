# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The two copy streams, and all synchronization between them, the compute stream and the host.

Each wait is a row of the table in ``plan.edges``; its call carries the id of the row.

[Note: Graphs one after another]
Work captured in a graph can only be waited for inside the same graph. So a graph joins its copies
before it ends (E9), and graphs are replayed on one stream in capture order: later work, captured or
not, then follows the graph's copies. (With whole-chunk graphs, only work that uses the copies'
memory does: [Note: The tail of a forward graph].) The device is idle before a capture. So no wait
is issued for a signal of another graph, or across a capture boundary.

[Note: Memory belongs to a stream]
The allocator reuses freed memory immediately on the stream that it was allocated for, since earlier
uses on that stream run first. Reloaded memory is allocated on the stream that starts its H2D copy.
If backward reads it on another stream, nothing orders these reads before the next use. So the read
is recorded with the allocator (E8), which waits for that stream before it reuses the memory. Uses
before the offload need no such edge: the model orders them, as it does without offloading.

[Note: Layers that run in nodes]
When megatron-core overlaps expert-parallel communication with computation
(``overlap_moe_expert_parallel_comm``), it splits a layer into nodes, and the nodes of two
micro-batches alternate on a compute stream and a communication stream. A node's input was
allocated for the stream of the previous node, which does not have the waits of the node's own
stream. So d2h's read of the input is recorded with the allocator (E8). A node also keeps its inputs
and outputs until its backward, but only for the gradients that arrive there, so the memory that a
norm's group releases is freed despite these references.

[Note: A copy in follows its own copy out]
An H2D copy reads what the D2H copy of its storage wrote, yet no edge joins the two copy streams.
The device memory was released in between, so the compute stream waits for the D2H copy (E3), and
the H2D copy waits for the compute stream (E4). This needs both waits on one stream: if the H2D copy
starts on a stream other than the one the memory was released on, that stream waits by E3 as well.

[Note: A wait covers what came before]
Streams run in order. So a stream that has waited for a signal has waited for every earlier signal
of the same stream, and redundant waits are skipped: :class:`Waits` keeps, for each pair of streams,
the latest signal that was waited for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Optional

import torch

from megatron.slipstream.fine_grained_activation_offload.backend import (
    Backend,
    Bytes,
    Copy,
    Event,
    Here,
    Stream,
    nbytes_of,
)
from megatron.slipstream.fine_grained_activation_offload.host_pool import HostAllocation
from megatron.slipstream.plan.edges import Edge

_STALLS = (Edge.E3, Edge.E5, Edge.E9)
"""Edges on which the compute stream waits for copies."""


class Signal(NamedTuple):
    """A point in a stream that other streams can wait for."""

    event: Event
    stream: Hashable
    position: int
    """Increases along the stream."""
    graph: int = 0
    """Number of the graph in which it was captured; 0 for none."""


_graph_numbers = itertools.count(1)
"""Shared by all engines of the process, since their graphs may share host memory."""


def _latest(signals: Iterable[Signal]) -> list[Signal]:
    """Return the signals that cover all others: [Note: A wait covers what came before]."""
    latest: dict[tuple[Hashable, int], Signal] = {}
    for signal in signals:
        key = (signal.stream, signal.graph)
        known = latest.get(key)
        if known is None or known.position < signal.position:
            latest[key] = signal
    return list(latest.values())


class Stall(NamedTuple):
    """A wait on the compute stream, with events before and after it."""

    label: str
    start: Event
    stop: Event


class TimedCopies(NamedTuple):
    """Copies enqueued on a copy stream together, with events before and after them."""

    is_out: bool
    nbytes: int
    start: Event
    """Recorded after their waits."""
    stop: Event


class Timings:
    """Device times of an iteration, in order of issue.

    Work in graphs is timed only if the iteration is captured (``is_of_graph``): the clock of an
    iteration around a capture must not read events that are never recorded.
    """

    def __init__(self, is_of_graph: bool = False) -> None:
        self.is_of_graph = is_of_graph
        self.stalls: list[Stall] = []
        """Waits of the compute stream for copies."""
        self.copies: list[TimedCopies] = []

    def clear(self) -> None:
        self.stalls.clear()
        self.copies.clear()


class Waits:
    """Creates an engine's signals, and tracks who has waited for them; C++ has an equal class."""

    def __init__(self) -> None:
        self.graph = 0
        """Number of the graph being captured; 0 for none."""
        self.is_timed = False
        """Whether waits are timed."""
        self._positions = itertools.count(1)
        self._waited: dict[tuple[Hashable, Hashable], int] = {}
        """Latest position waited for, by waiting and signalling stream: [Note: A wait covers what
        came before]."""

    def signal(self, event: Event, stream: Stream, stream_id: Hashable) -> Signal:
        """Return a signal for the last record of ``event`` in the stream."""
        return Signal(event, stream_id, next(self._positions), self.graph)

    def is_due(self, stream_id: Hashable, signal: Signal) -> bool:
        """Return whether a stream must wait for the signal; if so, record the wait."""
        if signal.graph != self.graph:
            return False  # [Note: Graphs one after another]
        pair = (stream_id, signal.stream)
        if self._waited.get(pair, 0) >= signal.position:
            return False
        self._waited[pair] = signal.position
        return True

    def forget(self) -> None:
        """Forget all waits, so that they are issued again."""
        self._waited.clear()


class CopyStreams:
    """Owns the copy streams, and knows nothing of groups or plans."""

    def __init__(self, backend: Backend, waits: Any = None) -> None:
        self._backend = backend
        self.waits = Waits() if waits is None else waits
        """The signals, and the waits that have been issued."""
        self._timings: Optional[Timings] = None
        self._to_join: dict[Hashable, Signal] = {}
        """The signal after the last copies of the graph being captured, by copy stream."""
        self._kept: dict[int, torch.UntypedStorage] = {}
        """Device memory to keep until the copies have ended."""

    @property
    def timings(self) -> Optional[Timings]:
        return self._timings

    @timings.setter
    def timings(self, timings: Optional[Timings]) -> None:
        self._timings = timings
        self.waits.is_timed = timings is not None

    # Created on first use: a stream belongs to the device that is current then, and an engine may
    # be installed before its process has selected one.

    @cached_property
    def d2h(self) -> Stream:
        """The stream of copies from the device to the host.

        Separate from ``h2d`` because the GPU has a copy engine for each direction, and in 1F1B
        both are busy at once.
        """
        return self._backend.new_stream()

    @cached_property
    def h2d(self) -> Stream:
        return self._backend.new_stream()

    @cached_property
    def _d2h_id(self) -> Hashable:
        return self._backend.stream_id(self.d2h)

    @cached_property
    def _h2d_id(self) -> Hashable:
        return self._backend.stream_id(self.h2d)

    def copy_out(
        self,
        moves: Sequence[tuple[Bytes, HostAllocation]],
        producers: Mapping[Hashable, Stream],
        before: Optional[Callable[[], None]] = None,
    ) -> Signal:
        """Copy device bytes into host buffers on the d2h stream, and return the signal after that.

        ``producers`` are the streams that computed the bytes, by id. ``before`` is called after the
        stream's waits and before the copies. The device memory must outlive the signal
        (:meth:`release`).
        """
        stream, stream_id = self.d2h, self._d2h_id
        for producer_id, producer in producers.items():
            signal = self._signal(producer, producer_id)
            self._wait(Edge.E1, stream, stream_id, signal)
        for last_use in _latest(use for _, allocation in moves for use in allocation.last_use):
            self._wait(Edge.E2, stream, stream_id, last_use)
        if before is not None:
            before()
        for source, allocation in moves:
            allocation.in_flight = source.storage  # [Note: Copies without a signal]
        self._run([(allocation.buffer, source) for source, allocation in moves], stream)
        signal = self._end(moves, stream, stream_id)
        for _, allocation in moves:
            allocation.in_flight = None
        return signal

    def before_release(
        self, copied_out: Optional[Signal], streams: Mapping[Hashable, Stream], label: str = ""
    ) -> None:
        """Order the streams that may reuse device memory next, by id, after its D2H copy."""
        if copied_out is not None:
            for stream_id, stream in streams.items():
                self._wait(Edge.E3, stream, stream_id, copied_out, label)

    def drop(self, memory: torch.UntypedStorage) -> None:
        """Drop released device memory. The caller deletes its last reference."""
        self._backend.drop_device(memory)

    def empty(self, memory: torch.UntypedStorage) -> None:
        """Free released memory that other code references but no longer reads."""
        self._backend.empty_device(memory)

    def note_copy_out(self, source: Bytes) -> None:
        """Tell the allocator that d2h reads memory whose own stream may not wait by E3.

        See [Note: Layers that run in nodes].
        """
        self._hold_for(Edge.E8, source.view(), self.d2h)

    def follow_copy_out(
        self, copied_out: Optional[Signal], streams: Mapping[Hashable, Stream], label: str = ""
    ) -> None:
        """Order the current stream, and those that may reuse the memory next, after a D2H copy.

        Like :meth:`before_release`, for memory that is freed at an unknown time.
        """
        if copied_out is not None:
            stream_id = self._backend.current_stream_id()
            self._wait(Edge.E3, None, stream_id, copied_out, label)
            self.before_release(copied_out, streams, label)

    def copy_in(
        self,
        moves: Sequence[tuple[Bytes, HostAllocation]],
        copied_out: Iterable[Signal],
        here: Here,
        after: Optional[Callable[[], None]] = None,
    ) -> Signal:
        """Copy host buffers into device memory of the current stream, on the h2d stream.

        Args:
            moves: Pairs of device bytes to write and the buffer to read, for the last time.
            copied_out: The signals after the D2H copies that wrote the buffers.
            here: The current stream.
            after: Called once the copies are enqueued.

        Returns:
            The signal after the copies. The device memory must be kept until something has waited
            for it (:meth:`before_use` or :meth:`abandon`). The buffers are ``in_flight`` until the
            caller has noted the signal.
        """
        current_id, current = here
        for signal in _latest(copied_out):
            # Already waited for, unless the memory was released on another stream: see
            # [Note: A copy in follows its own copy out].
            self._wait(Edge.E3, current, current_id, signal)
        stream, stream_id = self.h2d, self._h2d_id
        self._wait(Edge.E4, stream, stream_id, self._signal(current, current_id))
        copies = [(destination, allocation.buffer) for destination, allocation in moves]
        for destination, allocation in moves:
            allocation.in_flight = destination.storage  # [Note: Copies without a signal]
        self._run(copies, stream)
        if after is not None:
            after()
        self._backend.drop_host_contents(copies, stream)
        return self._end(moves, stream, stream_id)

    def before_use(self, signal: Signal, stream_id: Hashable, label: str = "") -> None:
        """Make the current stream wait for H2D copies before it reads reloaded tensors."""
        self._wait(Edge.E5, None, stream_id, signal, label)

    def note_read(self, returned: torch.Tensor) -> None:
        """Tell the allocator that the current stream reads a reloaded tensor until it is deleted.

        Only needed if its memory was allocated for another stream.
        """
        here = self._backend.current_stream()
        self._hold_for(Edge.E8, returned, here)  # [Note: Memory belongs to a stream]

    def abandon(
        self,
        memory: Optional[torch.UntypedStorage],
        copied_in: Optional[Signal],
        allocated_for: Optional[Here],
    ) -> None:
        """Release reloaded device memory that was never read.

        The caller deletes its last reference; ``allocated_for`` may reuse it next.
        """
        if memory is None or copied_in is None or allocated_for is None:
            return
        stream_id, stream = allocated_for
        self.keep_until_finished(memory)  # unless the wait is issued
        self._wait(Edge.E6, stream, stream_id, copied_in)
        self.keep_no_longer(memory)
        self._backend.drop_device(memory)

    def keep_until_finished(self, memory: torch.UntypedStorage) -> None:
        """Keep device memory that copies may write, although nothing waits for them."""
        self._kept[id(memory)] = memory

    def keep_no_longer(self, memory: torch.UntypedStorage) -> None:
        self._kept.pop(id(memory), None)

    @property
    def keeps_memory(self) -> bool:
        """Whether device memory is kept until :meth:`finish`."""
        return bool(self._kept)

    def forget_waits(self) -> None:
        """Forget all waits, since a new stream may have the id of an earlier one."""
        self.waits.forget()

    def begin_graph(self) -> None:
        self.waits.graph = next(_graph_numbers)
        self._backend.begin_graph()

    def end_graph(self) -> None:
        """End the graph: the current stream waits for the graph's copies."""
        stream_id = self._backend.current_stream_id()
        for signal in self._to_join.values():
            self._wait(Edge.E9, None, stream_id, signal)
        self._to_join.clear()
        self._backend.end_graph()
        self.waits.graph = 0
        self.forget_waits()  # The graph's waits apply inside the graph only.

    def finish(self) -> None:
        for stream in (self.d2h, self.h2d):
            self._wait_on_host(Edge.E7, stream)
        self._kept.clear()

    def begin_measurement(self) -> None:
        """Block the host until copies may use memory that was in use until now."""
        current_id, current = self._backend.here()
        here = self._signal(current, current_id)
        self._wait(Edge.E1, self.d2h, self._d2h_id, here)
        self._wait(Edge.E4, self.h2d, self._h2d_id, here)
        self.finish()

    def _run(self, copies: Sequence[Copy], stream: Stream) -> None:
        timings = self._open_timings()
        if timings is None:
            self._backend.run_copies(copies, stream)
            return
        start = self._backend.timed_event(stream)
        self._backend.run_copies(copies, stream)
        stop = self._backend.timed_event(stream)
        if start is not None:
            nbytes = sum(map(nbytes_of, copies))
            timings.copies.append(TimedCopies(stream is self.d2h, nbytes, start, stop))

    def _open_timings(self) -> Optional[Timings]:
        """Return the timings for work issued now; None if it is not timed."""
        timings = self._timings
        if timings is None or timings.is_of_graph is not bool(self.waits.graph):
            return None
        return timings

    def _signal(self, stream: Stream, stream_id: Hashable) -> Signal:
        signal: Signal = self.waits.signal(self._backend.record(stream), stream, stream_id)
        return signal

    def _end(
        self, moves: Sequence[tuple[Bytes, HostAllocation]], stream: Stream, stream_id: Hashable
    ) -> Signal:
        signal = self._signal(stream, stream_id)
        for _, allocation in moves:
            allocation.last_use = (signal,)
        if self.waits.graph:
            self._to_join[stream_id] = signal
        return signal

    def _wait(
        self,
        edge: Edge,
        stream: Optional[Stream],
        stream_id: Hashable,
        signal: Signal,
        label: str = "",
    ) -> None:
        """Make a stream (the current one if None) wait, unless it has waited already."""
        try:
            if self.waits.is_due(stream_id, signal):
                self._issue_wait(edge, stream, signal, label)
        except BaseException:
            self.waits.forget()  # It may not have been issued.
            raise

    def _issue_wait(self, edge: Edge, stream: Optional[Stream], signal: Signal, label: str) -> None:
        if stream is None:
            stream = self._backend.current_stream()
        timings = self._open_timings() if edge in _STALLS else None
        if timings is None:
            self._backend.wait(stream, signal.event)
            return
        start = self._backend.timed_event(stream)
        self._backend.wait(stream, signal.event)
        stop = self._backend.timed_event(stream)
        if start is not None:
            timings.stalls.append(Stall(label, start, stop))

    def _wait_on_host(self, edge: Edge, stream: Stream) -> None:
        self._backend.wait_on_host(stream)

    def _hold_for(self, edge: Edge, tensor: torch.Tensor, stream: Stream) -> None:
        self._backend.hold(tensor, stream)
