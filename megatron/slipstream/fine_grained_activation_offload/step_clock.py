# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Timing iterations on the compute stream: what the planner needs to know beside the trace."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Optional

from megatron.slipstream.fine_grained_activation_offload.backend import Backend, Event
from megatron.slipstream.fine_grained_activation_offload.copy_rates import CopyTime
from megatron.slipstream.fine_grained_activation_offload.copy_streams import Timings

NUM_WARMUPS = 2
"""Iterations of a plan that are not timed: the first ones allocate."""

NUM_TIMED = 3
"""Iterations of a plan that are timed. Of each step the median counts."""

MAX_ROUNDS = 3
"""How often a plan is made again from times. The first times are those of a plan that was made
without any: compute that stands still between its steps runs cooler, hence faster, and its host
has time to run ahead."""

MIN_DIFFERENCE = 8
MIN_SHARE_OF_GROUPS = 0.25
"""Plans that differ by fewer moving groups do not tell what one of them costs, nor do those that
differ by a smaller share of them: the line through their times is followed to no group at all, and
where the host sets the pace times vary by several percent. (An expert model was told to take no
time at all without its 92 groups, and 550 ms with them where 409 were measured.)"""

TOLERANCE = 0.01
"""A plan whose iterations take as long as it predicted, within this share, is not made again."""

PEAK_TOLERANCE = 0.001
"""Nor is one whose device peak is what it predicted, within this share."""


class Times(NamedTuple):
    """One iteration, in milliseconds of the compute stream."""

    step_ms: tuple[float, ...]
    """From each step to the next, the last to the end, beside waits for copies."""
    stall_ms: tuple[float, ...]
    """Of those steps, the time in such waits."""
    stall_ms_by_module: dict[str, float]
    copies: tuple[CopyTime, ...] = ()
    """When copies ran, from the first step on."""

    @property
    def own_ms(self) -> float:
        """Without the waits."""
        return sum(self.step_ms)

    @property
    def total_ms(self) -> float:
        """From the first step to the end."""
        return self.own_ms + sum(self.stall_ms)


class StepClock:
    """Times the steps of one iteration. The device is read when it has come that far."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.timings = Timings()
        """Filled in by the copy streams."""
        self._marks: list[tuple[Event, int]] = []
        """For each step its event, and how many stalls came before."""

    def note_step(self) -> None:
        """The host has come to a step; also called once at the end."""
        event = self._backend.timed_event(self._backend.current_stream())
        self._marks.append((event, len(self.timings.stalls)))

    def read(self) -> Optional[Times]:
        """The times; None if the device has not come to the end, or takes no times."""
        elapsed_ms, stalls = self._backend.elapsed_ms, self.timings.stalls
        if not self._marks or self._marks[0][0] is None:
            return None
        if elapsed_ms(self._marks[0][0], self._marks[-1][0]) is None:
            return None
        waited_ms = [elapsed_ms(stall.start, stall.stop) or 0.0 for stall in stalls]
        by_module: dict[str, float] = {}
        for stall, ms in zip(stalls, waited_ms, strict=True):
            by_module[stall.label] = by_module.get(stall.label, 0.0) + ms
        step_ms, stall_ms = [], []
        for (start, first), (stop, last) in zip(self._marks, self._marks[1:], strict=False):
            stalled = sum(waited_ms[first:last])
            step_ms.append(max(0.0, (elapsed_ms(start, stop) or 0.0) - stalled))
            stall_ms.append(stalled)
        return Times(tuple(step_ms), tuple(stall_ms), by_module, tuple(self._copy_times()))

    def _copy_times(self) -> Iterator[CopyTime]:
        begin = self._marks[0][0]
        for copies in self.timings.copies:
            start_ms = self._backend.elapsed_ms(begin, copies.start)
            stop_ms = self._backend.elapsed_ms(begin, copies.stop)
            # The iteration has ended on the device; a copy that nothing waits for may not have.
            if start_ms is not None and stop_ms is not None:
                yield CopyTime(copies.is_out, copies.nbytes, start_ms, stop_ms)


def typical_step_ms(runs: Sequence[Times]) -> tuple[float, ...]:
    """For each step the median of several iterations."""
    return tuple(map(statistics.median, zip(*(run.step_ms for run in runs), strict=True)))


def ms_per_group(runs: Sequence[tuple[int, float]]) -> float:
    """By how much one more moving group lengthens an iteration, waits left out.

    Args:
        runs: For each of some plans, how many groups move and how long its iterations took.

    Returns:
        The slope of the line through them; 0 where they do not differ enough to tell, or where
        without any group nothing would be left of an iteration.
    """
    numbers = [number for number, _ in runs]
    difference = max(numbers) - min(numbers)
    if difference < max(MIN_DIFFERENCE, MIN_SHARE_OF_GROUPS * max(numbers)):
        return 0.0
    slope, without_any_ms = statistics.linear_regression(numbers, [ms for _, ms in runs])
    return max(0.0, slope) if without_any_ms > 0 else 0.0
