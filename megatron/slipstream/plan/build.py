# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""From a trace and a selection of groups to a plan: what is done at which step."""

from __future__ import annotations

import enum
import itertools
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, Optional

from megatron.slipstream.plan.host_memory import size_class_bytes
from megatron.slipstream.plan.limits import Bound
from megatron.slipstream.plan.policy import (
    HELD_BY_KEPT,
    HELD_OUTSIDE,
    HOST_MEMORY,
    LINGERS,
    NO_TIME,
    RECOMPUTED,
    HostInterval,
    PolicyOptions,
    keep_within_host_memory,
    peak_in_use_bytes,
    select_groups,
)
from megatron.slipstream.plan.selection import Selection, keep_to_inflight_limit, may_hide, select
from megatron.slipstream.plan.trace import GroupKey, GroupTrace, StepKind, Trace
from megatron.slipstream.plan.workload import Floats, Workload


class ActionKind(enum.Enum):
    """What the manager does for a group, beside what its marks imply."""

    D2H = "D2H"
    """Start copying its storages to the host."""
    FREE = "FREE"
    """Release the device memory; the last group to release a storage frees it."""
    H2D = "H2D"
    """Start copying its storages back to the device."""

    __hash__ = object.__hash__  # Enum's own is a Python function, and actions are looked up a lot.


class Action(NamedTuple):
    """One thing to do for one group. ``str(action)`` is its name in logs, pictures and errors."""

    kind: ActionKind
    key: GroupKey
    name: str

    def __str__(self) -> str:
        return f"{self.key}.{self.name}:{self.kind.value}"


@dataclass(frozen=True)
class GroupPlan:
    """What happens to one group. Step numbers index :attr:`Trace.steps`."""

    key: GroupKey
    name: str
    moves: bool
    reason: str = ""
    """Why it stays, if it stays."""
    kept_storages: Mapping[int, str] = field(default_factory=dict)
    """Storages of a moving group that stay, by position in :attr:`GroupTrace.storages`, with the
    reason."""
    moved_nbytes: int = 0
    """Bytes copied out on this group's account (storages that it is the first to save)."""
    commit_step: int = -1
    free_step: int = -1
    h2d_step: int = -1
    use_step: int = -1


@dataclass(frozen=True)
class StoragePlan:
    """When one moving storage is away: from :meth:`gone_step` up to ``h2d_step``."""

    index: int
    nbytes: int
    d2h_step: int
    free_step: int
    h2d_step: int
    use_step: int

    def gone_step(self, trace: Trace) -> int:
        """The step at which its device memory is gone (``h2d_step`` if it never is)."""
        # A plan that is drawn because it is wrong may name storages that are not in the trace.
        storages = trace.storages[self.index : self.index + 1]
        gone = max([self.free_step, *(storage.lingers_until for storage in storages)])
        return min(gone, self.h2d_step)


@dataclass(frozen=True)
class Plan:
    """A decided iteration: the trace it was made from, and what is done at each of its steps."""

    trace: Trace
    options: PolicyOptions
    groups: tuple[GroupPlan, ...]
    storages: tuple[StoragePlan, ...]
    """Only those that move."""
    needed_host_bytes: int = 0
    """The most host memory that would be in use at once without a limit, in whole buffers."""
    notes: tuple[str, ...] = ()
    """What the user should know: an option that could not be followed, and why."""
    bound: Optional[Bound] = None
    """How good any plan could be, if one was sought for a target."""

    @cached_property
    def group_by_key(self) -> dict[GroupKey, GroupPlan]:
        """The group plans by key."""
        return {group.key: group for group in self.groups}

    @cached_property
    def actions(self) -> tuple[tuple[Action, ...], ...]:
        """For each step, what is done once its mark is reached, in this order.

        Copies out come before frees, since with no lag a group does both at its commit. Copies
        back run one after another, so they come in the order in which backward needs them.
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
        """Bytes that leave the device in one iteration (each returns once)."""
        return sum(storage.nbytes for storage in self.storages)

    @cached_property
    def absent_bytes(self) -> tuple[int, ...]:
        """For each step, the managed bytes that are on the host until the next step."""
        return absent_bytes(self.trace, self.storages)

    @cached_property
    def device_bytes(self) -> tuple[int, ...]:
        """For each step, the most device memory until the next one: :attr:`Trace.present_bytes`
        without what is away."""
        return tuple(map(int.__sub__, self.trace.present_bytes, self.absent_bytes))

    @cached_property
    def peak_host_bytes(self) -> int:
        """The most host memory that is in use at once, in whole buffers."""
        return peak_in_use_bytes(len(self.trace.steps), _host_intervals(self.storages))

    @property
    def num_kept_for_host_memory(self) -> int:
        """Groups that stay because host memory is limited."""
        return sum(group.reason == HOST_MEMORY for group in self.groups)

    def peak_bytes(self) -> tuple[int, int] | None:
        """The device peak without and with this plan, in bytes; None without memory readings."""
        if not self.trace.memory:
            return None
        return max(self.trace.present_bytes), max(self.device_bytes)

    @property
    def peak_drop_bytes(self) -> int | None:
        """By how many bytes the plan lowers the device peak; None without memory readings."""
        peaks = self.peak_bytes()
        return None if peaks is None else peaks[0] - peaks[1]


def absent_bytes(trace: Trace, storages: Sequence[StoragePlan]) -> tuple[int, ...]:
    """For each step, the bytes of some moving storages that are away until the next step."""
    change = [0] * (len(trace.steps) + 1)
    for storage in storages:
        change[storage.gone_step(trace)] += storage.nbytes
        change[storage.h2d_step] -= storage.nbytes
    return tuple(itertools.accumulate(change[:-1]))


def build_plan(trace: Trace, options: PolicyOptions) -> Plan:
    """Decide an iteration like the one in ``trace``.

    A storage moves if every group that holds it moves and nothing else holds it. It leaves at the
    commit of the first of them, its device memory goes when the last of them releases it, and it is
    back before the first of them is used.

    With ``step_ms`` and ``bandwidth`` in the trace, groups leave and return at the times that cost
    least, and a target may decide which do; without, at numbers of marks that the options give.
    """
    selection, storages, needed = _select(trace, options)
    staying: frozenset[int] = frozenset()
    while useless := _lingering_for_nothing(trace, storages):
        # When the rest moves was decided for a link and host memory that these use too.
        staying |= useless
        selection, storages, _ = _select(_without(trace, staying), options)
    planned = frozenset(storage.index for storage in storages)
    kept_storages = _kept_storages(trace, selection.moving) | dict.fromkeys(staying, LINGERS)
    groups = []
    for group in trace.groups:
        if group.key in selection.moving:
            timing = selection.steps[group.key]
            groups.append(_group_plan(trace, group, planned, kept_storages, timing))
        else:
            groups.append(GroupPlan(group.key, group.name, False, selection.kept[group.key]))
    return Plan(trace, options, tuple(groups), storages, needed, selection.notes, selection.bound)


def _select(trace: Trace, options: PolicyOptions) -> tuple[Selection, tuple[StoragePlan, ...], int]:
    """Which groups and storages move, and the host memory that they need without a limit of it."""
    moving, reasons = select_groups(trace, options)
    selection = select(trace, options, moving, reasons)
    storages = _storage_plans(trace, selection.moving, selection.steps)
    needed = peak_in_use_bytes(len(trace.steps), _host_intervals(storages))
    limit = options.host_memory_limit_bytes
    if limit is not None and needed > limit:
        # Last, since what every other policy keeps needs no host memory.
        candidates = moving | may_hide(trace, options, reasons)
        intervals = _host_intervals(storages)
        if trace.is_timed:
            intervals = _longest_intervals(trace, candidates)
        reasons |= keep_within_host_memory(trace, sorted(candidates), intervals, limit)
        selection = select(trace, options, moving - reasons.keys(), reasons)
        storages = _storage_plans(trace, selection.moving, selection.steps)
    inflight_limit = options.max_inflight_offloads
    if inflight_limit is not None:
        selection = keep_to_inflight_limit(trace, inflight_limit, selection)
        storages = _storage_plans(trace, selection.moving, selection.steps)
    return selection, storages, needed


def _without(trace: Trace, staying: Collection[int]) -> Trace:
    """The trace with some storages that cannot move."""
    storages = tuple(
        replace(storage, held_outside=True) if index in staying else storage
        for index, storage in enumerate(trace.storages)
    )
    return replace(trace, storages=storages)


def _longest_intervals(trace: Trace, moving: frozenset[GroupKey]) -> list[HostInterval]:
    """Host memory for as long as each storage could have it.

    In a timed trace, when the rest moves changes with what is kept. So no timing may need more.
    """
    workload, intervals = Workload(trace), []
    for index in workload.moving_storages(moving):
        window = workload.windows[index]
        if window is not None:
            nbytes = size_class_bytes(window.nbytes)
            intervals.append(HostInterval(index, nbytes, window.begin, window.stop))
    return intervals


def _group_plan(
    trace: Trace,
    group: GroupTrace,
    planned: frozenset[int],
    kept_storages: Mapping[int, str],
    timing: tuple[int, int],
) -> GroupPlan:
    """What happens to a group that is to move; it stays if all of its storages do."""
    stays = {
        position: kept_storages.get(index, NO_TIME)
        for position, index in enumerate(group.storages)
        if index not in planned
    }
    if len(stays) == len(group.storages):
        return GroupPlan(group.key, group.name, False, next(iter(stays.values())))
    moved = sum(
        trace.storages[index].nbytes
        for index in group.storages
        if index in planned and trace.storages[index].holders[0] == group.key
    )
    return GroupPlan(
        group.key,
        group.name,
        True,
        kept_storages=stays,
        moved_nbytes=moved,
        commit_step=trace.step_index[StepKind.FORWARD_COMMIT, group.key],
        free_step=timing[0],
        h2d_step=timing[1],
        use_step=trace.step_index[StepKind.BACKWARD_USE, group.key],
    )


def _host_intervals(storages: Sequence[StoragePlan]) -> list[HostInterval]:
    return [
        HostInterval(item.index, size_class_bytes(item.nbytes), item.d2h_step, item.h2d_step)
        for item in storages
    ]


def _kept_storages(trace: Trace, moving: frozenset[GroupKey]) -> dict[int, str]:
    """The storages that stay, with the reason."""
    kept = {}
    for index in set(range(len(trace.storages))).difference(trace.moving_storages(moving)):
        storage = trace.storages[index]
        if storage.held_outside:
            kept[index] = RECOMPUTED if storage.is_recomputed else HELD_OUTSIDE
        else:
            kept[index] = HELD_BY_KEPT
    return kept


def _lingering_for_nothing(trace: Trace, storages: Sequence[StoragePlan]) -> frozenset[int]:
    """Of those that something else holds for a while, the ones whose moving lowers no peak.

    Neither with the gradients that the iteration allocated nor without them: whether they stay from
    then on is not known yet, and the peak may lie elsewhere if they do.
    """
    lingering = [item for item in storages if item.gone_step(trace) > item.free_step]
    if not lingering:
        return frozenset()
    workload = Workload(trace)
    useless = frozenset(item.index for item in lingering)
    for present in (workload.present_bytes, workload.present_beside_gradients_bytes):
        if present is not None:
            useless &= _lowering_no_peak(trace, storages, lingering, present.copy())
    return useless


def _lowering_no_peak(
    trace: Trace,
    storages: Sequence[StoragePlan],
    lingering: Sequence[StoragePlan],
    present: Floats,
) -> frozenset[int]:
    for item in storages:
        present[item.gone_step(trace) : item.h2d_step] -= item.nbytes
    peak_bytes = present.max()
    useless = []
    for item in lingering:
        away = present[item.gone_step(trace) : item.h2d_step]
        if not len(away) or away.max() + item.nbytes <= peak_bytes:
            away += item.nbytes
            useless.append(item.index)
    return frozenset(useless)


def _storage_plans(
    trace: Trace,
    moving: frozenset[GroupKey],
    timing: Mapping[GroupKey, tuple[int, int]],
) -> tuple[StoragePlan, ...]:
    plans = []
    kept = _kept_storages(trace, moving)
    for index, storage in enumerate(trace.storages):
        if index in kept:
            continue
        commit = [trace.step_index[StepKind.FORWARD_COMMIT, key] for key in storage.holders]
        use = [trace.step_index[StepKind.BACKWARD_USE, key] for key in storage.holders]
        free_step = max(timing[key][0] for key in storage.holders)
        h2d_step = min(timing[key][1] for key in storage.holders)
        if free_step < h2d_step:
            plans.append(
                StoragePlan(index, storage.nbytes, min(commit), free_step, h2d_step, min(use))
            )
    return tuple(plans)
