# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""One scenario per edge in which the race is certain on a GPU if that edge is deleted.

Each puts a long sleep on the late stream and fills the memory that would be read or overwritten too
early with NaN or other data. A scenario returns whether the result is right. If the host is so slow
that the sleep ends before all operations are issued, as may happen with other tests running, the
result means nothing; the scenario is then repeated with a longer sleep.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from unittest import mock

import torch
from hand_driven import HandDriven

from megatron.slipstream.fine_grained_activation_offload.copy_streams import CopyStreams, Edge
from megatron.slipstream.fine_grained_activation_offload.native import native_module

NUMEL = 1 << 20
SLEEP_CYCLES = 400_000_000
"""About 0.2 s on an H200; every copy here takes less than a millisecond."""
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
            torch.cuda._sleep(self._cycles)
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
        for num_doublings in range(MAX_DOUBLINGS + 1):
            try:
                return scenario(Lateness(SLEEP_CYCLES << num_doublings), kind)
            except _TooLate:
                torch.cuda.synchronize()
        raise AssertionError("the host is too slow for this scenario")

    return repeated


def _values(value: float) -> torch.Tensor:
    return torch.full((NUMEL,), value, device="cuda")


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
}


EDGE_METHODS = ("_wait", "_wait_on_host", "_hold")
"""Methods of :class:`CopyStreams`; each edge is made by one of them."""


class without_edge:
    """Context manager that deletes one edge from every :class:`CopyStreams`, and in C++."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._originals = {name: getattr(CopyStreams, name) for name in EDGE_METHODS}

    def __enter__(self) -> None:
        for name, original in self._originals.items():
            setattr(CopyStreams, name, self._skipping(original))
        native = native_module()
        assert native is not None
        native.Waits.skipped_edge = self._edge.name

    def __exit__(self, *_: object) -> None:
        for name, original in self._originals.items():
            setattr(CopyStreams, name, original)
        native = native_module()
        assert native is not None
        native.Waits.skipped_edge = ""

    def _skipping(self, original: Callable[..., None]) -> Callable[..., None]:
        def skipping(streams: CopyStreams, edge: Edge, *rest: object) -> None:
            if edge is not self._edge:
                original(streams, edge, *rest)

        return skipping
