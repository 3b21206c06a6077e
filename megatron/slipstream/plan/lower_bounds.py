# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Lower bounds on the peak and stall time of any plan: how far a plan may be from the optimum.

Bytes that are on the host between two steps are offloaded between their commit and that point, and
reloaded between that point and their use. So those that committed at step ``c`` or later are at
most what the link transfers from ``c`` on, and those that are used at step ``u`` or earlier are at
most what it transfers until ``u``. Only stalls lengthen these times. So each step implies a minimum
stall between some ``c`` and itself, and between itself and some ``u``; the minima of intervals that
do not overlap add up. The bounds ignore that there are few marks, that copies for other steps
occupy the link, and that both directions share it.

[Note: For any engine]
:func:`physical_bound_ms` holds for any engine, not only for plans. It assumes only the two marks of
a group (no D2H copy starts before its commit, no H2D copy ends after its use) and the rate of the
link. Memory may be freed at any time; a plan frees it at marks only, and may take longer.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megatron.slipstream.plan.actions import Plan
from megatron.slipstream.plan.model import (
    BYTES_PER_MS_AT_1_GB_PER_S,
    Floats,
    Ints,
    IterationModel,
    Window,
)
from megatron.slipstream.plan.trace import GroupKey, Trace

MAX_STEPS = 400
"""Maximum number of steps from which bounds are computed. Longer iterations use evenly spread
steps, and those with the most memory."""
NUM_HALVINGS = 24
"""Number of bisections in the search for the lowest peak."""
ROUNDING = 1e-9
MAX_RATE = 1e18
"""Cap on rates, in bytes per millisecond: an infinite bandwidth would give NaN."""


class LowerBounds:
    """Bounds for all plans that move only groups of ``movable``.

    Args:
        model: The timed trace.
        movable: The groups that may move.
        at_marks: Whether memory is freed and allocated at marks only, as in plans. Otherwise the
            bounds hold for any engine: bytes that are off the device at a peak between two marks
            may be freed as late as the second one, and their H2D copy may start at the first one.
    """

    def __init__(
        self, model: IterationModel, movable: Collection[GroupKey], at_marks: bool = True
    ) -> None:
        self._model = model
        self.at_marks = at_marks
        bandwidth = model.bandwidth
        # Use the higher rate, so that the bound holds whether or not the other direction is busy.
        d2h = max(bandwidth.d2h_gb_per_s, bandwidth.d2h_both_gb_per_s)
        h2d = max(bandwidth.h2d_gb_per_s, bandwidth.h2d_both_gb_per_s)
        self.out_rate = min(d2h * BYTES_PER_MS_AT_1_GB_PER_S, MAX_RATE)
        self.in_rate = min(h2d * BYTES_PER_MS_AT_1_GB_PER_S, MAX_RATE)
        found = (model.windows[item] for item in model.moving_storages(movable))
        windows: list[Window] = [window for window in found if window is not None]
        self.by_begin = _Windows(sorted(windows, key=lambda window: window.begin))
        self.by_stop = _Windows(sorted(windows, key=lambda window: -window.stop))
        self.start_ms = np.array(model.start_ms)
        self._most_absent = model.most_absent_bytes(movable)
        self._at: dict[int, _Step] = {}

    def lowest_peak_bytes(self, stall_ms: float = math.inf) -> float:
        """Return a lower bound on the device peak of plans that stall for at most this long."""
        present = self._model.present_bytes
        lowest = float((present - self._most_absent).max(initial=0.0))
        if math.isinf(stall_ms):
            return lowest
        reachable = float(present.max(initial=0.0))
        for _ in range(NUM_HALVINGS):
            middle = (lowest + reachable) / 2
            if self.least_stall_ms(middle) <= stall_ms:
                reachable = middle
            else:
                lowest = middle
        return lowest

    def least_stall_ms(self, peak_bytes: float) -> float:
        """Return a lower bound on the stall time of plans with at most this device peak.

        It is infinite if no plan reaches that peak.
        """
        present = self._model.present_bytes
        if (present - self._most_absent).max(initial=0.0) > peak_bytes:
            return math.inf
        stalls: list[_Stall] = []
        for step in self._steps:
            if present[step] > peak_bytes:
                if step not in self._at:
                    self._at[step] = _Step(self, step)
                stalls += self._at[step].least_stalls(float(present[step]) - peak_bytes)
        return _most_without_overlap(stalls) * (1 - ROUNDING)

    @cached_property
    def _steps(self) -> Sequence[int]:
        num_steps = len(self._model.trace.steps)
        if num_steps <= MAX_STEPS:
            return range(num_steps)
        even = np.linspace(0, num_steps - 1, MAX_STEPS * 3 // 4).astype(int)
        highest = np.argsort(-self._model.present_bytes, kind="stable")[: MAX_STEPS // 4]
        return sorted({*even.tolist(), *highest.tolist()})


def physical_bound_ms(plan: Plan | Trace) -> float:
    """Return the minimum time from the first mark to the end of the iteration, in milliseconds.

    Args:
        plan: A plan, for the peak that it reaches with the groups that it moves; or a trace, for
            the lowest possible peak. Without memory readings, only saved storages count.

    Raises:
        ValueError: The trace has no times or no bandwidth.
    """
    trace = plan.trace if isinstance(plan, Plan) else plan
    if len(trace.step_ms) != len(trace.steps):
        raise ValueError(
            "the trace has no compute times (Trace.step_ms); record it on a device that is timed"
        )
    if trace.bandwidth is None:
        raise ValueError("the trace has no bandwidth (Trace.bandwidth); measure it and add it")
    model = IterationModel(trace)
    if isinstance(plan, Plan):
        bounds = LowerBounds(model, [g.key for g in plan.groups if g.moves], at_marks=False)
        peak_bytes = float((model.present_bytes - plan.absent_bytes).max(initial=0.0))
    else:
        bounds = LowerBounds(model, [group.key for group in trace.groups], at_marks=False)
        peak_bytes = bounds.lowest_peak_bytes()
    return model.compute_ms + bounds.least_stall_ms(peak_bytes)


class _Stall(NamedTuple):
    """Compute stalls for at least ``ms`` between step ``first`` (exclusive) and ``last``."""

    last: int
    first: int
    ms: float


class _Windows:
    """Some windows as arrays."""

    def __init__(self, windows: Sequence[Window]) -> None:
        self.begin = np.array([window.begin for window in windows], int)
        self._first = np.array([window.first for window in windows], int)
        self.stop = np.array([window.stop for window in windows], int)
        self._nbytes = np.array([window.nbytes for window in windows], float)

    def away(self, step: int) -> tuple[Ints, Floats]:
        """Return those that can be off the device after a step, and the bytes before each."""
        places = ((self._first <= step) & (self.stop > step)).nonzero()[0]
        nbytes = self._nbytes[places]
        return places, nbytes.cumsum() - nbytes


class _Step:
    """The storages that can be off the device from one step to the next."""

    def __init__(self, bounds: LowerBounds, step: int) -> None:
        start_ms = bounds.start_ms
        # The mark by which all must be freed, and the one from which they may be reloaded.
        self._left, self._returns = (step, step + 1) if bounds.at_marks else (step + 1, step)
        # For each commit: the absent bytes that may have committed before it, the time available
        # to the later ones, and the step where that time begins. For each use, the same, and the
        # step where the time ends.
        out, self._out_others = bounds.by_begin.away(step)
        self._commits = bounds.by_begin.begin[out]
        self._out_ms = start_ms[self._left] - start_ms[self._commits]
        self._out_rate = bounds.out_rate
        back, self._in_others = bounds.by_stop.away(step)
        self._uses = bounds.by_stop.stop[back]
        self._in_ms = start_ms[self._uses] - start_ms[self._returns]
        self._in_rate = bounds.in_rate
        self._step_ms = float(start_ms[step + 1] - start_ms[step])

    def least_stalls(self, absent_bytes: float) -> list[_Stall]:
        """Return the minimum stalls before and after for this many bytes to be off the device."""
        if not len(self._commits):
            return []
        late_ms = (absent_bytes - self._out_others) / self._out_rate - self._out_ms
        most = int(late_ms.argmax())
        out = _Stall(self._left, int(self._commits[most]), float(late_ms[most]))
        late_ms = (absent_bytes - self._in_others) / self._in_rate - self._in_ms
        most = int(late_ms.argmax())
        back = _Stall(int(self._uses[most]), self._returns, float(late_ms[most]))
        found = [out, back]
        if self._left > self._returns:
            # Each of the two counts the whole step; together they may count it only once.
            both_ms = out.ms + back.ms + self._step_ms
            found.append(_Stall(back.last, out.first, both_ms))
        return [stall for stall in found if stall.ms > 0]


def _most_without_overlap(stalls: Collection[_Stall]) -> float:
    """Return the largest sum of stalls whose times do not overlap."""
    lasts: list[int] = []
    totals = [0.0]
    for stall in sorted(stalls):
        before = totals[bisect.bisect_left(lasts, stall.first)]
        lasts.append(stall.last)
        totals.append(max(totals[-1], before + stall.ms))
    return totals[-1]
