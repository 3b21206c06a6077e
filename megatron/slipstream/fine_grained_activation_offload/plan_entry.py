# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""One plan of a run, and what came of the iterations that followed it."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Optional

from megatron.slipstream.fine_grained_activation_offload.cost_trial import CostTrial, Overhead
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
from megatron.slipstream.plan.build import Plan
from megatron.slipstream.plan.trace import MemoryReading, Step

Steps = tuple[Step, ...]


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
        """What is due at the mark has been done."""
        if self.memory is not None:
            self.memory.end_step()


@dataclass
class PlanEntry:
    """A plan, and what came of the iterations that followed it to its end."""

    plan: Plan
    planned_ms: float = 0.0
    """What an iteration takes as predicted; 0 if the plan was made without times."""
    host_sync_points: HostSyncPoints = field(default_factory=dict)
    """Where the host waits too."""
    num_rounds: int = 0
    """How often it has been made anew from times."""
    num_iterations: int = 0
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
    """What a trial of this plan found that was within the limit."""
    followed_by: tuple[Optional[Steps], Optional[Steps]] = (None, None)
    """What came after iterations like this one the last two times."""
    num_passes: int = 0
    """Times that forward enters a model chunk, in those that have no marks too."""

    @property
    def num_moving(self) -> int:
        """Groups that move."""
        return sum(group.moves for group in self.plan.groups)

    @property
    def declines(self) -> bool:
        """Whether the plan was made for an allowed overhead and nothing can move within it."""
        is_limited = self.plan.options.max_overhead_percent is not None
        return is_limited and self.planned_ms > 0 and not self.num_moving

    @property
    def is_settled(self) -> bool:
        """Whether nothing more is to be learned of it."""
        return self.declines or (len(self.times) >= NUM_TIMED and self.trial is None)

    @property
    def is_to_be_timed(self) -> bool:
        return NUM_WARMUPS <= self.num_iterations < NUM_WARMUPS + NUM_TIMED

    @property
    def is_memory_to_be_read(self) -> bool:
        # Warm, and not timed, since reading takes time. In each round: what vanishes between two
        # marks counts as there up to the second, and where the peak is between the two, that is
        # right only for a plan that releases the same. And it may be the first reading: where
        # an iteration began like another one, it was not read while it was recorded.
        return self.num_iterations == NUM_WARMUPS - 1

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
