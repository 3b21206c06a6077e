# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A plan, with the measurements of iterations that followed it."""

from __future__ import annotations

import enum
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Optional

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
from megatron.slipstream.plan.trace import MemoryReading, StepsKey

MAX_LAYOUTS_LEFT = 3
"""Number of iterations with buffers other than the layout's after which it is no longer used."""


class IterationProbe:
    """Measures one iteration that follows its plan.

    Args:
        clock: Takes times; None to take none.
        memory: Reads device memory; None to read none.
    """

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
    """How far the measurement of iterations that follow a plan has progressed."""

    WARM_UP = "they allocate, and are not measured"
    MEMORY_READ = "device memory is read in the next one"
    TIMED = "they are timed"
    TIMES_READ = "enough are timed, and their times are read once the device has finished them"
    TRIAL = "they alternate with iterations without the engine"
    SETTLED = "nothing more is measured"
    DECLINED = "nothing can move within the allowed overhead: the engine is left out"

    __hash__ = object.__hash__  # Enum's own is a Python function.

    @property
    def is_last(self) -> bool:
        """Whether this phase is final."""
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


@dataclass
class PlanEntry:
    """A plan, with the measurements of iterations that followed it to the end."""

    plan: Plan
    planned_ms: float = 0.0
    """Predicted time of an iteration; 0 if the plan was made without times."""
    num_rounds: int = 0
    """Number of times the plan was rebuilt from measured times."""
    phase: Phase = Phase.WARM_UP
    num_in_phase: int = 0
    """Number of iterations in this phase that followed the plan to the end."""
    times: list[Times] = field(default_factory=list)
    memory: tuple[MemoryReading, ...] = ()
    """Device memory measured in one of these iterations."""
    earlier: tuple[tuple[int, float], ...] = ()
    """For each earlier plan, the number of moving groups and the time of an iteration excluding
    stalls."""
    trial: Optional[CostTrial] = None
    """The running trial, if any."""
    num_trials: int = 0
    """Number of trials of this plan and earlier ones."""
    tried: Optional[Overhead] = None
    """The measured overhead, if a trial of this plan found it within the limit."""
    followed_by: tuple[Optional[StepsKey], Optional[StepsKey]] = (None, None)
    """Steps of the iterations that came after the last two iterations with these steps."""
    layout: Any = None
    """The layout of its host buffers in a pool's slabs; None if they do not fit."""
    layout_generation: Optional[int] = None
    """Generation of those slabs."""
    steps: Any = None
    """The steps of the plan in C++, created on first use."""
    num_layouts_left: int = 0
    """Number of iterations that requested host buffers other than the layout's."""
    num_passes: int = 0
    """Number of times that forward enters a model chunk, also in iterations without marks."""

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

    def steps_by(self, compile_steps: Callable[[Plan], Any]) -> Any:
        """Return the plan's steps in C++; None if ``compile_steps`` returns None."""
        if self.steps is None:
            self.steps = compile_steps(self.plan)
        return self.steps

    @property
    def is_followed_by_itself(self) -> bool:
        """Whether the last two iterations with these steps were followed by the same steps."""
        steps = self.plan.trace.steps_key
        return self.followed_by[0] is steps and self.followed_by[1] is steps

    @property
    def num_moving(self) -> int:
        """Number of moving groups."""
        return sum(group.moves for group in self.plan.groups)

    @property
    def is_as_predicted(self) -> bool:
        """Whether measured time and memory match the prediction of a plan built from times."""
        if not self.planned_ms:
            return False
        peaks = self.plan.peak_bytes()
        if peaks is not None and self.memory:
            measured_bytes = max(reading.peak_bytes for reading in self.memory)
            if abs(measured_bytes - peaks[1]) > PEAK_TOLERANCE * measured_bytes:
                return False
        measured_ms = statistics.median(times.total_ms for times in self.times)
        return abs(measured_ms - self.planned_ms) < TOLERANCE * measured_ms
