# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The plans of a sweep, and which of them are Pareto-optimal."""

from __future__ import annotations

import dataclasses
import io
import json

import pytest
from hypothesis import given, settings, strategies as st
from make_trace import Model, one_f_one_b, trace_of

from megatron.slipstream.estimate.frontier import (
    Frontier,
    FrontierPoint,
    frontier_png,
    mark_pareto,
    sweep,
)
from megatron.slipstream.plan.build import build_plan
from megatron.slipstream.plan.candidates import PolicyOptions
from megatron.slipstream.plan.trace import Bandwidth, MemoryReading, Trace
from megatron.slipstream.plan.walk import simulate

MB = 10**6
OPTIONS = PolicyOptions()


def late_trace() -> Trace:
    """A trace whose copies take longer than its computation."""
    model = Model(6, ("core_attn", "moe_act"), nbytes={f"own {i}": MB for i in range(12)})
    trace = trace_of(one_f_one_b(2, 0, 3), model)
    num_steps = len(trace.steps)
    return dataclasses.replace(
        trace, step_ms=(1.0,) * num_steps, bandwidth=Bandwidth(0.4, 0.4, 0.3, 0.3)
    )


TRACE = late_trace()


@pytest.fixture(scope="module")
def frontier() -> Frontier:
    return sweep(TRACE, OPTIONS, num_points=6)


def everything_moves(frontier: Frontier) -> FrontierPoint:
    return [p for p in frontier.points if p.option == "activation_offload_fraction"][-1]


def point(peak_bytes: int, total_ms: float) -> FrontierPoint:
    return FrontierPoint("activation_offload_fraction", 0.5, peak_bytes, total_ms, 0.0, 0, 0)


def test_the_ends_are_nothing_and_everything(frontier: Frontier) -> None:
    nothing, everything = frontier.points[0], everything_moves(frontier)
    for marker, end in zip(frontier.markers, (nothing, everything), strict=True):
        assert (marker.peak_bytes, marker.total_ms) == (end.peak_bytes, end.total_ms)
    assert (nothing.moved_nbytes, nothing.overhead_percent) == (0, 0.0)
    plan = build_plan(TRACE, OPTIONS)
    assert everything.moved_nbytes == plan.moved_nbytes > 0
    assert everything.total_ms == simulate(plan).total_ms >= frontier.compute_ms
    assert everything.peak_bytes < nothing.peak_bytes


def test_peaks_are_of_the_whole_device_if_it_was_measured(frontier: Frontier) -> None:
    memory = (MemoryReading(50 * MB, 60 * MB, 0),) * len(TRACE.steps)
    measured = sweep(dataclasses.replace(TRACE, memory=memory), OPTIONS, num_points=2)
    assert measured.is_measured
    assert not frontier.is_measured
    assert measured.points[0].peak_bytes == 60 * MB


def test_targets_and_limits_are_swept_too(frontier: Frontier) -> None:
    options = {point.option for point in frontier.points}
    assert options >= {"target_memory_bytes", "max_overhead_percent"}


def test_the_other_options_are_kept(frontier: Frontier) -> None:
    delta = dataclasses.replace(OPTIONS, delta_offload_bytes_across_pp_ranks=4 * MB)
    trace = dataclasses.replace(TRACE, pp_rank=1)
    moved = everything_moves(sweep(trace, delta, num_points=2)).moved_nbytes
    assert moved == build_plan(trace, delta).moved_nbytes
    assert moved < everything_moves(frontier).moved_nbytes


@settings(max_examples=200, deadline=None)
@given(pairs=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12))
def test_a_marked_point_is_beaten_by_none_and_the_others_by_a_marked_one(
    pairs: list[tuple[int, int]],
) -> None:
    points = mark_pareto([point(peak, float(ms)) for peak, ms in pairs])
    assert [(p.peak_bytes, p.total_ms) for p in points] == pairs
    marked = {(p.peak_bytes, p.total_ms) for p in points if p.is_pareto}
    assert len(marked) == sum(p.is_pareto for p in points)
    for a in marked:
        assert not any(b[0] <= a[0] and b[1] <= a[1] and b != a for b in pairs)
    for b in pairs:
        assert any(a[0] <= b[0] and a[1] <= b[1] for a in marked)


def test_the_line_goes_from_little_memory_to_little_time(frontier: Frontier) -> None:
    line = frontier.pareto
    assert frontier.points[0].total_ms == line[-1].total_ms
    assert [p.peak_bytes for p in line] == sorted(p.peak_bytes for p in line)
    assert [p.total_ms for p in line] == sorted((p.total_ms for p in line), reverse=True)


def test_json_holds_every_point(frontier: Frontier) -> None:
    data = json.loads(frontier.to_json())
    assert (data["schema"], data["version"]) == ("slipstream-frontier", 1)
    assert [FrontierPoint(**item) for item in data["points"]] == list(frontier.points)


def test_the_table_has_a_row_for_each_point_of_the_line(frontier: Frontier) -> None:
    head, *rows, nothing, everything, summary = frontier.render().split("\n")
    assert nothing.startswith("nothing moves: ")
    assert everything.startswith("everything moves: ")
    assert head.split()[:2] == ["device", "peak"]
    assert len(rows) == len(frontier.pareto)
    assert summary.startswith(f"{len(rows)} of {len(frontier.points)} plans")


def test_a_point_is_named_as_the_command_line_names_it(frontier: Frontier) -> None:
    points = sweep(TRACE, OPTIONS, num_points=24).points
    flags = {}
    for p in points:
        flag, text = p.flag.split(" ")
        flags[p.option] = flag
        # Parsing the flag gives exactly the value.
        typed = float(text)
        assert (int(typed * 2**30) if flag == "--target-memory" else typed) == p.value
    assert flags == {
        "activation_offload_fraction": "--fraction",
        "target_memory_bytes": "--target-memory",
        "max_overhead_percent": "--max-overhead",
    }
    rows = frontier.render().split("\n")[1:-3]
    assert all(row.endswith(f" {p.flag}") for row, p in zip(rows, frontier.pareto, strict=True))


def test_every_target_of_a_sweep_can_be_met(frontier: Frontier) -> None:
    by_target = [p for p in frontier.points if p.option == "target_memory_bytes"]
    assert all(p.peak_bytes <= p.value for p in by_target)


def test_progress_goes_from_none_to_all() -> None:
    seen: list[tuple[int, int]] = []
    frontier = sweep(TRACE, OPTIONS, 3, lambda done, total: seen.append((done, total)))
    num_plans = len(frontier.points)
    assert seen == [(done, num_plans) for done in range(num_plans + 1)]


def test_a_trace_without_times_has_no_frontier() -> None:
    with pytest.raises(ValueError, match="step_ms has 0 entries"):
        sweep(dataclasses.replace(TRACE, step_ms=()), OPTIONS)


def test_a_frontier_is_compared_by_its_points(frontier: Frontier) -> None:
    assert sweep(TRACE, OPTIONS, num_points=6) == frontier
    assert isinstance(frontier, Frontier)


def test_the_picture_fills_every_plan_that_no_other_beats(
    frontier: Frontier, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = pytest.importorskip("matplotlib.figure").Figure
    figures = []
    save = drawn.savefig
    monkeypatch.setattr(
        drawn,
        "savefig",
        lambda self, *args, **more: figures.append(self) or save(self, *args, **more),
    )
    image = pytest.importorskip("matplotlib.image").imread(io.BytesIO(frontier_png(frontier)))
    (axes,) = figures[0].axes
    options = {point.option for point in frontier.pareto}
    assert len(frontier.pareto) > 4
    assert len(options) > 1
    for point in frontier.pareto:
        x, y = axes.transData.transform((point.peak_bytes / 2**20, point.overhead_percent))
        colour = image[image.shape[0] - round(y), round(x), :3]
        assert colour.tolist() != [1.0, 1.0, 1.0], point
