# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Draws the timeline and the memory curve as SVG paths, with their values for the page's script.

Shapes of the same colour share a path, drawn once for the whole iteration in a coordinate system
that the page stretches to the width of the zoomed chart. Elements that must not be stretched (text,
marks) are positioned by their fraction of the iteration.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Optional

from megatron.slipstream.plan.actions import ActionKind
from megatron.slipstream.plan.render import format_bytes, unit_of
from megatron.slipstream.plan.trace import KINDS_BETWEEN_GROUPS, StepKind
from megatron.slipstream.report_page.iteration import (
    Bar,
    Iteration,
    Lane,
    is_between_groups,
)

WIDTH = 1_000_000
"""Width of the drawing for any duration: fine enough for 1000x zoom."""
HEIGHT = 1000
"""Height of the memory drawing."""
LANE_HEIGHT = 30
LANE_GAP = 8
WAIT_RISE = 3
"""Pixels that a stall extends above and below its lane, so that colour is not its only mark."""
NUM_PIECES = 32
"""Number of paths that a lane with many bars is split into, so that a browser can skip those out of
view."""
NUM_COLOURS = 10
FEW_BARS = 60
"""Maximum number of bars of a lane that has lines between them without zooming in."""
MIN_LABEL_SHARE = 0.022
"""Minimum width of a pass that has a label without zooming in, as a fraction of the total."""
DIGITS = 4
NUM_TICKS = 6


class Shape(NamedTuple):
    """A path and its CSS class, which sets its colour."""

    name: str
    path: str


class DrawnLane(NamedTuple):
    """A row of the timeline."""

    name: str
    y: int
    shapes: list[Shape]
    has_lines: bool


class Mark(NamedTuple):
    """Text at a position; all numbers are fractions of the width or the height."""

    x: float
    y: float
    text: str
    name: str
    width: float = 0.0


class Timeline(NamedTuple):
    """The drawing of a timeline."""

    height: int
    lanes: list[DrawnLane]
    pass_lines: str
    passes: list[Mark]
    legend: list[tuple[str, str]]
    ticks: list[Mark]
    has_waits: bool


class MemoryCurve(NamedTuple):
    """The drawing of memory."""

    shapes: list[Shape]
    peaks: list[Mark]
    target: Optional[Mark]
    ticks: list[Mark]
    what: str


def draw_timeline(iteration: Iteration) -> Timeline:
    """Draw the lanes of an iteration."""
    colours = colours_of(iteration)
    scale = WIDTH / iteration.total
    lanes = []
    for row, lane in enumerate(iteration.lanes):
        y = row * (LANE_HEIGHT + LANE_GAP)
        lanes.append(DrawnLane(lane.name, y, _lane_shapes(lane, colours, scale, y), _is_few(lane)))
    height = len(lanes) * (LANE_HEIGHT + LANE_GAP)
    total = iteration.total
    passes = [
        Mark((p.start + p.end) / 2 / total, 0, p.name, "pass", (p.end - p.start) / total)
        for p in iteration.passes
    ]
    legend = [(name, f"m{colour}") for name, colour in colours.items()]
    lines = "".join(f"M{round(p.start * scale)} 0v{height}" for p in iteration.passes)
    return Timeline(
        height=height,
        lanes=lanes,
        pass_lines=lines,
        passes=passes,
        legend=[*legend, ("between groups", "other")],
        ticks=_time_ticks(iteration),
        has_waits=any(lane.waits for lane in iteration.lanes),
    )


def draw_memory(iteration: Iteration) -> MemoryCurve:
    """Draw device memory without the plan, with it and as measured, as well as host memory."""
    curves = _curves(iteration)
    target_bytes = iteration.plan.options.target_memory_bytes or 0
    highest = max([target_bytes, 1, *(max(values, default=0) for values in curves.values())])
    unit = unit_of(highest)
    step = _nice_step(highest / unit.nbytes / 4)
    top = unit.nbytes * step * (int(highest * 1.06 / unit.nbytes / step) + 1)
    starts = [start / iteration.total for start in iteration.step_starts]
    shapes = [
        Shape(name, _step_path(starts, [value / top for value in values]))
        for name, values in curves.items()
        if values
    ]
    filled = next(shape.path for shape in shapes if shape.name == "with")
    shapes.insert(0, Shape("fill", f"{filled}V{HEIGHT}H0Z"))
    ticks, place = [], 0.0
    while place * unit.nbytes <= top * 1.0001:
        ticks.append(Mark(0, 1 - place * unit.nbytes / top, f"{place:g} {unit.name}", "tick"))
        place += step
    target = None
    if target_bytes:
        target = Mark(1, 1 - target_bytes / top, format_bytes(target_bytes), "target")
    what = "device memory" if iteration.memory.is_measured else "saved storages on the device"
    return MemoryCurve(shapes, _peaks(curves, starts, top), target, ticks, what)


def figures(iteration: Iteration) -> dict[str, Any]:
    """Return the values that the page shows under the pointer, in JSON-compatible types."""
    colours = colours_of(iteration)
    # Groups first, in the order of the table's rows; then everything else.
    named = {group.key: group.name for group in iteration.plan.groups}
    named |= {step.key: step.name for step in iteration.plan.trace.steps}
    place = {key: index for index, key in enumerate(named)}
    kinds = [*(kind.value for kind in StepKind), *(kind.value for kind in ActionKind)]

    def columns(bars: Sequence[Bar]) -> dict[str, list[Any]]:
        return {
            "start": [round(bar.start, DIGITS) for bar in bars],
            "length": [round(bar.end - bar.start, DIGITS) for bar in bars],
            "owner": [place[bar.cause.key] for bar in bars],
            "kind": [kinds.index(bar.kind) for bar in bars],
            "bytes": [bar.nbytes for bar in bars] if any(bar.nbytes for bar in bars) else [],
        }

    curves = _curves(iteration)
    unit = unit_of(max((max(values, default=0) for values in curves.values()), default=0))
    return {
        "unit": iteration.unit,
        "total": iteration.total,
        "kinds": kinds,
        "kindsBetweenGroups": [kind.value for kind in KINDS_BETWEEN_GROUPS],
        "owners": [f"{key}.{name}" for key, name in named.items()],
        "colours": [colours.get(name, 0) for name in named.values()],
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
            "curves": {
                name: [round(value / unit.nbytes, 3) for value in values]
                for name, values in curves.items()
                if values
            },
        },
    }


def colours_of(iteration: Iteration) -> dict[str, int]:
    """Return each module's colour number, in the order in which forward first reaches modules."""
    return {name: index % NUM_COLOURS for index, name in enumerate(iteration.plan.trace.names)}


def sparkline(values: Sequence[float], width: int = 240, height: int = 36) -> str:
    """Draw a path through ``values``, scaled from 0 to the highest."""
    highest = max(values, default=0) or 1.0
    step = width / max(1, len(values) - 1)
    places = (f"{i * step:.1f} {height - 2 - value / highest * (height - 4):.1f}"
              for i, value in enumerate(values))  # fmt: skip
    return "M" + "L".join(places)


def _lane_shapes(lane: Lane, colours: dict[str, int], scale: float, y: int) -> list[Shape]:
    by_class: dict[tuple[int, str], list[Bar]] = {}
    for bar in lane.bars:
        name = "other" if is_between_groups(bar) else f"m{colours[bar.cause.name]}"
        piece = int(bar.start * scale) * NUM_PIECES // WIDTH if not _is_few(lane) else 0
        by_class.setdefault((piece, name), []).append(bar)
    kind = " window" if lane.are_windows else ""
    shapes = [Shape(f"bar {n}{kind}", _bars(bars, scale, y)) for (_, n), bars in by_class.items()]
    if lane.waits:
        shapes.append(Shape("wait", _bars(lane.waits, scale, y, WAIT_RISE)))
    return shapes


def _bars(bars: Iterable[Bar], scale: float, y: int, rise: int = 0) -> str:
    """Draw rectangles as one path, each relative to the start of the previous one."""
    height = LANE_HEIGHT + 2 * rise
    parts: list[str] = []
    at = 0
    for bar in bars:
        left, right = round(bar.start * scale), round(bar.end * scale)
        move = f"m{left - at} 0" if parts else f"M{left} {y - rise}"
        parts.append(f"{move}h{right - left}v{height}h{left - right}z")
        at = left
    return "".join(parts)


def _is_few(lane: Lane) -> bool:
    return len(lane.bars) <= FEW_BARS


def _curves(iteration: Iteration) -> dict[str, Sequence[int]]:
    memory = iteration.memory
    return {
        "without": memory.without_plan,
        "with": memory.with_plan,
        "measured": iteration.peak_bytes,
        "host": [entry.host_bytes for entry in iteration.simulation.memory],
    }


def _step_path(starts: Sequence[float], heights: Sequence[float]) -> str:
    """Draw a step curve: each height holds until the next start. Omit invisible changes."""
    parts: list[str] = []
    last = None
    for start, height in zip(starts, heights, strict=True):
        x, y = round(start * WIDTH), round(HEIGHT - height * HEIGHT)
        if last is None:
            parts.append(f"M{x} {y}")
        elif y != last:
            parts.append(f"H{x}V{y}")
        last = y
    return "".join(parts) + f"H{WIDTH}" if parts else ""


def _peaks(curves: dict[str, Sequence[int]], starts: Sequence[float], top: float) -> list[Mark]:
    """Mark the peak of each curve of device memory."""
    marks = []
    for name in ("without", "with", "measured"):
        values = curves[name]
        if values:
            peak = max(values)
            marks.append(Mark(starts[values.index(peak)], 1 - peak / top, format_bytes(peak), name))
    return marks


def _time_ticks(iteration: Iteration) -> list[Mark]:
    total = iteration.total
    step = _nice_step(total / NUM_TICKS)
    count = int(total / step + 1e-9) + 1
    return [Mark(i * step / total, 0, f"{i * step:g}", "tick") for i in range(count)]


def _nice_step(least: float) -> float:
    """Return the smallest of 1, 2 or 5 times a power of 10 that is at least ``least``."""
    power = 1.0
    while power > least:
        power /= 10
    while True:
        for digit in (1, 2, 5):
            if digit * power >= least:
                return digit * power
        power *= 10
