# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Pictures of a simulated plan and of a frontier, as PNG files.

matplotlib is an extra, so it is imported where a picture is drawn. No figure is registered with
pyplot: nothing needs a display, and nothing stays behind.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron.slipstream.estimate.frontier import Frontier, FrontierPoint
from megatron.slipstream.plan.actions import Plan
from megatron.slipstream.plan.operations import Queue
from megatron.slipstream.plan.render import format_bytes
from megatron.slipstream.plan.timeline import QUEUE_NAMES, DeviceMemory, device_memory
from megatron.slipstream.plan.trace import KINDS_BETWEEN_GROUPS, KINDS_OF_BACKWARD
from megatron.slipstream.plan.walk import Simulation, Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours that differ in lightness too, for readers who see fewer hues. Red is for stalls alone.
_MODULE_COLOURS = (
    *("#4477aa", "#ccbb44", "#228833", "#66ccee", "#aa3377", "#ee8866"),
    *("#332288", "#99ddcc", "#997700", "#bbbbff"),
)
_OTHER_COLOUR = "#d9d9d9"
_STALL_COLOUR = "#d40000"
_MUTED = "#666666"
_DPI = 130
_WIDTH_INCHES = 14.0
_MIN_LABEL_CHARACTER_INCHES = 0.062


def timeline_png(plan: Plan, simulation: Simulation) -> bytes:
    """The operations of each queue, the stalls of compute, and the memory underneath.

    Args:
        plan: The plan.
        simulation: ``simulate(plan)``.

    Raises:
        ValueError: matplotlib is not installed.
    """
    figure = _new_figure(_WIDTH_INCHES, 7.0)
    queues, memory = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    colours = _colours(plan)
    for queue in Queue:
        _draw_queue(queues, queue, simulation, colours)
    _draw_stalls(queues, simulation)
    _draw_passes(queues, simulation)
    queues.set_yticks([-int(queue) for queue in Queue], [QUEUE_NAMES[queue] for queue in Queue])
    queues.tick_params(axis="y", length=0)
    queues.set_ylim(-len(Queue) + 0.45, 0.85)
    queues.set_xlim(0, max(simulation.total_ms, 1e-9))
    _draw_legend(queues, colours, simulation)
    _draw_memory(memory, plan, simulation)
    memory.set_xlabel("time (ms)")
    figure.suptitle(_title(simulation, device_memory(plan)), fontsize=12, x=0.01, ha="left")
    figure.align_ylabels()
    return _png(figure)


def frontier_png(frontier: Frontier) -> bytes:
    """Each plan of a sweep by its peak and its overhead, those that nothing beats on a line.

    Raises:
        ValueError: matplotlib is not installed.
    """
    figure = _new_figure(9.0, 5.6)
    axes = figure.subplots()
    unit = unit_of(max((point.peak_bytes for point in frontier.points), default=0))
    line = frontier.pareto
    axes.plot(
        [point.peak_bytes / unit.nbytes for point in line],
        [point.overhead_percent for point in line],
        drawstyle="steps-post",
        color=_MODULE_COLOURS[0],
        linewidth=1.6,
        zorder=2,
        label="nothing is better in both",
    )
    _draw_points(axes, frontier, unit)
    what = "device peak" if frontier.is_measured else "saved storages on the device, peak"
    axes.set_xlabel(f"{what} ({unit.name})")
    axes.set_ylabel(f"overhead (% of {frontier.compute_ms:.4g} ms compute)")
    axes.margins(x=0.12)
    # Overheads are 0 or more, so the room below 0 is free for the end where nothing moves.
    top = max(1.0, *(point.overhead_percent for point in frontier.points))
    axes.set_ylim(-0.16 * top, 1.25 * top)
    axes.set_yticks([tick for tick in axes.get_yticks() if 0 <= tick <= 1.2 * top])
    _annotate(axes, frontier.nothing_moves, "nothing moves", unit, (0, -12))
    _annotate(axes, frontier.everything_moves, "everything moves", unit, (0, 14))
    axes.grid(color="#eeeeee")
    axes.set_axisbelow(True)
    axes.legend(frameon=False, loc="upper right")
    figure.suptitle(
        f"Memory against time: {len(frontier.points)} plans of one trace, simulated",
        fontsize=12,
        x=0.01,
        ha="left",
    )
    return _png(figure)


def require_matplotlib() -> None:
    """Refuse early where no picture could be drawn.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError(
            "matplotlib is not installed, so no picture can be drawn; "
            "pip install matplotlib, or write a .json file instead"
        ) from None


def _new_figure(width_inches: float, height_inches: float) -> Figure:
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure((width_inches, height_inches), dpi=_DPI, layout="constrained")
    figure.set_facecolor("white")
    return figure


def _png(figure: Figure) -> bytes:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    stream = io.BytesIO()
    # Without a version in it the same plan gives the same bytes.
    figure.savefig(stream, format="png", metadata={"Software": None})
    return stream.getvalue()


class Unit(NamedTuple):
    """A unit that sizes are drawn in."""

    name: str
    nbytes: int


def unit_of(nbytes: float) -> Unit:
    """The unit for sizes up to ``nbytes``: GiB, unless that would be a small fraction."""
    for unit in (Unit("GiB", 1 << 30), Unit("MiB", 1 << 20)):
        if nbytes >= 0.5 * unit.nbytes:
            return unit
    return Unit("KiB", 1 << 10)


# The timeline.


def _colours(plan: Plan) -> dict[str, str]:
    """A colour for each module name, in the order in which forward first meets them."""
    count = len(_MODULE_COLOURS)
    return {name: _MODULE_COLOURS[i % count] for i, name in enumerate(plan.trace.names)}


def _title(simulation: Simulation, memory: DeviceMemory) -> str:
    what = "device peak" if memory.is_measured else "saved storages on the device, peak"
    before, after = (max(values, default=0) for values in memory[1:])
    return (
        f"{simulation.total_ms:.1f} ms predicted = {simulation.step_time_text}   |   "
        f"{what} {format_bytes(before)} without, {format_bytes(after)} with the plan"
    )


def _colour_of(span: Span, colours: dict[str, str]) -> str:
    if span.cause.kind in KINDS_BETWEEN_GROUPS:
        return _OTHER_COLOUR
    return colours[span.cause.name]


def _draw_queue(axes: Axes, queue: Queue, simulation: Simulation, colours: dict[str, str]) -> None:
    spans = [s for s in simulation.spans if s.queue is queue and s.end_ms > s.start_ms]
    # Lines between bars help as long as they are few; later they would be all that is seen.
    line_width = 0.4 if len(spans) < 120 else 0.0
    by_colour: dict[str, list[tuple[float, float]]] = {}
    for span in spans:
        bar = (span.start_ms, span.end_ms - span.start_ms)
        by_colour.setdefault(_colour_of(span, colours), []).append(bar)
    for colour, bars in by_colour.items():
        axes.broken_barh(
            bars, (-int(queue) - 0.38, 0.76), color=colour, edgecolor="white", linewidth=line_width
        )
    _draw_labels(axes, -int(queue), spans, _inches_per_ms(simulation))


def _inches_per_ms(simulation: Simulation) -> float:
    """About; what is beside the axes takes some."""
    return 0.92 * _WIDTH_INCHES / max(simulation.total_ms, 1e-9)


def _draw_labels(axes: Axes, y: float, spans: Sequence[Span], inches_per_ms: float) -> None:
    """The group's number in each bar that is wide enough, written upwards where that helps."""
    for span in spans:
        text = str(span.cause.key)
        inches = (span.end_ms - span.start_ms) * inches_per_ms
        is_upright = inches < len(text) * _MIN_LABEL_CHARACTER_INCHES
        if inches < 1.6 * _MIN_LABEL_CHARACTER_INCHES:
            continue
        axes.text(
            (span.start_ms + span.end_ms) / 2,
            y,
            text,
            rotation=90 if is_upright else 0,
            fontsize=6,
            ha="center",
            va="center",
            color="black",
            clip_on=True,
        )


def _draw_stalls(axes: Axes, simulation: Simulation) -> None:
    # An empty line has no place, and the layout of the figure makes room for it everywhere.
    if not simulation.stalls:
        return
    bars = [(stall.start_ms, stall.ms) for stall in simulation.stalls]
    axes.broken_barh(bars, (-0.38, 0.76), color=_STALL_COLOUR, linewidth=0)
    # A stall may be narrower than a pixel, so each has a mark of its own above the bars.
    middles = [stall.start_ms + stall.ms / 2 for stall in simulation.stalls]
    axes.plot(
        middles, [0.48] * len(middles), "v", color=_STALL_COLOUR, markersize=3.5, clip_on=False
    )


def _draw_passes(axes: Axes, simulation: Simulation) -> None:
    """Where each pass through a model chunk begins: F and B with its number, as in the groups'."""
    compute = [span for span in simulation.spans if span.queue is Queue.COMPUTE]
    inches_per_ms = _inches_per_ms(simulation)
    for name, group in groupby(compute, pass_of):
        spans = list(group)
        start_ms, end_ms = spans[0].start_ms, spans[-1].end_ms
        axes.axvline(start_ms, color=_MUTED, linewidth=0.5, zorder=0)
        if (end_ms - start_ms) * inches_per_ms > (len(name) + 1) * _MIN_LABEL_CHARACTER_INCHES:
            x = (start_ms + end_ms) / 2
            axes.text(x, 0.72, name, fontsize=7, ha="center", va="center", color=_MUTED)


def pass_of(span: Span) -> str:
    """The pass through a model chunk that computation belongs to: F or B with its number."""
    is_backward = span.cause.kind in KINDS_OF_BACKWARD
    return f"{'B' if is_backward else 'F'}{span.cause.key.chunk_pass}"


def _draw_legend(axes: Axes, colours: dict[str, str], simulation: Simulation) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=name) for name, colour in colours.items()]
    handles.append(Patch(color=_OTHER_COLOUR, label="between groups"))
    if simulation.stalls:
        label = f"compute stalls ({len(simulation.stalls)})"
        handles.append(Patch(color=_STALL_COLOUR, label=label))
    axes.legend(
        handles=handles,
        ncols=len(handles),
        loc="lower left",
        bbox_to_anchor=(0, 1.01),
        frameon=False,
        borderaxespad=0,
        fontsize=8,
        handlelength=1.2,
        columnspacing=1.4,
    )


def _draw_memory(axes: Axes, plan: Plan, simulation: Simulation) -> None:
    memory = device_memory(plan)
    times = [entry.ms for entry in simulation.memory]
    unit = unit_of(max(memory.without_plan, default=0))

    def curve(values: Sequence[int]) -> tuple[list[float], list[float]]:
        """Each value holds until the next step; the last until the end."""
        heights = [value / unit.nbytes for value in values]
        return [*times, simulation.total_ms], [*heights, *heights[-1:]] or [0.0]

    colour = _MODULE_COLOURS[0]
    axes.fill_between(*curve(memory.with_plan), step="post", color=colour, alpha=0.2, linewidth=0)
    style: dict[str, Any] = {"drawstyle": "steps-post", "linewidth": 1.2}
    axes.plot(*curve(memory.without_plan), color=_MUTED, label="device, without the plan", **style)
    axes.plot(*curve(memory.with_plan), color=colour, label="device, with the plan", **style)
    host = [entry.host_bytes for entry in simulation.memory]
    axes.plot(*curve(host), color=_MODULE_COLOURS[4], linestyle=":", label="host, in use", **style)
    for values, color in ((memory.without_plan, _MUTED), (memory.with_plan, colour)):
        peak = max(values, default=0) / unit.nbytes
        axes.axhline(peak, color=color, linewidth=0.6, linestyle="--")
    what = "memory" if memory.is_measured else "saved storages"
    axes.set_ylabel(f"{what} ({unit.name})")
    axes.set_ylim(bottom=0)
    axes.legend(
        ncols=3,
        loc="lower left",
        bbox_to_anchor=(0, 1.01),
        frameon=False,
        borderaxespad=0,
        fontsize=8,
    )


# The frontier.

_SERIES = {
    "activation_offload_fraction": ("a fraction of the groups", "o", "#bbbbbb"),
    "target_memory_bytes": ("a target for the device peak", "D", _MODULE_COLOURS[0]),
    "max_overhead_percent": ("a limit of the overhead", "s", _MODULE_COLOURS[2]),
}


def _draw_points(axes: Axes, frontier: Frontier, unit: Unit) -> None:
    """Filled and on top where no plan is better: plans of other options may have the same place."""
    for option, (label, marker, colour) in _SERIES.items():
        points = [point for point in frontier.points if point.option == option]
        for is_pareto, size, face in ((False, 16, "white"), (True, 34, colour)):
            drawn = [point for point in points if point.is_pareto == is_pareto]
            axes.scatter(
                [point.peak_bytes / unit.nbytes for point in drawn],
                [point.overhead_percent for point in drawn],
                s=size,
                marker=marker,
                facecolors=face,
                edgecolors=colour,
                label=f"plans by {label}" if points and is_pareto else None,
                zorder=3 + is_pareto,
            )


def _annotate(
    axes: Axes, point: FrontierPoint, text: str, unit: Unit, offset_points: tuple[int, int]
) -> None:
    is_above = offset_points[1] > 0
    axes.annotate(
        f"{text}\n{format_bytes(point.peak_bytes)}, {point.total_ms:.4g} ms",
        (point.peak_bytes / unit.nbytes, point.overhead_percent),
        xytext=offset_points,
        textcoords="offset points",
        ha="left" if is_above else "right",
        va="bottom" if is_above else "top",
        fontsize=8.5,
        arrowprops={"arrowstyle": "-", "color": _MUTED, "linewidth": 0.7},
    )
