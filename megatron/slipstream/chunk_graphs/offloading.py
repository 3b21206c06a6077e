# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Offloading inside chunk graphs.

A captured chunk is, to the engine, an iteration of one micro-batch and one chunk: its forward, then
its backward pass. Before the capture such iterations are run with an engine of their own, which
records, plans and times them as it would any. Then each slot is captured with an engine that
follows the last plan: copies go to side streams inside the graph and are joined to its end (edge
E9).

Every slot has an engine of its own, and every place has host memory of its own: what a graph copies
to and from is baked in, and the places of micro-batches in flight hold theirs at the same time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Optional

from megatron.slipstream.chunk_graphs.places import Place
from megatron.slipstream.fine_grained_activation_offload.graph_capture import SLACK
from megatron.slipstream.fine_grained_activation_offload.host_pool import HostPool
from megatron.slipstream.fine_grained_activation_offload.manager import PipelineOffloadManager
from megatron.slipstream.plan.actions import Plan
from megatron.slipstream.plan.host_layout import size_class_bytes

NUM_RUNS = 16
"""Iterations that are run before the capture: one is recorded, and from the times of the others the
plan is made anew up to three times."""


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
        """What one replay of a slot's forward graph copies out."""
        self.host_bytes = 0
        """Host memory of all slots, beyond what others in the same places had taken before."""

    @contextlib.contextmanager
    def planning(self, run: Callable[[], None]) -> Iterator[Callable[[], None]]:
        """Learn what a pass does by running it.

        Args:
            run: A forward and backward pass of the chunk.

        Yields:
            What runs it once more, as planned.
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

    def make_slot(self, place: Place) -> SlotOffloading:
        """What is entered while one slot is captured, as planned.

        Args:
            place: Of the slot, which has the host memory.
        """
        plan = self._plan
        engine = self._make_engine()
        slot = SlotOffloading(engine, plan, self._begin_pass, self._marks_go_to)
        if plan is not None:
            self.host_bytes += slot.use(place)
            self.moved_bytes = sum(storage.nbytes for storage in plan.storages)
        return slot


class SlotOffloading:
    """What moves while the graphs of one slot are captured."""

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
        self._place: Optional[Place] = None

    def use(self, place: Place) -> int:
        """Have copies go to the host memory of a place, enough for the plan.

        Returns:
            What had to be added to it.
        """
        assert self._plan is not None
        self._place = place
        store = self._engine.store
        store.host_pool.close()
        store.host_pool = place.share_host_pool(store.backend)
        return _hold(store.host_pool, self._plan)

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Around the forward pass. All that moves has left the device at its end."""
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
        """Around the backward pass."""
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
        """Return the host memory, when no replay uses it any more and no other slot is there."""
        store = self._engine.store
        store.backend.wait_on_host(store.backend.current_stream())
        if self._place is not None:
            store.host_pool = HostPool(store.backend, 0)
        self._engine.close()
        if self._place is not None:
            self._place.leave_host_pool()
            self._place = None

    @property
    def host_bytes(self) -> int:
        """Host memory of the place."""
        return self._engine.store.host_pool.allocated_bytes


def share_of_host_memory(
    limit_bytes: Optional[int], held_bytes: int, num_slots: int
) -> Optional[int]:
    """What the plan of a pass may need, so that all slots together keep to a limit.

    Args:
        limit_bytes: Of the process; None for none.
        held_bytes: What it has taken of that already.
        num_slots: Passes whose activations are away at the same time.
    """
    if limit_bytes is None:
        return None
    return max(0, int((limit_bytes - held_bytes) / num_slots / (1 + SLACK)))


def _hold(pool: HostPool, plan: Plan) -> int:
    """Have enough host memory for a pass: all that moves is away at once when its forward ends.

    Returns:
        What had to be added.
    """
    before = pool.allocated_bytes
    sizes = [size_class_bytes(storage.nbytes) for storage in plan.storages]
    needed = sum(sizes) + int(SLACK * sum(sizes))
    if needed > before:
        # A buffer lies in one slab: the end of the first may be too short for the largest.
        pool.reserve(needed - before + (max(sizes) if before else 0))
    return pool.allocated_bytes - before
