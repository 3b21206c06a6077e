# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Searches which groups of a timed trace move, and when, for a limit on the peak or on the time.

``arrange`` times every candidate, so that candidates are comparable. The search has one idea:
moving a group frees its bytes at all steps at which it is on the host, and costs two copies. So for
a given peak, keep the groups first that would be on the host for the shortest time, as long as
enough others are on the host at every step. "Enough" is what the peak requires plus a reserve for
copies in flight; the right reserve depends on the link, so several are tried.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import numpy as np

from megatron.slipstream.plan.actions import Bound
from megatron.slipstream.plan.arrange import Timing, arrange
from megatron.slipstream.plan.lower_bounds import LowerBounds
from megatron.slipstream.plan.model import IterationModel, Job, Window
from megatron.slipstream.plan.trace import GroupKey

MAX_CHANGED_GROUPS = 400
"""Maximum number of groups for which the result is improved group by group."""
NUM_PEAKS = 8
"""Number of bisections in the search for the lowest peak."""
NUM_PEAKS_OF_LARGE = 6
"""The same for large iterations: two more take 25% longer, for 1% of the peak."""
RESERVES = (0.0, 1 / 64, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4)
"""Reserves to try, as fractions of the bytes that could stay but move; all but the first also move
the bytes of one more group. A final value of 1 changed none of 410 plans; also omitting 3/4 raised
the peak of 2 of 18 plans by up to 0.4%."""
MAX_STEPS_OF_RESERVES = 40_000
"""Maximum total steps of the iterations timed to reach one peak within an overhead."""
MAX_STEPS_OF_CHANGES = 60_000
"""Maximum total steps of the iterations timed to improve on the set that the search found."""
NEAR = 1e-3
"""Relative gap to the bound at which the search stops."""
MIN_STALL_MS = 1e-6
"""Stalls below this are rounding noise."""
NUM_ROUNDS = 3
"""Number of times to try each change."""


@dataclass(frozen=True)
class Choice:
    """The groups that move, and their timing."""

    moving: frozenset[GroupKey]
    timing: Timing

    @property
    def stall_ms(self) -> float:
        """Time that compute stalls on copies, rounded so that noise does not affect choices."""
        return round(self.timing.stall_ms, 6)

    def cost_ms(self, model: IterationModel) -> float:
        """Return by how much it lengthens an iteration: stalls, and the cost of moving groups."""
        return self.timing.stall_ms + model.moving_cost_ms(self.moving)


def choose_for_time(
    model: IterationModel, movable: frozenset[GroupKey], budget_ms: float
) -> tuple[Choice, Bound]:
    """See :meth:`GroupSearch.for_time`; where each group costs time, those with the most bytes."""
    if model.trace.moving_cost_ms(1, 1):
        movable = _affordable(model, movable, budget_ms)
    return GroupSearch(model, movable).for_time(budget_ms)


def _by_stall(peak_bytes: float) -> Callable[[Choice], tuple[float, float, int]]:
    """Return a sort key: bytes above the peak, then stall time, then number of moving groups."""

    def key(choice: Choice) -> tuple[float, float, int]:
        excess = max(0.0, choice.timing.peak_bytes - peak_bytes)
        return excess, choice.stall_ms, len(choice.moving)

    return key


class GroupSearch:
    """Searches which of some groups move, for a given peak or time.

    Args:
        model: The timed trace.
        movable: The groups that may move.
    """

    def __init__(self, model: IterationModel, movable: frozenset[GroupKey]) -> None:
        self.bounds = LowerBounds(model, movable)
        self._model = model
        self._movable = movable
        self._max_steps = MAX_STEPS_OF_CHANGES
        self._most_ms = math.inf
        """Stall time above which a set is of no use."""
        self._is_large = len(movable) > MAX_CHANGED_GROUPS
        self._most_absent = model.most_absent_bytes(movable)
        self._jobs = _by_time_away(model, movable)
        self._bundles, self._bundles_of = _bundles(model, self._jobs)
        self._good_reserve = 0
        """Index of the reserve that reached the last goal."""
        self._unit_bytes = max((job.out_bytes for job in self._jobs), default=0)

    def for_memory(
        self, target_bytes: float, max_steps: int = MAX_STEPS_OF_CHANGES
    ) -> tuple[Choice, Bound]:
        """Find the choice with the least stall time for a device peak of at most ``target_bytes``.

        If no plan reaches that peak, minimize the time for the lowest possible peak. Groups whose
        move helps neither stay.

        Args:
            target_bytes: The device peak.
            max_steps: Limits the total steps of the iterations that are timed to improve on the
                first result.
        """
        best = self.fastest(target_bytes, max_steps)
        peak_bytes, lower_ms = self._reachable(target_bytes)
        if not self._is_large and max_steps:
            best = self._without_superfluous(best, peak_bytes)
        reached_ms = best.timing.stall_ms
        return best, Bound("stall_ms", min(lower_ms, reached_ms), reached_ms)

    def fastest(self, target_bytes: float, max_steps: int = 0, most_ms: float = math.inf) -> Choice:
        """Find the same, but with groups that need not move.

        Args:
            target_bytes: See :meth:`for_memory`.
            max_steps: See :meth:`for_memory`.
            most_ms: Stall time above which a choice is of no use: its peak may be infinite.
        """
        self._max_steps, self._most_ms = max_steps, most_ms
        peak_bytes, lower_ms = self._reachable(target_bytes)
        goal_ms = lower_ms * (1 + NEAR) + MIN_STALL_MS
        best = min(self._candidates(peak_bytes, goal_ms, best_only=True), key=_by_stall(peak_bytes))
        if self._is_large or not max_steps:
            return best
        return self._improved(best, peak_bytes, goal_ms)

    def _reachable(self, target_bytes: float) -> tuple[float, float]:
        """Return the peak that a plan can reach, and a lower bound on the stall time for it."""
        peak_bytes = max(target_bytes, self.bounds.lowest_peak_bytes())
        return peak_bytes, self.bounds.least_stall_ms(peak_bytes)

    def for_time(self, budget_ms: float) -> tuple[Choice, Bound]:
        """Find the choice with the lowest device peak that costs no more than ``budget_ms``.

        Among choices with the same peak, prefer those that move fewer groups.
        """
        self._max_steps, self._most_ms = MAX_STEPS_OF_CHANGES, budget_ms
        lower = self.bounds.lowest_peak_bytes(budget_ms)
        best = self._lowest(lower, budget_ms)
        reached = best.timing.peak_bytes
        return best, Bound("peak_bytes", min(lower, reached), reached)

    def _lowest(self, lower_bytes: float, budget_ms: float) -> Choice:
        """Find the lowest peak within a time budget."""
        nothing = frozenset[GroupKey]()
        best = Choice(nothing, arrange(self._model, nothing))
        low, high = lower_bytes, best.timing.peak_bytes
        # Most links are fast enough for nearly the lowest peak.
        middle = min(low + 2 * self._unit_bytes, (low + high) / 2)
        for _ in range(NUM_PEAKS_OF_LARGE if self._is_large else NUM_PEAKS):
            choice = self._within(middle, budget_ms)
            if choice is None:
                low = middle
            else:
                best = choice
                high = min(middle, choice.timing.peak_bytes)
            if high - low <= NEAR * high:
                break
            middle = (low + high) / 2
        if not self._is_large:
            best = self._lowered(best, lower_bytes, budget_ms)
        return self._leanest(best, budget_ms)

    def _lowest_of(
        self, moving: frozenset[GroupKey], lower_bytes: float, budget_ms: float, best: Choice
    ) -> Choice:
        """Find the lowest peak of one set within a time budget, if it is lower than the best."""
        low, high = lower_bytes, best.timing.peak_bytes
        for _ in range(2 * NUM_PEAKS):
            if high - low <= 1e-4 * high:
                break
            middle = (low + high) / 2
            choice = self._choice(moving, middle)
            peak = choice.timing.peak_bytes
            if peak < best.timing.peak_bytes and choice.cost_ms(self._model) <= budget_ms:
                best, high = choice, min(middle, peak)
            else:
                low = middle
        return best

    def _within(self, peak_bytes: float, budget_ms: float) -> Choice | None:
        most = max(1, MAX_STEPS_OF_RESERVES // len(self._model.trace.steps))
        for choice in itertools.islice(self._candidates(peak_bytes, budget_ms), most):
            is_low = choice.timing.peak_bytes <= peak_bytes * (1 + 1e-12)
            if is_low and choice.cost_ms(self._model) <= budget_ms:
                return choice
        return None

    def _candidates(
        self, peak_bytes: float, goal_ms: float, best_only: bool = False
    ) -> Iterator[Choice]:
        """Yield sets for a peak until one meets the goal, starting at the last good reserve.

        Args:
            peak_bytes: The peak to reach.
            goal_ms: The stall time to reach.
            best_only: Whether a set is of no use if one before it reaches the peak with less stall.
        """
        seen, most_ms = set(), self._most_ms
        order = sorted(range(len(RESERVES)), key=lambda place: abs(place - self._good_reserve))
        for place in order:
            moving = self._needed_for(peak_bytes, RESERVES[place])
            if moving in seen:
                continue
            seen.add(moving)
            choice = self._choice(moving, peak_bytes, most_ms)
            reaches = choice.timing.peak_bytes <= peak_bytes
            is_good = reaches and choice.timing.stall_ms <= goal_ms
            if reaches and best_only:
                most_ms = min(most_ms, choice.timing.stall_ms)
            if is_good:
                self._good_reserve = place
            yield choice
            if is_good:
                return

    def _needed_for(self, peak_bytes: float, reserve: float) -> frozenset[GroupKey]:
        """Return the groups that must move if those away for the shortest time stay first.

        Args:
            peak_bytes: The peak to reach.
            reserve: Fraction of the bytes that could stay at each step but move anyway.
        """
        needed = self._model.present_bytes - peak_bytes
        spare = (1.0 - reserve) * (self._most_absent - needed)
        if reserve:
            spare -= self._unit_bytes
        spare[needed <= 0] = math.inf
        staying = set[GroupKey]()
        stored = set[int]()
        for job in self._jobs:
            added: list[int] = []
            for number in self._bundles_of[job.key]:
                if number in stored:  # Another holder stays, so the bundle does too.
                    continue
                bundle = self._bundles[number]
                window = spare[bundle.first : bundle.stop]
                if np.minimum.reduce(window) < bundle.nbytes:
                    break
                window -= bundle.nbytes
                added.append(number)
            else:
                staying.add(job.key)
                stored.update(added)
                continue
            for number in added:
                bundle = self._bundles[number]
                spare[bundle.first : bundle.stop] += bundle.nbytes
        return self._movable - staying

    def _improved(self, best: Choice, peak_bytes: float, goal_ms: float) -> Choice:
        """Try modified sets, keeping each better one, until the goal is reached."""
        key = _by_stall(peak_bytes)
        for change in self._changes():
            if best.timing.stall_ms <= goal_ms:
                break
            moving = self._changed(best, change)
            most_ms = self._most_ms
            if best.timing.peak_bytes <= peak_bytes:
                if not self._can_reach(moving, peak_bytes):
                    continue
                most_ms = best.timing.stall_ms
            best = min(best, self._choice(moving, peak_bytes, most_ms), key=key)
        return best

    def _can_reach(self, moving: frozenset[GroupKey], peak_bytes: float) -> bool:
        """Return whether any schedule of these groups has a device peak of at most this."""
        present = self._model.present_bytes - self._model.most_absent_bytes(moving)
        return float(present.max(initial=0.0)) <= peak_bytes

    def _without_superfluous(self, best: Choice, peak_bytes: float) -> Choice:
        """Drop groups, largest first, whose move helps neither the peak nor the time."""
        limit_bytes = max(peak_bytes, best.timing.peak_bytes)
        most = self._max_steps // len(self._model.trace.steps)
        largest_first = sorted(self._jobs, key=lambda job: -job.out_bytes)
        for job in itertools.islice(largest_first, most):
            if job.key in best.moving:
                moving = best.moving - {job.key}
                if not self._can_reach(moving, limit_bytes):
                    continue
                fewer = self._choice(moving, peak_bytes, best.timing.stall_ms)
                if fewer.timing.peak_bytes <= limit_bytes and fewer.stall_ms <= best.stall_ms:
                    best = fewer
        return best

    def _lowered(self, best: Choice, lower_bytes: float, budget_ms: float) -> Choice:
        """Try modified sets, keeping each with a lower peak, until it is near the bound."""
        for change in self._changes():
            peak_bytes = best.timing.peak_bytes
            if peak_bytes <= lower_bytes * (1 + NEAR):
                break
            moving = self._changed(best, change)
            if not self._can_reach(moving, peak_bytes):
                continue
            other = self._choice(moving, peak_bytes * (1 - NEAR))
            if other.timing.peak_bytes < peak_bytes and other.cost_ms(self._model) <= budget_ms:
                best = self._lowest_of(other.moving, lower_bytes, budget_ms, other)
        return best

    def _changes(self) -> Iterator[frozenset[GroupKey]]:
        """Return all sets if there are few; else the changes to try: groups to add or remove.

        The changes are each single group, and all holders of each storage, which moves only if all
        of them do.
        """
        keys = [job.key for job in self._jobs]
        most = self._max_steps // len(self._model.trace.steps)
        if self._tries_all:
            sizes = range(len(keys) + 1)
            subsets = (itertools.combinations(keys, size) for size in sizes)
            return map(frozenset, itertools.chain.from_iterable(subsets))
        trace = self._model.trace
        holders = (
            frozenset(trace.storages[item].holders) & self._movable
            for key in keys
            for item in trace.group_by_key[key].storages
        )
        changes = dict.fromkeys([*(frozenset((key,)) for key in keys), *holders])
        return itertools.islice(itertools.chain(*itertools.repeat(changes, NUM_ROUNDS)), most)

    def _changed(self, best: Choice, change: frozenset[GroupKey]) -> frozenset[GroupKey]:
        if self._tries_all:
            return change
        return best.moving - change if change <= best.moving else best.moving | change

    @property
    def _tries_all(self) -> bool:
        return 2 ** len(self._jobs) * len(self._model.trace.steps) <= self._max_steps

    def _leanest(self, choice: Choice, budget_ms: float) -> Choice:
        """Reach the same peak with fewer moving groups, if possible."""
        peak_bytes = choice.timing.peak_bytes
        for reserve in RESERVES[:2]:
            moving = self._needed_for(peak_bytes, reserve)
            if len(moving) < len(choice.moving):
                lean = self._choice(moving, peak_bytes)
                is_low = lean.timing.peak_bytes <= peak_bytes
                if is_low and lean.cost_ms(self._model) <= budget_ms:
                    return lean
        return choice

    def _choice(
        self, moving: frozenset[GroupKey], limit_bytes: float, most_ms: float = math.inf
    ) -> Choice:
        most_ms = min(most_ms, self._most_ms)
        return Choice(moving, arrange(self._model, moving, limit_bytes, most_ms))


def _affordable(
    model: IterationModel, movable: frozenset[GroupKey], budget_ms: float
) -> frozenset[GroupKey]:
    """Return the groups to search when each moving group costs time: those with the most bytes.

    The highest peak of all micro-batches counts, so each pass contributes equally. A group is added
    together with those that it shares storages with, since a storage moves only if all its holders
    do; or alone if the budget is too small for all of them.
    """
    trace = model.trace
    jobs = sorted(model.jobs(movable), key=lambda job: (-job.out_bytes, job.key.group, job.key))
    nbytes = {job.key: job.out_bytes for job in jobs}
    num_passes = len({key.chunk_pass for key in nbytes})
    taken: dict[int, set[GroupKey]] = {key.chunk_pass: set() for key in nbytes}
    for job in jobs:
        of_pass = taken[job.key.chunk_pass]
        sharing = {
            holder
            for item in trace.group_by_key[job.key].storages
            for holder in trace.storages[item].holders
            if holder in nbytes and holder.chunk_pass == job.key.chunk_pass
        }
        for more in (sharing, {job.key}):
            wanted = of_pass | more
            moved = sum(nbytes[key] for key in wanted)
            if trace.moving_cost_ms(num_passes * len(wanted), num_passes * moved) <= budget_ms:
                of_pass |= more
                break
    return model.fitting_groups(frozenset().union(*taken.values()))


def _bundles(
    model: IterationModel, jobs: Collection[Job]
) -> tuple[list[Window], dict[GroupKey, list[int]]]:
    """Bundle the storages of some jobs that the same groups hold at the same steps.

    Returns:
        The window of each bundle, and the numbers of the bundles that each group holds.
    """
    found: dict[tuple[tuple[GroupKey, ...], int, int], list[Window]] = {}
    for item in sorted({item for job in jobs for item in job.storages}):
        window = model.windows[item]
        if window is not None:
            alike = model.trace.storages[item].holders, window.first, window.stop
            found.setdefault(alike, []).append(window)
    bundles, bundles_of = [], dict[GroupKey, list[int]]()
    for number, ((holders, _, _), windows) in enumerate(found.items()):
        nbytes = sum(window.nbytes for window in windows)
        bundles.append(windows[0]._replace(nbytes=nbytes))
        for key in holders:
            bundles_of.setdefault(key, []).append(number)
    return bundles, bundles_of


def _by_time_away(model: IterationModel, movable: Collection[GroupKey]) -> list[Job]:
    """Return the jobs, sorted by time on the host, shortest first.

    Groups at the same place in different micro-batches share their median time: during pipeline
    warm-up times are shorter, but keeping all groups of the first micro-batches would leave the
    link idle at first and overload it later.
    """
    start_ms, groups = model.start_ms, model.trace.group_by_key
    jobs = model.jobs(movable)
    away_ms: dict[tuple[int, int], list[float]] = {}
    for job in jobs:
        like = groups[job.key].vp_stage, job.key.group
        away_ms.setdefault(like, []).append(start_ms[job.use] - start_ms[job.commit])
    typical_ms = {like: statistics.median(times) for like, times in away_ms.items()}
    return sorted(
        jobs, key=lambda job: (typical_ms[groups[job.key].vp_stage, job.key.group], -job.commit)
    )
