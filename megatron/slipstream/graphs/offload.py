# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Offloading inside chunk graphs.

To the engine, a captured chunk is an iteration of one micro-batch and one chunk: its forward, then
its backward pass. Before the capture such iterations run with a separate engine, which records,
plans and times them like any other. Then each slot is captured with an engine that follows the last
plan: copies run on side streams inside the graph, which joins them at its end (edge E9). Work after
the forward graph waits for its computation only: [Note: The tail of a forward graph].

Every slot has its own engine, and every slot memory its own host memory: addresses are baked into a
graph, and the micro-batches in flight use theirs at the same time.

[Note: Times of replays]
Eager passes say little about replays. If they are launch-bound, a replay is several times as fast,
and hides correspondingly fewer copies. Copies in graphs can also be slower: on an H100 with the
driver's default of eight hardware queues they reach 48 GB/s to the host, versus 55 in eager passes.
So a slot is captured and replayed before the others, with events at its marks and copies, and the
plan is updated from these times, twice. All ranks do so, as graphs may contain collectives.

[Note: Verified passes]
Comparing what came back with what left blocks the host, which a capture forbids. So the first
passes of planning are verified, which are not timed, and no replay. Without a GPU a replay runs the
pass again, so the first ones of each slot are verified too.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Optional

from megatron.slipstream.fine_grained_activation_offload.counted_modules import ReplayedPass
from megatron.slipstream.fine_grained_activation_offload.engine import OffloadEngine
from megatron.slipstream.fine_grained_activation_offload.graph_capture import SLACK, hold
from megatron.slipstream.fine_grained_activation_offload.host_pool import HostPool
from megatron.slipstream.fine_grained_activation_offload.report import ModuleCounters
from megatron.slipstream.fine_grained_activation_offload.step_clock import StepClock, Times
from megatron.slipstream.fine_grained_activation_offload.verify import nothing_poisoned
from megatron.slipstream.graphs.slots import SlotMemory
from megatron.slipstream.plan.actions import Plan
from megatron.slipstream.plan.host_layout import size_class_bytes

NUM_UNTIMED_RUNS = 2
NUM_TIMED_RUNS = 10
"""Number of passes before the capture, the same on every rank, since ranks may communicate in them.
One is recorded. If the backend records times, memory and times of the others are read, and the plan
is updated once."""


@dataclasses.dataclass(frozen=True)
class PlannedPass:
    """A pass of a chunk while it is planned."""

    engine: OffloadEngine
    run: Callable[[], None]
    make_slot: Callable[..., SlotOffloading]
    """Creates the contexts for a capture that follows a plan, in a slot's memory."""
    times_replays: bool
    """Whether it is replanned from the times of replays."""

    def timed_slot(self, memory: SlotMemory) -> SlotOffloading:
        """Return contexts for the capture of one slot with events."""
        self.engine.store.close()  # Only one of the two host pools is needed at a time.
        return self.make_slot(self.engine.plan, memory, is_timed=True)

    def plan_again(self, times: Sequence[Times]) -> None:
        """Replan from the times of the slot's replays."""
        self.engine.lifecycle.plan_for_replays(times)


class ChunkOffloading:
    """Offloading inside the graphs of one chunk.

    Args:
        make_engine: Creates an engine that verifies what comes back in its first passes, as many
            as its argument says.
        begin_pass: Notifies an engine that a micro-batch enters the chunk, with the options of the
            model's configuration.
        marks_go_to: Returns a context in which the layers' marks go to an engine.
        note_replayed: Called once all slots are captured, with what moves in replays. Returns a
            function that is called when the graphs are deleted.
        num_verified: Number of passes of each engine to verify: [Note: Verified passes].
    """

    def __init__(
        self,
        make_engine: Callable[[int], OffloadEngine],
        begin_pass: Callable[[OffloadEngine], None],
        marks_go_to: Callable[[OffloadEngine], AbstractContextManager[None]],
        note_replayed: Callable[[ReplayedPass], Callable[[], object]],
        num_verified: int = 0,
    ) -> None:
        self._make_engine = make_engine
        self._num_verified = num_verified
        self.begin_pass = begin_pass
        self.marks_go_to = marks_go_to
        self._note_replayed = note_replayed
        self._plan: Optional[Plan] = None
        self._slots: list[SlotOffloading] = []
        """Slots of the capture in progress."""
        self._replayed: Optional[ReplayedPass] = None
        """The pass that the graphs replay; None without graphs."""
        self._forget_replayed: Optional[Callable[[], object]] = None
        """Undoes ``note_replayed``; None without graphs."""
        self.moved_bytes = 0
        """Bytes that one replay of a slot's forward graph offloads."""
        self.host_bytes = 0
        """Host memory of all slots, excluding graphs captured earlier in the same memory."""

    @contextlib.contextmanager
    def planning(self, run: Callable[[], None]) -> Iterator[PlannedPass]:
        """Record and plan a pass by running it. Its plan is final at the end of the context."""
        engine = self._make_engine(min(self._num_verified, NUM_UNTIMED_RUNS))
        takes_time = engine.store.backend.takes_time
        # A replayed graph costs the host nothing for each group.
        engine.lifecycle.tries_plans = False
        self.host_bytes = self.moved_bytes = 0
        self._slots.clear()

        def run_once() -> None:
            self.begin_pass(engine)
            with self.marks_go_to(engine):
                run()
            engine.end_iteration()

        try:
            for _ in range(NUM_TIMED_RUNS if takes_time else NUM_UNTIMED_RUNS):
                run_once()
            yield PlannedPass(engine, run_once, self._slot, takes_time)
            self._plan = engine.plan
        finally:
            engine.close()

    def make_slot(self, memory: SlotMemory, is_eager: bool = False) -> SlotOffloading:
        slot = self._slot(self._plan, memory, num_verified=self._num_verified if is_eager else 0)
        self._slots.append(slot)
        self.host_bytes += slot.added_host_bytes
        if self._plan is not None:
            self.moved_bytes = self._plan.moved_nbytes
        return slot

    def note_captured(self) -> None:
        """Call when the graphs of all slots are captured."""
        if self._plan is not None:
            # All slots follow the same plan.
            self._replayed = ReplayedPass(
                self._slots[0].modules, plan=self._plan, host_bytes=self.host_bytes
            )
            self._forget_replayed = self._note_replayed(self._replayed)
        self._slots.clear()

    def note_replay(self) -> None:
        """Call for each replay of a slot's forward graph."""
        if self._replayed is not None:
            self._replayed.num_replays += 1

    def note_deleted(self) -> None:
        """Call when the graphs are deleted."""
        if self._forget_replayed is not None:
            self._forget_replayed()
            self._forget_replayed = self._replayed = None

    def _slot(
        self,
        plan: Optional[Plan],
        memory: SlotMemory,
        is_timed: bool = False,
        num_verified: int = 0,
    ) -> SlotOffloading:
        engine = self._make_engine(num_verified)
        return SlotOffloading(self, engine, plan, memory, is_timed, num_verified)


class SlotOffloading:
    """Offloading while the graphs of one slot are captured.

    The engine serves this slot only; ``num_verified`` of its passes are verified. The slot's host
    memory is grown to the plan's size. Replays record the times of marks and copies if
    ``is_timed``.
    """

    def __init__(
        self,
        of_chunk: ChunkOffloading,
        engine: OffloadEngine,
        plan: Optional[Plan],
        memory: SlotMemory,
        is_timed: bool = False,
        num_verified: int = 0,
    ) -> None:
        self._engine = engine
        self._num_left_to_verify = num_verified
        self._plan = plan
        self._of_chunk = of_chunk
        self._clock = StepClock(engine.store.backend, is_of_graph=True) if is_timed else None
        self._memory: Optional[SlotMemory] = None
        self.modules: Mapping[str, ModuleCounters] = {}
        """The counters of the captured passes, by module name."""
        self.added_host_bytes = 0
        """Bytes added to the host memory."""
        if plan is not None:
            self._memory = memory
            store = engine.store
            own_pool, pool = store.host_pool, memory.share_host_pool(store)
            own_pool.close()
            store.host_pool = pool
            before_bytes = pool.allocated_bytes
            sizes = [size_class_bytes(storage.nbytes) for storage in plan.storages]
            hold(pool, sum(sizes), max(sizes, default=0))
            self.added_host_bytes = pool.allocated_bytes - before_bytes

    @property
    def leaves_copies(self) -> bool:
        """Whether copies can outlast the computation of the forward pass."""
        return self._plan is not None and bool(self._plan.storages)

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Context of the forward pass, at whose end all moving groups are offloaded."""
        if self._plan is None:
            yield
            return
        if self._clock is not None:
            self._clock.restart()
        self._of_chunk.begin_pass(self._engine)
        self._engine.lifecycle.follow_captured(self._plan, self._clock)
        with self._graph():
            with self._of_chunk.marks_go_to(self._engine):
                yield
            assert self._memory is not None
            self._memory.tail.begin()  # First: releasing a group waits for its copies.
            self._engine.store.release_all(self._engine.now.groups.values())

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        if self._plan is None:
            yield
            return
        try:
            with self._graph():
                yield
                if self._clock is not None:
                    self._clock.note_step()
        finally:
            self.modules = self._engine.store.modules
            self._engine.clear_iteration()
        self._num_left_to_verify -= 1
        if self._num_left_to_verify <= 0:
            self._engine.store.stop_verifying()

    @contextlib.contextmanager
    def _graph(self) -> Iterator[None]:
        store = self._engine.store
        is_verified = store.verifier is not None
        store.copy_streams.begin_graph()
        try:
            with contextlib.nullcontext() if is_verified else nothing_poisoned(store.backend):
                yield
        finally:
            store.copy_streams.end_graph()

    def read_times(self) -> Optional[Times]:
        """Return the times of the last replay, which has ended; None if there are none."""
        return self._clock.read() if self._clock is not None else None

    def close(self) -> None:
        """Free the host memory once no replay and no other slot uses it."""
        store = self._engine.store
        if self._memory is not None:
            self._memory.tail.wait()  # edge E12
        store.backend.wait_on_host(store.backend.current_stream())  # edge E7
        if self._memory is not None:
            store.host_pool = HostPool(store.backend, 0)
        self._engine.close()
        if self._memory is not None:
            self._memory.leave_host_pool()
            self._memory = None

    @property
    def host_bytes(self) -> int:
        return self._engine.store.host_pool.allocated_bytes


def share_of_host_memory(pool: HostPool, num_slots: int) -> Optional[int]:
    """Return the bytes that one pass may use for all slots together to stay within a limit.

    ``pool`` has all slots in its share, also those that exist already; they offload at the same
    time. None for no limit.
    """
    if pool.limit_bytes is None:
        return None
    free_bytes = pool.limit_bytes + pool.parts_bytes - pool.allocated_bytes
    return max(0, int(free_bytes / num_slots / (1 + SLACK)))
