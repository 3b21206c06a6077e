# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Draw the pictures of docs/user-guide/concepts.md and planning.md.

    python tools/generate_pictures.py                 draw all of them
    python tools/generate_pictures.py one_layer       draw this one
    python tools/generate_pictures.py --check         fail if one is not what would be drawn

Whatever shows times or memory is computed: by the planner and its simulator on small traces that
are made up here, or on examples/traces. Only the picture of groups and the one of CUDA graphs are
laid out by hand.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import image
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from make_trace import Model, Schedule, interleaved, one_f_one_b, one_pass  # noqa: E402

from megatron.slipstream.estimate.frontier import sweep  # noqa: E402
from megatron.slipstream.estimate.frontier_picture import frontier_png  # noqa: E402
from megatron.slipstream.plan.actions import Action, ActionKind, Plan  # noqa: E402
from megatron.slipstream.plan.build import build_plan  # noqa: E402
from megatron.slipstream.plan.candidates import PolicyOptions  # noqa: E402
from megatron.slipstream.plan.check import check_plan  # noqa: E402
from megatron.slipstream.plan.files import load_trace  # noqa: E402
from megatron.slipstream.plan.operations import Queue, device_bytes  # noqa: E402
from megatron.slipstream.plan.timeline import device_memory  # noqa: E402
from megatron.slipstream.plan.trace import (  # noqa: E402
    Bandwidth,
    GroupKey,
    MemoryReading,
    StepKind,
    Trace,
)
from megatron.slipstream.plan.walk import Simulation, Span, simulate  # noqa: E402

IMAGES = ROOT / "docs" / "user-guide" / "images"
EXAMPLE = ROOT / "examples" / "traces" / "dense_8b_pp4_rank0.json"
MAX_DIFFERENCE = 0.0002
"""Mean difference of pixels, of 1, that another machine may make."""

TEXT = "#222222"
MUTED = "#6b6b6b"
FORWARD = "#4477aa"
BACKWARD = "#7fb0d6"
OUT = "#228833"
BACK = "#aa3377"
STALL = "#d40000"
IDLE = "#e4e4e4"
KEPT = "#ee8866"
MIB = 2**20
GIB = 2**30


def figure_of(width: float, height: float) -> Figure:
    figure = Figure((width, height), dpi=200, layout="constrained")
    # Their own light background, so that they are legible on a dark page too.
    figure.set_facecolor("white")
    return figure


def png(figure: Figure) -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format="png", metadata={"Software": None})
    return stream.getvalue()


def bare(axes: Axes, *sides: str) -> None:
    """Hide the frame but for ``sides``."""
    for side in ("top", "right", "bottom", "left"):
        axes.spines[side].set_visible(side in sides)
    axes.tick_params(length=0, labelsize=9, labelcolor=TEXT)


def bar(
    axes: Axes, y: float, start: float, end: float, color: str, text: str = "", **style: Any
) -> None:
    ink = style.pop("ink", "white")
    fontsize = style.pop("fontsize", 8)
    axes.broken_barh(
        [(start, end - start)],
        (y - 0.36, 0.72),
        **{"color": color, "edgecolor": "white", "linewidth": 0.8, **style},
    )
    axes.text((start + end) / 2, y, text, color=ink, fontsize=fontsize, ha="center", va="center")


# --- pipeline schedules ---------------------------------------------------------------------------

NUM_STAGES = 4
NUM_MICRO_BATCHES = 8
PASS_TIME = {"F": 1.0, "B": 2.0}


def times_of(schedules: Sequence[Schedule]) -> list[dict[tuple[str, int], tuple[float, float]]]:
    """When each pass of each stage runs, if one starts as soon as what it needs is there."""
    done: list[dict[tuple[str, int], tuple[float, float]]] = [{} for _ in schedules]
    places = [0] * len(schedules)
    free_at = [0.0] * len(schedules)
    while any(place < len(order) for place, order in zip(places, schedules, strict=True)):
        before = list(places)
        for stage, order in enumerate(schedules):
            while places[stage] < len(order):
                item = order[places[stage]]
                key = (item.direction, item.micro_batch)
                neighbour = stage - 1 if item.direction == "F" else stage + 1
                if 0 <= neighbour < len(schedules) and key not in done[neighbour]:
                    break
                given = done[neighbour][key][1] if 0 <= neighbour < len(schedules) else 0.0
                start = max(free_at[stage], given)
                free_at[stage] = start + PASS_TIME[item.direction]
                done[stage][key] = (start, free_at[stage])
                places[stage] += 1
        assert places != before, "the stages wait for each other"
    return done


def one_f_one_b_png() -> bytes:
    """1F1B over four stages, and how many micro-batches' activations two of them keep."""
    times = times_of([one_f_one_b(NUM_STAGES, s, NUM_MICRO_BATCHES) for s in range(NUM_STAGES)])
    end = max(stop for stage in times for _, stop in stage.values())
    figure = figure_of(7.6, 4.2)
    grid, kept = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    grid.broken_barh([(0, end)], (-NUM_STAGES + 0.64, NUM_STAGES - 0.28), color="#f6f6f6")
    for stage, passes in enumerate(times):
        for (direction, number), (start, stop) in passes.items():
            is_first = stage == 0 and number == 0
            colour = KEPT if is_first else FORWARD if direction == "F" else BACKWARD
            ink = "white" if direction == "F" and not is_first else TEXT
            bar(grid, -stage, start, stop, colour, f"{direction}{number}", ink=ink)
    grid.set_yticks([-s for s in range(NUM_STAGES)], [f"stage {s}" for s in range(NUM_STAGES)])
    grid.set_ylim(-NUM_STAGES + 0.5, 1.2)
    saved, used = times[0]["F", 0][1], times[0]["B", 0][0]
    grid.annotate(
        "", (used, 0.62), (saved, 0.62), arrowprops={"arrowstyle": "<->", "color": KEPT, "lw": 1.6}
    )
    grid.text(
        (saved + used) / 2,
        0.74,
        "what F0 saved waits here for B0",
        **{"color": TEXT, "fontsize": 9, "ha": "center", "va": "bottom"},
    )
    bare(grid)
    for stage, colour in ((0, FORWARD), (NUM_STAGES - 1, OUT)):
        x, y = in_flight(times[stage], end)
        kept.step(x, y, where="post", color=colour, linewidth=2, label=f"stage {stage}")
        kept.fill_between(x, y, step="post", color=colour, alpha=0.12)
    kept.set_ylabel("micro-batches kept", fontsize=9, color=TEXT)
    kept.set_yticks(range(NUM_STAGES + 1))
    kept.set_ylim(0, NUM_STAGES + 1.3)
    kept.set_xlim(0, end)
    kept.set_xticks([])
    kept.set_xlabel("time →", fontsize=9, color=MUTED, loc="right")
    kept.legend(frameon=False, fontsize=9, loc="upper right", ncols=2)
    bare(kept, "bottom", "left")
    return png(figure)


def in_flight(
    passes: Mapping[tuple[str, int], tuple[float, float]], end: float
) -> tuple[list[float], list[int]]:
    """How many micro-batches have begun their forward and not ended their backward."""
    changes = [(start, 1) for (d, _), (start, _) in passes.items() if d == "F"]
    changes += [(stop, -1) for (d, _), (_, stop) in passes.items() if d == "B"]
    x = sorted({0.0, end, *(time for time, _ in changes)})
    return x, [sum(change for time, change in changes if time <= until) for until in x]


def most_kept(schedule: Schedule) -> int:
    """The most passes that are between forward and backward at once."""
    level, levels = 0, []
    for item in schedule:
        level += 1 if item.direction == "F" else -1
        levels.append(level)
    return max(levels)


def schedules_png() -> bytes:
    """What each stage keeps at its peak, in activations of one micro-batch's whole stage."""
    figure = figure_of(7.6, 2.7)
    axes = figure.subplots()
    stages = range(NUM_STAGES)
    num_chunks = 2
    rows = (
        (
            "1F1B",
            FORWARD,
            [most_kept(one_f_one_b(NUM_STAGES, s, NUM_MICRO_BATCHES)) for s in stages],
        ),
        (
            f"interleaved, {num_chunks} chunks a stage",
            KEPT,
            [
                most_kept(interleaved(NUM_STAGES, s, NUM_MICRO_BATCHES, num_chunks)) / num_chunks
                for s in stages
            ],
        ),
    )
    for shift, (label, colour, values) in zip((-0.2, 0.2), rows, strict=True):
        places = [stage + shift for stage in stages]
        bars = axes.bar(places, values, width=0.36, color=colour, label=label)
        axes.bar_label(bars, fmt="{:g}", fontsize=9, color=TEXT, padding=2)
    axes.set_xticks(list(stages), [f"stage {stage}" for stage in stages])
    axes.set_ylabel("micro-batches kept\nat the peak", fontsize=9, color=TEXT)
    axes.set_ylim(0, 7)
    axes.set_yticks([])
    axes.legend(frameon=False, fontsize=9, loc="upper right")
    bare(axes, "bottom")
    return png(figure)


# --- simulated timelines --------------------------------------------------------------------------

NUM_LAYERS = 6
FORWARD_MS = 6.0


def layers(nbytes: int, gb_per_s: float = 50.0) -> Trace:
    """One micro-batch through a model of equal layers, each a group of ``nbytes``."""
    model = Model(
        NUM_LAYERS, ("layer",), nbytes={f"own {index}": nbytes for index in range(NUM_LAYERS)}
    )
    trace = one_pass(model)
    ms = {
        StepKind.FORWARD_START: FORWARD_MS,
        StepKind.FORWARD_COMMIT: 0.0,
        StepKind.BACKWARD_USE: 2 * FORWARD_MS,
    }
    rates = Bandwidth(gb_per_s, gb_per_s, gb_per_s, gb_per_s)
    step_ms = tuple(ms[step.kind] for step in trace.steps)
    levels = [nbytes_ + WEIGHTS_BYTES for nbytes_ in device_bytes(trace, ())]
    memory = tuple(MemoryReading(level, level, 0) for level in levels)
    return replace(trace, step_ms=step_ms, bandwidth=rates, memory=memory)


WEIGHTS_BYTES = 768 * MIB


def simulated(trace: Trace, options: PolicyOptions | None = None) -> tuple[Plan, Simulation]:
    plan = build_plan(trace, options or PolicyOptions())
    check_plan(plan)
    return plan, simulate(plan)


LANES = {Queue.COMPUTE: "compute", Queue.D2H: "copies out\n(D2H)", Queue.H2D: "copies back\n(H2D)"}


def draw_queues(axes: Axes, simulation: Simulation, only: int | None = None) -> None:
    """The three queues. With ``only``, all layers but this one are pale."""
    end = simulation.total_ms
    axes.broken_barh([(0, end)], (-2.36, 2.72), color="#f6f6f6")
    for span in simulation.spans:
        if span.end_ms == span.start_ms:
            continue
        layer, is_backward = span.cause.key.group, is_backward_of(span)
        colour = {Queue.D2H: OUT, Queue.H2D: BACK}.get(span.queue, FORWARD)
        if span.queue is Queue.COMPUTE and is_backward:
            colour = BACKWARD
        is_pale = only is not None and layer != only
        text = (
            f"{'B' if is_backward else 'F'}{layer}" if span.queue is Queue.COMPUTE else f"{layer}"
        )
        ink = TEXT if is_pale or colour == BACKWARD else "white"
        alpha = 0.28 if is_pale else 1.0
        bar(axes, -int(span.queue), span.start_ms, span.end_ms, colour, text, ink=ink, alpha=alpha)
    for stall in simulation.stalls:
        bar(axes, 0, stall.start_ms, stall.start_ms + stall.ms, STALL, "", alpha=0.9)
    axes.set_yticks([-int(queue) for queue in LANES], list(LANES.values()))
    axes.set_xlim(0, end)
    axes.set_ylim(-2.5, 0.5)
    axes.set_xticks([])
    bare(axes)


def is_backward_of(span: Span) -> bool:
    return getattr(span.cause, "kind", None) is StepKind.BACKWARD_USE


SHOWN_LAYER = 1


def one_layer_png() -> bytes:
    """One layer's bytes over an iteration: computed, copied out, let go, copied back, used."""
    plan, simulation = simulated(layers(256 * MIB))
    key = GroupKey(0, SHOWN_LAYER)
    group = plan.group_by_key[key]
    by_name = {span.action: span for span in simulation.spans}
    out = by_name[str(Action(ActionKind.D2H, key, "layer"))]
    back = by_name[str(Action(ActionKind.H2D, key, "layer"))]
    forward = next(s for s in simulation.spans if s.queue is Queue.COMPUTE and s.cause.key == key)
    use = next(s for s in simulation.spans if is_backward_of(s) and s.cause.key == key)
    let_go_ms = simulation.memory[group.free_step].ms
    figure = figure_of(7.6, 3.3)
    queues, where = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.25))
    draw_queues(queues, simulation, SHOWN_LAYER)
    for start, end, colour, text, ink in (
        (forward.start_ms, out.start_ms, FORWARD, "device", "white"),
        (out.start_ms, let_go_ms, "#8dbb93", "out", TEXT),
        (
            let_go_ms,
            back.start_ms,
            IDLE,
            "host memory only: device memory is free for others",
            TEXT,
        ),
        (back.start_ms, back.end_ms, "#d3a3be", "back", TEXT),
        (back.end_ms, use.end_ms, FORWARD, "device", "white"),
    ):
        bar(where, 0, start, end, colour, text, ink=ink, fontsize=7.2)
    where.set_yticks([0], [f"bytes of layer {SHOWN_LAYER}"])
    where.set_ylim(-1.05, 0.5)
    where.set_xlabel("time →", fontsize=9, color=MUTED, loc="right")
    for ms, text, side in (
        (forward.end_ms, "saved ", "right"),
        (let_go_ms, " freed", "left"),
        (use.start_ms, "needed", "center"),
    ):
        where.text(ms, -0.5, "▲", fontsize=8, color=TEXT, ha="center", va="top")
        where.text(ms, -0.76, text, fontsize=8, color=TEXT, ha=side, va="top")
    bare(where)
    return png(figure)


def hides_png() -> bytes:
    """The same layers on the same link: copies that fit into a layer's time, and twice as large."""
    figure = figure_of(7.6, 4.2)
    panels = figure.subplots(2, 1)
    for axes, nbytes in zip(panels, (256 * MIB, 512 * MIB), strict=True):
        _, simulation = simulated(layers(nbytes))
        draw_queues(axes, simulation)
        copy_ms = next(s.end_ms - s.start_ms for s in simulation.spans if s.queue is Queue.D2H)
        waits = (
            f"compute waits {simulation.stall_ms:.0f} ms (red)" if simulation.stalls else "no waits"
        )
        axes.set_title(
            f"{nbytes // MIB} MiB a layer: a copy takes {copy_ms:.1f} ms, "
            f"a layer's forward {FORWARD_MS:.0f} ms: {waits}",
            **{"fontsize": 9.5, "color": TEXT, "loc": "left"},
        )
    longest = max(axes.get_xlim()[1] for axes in panels)
    for axes in panels:
        axes.set_xlim(0, longest)
    panels[-1].set_xlabel("time →", fontsize=9, color=MUTED, loc="right")
    return png(figure)


def peak_png() -> bytes:
    """Device memory of one iteration: without, with, and with an input that lingers."""
    trace = layers(256 * MIB)
    last_commit = max(i for i, s in enumerate(trace.steps) if s.kind is StepKind.FORWARD_COMMIT)
    plan, simulation = simulated(trace)
    late = replace(plan.trace.storages[0], lingers_until=last_commit)
    lingering = replace(plan, trace=replace(trace, storages=(late, *trace.storages[1:])))
    # Marks take no time; what is there between two at the same time is never seen.
    shown = [i for i, ms in enumerate(trace.step_ms) if ms > 0]
    x = [simulation.memory[i].ms for i in shown] + [simulation.total_ms]
    without = [device_memory(plan).without_plan[i] / GIB for i in shown]
    moved = [device_memory(plan).with_plan[i] / GIB for i in shown]
    kept = [device_memory(lingering).with_plan[i] / GIB for i in shown]
    figure = figure_of(7.6, 3.4)
    axes = figure.subplots()

    def step(values: list[float]) -> list[float]:
        return [*values, values[-1]]

    weights = WEIGHTS_BYTES / GIB
    axes.fill_between(x, 0, weights, color=IDLE, linewidth=0)
    axes.text(
        1, weights / 2, "weights, gradients, optimizer", fontsize=8.5, color=TEXT, va="center"
    )
    axes.fill_between(x, weights, step(moved), step="post", color=FORWARD, alpha=0.18, linewidth=0)
    axes.fill_between(
        x,
        step(moved),
        step(kept),
        **{
            "step": "post",
            "facecolor": "white",
            "edgecolor": KEPT,
            "hatch": "////",
            "linewidth": 0,
        },
    )
    axes.step(x, step(without), where="post", color=MUTED, linewidth=1.6)
    axes.step(x, step(moved), where="post", color=FORWARD, linewidth=2)
    for values, colour, text in (
        (without, MUTED, "peak without offloading"),
        (moved, FORWARD, "peak with offloading"),
    ):
        axes.axhline(max(values), color=colour, linewidth=0.8, linestyle="--")
        axes.text(x[-1], max(values) + 0.03, text, fontsize=9, color=colour, ha="right")
    gone = max(i for i, (a, b) in enumerate(zip(moved, kept, strict=True)) if b > a) + 1
    axes.text(
        x[gone] + 1.5,
        (max(moved) + max(kept)) / 2,
        "freed by the plan, but something else still holds it",
        **{"fontsize": 8.5, "color": TEXT, "va": "center"},
    )
    axes.set_ylabel("device memory (GiB)", fontsize=9, color=TEXT)
    axes.set_xlim(0, x[-1])
    axes.set_ylim(0, 2.6)
    axes.set_xticks([])
    axes.set_xlabel("forward, then backward →", fontsize=9, color=MUTED)
    bare(axes, "bottom", "left")
    return png(figure)


# --- laid out by hand -----------------------------------------------------------------------------


def box(axes: Axes, x: float, y: float, width: float, height: float, **style: Any) -> None:
    axes.add_patch(
        FancyBboxPatch(
            (x + 0.04, y), width - 0.08, height, boxstyle="round,pad=0,rounding_size=0.06", **style
        )
    )


OPERATIONS = (
    ("norm", "attn_norm", ("layer input",)),
    ("query, key,\nvalue", "qkv_linear", ("normalised\ninput",)),
    ("core\nattention", "core_attn", ("q, k, v", "attention\noutput")),
    ("projection", "attn_proj", ("attention\noutput",)),
    ("norm", "mlp_norm", ("attention block's\noutput",)),
    ("MLP or\nexperts", "", ()),
)


def groups_png() -> bytes:
    """A layer's operations, the groups they make, and the storages that the groups save."""
    figure = figure_of(7.6, 3.3)
    axes = figure.subplots()
    width = 2.0
    places: dict[str, list[float]] = {}
    for index, (operation, group, saved) in enumerate(OPERATIONS):
        x = index * width
        colour = FORWARD if group else "#9a9a9a"
        box(axes, x + 0.1, 2.6, width - 0.2, 0.8, facecolor=colour, edgecolor="none")
        axes.text(x + 1, 3.0, operation, color="white", fontsize=9.5, ha="center", va="center")
        if index:
            axes.annotate("", (x + 0.14, 3.0), (x - 0.14, 3.0), arrowprops={"arrowstyle": "->"})
        if not group:
            continue
        box(axes, x, 1.72, width, 1.95, facecolor="none", edgecolor=OUT, linestyle="--")
        axes.text(x + 1, 3.83, group, color=OUT, fontsize=9.5, ha="center", weight="bold")
        axes.text(x + 0.14, 2.1, "▶ start", color=MUTED, fontsize=8, va="center")
        axes.text(
            x + width - 0.14, 2.1, "commit ■", color=MUTED, fontsize=8, ha="right", va="center"
        )
        for label in saved:
            places.setdefault(label, []).append(x + 1)
    slots = {label: 1.0 + 2.35 * index for index, label in enumerate(places)}
    for label, holders in places.items():
        is_shared = len(holders) > 1
        box(
            axes,
            slots[label] - 0.95,
            0.1,
            1.9,
            0.72,
            **{"facecolor": "#fde3d9" if is_shared else "#f1f1f1", "edgecolor": "none"},
        )
        axes.text(slots[label], 0.46, label, fontsize=9, color=TEXT, ha="center", va="center")
        for holder in holders:
            colour = KEPT if is_shared else "#9a9a9a"
            axes.plot([holder, slots[label]], [1.72, 0.82], color=colour, linewidth=1.4)
    axes.text(
        slots["attention\noutput"],
        -0.16,
        "one storage, saved by two groups: it moves once",
        **{"fontsize": 8.5, "color": TEXT, "ha": "center", "va": "center"},
    )
    axes.set_xlim(-0.1, len(OPERATIONS) * width + 0.1)
    axes.set_ylim(-0.4, 4.2)
    axes.set_axis_off()
    return png(figure)


def graphs_png() -> bytes:
    """Each captured layer's graph carries the copies of its neighbour."""
    figure = figure_of(7.6, 2.3)
    axes = figure.subplots()
    count = 4
    steps = [("F", n) for n in range(count)] + [("B", n) for n in reversed(range(count))]
    for place, (direction, layer) in enumerate(steps):
        x = place * 1.3
        box(axes, x - 0.02, -0.1, 1.3, 2.5, facecolor="#f6f6f6", edgecolor="#bdbdbd")
        is_forward = direction == "F"
        colour, ink = (FORWARD, "white") if is_forward else (BACKWARD, TEXT)
        bar(axes, 1.55, x + 0.1, x + 1.18, colour, f"{direction}{layer}", ink=ink, fontsize=10)
        copied = layer - 1
        if copied >= 0:
            copy_colour, what = (OUT, "out") if is_forward else (BACK, "back")
            text = f"layer {copied}\n{what}"
            bar(axes, 0.4, x + 0.1, x + 0.95, copy_colour, text, fontsize=8)
    axes.text(0, 2.55, "forward graphs", fontsize=9, color=MUTED)
    axes.text(count * 1.3, 2.55, "backward graphs", fontsize=9, color=MUTED)
    axes.set_yticks([1.55, 0.4], ["compute", "copies"])
    axes.set_xlim(-0.05, len(steps) * 1.3 + 0.05)
    axes.set_ylim(-0.15, 2.85)
    axes.set_xticks([])
    bare(axes)
    return png(figure)


# --- of the example trace -------------------------------------------------------------------------


def example_frontier_png() -> bytes:
    return frontier_png(sweep(load_trace(EXAMPLE), PolicyOptions()))


PICTURES: Mapping[str, Callable[[], bytes]] = {
    "one_f_one_b": one_f_one_b_png,
    "schedules": schedules_png,
    "groups": groups_png,
    "one_layer": one_layer_png,
    "hides": hides_png,
    "peak": peak_png,
    "graphs": graphs_png,
    "frontier": example_frontier_png,
}
"""By the name of the file in docs/user-guide/images, without '.png'."""


def is_like(path: Path, drawn: bytes) -> bool:
    if not path.exists():
        return False
    there, new = image.imread(path), image.imread(io.BytesIO(drawn))
    return there.shape == new.shape and float(np.abs(there - new).mean()) <= MAX_DIFFERENCE


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {', '.join(PICTURES)}")
    parser.add_argument("--check", action="store_true", help="compare only, and write nothing")
    options = parser.parse_args(None if arguments is None else list(arguments))
    unknown = set(options.names) - PICTURES.keys()
    if unknown:
        parser.error(f"no picture {', '.join(sorted(unknown))}; there are {', '.join(PICTURES)}")
    stale = []
    for name in options.names or PICTURES:
        path, drawn = IMAGES / f"{name}.png", PICTURES[name]()
        if not options.check:
            path.write_bytes(drawn)
        elif not is_like(path, drawn):
            stale.append(path.name)
    if stale:
        print(
            f"{', '.join(stale)}: not what would be drawn; "
            "run ./run python tools/generate_pictures.py, and look at the result",
            file=sys.stderr,
        )
    return bool(stale)


if __name__ == "__main__":
    sys.exit(main())
