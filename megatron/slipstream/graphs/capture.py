# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Captures work once and replays it: as CUDA graphs, or eagerly without a GPU.

[Note: Exchanged tensors stay during capture]
NCCL has its own stream, and memory that it sends or receives point to point can be reused once that
stream has finished with it. During a capture this is unknown, so all such memory stays allocated
until the end: with context parallelism, the keys and values of each exchange in each layer. On two
and four H200s, graphs of 16 layers held 122 and 350 MiB more than an eager pass, of 128 and 384 MiB
exchanged in forward. A measured pass keeps the same tensors.

[Note: The tail of a forward graph]
A graph joins its copies to its end (edge E9 of ``plan.edges``), so work after a forward graph
would wait for the last copies out, which nothing in the graph hides any more. So the graph is
replayed on a stream of its slot's memory. It records an event when only copies are left: the tail.
The current stream waits for that event only, and output layer, loss, or the next micro-batch's
forward run beside the tail. What they share with it:

- The slot's pool: the tail reads saved activations, and may write reloaded ones. Outside, only the
  output is read, which no copy writes. The backward graph reuses this memory and reads what was
  copied, so the current stream waits for the tail before that graph is replayed.
- Static inputs: the tail may read them, where an activation that moves is an input. They are
  written when the slot's memory is taken again, which is after that backward. A micro-batch without
  a backward frees its memory while the tail runs, so its next user also waits for the tail. The
  slots of one memory share its stream: the next one's graphs write the same pool and host memory.
- The output's gradient lies outside of the pool, and the forward graph does not use it.
- Host memory is unpinned, and static inputs are freed, when the host has waited for the tail.
- Other slots have other pools and other host memory. Their graphs follow the event, and what all
  graphs share is used by computation only: parameters, main gradients, workspaces, the state of
  random number generators.
"""

from __future__ import annotations

import abc
import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Optional, Protocol

import torch

from megatron.slipstream.fine_grained_activation_offload import peak_statistics
from megatron.slipstream.plan.edges import Edge

Work = Callable[[], Sequence[torch.Tensor]]
"""Work to capture. It returns tensors that are read after each replay."""


class Graph(Protocol):
    """Captured work. Its results have the same addresses after every replay."""

    def replay(self) -> None:
        """Launch it on the current stream, without waiting for it."""


class Tail:
    """Work of forward graphs in one slot memory that remains when their results are ready.

    See [Note: The tail of a forward graph]. This one is empty: the results come last.
    """

    def begin(self) -> None:
        """Call during a capture, when only copies remain to be joined."""

    def replay(self, graph: Graph) -> None:
        """Replay a graph that has a tail; the current stream waits for its results only."""
        graph.replay()

    def wait(self) -> None:
        """Make the current stream wait for the end of the graph replayed last, if there is one."""


class Recorded(NamedTuple):
    """A graph and the tensors that its work returned."""

    graph: Graph
    results: tuple[torch.Tensor, ...]


class GraphBackend(abc.ABC):
    """Captures graphs."""

    is_eager = False
    """Whether a replay runs the work again, without a CUDA graph."""

    @abc.abstractmethod
    def session(self) -> contextlib.AbstractContextManager[None]:
        """Context for all work that is warmed up and captured together.

        The device is idle at its start and end, and random number generators continue afterwards as
        if nothing had been captured.
        """

    @abc.abstractmethod
    def new_pool(self) -> Any:
        """Return a private memory pool for graphs that are replayed in the order of capture."""

    def new_tail(self) -> Tail:
        """Return the tail of the forward graphs of a new slot memory."""
        return Tail()

    @abc.abstractmethod
    def measure(self, work: Callable[[], None]) -> int:
        """Run work once, within a session; return its peak above the bytes in use before."""

    @abc.abstractmethod
    def record(self, work: Work, pool: Any) -> Recorded:
        """Capture work, within a session."""

    def finish(self) -> None:
        """Block the host until all replays have ended."""

    @abc.abstractmethod
    def free_bytes(self) -> Optional[int]:
        """Return the device memory that graphs could still use; None if no limit is known."""

    @abc.abstractmethod
    def held_bytes(self) -> int:
        """Return the device memory that belongs to graphs."""


class _CudaTail(Tail):
    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._start = torch.cuda.Event()
        """Recorded before each graph; reused, as creating an event costs more host time."""
        self._results = torch.cuda.Event(external=True)
        """Recorded inside the graphs."""
        self._end: Optional[torch.cuda.Event] = None
        """Recorded after each graph; None before the first."""

    def begin(self) -> None:
        self._results.record()

    def replay(self, graph: Graph) -> None:
        current = torch.cuda.current_stream()
        self._start.record(current)
        self._wait(Edge.E10, self._stream, self._start)
        # Not torch.cuda.stream(), whose checks cost as much host time as the events.
        torch.cuda.set_stream(self._stream)
        try:
            graph.replay()
        finally:
            torch.cuda.set_stream(current)
        if self._end is None:
            self._end = torch.cuda.Event()
        self._end.record(self._stream)
        self._wait(Edge.E11, current, self._results)

    def wait(self) -> None:
        if self._end is not None:
            self._wait(Edge.E12, torch.cuda.current_stream(), self._end)

    def _wait(self, edge: Edge, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        stream.wait_event(event)


class CudaGraphs(GraphBackend):
    """CUDA graphs.

    Args:
        generators: Returns the random number generators that captured work may use, in addition to
            the device's default one.
        while_recording: Returns a context that is entered during each capture.
        while_measuring: The same for the measured run, to keep tensors that are exchanged.
    """

    def __init__(
        self,
        generators: Callable[[], Iterable[torch.Generator]] = tuple,
        while_recording: Callable[[], contextlib.AbstractContextManager[Any]] = (
            contextlib.nullcontext
        ),
        while_measuring: Callable[[], contextlib.AbstractContextManager[Any]] = (
            contextlib.nullcontext
        ),
    ) -> None:
        self._generators = generators
        self._while_recording = while_recording
        self._while_measuring = while_measuring
        self._stream: Optional[torch.cuda.Stream] = None

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        generators = [torch.cuda.default_generators[torch.cuda.current_device()]]
        generators += self._generators()
        states = [generator.get_state() for generator in generators]
        torch.cuda.synchronize()  # H2
        gc.collect()
        torch.cuda.empty_cache()
        # Work on the default stream cannot be captured.
        self._stream = torch.cuda.Stream()
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            self._stream = None
            torch.cuda.synchronize()  # H2
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
            gc.collect()
            torch.cuda.empty_cache()

    def new_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def new_tail(self) -> Tail:
        return _CudaTail()

    def finish(self) -> None:
        torch.cuda.synchronize()  # H2

    def measure(self, work: Callable[[], None]) -> int:
        # A private pool would also start without cached memory, and allocate whole segments.
        torch.cuda.synchronize()  # H2
        torch.cuda.empty_cache()
        device = torch.cuda.current_device()
        peak_statistics.reset(device)
        before = peak_statistics.read(device)
        with self._while_measuring():
            work()
        torch.cuda.synchronize()  # H2
        after = peak_statistics.read(device)
        counted = ("allocated_bytes", "reserved_bytes")
        rises = (after[name]["all"]["peak"] - before[name]["all"]["peak"] for name in counted)
        return max(rises)

    def record(self, work: Work, pool: Any) -> Recorded:
        graph = torch.cuda.CUDAGraph()
        for generator in self._generators():
            graph.register_generator_state(generator)
        # Other threads (NCCL's watchdog, pinned memory's) keep making calls that a capture forbids.
        recording = torch.cuda.graph(
            graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"
        )
        was_collecting = gc.isenabled()
        with self._while_recording(), recording:
            gc.disable()  # A tensor that the collector frees would be freed inside the graph.
            try:
                results = tuple(work())
            finally:
                if was_collecting:
                    gc.enable()
        return Recorded(graph, results)

    def free_bytes(self) -> int:
        return peak_statistics.obtainable_bytes() - torch.cuda.memory_allocated()

    def held_bytes(self) -> int:
        return graph_pool_bytes()


def graph_pool_bytes() -> int:
    """Return the device memory of all CUDA graphs of the process; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0
    return sum(
        segment["total_size"]
        for segment in torch.cuda.memory_snapshot()
        if tuple(segment["segment_pool_id"]) != (0, 0)
    )


class _EagerGraph:
    """Runs the work again, and copies its results to the addresses of the first run's."""

    def __init__(self, work: Work, results: Sequence[torch.Tensor]) -> None:
        self._work = work
        self._results = results

    def replay(self) -> None:
        with torch.enable_grad():  # As in the capture; a replay runs in a function of autograd.
            again = self._work()
        with torch.no_grad():
            for result, new in zip(self._results, again, strict=True):
                result.copy_(new)


class EagerGraphs(GraphBackend):
    """Replaces CUDA graphs on a machine without a GPU: a replay runs the work again.

    So no values are baked in; everything else is as with graphs: static inputs and outputs, slots,
    gradients that autograd does not see.
    """

    is_eager = True

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        state = torch.get_rng_state()
        try:
            yield
        finally:
            torch.set_rng_state(state)

    def new_pool(self) -> Any:
        return None

    def measure(self, work: Callable[[], None]) -> int:
        work()
        return 0

    def record(self, work: Work, pool: Any) -> Recorded:
        results = tuple(result.detach().clone() for result in work())
        return Recorded(_EagerGraph(work, results), results)

    def free_bytes(self) -> None:
        return None

    def held_bytes(self) -> int:
        return 0
