# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""What follows a forward graph waits for its computation; what uses the slot next, for its copies.

Streams are imitated: each knows all work that it follows. The graphs are eager, so what they record
and copy is put into the stream on which they are replayed.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Optional
from unittest.mock import patch

import pytest
import torch
from race_scenarios import without_edge
from toy_chunk import Training, equal

from megatron.slipstream.graphs import slots
from megatron.slipstream.graphs.capture import CudaGraphs, EagerGraphs, Tail
from megatron.slipstream.graphs.slots import SlotMemory
from megatron.slipstream.plan.edges import Edge

COMPUTE, COPIES = "computation", "copies"


class _Event:
    def __init__(self, streams: Streams, external: bool) -> None:
        self._streams = streams
        self.external = external
        self.follows: set[str] = set()

    def record(self, stream: Optional[_Stream] = None) -> None:
        self.follows = set((stream or self._streams.current).follows)


class _Stream:
    def __init__(self) -> None:
        self.follows: set[str] = set()

    def wait_event(self, event: _Event) -> None:
        self.follows |= event.follows


class Streams:
    """Streams in the place of CUDA's."""

    def __init__(self) -> None:
        self.main = self.current = _Stream()
        self.events: list[_Event] = []

    def event(self, external: bool = False) -> _Event:
        self.events.append(_Event(self, external))
        return self.events[-1]

    def enter(self, stream: _Stream) -> None:
        self.current = stream


@pytest.fixture
def streams() -> Iterator[Streams]:
    streams = Streams()
    with (
        patch.object(torch.cuda, "Stream", _Stream),
        patch.object(torch.cuda, "Event", streams.event),
        patch.object(torch.cuda, "current_stream", lambda: streams.current),
        patch.object(torch.cuda, "set_stream", streams.enter),
    ):
        yield streams


class Imitated(EagerGraphs):
    """Eager graphs with the tails of CUDA graphs."""

    def new_tail(self) -> Tail:
        return CudaGraphs().new_tail()


class Offloading:
    """Notes the order of the passes of slots. Nothing moves."""

    moved_bytes = host_bytes = 0

    def __init__(self, streams: Streams, leaves_copies: bool) -> None:
        self.streams = streams
        self.leaves_copies = leaves_copies
        self.num_slots = 0
        self.backward_follows: list[set[str]] = []
        """What each backward pass follows, of the first slot."""
        self.on_side: list[bool] = []
        """Whether each forward pass is on another stream than work outside of graphs."""

    def planning(self, run: Callable[[], None]) -> Any:
        run()
        return contextlib.nullcontext(SimpleNamespace(run=run, times_replays=False))

    def note_captured(self) -> None:
        pass

    note_deleted = note_captured

    def note_replay(self) -> None:
        pass

    def make_slot(self, memory: SlotMemory, is_eager: bool) -> _Hooks:
        self.num_slots += 1
        return _Hooks(self, memory, self.num_slots)


class _Hooks:
    def __init__(self, offloading: Offloading, memory: SlotMemory, number: int) -> None:
        self._offloading, self._memory, self._number = offloading, memory, number
        self.leaves_copies = offloading.leaves_copies

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        yield
        streams = self._offloading.streams
        self._offloading.on_side.append(streams.current is not streams.main)
        streams.current.follows.add(f"{COMPUTE} {self._number}")
        self._memory.tail.begin()
        streams.current.follows.add(f"{COPIES} {self._number}")

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        self._offloading.backward_follows.append(set(self._offloading.streams.current.follows))
        yield

    def close(self) -> None:
        pass


def captured(
    streams: Streams, num_slots: int = 1, leaves_copies: bool = True
) -> tuple[Training, Offloading]:
    """A training whose slots are captured, and have run nothing since."""
    offloading = Offloading(streams, leaves_copies)
    training = Training(num_slots, backend=Imitated(), offloading=offloading)
    training.iteration("FB")
    training.begin_iteration()
    assert training.graphs.is_captured
    streams.main.follows.clear()  # A capture ends when the device is idle.
    for event in streams.events:
        event.follows.clear()
    offloading.backward_follows.clear()
    offloading.on_side.clear()
    return training, offloading


def test_only_backward_waits_for_the_copies_of_forward(streams: Streams) -> None:
    training, offloading = captured(streams)
    loss = training.forward(0)
    assert streams.main.follows == {f"{COMPUTE} 1"}, "the loss follows the computation only"
    assert offloading.on_side == [True]
    loss.backward()
    assert offloading.backward_follows == [{f"{COMPUTE} 1", f"{COPIES} 1"}]
    assert streams.main.follows == {f"{COMPUTE} 1", f"{COPIES} 1"}


def test_the_next_slot_computes_beside_the_copies_of_the_one_before(streams: Streams) -> None:
    training, offloading = captured(streams, num_slots=2)
    losses = [training.forward(0), training.forward(1)]
    assert streams.main.follows == {f"{COMPUTE} 1", f"{COMPUTE} 2"}
    losses.pop().backward()
    assert f"{COPIES} 1" not in streams.main.follows
    losses.pop().backward()
    assert offloading.backward_follows == [
        {f"{COMPUTE} 1", f"{COMPUTE} 2", f"{COPIES} 2"},
        {f"{COMPUTE} 1", f"{COMPUTE} 2", f"{COPIES} 1", f"{COPIES} 2"},
    ]


@pytest.fixture
def written_after(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """What the copies to the inputs of slots follow."""
    found: list[set[str]] = []
    feed = slots.Slot.feed

    def noted(*arguments: Any) -> None:
        found.append(set(streams.main.follows))
        feed(*arguments)

    monkeypatch.setattr(slots.Slot, "feed", noted)
    return found


def test_inputs_of_a_slot_are_written_after_copies_whose_backward_never_ran(
    streams: Streams, written_after: list[set[str]]
) -> None:
    training, _ = captured(streams)
    written_after.clear()
    training.forward(0)
    gc.collect()
    training.forward(1)
    assert written_after == [set(), {f"{COMPUTE} 1", f"{COPIES} 1"}]


def test_so_are_those_of_another_slot_in_the_same_memory(
    streams: Streams, written_after: list[set[str]]
) -> None:
    (one, _), (other, _) = captured(streams), captured(streams)
    ((graphs,), (others,)) = (list(t.graphs.of_size.values()) for t in (one, other))
    others.memories = graphs.memories
    for slot, memory in zip(others.slots, graphs.memories, strict=True):
        slot.memory = memory
    written_after.clear()
    one.forward(0)
    gc.collect()
    other.forward(1)
    assert written_after == [set(), {f"{COMPUTE} 1", f"{COPIES} 1"}]


def test_graphs_begin_after_all_work_before_them(streams: Streams) -> None:
    tail = CudaGraphs().new_tail()
    begins_after: list[set[str]] = []

    class Graph:
        def replay(self) -> None:
            begins_after.append(set(streams.current.follows))

    streams.main.follows.add("the inputs")
    tail.replay(Graph())  # type: ignore[arg-type]
    assert begins_after == [{"the inputs"}]
    assert [event.external for event in streams.events] == [False, True, False]
    assert streams.current is streams.main


class _ForwardGraph:
    """Begins after the work before it, computes, and copies."""

    def __init__(self, streams: Streams, tail: Tail) -> None:
        self._streams, self._tail = streams, tail
        self.begins_after: set[str] = set()

    def replay(self) -> None:
        follows = self._streams.current.follows
        self.begins_after = set(follows)
        follows.add(COMPUTE)
        self._tail.begin()
        follows.add(COPIES)


def _unordered(streams: Streams) -> set[Edge]:
    """The edges of a replay that are not made."""
    tail = CudaGraphs().new_tail()
    graph = _ForwardGraph(streams, tail)
    streams.main.follows.add("the inputs")
    tail.replay(graph)  # type: ignore[arg-type]
    results_are_read_after = set(streams.main.follows)
    tail.wait()
    missing = set()
    if "the inputs" not in graph.begins_after:
        missing.add(Edge.E10)
    if COMPUTE not in results_are_read_after:
        missing.add(Edge.E11)
    if COPIES not in streams.main.follows:
        missing.add(Edge.E12)
    return missing


def test_each_edge_of_a_tail_is_made_and_needed(streams: Streams) -> None:
    assert _unordered(streams) == set()
    for edge in (Edge.E10, Edge.E11, Edge.E12):
        streams.main.follows.clear()
        with without_edge(edge):
            assert edge in _unordered(streams)


def test_graphs_without_copies_are_replayed_as_before(streams: Streams) -> None:
    training, offloading = captured(streams, leaves_copies=False)
    training.forward(0)
    assert offloading.on_side == [False]
    assert streams.main.follows == {f"{COMPUTE} 1", f"{COPIES} 1"}


def test_results_are_those_without_graphs(streams: Streams) -> None:
    schedules = ["FFBB", "FBFB"]
    training, _ = captured(streams, num_slots=2)
    for number, schedule in enumerate(schedules):
        training.iteration(schedule, 10 * number)
    plain = Training(None)
    plain.iteration("FB")
    for number, schedule in enumerate(schedules):
        plain.iteration(schedule, 10 * number)
    assert training.graphs.num_replays == 4
    assert equal(training, plain)
