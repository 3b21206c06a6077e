# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Scenarios in which the race is certain on a GPU if one edge is deleted: one or more per edge.

Each puts a long sleep on the late stream and fills the memory that would be read or overwritten too
early with NaN or other data. A scenario returns whether the result is right. If the host is so slow
that the sleep ends before all operations are issued, as may happen with other tests running, the
result means nothing; the scenario is then repeated with a longer sleep.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from unittest import mock

import torch
from hand_driven import HandDriven

from megatron.slipstream.fine_grained_activation_offload.copy_streams import CopyStreams
from megatron.slipstream.fine_grained_activation_offload.native import native_module
from megatron.slipstream.graphs.capture import _CudaTail
from megatron.slipstream.plan.edges import Edge

NUMEL = 1 << 20
SLEEP_CYCLES = 400_000_000
"""About 0.2 s on an H200; every copy here takes less than a millisecond."""
MAX_TAILS_TRIED = 32
"""As many streams as torch has of one priority."""
MAX_DOUBLINGS = 4
NUM_POISONED_BLOCKS = 64

KINDS = ("cuda", "cuda, native")
"""The store in Python, and in C++."""

Scenario = Callable[[str], bool]
"""A scenario as a function of the kind of store."""


class _TooLate(Exception):
    """The sleep of the late stream ended too early."""


class Lateness:
    """A sleep of one length, put on given streams."""

    def __init__(self, cycles: int) -> None:
        self._cycles = cycles
        self._ends: list[torch.cuda.Event] = []

    def on(self, stream: torch.cuda.Stream) -> None:
        """Put the sleep on ``stream``: later operations of the stream start after it."""
        with torch.cuda.stream(stream):
            self.sleep()
        self.note(stream)

    def sleep(self) -> None:
        """Put the sleep on the current stream, also during a capture; see :meth:`note`."""
        torch.cuda._sleep(self._cycles)

    def note(self, stream: torch.cuda.Stream) -> None:
        """Note that the sleep is part of what ``stream`` has been given."""
        end = torch.cuda.Event()
        end.record(stream)
        self._ends.append(end)

    def check(self) -> None:
        """Call when all operations that must run during the sleep are issued.

        Raises:
            _TooLate: The sleep has ended.
        """
        if any(end.query() for end in self._ends):
            raise _TooLate


def _repeated_if_slow(scenario: Callable[[Lateness, str], bool]) -> Scenario:
    @functools.wraps(scenario)
    def repeated(kind: str) -> bool:
        _held = _take_free_memory()
        for num_doublings in range(MAX_DOUBLINGS + 1):
            try:
                return scenario(Lateness(SLEEP_CYCLES << num_doublings), kind)
            except _TooLate:
                torch.cuda.synchronize()
        raise AssertionError("the host is too slow for this scenario")

    return repeated


def _values(value: float) -> torch.Tensor:
    return torch.full((NUMEL,), value, device="cuda")


def _take_free_memory() -> list[torch.Tensor]:
    """Take the free blocks that earlier tests have left, until the allocator asks for a segment.

    While they are held, the allocator hands out a block of this size again once it is free.
    """
    blocks, reserved_bytes = [_values(0.0)], torch.cuda.memory_reserved()
    while torch.cuda.memory_reserved() == reserved_bytes:
        blocks.append(_values(0.0))
    return blocks


def _sent(hand: HandDriven, value: float) -> tuple[object, object]:
    """A group that is certainly on the host."""
    group = hand.group()
    saved = hand.save(group, _values(value))
    hand.send(group)
    torch.cuda.synchronize()
    return group, saved


def _poison_free_memory() -> set[int]:
    """Fill the blocks that the next allocations of this size get, on the compute stream.

    Several blocks, since one left by earlier tests may be allocated first.

    Returns:
        Their addresses.
    """
    blocks = [_values(float("nan")) for _ in range(NUM_POISONED_BLOCKS)]
    return {block.data_ptr() for block in blocks}


@_repeated_if_slow
def copy_out_of_what_is_computed_late(late: Lateness, kind: str) -> bool:
    """E1: the source is NaN until the late compute stream has written it."""
    hand = HandDriven(kind)
    tensor = _values(float("nan"))
    torch.cuda.synchronize()
    late.on(torch.cuda.current_stream())
    tensor.copy_(_values(1.0))
    group = hand.group()
    saved = hand.save(group, tensor)
    del tensor
    hand.copy_out(group)
    late.check()
    torch.cuda.synchronize()
    hand.store.release(group)
    return bool((hand.unpack(saved) == 1.0).all())


@_repeated_if_slow
def host_buffer_reused_while_a_late_copy_in_reads_it(late: Lateness, kind: str) -> bool:
    """E2: the second group's copy out would overwrite the source of the first one's copy in."""
    hand = HandDriven(kind)
    group, saved = _sent(hand, 1.0)
    address = saved.storage.allocation.buffer.address
    late.on(hand.store.copy_streams.h2d)
    hand.copy_in(group)
    other = hand.group()
    saved_other = hand.save(other, _values(2.0))
    hand.copy_out(other)
    late.check()
    if saved_other.storage.allocation.buffer.address != address:
        raise AssertionError("the scenario needs the pool to allocate the same buffer again")
    right = bool((hand.unpack(saved) == 1.0).all())
    return right and bool((hand.unpack(saved_other) == 2.0).all())


@_repeated_if_slow
def device_memory_reused_while_a_late_copy_out_reads_it(late: Lateness, kind: str) -> bool:
    """E3: the next owner of released memory fills it with NaN."""
    hand = HandDriven(kind)
    group, tensor = hand.group(), _values(1.0)
    saved, address = hand.save(group, tensor), tensor.data_ptr()
    del tensor
    torch.cuda.synchronize()
    late.on(hand.store.copy_streams.d2h)
    hand.send(group)
    if address not in _poison_free_memory():
        raise AssertionError("the scenario needs the allocator to hand out the same block again")
    late.check()
    torch.cuda.synchronize()
    return bool((hand.unpack(saved) == 1.0).all())


@_repeated_if_slow
def copy_in_over_memory_that_late_compute_reads(late: Lateness, kind: str) -> bool:
    """E4: the destination is a block whose last read, on the compute stream, is late."""
    hand = HandDriven(kind)
    group, saved = _sent(hand, 1.0)
    block = _values(3.0)
    late.on(torch.cuda.current_stream())
    read_late = block.clone()
    address = block.data_ptr()
    del block
    hand.copy_in(group)
    if saved.storage.returned.data_ptr() != address:
        raise AssertionError("the scenario needs the allocator to hand out the same block")
    late.check()
    torch.cuda.synchronize()
    return bool((read_late == 3.0).all())


@_repeated_if_slow
def backward_reads_while_a_late_copy_in_writes(late: Lateness, kind: str) -> bool:
    """E5: the destination holds NaN until the late copy has run."""
    hand = HandDriven(kind)
    group, saved = _sent(hand, 1.0)
    _poison_free_memory()
    torch.cuda.synchronize()
    late.on(hand.store.copy_streams.h2d)
    hand.copy_in(group)
    late.check()
    read = hand.unpack(saved).clone()
    torch.cuda.synchronize()
    return bool((read == 1.0).all())


@_repeated_if_slow
def unused_memory_reused_while_a_late_copy_in_writes(late: Lateness, kind: str) -> bool:
    """E6: the late copy would overwrite the next owner of the destination."""
    hand = HandDriven(kind)
    group, saved = _sent(hand, 1.0)
    late.on(hand.store.copy_streams.h2d)
    hand.copy_in(group)
    address = saved.storage.returned.data_ptr()
    del saved
    next_owner = _values(4.0)
    if next_owner.data_ptr() != address:
        raise AssertionError("the scenario needs the allocator to hand out the same block")
    late.check()
    torch.cuda.synchronize()
    return bool((next_owner == 4.0).all())


@_repeated_if_slow
def host_memory_unpinned_while_a_late_copy_writes_it(late: Lateness, kind: str) -> bool:
    """E7: a stream must be idle when its host memory is unpinned; the fault could be a crash."""
    hand = HandDriven(kind)
    group = hand.group()
    saved = hand.save(group, _values(1.0))
    late.on(hand.store.copy_streams.d2h)
    hand.copy_out(group)
    idle = []
    free_host = hand.backend.free_host

    def observed(buffer: torch.Tensor) -> None:
        idle.append(hand.store.copy_streams.d2h.query())
        hand.store.copy_streams.d2h.synchronize()
        free_host(buffer)

    # Restored, since a reference cycle would hold device memory until garbage is collected.
    with mock.patch.object(hand.backend, "free_host", observed):
        late.check()
        hand.store.close()
    del saved
    return idle != [] and all(idle)


@_repeated_if_slow
def reloaded_memory_reused_while_another_stream_reads_it_late(late: Lateness, kind: str) -> bool:
    """E8: backward reads on another stream than the one that started the copy in and continues."""
    hand = HandDriven(kind)
    group, saved = _sent(hand, 1.0)
    hand.copy_in(group)
    reader = torch.cuda.Stream()
    late.on(reader)
    with torch.cuda.stream(reader):
        read_late = hand.unpack(saved).clone()
    del saved
    _poison_free_memory()
    late.check()
    torch.cuda.synchronize()
    return bool((read_late == 1.0).all())


@_repeated_if_slow
def graphs_replayed_while_a_late_copy_in_writes(late: Lateness, kind: str) -> bool:
    """E9: the graph that reads follows the one that reloads. Without it, the capture fails."""
    hand = HandDriven(kind)
    group, source = hand.group(), _values(0.0)
    result = torch.empty_like(source)
    saved: list[object] = []
    streams = hand.store.copy_streams
    hand.store.host_pool.reserve(8 * NUMEL)  # memory cannot be pinned during a capture

    def forward() -> None:
        saved.append(hand.save(group, source * 1.0))
        hand.send(group)

    def backward_of_the_layer_after() -> None:
        streams.h2d.wait_stream(torch.cuda.current_stream())
        late.on(streams.h2d)
        hand.copy_in(group)

    def backward() -> None:
        result.copy_(hand.unpack(saved[0]))

    pool, graphs = torch.cuda.graph_pool_handle(), []
    for work in (forward, backward_of_the_layer_after, backward):
        graphs.append(torch.cuda.CUDAGraph())
        try:
            with torch.cuda.graph(graphs[-1], pool=pool):
                streams.begin_graph()
                work()
                streams.end_graph()
        except RuntimeError:  # CUDA refuses a capture with work that is not joined
            torch.cuda.synchronize()
            return False
    right = True
    for value in (1.0, 2.0):
        source.fill_(value)
        for graph in graphs:
            graph.replay()
        right = right and bool((result == value).all())
    return right


def _tail() -> _CudaTail:
    """A tail whose stream runs beside the compute stream: no hardware queue holds both."""
    for _ in range(MAX_TAILS_TRIED):
        tail = _CudaTail()
        torch.cuda.synchronize()
        late = Lateness(SLEEP_CYCLES)
        late.on(tail._stream)
        torch.ones(1, device="cuda").add_(1)
        torch.cuda.current_stream().synchronize()
        try:
            late.check()
        except _TooLate:
            continue
        torch.cuda.synchronize()
        return tail
    raise AssertionError("no stream of a tail runs beside the compute stream")


def _graph_with_tail(
    tail: _CudaTail, results: Callable[[], object], copies: Callable[[], object]
) -> torch.cuda.CUDAGraph:
    """A forward graph that computes results and then makes its last copies."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results()
        tail.begin()
        copies()
    torch.cuda.synchronize()
    return graph


@_repeated_if_slow
def graph_replayed_after_late_computation(late: Lateness, _: str) -> bool:
    """E10: the graph's input is NaN until the late compute stream has written it."""
    source, value, result = _values(float("nan")), _values(1.0), _values(0.0)
    tail = _tail()
    graph = _graph_with_tail(tail, lambda: result.copy_(source), lambda: None)
    late.on(torch.cuda.current_stream())
    source.copy_(value)
    tail.replay(graph)
    late.check()
    torch.cuda.synchronize()
    return bool((result == 1.0).all())


@_repeated_if_slow
def results_read_while_a_late_graph_computes_them(late: Lateness, _: str) -> bool:
    """E11: the graph sleeps before it writes its result."""
    source, result = _values(1.0), _values(0.0)
    tail = _tail()

    def compute() -> None:
        late.sleep()
        result.copy_(source)

    graph = _graph_with_tail(tail, compute, lambda: None)
    result.fill_(float("nan"))
    torch.cuda.synchronize()
    tail.replay(graph)
    late.note(tail._stream)
    read = result.clone()
    late.check()
    torch.cuda.synchronize()
    return bool((read == 1.0).all())


@_repeated_if_slow
def slot_memory_written_while_a_late_tail_reads_it(late: Lateness, _: str) -> bool:
    """E12: the graph sleeps before its last copy, whose source its next user overwrites."""
    source, copy = _values(1.0), _values(0.0)
    tail = _tail()

    def copy_late() -> None:
        late.sleep()
        copy.copy_(source)

    graph = _graph_with_tail(tail, lambda: None, copy_late)
    copy.zero_()
    torch.cuda.synchronize()
    tail.replay(graph)
    late.note(tail._stream)
    tail.wait()
    source.fill_(float("nan"))
    late.check()
    torch.cuda.synchronize()
    return bool((copy == 1.0).all())


# With a second compute stream.


@_repeated_if_slow
def copy_out_of_what_a_second_stream_computes_late(late: Lateness, kind: str) -> bool:
    """E1: the group is saved on the second stream, and its copy out started on the first."""
    hand, second = HandDriven(kind), torch.cuda.Stream()
    tensor, value = _values(float("nan")), _values(1.0)
    torch.cuda.synchronize()
    late.on(second)
    group = hand.group()
    with torch.cuda.stream(second):
        tensor.copy_(value)
        saved = hand.save(group, tensor)
    del tensor
    hand.copy_out(group)
    late.check()
    torch.cuda.synchronize()
    hand.store.release(group)
    return bool((hand.unpack(saved) == 1.0).all())


@_repeated_if_slow
def memory_of_a_second_stream_reused_while_a_late_copy_out_reads_it(
    late: Lateness, kind: str
) -> bool:
    """E3: the first stream saves and releases the memory of the second, which saves it later."""
    hand, second = HandDriven(kind), torch.cuda.Stream()
    group = hand.group()
    with torch.cuda.stream(second):
        tensor = _values(1.0)
    torch.cuda.synchronize()
    saved, address = hand.save(group, tensor), tensor.data_ptr()
    with torch.cuda.stream(second):
        saved_again = hand.save(group, tensor.view(2, -1))
    del tensor
    late.on(hand.store.copy_streams.d2h)
    hand.send(group)
    with torch.cuda.stream(second):
        reused = _poison_free_memory()
    if address not in reused:
        raise AssertionError("the scenario needs the allocator to hand out the same block again")
    late.check()
    torch.cuda.synchronize()
    right = bool((hand.unpack(saved) == 1.0).all())
    return right and bool((hand.unpack(saved_again) == 1.0).all())


@_repeated_if_slow
def reloaded_on_a_second_stream_while_a_late_copy_out_writes(late: Lateness, kind: str) -> bool:
    """E3: the stream that starts the copy in is not the one that waited before the release."""
    hand, second = HandDriven(kind), torch.cuda.Stream()
    group = hand.group()
    saved = hand.save(group, _values(1.0))
    torch.cuda.synchronize()
    late.on(hand.store.copy_streams.d2h)
    hand.send(group)
    with torch.cuda.stream(second):
        hand.copy_in(group)
        read = hand.unpack(saved).clone()
    late.check()
    torch.cuda.synchronize()
    return bool((read == 1.0).all())


@_repeated_if_slow
def dropped_while_a_late_copy_out_reads_it(late: Lateness, kind: str) -> bool:
    """E3: no backward will read the copy, but d2h still reads memory that others may get."""
    hand = HandDriven(kind)
    group, tensor = hand.group(), _values(1.0)
    saved, address = hand.save(group, tensor), tensor.data_ptr()
    del tensor
    torch.cuda.synchronize()
    late.on(hand.store.copy_streams.d2h)
    hand.copy_out(group)
    copy = saved.storage.allocation.buffer.view()
    del saved
    if address not in _poison_free_memory():
        raise AssertionError("the scenario needs the allocator to hand out the same block again")
    late.check()
    torch.cuda.synchronize()
    return bool((copy[: 4 * NUMEL].view(torch.float32) == 1.0).all())


@_repeated_if_slow
def input_of_a_node_reused_while_a_late_copy_out_reads_it(late: Lateness, kind: str) -> bool:
    """E8: a node saves memory of another stream, which neither waits nor is known to the engine."""
    hand, second = HandDriven(kind), torch.cuda.Stream()
    hand.store.crosses_streams = True
    group = hand.group()
    with torch.cuda.stream(second):
        tensor = _values(1.0)
    torch.cuda.synchronize()
    saved = hand.save(group, tensor)
    del tensor
    late.on(hand.store.copy_streams.d2h)
    hand.send(group)
    with torch.cuda.stream(second):
        _poison_free_memory()
    late.check()
    torch.cuda.synchronize()
    return bool((hand.unpack(saved) == 1.0).all())


SCENARIOS: dict[Edge, Scenario] = {
    Edge.E1: copy_out_of_what_is_computed_late,
    Edge.E2: host_buffer_reused_while_a_late_copy_in_reads_it,
    Edge.E3: device_memory_reused_while_a_late_copy_out_reads_it,
    Edge.E4: copy_in_over_memory_that_late_compute_reads,
    Edge.E5: backward_reads_while_a_late_copy_in_writes,
    Edge.E6: unused_memory_reused_while_a_late_copy_in_writes,
    Edge.E7: host_memory_unpinned_while_a_late_copy_writes_it,
    Edge.E8: reloaded_memory_reused_while_another_stream_reads_it_late,
    Edge.E9: graphs_replayed_while_a_late_copy_in_writes,
    Edge.E10: graph_replayed_after_late_computation,
    Edge.E11: results_read_while_a_late_graph_computes_them,
    Edge.E12: slot_memory_written_while_a_late_tail_reads_it,
}

FURTHER_SCENARIOS: dict[Scenario, Edge] = {
    copy_out_of_what_a_second_stream_computes_late: Edge.E1,
    memory_of_a_second_stream_reused_while_a_late_copy_out_reads_it: Edge.E3,
    reloaded_on_a_second_stream_while_a_late_copy_out_writes: Edge.E3,
    dropped_while_a_late_copy_out_reads_it: Edge.E3,
    input_of_a_node_reused_while_a_late_copy_out_reads_it: Edge.E8,
}
"""Other waits of the same edges, most with a second compute stream."""


EDGE_METHODS = ("_wait", "_wait_on_host", "_hold_for")
"""Methods of :class:`CopyStreams`; each of E1 to E9 is made by one of them in Python."""

_PLACES = [*((CopyStreams, name) for name in EDGE_METHODS), (_CudaTail, "_wait")]


class without_edge:
    """Context manager that deletes one edge from all engines and graphs.

    In C++, from those that are created inside the context.
    """

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._patches = contextlib.ExitStack()

    def __enter__(self) -> None:
        for owner, name in _PLACES:
            skipping = self._skipping(getattr(owner, name))
            self._patches.enter_context(mock.patch.object(owner, name, skipping))
        native = native_module()
        assert native is not None
        native.Waits.leave_out(_NUMBERS_IN_CPP.get(self._edge, 0))
        self._patches.callback(native.Waits.leave_out, 0)

    def __exit__(self, *_: object) -> None:
        self._patches.close()

    def _skipping(self, original: Callable[..., None]) -> Callable[..., None]:
        def skipping(owner: object, edge: Edge, *rest: object) -> None:
            if edge is not self._edge:
                original(owner, edge, *rest)

        return skipping


_NUMBERS_IN_CPP = {
    edge: number for number, edge in enumerate((e for e in Edge if e.rule is not None), start=1)
}
