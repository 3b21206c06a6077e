# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Measures the cost of a plan by comparing it with iterations without the engine.

[Note: Costs that plans do not predict]
A plan predicts the waits for copies. It does not predict the host's work for each group, which
matters in launch-bound models; nor slower launches while the link is busy, nor the power that
copies take from a power-limited GPU. An overhead limit covers all of these, so a plan with such a
limit is tried: iterations that follow it alternate with iterations without the engine. Its cost
beyond the predicted waits is divided by the moving groups and by their bytes, and the next plan is
charged for its own groups or bytes, whichever costs more. From the second trial on, the whole cost
is divided.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from typing import NamedTuple, Optional

from megatron.slipstream.plan.actions import Plan
from megatron.slipstream.plan.trace import Trace
from megatron.slipstream.plan.walk import simulate

MIN_PAIRS = 6
MAX_PAIRS = 24
"""Maximum number of pairs. More than the minimum run only if times vary."""

MAX_TRIALS = 4
"""Maximum number of plans tried per sequence of marks. If the last one fails, nothing moves."""

MARGIN = 0.1
"""Margin of the next plan below the limit, as a fraction of this plan's cost: the typical error of
a trial."""

RESOLUTION_PERCENT = 0.25
"""Resolution of an overhead; a lower limit is raised to it."""

STANDARD_ERRORS = 3.0
"""Distance of an overhead from the limit, in standard errors, that settles the decision."""


class Overhead(NamedTuple):
    """The overhead of iterations with the engine, in percent."""

    percent: float
    standard_error: float


class CostTrial:
    """Compares iterations with and without the engine."""

    def __init__(self, max_percent: float) -> None:
        self.max_percent = max(max_percent, RESOLUTION_PERCENT)
        self.off_ms: list[float] = []
        """Times of iterations without the engine, each compared with its two neighbors."""
        self._ratios: list[float] = []
        self._before_ms: Optional[float] = None
        self._off_ms: Optional[float] = None

    def note_without(self, ms: float) -> None:
        self._off_ms = ms

    def note_with(self, ms: Optional[float]) -> None:
        """Record the time of an iteration with the engine; None if it did not follow the plan."""
        if ms is not None and self._before_ms is not None and self._off_ms is not None:
            # Averaging the neighbors cancels drifts of the clock rate.
            self._ratios.append((self._before_ms + ms) / 2 / self._off_ms)
            self.off_ms.append(self._off_ms)
        self._before_ms, self._off_ms = ms, None

    @property
    def overhead(self) -> Overhead:
        """The overhead from the pairs so far, at least two."""
        middle = statistics.median(self._ratios)
        # A plain standard deviation would be inflated by single disturbed iterations.
        deviation = 1.4826 * statistics.median(abs(ratio - middle) for ratio in self._ratios)
        error = 1.2533 * deviation / math.sqrt(len(self._ratios))
        return Overhead(100 * (middle - 1), 100 * error)

    @property
    def is_affordable(self) -> Optional[bool]:
        """Whether the overhead is within the limit; None if more pairs are needed."""
        if len(self._ratios) < MIN_PAIRS:
            return None
        percent, error = self.overhead
        is_clear = abs(percent - self.max_percent) > STANDARD_ERRORS * error
        if is_clear or error <= RESOLUTION_PERCENT or len(self._ratios) >= MAX_PAIRS:
            return percent <= self.max_percent
        return None


def trace_after(plan: Plan, trial: CostTrial, number: int) -> Trace:
    """Return the trace for the next plan, after the trial of one exceeded the limit.

    It is unknown whether groups or bytes cause the cost, so it is attributed to both.
    """
    off_ms = statistics.median(trial.off_ms)
    cost_ms = trial.overhead.percent / 100 * off_ms
    if number == 1:
        # The next plan predicts its own waits. If it exceeds the limit too, the whole cost counts.
        cost_ms = max(0.0, cost_ms - simulate(plan).stall_ms)
    cost_ms *= 1 + MARGIN
    per_group_ms = cost_ms / sum(group.moves for group in plan.groups)
    per_gb_ms = cost_ms / (plan.moved_nbytes / 1e9)
    if number >= MAX_TRIALS:
        budget_ms = trial.max_percent / 100 * off_ms
        per_group_ms = max(per_group_ms, 2 * budget_ms)
    before = plan.trace
    own_ms = sum(before.step_ms)
    return replace(
        before,
        step_ms=tuple(ms * off_ms / own_ms for ms in before.step_ms),
        ms_per_moved_group=max(per_group_ms, before.ms_per_moved_group),
        ms_per_moved_gb=max(per_gb_ms, before.ms_per_moved_gb),
    )
