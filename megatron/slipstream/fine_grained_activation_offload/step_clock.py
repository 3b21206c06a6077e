# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Times iterations on the compute stream, for the planner."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Optional

from megatron.slipstream.fine_grained_activation_offload.backend import Backend, Event
from megatron.slipstream.fine_grained_activation_offload.copy_rates import CopyTime
from megatron.slipstream.fine_grained_activation_offload.copy_streams import Timings

NUM_WARMUPS = 2
"""Number of iterations of a plan that are not timed: the first ones allocate."""

NUM_TIMED = 3
"""Number of timed iterations of a plan. The median of each step counts."""

MAX_ROUNDS = 3
"""Maximum number of times that a plan is rebuilt from measured times. The first times come from a
plan built without any: with stalls between its steps the GPU runs cooler, hence faster, and the
host has time to run ahead."""

MIN_DIFFERENCE = 8
MIN_SHARE_OF_GROUPS = 0.25
"""Plans must differ by at least MIN_DIFFERENCE groups and by this fraction of the moving groups to
yield the cost of a group: the line through their times is extrapolated to zero groups, and in a
launch-bound model times vary by several percent. (A MoE model was predicted to take no time without
its 92 groups, and 550 ms with them where 409 were measured.)"""

TOLERANCE = 0.01
"""Relative tolerance of the predicted time, within which a plan is not rebuilt."""

PEAK_TOLERANCE = 0.001
"""Relative tolerance of the predicted device peak, within which a plan is not rebuilt."""


class Times(NamedTuple):
    """Times of one iteration on the compute stream, in milliseconds."""

    step_ms: tuple[float, ...]
    """Time from each step to the next, or from the last to the end, excluding waits for copies."""
    stall_ms: tuple[float, ...]
    """Time spent in those waits in each step."""
    stall_ms_by_module: dict[str, float]
    copies: tuple[CopyTime, ...] = ()
    """Times of copies, relative to the first step."""

    @property
    def own_ms(self) -> float:
        """Total time excluding the waits."""
        return sum(self.step_ms)

    @property
    def waited_ms(self) -> float:
        """Total time of the waits."""
        return sum(self.stall_ms)

    @property
    def total_ms(self) -> float:
        return self.own_ms + self.waited_ms


class StepClock:
    """Times the steps of one iteration. Events are read once the device has completed them.

    Each replay of a captured iteration (``is_of_graph``) records them again; then they are read.
    """

    def __init__(self, backend: Backend, is_of_graph: bool = False) -> None:
        self._backend = backend
        self.timings = Timings(is_of_graph)
        """Filled in by the copy streams."""
        self._marks: list[tuple[Event, int]] = []
        """The event of each step, and the number of stalls before it."""

    def note_step(self) -> None:
        """Record a step: call when the host reaches it, and once at the end."""
        event = self._backend.timed_event(self._backend.current_stream())
        self._marks.append((event, len(self.timings.stalls)))

    def restart(self) -> None:
        """Discard the steps recorded so far."""
        self._marks.clear()
        self.timings.clear()

    def read(self) -> Optional[Times]:
        """Return the times; None if the device has not finished, or records no times."""
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
            # The iteration has ended on the device, but a copy that it does not wait for may not.
            if start_ms is not None and stop_ms is not None:
                yield CopyTime(copies.is_out, copies.nbytes, start_ms, stop_ms)


def typical_step_ms(runs: Sequence[Times]) -> tuple[float, ...]:
    """Return the median time of each step over several iterations."""
    return tuple(map(statistics.median, zip(*(run.step_ms for run in runs), strict=True)))


def ms_per_group(runs: Sequence[tuple[int, float]]) -> float:
    """Estimate how much one more moving group lengthens an iteration, excluding waits.

    That is the slope of a line fitted to the moving groups and times of ``runs``; 0 if they do not
    differ enough, or if the line gives no positive time for an iteration without groups.
    """
    numbers = [number for number, _ in runs]
    difference = max(numbers) - min(numbers)
    if difference < max(MIN_DIFFERENCE, MIN_SHARE_OF_GROUPS * max(numbers)):
        return 0.0
    slope, without_any_ms = statistics.linear_regression(numbers, [ms for _, ms in runs])
    return max(0.0, slope) if without_any_ms > 0 else 0.0
