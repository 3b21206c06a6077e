# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Offloading inside chunk graphs.

A captured chunk is, to the engine, an iteration of one micro-batch and one chunk: its forward, then
its backward pass. Before the capture such iterations are run with an engine of their own, which
records, plans and times them as it would any. Then each slot is captured with an engine that
follows the last plan: copies go to side streams inside the graph and are joined to its end (edge
E9).

Every slot has an engine of its own, and every slot memory its host memory: addresses are baked into
a graph, and the micro-batches in flight use theirs at the same time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Optional

from megatron.slipstream.chunk_graphs.slot_memory import SlotMemory
from megatron.slipstream.fine_grained_activation_offload.graph_capture import SLACK
from megatron.slipstream.fine_grained_activation_offload.host_pool import HostPool
from megatron.slipstream.fine_grained_activation_offload.manager import PipelineOffloadManager
from megatron.slipstream.plan.actions import Plan
from megatron.slipstream.plan.host_layout import size_class_bytes

NUM_RUNS = 16
"""Iterations that are run before the capture: one is recorded, and from the times of the others the
plan is made again up to three times."""


class ChunkOffloading:
    """Offloading inside the graphs of one chunk.

    Args:
        make_engine: Makes an engine that has moved nothing yet.
        begin_pass: Tells an engine that a micro-batch enters the chunk, with the options of the
            model's configuration.
        marks_go_to: While what it returns is entered, the marks of layers go to an engine.
    """

    def __init__(
        self,
        make_engine: Callable[[], PipelineOffloadManager],
        begin_pass: Callable[[PipelineOffloadManager], None],
        marks_go_to: Callable[[PipelineOffloadManager], AbstractContextManager[None]],
    ) -> None:
        self._make_engine = make_engine
        self._begin_pass = begin_pass
        self._marks_go_to = marks_go_to
        self._plan: Optional[Plan] = None
        self.moved_bytes = 0
        """Copied out by one replay of a slot's forward graph."""
        self.host_bytes = 0
        """Host memory of all slots, beyond what others in the same memory took before."""

    @contextlib.contextmanager
    def planning(self, run: Callable[[], None]) -> Iterator[Callable[[], None]]:
        """Learn what a pass does by running it.

        Args:
            run: A forward and backward pass of the chunk.

        Yields:
            A function that runs it once more, as planned.
        """
        engine = self._make_engine()
        self.host_bytes = self.moved_bytes = 0

        def run_once() -> None:
            self._begin_pass(engine)
            with self._marks_go_to(engine):
                run()
            engine.reset()

        try:
            for _ in range(NUM_RUNS):
                run_once()
            yield run_once
            self._plan = engine.plan
        finally:
            engine.close()

    def make_slot(self, memory: SlotMemory) -> SlotOffloading:
        """Contexts for the capture of one slot, as planned.

        Args:
            memory: Of the slot.
        """
        plan = self._plan
        engine = self._make_engine()
        slot = SlotOffloading(engine, plan, self._begin_pass, self._marks_go_to)
        if plan is not None:
            self.host_bytes += slot.use(memory)
            self.moved_bytes = sum(storage.nbytes for storage in plan.storages)
        return slot


class SlotOffloading:
    """Offloading while the graphs of one slot are captured."""

    def __init__(
        self,
        engine: PipelineOffloadManager,
        plan: Optional[Plan],
        begin_pass: Callable[[PipelineOffloadManager], None],
        marks_go_to: Callable[[PipelineOffloadManager], AbstractContextManager[None]],
    ) -> None:
        self._engine = engine
        self._plan = plan
        self._begin_pass = begin_pass
        self._marks_go_to = marks_go_to
        self._memory: Optional[SlotMemory] = None

    def use(self, memory: SlotMemory) -> int:
        """Have copies go to this memory's host pool, large enough for the plan.

        Returns:
            Bytes added to the pool.
        """
        assert self._plan is not None
        self._memory = memory
        store = self._engine.store
        store.host_pool.close()
        store.host_pool = memory.share_host_pool(store.backend)
        return _hold(store.host_pool, self._plan)

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """For the forward pass. All that moves has left the device at its end."""
        if self._plan is None:
            yield
            return
        self._begin_pass(self._engine)
        self._engine.follow(self._plan)
        streams = self._engine.store.copy_streams
        streams.begin_graph()
        try:
            with self._marks_go_to(self._engine):
                yield
            self._engine.release_all()
        finally:
            streams.end_graph()

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """For the backward pass."""
        if self._plan is None:
            yield
            return
        streams = self._engine.store.copy_streams
        streams.begin_graph()
        try:
            yield
        finally:
            streams.end_graph()
            self._engine.forget_pass()

    def close(self) -> None:
        """Free the host memory, once no replay and no other slot uses it."""
        store = self._engine.store
        store.backend.wait_on_host(store.backend.current_stream())
        if self._memory is not None:
            store.host_pool = HostPool(store.backend, 0)
        self._engine.close()
        if self._memory is not None:
            self._memory.leave_host_pool()
            self._memory = None

    @property
    def host_bytes(self) -> int:
        """Of the slot's memory."""
        return self._engine.store.host_pool.allocated_bytes


def share_of_host_memory(
    limit_bytes: Optional[int], held_bytes: int, num_slots: int
) -> Optional[int]:
    """Host memory that one pass may use, so that all slots together keep to a limit.

    Args:
        limit_bytes: Of the process; None for none.
        held_bytes: Of that, in use already.
        num_slots: Passes whose activations are away at the same time.
    """
    if limit_bytes is None:
        return None
    return max(0, int((limit_bytes - held_bytes) / num_slots / (1 + SLACK)))


def _hold(pool: HostPool, plan: Plan) -> int:
    """Reserve host memory for a pass: all that moves is away at once when its forward ends.

    Returns:
        Bytes added to the pool.
    """
    before = pool.allocated_bytes
    sizes = [size_class_bytes(storage.nbytes) for storage in plan.storages]
    needed = sum(sizes) + int(SLACK * sum(sizes))
    if needed > before:
        # A buffer lies in one slab: the end of the first may be too short for the largest.
        pool.reserve(needed - before + (max(sizes) if before else 0))
    return pool.allocated_bytes - before
