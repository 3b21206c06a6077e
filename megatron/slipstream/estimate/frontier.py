# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Memory versus time: a sweep of plans, and the Pareto-optimal ones."""

from __future__ import annotations

import decimal
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

from megatron.slipstream.estimate.fit import Finder
from megatron.slipstream.estimate.shape_tables import table
from megatron.slipstream.estimate.ways import BUDGET, OFF, WAYS, Iteration
from megatron.slipstream.plan.build import plan_of
from megatron.slipstream.plan.candidates import PolicyOptions
from megatron.slipstream.plan.model import IterationModel
from megatron.slipstream.plan.render import format_bytes
from megatron.slipstream.plan.search import MAX_STEPS_OF_CHANGES
from megatron.slipstream.plan.trace import Trace
from megatron.slipstream.plan.walk import simulate

NUM_POINTS = 24
"""Number of plans per option, at evenly spaced values."""

Progress = Callable[[int, int], object]
"""Called before each plan and at the end with the number of finished plans and the total."""

MAX_OVERHEADS_PERCENT = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)
SCHEMA = "slipstream-frontier"
VERSION = 1

Sweep = Literal[
    "activation_offload_fraction",
    "target_memory_bytes",
    "max_overhead_percent",
    "activation_memory_budget",
]

_FLAGS: dict[Sweep, str] = {
    "activation_offload_fraction": "--fraction",
    "target_memory_bytes": "--target-memory",
    "max_overhead_percent": "--max-overhead",
    "activation_memory_budget": "--activation-memory-budget",
}
"""Flags of ``slipstream plan``, the last one of a training; memory is in GiB."""

_IN_BYTES = ("target_memory_bytes", "activation_memory_budget")


@dataclass(frozen=True)
class FrontierPoint:
    """One plan: the option that produced it, and its predicted peak and time."""

    option: Sweep
    value: float
    """Value of that option, which :attr:`flag` prints exactly; other options are the sweep's."""
    peak_bytes: int
    """Device peak of all allocated memory or of the saved storages alone; see
    :attr:`Frontier.is_measured`."""
    total_ms: float
    overhead_percent: float
    moved_nbytes: int
    peak_host_bytes: int
    text: str = ""
    """What is recomputed, offloaded and tiled, if that differs between plans."""
    is_pareto: bool = False
    """Whether no other plan improves the peak or the time without worsening the other."""

    @property
    def flag(self) -> str:
        is_bytes = self.option in _IN_BYTES
        return f"{_FLAGS[self.option]} {self.value / 2**30 if is_bytes else self.value:.4g}"


class Marker(NamedTuple):
    """Another way to train, to compare with."""

    name: str
    peak_bytes: int
    total_ms: float
    overhead_percent: float


@dataclass(frozen=True)
class Frontier:
    """The plans of a sweep, grouped by option and sorted by its value."""

    points: tuple[FrontierPoint, ...]
    compute_ms: float
    is_measured: bool
    """Whether peaks cover all device memory, which the readings of a trace tell."""
    markers: tuple[Marker, ...]

    @property
    def pareto(self) -> tuple[FrontierPoint, ...]:
        chosen = [point for point in self.points if point.is_pareto]
        return tuple(sorted(chosen, key=lambda point: point.peak_bytes))

    def to_json(self) -> bytes:
        """Return all points as JSON; sizes in bytes, times in milliseconds."""
        return json.dumps({"schema": SCHEMA, "version": VERSION, **asdict(self)}, indent=1).encode()

    def render(self) -> str:
        """Render the Pareto-optimal plans as a table."""
        head = ["device peak", "step time", "overhead", "moved", "host memory", "option"]
        lines = list(table([head, *map(_row, self.pareto)], left=(-1,)))
        lines += [
            f"{marker.name}: {format_bytes(marker.peak_bytes)}, {marker.total_ms:.1f} ms, "
            f"{marker.overhead_percent:.1f}%"
            for marker in self.markers
        ]
        lines.append(
            f"{len(self.pareto)} of {len(self.points)} plans; for each of the others one of these "
            "takes neither more memory nor more time"
        )
        return "\n".join(lines)


def sweep(
    trace: Trace,
    options: PolicyOptions,
    num_points: int = NUM_POINTS,
    progress: Progress = lambda done, total: None,
) -> Frontier:
    """Plan and simulate an iteration, which must have times, for values of each swept option."""
    base = replace(options, target_memory_bytes=None, max_overhead_percent=None)
    model = IterationModel(trace)
    total = 2 * num_points + len(MAX_OVERHEADS_PERCENT)
    points: list[FrontierPoint] = []

    def run(option: Sweep, values: Iterable[float]) -> None:
        for value in values:
            progress(len(points), total)
            points.append(_point(model, base, option, value))

    last = num_points - 1
    run("activation_offload_fraction", (round(n / last, 3) for n in range(num_points)))
    peaks = [point.peak_bytes for point in points]
    low, high = min(peaks), max(peaks)
    targets = (_bytes_to_type(low + (high - low) * n // num_points) for n in range(num_points))
    run("target_memory_bytes", targets)
    run("max_overhead_percent", MAX_OVERHEADS_PERCENT)
    progress(total, total)
    ends = {"nothing moves": points[0], "everything moves": points[last]}
    markers = tuple(
        Marker(name, point.peak_bytes, point.total_ms, point.overhead_percent)
        for name, point in ends.items()
    )
    return Frontier(mark_pareto(points), sum(trace.step_ms), bool(trace.memory), markers)


def sweep_budgets(
    finder: Finder, num_points: int = NUM_POINTS, progress: Progress = lambda done, total: None
) -> Frontier:
    """Choose what is kept, offloaded, recomputed and tiled for a range of budgets.

    These go from the least that the model can take to what it takes as it is; the finder's limit
    of device memory does not apply. Each other way to train has a marker.
    """
    size: int = getattr(finder.configured.shape, finder.searched)
    model = finder.model(size)
    rows = {way: model.fixed(way) for way in WAYS if way != BUDGET}
    off = rows[OFF]
    low = model.least().usage.parts.total
    high, state = off.usage.parts.total, off.usage.parts.state
    points: list[FrontierPoint] = []

    def taken(found: Iteration) -> tuple[int, float, float]:
        overhead_percent = 100 * (found.step_ms / off.step_ms - 1)
        return found.usage.parts.total, found.step_ms, overhead_percent

    for place in range(num_points):
        progress(place, num_points)
        # Closer together where memory is short, since time changes most there.
        share = (place / (num_points - 1)) ** 2
        budget = _bytes_to_type(low + (high - low) * share - state)
        row = model.within(finder.limits._replace(device_bytes=state + budget))
        if row is not None:
            usage, text = row.usage, row.describe()
            points.append(
                FrontierPoint("activation_memory_budget", budget, *taken(row), usage.moved_bytes,
                              usage.host_bytes, text)
            )  # fmt: skip
    progress(num_points, num_points)
    markers = tuple(Marker(way, *taken(row)) for way, row in rows.items())
    return Frontier(mark_pareto(points), off.step_ms, True, markers)


def mark_pareto(points: Sequence[FrontierPoint]) -> tuple[FrontierPoint, ...]:
    """Mark the Pareto-optimal points; of equal points, only the first."""
    order = sorted(range(len(points)), key=lambda i: (points[i].peak_bytes, points[i].total_ms, i))
    best_ms = float("inf")
    chosen = set()
    for index in order:
        if points[index].total_ms < best_ms:
            best_ms = points[index].total_ms
            chosen.add(index)
    return tuple(replace(p, is_pareto=index in chosen) for index, p in enumerate(points))


def _point(
    model: IterationModel, base: PolicyOptions, option: Sweep, value: float
) -> FrontierPoint:
    changed: dict[str, Any] = {option: value}
    plan = plan_of(model, replace(base, **changed), MAX_STEPS_OF_CHANGES)
    found = simulate(plan)
    peak_bytes = (found.peak_bytes or (0, found.peak_device_bytes))[1]
    return FrontierPoint(option, value, peak_bytes, found.total_ms, found.overhead_percent,
                         plan.moved_nbytes, found.peak_host_bytes)  # fmt: skip


def _bytes_to_type(nbytes: float) -> int:
    """Round up to four significant digits in GiB, so that the printed flag reproduces the plan."""
    up = decimal.Context(prec=4, rounding=decimal.ROUND_CEILING)
    return int(float(up.create_decimal_from_float(nbytes / 2**30)) * 2**30)


def _row(point: FrontierPoint) -> list[str]:
    return [
        format_bytes(point.peak_bytes),
        f"{point.total_ms:.1f} ms",
        f"{point.overhead_percent:.1f}%",
        format_bytes(point.moved_nbytes),
        format_bytes(point.peak_host_bytes),
        f"{point.flag}: {point.text}" if point.text else point.flag,
    ]
