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
from megatron.slipstream.plan.host_layout import HostBuffer, HostLedger
from megatron.slipstream.plan.model import BYTES_PER_MS_AT_1_GB_PER_S, Floats, IterationModel, Job
from megatron.slipstream.plan.trace import GroupKey
from megatron.slipstream.plan.walk import Clock

MARGIN_OF_COPY = 0.05
MIN_MARGIN_MS = 0.05
"""See [Note: Margins of time]."""

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


class _Walk:
    """State of an iteration up to the current step: copies, time, bytes off the device.

    It times the copies and waits of ``Issuer`` without operations; the edge table says for which
    copies an edge waits. Copies of a queue end in order, so that only the last of those waited for
    counts.
    """

    def __init__(self, model: IterationModel, jobs: list[Job]) -> None:
        self.jobs = jobs
        self.clock = Clock(model.trace, model.bandwidth)
        self.absent_bytes = 0.0
        self.free_at = [-1] * len(jobs)
        self.h2d_at = [-1] * len(jobs)
        self.step = -1
        self.copy_of: dict[GroupKey, int] = {}
        """For each group, the number of its D2H copy."""
        self._model = model
        self._trace = model.trace
        self._step_ms = model.trace.step_ms
        self._num_copies = 0
        self._commit_at = {job.commit: job for job in jobs}
        self._use_at = {job.use: job for job in jobs}
        self._copy_out: dict[int, int] = {}
        """For each storage, the number of its D2H copy."""
        self._copy_in: dict[int, int] = {}
        copies = {OpKind.COPY_OUT: self._copy_out, OpKind.COPY_IN: self._copy_in}
        self._awaited = {edge.id: copies[edge.signal] for edge in EDGES if edge.signal.is_copy}
        """For each edge that waits for a copy, the copies of which it is one."""
        self._releases: dict[int, int] = {}
        """For each storage, how many of its holders have released it."""
        self._free_step: dict[int, int] = {}
        self._ledger = HostLedger()
        self._buffers: dict[int, HostBuffer] = {}
        self._requests: list[tuple[int, bool]] = []
        """Storages whose buffers are to be allocated, or freed, in the ledger."""
        self._lingering: set[int] = set()
        """Storages that were released while something else still holds their memory."""
        self._absent: list[float] = []
        """For each step before this one, the bytes that were off the device until the next."""

    def reach(self, step: int) -> None:
        """Advance compute to a step; if it is a commit, start its D2H copy."""
        if step:
            self._absent.append(self.absent_bytes)
            self.clock.compute(self._step_ms[step - 1])
        self.step = step
        if self._lingering:
            self._count_freed_lingering()
        job = self._commit_at.get(step)
        if job is not None:
            items = [item for item in job.storages if item not in self._copy_out]
            if items:
                last = self._last_copy_in(items)
                self.copy_of[job.key] = self._copy(items, self._copy_out, [last] if last else [])

    def _copy(self, items: list[int], copies: dict[int, int], waits_for: list[int]) -> int:
        """Start a copy of storages; return its number, from 1."""
        self._num_copies += 1
        nbytes = 0
        for item in items:
            nbytes += self._trace.storages[item].nbytes
            copies[item] = self._num_copies
        self.clock.copy(self._num_copies, nbytes, waits_for, copies is self._copy_out)
        return self._num_copies

    def _last_copy_in(self, items: list[int]) -> int:
        """Allocate host buffers; return the last copy that has to leave them (E2), or 0."""
        self._requests += [(item, True) for item in items]
        awaited = self._awaited["E2"]
        if not awaited:
            return 0  # No buffer has been used before.
        for item, is_needed in self._requests:
            if is_needed:
                nbytes = self._trace.storages[item].nbytes
                self._buffers[item] = self._ledger.allocate(nbytes)
            else:
                self._ledger.free(self._buffers[item], item)
        self._requests.clear()
        before = itertools.chain.from_iterable(self._buffers[item].used_before for item in items)
        return max(map(awaited.__getitem__, before), default=0)

    def _count_freed_lingering(self) -> None:
        storages = self._trace.storages
        for item in [i for i in self._lingering if storages[i].lingers_until <= self.step]:
            self._lingering.remove(item)
            self.absent_bytes += storages[item].nbytes

    def free(self, number: int) -> None:
        """Release the storages of a group, after their D2H copies (E3)."""
        step, job, storages = self.step, self.jobs[number], self._trace.storages
        awaited = self._awaited["E3"]
        self.free_at[number] = step
        last = 0
        for item in job.storages:
            storage = storages[item]
            if len(storage.holders) > 1:
                num_released = self._releases[item] = self._releases.get(item, 0) + 1
                if num_released < len(storage.holders):
                    continue
            if awaited[item] > last:
                last = awaited[item]
            self._free_step[item] = step
            if storage.lingers_until > step:
                self._lingering.add(item)
            else:
                self.absent_bytes += storage.nbytes
        if last and self.clock.copies.run_until(last) > self.clock.now_ms:
            self.clock.stall(job.action(ActionKind.FREE), (last,))

    def is_away(self, number: int) -> bool:
        """Return whether all moving storages of a group were freed at an earlier step.

        Freeing and reloading a storage at the same step would gain nothing.
        """
        free_step, step = self._free_step, self.step
        return all(free_step.get(item, step) < step for item in self.jobs[number].storages)

    def reload(self, number: int) -> None:
        """Start the H2D copy of a group."""
        self.h2d_at[number] = self.step
        items = [item for item in self.jobs[number].storages if item not in self._copy_in]
        if items:
            self._copy(items, self._copy_in, [])
        for item in items:
            self._requests.append((item, False))
            if item in self._lingering:
                self._lingering.remove(item)
            else:
                self.absent_bytes -= self._trace.storages[item].nbytes

    def read(self) -> None:
        """If the step is a use, make compute wait for the H2D copies that it needs (E5)."""
        job = self._use_at.get(self.step)
        if job is not None:
            last = max(map(self._awaited["E5"].__getitem__, job.storages))
            self.clock.stall(self._trace.steps[self.step], (last,))

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
        self._room_for = self._room_from = -1
        """The place of the H2D copy that waits for room, and the first step at which there is."""

    def run(self, most_ms: float) -> Timing:
        """Decide all steps in order."""
        walk, clock = self._walk, self._walk.clock
        beyond_ms = most_ms * (1 + 1e-6) + 1e-6
        commits = [job.commit for job in self._jobs]
        for step in range(len(self._needed)):
            walk.reach(step)
            if clock.stall_ms > beyond_ms:
                return Timing({}, clock.stall_ms, {}, math.inf, np.zeros(0))
            if self._next_free < len(commits) and commits[self._next_free] <= step:
                self._free_copied_out()
                self._free_for_limit()
            if self._next_back < len(self._due) and self._due[self._next_back] <= step:
                self._reload_due()
            walk.read()
        return walk.timing()

    def _free_copied_out(self) -> None:
        walk = self._walk
        while self._may_free():
            last = self._jobs[self._next_free]
            if last.last_out != last.key:
                last = self._jobs[self._number_of[last.last_out]]
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
        if not job.in_bytes:
            return True
        if self._room_for != place:
            lacking = np.flatnonzero(self._room[step : job.use] < job.in_bytes)
            self._room_for, self._room_from = place, step
            if lacking.size:
                self._room_from += int(lacking[-1]) + 1
        return step >= self._room_from

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
    for number, job in enumerate(jobs, 1):
        counts[job.free_by] = number
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
