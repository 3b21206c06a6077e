# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Schedules the frees and reloads of a given set of groups, from measured times.

This is a single walk over the steps with the clock of ``walk``. Each step follows the engine's
order: D2H copies start, memory is freed, H2D copies start, backward uses the group. Without a
limit, memory is freed at the first step by which its D2H copy has certainly ended, and an H2D copy
starts at the last step from which it certainly ends in time, so compute never stalls. A peak limit
overrides that, one step at a time: memory is freed while its D2H copy still runs, or an H2D copy is
delayed, and compute waits for the copy. Frees follow the order of commits, H2D copies that of uses.

[Note: Margins of time]
A plan is built from one iteration's times and applied to others. A FREE that is slightly early
stalls compute by that amount, and so does an H2D copy that starts slightly late. The opposite error
only keeps memory for one more step. So both keep a margin of 5% of the copy time, which exceeds the
variation of bandwidth between copies, and of at least 0.05 ms, about ten times the cost of an
event. Delays do not add up: while compute waits for a copy, the copies queued after it continue.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron.slipstream.plan.actions import ActionKind
from megatron.slipstream.plan.edges import EDGES, OpKind
from megatron.slipstream.plan.model import BYTES_PER_MS_AT_1_GB_PER_S, Floats, IterationModel, Job
from megatron.slipstream.plan.operations import Issuer, Operation, Waits
from megatron.slipstream.plan.trace import GroupKey
from megatron.slipstream.plan.walk import Clock

MARGIN_OF_COPY = 0.05
MIN_MARGIN_MS = 0.05
"""See [Note: Margins of time]."""

_EDGES_OF_COPIES = tuple(edge for edge in EDGES if edge.signal.is_copy)
_TIMED = frozenset(kind for kind in OpKind if kind.is_copy) | {e.waiter for e in _EDGES_OF_COPIES}
"""Operations that take time, or that wait for ones that do."""

Steps = Mapping[GroupKey, tuple[int, int]]
"""For each group, the steps of its FREE and its H2D."""


@dataclass(frozen=True)
class Timing:
    """When each group of a set moves, and the resulting cost."""

    steps: dict[GroupKey, tuple[int, int]]
    """The steps of the FREE and H2D of each group that has a storage to move."""
    stall_ms: float
    """Time that compute stalls on copies in the whole iteration."""
    stalled: dict[GroupKey, float]
    """The same per group that compute waits for; entries within rounding noise are omitted."""
    peak_bytes: float
    """The device peak."""
    absent_bytes: Floats
    """For each step, the bytes that are off the device until the next step."""


def margin_ms(copy_ms: float) -> float:
    """Return the margin for a copy: see [Note: Margins of time]."""
    return max(MIN_MARGIN_MS, MARGIN_OF_COPY * copy_ms)


def replay(model: IterationModel, moving: Collection[GroupKey], steps: Steps) -> Timing:
    """Time a schedule that was decided elsewhere.

    Args:
        model: The timed trace.
        moving: The groups that move.
        steps: The schedule of each of them. A storage that would be reloaded before its last holder
            releases it stays on the device.
    """
    staying = []
    for item in model.moving_storages(moving):
        holders = model.trace.storages[item].holders
        if max(steps[key][0] for key in holders) >= min(steps[key][1] for key in holders):
            staying.append(item)
    walk = _Walk(model, model.jobs(moving, staying))
    jobs = walk.jobs
    frees = _by_step((steps[job.key][0], number) for number, job in enumerate(jobs))
    by_use = sorted(range(len(jobs)), key=lambda number: jobs[number].use)
    returns = _by_step((steps[jobs[number].key][1], number) for number in by_use)
    for step in range(len(model.trace.steps)):
        walk.reach(step)
        for number in frees.get(step, ()):
            walk.free(number)
        for number in returns.get(step, ()):
            walk.reload(number)
        walk.read()
    return walk.timing()


def arrange(
    model: IterationModel,
    moving: Collection[GroupKey],
    limit_bytes: float = math.inf,
    most_ms: float = math.inf,
) -> Timing:
    """Schedule these groups, with no stalls except those that the limit causes.

    Args:
        model: The timed trace.
        moving: The groups that move.
        limit_bytes: Upper limit on the device peak, raised to the lowest peak that these groups can
            reach.
        most_ms: Stall time above which the schedule is of no use. It then ends early: its stall
            time is above this, its peak infinite.
    """
    given = frozenset(moving), limit_bytes, most_ms
    timing: Timing | None = model.arranged.get(given)
    if timing is None:  # Searches for different goals try the same sets.
        timing = model.arranged[given] = _Arrangement(model, moving, limit_bytes).run(most_ms)
    return timing


def _by_step(pairs: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for step, number in pairs:
        found.setdefault(step, []).append(number)
    return found


class _Walk(Issuer):
    """State of an iteration up to the current step: operations, time, bytes off the device."""

    def __init__(self, model: IterationModel, jobs: list[Job]) -> None:
        super().__init__(model.trace, {job.key: job.storages for job in jobs}, _TIMED)
        self.jobs = jobs
        self.clock = Clock(model.trace, model.bandwidth)
        self.absent_bytes = 0.0
        self.free_at = [-1] * len(jobs)
        self.h2d_at = [-1] * len(jobs)
        self.step = -1
        self.copy_of: dict[GroupKey, int] = {}
        """For each group, the operation number of its D2H copy."""
        self._model = model
        self._waits = Waits(_EDGES_OF_COPIES, self.buffers)
        self._num_operations = 0
        self._commit_at = {job.commit: job for job in jobs}
        self._use_at = {job.use for job in jobs}
        self._lingering: set[int] = set()
        """Storages that were released while something else still holds their memory."""
        self._absent: list[float] = []
        """For each step before this one, the bytes that were off the device until the next."""

    def reach(self, step: int) -> None:
        """Advance compute to a step; if it is a commit, start its D2H copy."""
        if self.step >= 0:
            self._absent.append(self.absent_bytes)
            self.clock.compute(self._trace.step_ms[self.step])
        self.step = step
        if self._lingering:
            self._count_freed_lingering()
        job = self._commit_at.get(step)
        if job is not None:
            self.commit(step, self._trace.steps[step])
            self.perform(step, job.action(ActionKind.D2H))

    def issue(self, operation: Operation) -> None:
        """Time an operation that has been issued."""
        number = self._num_operations
        self._num_operations += 1
        self.clock.run(number, operation, self._waits.of(operation))
        self._waits.note(number, operation)
        if operation.kind is OpKind.COPY_OUT:
            self.copy_of[operation.cause.key] = number

    def _count_freed_lingering(self) -> None:
        storages = self._trace.storages
        for item in [i for i in self._lingering if storages[i].lingers_until <= self.step]:
            self._lingering.remove(item)
            self.absent_bytes += storages[item].nbytes

    def free(self, number: int) -> None:
        """Release the storages of a group."""
        self.free_at[number] = self.step
        freed = self.perform(self.step, self.jobs[number].action(ActionKind.FREE))
        for item in freed:
            if self._trace.storages[item].lingers_until > self.step:
                self._lingering.add(item)
            else:
                self.absent_bytes += self._trace.storages[item].nbytes

    def is_away(self, number: int) -> bool:
        """Return whether all moving storages of a group were freed at an earlier step.

        Freeing and reloading a storage at the same step would gain nothing.
        """
        free_step, step = self.free_step, self.step
        return max([free_step.get(item, step) for item in self.jobs[number].storages]) < step

    def reload(self, number: int) -> None:
        """Start the H2D copy of a group."""
        self.h2d_at[number] = self.step
        reloading = self.perform(self.step, self.jobs[number].action(ActionKind.H2D))
        for item in reloading:
            if item in self._lingering:
                self._lingering.remove(item)
            else:
                self.absent_bytes -= self._trace.storages[item].nbytes

    def read(self) -> None:
        """If the step is a use, make compute wait for the H2D copies that it needs."""
        if self.step in self._use_at:
            self.use(self.step, self._trace.steps[self.step])

    def timing(self) -> Timing:
        """Return the result, once all steps are done."""
        left = len(self._trace.steps) - len(self._absent)
        absent = np.array([*self._absent, *[self.absent_bytes] * left])
        present = self._model.present_bytes - absent
        steps = {
            job.key: (self.free_at[number], self.h2d_at[number])
            for number, job in enumerate(self.jobs)
        }
        peak = float(present.max(initial=0.0))
        stalled: dict[GroupKey, float] = {}
        for cause, start_ms, ms in self.clock.stalls:
            if ms > 1e-9 * (start_ms + ms):
                stalled[cause.key] = stalled.get(cause.key, 0.0) + ms
        stall_ms = sum(stall.ms for stall in self.clock.stalls)
        return Timing(steps, stall_ms, stalled, peak, absent)


class _Arrangement:
    """Decides at each step of a walk which groups to free and which to reload."""

    def __init__(
        self,
        model: IterationModel,
        moving: Collection[GroupKey],
        limit_bytes: float,
    ) -> None:
        jobs = model.jobs(moving)
        self._walk = _Walk(model, jobs)
        self._jobs = jobs
        self._number_of = {job.key: number for number, job in enumerate(jobs)}
        self._by_use = sorted(range(len(jobs)), key=lambda number: jobs[number].use)
        self._due = _latest_starts(model, jobs, self._by_use)
        most = model.most_absent_bytes(moving)
        present = model.present_bytes
        # An unreachable limit is raised: otherwise compute would stall at every step.
        limit = max(limit_bytes, float((present - most).max(initial=0.0)))
        needed: Floats = np.maximum(0.0, present - limit)
        self._needed: list[float] = needed.tolist()
        """For each step, the bytes that must be off the device."""
        self._room: Floats = most - needed
        """For each step, the bytes that may be reloaded ahead of their use, all groups together."""
        self._free_by = _running_free_by(jobs, len(present))
        self._rate = model.bandwidth.d2h_gb_per_s * BYTES_PER_MS_AT_1_GB_PER_S
        self._next_free = 0
        self._next_back = 0

    def run(self, most_ms: float) -> Timing:
        """Decide all steps in order."""
        clock, beyond_ms = self._walk.clock, most_ms * (1 + 1e-6) + 1e-6
        for step in range(len(self._needed)):
            self._walk.reach(step)
            if clock.stall_ms > beyond_ms:
                return Timing({}, clock.stall_ms, {}, math.inf, np.zeros(0))
            if self._may_free():
                self._free_copied_out()
                self._free_for_limit()
            if self._next_back < len(self._due) and self._due[self._next_back] <= step:
                self._reload_due()
            self._walk.read()
        return self._walk.timing()

    def _free_copied_out(self) -> None:
        walk = self._walk
        while self._may_free():
            last = self._jobs[self._number_of[self._jobs[self._next_free].last_out]]
            end_ms = walk.clock.copies.ends_ms.get(walk.copy_of[last.key])
            if end_ms is None:
                break
            if end_ms + margin_ms(last.out_bytes / self._rate) > walk.clock.now_ms:
                break
            self._free_next()

    def _free_for_limit(self) -> None:
        """Free the memory that the limit requires by now, even if compute must wait for copies."""
        walk, step = self._walk, self._walk.step
        wanted_bytes = self._used_now_bytes()
        while self._may_free() and (
            self._next_free < self._free_by[step]
            or walk.absent_bytes - wanted_bytes < self._needed[step]
        ):
            self._free_next()

    def _may_free(self) -> bool:
        number = self._next_free
        return number < len(self._jobs) and self._jobs[number].commit <= self._walk.step

    def _free_next(self) -> None:
        self._walk.free(self._next_free)
        self._next_free += 1

    def _used_now_bytes(self) -> float:
        """Return the bytes that must be reloaded at this step."""
        if self._next_back < len(self._by_use):
            job = self._jobs[self._by_use[self._next_back]]
            if job.use == self._walk.step:
                return job.in_bytes
        return 0.0

    def _is_due(self, place: int) -> bool:
        """Return whether timing and later peaks allow an H2D copy to start."""
        number = self._by_use[place]
        job, step = self._jobs[number], self._walk.step
        if job.use == step:
            return True
        if step < self._due[place] or not self._walk.is_away(number):
            return False
        room = np.minimum.reduce(self._room[step : job.use])
        return not job.in_bytes or bool(room >= job.in_bytes)

    def _reload_due(self) -> None:
        walk = self._walk
        while self._next_back < len(self._by_use) and self._is_due(self._next_back):
            number = self._by_use[self._next_back]
            job = self._jobs[number]
            is_early = job.use > walk.step
            if is_early and walk.absent_bytes - job.in_bytes < self._needed[walk.step]:
                break
            if is_early:
                self._room[walk.step : job.use] -= job.in_bytes
            walk.reload(number)
            self._next_back += 1


def _running_free_by(jobs: Sequence[Job], num_steps: int) -> list[int]:
    """Return, for each step, how many of the first jobs must be released by then."""
    counts = [0] * num_steps
    for number, job in enumerate(jobs):
        counts[job.free_by] = max(counts[job.free_by], number + 1)
    return list(itertools.accumulate(counts, max))


def _latest_starts(model: IterationModel, jobs: Sequence[Job], by_use: Sequence[int]) -> list[int]:
    """Return, in order of use, the last step at which each H2D copy can start and end in time.

    Computed from the last use backwards: a copy must end before its use and before the next copy
    must start. Its rate is the lower one while D2H copies would run if nothing stalled.
    """
    bandwidth, start_ms = model.bandwidth, model.start_ms
    alone = bandwidth.h2d_gb_per_s * BYTES_PER_MS_AT_1_GB_PER_S
    rates = _BackwardRates(
        _copies_out(model, jobs), alone, bandwidth.h2d_both_gb_per_s * BYTES_PER_MS_AT_1_GB_PER_S
    )
    due = [0] * len(by_use)
    latest_ms = math.inf
    for place in range(len(by_use) - 1, -1, -1):
        job = jobs[by_use[place]]
        latest_ms = min(latest_ms, start_ms[job.use])
        if job.in_bytes:
            margin = margin_ms(job.in_bytes / alone)
            latest_ms = rates.start_of(min(latest_ms, start_ms[job.use] - margin), job.in_bytes)
        due[place] = max(0, bisect.bisect_right(start_ms, latest_ms, hi=job.use + 1) - 1)
    return due


def _copies_out(model: IterationModel, jobs: Sequence[Job]) -> list[tuple[float, float]]:
    """Return the time spans of the D2H copies, in order, with no stalls and no reloads."""
    rate = model.bandwidth.d2h_gb_per_s * BYTES_PER_MS_AT_1_GB_PER_S
    spans: list[tuple[float, float]] = []
    for job in jobs:
        begin_ms, copy_ms = model.start_ms[job.commit], job.out_bytes / rate
        if spans and begin_ms <= spans[-1][1]:
            spans[-1] = (spans[-1][0], spans[-1][1] + copy_ms)
        elif copy_ms:
            spans.append((begin_ms, begin_ms + copy_ms))
    return spans


class _BackwardRates:
    """Computes latest start times of copies, in decreasing order of their end times."""

    def __init__(self, busy: list[tuple[float, float]], alone: float, both: float) -> None:
        self._busy = busy
        """Spans at the lower rate that the backward sweep has not passed yet."""
        self._alone = alone
        self._both = both

    def start_of(self, end_ms: float, nbytes: float) -> float:
        """Return the time at which a copy must start in order to end at ``end_ms``."""
        at_ms, left = end_ms, nbytes
        while self._busy:
            begin_ms, stop_ms = self._busy[-1]
            if at_ms > stop_ms:  # The other direction is idle until then.
                if left <= (at_ms - stop_ms) * self._alone:
                    break
                left -= (at_ms - stop_ms) * self._alone
                at_ms = stop_ms
            if at_ms > begin_ms:
                if left <= (at_ms - begin_ms) * self._both:
                    return at_ms - left / self._both
                left -= (at_ms - begin_ms) * self._both
                at_ms = begin_ms
            self._busy.pop()
        return at_ms - left / self._alone
