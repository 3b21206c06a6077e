# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Lowers a plan to the operations that the engine issues on three queues, and their waits.

:class:`Issuer` models what the engine (``activation_store``) does for an action; ``edges`` has the
waits that ``copy_streams`` adds to a queue. A test compares both with what the engine issues. The
proof (``check``), the clock (``walk``) and the host layout know the engine only through these two;
the search (``arrange``) has its own, faster walk, which a test compares with the clock. Each queue
runs in order; only the edges order operations of different queues.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron.slipstream.plan.actions import (
    Action,
    ActionKind,
    GroupPlan,
    Plan,
    StoragePlan,
    absent_bytes,
)
from megatron.slipstream.plan.edges import EdgeRule, OpKind
from megatron.slipstream.plan.host_layout import HostBuffer, HostLedger, HostRequest
from megatron.slipstream.plan.safety import PlanError, SafetyProperty
from megatron.slipstream.plan.trace import GroupKey, Step, StepKind, Trace


class Operation(NamedTuple):
    """One entry of a queue. :attr:`Schedule.operations` has operations in issue order."""

    kind: OpKind
    step: int
    cause: Action | Step
    """The action or mark that caused it."""
    storages: tuple[int, ...] = ()
    """The moving storages that it touches, by index in :attr:`Trace.storages`."""


@dataclass(frozen=True)
class Schedule:
    """The operations that the engine issues when it follows a plan from start to end."""

    operations: tuple[Operation, ...]
    """In issue order."""
    storages: tuple[StoragePlan, ...]
    """The plan of each moving storage, derived from the actions alone, sorted by index."""
    buffers: dict[int, HostBuffer]
    """The host buffer of each moving storage."""
    host_bytes: tuple[int, ...]
    """For each step, the peak host bytes in use, in whole buffers."""

    def host_requests(self) -> list[HostRequest]:
        """Return the requests to the host pool, in order: at D2H copies, and after H2D copies."""
        found = []
        for operation in self.operations:
            for storage in operation.storages:
                if operation.kind is OpKind.COPY_OUT:
                    buffer = self.buffers[storage]
                    found.append(HostRequest(storage, buffer.stop - buffer.start))
                elif operation.kind is OpKind.COPY_IN:
                    found.append(HostRequest(storage, 0))
        return found

    def unread(self) -> tuple[Operation, ...]:
        """Return the operations if backward reads nothing: reloads are released at the end."""
        kept = [op for op in self.operations if op.kind is not OpKind.USE]
        returned = [op for op in kept if op.kind is OpKind.COPY_IN]
        return (*kept, *(op._replace(kind=OpKind.ABANDON) for op in returned))

    def waits(
        self, operations: Sequence[Operation], edges: Sequence[EdgeRule]
    ) -> list[tuple[int, ...]]:
        """Return, for each of ``operations``, the indices of those that it waits for."""
        waits = Waits(edges, self.buffers)
        for index, operation in enumerate(operations):
            waits.note(index, operation)
        return [waits.of(operation) for operation in operations]


class Waits:
    """Finds which of the operations noted so far another operation waits for.

    Args:
        edges: The edge table.
        buffers: The host buffer of each storage that has been offloaded so far.
    """

    def __init__(self, edges: Sequence[EdgeRule], buffers: Mapping[int, HostBuffer]) -> None:
        self._buffers = buffers
        self._places: dict[OpKind, dict[int, int]] = {edge.signal: {} for edge in edges}
        """For each kind and storage, the index of the operation that others wait for."""
        self._rules: dict[OpKind, list[tuple[dict[int, int], bool]]] = {}
        for edge in edges:
            rule = self._places[edge.signal], edge.same == "buffer"
            self._rules.setdefault(edge.waiter, []).append(rule)

    def note(self, place: int, operation: Operation) -> None:
        """Record an operation that has been issued."""
        places = self._places.get(operation.kind)
        if places is not None:
            for storage in operation.storages:
                places[storage] = place

    def of(self, operation: Operation) -> tuple[int, ...]:
        """Return the indices of the operations that this one waits for."""
        waits_for: dict[int, None] = {}
        for places, is_of_buffer in self._rules.get(operation.kind, ()):
            for storage in operation.storages:
                if not is_of_buffer:
                    if storage in places:
                        waits_for[places[storage]] = None
                    continue
                for earlier in self._buffers[storage].used_before:
                    if earlier in places:
                        waits_for[places[earlier]] = None
        return tuple(waits_for)


def derive_schedule(plan: Plan) -> Schedule:
    """Derive the operations of a plan.

    Raises:
        PlanError: The plan cannot be followed.
    """
    _check_references(plan)
    issuer = Issuer(plan.trace, _moved_storages(plan))
    host_bytes = []
    try:
        for index, (step, due) in enumerate(zip(plan.trace.steps, plan.actions, strict=True)):
            if step.kind is StepKind.FORWARD_COMMIT:
                issuer.commit(index, step)
            in_use_bytes = issuer.host_bytes
            for action in due:
                use_step = plan.group_by_key[action.key].use_step
                if action.kind is not ActionKind.H2D and index >= use_step:
                    # The engine would skip it.
                    detail = f"it is due at step {index}, the group is used at {use_step}"
                    raise Refusal(SafetyProperty.LEAVES_BEFORE_USE, action, detail)
                issuer.perform(index, action)
                in_use_bytes = max(in_use_bytes, issuer.host_bytes)
            host_bytes.append(in_use_bytes)
            if step.kind is StepKind.BACKWARD_USE:
                issuer.use(index, step)
            issuer.issue(Operation(OpKind.COMPUTE, index, step))
    except Refusal as refusal:
        rule, cause, detail = refusal.args
        raise PlanError(rule, cause, plan, detail) from None
    storages = issuer.storage_plans()
    return Schedule(tuple(issuer.operations), storages, issuer.buffers, tuple(host_bytes))


def _moved_storages(plan: Plan) -> dict[GroupKey, tuple[int, ...]]:
    """Return, for each group, the storages that its actions move."""
    groups = plan.trace.group_by_key
    return {
        group.key: tuple(
            storage
            for position, storage in enumerate(groups[group.key].storages)
            if group.moves and position not in group.kept_storages
        )
        for group in plan.groups
    }


def device_bytes(trace: Trace, storages: Sequence[StoragePlan]) -> tuple[int, ...]:
    """Return, for each step, the bytes of saved storages on the device until the next step.

    A moving storage is absent from its FREE (or from when nothing else holds it) until its H2D copy
    starts.
    """
    return tuple(map(int.__sub__, trace.saved_bytes, absent_bytes(trace, storages)))


def _planned_actions(group: GroupPlan) -> Iterator[tuple[Action, int]]:
    steps = (group.commit_step, group.free_step, group.h2d_step)
    for kind, step in zip((ActionKind.D2H, ActionKind.FREE, ActionKind.H2D), steps, strict=True):
        yield Action(kind, group.key, group.name), step


def _check_references(plan: Plan) -> None:
    """Check that all that the plan names is in the trace, and no action precedes its commit."""
    trace = plan.trace
    index = trace.step_index
    seen: set[GroupKey] = set()
    for group in plan.groups:
        d2h = Action(ActionKind.D2H, group.key, group.name)
        if group.key in seen:
            # With one plan per group, the states of Issuer allow at most one copy each way.
            raise PlanError(SafetyProperty.ONCE, d2h, plan, "the group has two plans")
        seen.add(group.key)
        if group.key not in trace.group_by_key:
            raise PlanError(SafetyProperty.KNOWN_GROUP, d2h, plan, "the trace has no such group")
        if not group.moves:
            continue
        num_storages = len(trace.group_by_key[group.key].storages)
        for position in group.kept_storages:
            if not 0 <= position < num_storages:
                detail = f"storage {position} stays, but the group has {num_storages}"
                raise PlanError(SafetyProperty.KNOWN_STORAGE, d2h, plan, detail)
        commit = index.get((StepKind.FORWARD_COMMIT, group.key))
        for action, step in _planned_actions(group):
            if not 0 <= step < len(trace.steps):
                detail = f"step {step} is none of the trace's {len(trace.steps)}"
                raise PlanError(SafetyProperty.KNOWN_STEP, action, plan, detail)
            if commit is None or step < commit:
                detail = f"it is due at step {step}, the group's commit is at {commit}"
                raise PlanError(SafetyProperty.AFTER_COMMIT, action, plan, detail)
        use = index.get((StepKind.BACKWARD_USE, group.key))
        if use is None or use != group.use_step:
            detail = f"the plan has its use at step {group.use_step}, the trace at {use}"
            mark = Step(StepKind.BACKWARD_USE, group.key, group.name)
            raise PlanError(SafetyProperty.KNOWN_USE, mark, plan, detail)
    for missing in trace.groups:
        if missing.key not in plan.group_by_key:
            action = Action(ActionKind.D2H, missing.key, missing.name)
            raise PlanError(SafetyProperty.KNOWN_GROUP, action, plan, "the plan has no such group")


class Refusal(Exception):
    """An action cannot be performed when it is due."""

    def __init__(self, rule: SafetyProperty, cause: Action | Step, detail: str) -> None:
        super().__init__(rule, cause, detail)


class _Location(enum.Enum):
    """The location of a moving storage, given the operations issued so far."""

    UNWRITTEN = "forward has not computed it"
    DEVICE = "it is on the device"
    OFFLOADING = "it is on the device while a copy out reads it"
    HOST = "it is on the host"
    RELOADED = "its copy back has been started"

    __hash__ = object.__hash__  # As for StepKind.


class Issuer:
    """Issues an iteration's operations as the engine does, action by action.

    Args:
        trace: The iteration.
        moved: For each group, the storages that its actions move.
    """

    def __init__(self, trace: Trace, moved: Mapping[GroupKey, Sequence[int]]) -> None:
        self.operations: list[Operation] = []
        """Those issued so far, in order."""
        self.buffers: dict[int, HostBuffer] = {}
        """The host buffer of each storage that has been offloaded."""
        self._trace = trace
        self._moved = moved
        held = {storage for storages in moved.values() for storage in storages}
        self._location = dict.fromkeys(held, _Location.UNWRITTEN)
        self._num_holders = {index: len(trace.storages[index].holders) for index in held}
        """For each storage, the number of groups that have yet to release it."""
        self._d2h_step: dict[int, int] = {}
        self._free_step: dict[int, int] = {}
        self._h2d_step: dict[int, int] = {}
        self._use_step: dict[int, int] = {}
        self._ledger = HostLedger()

    def issue(self, operation: Operation) -> None:
        """Issue an operation."""
        self.operations.append(operation)

    @property
    def host_bytes(self) -> int:
        """The host bytes currently in use, in whole buffers."""
        return self._ledger.in_use_bytes

    def storage_plans(self) -> tuple[StoragePlan, ...]:
        """Return the plan of each moving storage; valid at the end."""
        steps = (self._d2h_step, self._free_step, self._h2d_step, self._use_step)
        return tuple(
            StoragePlan(index, self._trace.storages[index].nbytes, *(at[index] for at in steps))
            for index in sorted(self._location)
        )

    def commit(self, index: int, step: Step) -> None:
        """Commit a group: forward has computed all of its storages by now.

        No commit can be too late: memory is released after every holder's FREE, which follows its
        commit. (The engine drops its own reference earlier, at the FREE of the last holder *so
        far*; a later holder's forward then keeps the memory alive, and E3 already orders it.)
        """
        written, saved = [], []
        for storage in self._trace.group_by_key[step.key].storages:
            location = self._location.get(storage)
            if location is _Location.UNWRITTEN:
                written.append(storage)
                self._location[storage] = _Location.DEVICE
            elif location is not None:
                saved.append(storage)
        self._issue(index, step, written, OpKind.WRITE)
        self._issue(index, step, saved, OpKind.SAVE)

    def perform(self, index: int, action: Action) -> None:
        """Perform an action.

        Raises:
            Refusal: The action is not possible in the current state.
        """
        if action.kind is ActionKind.D2H:
            self._copy_out(index, action)
        elif action.kind is ActionKind.FREE:
            self._free(index, action)
        else:
            self._copy_in(index, action)

    def _copy_out(self, index: int, action: Action) -> None:
        offloading = []
        for storage in self._moved[action.key]:
            if self._location[storage] is not _Location.DEVICE:
                continue  # Another group has started its copy.
            self._check_may_offload(storage, action)
            self._location[storage] = _Location.OFFLOADING
            self._d2h_step[storage] = index
            self.buffers[storage] = self._ledger.allocate(self._trace.storages[storage].nbytes)
            offloading.append(storage)
        self._issue(index, action, offloading, OpKind.START_OUT, OpKind.COPY_OUT)

    def _check_may_offload(self, storage: int, action: Action) -> None:
        if self._trace.storages[storage].held_outside:
            detail = f"storage {storage} is held outside"
            raise Refusal(SafetyProperty.HELD_OUTSIDE, action, detail)
        for key in self._trace.storages[storage].holders:
            if key != action.key and storage not in self._moved.get(key, ()):
                detail = f"storage {storage} is also held by group {key}, which keeps it"
                raise Refusal(SafetyProperty.ALL_RELEASE, action, detail)

    def _free(self, index: int, action: Action) -> None:
        freed = []
        for storage in self._moved[action.key]:
            if self._location[storage] is not _Location.OFFLOADING:
                detail = f"storage {storage}: {self._location[storage].value}"
                raise Refusal(SafetyProperty.D2H_BEFORE_FREE, action, detail)
            self._num_holders[storage] -= 1
            if not self._num_holders[storage]:
                self._location[storage] = _Location.HOST
                self._free_step[storage] = index
                freed.append(storage)
        self._issue(index, action, freed, OpKind.RELEASE)

    def _copy_in(self, index: int, action: Action) -> None:
        reloading = []
        for storage in self._moved[action.key]:
            if self._location[storage] is _Location.RELOADED:
                continue  # Another group has started its copy.
            if self._location[storage] is not _Location.HOST:
                detail = f"storage {storage}: {self._location[storage].value}"
                raise Refusal(SafetyProperty.FREE_BEFORE_H2D, action, detail)
            self._location[storage] = _Location.RELOADED
            self._h2d_step[storage] = index
            reloading.append(storage)
        self._issue(index, action, reloading, OpKind.START_IN, OpKind.COPY_IN)
        for storage in reloading:
            # As in the engine: once issued, the buffer's next D2H copy waits for it (E2).
            self._ledger.free(self.buffers[storage], storage)

    def use(self, index: int, step: Step) -> None:
        """Use a group: backward reads the tensors that it saved.

        Raises:
            Refusal: One of them has not been reloaded.
        """
        for storage in self._moved[step.key]:
            if self._location[storage] is not _Location.RELOADED:
                action = Action(ActionKind.H2D, step.key, step.name)
                location = self._location[storage].value
                detail = f"at {step}, step {index}, storage {storage}: {location}"
                raise Refusal(SafetyProperty.BACK_BEFORE_USE, action, detail)
            self._use_step.setdefault(storage, index)
        self._issue(index, step, self._moved[step.key], OpKind.USE)

    def _issue(
        self, index: int, cause: Action | Step, storages: Sequence[int], *kinds: OpKind
    ) -> None:
        """Issue one operation of each kind for all storages, since the engine batches them."""
        if storages:
            for kind in kinds:
                self.issue(Operation(kind, index, cause, tuple(storages)))
