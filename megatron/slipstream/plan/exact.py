# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The best plan of a small iteration, by mixed-integer programming (HiGHS).

The model has the three queues of an iteration. For each step, when its frees are done and when its
computation starts; for each group whether it moves, when its copy out ends and when its copy back
arrives; and for each storage and each step at which memory is short, whether it is away then. What
is away at a step has been copied out by then, and starts to come back at the next step at the
earliest. Copies out run in the order of commits and copies back in that of uses, as in all plans
that are made here.

It leaves out that copies slow each other down where directions share the link, that a copy out may
wait for a host buffer (edge E2), and the margins of time. So what it finds is timed again like
every other choice, and its optimum is a bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from megatron.slipstream.plan.trace import GroupKey
from megatron.slipstream.plan.workload import BYTES_PER_MS_AT_1_GB_PER_S, Job, Workload

MAX_JOBS = 60
MAX_BINARIES = 250
"""What is larger is not tried: it would take seconds."""
MAX_NODES = 20
"""Of the search tree."""
MAX_SECONDS = 1.0
"""What was not found by then is not used at all: half a search would be another one on a machine
that is busier."""
MAX_SPREAD = 1e4
"""Of the sizes of storages; the solver reckons with so many digits only."""
TOLERANCE = 1e-6
"""Of the solver, relative: what it may be off by is taken off the bound."""


@dataclass(frozen=True)
class Exact:
    """What the solver found."""

    moving: frozenset[GroupKey]
    bound: float
    """No plan in the order of commits and uses has a lower peak in bytes, or stall in ms."""
    is_proved: bool
    """Whether the bound is the optimum of the model, not only a bound of it."""


def find_exactly(
    workload: Workload,
    movable: frozenset[GroupKey],
    lowest_bytes: float,
    limit_bytes: float | None = None,
    budget_ms: float | None = None,
) -> Exact | None:
    """The set of groups with the least stall for a peak, or with the lowest peak for a stall.

    Args:
        workload: The timed trace.
        movable: The groups that may move.
        lowest_bytes: A peak that no plan of interest is below.
        limit_bytes: The peak; then the stall is minimised.
        budget_ms: The stall; then the peak is minimised.

    Returns:
        None if the iteration is too large, or if nothing was found.
    """
    jobs = workload.jobs(movable)
    if not 0 < len(jobs) <= MAX_JOBS:
        return None
    model = _Model(workload, jobs, limit_bytes if limit_bytes is not None else lowest_bytes)
    if model.num_away > MAX_BINARIES or model.spread > MAX_SPREAD:
        return None
    return model.solve(limit_bytes, budget_ms)


class _Model:
    """The variables are milliseconds, gigabytes, and choices between 0 and 1."""

    def __init__(self, workload: Workload, jobs: Sequence[Job], above_bytes: float) -> None:
        self._workload = workload
        self._jobs = jobs
        bandwidth = workload.bandwidth
        # Whichever is the higher, so that the optimum is a bound; 1e9 bytes are the unit.
        d2h = max(bandwidth.d2h_gb_per_s, bandwidth.d2h_both_gb_per_s)
        h2d = max(bandwidth.h2d_gb_per_s, bandwidth.h2d_both_gb_per_s)
        self._out_rate = d2h * BYTES_PER_MS_AT_1_GB_PER_S
        self._in_rate = h2d * BYTES_PER_MS_AT_1_GB_PER_S
        self._short = np.flatnonzero(workload.present_bytes > above_bytes).tolist()
        """The steps at which something has to be away."""
        self._windows = {
            item: window
            for job in jobs
            for item in job.storages
            if (window := workload.windows[item]) is not None
        }
        self._away: dict[tuple[int, int], int] = {}
        self._num_variables = 0
        self._lower: list[float] = []
        self._upper: list[float] = []
        self._is_integer: list[int] = []
        self._rows: list[tuple[dict[int, float], float]] = []
        """Each is a sum that is at least a number."""
        self._make_variables()

    @property
    def num_away(self) -> int:
        """Choices of what is away when."""
        return len(self._away)

    @property
    def spread(self) -> float:
        """How much larger the largest storage is than the smallest."""
        sizes = [window.nbytes for window in self._windows.values()]
        return max(sizes) / max(1, min(sizes))

    def solve(self, limit_bytes: float | None, budget_ms: float | None) -> Exact | None:
        """Minimise what is not given."""
        self._order_compute()
        self._order_copies()
        self._limit_memory(limit_bytes)
        end, compute_ms = self._starts[-1], self._workload.start_ms[-2]
        if budget_ms is not None:
            self._at_least({end: -1.0}, -(compute_ms + budget_ms))
        goal = end if limit_bytes is not None else self._peak
        result = milp(
            np.eye(1, self._num_variables, goal)[0],
            integrality=np.array(self._is_integer),
            bounds=Bounds(np.array(self._lower), np.array(self._upper)),
            constraints=self._constraints(),
            options={
                "node_limit": MAX_NODES,
                "mip_rel_gap": TOLERANCE,
                "time_limit": MAX_SECONDS,
            },
        )
        bound = result.mip_dual_bound
        if result.x is None or bound is None or not math.isfinite(bound):
            return None
        if "time limit" in result.message.lower():
            return None
        moving = (
            job.key for job, x in zip(self._jobs, self._moves, strict=True) if result.x[x] > 0.5
        )
        bound -= TOLERANCE * (1 + abs(bound))
        bound = max(0.0, bound - compute_ms) if limit_bytes is not None else bound * 1e9
        return Exact(frozenset(moving), bound, result.status == 0)

    def _variable(self, upper: float = math.inf, is_integer: bool = False) -> int:
        self._num_variables += 1
        self._lower.append(0.0)
        self._upper.append(upper)
        self._is_integer.append(int(is_integer))
        return self._num_variables - 1

    def _at_least(self, terms: dict[int, float], least: float) -> None:
        self._rows.append((terms, least))

    def _make_variables(self) -> None:
        num_steps = len(self._workload.trace.steps)
        self._peak = self._variable()
        self._freed = [self._variable() for _ in range(num_steps)]
        """When the frees of a step are done."""
        self._starts = [self._variable() for _ in range(num_steps)]
        """When the computation of a step starts."""
        self._moves = [self._variable(1.0, is_integer=True) for _ in self._jobs]
        self._out_ends = [self._variable() for _ in self._jobs]
        self._in_ends = [self._variable() for _ in self._jobs]
        self._goes = {item: self._variable(1.0) for item in self._windows}
        """Whether a storage moves; as integer as the groups."""
        for item, window in self._windows.items():
            for step in self._short:
                if window.first <= step < window.stop:
                    self._away[item, step] = self._variable(1.0, is_integer=True)

    def _order_compute(self) -> None:
        for step, (freed, start) in enumerate(zip(self._freed, self._starts, strict=True)):
            if step:
                ms = self._workload.trace.step_ms[step - 1]
                self._at_least({freed: 1.0, self._starts[step - 1]: -1.0}, ms)
            self._at_least({start: 1.0, freed: -1.0}, 0.0)

    def _order_copies(self) -> None:
        jobs = self._jobs
        for item, goes in self._goes.items():
            holders = [x for job, x in zip(jobs, self._moves, strict=True) if item in job.storages]
            for moves in holders:
                self._at_least({moves: 1.0, goes: -1.0}, 0.0)
            terms = dict.fromkeys(holders, -1.0)
            self._at_least({goes: 1.0, **terms}, 1.0 - len(holders))
        nbytes = sum(window.nbytes for window in self._windows.values())
        # No later than if nothing overlapped at all.
        late_ms = self._workload.compute_ms + nbytes * (1 / self._out_rate + 1 / self._in_rate)
        by_use = sorted(range(len(jobs)), key=lambda number: jobs[number].use)
        self._order_out(late_ms)
        before = -1
        for number in by_use:
            job, end = jobs[number], self._in_ends[number]
            takes = self._takes(job.in_storages, self._in_rate)
            if before >= 0:
                self._at_least({end: 1.0, before: -1.0, **takes}, 0.0)
            self._at_least({self._starts[job.use]: 1.0, end: -1.0}, 0.0)
            for item in job.in_storages:
                for step in self._away_steps(item):
                    terms = {
                        end: 1.0,
                        self._freed[step + 1]: -1.0,
                        self._away[item, step]: -late_ms,
                    }
                    self._at_least({**terms, **takes}, -late_ms)
            before = end

    def _order_out(self, late_ms: float) -> None:
        trace, before = self._workload.trace, -1
        for job, end in zip(self._jobs, self._out_ends, strict=True):
            takes = self._takes(job.out_storages, self._out_rate)
            # It starts as soon as compute reaches the commit, before the frees of that step.
            ms = trace.step_ms[job.commit - 1] if job.commit else 0.0
            reached = {self._starts[job.commit - 1]: -1.0} if job.commit else {}
            self._at_least({end: 1.0, **reached, **takes}, ms)
            if before >= 0:
                self._at_least({end: 1.0, before: -1.0, **takes}, 0.0)
            for item in job.out_storages:
                for step in self._away_steps(item):
                    away = self._away[item, step]
                    self._at_least({self._freed[step]: 1.0, end: -1.0, away: -late_ms}, -late_ms)
            before = end

    def _limit_memory(self, limit_bytes: float | None) -> None:
        present = self._workload.present_bytes
        away_at: dict[int, dict[int, float]] = {step: {} for step in self._short}
        for (item, step), away in self._away.items():
            self._at_least({self._goes[item]: 1.0, away: -1.0}, 0.0)
            away_at[step][away] = self._windows[item].nbytes / 1e9
        for step, terms in away_at.items():
            self._at_least({self._peak: 1.0, **terms}, float(present[step]) / 1e9)
        others = np.delete(present, self._short)
        self._lower[self._peak] = (
            float(others.max(initial=0.0)) / 1e9 if limit_bytes is None else 0.0
        )
        if limit_bytes is not None:
            self._upper[self._peak] = limit_bytes / 1e9

    def _takes(self, storages: Iterable[int], rate: float) -> dict[int, float]:
        """Minus the time of a copy of these storages."""
        return {self._goes[item]: -self._windows[item].nbytes / rate for item in storages}

    def _away_steps(self, item: int) -> list[int]:
        return [step for step in self._short if (item, step) in self._away]

    def _constraints(self) -> LinearConstraint:
        rows = [row for row, (terms, _) in enumerate(self._rows) for _ in terms]
        columns = [column for terms, _ in self._rows for column in terms]
        values = [value for terms, _ in self._rows for value in terms.values()]
        shape = len(self._rows), self._num_variables
        matrix = csr_array((values, (rows, columns)), shape=shape)
        return LinearConstraint(matrix, lb=np.array([least for _, least in self._rows]))
