# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Selects which of the groups that the policies allow move, and when: by marks or by time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from megatron.slipstream.plan.actions import Bound
from megatron.slipstream.plan.candidates import (
    BACKWARD_FOLLOWS,
    CANNOT_HIDE,
    NO_TIME,
    NOT_NEEDED_FOR_PEAK,
    NOT_NEEDED_FOR_TARGET,
    NOT_WORTH_THE_WAIT,
    Kept,
    PolicyOptions,
)
from megatron.slipstream.plan.model import IterationModel
from megatron.slipstream.plan.move_all import choose_as_given
from megatron.slipstream.plan.search import (
    MAX_STEPS_OF_CHANGES,
    Choice,
    GroupSearch,
    choose_for_time,
)
from megatron.slipstream.plan.trace import GroupKey, StepKind, Trace


@dataclass(frozen=True)
class Selection:
    """The groups that move, when they move, and why the others stay."""

    moving: frozenset[GroupKey]
    kept: Kept
    """The reason for each group that stays."""
    steps: Mapping[GroupKey, tuple[int, int]]
    """For each moving group, the steps of its FREE and its H2D."""
    notes: tuple[str, ...] = ()
    bound: Bound | None = None


def may_hide(trace: Trace, options: PolicyOptions, kept: Kept) -> frozenset[GroupKey]:
    """Return groups kept only because their backward follows; their copies may hide if timed.

    With a fraction below 1, there are none: the user chooses which groups stay.
    """
    if not trace.is_timed or options.activation_offload_fraction < 1.0:
        return frozenset()
    return frozenset(key for key, reason in kept.items() if reason == BACKWARD_FOLLOWS)


def keep_to_inflight_limit(trace: Trace, limit: int, selection: Selection) -> Selection:
    """Return the selection with memory released early enough for ``max_inflight_offloads``.

    Releasing earlier is always possible: compute then waits for the D2H copy.
    """
    commits: dict[str, list[int]] = {}
    of_group: dict[GroupKey, tuple[list[int], int]] = {}
    for index, step in enumerate(trace.steps):
        if step.kind is StepKind.FORWARD_COMMIT and step.key in selection.moving:
            of_name = commits.setdefault(step.name, [])
            of_group[step.key] = (of_name, len(of_name))
            of_name.append(index)
    steps = dict(selection.steps)
    for key, (of_name, rank) in of_group.items():
        free_step, h2d_step = steps[key]
        if rank + limit < len(of_name):
            steps[key] = (min(free_step, of_name[rank + limit]), h2d_step)
    return replace(selection, steps=steps)


def select(
    model: IterationModel,
    options: PolicyOptions,
    moving: frozenset[GroupKey],
    kept: Kept,
    max_steps: int = MAX_STEPS_OF_CHANGES,
) -> Selection:
    """Decide which of the groups that the policies allow move, and when.

    Args:
        model: The iteration.
        options: Lag and depth determine the steps of an untimed trace, and the reference peak of a
            timed one. A target or an allowed overhead requires times.
        moving: The groups that the policies allow to move.
        kept: The reason for every other group.
        max_steps: See :meth:`GroupSearch.for_memory`.
    """
    trace, why_not = model.trace, why_not_followed(model.trace, options)
    if not trace.is_timed and _fits_without_moving(trace, options):
        return Selection(frozenset(), {**dict.fromkeys(moving, NOT_NEEDED_FOR_TARGET), **kept}, {})
    if why_not:
        options = replace(options, target_memory_bytes=None, max_overhead_percent=None)
    optional = may_hide(trace, options, kept)
    if options.target_memory_bytes is not None:
        return _select_for_memory(model, moving | optional, kept, options, max_steps)
    if options.max_overhead_percent is not None:
        return _select_for_time(model, moving | optional, kept, options.max_overhead_percent)
    by_count = _select_by_count(model, options, moving, kept)
    if not trace.is_timed:
        return replace(by_count, steps=_away_at_the_peak(model, by_count), notes=why_not)
    fitting = model.fitting_groups(moving | optional)
    choice = choose_as_given(
        model,
        by_count.moving,
        fitting & moving - by_count.moving,
        fitting & optional,
        by_count.steps,
    )
    given_up = dict.fromkeys(by_count.moving - choice.moving, NOT_WORTH_THE_WAIT)
    return replace(_selection(model, choice, by_count.kept | given_up), notes=why_not)


def _fits_without_moving(trace: Trace, options: PolicyOptions) -> bool:
    """Return whether the device peak is within a budget with nothing moved.

    A budget's iterations are recorded again before they settle. Another target's first plan may
    not have seen gradients that stay.
    """
    target_bytes = options.target_memory_bytes
    is_budget = options.target_option != PolicyOptions.target_option
    if target_bytes is None or not is_budget or not trace.memory:
        return False
    return max(trace.present_bytes) <= target_bytes


def _select_by_count(
    model: IterationModel, options: PolicyOptions, moving: frozenset[GroupKey], kept: Kept
) -> Selection:
    steps = _count_steps(model, options)
    late = {key: NO_TIME for key in moving if not 0 <= steps[key][0] < steps[key][1]}
    return Selection(moving - late.keys(), {**kept, **late}, steps)


def _count_steps(model: IterationModel, options: PolicyOptions) -> dict[GroupKey, tuple[int, int]]:
    """Return, for each group, the steps of its FREE and its H2D copy (-1: never)."""
    commits, uses = list(model.commits.values()), list(model.uses.values())
    free_step = dict(zip(model.commits, commits[options.release_lag :], strict=False))
    uses_before = [*uses[:1] * options.prefetch_depth, *uses]
    h2d_step = dict(zip(model.uses, uses_before, strict=False))
    return {
        group.key: (free_step.get(group.key, -1), h2d_step.get(group.key, -1))
        for group in model.trace.groups
    }


def _away_at_the_peak(
    model: IterationModel, selection: Selection
) -> dict[GroupKey, tuple[int, int]]:
    """Return the steps, adjusted for groups that would be on the device at the peak needlessly.

    If the peak lies between a group's commit and its FREE, its memory is freed at the peak. If an
    H2D copy starts before the peak, it is delayed to the end of a group after the peak. Without
    times it is unknown whether the copies are still hidden, so only the first plan, before any
    measurement, does this; a timed plan frees as early and reloads as late as costs nothing.
    """
    trace, steps = model.trace, dict(selection.steps)
    jobs = model.jobs(selection.moving) if trace.memory else []
    if not jobs:
        return steps
    ends = [i for i, step in enumerate(trace.steps) if step.kind is StepKind.BACKWARD_END]
    commit, use, nbytes = np.array([(job.commit, job.use, job.in_bytes) for job in jobs]).T
    free, h2d = np.array([steps[job.key] for job in jobs]).T
    while True:
        change = np.zeros(len(trace.steps) + 1)
        np.subtract.at(change, free, nbytes)
        np.add.at(change, h2d, nbytes)
        peak = int((model.present_bytes + change.cumsum()[:-1]).argmax())
        end = next((step for step in ends if step > peak), len(trace.steps))
        is_leaving = (commit < peak) & (peak < free)
        is_back = (free <= peak) & (h2d <= peak) & (end < use)
        if not (is_leaving | is_back).any():
            break
        free[is_leaving], h2d[is_back] = peak, end
    for job, *away in zip(jobs, free.tolist(), h2d.tolist(), strict=True):
        steps[job.key] = away[0], away[1]
    return steps


def why_not_followed(trace: Trace, options: PolicyOptions) -> tuple[str, ...]:
    """Return notes on options that cannot be honored with this trace, with the reason."""
    lacks = "" if trace.is_timed else "times of computation and copies"
    if options.target_memory_bytes is not None:
        if not lacks and not trace.memory:
            lacks = "readings of device memory"
        name = describe_target(options)
    elif options.max_overhead_percent is not None:
        name = _overhead(options.max_overhead_percent)
    else:
        return ()
    return (f"{name} is not followed: there are no {lacks}; all that may moves",) if lacks else ()


def _select_for_memory(
    model: IterationModel,
    movable: frozenset[GroupKey],
    kept: Kept,
    options: PolicyOptions,
    max_steps: int,
) -> Selection:
    target_bytes = options.target_memory_bytes
    assert target_bytes is not None
    fitting = model.fitting_groups(movable)
    choice, bound = GroupSearch(model, fitting).for_memory(target_bytes, max_steps)
    notes: tuple[str, ...] = ()
    excess = choice.timing.peak_bytes - target_bytes
    if excess > 0:
        notes = (
            f"{describe_target(options)} cannot be met: the lowest peak that the groups "
            f"that may move allow is {_gib(choice.timing.peak_bytes)}, {_gib(excess)} more; let "
            "more modules move, or raise the target",
        )
    reasons = {**kept, **dict.fromkeys(fitting - choice.moving, NOT_NEEDED_FOR_TARGET)}
    return replace(_selection(model, choice, reasons, movable - fitting), notes=notes, bound=bound)


def _select_for_time(
    model: IterationModel, movable: frozenset[GroupKey], kept: Kept, max_percent: float
) -> Selection:
    fitting = model.fitting_groups(movable)
    budget_ms = max_percent / 100 * model.compute_ms
    choice, bound = choose_for_time(model, fitting, budget_ms)
    reasons = {**kept, **_why_kept(model, fitting - choice.moving, choice)}
    notes: tuple[str, ...] = ()
    if fitting and not choice.moving:
        notes = (
            f"{_overhead(max_percent)}: nothing moves, since whatever lowers the peak "
            f"costs more than {budget_ms:.3g} ms of an iteration of {model.compute_ms:.4g}"
            + _host_cost(model.trace),
        )
    return replace(_selection(model, choice, reasons, movable - fitting), notes=notes, bound=bound)


def _why_kept(model: IterationModel, keys: frozenset[GroupKey], choice: Choice) -> Kept:
    """Return why each group stays, depending on whether moving it would lower the peak."""
    absent = choice.timing.absent_bytes
    present = model.present_bytes - absent
    peaks = present >= choice.timing.peak_bytes
    kept = dict.fromkeys(keys, NOT_NEEDED_FOR_PEAK)
    for job in model.jobs(keys | choice.moving):
        if job.key in kept and peaks[job.commit : job.use].any():
            kept[job.key] = CANNOT_HIDE
    return kept


def _selection(
    model: IterationModel,
    choice: Choice,
    kept: Kept,
    without_jobs: frozenset[GroupKey] = frozenset(),
) -> Selection:
    """Convert a choice to a selection.

    Groups whose storages all stay because another holder stays count as moving; the reason is then
    recorded per storage.
    """
    commits, uses = model.commits, model.uses
    moving = choice.moving | without_jobs
    steps = dict(choice.timing.steps)
    late = {}
    for key in moving - steps.keys():
        if key in commits:
            steps[key] = commits[key], uses[key]
        else:
            late[key] = NO_TIME
    reasons = {key: reason for key, reason in kept.items() if key not in moving}
    return Selection(moving - late.keys(), {**reasons, **late}, steps)


def _host_cost(trace: Trace) -> str:
    if not trace.moving_cost_ms(1, 1):
        return ""
    return (
        f" (as measured, each group that moves adds {trace.ms_per_moved_group:.2g} ms, or each GB "
        f"{trace.ms_per_moved_gb:.2g} ms, whichever is more)"
    )


def describe_target(options: PolicyOptions) -> str:
    """Return the limit on the device peak, with the user's option that sets it."""
    target_gib = (options.target_memory_bytes or 0) / 2**30
    if options.target_option == PolicyOptions.target_option:
        return f"offload_target_memory_gib={target_gib:.4g}"
    return f"the device peak of {target_gib:.4g} GiB that {options.target_option} allows"


def _overhead(max_percent: float) -> str:
    return f"offload_max_overhead_percent={max_percent:g}"


def _gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
