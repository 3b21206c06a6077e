# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Memory versus time: a sweep of plans, the Pareto-optimal ones, and their picture.

The picture is drawn without pyplot: it needs no display and no global state.
"""

from __future__ import annotations

import decimal
import io
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron.slipstream.estimate.shape_tables import table
from megatron.slipstream.estimate.ways import BUDGET, OFF, WAYS, Finder, Iteration
from megatron.slipstream.plan.build import plan_of
from megatron.slipstream.plan.candidates import PolicyOptions
from megatron.slipstream.plan.model import IterationModel
from megatron.slipstream.plan.render import Unit, format_bytes, unit_of
from megatron.slipstream.plan.search import MAX_STEPS_OF_CHANGES
from megatron.slipstream.plan.trace import Trace
from megatron.slipstream.plan.walk import simulate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NUM_POINTS = 24
"""Number of plans per option, at evenly spaced values."""

Progress = Callable[[int, int], object]
"""Called before each plan and at the end with the number of finished plans and the total."""

MAX_OVERHEADS_PERCENT = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)
SCHEMA = "slipstream-frontier"
VERSION = 1

# The colours also differ in lightness, for colour-blind readers.
_BLUE, _GREEN, _MUTED = "#4477aa", "#228833", "#666666"


class _Series(NamedTuple):
    flag: str
    """The flag of ``slipstream plan``, or of a training; memory is in GiB."""
    is_bytes: bool
    label: str
    marker: str
    colour: str


_SERIES: dict[str, _Series] = {
    "activation_offload_fraction":
        _Series("--fraction", False, "a fraction of the groups", "o", "#bbbbbb"),
    "target_memory_bytes":
        _Series("--target-memory", True, "a target for the device peak", "D", _BLUE),
    "max_overhead_percent":
        _Series("--max-overhead", False, "a limit of the overhead", "s", _GREEN),
    "activation_memory_budget":
        _Series("--activation-memory-budget", True, "a memory budget", "D", _BLUE),
}  # fmt: skip


@dataclass(frozen=True)
class FrontierPoint:
    """One plan: the option that produced it, and its predicted peak and time."""

    option: str
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
        of = _SERIES[self.option]
        return f"{of.flag} {self.value / 2**30 if of.is_bytes else self.value:.4g}"


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

    def run(option: str, values: Iterable[float]) -> None:
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


def _point(model: IterationModel, base: PolicyOptions, option: str, value: float) -> FrontierPoint:
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


# The picture


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
    for option, (_, _, label, marker, colour) in _SERIES.items():
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
