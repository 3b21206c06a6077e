# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Decides when a given set of groups frees its memory and reloads it, from measured times.

One walk over the steps, with the clock of ``walk``. At each step, in the order in which the engine
acts: copies out start, memory is freed, copies back start, backward uses. Without a limit, memory
is freed at the first step at which its copy out has certainly ended, and a copy back starts at the
last step from which it certainly ends in time, so that compute never waits. A limit on the peak
overrules that, one step at a time: memory is freed while its copy out still runs, or a copy back
is delayed, and compute waits for the copy. Frees are in the order of commits, copies back in the
order of uses.

[Note: Margins of time]
A plan is made from one iteration's times and followed in others. A FREE that is slightly early
stalls compute by as much, and so does a copy back that starts slightly late. In the other direction
the error only keeps memory for one more step. So both keep a margin of 5% of the copy's own time,
which is more than bandwidths vary from copy to copy, and of at least 0.05 ms, about ten times the
cost of an event. Delays do not add up: while compute waits for a copy, the copies queued after it
continue.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron.slipstream.plan.model import BYTES_PER_MS_AT_1_GB_PER_S, Floats, IterationModel, Job
from megatron.slipstream.plan.operations import EDGES, Issuer, Operation, OpKind, Waits
from megatron.slipstream.plan.trace import GroupKey
from megatron.slipstream.plan.walk import Clock

MARGIN_OF_COPY = 0.05
MIN_MARGIN_MS = 0.05
"""See [Note: Margins of time]."""

_EDGES_OF_COPIES = tuple(edge for edge in EDGES if edge.signal.is_copy)
_TIMED = frozenset(kind for kind in OpKind if kind.is_copy) | {e.waiter for e in _EDGES_OF_COPIES}
"""The operations that take time, or wait for ones that do."""

Steps = Mapping[GroupKey, tuple[int, int]]
"""For each group, the steps of its FREE and of its H2D."""


@dataclass(frozen=True)
class Timing:
    """When each group of a set moves, and the cost."""

    steps: dict[GroupKey, tuple[int, int]]
    """The steps of FREE and H2D of each group that has a storage to move."""
    stall_ms: float
    """How long compute waits for copies in the whole iteration."""
    stalled: dict[GroupKey, float]
    """The same by the group that it waits for; entries within rounding noise are left out."""
    peak_bytes: float
    """The device peak."""
    absent_bytes: Floats
    """For each step, the bytes that are off the device until the next one."""


def margin_ms(copy_ms: float) -> float:
    """See [Note: Margins of time]."""
    return max(MIN_MARGIN_MS, MARGIN_OF_COPY * copy_ms)


def replay(model: IterationModel, moving: Collection[GroupKey], steps: Steps) -> Timing:
    """Time steps that were decided elsewhere.

    Args:
        model: The timed trace.
        moving: The groups that move.
        steps: For each of them. A storage that would be reloaded before the last of its holders
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
    for step in walk.steps:
        walk.reach(step)
        for number in frees.get(step, ()):
            walk.free(number)
        for number in returns.get(step, ()):
            walk.reload(number)
        walk.use()
    return walk.timing()


def arrange(
    model: IterationModel,
    moving: Collection[GroupKey],
    limit_bytes: float = math.inf,
) -> Timing:
    """Decide when these groups move, without stalls other than those that the limit causes.

    Args:
        model: The timed trace.
        moving: The groups that move.
        limit_bytes: Upper limit of the device peak; if these groups cannot reach it, the lowest
            peak that they can reach is the limit.
    """
    return _Arrangement(model, moving, limit_bytes).run()


def _by_step(pairs: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for step, number in pairs:
        found.setdefault(step, []).append(number)
    return found


class _Walk:
    """An iteration up to the present step: operations issued, time taken, bytes off the device."""

    def __init__(self, model: IterationModel, jobs: list[Job]) -> None:
        self.jobs = jobs
        self.clock = Clock(model.trace, model.bandwidth)
        self.absent_bytes = 0.0
        self.free_step = [-1] * len(jobs)
        self.h2d_step = [-1] * len(jobs)
        self.step = -1
        self.copy_of: dict[GroupKey, int] = {}
        """By group, the number of its copy out."""
        self._model = model
        self._trace = model.trace
        moved = {job.key: job.storages for job in jobs}
        self._issuer = Issuer(model.trace, moved, self._run, _TIMED)
        self._waits = Waits(_EDGES_OF_COPIES, self._issuer.buffers)
        self._num_operations = 0
        self._commit_at = {job.commit: job for job in jobs}
        self._use_at = {job.use for job in jobs}
        self._lingering: set[int] = set()
        """Storages that were released while something else holds their memory."""
        self._absent = np.zeros(len(self._trace.steps))

    @property
    def steps(self) -> range:
        return range(len(self._trace.steps))

    def reach(self, step: int) -> None:
        """Compute reaches a step; if that is a commit, its copy out starts."""
        if self.step >= 0:
            self._absent[self.step] = self.absent_bytes
            self.clock.compute(self._trace.step_ms[self.step])
        self.step = step
        if self._lingering:
            self._count_freed_lingering()
        job = self._commit_at.get(step)
        if job is not None:
            self._issuer.commit(step, self._trace.steps[step])
            self._issuer.perform(step, job.d2h)

    def _run(self, operation: Operation) -> None:
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
        """A group releases its storages."""
        self.free_step[number] = self.step
        freed = self._issuer.perform(self.step, self.jobs[number].free)
        for item in freed:
            if self._trace.storages[item].lingers_until > self.step:
                self._lingering.add(item)
            else:
                self.absent_bytes += self._trace.storages[item].nbytes

    def is_away(self, number: int) -> bool:
        """Whether the storages that a group reloads were freed at an earlier step.

        To free and reload a storage at the same step would gain nothing.
        """
        free_step = self._issuer.free_step
        return all(free_step.get(i, self.step) < self.step for i in self.jobs[number].storages)

    def reload(self, number: int) -> None:
        """A group's copy back starts."""
        self.h2d_step[number] = self.step
        reloading = self._issuer.perform(self.step, self.jobs[number].h2d)
        for item in reloading:
            if item in self._lingering:
                self._lingering.remove(item)
            else:
                self.absent_bytes -= self._trace.storages[item].nbytes

    def use(self) -> None:
        """If the step is a use, compute waits for the copies back that it needs."""
        if self.step in self._use_at:
            self._issuer.use(self.step, self._trace.steps[self.step])

    def timing(self) -> Timing:
        """The result, once all steps are done."""
        if self.step >= 0:
            self._absent[self.step] = self.absent_bytes
        present = self._model.present_bytes - self._absent
        steps = {
            job.key: (self.free_step[number], self.h2d_step[number])
            for number, job in enumerate(self.jobs)
        }
        peak = float(present.max(initial=0.0))
        stalled: dict[GroupKey, float] = {}
        for cause, start_ms, ms in self.clock.stalls:
            if ms > 1e-9 * (start_ms + ms):
                stalled[cause.key] = stalled.get(cause.key, 0.0) + ms
        stall_ms = sum(stall.ms for stall in self.clock.stalls)
        return Timing(steps, stall_ms, stalled, peak, self._absent)


class _Arrangement:
    """Decides at each step of a walk which groups are freed and which are reloaded."""

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
        """For each step, the bytes that may be reloaded before their use if no others are."""
        self._free_by = _running_free_by(jobs, len(present))
        self._rate = model.bandwidth.d2h_gb_per_s * BYTES_PER_MS_AT_1_GB_PER_S
        self._next_free = 0
        self._next_back = 0

    def run(self) -> Timing:
        """Decide all steps in order."""
        for step in self._walk.steps:
            self._walk.reach(step)
            if self._may_free():
                self._free_copied_out()
                self._free_for_limit()
            if self._next_back < len(self._due) and self._due[self._next_back] <= step:
                self._reload_due()
            self._walk.use()
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
        """Free early the memory that the limit requires by now; compute waits for the copies."""
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
        """Bytes that must be reloaded at this step."""
        if self._next_back < len(self._by_use):
            job = self._jobs[self._by_use[self._next_back]]
            if job.use == self._walk.step:
                return job.in_bytes
        return 0.0

    def _is_due(self, place: int) -> bool:
        """Whether time and later peaks allow a copy back to start."""
        number = self._by_use[place]
        job, step = self._jobs[number], self._walk.step
        if job.use == step:
            return True
        if step < self._due[place] or not self._walk.is_away(number):
            return False
        return not job.in_bytes or bool(self._room[step : job.use].min() >= job.in_bytes)

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
    """For each step, the number of jobs, from the first, that must be released by then."""
    counts = [0] * num_steps
    for number, job in enumerate(jobs):
        counts[job.free_by] = max(counts[job.free_by], number + 1)
    return list(itertools.accumulate(counts, max))


def _latest_starts(model: IterationModel, jobs: Sequence[Job], by_use: Sequence[int]) -> list[int]:
    """In the order of uses, the last step at which each copy back can start and arrive in time.

    Computed from the last use backwards: a copy must end before its use and before the next copy
    must start. While copies out would run if nothing stalled, it has the lower rate.
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
    """Time spans of the copies out, in order, if nothing stalls and nothing is reloaded."""
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
    """Latest start times of copies, computed in decreasing order of their ends."""

    def __init__(self, busy: list[tuple[float, float]], alone: float, both: float) -> None:
        self._busy = busy
        """Spans of the lower rate that are not yet passed on the way backwards."""
        self._alone = alone
        self._both = both

    def start_of(self, end_ms: float, nbytes: float) -> float:
        """The time at which a copy must start to end at ``end_ms``."""
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
