# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Builds a plan (the actions at each step) from a trace and a selection of groups."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron.slipstream.plan.actions import (
    GroupPlan,
    Plan,
    StoragePlan,
    absent_bytes,
    peak_host_bytes,
)
from megatron.slipstream.plan.candidates import (
    HELD_BY_KEPT,
    HELD_OUTSIDE,
    HOST_MEMORY,
    LINGERS,
    NO_TIME,
    RECOMPUTED,
    Kept,
    PolicyOptions,
    select_groups,
)
from megatron.slipstream.plan.host_layout import size_class_bytes
from megatron.slipstream.plan.model import Floats, IterationModel
from megatron.slipstream.plan.search import MAX_STEPS_OF_CHANGES
from megatron.slipstream.plan.selection import Selection, keep_to_inflight_limit, may_hide, select
from megatron.slipstream.plan.trace import GroupKey, GroupTrace, StepKind, Trace


def build_plan(trace: Trace, options: PolicyOptions, max_steps: int = MAX_STEPS_OF_CHANGES) -> Plan:
    """Build the plan for iterations like the one in ``trace``.

    A storage moves if every group that holds it moves and nothing else holds it. Its D2H copy
    starts when the first of those groups commits, its device memory is freed when the last one
    releases it, and it is reloaded before the first one is used.

    If the trace has ``step_ms`` and ``bandwidth``, groups are freed and reloaded at the cheapest
    times, and a target may decide which groups move; otherwise, the options give both as numbers of
    marks. ``max_steps`` limits the work for a target: see :meth:`GroupSearch.for_memory`.
    """
    return plan_of(IterationModel(trace), options, max_steps)


def plan_of(model: IterationModel, options: PolicyOptions, max_steps: int) -> Plan:
    """Build the plan of an iteration: see :func:`build_plan`."""
    trace, moves = model.trace, decide(model, options, max_steps)
    selection, storages = moves.selection, moves.storages
    planned = frozenset(storage.index for storage in storages)
    kept_storages = _kept_storages(trace, selection.moving) | dict.fromkeys(moves.staying, LINGERS)
    groups = []
    for group in trace.groups:
        if group.key in selection.moving:
            timing = selection.steps[group.key]
            groups.append(_group_plan(trace, group, planned, kept_storages, timing))
        else:
            groups.append(GroupPlan(group.key, group.name, False, selection.kept[group.key]))
    needed_bytes = peak_host_bytes(len(trace.steps), moves.unlimited)
    notes, bound = selection.notes, selection.bound
    return Plan(trace, options, tuple(groups), storages, needed_bytes, notes, bound)


class Moves(NamedTuple):
    """What moves in an iteration, and when."""

    selection: Selection
    storages: tuple[StoragePlan, ...]
    """The storages that move."""
    unlimited: tuple[StoragePlan, ...]
    """Those that would move if host memory had no limit."""
    staying: frozenset[int] = frozenset()
    """Storages that stay because they outlive their release."""


def decide(model: IterationModel, options: PolicyOptions, max_steps: int = 0) -> Moves:
    """Decide what moves, and when: see :func:`build_plan`."""
    moves = first = _select(model, options, max_steps)
    staying: frozenset[int] = frozenset()
    while useless := _lingering_for_nothing(model, moves.storages):
        # The other groups were timed with these also using the link and host memory.
        staying |= useless
        model = IterationModel(_without(model.trace, useless))
        moves = _select(model, options, max_steps)
    return moves._replace(unlimited=first.unlimited, staying=staying)


def peak_by_count(model: IterationModel, options: PolicyOptions) -> int:
    """Return the device peak of the plan without times, which an iteration follows at first."""
    options = replace(options, target_memory_bytes=None, max_overhead_percent=None)
    absent = absent_bytes(model.trace, decide(model.untimed, options).storages)
    return int((model.present_bytes - absent).max(initial=0.0))


def _select(model: IterationModel, options: PolicyOptions, max_steps: int) -> Moves:
    moving, reasons = select_groups(model.trace, options)
    selection = select(model, options, moving, reasons, max_steps)
    storages = unlimited = storage_plans(model, selection.moving, selection.steps)
    candidates = moving | may_hide(model.trace, options, reasons)
    limit = options.host_memory_limit_bytes
    # This comes last, since groups kept by other policies need no host memory.
    kept = kept_for_host_memory(model, candidates, storages, limit)
    if kept:
        reasons |= kept
        selection = select(model, options, moving - reasons.keys(), reasons, max_steps)
        storages = storage_plans(model, selection.moving, selection.steps)
    if options.max_inflight_offloads is not None:
        selection = keep_to_inflight_limit(model.trace, options.max_inflight_offloads, selection)
        storages = storage_plans(model, selection.moving, selection.steps)
    return Moves(selection, storages, unlimited)


def _without(trace: Trace, staying: Collection[int]) -> Trace:
    """Return the trace with some storages marked as unable to move."""
    storages = tuple(
        replace(storage, held_outside=True) if index in staying else storage
        for index, storage in enumerate(trace.storages)
    )
    return replace(trace, storages=storages)


def kept_for_host_memory(
    model: IterationModel,
    candidates: frozenset[GroupKey],
    storages: Sequence[StoragePlan],
    limit_bytes: int | None,
) -> Kept:
    """Return the groups that stay since host memory is limited; none if the limit is kept.

    In a timed trace, the steps of moving groups depend on which groups stay. With the longest
    intervals in which storages could need host memory, no choice of steps exceeds the limit.

    Args:
        model: The iteration.
        candidates: The groups that may move.
        storages: The storages that move without a limit.
        limit_bytes: The limit; None for none.
    """
    if limit_bytes is None or peak_host_bytes(len(model.trace.steps), storages) <= limit_bytes:
        return {}
    if model.trace.is_timed:
        windows = [(index, model.windows[index]) for index in model.moving_storages(candidates)]
        storages = [
            StoragePlan(index, window.nbytes, window.begin, window.first, window.stop, window.stop)
            for index, window in windows
            if window is not None
        ]
    return _keep_within(model, candidates, storages, limit_bytes)


def _keep_within(
    model: IterationModel,
    candidates: frozenset[GroupKey],
    storages: Sequence[StoragePlan],
    limit_bytes: int,
) -> Kept:
    """Keep whole groups until host memory is within the limit.

    At a step above the limit, keep those groups with host memory whose backward comes next: they
    have the shortest time left on the host. In a pipeline, this keeps equally many groups of each
    micro-batch.
    """
    kept: Kept = {}
    trace, changes = model.trace, [0] * len(model.trace.steps)
    nbytes = {item.index: size_class_bytes(item.nbytes) for item in storages}
    for item in storages:
        changes[item.d2h_step] += nbytes[item.index]
        changes[item.h2d_step] -= nbytes[item.index]
    away = {item.index: item for item in storages}
    in_use = 0
    # All D2H copies of a group's storages are issued by its commit, so it counts for all of them
    # from there on.
    by_use: list[tuple[int, GroupKey]] = []
    for step, mark in enumerate(trace.steps):
        in_use += changes[step]
        if mark.kind is StepKind.FORWARD_COMMIT and mark.key in candidates:
            heapq.heappush(by_use, (model.uses[mark.key], mark.key))
        while in_use > limit_bytes:
            _, key = heapq.heappop(by_use)
            held = [away[i] for i in trace.group_by_key[key].storages if i in away]
            if all(item.h2d_step <= step for item in held):
                continue  # It has been reloaded by then.
            kept[key] = HOST_MEMORY
            for item in held:
                del away[item.index]
                if step < item.h2d_step:
                    in_use -= nbytes[item.index]
                    changes[item.h2d_step] += nbytes[item.index]
    return kept


def _group_plan(
    trace: Trace,
    group: GroupTrace,
    planned: frozenset[int],
    kept_storages: Mapping[int, str],
    timing: tuple[int, int],
) -> GroupPlan:
    """Return the plan of a group selected to move; it stays if all of its storages stay."""
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


def _kept_storages(trace: Trace, moving: frozenset[GroupKey]) -> dict[int, str]:
    """Return the storages that stay, with the reason for each."""
    kept = {}
    for index in set(range(len(trace.storages))).difference(trace.moving_storages(moving)):
        storage = trace.storages[index]
        if storage.held_outside:
            kept[index] = RECOMPUTED if storage.is_recomputed else HELD_OUTSIDE
        else:
            kept[index] = HELD_BY_KEPT
    return kept


def _lingering_for_nothing(
    model: IterationModel, storages: Sequence[StoragePlan]
) -> frozenset[int]:
    """Return storages that outlive their release and whose move does not lower the peak.

    That must hold both with and without the gradients that the iteration allocated: whether they
    stay allocated is not known yet, and the step of the peak may change if they do.
    """
    lingering = [item for item in storages if item.gone_step(model.trace) > item.free_step]
    if not lingering:
        return frozenset()
    useless = frozenset(item.index for item in lingering)
    for present in (model.present_bytes, model.present_beside_gradients_bytes):
        if present is not None:
            useless &= _lowering_no_peak(model.trace, storages, lingering, present.copy())
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


def storage_plans(
    model: IterationModel,
    moving: frozenset[GroupKey],
    timing: Mapping[GroupKey, tuple[int, int]],
) -> tuple[StoragePlan, ...]:
    """Return the plans of the storages that move if these groups do, with the steps of each."""
    plans, commits, uses = [], model.commits, model.uses
    for index in model.trace.moving_storages(moving):
        storage = model.trace.storages[index]
        holders = storage.holders
        free_step = max([timing[key][0] for key in holders])
        h2d_step = min([timing[key][1] for key in holders])
        if free_step < h2d_step:
            commit = min([commits[key] for key in holders])
            use = min([uses[key] for key in holders])
            plans.append(StoragePlan(index, storage.nbytes, commit, free_step, h2d_step, use))
    return tuple(plans)
