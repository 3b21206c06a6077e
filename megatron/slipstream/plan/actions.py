# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The plan data model: the steps at which each moving group and storage is copied and released."""

from __future__ import annotations

import enum
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple, Optional

from megatron.slipstream.plan.candidates import (
    HOST_MEMORY,
    PolicyOptions,
)
from megatron.slipstream.plan.host_layout import size_class_bytes
from megatron.slipstream.plan.trace import KINDS_OF_BACKWARD, GroupKey, Trace, bytes_by_step


class ActionKind(enum.Enum):
    """The kinds of actions on a group, beyond what its marks imply."""

    D2H = "D2H"
    """Start copying its storages to the host."""
    FREE = "FREE"
    """Release its device memory; a storage is freed when the last group releases it."""
    H2D = "H2D"
    """Start copying its storages back to the device."""

    __hash__ = object.__hash__  # Enum's is a Python function, and lookups of actions are hot.


class Action(NamedTuple):
    """One action on one group. ``str(action)`` is its name in logs, figures and errors."""

    kind: ActionKind
    key: GroupKey
    name: str

    def __str__(self) -> str:
        return f"{self.key}.{self.name}:{self.kind.value}"


@dataclass(frozen=True)
class GroupPlan:
    """The plan of one group. Step numbers index :attr:`Trace.steps`."""

    key: GroupKey
    name: str
    moves: bool
    reason: str = ""
    """Why the group stays, if it does."""
    kept_storages: Mapping[int, str] = field(default_factory=dict)
    """Why each storage of a moving group that stays does so, by position in
    :attr:`GroupTrace.storages`."""
    moved_nbytes: int = 0
    """Bytes that this group offloads, counting only storages that it saves first."""
    commit_step: int = -1
    free_step: int = -1
    h2d_step: int = -1
    use_step: int = -1


@dataclass(frozen=True)
class StoragePlan:
    """The plan of one moving storage: host-only from :meth:`gone_step` until ``h2d_step``."""

    index: int
    nbytes: int
    d2h_step: int
    free_step: int
    h2d_step: int
    use_step: int

    def gone_step(self, trace: Trace) -> int:
        """Return the step at which its device memory is freed (``h2d_step`` if it never is)."""
        gone = self.free_step
        # An invalid plan, rendered for its error, may name storages that are not in the trace.
        if 0 <= self.index < len(trace.storages):
            gone = max(gone, trace.storages[self.index].lingers_until)
        return min(gone, self.h2d_step)


@dataclass(frozen=True)
class Bound:
    """The predicted objective of a plan, and a lower bound on it for any plan."""

    quantity: Literal["peak_bytes", "stall_ms"]
    """The objective: the device peak, or the time that compute stalls on copies."""
    lower: float
    """Lower bound for all plans within the same limit."""
    reached: float
    """Value that this plan reaches."""


@dataclass(frozen=True)
class Plan:
    """The plan of an iteration: the trace it was built from, and the actions at each step."""

    trace: Trace
    options: PolicyOptions
    groups: tuple[GroupPlan, ...]
    storages: tuple[StoragePlan, ...]
    """The storages that move."""
    needed_host_bytes: int = 0
    """Peak host memory in use if there were no limit, in whole buffers."""
    notes: tuple[str, ...] = ()
    """Notes for the user: options that could not be honored, and why."""
    bound: Optional[Bound] = None
    """The bound, if the plan comes from a search for a target."""

    @cached_property
    def group_by_key(self) -> dict[GroupKey, GroupPlan]:
        """The group plans by key."""
        return {group.key: group for group in self.groups}

    def tracks(self, key: GroupKey) -> bool:
        """Return whether the group's saved tensors must be tracked.

        For a group that stays, only if reading them is the only sign of its use.
        """
        return self.group_by_key[key].moves or self.trace.group_by_key[key].is_read_first

    @cached_property
    def silent(self) -> frozenset[GroupKey]:
        """Groups that need no marks in backward: they stay, and no action is due there."""
        acting = itertools.compress(self.trace.steps, self.actions)
        due = {step.key for step in acting if step.kind in KINDS_OF_BACKWARD}
        return frozenset(g.key for g in self.groups if not self.tracks(g.key) and g.key not in due)

    @cached_property
    def actions(self) -> tuple[tuple[Action, ...], ...]:
        """For each step, the actions to perform when its mark is reached, in order.

        D2H copies precede frees, since with no lag a group does both at its commit. H2D copies run
        one after another, so they are in the order in which backward needs them.
        """
        by_step: dict[int, list[Action]] = defaultdict(list)
        order = (ActionKind.D2H, ActionKind.FREE, ActionKind.H2D)
        for group in sorted(self.groups, key=lambda group: group.use_step):
            if group.moves:
                steps = (group.commit_step, group.free_step, group.h2d_step)
                for kind, step in zip(order, steps, strict=True):
                    by_step[step].append(Action(kind, group.key, group.name))
        for actions in by_step.values():
            actions.sort(key=lambda action: order.index(action.kind))
        return tuple(tuple(by_step[index]) for index in range(len(self.trace.steps)))

    @property
    def moved_nbytes(self) -> int:
        """Bytes offloaded in one iteration (each is reloaded once)."""
        return sum(storage.nbytes for storage in self.storages)

    @cached_property
    def absent_bytes(self) -> tuple[int, ...]:
        """For each step, the managed bytes that are only on the host until the next step."""
        return absent_bytes(self.trace, self.storages)

    @cached_property
    def device_bytes(self) -> tuple[int, ...]:
        """:attr:`Trace.present_bytes` without the bytes that are offloaded."""
        return tuple(map(int.__sub__, self.trace.present_bytes, self.absent_bytes))

    @cached_property
    def peak_host_bytes(self) -> int:
        """Peak host memory in use, in whole buffers."""
        return peak_host_bytes(len(self.trace.steps), self.storages)

    @cached_property
    def num_kept_for_host_memory(self) -> int:
        """Number of groups that stay because of the host memory limit."""
        return sum(group.reason == HOST_MEMORY for group in self.groups)

    def peak_bytes(self) -> tuple[int, int] | None:
        """Return the device peak without and with this plan, in bytes; None without readings."""
        if not self.trace.memory:
            return None
        return max(self.trace.present_bytes), max(self.device_bytes)

    @property
    def peak_drop_bytes(self) -> int | None:
        """Bytes by which the plan lowers the device peak; None without memory readings."""
        peaks = self.peak_bytes()
        return None if peaks is None else peaks[0] - peaks[1]


def absent_bytes(trace: Trace, storages: Sequence[StoragePlan]) -> tuple[int, ...]:
    """Return, per step, the bytes of these storages that are only on the host until the next."""
    away = ((item.gone_step(trace), item.h2d_step, item.nbytes) for item in storages)
    return tuple(bytes_by_step(len(trace.steps), away))


def peak_host_bytes(num_steps: int, storages: Sequence[StoragePlan]) -> int:
    """Return the peak host memory in use, in whole buffers; D2H copies precede H2D copies."""
    in_use = ((one.d2h_step, one.h2d_step + 1, size_class_bytes(one.nbytes)) for one in storages)
    return max(bytes_by_step(num_steps, in_use), default=0)
