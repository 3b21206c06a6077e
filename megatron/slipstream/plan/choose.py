# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Chooses, for a budget of device memory, what each layer recomputes and what moves.

The planner decides what moves for a given assignment of settings to layers; this module searches
the assignment around it. Every candidate is composed from templates and timed by the planner, so
that recomputation, which takes compute time, and copies, which take the link's, are compared in the
same iteration. See docs/design/planner.md, "Which layers recompute".
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Optional

from megatron.slipstream.plan.actions import Plan
from megatron.slipstream.plan.assignments import (
    NEAR,
    Limits,
    fastest,
    searched,
    shortest,
)
from megatron.slipstream.plan.build import plan_of
from megatron.slipstream.plan.candidates import PolicyOptions
from megatron.slipstream.plan.model import IterationModel
from megatron.slipstream.plan.settings import Assignment, LayerSetting
from megatron.slipstream.plan.templates import RankTemplates, Template
from megatron.slipstream.plan.walk import simulate

MAX_STEPS_PLANNED = 4_000
"""Maximum number of steps of an iteration that is planned as a whole."""
MAX_STEPS_OF_CHANGES = 10_000
"""Maximum total steps of the iterations that are timed to improve what moves in one plan."""
NUM_FINALISTS = 5
"""Number of assignments for which the whole iteration is planned, at most."""


class Limit(enum.Enum):
    """What keeps the step from being faster, or the peak from being lower."""

    NONE = "everything fits without recomputation, and copies hide behind computation"
    LINK = "the link: what is recomputed, or waited for, could not be copied in time"
    HOST = "host memory: what is recomputed would not fit there"
    DEVICE = "device memory: what is recomputed cannot move"
    STATE = "the budget: it is below what the most frugal settings need"


@dataclass(frozen=True)
class BudgetChoice:
    """What each layer of a rank recomputes, and the plan of what moves."""

    assignment: Assignment
    plan: Plan
    """The plan of the iteration, or of the first micro-batches of a long one, after which it
    repeats. Other fields are of the whole iteration."""
    peak_bytes: int
    """Predicted device peak."""
    total_ms: float
    """Predicted time of the iteration, with waits for copies."""
    fits: bool
    """Whether the peak is within the budget. If not, the assignment is that of the lowest peak."""
    limit: Limit
    moved_bytes: int
    """Bytes copied out in an iteration, and as many back."""
    recompute_ms: float
    """Time of recomputation in an iteration."""
    recomputed_bytes: int
    """Bytes of saved tensors that backward computes again, in an iteration."""
    fastest_ms: float
    """Time of the iteration if nothing were recomputed beyond the fastest settings, and no copy
    waited for: no choice is faster."""


def choose(
    rank: RankTemplates,
    budget_bytes: int,
    host_limit_bytes: Optional[int] = None,
    counting: Optional[PolicyOptions] = None,
) -> BudgetChoice:
    """Choose the fastest assignment and plan whose device peak is within a budget.

    Args:
        rank: The templates of the rank's layers, and its schedule.
        budget_bytes: Upper limit on the device peak, including :attr:`RankTemplates.state_bytes`.
        host_limit_bytes: Upper limit on host memory in use at once; None for no limit.
        counting: Options of the plan without times that the first iteration follows, which must be
            within the budget, too; None if there is no such iteration.

    Returns:
        The choice; the one of the lowest peak found if none is within the budget.

    Raises:
        ValueError: The rank has no bandwidth, so that nothing can be timed.
    """
    if rank.bandwidth is None:
        raise ValueError("the rank's bandwidth is None, so no copy can be timed; measure it")
    limits = Limits(budget_bytes, host_limit_bytes, counting)
    rank = replace(rank, templates={k: _undominated(v) for k, v in rank.templates.items()})
    search = searched(rank, limits)
    best: Optional[BudgetChoice] = None
    for assignment, score in itertools.islice(search.finalists(), NUM_FINALISTS):
        if best is not None and best.fits and score.total_ms >= best.total_ms * (1 - NEAR):
            break
        choice = planned(rank, assignment, limits)
        if best is None or _order(choice) < _order(best):
            best = choice
        if best.fits and best.total_ms <= score.total_ms * (1 + NEAR):
            break
    assert best is not None
    return replace(best, limit=_limit(best, search.host_costs_time))


def _order(choice: BudgetChoice) -> tuple[bool, float]:
    return not choice.fits, choice.total_ms if choice.fits else choice.peak_bytes


def planned(rank: RankTemplates, assignment: Assignment, limits: Limits) -> BudgetChoice:
    """Plan the iteration of a given assignment; :func:`choose` sets ``limit``."""
    chunks = rank.passes(assignment)
    forwards = [chunks[item.vp_stage] for item in rank.schedule if item.direction == "F"]
    templates = list(itertools.chain.from_iterable(item.templates for item in forwards))
    trace = rank.compose(assignment, marks_all=True)
    model = IterationModel(trace)
    counted_bytes = limits.counted_bytes(model)
    repeats = 1.0
    if len(trace.steps) > MAX_STEPS_PLANNED:
        first = shortest(rank.schedule)
        repeats = len(rank.schedule) / len(first)
        trace = replace(rank, schedule=first).compose(assignment, marks_all=True)
        model = IterationModel(trace)
    options = PolicyOptions(
        target_memory_bytes=limits.device_bytes, host_memory_limit_bytes=limits.host_bytes
    )
    plan = plan_of(model, options, MAX_STEPS_OF_CHANGES)
    waits_ms = simulate(plan).total_ms - sum(trace.step_ms)
    peak_bytes = max(counted_bytes, *plan.device_bytes)
    return BudgetChoice(
        assignment=assignment,
        plan=plan,
        peak_bytes=peak_bytes,
        total_ms=rank.compute_ms(assignment) + waits_ms * repeats,
        fits=peak_bytes <= limits.device_bytes,
        limit=Limit.NONE,
        moved_bytes=round(plan.moved_nbytes * repeats),
        recompute_ms=sum(item.recompute_ms for item in templates),
        recomputed_bytes=sum(item.recomputed_bytes for item in templates),
        fastest_ms=rank.compute_ms(fastest(rank)),
    )


def _limit(choice: BudgetChoice, host_costs_time: bool) -> Limit:
    if not choice.fits:
        return Limit.STATE
    if choice.total_ms <= choice.fastest_ms * (1 + NEAR):
        return Limit.NONE
    if host_costs_time:
        return Limit.HOST
    trace = choice.plan.trace
    movable = trace.moving_storages([group.key for group in trace.groups])
    waits = choice.total_ms > sum(trace.step_ms) * (1 + NEAR)
    return Limit.LINK if waits or len(movable) > len(choice.plan.storages) else Limit.DEVICE


def _undominated(templates: Mapping[LayerSetting, Template]) -> dict[LayerSetting, Template]:
    """Return the settings for which no other is as good in time and in memory, fastest first."""
    found: dict[LayerSetting, tuple[float, ...]] = {}
    for setting, item in sorted(templates.items(), key=lambda pair: pair[1].compute_ms):
        saved_bytes = item.in_forward.net_bytes + item.left_bytes
        costs = (
            item.compute_ms,
            saved_bytes - item.movable_bytes,
            saved_bytes,
            item.in_forward.peak_bytes,
            saved_bytes + item.in_backward.peak_bytes,
        )
        if not any(all(map(float.__le__, o, map(float, costs))) for o in found.values()):
            found[setting] = tuple(map(float, costs))
    return {setting: templates[setting] for setting in found}
