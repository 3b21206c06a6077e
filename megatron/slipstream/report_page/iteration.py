# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""One rank's iteration over time, as predicted for its plan and as measured.

The page's script draws the charts from :func:`figures`; predictions come from ``simulate``.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, Optional

from megatron.slipstream.fine_grained_activation_offload.report import RankReport
from megatron.slipstream.plan.actions import Action, ActionKind, Plan
from megatron.slipstream.plan.edges import Queue
from megatron.slipstream.plan.render import unit_of
from megatron.slipstream.plan.timeline import QUEUE_NAMES, device_memory
from megatron.slipstream.plan.trace import (
    KINDS_BETWEEN_GROUPS,
    KINDS_OF_BACKWARD,
    Bandwidth,
    GroupKey,
    StepKind,
)
from megatron.slipstream.plan.walk import Simulation, Span, simulate

AT_ONCE_GB_PER_S = 1e18
"""Bandwidth at which copies take no time, for traces without a bandwidth."""
NUM_COLOURS = 10
DIGITS = 4
"""Decimal places of times in :func:`figures`."""


@dataclass(frozen=True)
class Lane:
    """A row of the timeline. Without times, bars are in marks instead of milliseconds."""

    name: str
    bars: tuple[Span, ...]
    waits: tuple[Span, ...] = ()
    """Stalls of compute, named by the copy that it waited for."""
    are_windows: bool = False
    """Whether bars are the time available to copies, because their durations are unknown."""


@dataclass(frozen=True)
class Iteration:
    """An iteration of a plan."""

    plan: Plan
    simulation: Simulation
    """Of the plan, possibly with other times: see :func:`iteration_of`."""
    is_predicted: bool
    """Whether copies have durations; otherwise they have windows."""
    measured: Optional[Lane]
    peak_bytes: tuple[int, ...]
    """Measured device memory for each step; empty if not measured."""

    @property
    def unit(self) -> Literal["ms", "marks"]:
        return "ms" if self.is_predicted else "marks"

    @cached_property
    def compute(self) -> tuple[Span, ...]:
        return self._bars(Queue.COMPUTE)

    @cached_property
    def lanes(self) -> tuple[Lane, ...]:
        """Rows of the timeline: measured, then predicted."""
        names = QUEUE_NAMES
        if not self.is_predicted:
            out, back = self._windows(ActionKind.D2H), self._windows(ActionKind.H2D)
            return (
                Lane(names[Queue.COMPUTE], self.compute),
                Lane(names[Queue.D2H], out, are_windows=True),
                Lane(names[Queue.H2D], back, are_windows=True),
            )
        stalls = tuple(
            Span(Queue.COMPUTE, stall.cause, stall.start_ms, stall.start_ms + stall.ms, 0)
            for stall in self.simulation.stalls
        )
        predicted = (
            Lane(names[Queue.COMPUTE], self.compute, stalls),
            *(Lane(names[queue], self._bars(queue)) for queue in (Queue.D2H, Queue.H2D)),
        )
        return predicted if self.measured is None else (self.measured, *predicted)

    @cached_property
    def total(self) -> float:
        ends = (bar.end_ms for lane in self.lanes for bar in (*lane.bars, *lane.waits))
        return max([*ends, 1e-6])

    @cached_property
    def memory(self) -> dict[str, Sequence[int]]:
        """Bytes from each step on: of the device by prediction and measurement, of the host."""
        device = device_memory(self.plan)
        curves = {
            "without": device.without_plan,
            "with": device.with_plan,
            "measured": self.peak_bytes,
            "host": [entry.host_bytes for entry in self.simulation.memory],
        }
        return {name: values for name, values in curves.items() if values}

    @property
    def colours(self) -> dict[str, int]:
        """Each module's colour, in the order in which forward first reaches modules."""
        return {name: index % NUM_COLOURS for index, name in enumerate(self.plan.trace.names)}

    @property
    def step_starts(self) -> list[float]:
        return [bar.start_ms for bar in self.compute]

    def _bars(self, queue: Queue) -> tuple[Span, ...]:
        return tuple(span for span in self.simulation.spans if span.queue is queue)

    def _windows(self, kind: ActionKind) -> tuple[Span, ...]:
        """Return, for each copy, the window from its earliest start to its latest end."""
        starts = self.step_starts
        bars = []
        for group in self.plan.groups:
            if group.moves and group.moved_nbytes:
                is_out = kind is ActionKind.D2H
                queue = Queue.D2H if is_out else Queue.H2D
                first = group.commit_step if is_out else group.h2d_step
                last = group.free_step if is_out else group.use_step
                cause = Action(kind, group.key, group.name)
                bars.append(Span(queue, cause, starts[first], starts[last], group.moved_nbytes))
        return tuple(sorted(bars, key=lambda bar: (bar.start_ms, bar.end_ms)))


def iteration_of(plan: Plan, rank: RankReport) -> Iteration:
    """Return a rank's iteration; without times, marks are even and copies are windows."""
    trace = plan.trace
    num_steps = len(trace.steps)
    is_measured = num_steps > 0 and len(rank.step_ms) == len(rank.step_stall_ms) == num_steps
    measured = _measured(plan, rank.step_ms, rank.step_stall_ms) if is_measured else None
    peak_bytes = tuple(rank.step_peak_bytes if len(rank.step_peak_bytes) == num_steps else ())
    if trace.is_timed:
        return Iteration(plan, simulate(plan), True, measured, peak_bytes)
    evenly = replace(
        trace,
        step_ms=(1.0,) * num_steps,
        bandwidth=Bandwidth(*[AT_ONCE_GB_PER_S] * 4),
        ms_per_moved_group=0.0,
        ms_per_moved_gb=0.0,
    )
    return Iteration(plan, simulate(replace(plan, trace=evenly)), False, None, peak_bytes)


def _passes(iteration: Iteration) -> Iterator[dict[str, Any]]:
    for (is_backward, number), run in itertools.groupby(
        iteration.compute,
        lambda bar: (bar.cause.kind in KINDS_OF_BACKWARD, bar.cause.key.chunk_pass),
    ):
        bars = list(run)
        name = f"{'B' if is_backward else 'F'}{number}"
        yield {"start": bars[0].start_ms, "end": bars[-1].end_ms, "name": name}


def _measured(plan: Plan, step_ms: Sequence[float], stall_ms: Sequence[float]) -> Lane:
    """Return measured compute, with each wait at its step's start since its position is unknown."""
    bars, waits = [], []
    now = 0.0
    for step, ms, waited_ms in zip(plan.trace.steps, step_ms, stall_ms, strict=True):
        if waited_ms > 0:
            waits.append(Span(Queue.COMPUTE, step, now, now + waited_ms, 0))
        bars.append(Span(Queue.COMPUTE, step, now + waited_ms, now + waited_ms + ms, 0))
        now += waited_ms + ms
    return Lane("measured", tuple(bars), tuple(waits))


def waits_by_group(lane: Optional[Lane]) -> dict[GroupKey, float]:
    """Return how long compute waited at each group's steps or for its copies."""
    found: dict[GroupKey, float] = defaultdict(float)
    for wait in lane.waits if lane is not None else ():
        found[wait.cause.key] += wait.end_ms - wait.start_ms
    return found


def figures(iteration: Iteration) -> dict[str, Any]:
    """Return what the page's script draws and shows under the pointer, in types of JSON.

    Bars are columns; owners are the groups in the order of the table's rows, then everything else.
    """
    named = {group.key: group.name for group in iteration.plan.groups}
    named |= {step.key: step.name for step in iteration.plan.trace.steps}
    place = {key: index for index, key in enumerate(named)}
    kinds = [*(kind.value for kind in StepKind), *(kind.value for kind in ActionKind)]

    def columns(bars: Sequence[Span]) -> dict[str, list[Any]]:
        return {
            "start": [round(bar.start_ms, DIGITS) for bar in bars],
            "length": [round(bar.end_ms - bar.start_ms, DIGITS) for bar in bars],
            "owner": [place[bar.cause.key] for bar in bars],
            "kind": [kinds.index(bar.cause.kind.value) for bar in bars],
            "bytes": [bar.nbytes for bar in bars] if any(bar.nbytes for bar in bars) else [],
        }

    target_bytes = iteration.plan.options.target_memory_bytes or 0
    curves = iteration.memory
    unit = unit_of(max([target_bytes, *itertools.chain(*curves.values())]))
    return {
        "unit": iteration.unit,
        "total": iteration.total,
        "kinds": kinds,
        "betweenGroups": [kinds.index(kind.value) for kind in KINDS_BETWEEN_GROUPS],
        "owners": [f"{key}.{name}" for key, name in named.items()],
        "colours": [iteration.colours.get(name, 0) for name in named.values()],
        "passes": list(_passes(iteration)),
        "lanes": [
            {
                "name": lane.name,
                "areWindows": lane.are_windows,
                "bars": columns(lane.bars),
                "waits": columns(lane.waits),
            }
            for lane in iteration.lanes
        ],
        "memory": {
            "start": [round(start, DIGITS) for start in iteration.step_starts],
            "unit": unit.name,
            "target": target_bytes / unit.nbytes,
            "curves": {
                name: [round(value / unit.nbytes, 3) for value in values]
                for name, values in curves.items()
            },
        },
    }
