# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Searches which setting each layer of a rank takes, for a budget of device memory.

The search has one idea: layers of a kind are alike but for their position, so as many as possible
take the fastest setting, then the next one, in a few orders; how many is found by bisection. Single
layers are changed after that. :class:`Judge` tells what an assignment costs: it composes the trace,
asks ``search`` what moves, and looks at a lower bound first, since most candidates fail by it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Optional

from megatron.slipstream.plan.build import kept_for_host_memory, peak_by_count, storage_plans
from megatron.slipstream.plan.candidates import PolicyOptions
from megatron.slipstream.plan.model import IterationModel
from megatron.slipstream.plan.search import Choice, GroupSearch
from megatron.slipstream.plan.settings import Assignment, LayerSetting
from megatron.slipstream.plan.templates import RankTemplates, ScheduledPass, Template
from megatron.slipstream.plan.trace import GroupKey, Trace

MAX_STEPS_EXACT = 160
"""Maximum number of steps of an iteration that is searched only with all marks of its layers. In
longer ones, all that may move of a layer, or of a run of layers, is one group at first."""
MAX_STEPS_EXACT_LAST = 600
"""Maximum number of steps of an iteration that is searched with all marks in the end."""
MAX_UNITS = 24
"""Maximum number of units (layers or runs of layers) that are searched first."""
MAX_STEPS_OF_SEARCH = 16_000
"""Maximum total steps of the iterations that one search composes or times."""
MAX_STEPS_OF_REFINING = 1_000
"""Maximum total steps of the iterations that are timed to improve what moves in one assignment."""
MAX_UNITS_IN_PAIRS = 8
"""Maximum number of units of which any two are changed at once."""
NUM_HOPEFUL = 2
"""Number of assignments that are planned although the search finds that they exceed the budget."""
NUM_POLISHED = 3
"""Number of assignments that are improved unit by unit."""
NEAR = 1e-3
"""Relative difference of step times below which the search stops."""


class Limits(NamedTuple):
    """What an iteration may use."""

    device_bytes: int
    """Upper limit on the device peak."""
    host_bytes: Optional[int] = None
    """Upper limit on host memory in use at once; None for no limit."""
    counting: Optional[PolicyOptions] = None
    """Options of a plan without times, which must be within the limit on the device peak, too: an
    assignment's first iteration follows it. None if there is no such iteration."""

    def counted_bytes(self, model: IterationModel) -> int:
        """Return the device peak of the plan without times; 0 if there is none."""
        if self.counting is None:
            return 0
        counting = replace(self.counting, host_memory_limit_bytes=self.host_bytes)
        return peak_by_count(model, counting)


class Score(NamedTuple):
    """How good an assignment is; less is better."""

    excess_bytes: float
    """Bytes of the predicted peak above the budget."""
    total_ms: float
    """Predicted time of the iteration."""

    def is_near(self, other: Score) -> bool:
        """Return whether the other is hardly better, if at all."""
        if other.excess_bytes < self.excess_bytes:
            return False
        return self.total_ms * (1 - NEAR) <= other.total_ms


WORST = Score(math.inf, math.inf)
"""The score of an assignment that was given up, since another is better; any other score is."""


def searched(rank: RankTemplates, limits: Limits) -> AssignmentSearch:
    """Search the assignments of a rank's layers, with coarser units first.

    Args:
        rank: The templates; the settings of each kind are sorted by time, fastest first.
        limits: What an iteration may use.
    """
    short = replace(rank, schedule=shortest(rank.schedule))
    num_steps = len(short.compose(fastest(rank), marks_all=True).steps)
    sizes = []  # Layers of a unit; 0 for one layer with all its marks.
    if num_steps > MAX_STEPS_EXACT:
        sizes = sorted({1, -(-len(rank.kinds) // MAX_UNITS)}, reverse=True)
    if num_steps <= MAX_STEPS_EXACT_LAST:
        sizes.append(0)
    start: Optional[Assignment] = None
    for size in sizes:
        units = _Units.of(rank, size) if size else _Units(rank, rank.kinds)
        search = AssignmentSearch(units, limits)
        start = units.expanded(search.run(start, sizes[0]))
    return search


def fastest(rank: RankTemplates) -> Assignment:
    """Return the assignment with the least compute time; settings are sorted by it."""
    return tuple(next(iter(rank.templates[kind])) for kind in rank.kinds)


def shortest(schedule: Sequence[ScheduledPass]) -> tuple[ScheduledPass, ...]:
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
    kept = set(sorted({item.micro_batch for item in schedule})[:needed])
    extra: dict[tuple[str, int], int] = {}
    for item in schedule:
        way = item.direction, item.vp_stage
        extra[way] = max(extra.get(way, 0), item.extra_bytes)
    return tuple(
        item._replace(extra_bytes=extra[item.direction, item.vp_stage])
        for item in schedule
        if item.micro_batch in kept
    )


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

    @cached_property
    def settings(self) -> dict[str, tuple[LayerSetting, ...]]:
        """The settings of each kind of layers, fastest first."""
        named = zip(self.kinds, self.rank.kinds, strict=True)
        return {kind: tuple(self.rank.templates[name]) for kind, name in named}

    def expanded(self, assignment: Assignment) -> Assignment:
        """Return the assignment of layers for that of units."""
        pairs = zip(assignment, self.sizes or (1,) * len(assignment), strict=True)
        return tuple(itertools.chain.from_iterable((s,) * count for s, count in pairs))


def uniform(
    settings: Mapping[str, Iterable[LayerSetting]], kinds: Sequence[str]
) -> list[Assignment]:
    """Return the assignments in which all layers of a kind have the same setting."""
    products = itertools.product(*settings.values())
    chosen = (dict(zip(settings, each, strict=True)) for each in products)
    return [tuple(setting[kind] for kind in kinds) for setting in chosen]


class _Trial:
    """An assignment that is being judged."""

    def __init__(self, trace: Trace) -> None:
        self.model = IterationModel(trace)
        self.movable = self.model.fitting_groups([group.key for group in trace.groups])
        self._searches: dict[frozenset[GroupKey], GroupSearch] = {}
        self.bounds = self.search(self.movable).bounds
        self._counted: Optional[int] = None

    def counted_bytes(self, limits: Limits) -> int:
        """Return :meth:`Limits.counted_bytes` of its trace."""
        if self._counted is None:
            self._counted = limits.counted_bytes(self.model)
        return self._counted

    def search(self, movable: frozenset[GroupKey]) -> GroupSearch:
        """Return the search of what moves, of some groups."""
        if movable not in self._searches:
            self._searches[movable] = GroupSearch(self.model, movable)
        return self._searches[movable]


class Judge:
    """Predicts what an iteration of an assignment takes, with a few of its micro-batches."""

    def __init__(self, rank: RankTemplates, limits: Limits, refines: bool) -> None:
        # The model's input lingers. That it stays is simpler to plan, and costs little.
        chunks = tuple(chunk._replace(is_first=False) for chunk in rank.chunks)
        self._rank = replace(rank, schedule=shortest(rank.schedule), chunks=chunks)
        self._scale = len(rank.schedule) / len(self._rank.schedule)
        self._limits = limits
        self._refines = refines
        self.input_bytes = self._input_bytes(rank) if refines else 0
        """Bytes of the model's inputs that the search lets stay although they may move."""
        self.scores: dict[Assignment, Score] = {}
        self._given_up: dict[Assignment, Score] = {}
        """For each assignment that was given up, the score that it does not beat."""
        self.unlimited = WORST
        """The best score of an assignment that needs more host memory than there is."""
        self.num_steps = 0
        """Total steps of the iterations that were composed or timed."""
        self._fixed_ms = sum(item.wait_ms for item in rank.schedule)
        self._unit_ms: list[dict[LayerSetting, float]] = []
        for vp_stage, chunk in enumerate(rank.chunks):
            passes = [item for item in rank.schedule if item.vp_stage == vp_stage]
            count = sum(item.direction == "F" for item in passes)
            for template in (*chunk.before, *chunk.after):
                self._fixed_ms += count * template.compute_ms
            self._unit_ms += [
                {s: count * t.compute_ms for s, t in rank.templates[kind].items()}
                for kind in chunk.kinds
            ]

    def _input_bytes(self, rank: RankTemplates) -> int:
        if not rank.chunks[0].is_first or not rank.kinds:
            return 0
        storages = (item.storages for item in rank.templates[rank.kinds[0]].values())
        inputs = [item.nbytes for item in itertools.chain.from_iterable(storages) if item.is_input]
        return max(inputs, default=0) * sum(item.direction == "F" for item in self._rank.schedule)

    def compute_ms(self, assignment: Assignment) -> float:
        """Return the time of an iteration without waits for copies."""
        pairs = zip(self._unit_ms, assignment, strict=True)
        return self._fixed_ms + sum(times[setting] for times, setting in pairs)

    def score(self, assignment: Assignment) -> Score:
        """Return the score of an assignment."""
        if assignment not in self.scores:
            self.scores[assignment] = self._score(assignment, self._trial(assignment))
        return self.scores[assignment]

    def improves(self, goal: Score, other: Assignment) -> bool:
        """Return whether an assignment is better than a goal."""
        if goal.is_near(Score(0.0, self.compute_ms(other))):
            return False
        if other in self.scores:
            return self.scores[other] < goal
        if other in self._given_up and goal <= self._given_up[other]:
            return False
        trial = self._trial(other)
        bound, score = self._bound(other, trial, goal), WORST
        if bound.excess_bytes <= goal.excess_bytes + self.input_bytes and not goal.is_near(bound):
            score = self._score(other, trial, goal)
            if goal <= score and self._refines:
                score = self._score(other, trial, goal, MAX_STEPS_OF_REFINING)
        if score != WORST:
            self.scores[other] = score
        elif not self._refines:
            self._given_up[other] = goal
        return score < goal

    def _trial(self, assignment: Assignment) -> _Trial:
        trace = self._rank.compose(assignment, marks_all=True)
        self.num_steps += len(trace.steps)
        return _Trial(trace)

    def _bound(self, assignment: Assignment, trial: _Trial, goal: Score) -> Score:
        """Return a score that the assignment does not exceed in quality."""
        target, total_ms = self._limits.device_bytes, self.compute_ms(assignment)
        excess_bytes = trial.bounds.lowest_peak_bytes() - target
        if excess_bytes <= goal.excess_bytes + self.input_bytes:
            excess_bytes = max(excess_bytes, trial.counted_bytes(self._limits) - target)
        if excess_bytes > 0:
            return Score(excess_bytes, total_ms)
        return Score(0.0, total_ms + trial.bounds.least_stall_ms(target) * self._scale)

    def _score(
        self,
        assignment: Assignment,
        trial: _Trial,
        goal: Score = WORST,
        max_steps: int = 0,
    ) -> Score:
        """Decide what moves with an assignment.

        Args:
            assignment: The assignment.
            trial: Its iteration.
            goal: The score that it must beat, or it may be given up.
            max_steps: Limits the work of improving on what moves.
        """
        model, (target, limit, _) = trial.model, self._limits
        self.num_steps += len(model.trace.steps)
        # Where choices are refined, one that loses at first may win.
        may_give_up, most_ms = not self._refines, math.inf
        if may_give_up and goal.excess_bytes == 0:
            most_ms = (goal.total_ms - self.compute_ms(assignment)) / self._scale
        choice = trial.search(trial.movable).fastest(target, max_steps, most_ms)
        if not math.isinf(choice.timing.peak_bytes):
            storages = storage_plans(model, choice.moving, choice.timing.steps)
            kept = kept_for_host_memory(model, trial.movable, storages, limit)
            if kept:
                score = self._score_of(assignment, trial, choice)
                self.unlimited = min(self.unlimited, score)
                if may_give_up and goal <= score:
                    return WORST  # With less that moves, it is hardly better.
                fewer = model.fitting_groups(trial.movable - kept.keys())
                choice = trial.search(fewer).fastest(target, max_steps, most_ms)
        if math.isinf(choice.timing.peak_bytes):
            return WORST
        return self._score_of(assignment, trial, choice)

    def _score_of(self, assignment: Assignment, trial: _Trial, choice: Choice) -> Score:
        peak_bytes = max(choice.timing.peak_bytes, trial.counted_bytes(self._limits))
        excess_bytes = peak_bytes - self._limits.device_bytes
        waits_ms = choice.cost_ms(trial.model) * self._scale
        return Score(max(0.0, excess_bytes), self.compute_ms(assignment) + waits_ms)


Change = tuple[tuple[int, ...], tuple[LayerSetting, ...]]
"""Units and their new settings; without settings, two units exchange theirs."""


class AssignmentSearch:
    """Searches the assignment of units with the best score."""

    def __init__(self, units: _Units, limits: Limits) -> None:
        self._units = units
        self._judge = Judge(units.rank, limits, refines=not units.sizes)
        self._least_ms = self._judge.compute_ms(fastest(units.rank))

    @property
    def host_costs_time(self) -> bool:
        """Whether a better assignment was found that needs more host memory."""
        return not min(self._judge.scores.values()).is_near(self._judge.unlimited)

    def finalists(self) -> Iterator[tuple[Assignment, Score]]:
        """Yield the assignments of layers that were scored, best first.

        A few come before that may be better: they exceed the budget by what the model's input
        takes, which the search lets stay.
        """
        scores = self._judge.scores
        best = min(scores.values())
        hopeful = [
            (score.total_ms, assignment)
            for assignment, score in scores.items()
            if 0 < score.excess_bytes <= self._judge.input_bytes
            and not best.is_near(Score(0.0, score.total_ms))
        ]
        hopeful.sort(key=lambda item: item[0])
        first = [assignment for _, assignment in hopeful[:NUM_HOPEFUL]]
        for assignment in dict.fromkeys((*first, *sorted(scores, key=self._judge.score))):
            yield self._units.expanded(assignment), scores[assignment]

    def run(self, start: Optional[Assignment], size: int) -> Assignment:
        """Return the best assignment found.

        Args:
            start: The assignment to improve on; None for the uniform ones.
            size: Number of layers that had one setting in it.
        """
        score = self._judge.score
        found = [start] if start is not None else uniform(self._units.settings, self._units.kinds)
        best = min(found, key=score)
        lowest = min(
            found, key=lambda item: (score(item).excess_bytes, -self._judge.compute_ms(item))
        )
        for seed, order in itertools.product(dict.fromkeys((best, lowest)), self._orders()):
            if self._is_done(best):
                return best
            found.append(self._filled(seed, order, size if start else len(order)))
            best = min(best, found[-1], key=score)
        seeds = sorted(dict.fromkeys(found), key=score)[:NUM_POLISHED]
        return min(map(self._polished, seeds), key=score)

    def _is_done(self, best: Assignment) -> bool:
        is_best = self._judge.score(best).is_near(Score(0.0, self._least_ms))
        return is_best or self._judge.num_steps > MAX_STEPS_OF_SEARCH

    def _orders(self) -> Iterator[Sequence[int]]:
        """Yield orders in which units get faster settings: early first, spread out, late first."""
        count = len(self._units.kinds)
        yield range(count)
        width = max(1, (count - 1).bit_length())
        yield sorted(range(count), key=lambda place: int(f"{place:0{width}b}"[::-1], 2))
        yield range(count - 1, -1, -1)

    def _filled(self, best: Assignment, order: Sequence[int], size: int) -> Assignment:
        """Give as many units as pays the fastest setting, then the next one, and so on.

        Args:
            best: The assignment to start from.
            order: The order in which units take a faster setting.
            size: The number of units to try first.
        """
        for kind, settings in self._units.settings.items():
            places = [place for place in order if self._units.kinds[place] == kind]
            for setting in settings:
                taken = self._num_that_take(best, places, setting, size)
                best = _changed(best, (tuple(places[:taken]), (setting,) * taken))
                places = places[taken:]
        return best

    def _num_that_take(
        self, best: Assignment, places: Sequence[int], setting: LayerSetting, size: int
    ) -> int:
        """Return how many of the first units may take a setting, by bisection."""
        taken = sum(1 for _ in itertools.takewhile(lambda item: best[item] == setting, places))
        goal = self._judge.score(best)
        while size:
            count = taken + size
            if count <= len(places):
                other = _changed(best, (tuple(places[:count]), (setting,) * count))
                if self._judge.improves(goal, other):
                    goal, taken = self._judge.score(other), count
                    continue
            size = size // 2 if size != 3 else 2
        return taken

    def _polished(self, best: Assignment) -> Assignment:
        """Change single units, and two at once, until a whole round improves nothing."""
        left, changes = -1, list(self._changes())
        for number, change in enumerate(itertools.cycle(changes)):
            if number == left or self._is_done(best):
                break
            other = _changed(best, change)
            if other != best and self._judge.improves(self._judge.score(best), other):
                best, left = other, -1
            if left < 0:
                left = number + len(changes)
        return best

    def _changes(self) -> Iterator[Change]:
        kinds, settings = self._units.kinds, self._units.settings
        places = range(len(kinds))
        for place in places:
            yield from (((place,), (setting,)) for setting in settings[kinds[place]])
        for pair in itertools.combinations(places, 2) if len(kinds) <= MAX_UNITS else ():
            if len(kinds) <= MAX_UNITS_IN_PAIRS:
                both = itertools.product(*(settings[kinds[place]] for place in pair))
                yield from ((pair, of_pair) for of_pair in both)
            elif kinds[pair[0]] == kinds[pair[1]]:
                yield pair, ()


def _changed(assignment: Assignment, change: Change) -> Assignment:
    places, settings = change
    if not settings and places:
        settings = tuple(assignment[place] for place in places[::-1])
    new = dict(zip(places, settings, strict=True))
    return tuple(new.get(place, old) for place, old in enumerate(assignment))
