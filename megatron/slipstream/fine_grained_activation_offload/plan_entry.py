# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""One plan of a run, and what came of the iterations that followed it."""

from __future__ import annotations

import enum
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Optional

from megatron.slipstream.fine_grained_activation_offload.cost_trial import CostTrial, Overhead
from megatron.slipstream.fine_grained_activation_offload.host_pool import HostPool
from megatron.slipstream.fine_grained_activation_offload.host_sync_points import HostSyncPoints
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
"""After so many iterations that asked for other buffers than the layout has, the pool is asked."""


class IterationProbe:
    """Measures one iteration that follows its plan.

    Args:
        clock: Takes times, if they are to be taken.
        memory: Reads device memory, if it is to be read.
    """

    def __init__(self, clock: Optional[StepClock], memory: Optional[MemoryReader]) -> None:
        self.clock = clock
        self.memory = memory

    def begin_step(self) -> None:
        """The host has come to a mark; also called once at the end."""
        if self.clock is not None:
            self.clock.note_step()
        if self.memory is not None:
            self.memory.begin_step()

    def end_step(self) -> None:
        """The actions due at the mark are done."""
        if self.memory is not None:
            self.memory.end_step()


class Phase(enum.Enum):
    """How far measuring the iterations that follow a plan has come."""

    WARM_UP = "they allocate, and are not measured"
    MEMORY_READ = "device memory is read in the next one"
    TIMED = "they are timed"
    TIMES_READ = "enough are timed, and their times are read once the device has come that far"
    TRIAL = "they alternate with iterations without the engine"
    SETTLED = "nothing more is measured"
    DECLINED = "nothing can move within the allowed overhead: the engine is left out"

    @property
    def is_last(self) -> bool:
        """Whether no other phase follows."""
        return self is Phase.SETTLED or self is Phase.DECLINED


_NEXT = {
    # Warm, and not timed, since reading takes time. In each round: memory that vanishes between two
    # marks counts as there up to the second, and where the peak is between the two, that is right
    # only for a plan that releases the same. And it may be the first reading: where an iteration
    # began like another one, it was not read while it was recorded.
    Phase.WARM_UP: (NUM_WARMUPS - 1, Phase.MEMORY_READ),
    Phase.MEMORY_READ: (1, Phase.TIMED),
    Phase.TIMED: (NUM_TIMED, Phase.TIMES_READ),
}
"""After how many iterations which phase follows."""


@dataclass
class PlanEntry:
    """A plan, and what came of the iterations that followed it to its end."""

    plan: Plan
    planned_ms: float = 0.0
    """Predicted time of an iteration; 0 if the plan was made without times."""
    host_sync_points: HostSyncPoints = field(default_factory=dict)
    """Where the host waits too."""
    num_rounds: int = 0
    """How often it has been made again from times."""
    phase: Phase = Phase.WARM_UP
    num_in_phase: int = 0
    """Iterations that have followed the plan to its end since the phase began."""
    times: list[Times] = field(default_factory=list)
    memory: tuple[MemoryReading, ...] = ()
    """As read in one of them."""
    earlier: tuple[tuple[int, float], ...] = ()
    """Of the plans before this one, how many groups moved and what an iteration took beside
    waits."""
    trial: Optional[CostTrial] = None
    """Under way."""
    num_trials: int = 0
    """Of this plan and those before it."""
    tried: Optional[Overhead] = None
    """The overhead that a trial of this plan found within the limit."""
    followed_by: tuple[Optional[StepsKey], Optional[StepsKey]] = (None, None)
    """The iterations that came after ones like this the last two times."""
    layout: Any = None
    """Where its host buffers lie in the slabs of a pool; None if they have too little room."""
    layout_generation: Optional[int] = None
    """Of those slabs."""
    steps: Any = None
    """The steps of the plan in C++, once they were asked for."""
    num_layouts_left: int = 0
    """Iterations that asked for other host buffers than the layout has."""
    num_passes: int = 0
    """Times that forward enters a model chunk, in those that have no marks too."""

    def note_followed(self) -> None:
        """An iteration has followed the plan to its end."""
        self.num_in_phase += 1
        most, following = _NEXT.get(self.phase, (0, self.phase))
        if self.num_in_phase == most:
            self.phase, self.num_in_phase = following, 0

    def layout_in(self, pool: HostPool) -> Any:
        """The ``Layout`` of its buffers in the pool's slabs.

        None if there is too little room, before the plan is known to be followed, and where
        iterations ask for other buffers, as where sizes vary from one to the next.
        """
        if self.phase is Phase.WARM_UP or self.num_layouts_left == MAX_LAYOUTS_LEFT:
            return None
        if self.layout_generation != pool.generation:
            buffers = lay_out(derive_schedule(self.plan).host_requests(), pool.slab_lengths)
            self.layout = None if buffers is None else pool.make_layout(buffers)
            self.layout_generation = pool.generation
        return self.layout

    def steps_by(self, compile_steps: Callable[[Plan], Any]) -> Any:
        """The plan's steps in C++; None if ``compile_steps`` has none."""
        if self.steps is None:
            self.steps = compile_steps(self.plan)
        return self.steps

    @property
    def num_moving(self) -> int:
        """Groups that move."""
        return sum(group.moves for group in self.plan.groups)

    @property
    def is_as_predicted(self) -> bool:
        """Whether a plan that was made from times takes the time and the memory that it said."""
        if not self.planned_ms:
            return False
        peaks = self.plan.peak_bytes()
        if peaks is not None and self.memory:
            measured_bytes = max(reading.peak_bytes for reading in self.memory)
            if abs(measured_bytes - peaks[1]) > PEAK_TOLERANCE * measured_bytes:
                return False
        measured_ms = statistics.median(times.total_ms for times in self.times)
        return abs(measured_ms - self.planned_ms) < TOLERANCE * measured_ms
