# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Offloading inside chunk graphs.

To the engine, a captured chunk is an iteration of one micro-batch and one chunk: its forward, then
its backward pass. Before the capture such iterations run with a separate engine, which records,
plans and times them like any other. Then each slot is captured with an engine that follows the last
plan: copies run on side streams inside the graph, which joins them at its end (edge E9). What
follows the forward graph waits for its computation only: [Note: The tail of a forward graph].

Every slot has its own engine, and every slot memory its own host memory: addresses are baked into a
graph, and the micro-batches in flight use theirs at the same time.
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

NUM_RUNS = 24
"""Number of iterations before the capture: one is recorded, and from the times of the others the
plan is rebuilt up to three times. The same on every rank, since ranks may communicate in them."""


class ChunkOffloading:
    """Offloading inside the graphs of one chunk.

    Args:
        make_engine: Makes a new engine.
        begin_pass: Tells an engine that a micro-batch enters the chunk, with the options of the
            model's configuration.
        marks_go_to: Returns a context in which the marks of layers go to an engine.
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
        """Bytes that one replay of a slot's forward graph copies out."""
        self.host_bytes = 0
        """Host memory of all slots, without that of graphs captured earlier in the same memory."""

    @contextlib.contextmanager
    def planning(self, run: Callable[[], None]) -> Iterator[Callable[[], None]]:
        """Record and plan a pass by running it.

        Args:
            run: A forward and backward pass of the chunk.

        Yields:
            A function that runs it again as planned.
        """
        engine = self._make_engine()
        engine.predict_overheads()  # A replayed graph costs the host nothing for each group.
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
            memory: The slot's memory.
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
        """Make copies use this memory's host pool, and grow it to the plan's size.

        Returns:
            Bytes added to the pool.
        """
        assert self._plan is not None
        self._memory = memory
        store = self._engine.store
        store.host_pool.close()
        store.host_pool = memory.share_host_pool(store.backend)
        return _hold(store.host_pool, self._plan)

    @property
    def leaves_copies(self) -> bool:
        """Whether copies can outlast the computation of the forward pass."""
        return self._plan is not None and bool(self._plan.storages)

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """The context of the forward pass. At its end all moving groups are offloaded."""
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
            assert self._memory is not None
            self._memory.tail.begin()  # First: to release a group waits for its copies.
            self._engine.release_all()
        finally:
            streams.end_graph()

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """The context of the backward pass."""
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
        """Free the host memory once no replay and no other slot uses it."""
        store = self._engine.store
        if self._memory is not None:
            self._memory.tail.wait()
        store.backend.wait_on_host(store.backend.current_stream())
        if self._memory is not None:
            store.host_pool = HostPool(store.backend, 0)
        self._engine.close()
        if self._memory is not None:
            self._memory.leave_host_pool()
            self._memory = None

    @property
    def host_bytes(self) -> int:
        """Host memory of the slot's memory."""
        return self._engine.store.host_pool.allocated_bytes


def share_of_host_memory(
    limit_bytes: Optional[int], held_bytes: int, num_slots: int
) -> Optional[int]:
    """Host memory that one pass may use, so that all slots together stay within a limit.

    Args:
        limit_bytes: The limit of the process; None for no limit.
        held_bytes: Bytes of it that are already in use.
        num_slots: Number of passes whose activations are offloaded at the same time.
    """
    if limit_bytes is None:
        return None
    return max(0, int((limit_bytes - held_bytes) / num_slots / (1 + SLACK)))


def _hold(pool: HostPool, plan: Plan) -> int:
    """Reserve host memory for a pass: all moving groups are offloaded when its forward ends.

    Returns:
        Bytes added to the pool.
    """
    before = pool.allocated_bytes
    sizes = [size_class_bytes(storage.nbytes) for storage in plan.storages]
    needed = sum(sizes) + int(SLACK * sum(sizes))
    if needed > before:
        # A buffer lies in one slab, and the end of the first may be too short for the largest one.
        pool.reserve(needed - before + (max(sizes) if before else 0))
    return pool.allocated_bytes - before
