# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Paths have every bar and every byte at its position."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from make_trace import timed
from reported_runs import make_run, make_trace, with_waits

from megatron.slipstream.plan.candidates import PolicyOptions
from megatron.slipstream.plan.trace import OUTPUT_LAYER
from megatron.slipstream.report_page import charts
from megatron.slipstream.report_page.charts import (
    HEIGHT,
    LANE_HEIGHT,
    WIDTH,
    Shape,
    draw_memory,
    draw_timeline,
    figures,
    sparkline,
)
from megatron.slipstream.report_page.iteration import Iteration, is_between_groups, iteration_of

BAR = re.compile(r"([mM])(-?\d+) (-?\d+)h(-?\d+)v(-?\d+)h(-?\d+)z")


def rectangles(path: str, lane_height: int = LANE_HEIGHT) -> list[tuple[int, int, int]]:
    """Left edge, right edge and top of each rectangle of a path."""
    assert BAR.sub("", path) == ""
    found, x, y = [], 0, 0
    for letter, dx, dy, width, height, back in BAR.findall(path):
        x, y = (int(dx), int(dy)) if letter == "M" else (x + int(dx), y + int(dy))
        assert int(back) == -int(width)
        assert int(height) == lane_height
        found.append((x, x + int(width), y))
    return found


def steps(path: str) -> list[tuple[int, int]]:
    """The points of a step curve."""
    points = [tuple(map(int, path[1:].split("H")[0].split()))]
    points += [(int(x), int(y)) for x, y in re.findall(r"H(\d+)V(\d+)", path)]
    return points  # type: ignore[return-value]


def shown(**changes: object) -> Iteration:
    run = make_run(**changes)  # type: ignore[arg-type]
    return iteration_of(run.plan, run.rank)


@pytest.mark.parametrize("num_micro_batches", [2, 20], ids=["few", "many"])
def test_every_bar_is_drawn_once_at_its_time_in_its_colour(num_micro_batches: int) -> None:
    run = make_run(make_trace(num_micro_batches=num_micro_batches), is_measured=False)
    iteration = iteration_of(run.plan, run.rank)
    drawn = draw_timeline(iteration)
    num_paths = [sum(shape.name != "wait" for shape in lane.shapes) for lane in drawn.lanes]
    assert (max(num_paths) > 4) == (num_micro_batches == 20), "long lanes are in pieces"
    scale = WIDTH / iteration.total
    colours = charts.colours_of(iteration)
    for lane, bars in zip(drawn.lanes, (lane.bars for lane in iteration.lanes), strict=True):
        found = sorted(
            (*rectangle, shape.name.split()[1])
            for shape in lane.shapes
            if shape.name.startswith("bar")
            for rectangle in rectangles(shape.path)
        )
        assert found == sorted(
            (
                round(bar.start * scale),
                round(bar.end * scale),
                lane.y,
                "other" if is_between_groups(bar) else f"m{colours[bar.cause.name]}",
            )
            for bar in bars
        )
    assert {lane.y for lane in drawn.lanes} == {0, 38, 76}


def test_waits_have_a_path_of_their_own() -> None:
    run = with_waits(make_run(), {2: 4.0, 5: 1.0})
    iteration = iteration_of(run.plan, run.rank)
    drawn = draw_timeline(iteration)
    (path,) = [shape.path for shape in drawn.lanes[0].shapes if shape.name == "wait"]
    scale = WIDTH / iteration.total
    height = LANE_HEIGHT + 2 * charts.WAIT_RISE
    assert rectangles(path, height) == [
        (round(2 * scale), round(6 * scale), -charts.WAIT_RISE),
        (round(9 * scale), round(10 * scale), -charts.WAIT_RISE),
    ]
    assert drawn.has_waits
    assert not draw_timeline(shown(trace=make_trace(is_timed=False))).has_waits


def test_windows_are_told_from_copies() -> None:
    untimed = draw_timeline(shown(trace=make_trace(is_timed=False)))
    names = [{shape.name.split()[-1] for shape in lane.shapes} for lane in untimed.lanes]
    assert [name == {"window"} for name in names] == [False, True, True]
    assert not any(
        "window" in shape.name for lane in draw_timeline(shown()).lanes for shape in lane.shapes
    )


def test_passes_are_named_in_their_middle_and_marked_where_they_begin() -> None:
    iteration = shown()
    drawn = draw_timeline(iteration)
    assert [mark.text for mark in drawn.passes] == ["F0", "F1", "B0", "B1"]
    for mark, item in zip(drawn.passes, iteration.passes, strict=True):
        assert mark.x == pytest.approx((item.start + item.end) / 2 / iteration.total)
        assert mark.width == pytest.approx((item.end - item.start) / iteration.total)
    lines = [int(x) for x in re.findall(r"M(\d+) 0v", drawn.pass_lines)]
    assert lines == [round(p.start / iteration.total * WIDTH) for p in iteration.passes]


def test_the_memory_curve_has_each_steps_bytes_from_its_time_on() -> None:
    iteration = shown(is_measured=False)
    drawn = draw_memory(iteration)
    curves = {shape.name: steps(shape.path) for shape in drawn.shapes if shape.name != "fill"}
    assert curves.keys() == {"without", "with", "host"}
    top = _top_bytes(drawn)
    for name, values in (
        ("without", iteration.memory.without_plan),
        ("with", iteration.memory.with_plan),
    ):
        points = iter([*curves[name], (WIDTH + 1, 0)])
        _, y = next(points)
        after = next(points)
        for start, value in zip(iteration.step_starts, values, strict=True):
            at = round(start / iteration.total * WIDTH)
            while after[0] <= at:
                (_, y), after = after, next(points)
            assert y == round(HEIGHT - value / top * HEIGHT)


def _top_bytes(drawn: charts.MemoryCurve) -> float:
    """The value at the upper edge, from the ticks."""
    low, high = drawn.ticks[0], drawn.ticks[-1]
    value, unit = high.text.split()
    nbytes = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}[unit]
    assert (low.text, low.y) == (f"0 {unit}", 1)
    return float(value) * nbytes / (1 - high.y)


def test_peaks_are_marked_where_and_as_high_as_they_are() -> None:
    iteration = shown()
    drawn = draw_memory(iteration)
    assert [mark.name for mark in drawn.peaks] == ["without", "with", "measured"]
    top = _top_bytes(drawn)
    for mark, values in zip(
        drawn.peaks,
        (iteration.memory.without_plan, iteration.memory.with_plan, iteration.peak_bytes),
        strict=True,
    ):
        step = values.index(max(values))
        assert mark.x == pytest.approx(iteration.step_starts[step] / iteration.total)
        assert 1 - mark.y == pytest.approx(max(values) / top)
    assert drawn.peaks[0].y < drawn.peaks[1].y, "the plan lowers the peak"


def test_a_target_is_a_line_within_the_picture() -> None:
    assert draw_memory(shown()).target is None
    for target_bytes in (8 << 20, 1 << 30):
        options = PolicyOptions(target_memory_bytes=target_bytes)
        drawn = draw_memory(shown(options=options))
        assert drawn.target is not None
        assert 1 - drawn.target.y == pytest.approx(target_bytes / _top_bytes(drawn))
        assert 0 < drawn.target.y < 1


def test_every_tick_of_memory_has_its_unit() -> None:
    run = make_run()
    ticks = draw_memory(iteration_of(run.plan, run.rank)).ticks
    assert len(ticks) > 2
    assert {tick.text.split(" ")[1] for tick in ticks} == {"MiB"}


@pytest.mark.parametrize("scale", [1e-4, 1.0, 37.0, 1e5])
def test_ticks_of_time_are_round_and_few(scale: float) -> None:
    iteration = shown(trace=timed(make_trace(), scale, 1.0), is_measured=False)
    ticks = draw_timeline(iteration).ticks
    assert 3 <= len(ticks) <= 8
    for tick in ticks:
        assert float(tick.text) == pytest.approx(tick.x * iteration.total)
        assert len(tick.text.lstrip("0.")) <= 7
    assert ticks[-1].x <= 1 + 1e-9


def test_figures_for_the_pointer_are_those_of_the_lanes() -> None:
    run = make_run()
    (begin, *_) = [i for i, step in enumerate(run.plan.trace.steps) if not step.is_of_group]
    run = with_waits(run, {2: 4.0, begin: 1.0})
    iteration = iteration_of(run.plan, run.rank)
    data = figures(iteration)
    assert len(data["lanes"][0]["waits"]["owner"]) == 2, "of a group, and of the output layer"
    assert data["total"] == iteration.total
    for lane, shown_lane in zip(iteration.lanes, data["lanes"], strict=True):
        for bars, columns in ((lane.bars, shown_lane["bars"]), (lane.waits, shown_lane["waits"])):
            actions = [
                f"{data['owners'][owner]}:{data['kinds'][kind]}"
                for owner, kind in zip(columns["owner"], columns["kind"], strict=True)
            ]
            assert actions == [str(bar.cause) for bar in bars]
            assert columns["start"] == pytest.approx([bar.start for bar in bars], abs=1e-4)
            lengths = [bar.end - bar.start for bar in bars]
            assert columns["length"] == pytest.approx(lengths, abs=1e-4)
            assert columns["bytes"] == [bar.nbytes for bar in bars if any(b.nbytes for b in bars)]
    memory = data["memory"]
    unit = {"KiB": 1 << 10, "MiB": 1 << 20}[memory["unit"]]
    with_plan = [value * unit for value in memory["curves"]["with"]]
    assert with_plan == pytest.approx(iteration.memory.with_plan, abs=unit / 1000)


def test_modules_beyond_the_colours_share_them() -> None:
    names = [f"module{place}" for place in range(12)]
    run = make_run(make_trace(num_layers=2, modules=tuple(names)), is_measured=False)
    colours = charts.colours_of(iteration_of(run.plan, run.rank))
    assert list(colours) == [*names, OUTPUT_LAYER]
    assert list(colours.values()) == [*range(10), 0, 1, 2]


def test_a_sparkline_goes_from_edge_to_edge_and_up_to_the_highest() -> None:
    points = [tuple(map(float, p.split())) for p in sparkline([1, 4, 2])[1:].split("L")]
    assert points == [(0, 26), (120, 2), (240, 18)]
    assert Shape("x", sparkline([0, 0])).path.count("L") == 1


def test_what_starts_in_the_trace_without_memory_readings_is_called_so() -> None:
    run = make_run(is_measured=False)
    plan = replace(run.plan, trace=replace(run.plan.trace, memory=()))
    assert draw_memory(iteration_of(plan, run.rank)).what == "saved storages on the device"
    assert draw_memory(shown()).what == "device memory"
