# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The planner's model of a trace: the copies that a set of moving groups needs, and when.

A storage moves if all of its holders do. The holder that commits first copies it out, the last
holder's FREE frees its device memory, and the holder that is used first reloads it. So each moving
group is one :class:`Job` with at most one D2H copy and one H2D copy, and scheduling needs only the
jobs.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.slipstream.plan.actions import Action, ActionKind
from megatron.slipstream.plan.trace import Bandwidth, GroupKey, StepKind, Trace, bytes_by_step

BYTES_PER_MS_AT_1_GB_PER_S = 1e6

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(slots=True)
class Job:
    """One moving group. Steps index :attr:`Trace.steps`; storages, :attr:`Trace.storages`."""

    key: GroupKey
    name: str
    commit: int
    use: int
    storages: list[int]
    """The storages of the group that move."""
    out_bytes: int
    """Bytes of the storages that it offloads, since it commits first of their holders."""
    in_bytes: int
    """Bytes of the storages that it reloads, since it is used first of their holders."""
    free_by: int
    """The last step at which it may release: each storage must be on the host by the time its H2D
    copy is due, which is its first use at the latest."""
    last_out: GroupKey
    """The group whose D2H copy is the last one that this group's FREE waits for."""

    def action(self, kind: ActionKind) -> Action:
        """Return the action of a kind on the group."""
        return Action(kind, self.key, self.name)


class Window(NamedTuple):
    """The longest interval that a storage can be on the host: from ``first`` until ``stop``."""

    nbytes: int
    begin: int
    """The first commit of its holders, from which its D2H copy can run."""
    first: int
    """The last commit of its holders, or the later step from which nothing else holds it."""
    stop: int
    """The first use of its holders."""


class _Copies:
    """The copies of a set of moving groups."""

    def __init__(self, jobs: list[Job], windows: Sequence[Window | None], num_steps: int) -> None:
        self.jobs = jobs
        """In order of commit."""
        self._windows = windows
        self._num_steps = num_steps

    @cached_property
    def storages(self) -> list[int]:
        """The storages that move, by index."""
        return sorted({item for job in self.jobs for item in job.storages})

    @cached_property
    def most_absent_bytes(self) -> Floats:
        """For each step, the bytes on the host if groups free at commit and reload at use."""
        windows = filter(None, map(self._windows.__getitem__, self.storages))
        away = ((window.first, window.stop, window.nbytes) for window in windows)
        return np.array(bytes_by_step(self._num_steps, away), float)


class _Structure:
    """What may move in a trace, and between which marks, whatever time and memory they take."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self.commits: dict[GroupKey, int] = {}
        """The step at which each group commits."""
        self.uses: dict[GroupKey, int] = {}
        """The step at which each group is used."""
        for index, step in enumerate(trace.steps):
            if step.kind is StepKind.FORWARD_COMMIT:
                self.commits[step.key] = index
            elif step.kind is StepKind.BACKWARD_USE:
                self.uses[step.key] = index
        self._jobs: dict[tuple[GroupKey, ...], list[Job]] = {}
        self._copies: dict[frozenset[GroupKey], _Copies] = {}

    @cached_property
    def windows(self) -> list[Window | None]:
        """For each storage, when it can be on the host; None if it never can."""
        commits, uses = self.commits, self.uses
        found: list[Window | None] = []
        used = commits.keys() & uses.keys()
        for storage in self._trace.storages:
            holders, window = storage.holders, None
            if not storage.held_outside and used.issuperset(holders):
                committed = [commits[key] for key in holders]
                first = max(storage.lingers_until, *committed)
                stop = min([uses[key] for key in holders])
                if first < stop:
                    window = Window(storage.nbytes, min(committed), first, stop)
            found.append(window)
        return found

    @cached_property
    def shared(self) -> dict[GroupKey, int]:
        """For each group that shares storages, a number that it has in common with the others."""
        family_of: dict[GroupKey, int] = {}
        members: dict[int, list[GroupKey]] = {}
        for number, storage in enumerate(self._trace.storages):
            if len(storage.holders) > 1:
                together = list(storage.holders)
                for other in {family_of[key] for key in together if key in family_of}:
                    together += members.pop(other)
                members[number] = list(dict.fromkeys(together))
                family_of.update(dict.fromkeys(together, number))
        return family_of

    @cached_property
    def own_jobs(self) -> list[Job]:
        """The jobs of all groups that share no storages, in order of commit."""
        alone = (group.key for group in self._trace.groups if group.key not in self.shared)
        moved = {item for item, window in enumerate(self.windows) if window is not None}
        made = (self.make_jobs((key,), moved) for key in alone)
        return sorted(itertools.chain.from_iterable(made), key=attrgetter("commit"))

    def copies(self, moving: Collection[GroupKey]) -> _Copies:
        """Return the copies of these groups."""
        groups = frozenset(moving)
        found = self._copies.get(groups)
        if found is None:
            shared, by_family = self.shared, dict[int, list[GroupKey]]()
            for key in groups & shared.keys():
                by_family.setdefault(shared[key], []).append(key)
            jobs = [job for job in self.own_jobs if job.key in groups]
            if by_family:
                made = [self.jobs_of_family(tuple(keys)) for keys in by_family.values()]
                jobs += itertools.chain.from_iterable(made)
                jobs.sort(key=attrgetter("commit"))
            found = self._copies[groups] = _Copies(jobs, self.windows, len(self._trace.steps))
        return found

    def jobs_of_family(self, keys: tuple[GroupKey, ...]) -> list[Job]:
        """Return the jobs of those groups of a family that move.

        They do not depend on what else moves, so that they are made once.
        """
        found = self._jobs.get(keys)
        if found is None:
            storages, windows, groups = self._trace.storages, self.windows, self._trace.group_by_key
            wanted = set(keys)
            moved = {
                item
                for key in keys
                for item in groups[key].storages
                if windows[item] is not None and wanted.issuperset(storages[item].holders)
            }
            found = self._jobs[keys] = self.make_jobs(keys, moved) if moved else []
        return found

    def make_jobs(self, keys: Collection[GroupKey], moved: Collection[int]) -> list[Job]:
        """Return the jobs of ``keys``, which are all holders of ``moved``, in order of commit."""
        traced, groups = self._trace.storages, self._trace.group_by_key
        jobs = []
        for key in keys:
            group = groups[key]
            storages = [item for item in group.storages if item in moved]
            if storages:
                nbytes = sum([traced[item].nbytes for item in storages])
                free_by = min([w.stop for w in map(self.windows.__getitem__, storages) if w]) - 1
                commit, use = self.commits[key], self.uses[key]
                jobs.append(
                    Job(key, group.name, commit, use, storages, nbytes, nbytes, free_by, key)
                )
        if len(jobs) > 1:
            self._share(jobs)
        return jobs

    def _share(self, jobs: list[Job]) -> None:
        """Sort jobs by commit; leave each storage's copies to its first commit and first use."""
        traced = self._trace.storages
        jobs.sort(key=attrgetter("commit"))
        out_job: dict[int, Job] = {}
        for job in jobs:
            job.out_bytes -= sum(traced[item].nbytes for item in job.storages if item in out_job)
            out_job.update((item, job) for item in job.storages if item not in out_job)
            last = max((out_job[item] for item in job.storages), key=attrgetter("commit"))
            job.last_out = last.key
        returned: set[int] = set()
        for job in sorted(jobs, key=attrgetter("use")):
            job.in_bytes -= sum(traced[item].nbytes for item in job.storages if item in returned)
            returned.update(job.storages)


class IterationModel:
    """A trace, with what the planner derives from it once.

    Args:
        trace: The trace. To time copies, it needs ``step_ms`` and ``bandwidth``.
    """

    def __init__(self, trace: Trace, structure: _Structure | None = None) -> None:
        self.trace = trace
        self._structure = structure or _Structure(trace)
        self.arranged: dict[tuple[frozenset[GroupKey], float, float], Any] = {}
        """What :func:`arrange` has returned, by its arguments."""

    @cached_property
    def untimed(self) -> IterationModel:
        """The same without times."""
        return IterationModel(replace(self.trace, step_ms=(), bandwidth=None), self._structure)

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

    @property
    def commits(self) -> Mapping[GroupKey, int]:
        """The step at which each group commits."""
        return self._structure.commits

    @property
    def uses(self) -> Mapping[GroupKey, int]:
        """The step at which each group is used; without those that never are."""
        return self._structure.uses

    @property
    def windows(self) -> Sequence[Window | None]:
        """For each storage, when it can be on the host; None if it never can."""
        return self._structure.windows

    def moving_storages(self, moving: Collection[GroupKey]) -> list[int]:
        """Return :meth:`Trace.moving_storages`, without those that have no :class:`Window`."""
        return self._structure.copies(moving).storages

    def fitting_groups(self, groups: Collection[GroupKey]) -> frozenset[GroupKey]:
        """Return those of the given groups that have a storage that can move if they all do."""
        return frozenset([job.key for job in self.jobs(groups)])

    def moving_cost_ms(self, moving: Collection[GroupKey]) -> float:
        """Return by how much moving these groups lengthens an iteration, excluding stalls."""
        nbytes = 0
        if self.trace.ms_per_moved_gb:
            nbytes = sum(job.out_bytes for job in self.jobs(moving))
        return self.trace.moving_cost_ms(len(moving), nbytes)

    def jobs(self, moving: Collection[GroupKey], staying: Collection[int] = ()) -> list[Job]:
        """Return the jobs of these groups in order of commit, and thus of D2H copies.

        A group has no job if none of its storages can move.

        Args:
            moving: The groups that move.
            staying: Storages that stay although they could move.
        """
        if staying:
            moved = set(self.moving_storages(moving)).difference(staying)
            return self._structure.make_jobs(moving, moved)
        return self._structure.copies(moving).jobs

    def most_absent_bytes(self, moving: Collection[GroupKey]) -> Floats:
        """Return, per step, the bytes on the host if groups free at commit and reload at use."""
        return self._structure.copies(moving).most_absent_bytes
