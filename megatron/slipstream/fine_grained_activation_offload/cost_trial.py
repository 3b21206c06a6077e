# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The cost of a plan, measured: iterations that follow it, and iterations without the engine.

[Note: Costs that no plan foresees]
A plan knows the waits for copies. It does not know what the host does for each group, which counts
where the host sets the pace; nor that launches take longer while the link is busy, nor that copies
take power from a GPU which is short of it. An allowed overhead is a promise about all of it. So a
plan that is made for one is tried: in turn an iteration follows it and an iteration leaves the
engine out altogether. What it costs beyond the waits that it foresaw is shared among the groups
that move, and among their bytes, and the next plan has to afford that for its own groups and for
its own bytes; from the second one on all that it costs is.
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
"""Iterations of each kind. More than the least are run where times vary too much to tell."""

MAX_TRIALS = 4
"""Plans tried for a sequence of marks. If the last one exceeds the limit, nothing moves."""

MARGIN = 0.1
"""What the next plan stays below its limit by, as a share of what this one cost: a trial errs by
as much."""

RESOLUTION_PERCENT = 0.25
"""A lower overhead is not told apart from none."""

STANDARD_ERRORS = 3.0
"""How far from the limit an overhead is before more pairs would not change what it is taken for."""


class Overhead(NamedTuple):
    """By how much iterations with the engine are longer."""

    percent: float
    """The median of pairs."""
    standard_error: float
    """Of that median, in percent."""


class CostTrial:
    """Compares iterations with and without the engine.

    Args:
        max_percent: How much longer those with it may be.
    """

    def __init__(self, max_percent: float) -> None:
        self.max_percent = max(max_percent, RESOLUTION_PERCENT)
        self.off_ms: list[float] = []
        """The iterations without, each of which is compared with its two neighbours."""
        self._ratios: list[float] = []
        self._before_ms: Optional[float] = None
        self._off_ms: Optional[float] = None

    def note_without(self, ms: float) -> None:
        """An iteration without the engine took ``ms``."""
        self._off_ms = ms

    def note_with(self, ms: Optional[float]) -> None:
        """An iteration with the engine took ``ms``; None if it was of another kind."""
        if ms is not None and self._before_ms is not None and self._off_ms is not None:
            # Drifts of clock rates cancel between the neighbours.
            self._ratios.append((self._before_ms + ms) / 2 / self._off_ms)
            self.off_ms.append(self._off_ms)
        self._before_ms, self._off_ms = ms, None

    @property
    def overhead(self) -> Overhead:
        """The overhead by the pairs so far, of which there are at least two."""
        middle = statistics.median(self._ratios)
        # Single iterations that were disturbed would blow a standard deviation up.
        deviation = 1.4826 * statistics.median(abs(ratio - middle) for ratio in self._ratios)
        error = 1.2533 * deviation / math.sqrt(len(self._ratios))
        return Overhead(100 * (middle - 1), 100 * error)

    @property
    def is_affordable(self) -> Optional[bool]:
        """Whether the overhead is within the limit; None if more pairs have to tell."""
        if len(self._ratios) < MIN_PAIRS:
            return None
        percent, error = self.overhead
        is_clear = abs(percent - self.max_percent) > STANDARD_ERRORS * error
        if is_clear or error <= RESOLUTION_PERCENT or len(self._ratios) >= MAX_PAIRS:
            return percent <= self.max_percent
        return None


def trace_after(plan: Plan, trial: CostTrial, number: int) -> Trace:
    """The trace for the next plan, after one exceeded the limit.

    Whether groups or bytes cost that much is unknown, so the cost is shared among both.

    Args:
        plan: That was tried.
        trial: What it cost.
        number: Of the trial, from 1 on.
    """
    off_ms = statistics.median(trial.off_ms)
    cost_ms = trial.overhead.percent / 100 * off_ms
    if number == 1:
        # The next plan foresees its own waits. If it exceeds the limit too, it pays for all.
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
