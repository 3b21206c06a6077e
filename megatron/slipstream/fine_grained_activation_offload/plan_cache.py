# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Plans with their measurements, by the sequence of marks and the assignment of the layers.

[Note: Fewer iterations]
Within a budget, several assignments are measured one after the other, so each gets fewer
iterations. All that may moves in the iteration that is recorded, as by the plan without times that
is made from it, so the next one is timed. A plan made from times warms up while memory is read. One
iteration is enough to plan from its times, and to see that a plan made from times is as predicted;
if it is not, as many are timed as otherwise.
"""

from __future__ import annotations

import enum
import statistics
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Optional

from megatron.slipstream.fine_grained_activation_offload.backend import Event
from megatron.slipstream.fine_grained_activation_offload.cost_trial import CostTrial, Overhead
from megatron.slipstream.fine_grained_activation_offload.host_pool import HostPool
from megatron.slipstream.fine_grained_activation_offload.recorder import MemoryReader
from megatron.slipstream.fine_grained_activation_offload.step_clock import (
    NUM_TIMED,
    NUM_WARMUPS,
    PEAK_TOLERANCE,
    TOLERANCE,
    StepClock,
    Times,
)
from megatron.slipstream.plan.actions import Plan
from megatron.slipstream.plan.host_layout import lay_out
from megatron.slipstream.plan.operations import derive_schedule
from megatron.slipstream.plan.settings import Assignment
from megatron.slipstream.plan.trace import MemoryReading, Step, StepsKey

MAX_PLANS = 32
"""Maximum number of plans, one per assignment and sequence of marks (that is, per number of
micro-batches)."""

MAX_LAYOUTS_LEFT = 3
"""Number of iterations with buffers other than the layout's after which it is no longer used."""


class IterationProbe:
    """Measures one iteration that follows its plan: times by ``clock``, and device memory."""

    def __init__(self, clock: Optional[StepClock], memory: Optional[MemoryReader]) -> None:
        self.clock = clock
        self.memory = memory

    def begin_step(self) -> None:
        """Begin a step: call when the host reaches a mark, and once at the end."""
        if self.clock is not None:
            self.clock.note_step()
        if self.memory is not None:
            self.memory.begin_step()

    def end_step(self) -> None:
        """End a step: call when the actions of the mark are done."""
        if self.memory is not None:
            self.memory.end_step()


class Phase(enum.Enum):
    """How far the plan of an iteration has come."""

    RECORD = "there is none: it is made from the next iteration"
    WARM_UP = "iterations that follow it allocate, and are not measured"
    MEMORY_READ = "device memory is read in the next iteration"
    TIMED = "iterations are timed"
    TIMES_READ = "enough are timed, and their times are read once the device has finished them"
    TRIAL = "iterations alternate with iterations without the engine"
    SETTLED = "nothing more is measured"
    DECLINED = "nothing can move within the allowed overhead: the engine is left out"

    __hash__ = object.__hash__  # Enum's own is a Python function.

    @property
    def is_last(self) -> bool:
        return self is Phase.SETTLED or self is Phase.DECLINED


_NEXT = {
    # Memory is read in a warm iteration that is not timed, since reading takes time. It is read in
    # each round: memory freed between two marks counts as allocated up to the second one, which is
    # right for a peak between the two only if the plan releases the same memory. It may also be the
    # first reading: an iteration that began like another one was recorded without reading memory.
    Phase.WARM_UP: (NUM_WARMUPS - 1, Phase.MEMORY_READ),
    Phase.MEMORY_READ: (1, Phase.TIMED),
    Phase.TIMED: (NUM_TIMED, Phase.TIMES_READ),
}
"""For each phase, its number of iterations and the next phase."""

_NUM_IN_ROUND = sum(number for number, _ in _NEXT.values())

NUM_UNTIL_TIMED = 1 + 2 * (_NUM_IN_ROUND + 1)
"""Number of iterations after which a plan has been updated from times twice, if all have the same
marks: one is recorded, and those of a round are timed. The device may still be busy when the last
one of a round ends, so that its times are read one iteration later."""


@dataclass(eq=False)
class PlanEntry:
    """The plan for a sequence of marks, and measurements of iterations that followed it to the end.

    A plan that is made again replaces the one in its entry.
    """

    plan: Plan
    key: StepsKey
    """Its sequence of marks, and the assignment of the layers."""
    planned_ms: float = 0.0
    """Predicted time of an iteration; 0 if the plan was made without times."""
    num_rounds: int = 0
    phase: Phase = Phase.WARM_UP
    num_in_phase: int = 0
    """Number of iterations in this phase that followed the plan to the end."""
    times: list[Times] = field(default_factory=list)
    memory: tuple[MemoryReading, ...] = ()
    """Device memory measured in one of these iterations."""
    earlier: tuple[tuple[int, float], ...] = ()
    """For each earlier plan: moving groups, and the time of an iteration excluding stalls."""
    trial: Optional[CostTrial] = None
    num_trials: int = 0
    tried: Optional[Overhead] = None
    """The measured overhead, if a trial of this plan found it within the limit."""
    followed_by: tuple[Optional[StepsKey], Optional[StepsKey]] = (None, None)
    """Steps of the iterations that came after the last two iterations with these steps."""
    layout: Any = None
    """The layout of its host buffers in a pool's slabs; None if they do not fit."""
    layout_generation: Optional[int] = None
    steps: Any = None
    """The steps of the plan in C++, created on first use."""
    num_layouts_left: int = 0
    """Number of iterations that requested host buffers other than the layout's."""
    num_passes: int = 0
    """Number of times that forward enters a model chunk, also in iterations without marks."""

    def __post_init__(self) -> None:
        if self.is_of_budget:
            self.phase = Phase.MEMORY_READ

    def renew(self, plan: Plan) -> None:
        """Replace the plan, dropping the measurements of the former one."""
        renewed = PlanEntry(plan, self.key, num_passes=self.num_passes)
        renewed.followed_by = self.followed_by
        vars(self).update(vars(renewed))

    def note_followed(self) -> None:
        """Record an iteration that followed the plan to the end."""
        self.num_in_phase += 1
        most, following = _NEXT.get(self.phase, (0, self.phase))
        if self.num_in_phase == most:
            self.phase, self.num_in_phase = following, 0

    def layout_in(self, pool: HostPool) -> Any:
        """Return the ``Layout`` of its buffers in the pool's slabs.

        None if there is too little room, while the plan is not known to be followed, or if
        iterations request other buffers, for example because sizes vary.
        """
        if self.phase is Phase.WARM_UP or self.num_layouts_left == MAX_LAYOUTS_LEFT:
            return None
        if self.layout_generation != pool.generation:
            buffers = lay_out(derive_schedule(self.plan).host_requests(), pool.slab_lengths)
            self.layout = None if buffers is None else pool.make_layout(buffers)
            self.layout_generation = pool.generation
        return self.layout

    @property
    def is_followed_by_itself(self) -> bool:
        """Whether the last two iterations with these steps were followed by the same steps."""
        return self.followed_by[0] is self.followed_by[1] is self.key

    @property
    def latest_times(self) -> Optional[Times]:
        return self.times[-1] if self.times else None

    @property
    def num_moving(self) -> int:
        return sum(group.moves for group in self.plan.groups)

    @property
    def is_of_budget(self) -> bool:
        """Whether settings of layers are chosen within a budget: [Note: Fewer iterations]."""
        return bool(self.key.assignment)

    @property
    def has_enough_times(self) -> bool:
        """Whether the plan can be judged: it need not be timed again, or has been often enough."""
        if self.is_of_budget and len(self.times) == 1:
            return not self.planned_ms or self.is_as_predicted
        return len(self.times) == NUM_TIMED

    @property
    def is_as_predicted(self) -> bool:
        """Whether measured time and memory match the prediction of a plan built from times.

        Within a budget also if it takes another time without waits for copies: no plan is faster.
        """
        if not self.planned_ms:
            return False
        peaks = self.plan.peak_bytes()
        if peaks is not None and self.memory:
            measured_bytes = max(reading.peak_bytes for reading in self.memory)
            if abs(measured_bytes - peaks[1]) > PEAK_TOLERANCE * measured_bytes:
                return False
        measured_ms = statistics.median(times.total_ms for times in self.times)
        least_ms = statistics.median(times.own_ms for times in self.times)
        off_ms = abs(measured_ms - self.planned_ms)
        if self.is_of_budget:
            off_ms = min(off_ms, measured_ms - least_ms)
        return off_ms < TOLERANCE * measured_ms


class TrialIteration(NamedTuple):
    """One iteration of a trial, or of a plan that offloads nothing."""

    entry: PlanEntry
    plan: Plan
    is_left_out: bool
    start: Event


class PlanCache:
    """Keeps the entries, and predicts the next one.

    Plans of different ranks need not agree, since plans do not affect communication. All but
    :meth:`put` and :meth:`find` only see the plans of the current assignment: another one may have
    the same marks and save other storages.
    """

    def __init__(self) -> None:
        self.assignment: Assignment = ()
        """The current assignment; empty: as the model was built."""
        self._entries: dict[StepsKey, PlanEntry] = {}
        """In order of use, most recent last."""
        self._last: Optional[PlanEntry] = None
        """The entry of the last iteration that had marks."""
        self._departed: set[Assignment] = set()
        """Assignments with an iteration that has departed and could not be planned."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, entry: PlanEntry) -> bool:
        return self._entries.get(entry.key) is entry

    def clear(self, but_of: Container[Assignment] = ()) -> None:
        """Drop all entries but those of some assignments."""
        self._entries = {k: e for k, e in self._entries.items() if k.assignment in but_of}
        self._last = None
        self._departed.clear()

    def put(self, plan: Plan) -> PlanEntry:
        """Add a plan, or replace the one for the same steps."""
        entry = self._entries.pop(plan.trace.steps_key, None)
        if entry is None:
            entry = PlanEntry(plan, plan.trace.steps_key)
        else:
            entry.renew(plan)
        self._entries[entry.key] = entry
        if len(self._entries) > MAX_PLANS:
            del self._entries[next(iter(self._entries))]
        return entry

    def forget(self, entry: PlanEntry) -> None:
        """Drop the plan for these steps, so that the next iteration with them builds a new one."""
        self._entries.pop(entry.key, None)

    def is_only(self, entry: PlanEntry) -> bool:
        """Return whether all iterations so far, at least three, had the plan of this entry."""
        if not entry.is_followed_by_itself or self.assignment in self._departed:
            return False
        return len(self._entries) == 1 or len(list(self._current())) == 1

    def note_departure(self) -> None:
        """Record that an iteration unlike all others cannot be planned; it may come again."""
        self._departed.add(self.assignment)

    def plans(self) -> list[Plan]:
        return [entry.plan for entry in self._entries.values()]

    def find(self, steps: StepsKey) -> Optional[PlanEntry]:
        return self._entries.get(steps)

    def newest(self) -> Optional[PlanEntry]:
        """Return the most recently used entry of the current assignment, if any."""
        return next(reversed(list(self._current())), None)

    def find_beginning(self, steps: tuple[Step, ...]) -> Optional[PlanEntry]:
        """Return an entry whose plan begins with these steps, if any."""
        for entry in self._current():
            if entry.plan.trace.steps[: len(steps)] == steps:
                return entry
        return None

    def find_like(self, entry: PlanEntry, num_passes: int) -> Optional[PlanEntry]:
        """Return an entry for an iteration of ``num_passes`` passes: this one, or the last used."""
        first = [entry] if entry in self else []
        for known in (*first, *reversed(list(self._current()))):
            if known.num_passes == num_passes:
                return known
        return None

    def is_repeated(self, entry: PlanEntry, num_passes: int) -> bool:
        """Return whether such an iteration needs no bookkeeping: the last two were alike."""
        is_last = entry is self._last and entry.num_passes == num_passes
        return is_last and entry.is_followed_by_itself

    def note_order(self, entry: PlanEntry, num_passes: int) -> None:
        """Record an iteration: the entry with its steps, how often forward entered a chunk."""
        before = self._last
        if before is not None and before.key.assignment == entry.key.assignment:
            before.followed_by = (before.followed_by[1], entry.key)
        self._last, entry.num_passes = entry, num_passes
        if entry in self:
            self._entries[entry.key] = self._entries.pop(entry.key)

    def after(self, entry: PlanEntry) -> Optional[PlanEntry]:
        """Predict the entry of the iteration after one that had ``entry``.

        It is the one that came next both of the last two times; otherwise ``entry`` again, since
        the number of micro-batches rarely changes.
        """
        if entry not in self:
            return None
        earlier, last = entry.followed_by
        expected = self._entries.get(last) if last is not None and last is earlier else None
        return expected or entry

    def _current(self) -> Iterator[PlanEntry]:
        for key, entry in self._entries.items():
            if key.assignment == self.assignment:
                yield entry
