# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Proves a plan safe: no operation can run before its inputs are ready, at any queue speed.

``operations`` turns the plan into the operations that the engine would issue, and rejects plans
that cannot be followed. This module proves their ordering. Each operation carries a vector clock:
how many operations of each queue have certainly ended when it starts, given only the order within
its queue and the edges. If two operations touch the same memory and at least one writes, the
clock of the later one must include the earlier one.

[Note: Two futures]
A mark in backward means that a group is about to be used, not that every tensor is read: autograd
may read none of them, or an exception may end the iteration. Compute does not wait (E5) for a
tensor that is never read, so each plan is proved twice: with every storage read, and with none
read, where reloaded memory is released at the end (E6).
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron.slipstream.plan.actions import Action, ActionKind, Plan, StoragePlan
from megatron.slipstream.plan.edges import EDGES, EdgeRule, OpKind, Queue
from megatron.slipstream.plan.host_layout import HostBuffer
from megatron.slipstream.plan.operations import Operation, Schedule, derive_schedule, device_bytes
from megatron.slipstream.plan.safety import PlanError, SafetyProperty
from megatron.slipstream.plan.trace import GroupKey

__all__ = ["PlanError", "PlanFacts", "SafetyProperty", "check_plan"]


@dataclass(frozen=True)
class PlanFacts:
    """Facts about a plan proved safe, valid at any copy speed."""

    peak_device_bytes: int
    """Peak bytes of saved storages (including those that stay) on the device."""
    peak_host_bytes: int
    """Peak bytes of host memory in use, in whole buffers."""
    num_operations: int
    """Number of operations on the three queues in one iteration."""


def check_plan(plan: Plan, edges: Sequence[EdgeRule] = EDGES) -> PlanFacts:
    """Prove that the engine can safely follow ``plan`` with the waits of ``edges``.

    Args:
        plan: Any plan; only its trace is trusted.
        edges: The edge table. A test removes one edge and expects the proof to fail.

    Returns:
        Facts about the plan.

    Raises:
        PlanError: The plan breaks a :class:`SafetyProperty`.
    """
    schedule = derive_schedule(plan)
    _check_statements(plan, schedule)
    _check_host_memory(plan, schedule)
    _check_inflight(plan)
    for operations in (schedule.operations, schedule.unread()):  # [Note: Two futures]
        waits = schedule.waits(operations, edges)
        _Proof(plan, schedule, operations, waits).run()
    return PlanFacts(
        peak_device_bytes=max(device_bytes(plan.trace, schedule.storages), default=0),
        peak_host_bytes=max(schedule.host_bytes, default=0),
        num_operations=len(schedule.operations),
    )


# Compare the storages that the plan states with those that its actions move.


def _check_statements(plan: Plan, schedule: Schedule) -> None:
    stated: dict[int, StoragePlan] = {}
    for storage in plan.storages:
        if not 0 <= storage.index < len(plan.trace.storages):
            detail = f"there is no storage {storage.index}"
            raise PlanError(SafetyProperty.KNOWN_STORAGE, f"storage {storage.index}", plan, detail)
        if storage.index in stated:
            detail = f"storage {storage.index} moves twice"
            raise PlanError(SafetyProperty.ONCE, _first_d2h(plan, storage.index), plan, detail)
        stated[storage.index] = storage
    derived = {storage.index: storage for storage in schedule.storages}
    for index in sorted(stated.keys() | derived.keys()):
        if stated.get(index) != derived.get(index):
            detail = f"stated is {stated.get(index)}, but the actions do {derived.get(index)}"
            raise PlanError(SafetyProperty.AS_STATED, _first_d2h(plan, index), plan, detail)
    moved_nbytes: dict[GroupKey, int] = {}
    for storage in schedule.storages:
        first = plan.trace.storages[storage.index].holders[0]
        moved_nbytes[first] = moved_nbytes.get(first, 0) + storage.nbytes
    for group in plan.groups:
        nbytes = moved_nbytes.get(group.key, 0)
        if group.moved_nbytes != nbytes:
            action = Action(ActionKind.D2H, group.key, group.name)
            detail = f"stated are {group.moved_nbytes} bytes, but the actions move {nbytes}"
            raise PlanError(SafetyProperty.AS_STATED, action, plan, detail)


def _check_host_memory(plan: Plan, schedule: Schedule) -> None:
    limit = plan.options.host_memory_limit_bytes
    for operation in schedule.operations:
        in_use = schedule.host_bytes[operation.step]
        if limit is not None and operation.kind is OpKind.COPY_OUT and in_use > limit:
            detail = f"{in_use} bytes are in use from step {operation.step} on, {limit} are allowed"
            raise PlanError(SafetyProperty.WITHIN_HOST_MEMORY, operation.cause, plan, detail)


def _check_inflight(plan: Plan) -> None:
    limit = plan.options.max_inflight_offloads
    if limit is None:
        return
    in_flight: dict[str, set[GroupKey]] = {}
    for index, actions in enumerate(plan.actions):
        for action in actions:
            of_name = in_flight.setdefault(action.name, set())
            if action.kind is ActionKind.D2H:
                of_name.add(action.key)
            elif action.kind is ActionKind.FREE:
                of_name.discard(action.key)
        for action in actions:
            if action.kind is ActionKind.D2H and len(in_flight[action.name]) > limit:
                detail = (
                    f"{len(in_flight[action.name])} copies out of {action.name} are in flight from "
                    f"step {index} on, {limit} are allowed"
                )
                raise PlanError(SafetyProperty.WITHIN_INFLIGHT, action, plan, detail)


def _first_d2h(plan: Plan, storage: int) -> Action:
    key = plan.trace.storages[storage].holders[0]
    return Action(ActionKind.D2H, key, plan.trace.group_by_key[key].name)


# The happens-before order of the operations.


class _Memory(enum.IntEnum):
    """The memory regions of one moving storage."""

    ORIGINAL = 0
    """Device memory that forward wrote."""
    BUFFER = 1
    """Host memory, which may have held other storages before."""
    RELOADED = 2
    """New device memory, written by the H2D copy."""


class _Access(NamedTuple):
    """How an operation of some kind accesses one memory region of each of its storages."""

    memory: _Memory
    writes: bool
    rule: SafetyProperty | None = None
    """The rule that is broken if an earlier access may still be running; None if both are on the
    compute queue, which runs in order."""


# A release counts as a write: later compute operations may be allocated the memory.
_ACCESSES: dict[OpKind, tuple[_Access, ...]] = {
    OpKind.WRITE: (_Access(_Memory.ORIGINAL, True),),
    OpKind.SAVE: (_Access(_Memory.ORIGINAL, False),),
    OpKind.COPY_OUT: (
        _Access(_Memory.ORIGINAL, False, SafetyProperty.COPY_OUT_READS_WRITTEN),
        _Access(_Memory.BUFFER, True, SafetyProperty.BUFFER_REUSED_AFTER_COPY),
    ),
    OpKind.RELEASE: (_Access(_Memory.ORIGINAL, True, SafetyProperty.REUSED_AFTER_COPY_OUT),),
    # Newly allocated memory may have been in use on the compute queue up to this point.
    OpKind.START_IN: (_Access(_Memory.RELOADED, True),),
    OpKind.COPY_IN: (
        _Access(_Memory.BUFFER, False, SafetyProperty.COPY_IN_READS_WRITTEN),
        _Access(_Memory.RELOADED, True, SafetyProperty.COPY_IN_AFTER_LAST_USE),
    ),
    OpKind.USE: (_Access(_Memory.RELOADED, False, SafetyProperty.BACKWARD_READS_WRITTEN),),
    OpKind.ABANDON: (_Access(_Memory.RELOADED, True, SafetyProperty.UNREAD_REUSED_AFTER_COPY_IN),),
}

_Clock = list[int]
"""For each queue, the number of operations that have ended."""


class _At(NamedTuple):
    """An operation's queue and its position in that queue."""

    queue: Queue
    position: int
    """Counted from 1 within the queue."""


class _Contents:
    """Contents of memory: the storage last written, with that write and the reads since."""

    def __init__(self, storage: int, written: _At) -> None:
        self.storage = storage
        self.uses = [written]


class _HostMemory:
    """The contents of each byte of host memory, derived from the copies alone.

    This verifies the waits that the pool returns with a buffer.
    """

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int, _Contents]] = []
        """Sorted and non-overlapping."""

    def write(self, buffer: HostBuffer, contents: _Contents) -> list[_Contents]:
        """Overwrite the bytes of a buffer and return the contents of all ranges it overlaps.

        The parts of those ranges outside the buffer are dropped: if this write is proved to follow
        their accesses, so is every later write, since all writes are on the d2h queue.
        """
        place = self._overlap(buffer)
        old = [item[2] for item in self._ranges[place]]
        self._ranges[place] = [(buffer.start, buffer.stop, contents)]
        return old

    def read(self, buffer: HostBuffer) -> list[_Contents]:
        """Return the contents of a buffer: a single entry if it was not overwritten."""
        return [item[2] for item in self._ranges[self._overlap(buffer)]]

    def _overlap(self, buffer: HostBuffer) -> slice:
        first = bisect.bisect_right(self._ranges, buffer.start, key=lambda item: item[1])
        last = bisect.bisect_left(self._ranges, buffer.stop, key=lambda item: item[0])
        return slice(first, last)


class _Proof:
    """The proof of one future of a schedule, in linear time and memory."""

    def __init__(
        self,
        plan: Plan,
        schedule: Schedule,
        operations: Sequence[Operation],
        waits: Sequence[Sequence[int]],
    ) -> None:
        self._plan = plan
        self._buffers = schedule.buffers
        self._operations = operations
        self._waits = waits
        self._queues: list[_Clock] = [[0, 0, 0] for _ in Queue]
        """For each queue, the clock of its next operation."""
        self._ended: list[tuple[int, int, int]] = []
        """For each operation so far, its clock when it ends."""
        self._device: dict[tuple[_Memory, int], _Contents] = {}
        self._host = _HostMemory()

    def run(self) -> None:
        """Check the operations in issue order.

        If no operation waits for a later one, all of them can run in that order, so the queues
        cannot deadlock.

        Raises:
            PlanError: An operation may run before one that it must follow, or queues may deadlock.
        """
        for index, operation in enumerate(self._operations):
            kind = operation.kind
            queue = kind.queue
            clock = self._queues[queue]
            for signal in self._waits[index]:
                if signal >= index:
                    detail = f"its {kind.name} waits for an operation that is issued after it"
                    raise PlanError(SafetyProperty.NO_CYCLE, operation.cause, self._plan, detail)
                for other, count in enumerate(self._ended[signal]):
                    if count > clock[other]:
                        clock[other] = count
            accesses = _ACCESSES.get(kind)
            if accesses is not None:
                at = _At(queue, clock[queue] + 1)
                for access in accesses:
                    for storage in operation.storages:
                        self._check_access(operation, access, storage, clock, at)
            clock[queue] += 1
            self._ended.append((clock[0], clock[1], clock[2]))

    def _check_access(
        self, operation: Operation, access: _Access, storage: int, clock: _Clock, at: _At
    ) -> None:
        writes = access.writes
        before = self._write(access, storage, at) if writes else self._read(access, storage)
        if not writes and (len(before) != 1 or before[0].storage != storage):
            held = [contents.storage for contents in before]
            detail = f"storage {storage} was overwritten: its memory holds storages {held}"
            raise self._error(operation, access, detail)
        for contents in before:
            # A read must follow the write; a write must follow the last write and all reads.
            for use in contents.uses if writes else contents.uses[:1]:
                if clock[use.queue] < use.position:
                    detail = (
                        f"its {operation.kind.name} of storage {storage} may run while the "
                        f"{use.queue.name} queue still uses the same memory"
                    )
                    raise self._error(operation, access, detail)
            if not writes:
                contents.uses.append(at)

    def _read(self, access: _Access, storage: int) -> list[_Contents]:
        """Return the contents to read, which exist since derive_schedule accepted the plan."""
        if access.memory is _Memory.BUFFER:
            return self._host.read(self._buffers[storage])
        return [self._device[access.memory, storage]]

    def _write(self, access: _Access, storage: int, at: _At) -> list[_Contents]:
        """Record a write and return the contents that it overwrites."""
        contents = _Contents(storage, at)
        if access.memory is _Memory.BUFFER:
            return self._host.write(self._buffers[storage], contents)
        before = self._device.get((access.memory, storage))
        self._device[access.memory, storage] = contents
        return [] if before is None else [before]

    def _error(self, operation: Operation, access: _Access, detail: str) -> PlanError:
        # The compute queue orders accesses without a rule, so they never fail.
        assert access.rule is not None
        return PlanError(access.rule, operation.cause, self._plan, detail)
