# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A cache of plans, keyed by the sequence of marks and the assignment of the layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Optional

from megatron.slipstream.fine_grained_activation_offload.plan_entry import PlanEntry
from megatron.slipstream.plan.actions import Plan
from megatron.slipstream.plan.settings import Assignment
from megatron.slipstream.plan.trace import Step, StepsKey

MAX_PLANS = 32
"""Maximum number of plans, one per assignment and sequence of marks (that is, per number of
micro-batches)."""


class PlanCache:
    """Keeps plans with their measurements, and predicts the next one.

    Plans of different ranks need not agree, since plans do not affect communication. All but
    :meth:`put` and :meth:`entry_of` only see the plans of the current assignment: another one may
    have the same marks and save other storages.
    """

    def __init__(self) -> None:
        self.assignment: Assignment = ()
        """The current assignment; empty: as the model was built."""
        self._entries: dict[StepsKey, PlanEntry] = {}
        """In order of use, most recent last."""
        self._last_steps: Optional[StepsKey] = None
        """Steps of the last iteration that had marks."""
        self._newest: Optional[PlanEntry] = None
        """The entry of the last iteration, to avoid hashing; None if entries have changed since."""
        self._departed: set[Assignment] = set()
        """Assignments with an iteration that has departed and could not be planned."""

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Drop all plans."""
        self._entries.clear()
        self._last_steps = self._newest = None
        self._departed.clear()

    def put(self, entry: PlanEntry) -> None:
        """Replace the plan for the same steps."""
        self._newest = None
        steps = entry.plan.trace.steps_key
        before = self._entries.pop(steps, None)
        if before is not None:
            entry.followed_by, entry.num_passes = before.followed_by, before.num_passes
        self._entries[steps] = entry
        if len(self._entries) > MAX_PLANS:
            del self._entries[next(iter(self._entries))]

    def forget(self, plan: Plan) -> None:
        """Drop the plan for these steps, so that the next iteration with them builds a new one."""
        self._newest = None
        self._entries.pop(plan.trace.steps_key, None)

    def entry_of(self, plan: Optional[Plan]) -> Optional[PlanEntry]:
        """Return the entry of a plan; None if it was dropped."""
        newest = self._newest
        if newest is not None and newest.plan is plan:
            return newest
        entry = self._entries.get(plan.trace.steps_key) if plan is not None else None
        return entry if entry is not None and entry.plan is plan else None

    def is_only(self, entry: PlanEntry) -> bool:
        """Return whether all iterations so far, at least three, had the plan of this entry."""
        if not entry.is_followed_by_itself or self.assignment in self._departed:
            return False
        return len(self._entries) == 1 or len(list(self._current())) == 1

    def note_departure(self) -> None:
        """Record that an iteration unlike all others cannot be planned; it may come again."""
        self._departed.add(self.assignment)

    def plans(self) -> list[Plan]:
        """Return all plans in the cache."""
        return [entry.plan for entry in self._entries.values()]

    def find(self, steps: StepsKey) -> Optional[Plan]:
        """Return the plan for these steps, if any."""
        entry = self._entries.get(steps)
        return entry.plan if entry is not None else None

    def newest(self) -> Optional[Plan]:
        """Return the most recently used plan of the current assignment, if any."""
        return next((entry.plan for entry in reversed(list(self._current()))), None)

    def find_beginning(self, steps: tuple[Step, ...]) -> Optional[Plan]:
        """Return a plan that begins with these steps, if any."""
        for entry in self._current():
            if entry.plan.trace.steps[: len(steps)] == steps:
                return entry.plan
        return None

    def find_like(self, plan: Plan, num_passes: int) -> Optional[Plan]:
        """Return a plan for an iteration of ``num_passes`` passes, if any.

        Prefer the plan for the steps of ``plan``, then the most recently used one.
        """
        entries = self._entries
        first = [entries[plan.trace.steps_key]] if plan.trace.steps_key in entries else []
        for entry in (*first, *reversed(list(self._current()))):
            if entry.num_passes == num_passes:
                return entry.plan
        return None

    def is_repeated(self, plan: Plan, num_passes: int) -> bool:
        """Return whether such an iteration needs no bookkeeping: the last two were alike.

        Args:
            plan: The plan of the iteration.
            num_passes: Number of times that forward entered a model chunk.
        """
        entry = self._newest
        if entry is None or entry.plan is not plan or entry.num_passes != num_passes:
            return False
        return entry.is_followed_by_itself

    def note_order(self, plan: Plan, num_passes: int) -> None:
        """Record that an iteration had the steps of ``plan``.

        Args:
            plan: The plan.
            num_passes: Number of times that forward entered a model chunk.
        """
        steps = plan.trace.steps_key
        before = self._entries.get(self._last_steps) if self._last_steps is not None else None
        if before is not None and before.plan.trace.assignment == steps.assignment:
            before.followed_by = (before.followed_by[1], steps)
        self._last_steps = steps
        entry = self._newest = self._entries.pop(steps, None)
        if entry is not None:
            entry.num_passes = num_passes
            self._entries[steps] = entry

    def plan_after(self, plan: Plan) -> Optional[Plan]:
        """Predict the plan of the iteration after one that had ``plan``.

        It is the plan that came next both of the last two times; otherwise ``plan`` again, since
        the number of micro-batches rarely changes.
        """
        entry = self._entries.get(plan.trace.steps_key)
        if entry is None:
            return None
        earlier, last = entry.followed_by
        expected = self._entries.get(last) if last is not None and last == earlier else None
        return (expected or entry).plan

    def _current(self) -> Iterator[PlanEntry]:
        """Yield the entries of the current assignment, most recently used last."""
        for key, entry in self._entries.items():
            if key.assignment == self.assignment:
                yield entry
