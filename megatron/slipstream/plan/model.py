# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The planner's model of a trace: the copies that a set of moving groups needs, and when.

A storage moves if all of its holders do. The holder that commits first copies it out, the last
holder's FREE frees its device memory, and the holder that is used first reloads it. So each moving
group is one :class:`Job` with at most one D2H copy and one H2D copy, and scheduling needs only the
jobs.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megatron.slipstream.plan.actions import Action, ActionKind
from megatron.slipstream.plan.trace import Bandwidth, GroupKey, StepKind, Trace

BYTES_PER_MS_AT_1_GB_PER_S = 1e6

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_ACTION_KINDS = tuple(ActionKind)


@dataclass
class Job:
    """One moving group. Steps index :attr:`Trace.steps`; storages, :attr:`Trace.storages`."""

    key: GroupKey
    d2h: Action
    free: Action
    h2d: Action
    commit: int
    use: int
    storages: list[int] = field(default_factory=list)
    """The storages of the group that move."""
    out_storages: list[int] = field(default_factory=list)
    """The storages that it offloads."""
    in_storages: list[int] = field(default_factory=list)
    """The storages that it reloads."""
    out_bytes: int = 0
    in_bytes: int = 0
    free_by: int = 0
    """The last step at which it may release: each storage must be on the host by the time its H2D
    copy is due, which is its first use at the latest."""
    last_out: GroupKey = GroupKey(-1, -1)
    """The group whose D2H copy is the last one that this group's FREE waits for."""


@dataclass(frozen=True)
class Window:
    """The longest interval that a storage can be on the host: from ``first`` until ``stop``."""

    nbytes: int
    begin: int
    """The first commit of its holders, from which its D2H copy can run."""
    first: int
    """The last commit of its holders, or the later step from which nothing else holds it."""
    stop: int
    """The first use of its holders."""


@dataclass(frozen=True)
class IterationModel:
    """A timed trace.

    Args:
        trace: A trace with ``step_ms`` and ``bandwidth``.
    """

    trace: Trace

    @cached_property
    def start_ms(self) -> list[float]:
        """When compute reaches each step if it never stalls; the last entry is the end."""
        return [0.0, *itertools.accumulate(self.trace.step_ms)]

    @property
    def compute_ms(self) -> float:
        """Duration of the iteration without stalls."""
        return self.start_ms[-1]

    @cached_property
    def bandwidth(self) -> Bandwidth:
        """The trace's bandwidth."""
        if self.trace.bandwidth is None:
            raise ValueError("the trace's bandwidth is None, so no copy can be timed")
        return self.trace.bandwidth

    @cached_property
    def present_bytes(self) -> Floats:
        """:attr:`Trace.present_bytes`."""
        return np.array(self.trace.present_bytes, float)

    @cached_property
    def present_beside_gradients_bytes(self) -> Floats | None:
        """The same without the gradients allocated by then; None if unknown."""
        memory = self.trace.memory
        if not any(item.peak_beside_gradients_bytes for item in memory):
            return None
        beside = [item.peak_beside_gradients_bytes + item.absent_bytes for item in memory]
        return np.array(beside, float)

    def moving_storages(self, moving: Collection[GroupKey]) -> list[int]:
        """Return :meth:`Trace.moving_storages`, without those that have no :class:`Window`."""
        windows = self.windows
        return [i for i in self.trace.moving_storages(moving) if windows[i] is not None]

    def moving_cost_ms(self, moving: Collection[GroupKey]) -> float:
        """Return by how much moving these groups lengthens an iteration, excluding stalls."""
        nbytes = 0
        if self.trace.ms_per_moved_gb:
            nbytes = sum(self.trace.storages[item].nbytes for item in self.moving_storages(moving))
        return self.trace.moving_cost_ms(len(moving), nbytes)

    @cached_property
    def windows(self) -> list[Window | None]:
        """For each storage, when it can be on the host; None if it never can."""
        commits = dict[GroupKey, int]()
        uses = dict[GroupKey, int]()
        for index, step in enumerate(self.trace.steps):
            if step.kind is StepKind.FORWARD_COMMIT:
                commits[step.key] = index
            elif step.kind is StepKind.BACKWARD_USE:
                uses[step.key] = index
        found: list[Window | None] = []
        for storage in self.trace.storages:
            window = None
            holders = storage.holders
            if not storage.held_outside and all(k in commits and k in uses for k in holders):
                first = max(storage.lingers_until, *(commits[key] for key in holders))
                stop = min(uses[key] for key in holders)
                if first < stop:
                    begin = min(commits[key] for key in holders)
                    window = Window(storage.nbytes, begin, first, stop)
            found.append(window)
        return found

    def jobs(self, moving: Collection[GroupKey], staying: Collection[int] = ()) -> list[Job]:
        """Return the jobs of these groups in order of commit, and thus of D2H copies.

        A group has no job if none of its storages can move.

        Args:
            moving: The groups that move.
            staying: Storages that stay although they could move.
        """
        if staying:
            return self._make_jobs(moving, set(self.moving_storages(moving)).difference(staying))
        by_family: dict[int, list[GroupKey]] = {}
        for key in moving:
            by_family.setdefault(self._families[key], []).append(key)
        jobs = [job for keys in by_family.values() for job in self._jobs_of_family(tuple(keys))]
        jobs.sort(key=lambda job: job.commit)
        return jobs

    @cached_property
    def _families(self) -> dict[GroupKey, int]:
        """For each group, a number that it has in common with those it shares storages with."""
        family_of = {group.key: number for number, group in enumerate(self.trace.groups)}
        members = {number: [group.key] for number, group in enumerate(self.trace.groups)}
        for storage in self.trace.storages:
            first = family_of[storage.holders[0]]
            for other in {family_of[key] for key in storage.holders} - {first}:
                family_of.update(dict.fromkeys(members[other], first))
                members[first] += members.pop(other)
        return family_of

    def _jobs_of_family(self, keys: tuple[GroupKey, ...]) -> list[Job]:
        """Return the jobs of those groups of a family that move.

        They do not depend on what else moves, so that they are made once.
        """
        found = self._made_jobs.get(keys)
        if found is None:
            trace, wanted = self.trace, set(keys)
            moved = {
                item
                for key in keys
                for item in trace.group_by_key[key].storages
                if self.windows[item] is not None
                and wanted.issuperset(trace.storages[item].holders)
            }
            found = self._made_jobs[keys] = self._make_jobs(keys, moved) if moved else []
        return found

    @cached_property
    def _made_jobs(self) -> dict[tuple[GroupKey, ...], list[Job]]:
        return {}

    def _make_jobs(self, keys: Collection[GroupKey], moved: Collection[int]) -> list[Job]:
        """Return the jobs of ``keys``, which are all holders of ``moved``."""
        trace, index = self.trace, self.trace.step_index
        jobs = []
        for key in keys:
            storages = [item for item in trace.group_by_key[key].storages if item in moved]
            if storages:
                name = trace.group_by_key[key].name
                d2h, free, h2d = (Action(kind, key, name) for kind in _ACTION_KINDS)
                marks = (StepKind.FORWARD_COMMIT, key), (StepKind.BACKWARD_USE, key)
                jobs.append(Job(key, d2h, free, h2d, index[marks[0]], index[marks[1]], storages))
        jobs.sort(key=lambda job: job.commit)
        out_job: dict[int, Job] = {}
        for job in jobs:
            job.out_storages = [item for item in job.storages if item not in out_job]
            out_job.update(dict.fromkeys(job.out_storages, job))
            job.out_bytes = sum(trace.storages[item].nbytes for item in job.out_storages)
            last = max((out_job[item] for item in job.storages), key=lambda other: other.commit)
            job.last_out = last.key
        returned: set[int] = set()
        for job in sorted(jobs, key=lambda job: job.use):
            job.in_storages = [item for item in job.storages if item not in returned]
            returned.update(job.in_storages)
            job.in_bytes = sum(trace.storages[item].nbytes for item in job.in_storages)
        for job in jobs:
            windows = (self.windows[item] for item in job.storages)
            job.free_by = min(window.stop for window in windows if window is not None) - 1
        return jobs

    def most_absent_bytes(self, moving: Collection[GroupKey]) -> Floats:
        """Return, per step, the bytes on the host if groups free at commit and reload at use."""
        change = np.zeros(len(self.trace.steps) + 1)
        for item in self.moving_storages(moving):
            window = self.windows[item]
            if window is not None:
                change[window.first] += window.nbytes
                change[window.stop] -= window.nbytes
        return np.cumsum(change)[:-1]
