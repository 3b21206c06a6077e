# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""How long an iteration must take if copies run as fast as the link and wait for nothing.

Compute and copies overlap at best, so a phase lasts as long as the longest of its compute, its
copies to the host and its copies to the device. A phase is a maximal run of forward marks or of
backward marks. Bytes belong to the phase in which their group commits (to the host) or is used (to
the device): a copy out that runs on into the next phase, or a copy back that starts in the one
before, would keep its device memory meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from megatron.slipstream.plan.build import Plan
from megatron.slipstream.plan.trace import StepKind, Trace


@dataclass(frozen=True)
class Phase:
    """A maximal run of forward marks or of backward marks."""

    is_forward: bool
    first_step: int
    compute_ms: float
    """From its first mark to the next phase's."""
    d2h_bytes: int
    """Of groups that commit in it."""
    h2d_bytes: int
    """Of groups that are used in it."""


class _Transfer(NamedTuple):
    nbytes: int
    commit_step: int
    use_step: int


def phases(plan: Plan | Trace) -> tuple[Phase, ...]:
    """The phases of a plan, with what it moves; of a trace, as if all that can moved.

    Raises:
        ValueError: The trace has no times.
    """
    trace = plan.trace if isinstance(plan, Plan) else plan
    if len(trace.step_ms) != len(trace.steps):
        raise ValueError(
            "the trace has no compute times (Trace.step_ms); record it on a device that is timed"
        )
    transfers = list(_planned(plan) if isinstance(plan, Plan) else _possible(plan))
    found = []
    first = 0
    for is_backward, run in groupby(step.kind is StepKind.BACKWARD_USE for step in trace.steps):
        steps = range(first, first + len(list(run)))
        first = steps.stop
        found.append(
            Phase(
                not is_backward,
                steps.start,
                sum(trace.step_ms[step] for step in steps),
                sum(item.nbytes for item in transfers if item.commit_step in steps),
                sum(item.nbytes for item in transfers if item.use_step in steps),
            )
        )
    return tuple(found)


def physical_bound_ms(plan: Plan | Trace) -> float:
    """The least time from the first mark to the end of the iteration, in milliseconds.

    Args:
        plan: A plan, for what it moves; a trace, for all that it could.

    Raises:
        ValueError: The trace has no times or no bandwidth.
    """
    trace = plan.trace if isinstance(plan, Plan) else plan
    bandwidth = trace.bandwidth
    if bandwidth is None:
        raise ValueError(
            "the trace has no bandwidth (Trace.bandwidth); measure what copies reach and add it"
        )
    # 1e9 bytes a second are 1e6 a millisecond. A phase copies one way only.
    return sum(
        max(
            phase.compute_ms,
            phase.d2h_bytes / (1e6 * bandwidth.d2h_gb_per_s),
            phase.h2d_bytes / (1e6 * bandwidth.h2d_gb_per_s),
        )
        for phase in phases(plan)
    )


def _planned(plan: Plan) -> Iterable[_Transfer]:
    return (_Transfer(item.nbytes, item.d2h_step, item.use_step) for item in plan.storages)


def _possible(trace: Trace) -> Iterable[_Transfer]:
    for storage in trace.storages:
        uses = [
            trace.step_index[StepKind.BACKWARD_USE, key]
            for key in storage.holders
            if (StepKind.BACKWARD_USE, key) in trace.step_index
        ]
        commits = [
            trace.step_index[StepKind.FORWARD_COMMIT, key]
            for key in storage.holders
            if (StepKind.FORWARD_COMMIT, key) in trace.step_index
        ]
        if uses and commits and not storage.held_outside:
            yield _Transfer(storage.nbytes, min(commits), min(uses))
