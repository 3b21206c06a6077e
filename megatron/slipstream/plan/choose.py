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
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Optional

from megatron.slipstream.plan.actions import Plan, host_intervals
from megatron.slipstream.plan.build import build_plan, longest_intervals, storage_plans
from megatron.slipstream.plan.candidates import (
    PolicyOptions,
    keep_within_host_memory,
    peak_in_use_bytes,
)
from megatron.slipstream.plan.model import IterationModel
from megatron.slipstream.plan.search import Choice, choose_for_memory, fitting_groups
from megatron.slipstream.plan.settings import Assignment, LayerSetting
from megatron.slipstream.plan.templates import (
    RankTemplates,
    ScheduledPass,
    Template,
)
from megatron.slipstream.plan.walk import simulate

MAX_STEPS_EXACT = 300
"""Maximum number of steps of an iteration that is searched with all marks of its layers. In longer
ones, all that may move of a layer, or of a run of layers, is one group."""
MAX_UNITS = 24
"""Maximum number of units (layers or runs of layers) that are searched first."""
MAX_STEPS_OF_SEARCH = 12_000
"""Maximum total steps of the iterations that are timed in one search."""
MAX_STEPS_OF_REFINING = 3_000
"""Maximum total steps of the iterations that are timed to improve what moves in one assignment."""
MAX_UNITS_IN_PAIRS = 8
"""Maximum number of units of which any two are changed at once. With more, two of a kind exchange
their settings."""
NUM_POLISHED = 3
"""Number of assignments that are improved unit by unit."""
NUM_FINALISTS = 3
"""Number of assignments for which the whole iteration is planned, at most."""
NEAR = 1e-3
"""Relative difference of step times at which the search stops."""


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
    peak_bytes: int
    """Predicted device peak."""
    total_ms: float
    """Predicted time of the iteration, with waits for copies."""
    fits: bool
    """Whether the peak is within the budget. If not, the assignment is that of the lowest peak."""
    limit: Limit
    recompute_ms: float
    """Time of recomputation in an iteration."""
    recomputed_bytes: int
    """Bytes of saved tensors that backward computes again, in an iteration."""
    fastest_ms: float
    """Time of the iteration if nothing were recomputed beyond the fastest settings, and no copy
    waited for: no choice is faster."""

    @property
    def moved_bytes(self) -> int:
        """Bytes copied out in an iteration, and as many back."""
        return self.plan.moved_nbytes


def choose(
    rank: RankTemplates, budget_bytes: int, host_limit_bytes: Optional[int] = None
) -> BudgetChoice:
    """Choose the fastest assignment and plan whose device peak is within a budget.

    Args:
        rank: The templates of the rank's layers, and its schedule.
        budget_bytes: Upper limit on the device peak, including :attr:`RankTemplates.state_bytes`.
        host_limit_bytes: Upper limit on host memory in use at once; None for no limit.

    Returns:
        The choice; the one of the lowest peak found if none is within the budget.

    Raises:
        ValueError: The rank has no bandwidth, so that nothing can be timed.
    """
    if rank.bandwidth is None:
        raise ValueError("the rank's bandwidth is None, so no copy can be timed; measure it")
    limits = PolicyOptions(
        target_memory_bytes=budget_bytes, host_memory_limit_bytes=host_limit_bytes
    )
    rank = replace(rank, templates={k: _undominated(v) for k, v in rank.templates.items()})
    search = _searched(rank, limits)
    best: Optional[BudgetChoice] = None
    for assignment, score in itertools.islice(search.finalists(), NUM_FINALISTS):
        if best is not None and best.fits and score.total_ms >= best.total_ms * (1 - NEAR):
            break
        planned = _planned(rank, assignment, limits)
        if best is None or _order(planned) < _order(best):
            best = planned
        if best.fits and best.total_ms <= score.total_ms * (1 + NEAR):
            break
    assert best is not None
    return replace(best, limit=_limit(best, search.host_costs_time))


def _order(choice: BudgetChoice) -> tuple[bool, float]:
    return not choice.fits, choice.total_ms if choice.fits else choice.peak_bytes


def _planned(rank: RankTemplates, assignment: Assignment, limits: PolicyOptions) -> BudgetChoice:
    """Plan the whole iteration for an assignment."""
    trace = rank.compose(assignment, marks_all=True)
    plan = build_plan(trace, limits)
    peak_bytes = max(plan.device_bytes)
    chunks = rank.passes(assignment)
    passes = [chunks[item.vp_stage] for item in rank.schedule if item.direction == "F"]
    templates = list(itertools.chain.from_iterable(item.templates for item in passes))
    assert limits.target_memory_bytes is not None
    return BudgetChoice(
        assignment,
        plan,
        peak_bytes,
        simulate(plan).total_ms,
        peak_bytes <= limits.target_memory_bytes,
        Limit.NONE,
        sum(item.recompute_ms for item in templates),
        sum(item.recomputed_bytes for item in templates),
        _compute_ms(rank, _fastest(rank)),
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
    for setting, item in sorted(templates.items(), key=lambda pair: _compute_ms_of(pair[1])):
        saved_bytes = item.in_forward.net_bytes
        costs = (
            _compute_ms_of(item),
            saved_bytes - item.movable_bytes,
            saved_bytes,
            item.in_forward.peak_bytes,
            saved_bytes + item.in_backward.peak_bytes,
        )
        if not any(all(map(float.__le__, o, map(float, costs))) for o in found.values()):
            found[setting] = tuple(map(float, costs))
    return {setting: templates[setting] for setting in found}


def _compute_ms_of(template: Template) -> float:
    return template.in_forward.ms + template.in_backward.ms


def _compute_ms(rank: RankTemplates, assignment: Assignment) -> float:
    """Return the time of an iteration without waits for copies."""
    chunks = rank.passes(assignment)
    ms = {"F": [c.forward_ms for c in chunks], "B": [c.backward_ms for c in chunks]}
    return sum(ms[item.direction][item.vp_stage] + item.wait_ms for item in rank.schedule)


def _fastest(rank: RankTemplates) -> Assignment:
    """Return the assignment with the least compute time; settings are sorted by it."""
    return tuple(next(iter(rank.templates[kind])) for kind in rank.kinds)


class Score(NamedTuple):
    """How good an assignment is; less is better."""

    excess_bytes: float
    """Bytes of the predicted peak above the budget."""
    total_ms: float
    """Predicted time of the iteration."""


Scored = tuple[Assignment, Score]


def _searched(rank: RankTemplates, limits: PolicyOptions) -> _Search:
    """Search assignments, with coarser units first."""
    short = replace(rank, schedule=_shortest(rank.schedule))
    num_steps = len(short.compose(_fastest(rank), marks_all=True).steps)
    sizes = [0] if num_steps <= MAX_STEPS_EXACT else [1]
    if sizes[0] and len(rank.kinds) > MAX_UNITS:
        sizes.insert(0, -(-len(rank.kinds) // MAX_UNITS))
    start: Optional[Assignment] = None
    for size in sizes:
        units = _Units.of(rank, size) if size else _Units(rank, rank.kinds)
        search = _Search(units, limits)
        start = units.expanded(search.run(start))
    return search


def _shortest(schedule: Sequence[ScheduledPass]) -> tuple[ScheduledPass, ...]:
    """Return the schedule of the first micro-batches that reaches the peak and then repeats."""
    in_flight = most = 0
    begun: set[int] = set()
    needed = 0
    for item in schedule:
        begun.add(item.micro_batch)
        in_flight += 1 if item.direction == "F" else -1
        if in_flight > most:
            most, needed = in_flight, len(begun)
    if most > 1:
        needed += 1
    kept = sorted({item.micro_batch for item in schedule})[:needed]
    return tuple(item for item in schedule if item.micro_batch in set(kept))


@dataclass(frozen=True)
class _Units:
    """Layers, or runs of layers that share a setting, as the layers of a rank."""

    rank: RankTemplates
    kinds: tuple[str, ...]
    """The kind of each unit's layers."""
    sizes: tuple[int, ...] = ()
    """Number of layers of each unit; empty means one."""

    @classmethod
    def of(cls, rank: RankTemplates, size: int) -> _Units:
        """Divide the layers into runs of at most ``size`` layers of a kind, one group each."""
        templates: dict[str, dict[LayerSetting, Template]] = {}
        chunks, kinds, sizes = [], [], []
        for chunk in rank.chunks:
            names = []
            for kind, run in itertools.groupby(chunk.kinds):
                count = len(tuple(run))
                for first in range(0, count, size):
                    kinds.append(kind)
                    sizes.append(min(size, count - first))
                    names.append(f"{kind}*{sizes[-1]}")
                    if names[-1] not in templates:
                        templates[names[-1]] = {
                            setting: template.as_one_group(sizes[-1])
                            for setting, template in rank.templates[kind].items()
                        }
            chunks.append(chunk._replace(kinds=tuple(names)))
        coarse = replace(rank, templates=templates, chunks=tuple(chunks))
        return cls(coarse, tuple(kinds), tuple(sizes))

    @property
    def settings(self) -> dict[str, tuple[LayerSetting, ...]]:
        """The settings of each kind of layers, fastest first."""
        named = zip(self.kinds, self.rank.kinds, strict=True)
        return {kind: tuple(self.rank.templates[name]) for kind, name in named}

    def expanded(self, assignment: Assignment) -> Assignment:
        """Return the assignment of layers for that of units."""
        pairs = zip(assignment, self.sizes or (1,) * len(assignment), strict=True)
        return tuple(itertools.chain.from_iterable((s,) * count for s, count in pairs))


class _Search:
    """Searches the assignment of units with the best score."""

    def __init__(self, units: _Units, limits: PolicyOptions) -> None:
        self._units, self._rank, self._limits = units, units.rank, limits
        self._without_limit = Score(math.inf, math.inf)
        """The best score of an assignment that needs more host memory than there is."""
        # The model's input lingers. That it stays is simpler to plan, and costs little.
        chunks = tuple(chunk._replace(is_first=False) for chunk in units.rank.chunks)
        schedule = _shortest(units.rank.schedule)
        self._short = replace(units.rank, schedule=schedule, chunks=chunks)
        self._scale = len(self._rank.schedule) / len(self._short.schedule)
        self._scores: dict[Assignment, Score] = {}
        self._num_steps = 0
        self._refines = not units.sizes
        self._kinds = units.kinds
        self._settings = units.settings
        self._least_ms = _compute_ms(units.rank, _fastest(units.rank))

    def run(self, start: Optional[Assignment]) -> Assignment:
        """Return the best assignment found, from a given one or from uniform ones."""
        found = [start] if start is not None else self._uniform()
        best = min(found, key=self.score)
        lowest = min(found, key=lambda item: (self.score(item).excess_bytes, -self._ms(item)))
        for seed in dict.fromkeys((lowest, best)):
            for order in self._orders():
                if self._is_done(best):
                    return best
                found.append(self._filled(seed, order))
                best = min(best, found[-1], key=self.score)
        seeds = sorted(dict.fromkeys(found), key=self.score)[:NUM_POLISHED]
        return min(map(self._polished, seeds), key=self.score)

    def finalists(self) -> Iterator[Scored]:
        """Yield the assignments of layers that were scored, best first."""
        for assignment in sorted(self._scores, key=self.score):
            yield self._units.expanded(assignment), self._scores[assignment]

    @property
    def host_costs_time(self) -> bool:
        """Whether a faster assignment was found that needs more host memory."""
        return self._without_limit[0] < min(self._scores.values())[0] or (
            self._without_limit.total_ms * (1 + NEAR) < min(self._scores.values()).total_ms
        )

    def _is_done(self, best: Assignment) -> bool:
        score = self.score(best)
        is_near = score.total_ms <= self._least_ms * (1 + NEAR)
        return self._num_steps > MAX_STEPS_OF_SEARCH or (not score.excess_bytes and is_near)

    def _uniform(self) -> list[Assignment]:
        """Return the assignments in which all layers of a kind have the same setting."""
        kinds = tuple(self._settings)
        found = []
        for chosen in itertools.product(*self._settings.values()):
            setting = dict(zip(kinds, chosen, strict=True))
            found.append(tuple(setting[kind] for kind in self._kinds))
        return found

    def _orders(self) -> Iterator[Sequence[int]]:
        """Yield orders in which units get faster settings: early first, spread out, late first."""
        count = len(self._kinds)
        yield range(count)
        width = max(1, (count - 1).bit_length())
        yield sorted(range(count), key=lambda place: int(f"{place:0{width}b}"[::-1], 2))
        yield range(count - 1, -1, -1)

    def _filled(self, start: Assignment, order: Sequence[int]) -> Assignment:
        """Give as many units as possible the fastest setting, then the next one, and so on."""
        best = start
        for kind in self._settings:
            places = [place for place in order if self._kinds[place] == kind]
            for setting in self._settings[kind]:
                taken = self._num_that_take(best, places, setting)
                best = self._with(best, places[:taken], setting)
                places = places[taken:]
        return best

    def _num_that_take(self, best: Assignment, places: Sequence[int], setting: LayerSetting) -> int:
        """Return how many of the first units may take a setting, by bisection."""
        taken, size = 0, len(places)
        while size:
            other = self._with(best, places[: taken + size], setting)
            if taken + size <= len(places) and other != best and self._improves(best, other):
                best = other
                taken += size
            size = size // 2 if size != 3 else 2
        return taken

    def _with(
        self, assignment: Assignment, places: Collection[int], setting: LayerSetting
    ) -> Assignment:
        changed = set(places)
        return tuple(setting if i in changed else old for i, old in enumerate(assignment))

    def _polished(self, best: Assignment) -> Assignment:
        """Change single units, and exchange the settings of two, while that improves."""
        is_better = True
        while is_better:
            is_better = False
            for other in self._neighbours(best):
                if self._is_done(best):
                    return best
                if self._improves(best, other):
                    best, is_better = other, True
                    break
        return best

    def _neighbours(self, assignment: Assignment) -> Iterator[Assignment]:
        for place, kind in enumerate(self._kinds):
            for setting in self._settings[kind]:
                if setting != assignment[place]:
                    yield self._with(assignment, (place,), setting)
        for one, other in itertools.combinations(range(len(self._kinds)), 2):
            pairs = [(assignment[other], assignment[one])]  # Exchanged.
            if len(self._kinds) <= MAX_UNITS_IN_PAIRS:
                of_one, of_other = self._settings[self._kinds[one]], self._kinds[other]
                pairs = list(itertools.product(of_one, self._settings[of_other]))
            elif self._kinds[one] != self._kinds[other]:
                continue
            for first, second in pairs:
                if first != assignment[one] and second != assignment[other]:
                    changed = self._with(assignment, (one,), first)
                    yield self._with(changed, (other,), second)

    def _improves(self, best: Assignment, other: Assignment) -> bool:
        goal = self.score(best)
        is_slow = self._ms(other) >= goal.total_ms * (1 - NEAR)
        if is_slow and not goal.excess_bytes:
            return False
        score = self.score(other)
        if goal <= score and not is_slow and not score.excess_bytes and self._refines:
            score = self._scores[other] = self._score(other, MAX_STEPS_OF_REFINING)
        return score < goal

    def _ms(self, assignment: Assignment) -> float:
        return _compute_ms(self._rank, assignment)

    def score(self, assignment: Assignment) -> Score:
        """Plan and time one assignment."""
        found = self._scores.get(assignment)
        if found is None:
            found = self._scores[assignment] = self._score(assignment)
        return found

    def _score(self, assignment: Assignment, max_steps: int = 0) -> Score:
        """Score an assignment; ``max_steps`` limits the work of improving on which groups move."""
        trace = self._short.compose(assignment, marks_all=True)
        self._num_steps += len(trace.steps)
        model = IterationModel(trace)
        target, limit = self._limits.target_memory_bytes, self._limits.host_memory_limit_bytes
        assert target is not None
        movable = fitting_groups(model, [group.key for group in trace.groups])
        choice, _ = choose_for_memory(model, movable, target, max_steps)
        if limit is not None:
            storages = storage_plans(trace, choice.moving, choice.timing.steps)
            if peak_in_use_bytes(len(trace.steps), host_intervals(storages)) > limit:
                unlimited = self._score_of(assignment, model, choice)
                self._without_limit = min(self._without_limit, unlimited)
                intervals = longest_intervals(trace, movable)
                kept = keep_within_host_memory(trace, sorted(movable), intervals, limit)
                fewer = fitting_groups(model, movable - kept.keys())
                choice, _ = choose_for_memory(model, fewer, target, max_steps)
        return self._score_of(assignment, model, choice)

    def _score_of(self, assignment: Assignment, model: IterationModel, choice: Choice) -> Score:
        assert self._limits.target_memory_bytes is not None
        excess_bytes = choice.timing.peak_bytes - self._limits.target_memory_bytes
        total_ms = self._ms(assignment) + choice.cost_ms(model) * self._scale
        return Score(max(0.0, excess_bytes), total_ms)
