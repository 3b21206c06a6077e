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
STEPS_AT_ONCE = 32
"""Number of steps whose bounds are computed together."""
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
        self._windows: list[Window] = [window for window in found if window is not None]
        self._start_ms = np.array(model.start_ms)
        self._most_absent = model.most_absent_bytes(movable)

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
        steps = self._steps
        (commits, out_ms), (uses, in_ms) = self._before, self._after
        absent = present[steps] - peak_bytes
        out_ms, in_ms = out_ms + absent / self.out_rate, in_ms + absent / self.in_rate
        found = [(self._left, commits, out_ms), (uses, self._returns, in_ms)]
        if not self.at_marks:
            # Each of the two counts the whole step; together they may count it only once.
            step_ms = self._start_ms[steps + 1] - self._start_ms[steps]
            found.append((uses, commits, out_ms + in_ms + step_ms))
        stalls: list[_Stall] = []
        for last, first, ms in found:
            places = ((absent > 0) & (ms > 0)).nonzero()[0]
            columns = (last[places].tolist(), first[places].tolist(), ms[places].tolist())
            stalls += map(_Stall, *columns)
        return _most_without_overlap(stalls) * (1 - ROUNDING)

    @cached_property
    def _steps(self) -> Ints:
        num_steps = len(self._model.trace.steps)
        if num_steps <= MAX_STEPS:
            return np.arange(num_steps)
        even = np.linspace(0, num_steps - 1, MAX_STEPS * 3 // 4).astype(int)
        highest = np.argsort(-self._model.present_bytes, kind="stable")[: MAX_STEPS // 4]
        return np.union1d(even, highest)

    @property
    def _left(self) -> Ints:
        """For each step, the mark by which all that is off the device until the next is freed."""
        return self._steps if self.at_marks else self._steps + 1

    @property
    def _returns(self) -> Ints:
        """For each step, the mark from which it may be reloaded."""
        return self._steps + 1 if self.at_marks else self._steps

    @cached_property
    def _before(self) -> tuple[Ints, Floats]:
        windows = sorted(self._windows, key=lambda window: window.begin)
        marks = [window.begin for window in windows]
        return self._least(marks, windows, self._left, self.out_rate)

    @cached_property
    def _after(self) -> tuple[Ints, Floats]:
        windows = sorted(self._windows, key=lambda window: -window.stop)
        return self._least(
            [window.stop for window in windows], windows, self._returns, self.in_rate
        )

    def _least(
        self, marks: Sequence[int], windows: Sequence[Window], at: Ints, rate: float
    ) -> tuple[Ints, Floats]:
        """Return, for each step, the mark that implies the longest stall, and its least time.

        The time is that for no bytes off the device; each byte adds what its copy takes.

        Args:
            marks: A mark of each of the windows: where copies out begin, or copies back must end.
            windows: All windows, the ones with most time for their copies first.
            at: For each step, where copies out must end, or copies back may begin.
            rate: Bytes that are copied in a millisecond.
        """
        mark = np.array(marks, int)
        first = np.array([window.first for window in windows], int)
        stop = np.array([window.stop for window in windows], int)
        nbytes = np.array([window.nbytes for window in windows], float)
        found, least_ms = np.zeros(len(at), int), np.full(len(at), -np.inf)
        for begin in range(0, len(at), STEPS_AT_ONCE):
            rows = slice(begin, begin + STEPS_AT_ONCE)
            steps = self._steps[rows, None]
            near = ((first <= steps[-1]) & (stop > steps[0])).nonzero()[0]
            if not len(near):
                continue
            is_away = (first[near] <= steps) & (stop[near] > steps)
            away = np.where(is_away, nbytes[near], 0.0)
            others = away.cumsum(axis=1) - away
            time_ms = np.abs(self._start_ms[at[rows, None]] - self._start_ms[mark[near]])
            late_ms = np.where(is_away, -others / rate - time_ms, -np.inf)
            most = late_ms.argmax(axis=1)
            found[rows], least_ms[rows] = mark[near][most], late_ms.max(axis=1)
        return found, least_ms


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


def _most_without_overlap(stalls: Collection[_Stall]) -> float:
    """Return the largest sum of stalls whose times do not overlap."""
    lasts: list[int] = []
    totals = [0.0]
    for stall in sorted(stalls):
        before = totals[bisect.bisect_left(lasts, stall.first)]
        lasts.append(stall.last)
        totals.append(max(totals[-1], before + stall.ms))
    return totals[-1]
