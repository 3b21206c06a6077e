# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Draws a frontier as a PNG image, without pyplot: it needs no display and no global state."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from megatron.slipstream.estimate.frontier import Frontier, FrontierPoint, Marker
from megatron.slipstream.plan.render import Unit, format_bytes, unit_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The colours also differ in lightness, for colour-blind readers.
_BLUE, _GREEN = "#4477aa", "#228833"
_MUTED = "#666666"
_SERIES = {
    "activation_offload_fraction": ("a fraction of the groups", "o", "#bbbbbb"),
    "target_memory_bytes": ("a target for the device peak", "D", _BLUE),
    "max_overhead_percent": ("a limit of the overhead", "s", _GREEN),
    "activation_memory_budget": ("a memory budget", "D", _BLUE),
}


def require_matplotlib() -> None:
    """Raise ``ValueError`` if matplotlib, which is optional, is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError(
            "matplotlib is not installed, so no picture can be drawn; "
            "pip install matplotlib, or write a .json file instead"
        ) from None


def frontier_png(frontier: Frontier) -> bytes:
    """Draw each plan of a sweep by its peak and overhead, with a line through the Pareto front.

    Raises ``ValueError`` if matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure((9.0, 5.6), dpi=130, layout="constrained", facecolor="white")
    axes = figure.subplots()
    drawn: list[FrontierPoint | Marker] = [*frontier.points, *frontier.markers]
    unit = unit_of(max(item.peak_bytes for item in drawn))
    axes.plot(
        [point.peak_bytes / unit.nbytes for point in frontier.pareto],
        [point.overhead_percent for point in frontier.pareto],
        drawstyle="steps-post",
        color=_BLUE,
        linewidth=1.6,
        zorder=2,
        label="nothing is better in both",
    )
    _draw_points(axes, frontier, unit)
    what = "device peak" if frontier.is_measured else "saved storages on the device, peak"
    axes.set_xlabel(f"{what} ({unit.name})")
    axes.set_ylabel(f"overhead (% of {frontier.compute_ms:.4g} ms compute)")
    axes.margins(x=0.12)
    # Overheads are 0 or more, so the label of the plan without offloading fits below 0.
    top = max(1.0, *(item.overhead_percent for item in drawn))
    axes.set_ylim(-0.16 * top, 1.25 * top)
    axes.set_yticks([tick for tick in axes.get_yticks() if 0 <= tick <= 1.2 * top])
    for place, marker in enumerate(frontier.markers):
        _annotate(axes, marker, unit, is_above=place > 0)
    axes.grid(color="#eeeeee")
    axes.set_axisbelow(True)
    axes.legend(frameon=False, loc="upper right")
    axes.spines[["top", "right"]].set_visible(False)
    is_of_budgets = {point.option for point in frontier.points} == {"activation_memory_budget"}
    planned = "memory budgets, estimated" if is_of_budgets else "plans of one trace, simulated"
    title = f"Memory against time: {len(frontier.points)} {planned}"
    figure.suptitle(title, fontsize=12, x=0.01, ha="left")
    stream = io.BytesIO()
    # Omit matplotlib's version, so that the same plan gives the same bytes.
    figure.savefig(stream, format="png", metadata={"Software": None})
    return stream.getvalue()


def _draw_points(axes: Axes, frontier: Frontier, unit: Unit) -> None:
    """Draw Pareto-optimal plans filled and on top, since other plans may lie at the same point."""
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


def _annotate(axes: Axes, marker: Marker, unit: Unit, is_above: bool) -> None:
    place = (marker.peak_bytes / unit.nbytes, marker.overhead_percent)
    axes.scatter(*place, s=60, marker="x", color=_MUTED, zorder=5)
    axes.annotate(
        f"{marker.name}\n{format_bytes(marker.peak_bytes)}, {marker.total_ms:.4g} ms",
        place,
        xytext=(0, 14 if is_above else -12),
        textcoords="offset points",
        ha="left" if is_above else "right",
        va="bottom" if is_above else "top",
        fontsize=8.5,
        arrowprops={"arrowstyle": "-", "color": _MUTED, "linewidth": 0.7},
    )
