# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The page draws what was simulated and measured, nothing else."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from make_trace import timed
from reported_runs import make_run, make_trace, with_waits

from megatron.slipstream.fine_grained_activation_offload.report import RankReport
from megatron.slipstream.plan.actions import ActionKind
from megatron.slipstream.plan.candidates import PolicyOptions
from megatron.slipstream.plan.edges import Queue
from megatron.slipstream.plan.timeline import device_memory
from megatron.slipstream.plan.trace import OUTPUT_LAYER, StepKind
from megatron.slipstream.plan.walk import simulate
from megatron.slipstream.report_page.groups import group_table
from megatron.slipstream.report_page.iteration import (
    Iteration,
    figures,
    iteration_of,
    waits_by_group,
)


def iteration(**changes: object) -> Iteration:
    run = make_run(**changes)  # type: ignore[arg-type]
    return iteration_of(run.plan, run.rank)


def test_lanes_are_the_queues_of_the_simulation_below_what_was_measured() -> None:
    run = make_run()
    shown = iteration_of(run.plan, run.rank)
    assert [lane.name for lane in shown.lanes] == ["measured", "compute", "D2H", "H2D"]
    simulation = simulate(run.plan)
    for lane, queue in zip(shown.lanes[1:], Queue, strict=True):
        spans = [span for span in simulation.spans if span.queue is queue]
        assert [(bar.start_ms, bar.end_ms, bar.nbytes) for bar in lane.bars] == [
            (span.start_ms, span.end_ms, span.nbytes) for span in spans
        ]
        assert [str(bar.cause) for bar in lane.bars] == [span.action for span in spans]
    assert shown.unit == "ms"


def test_predicted_waits_are_the_stalls_of_the_simulation() -> None:
    trace = timed(make_trace(), 1.0, 0.4)
    run = make_run(trace, is_measured=False)
    stalls = simulate(run.plan).stalls
    assert stalls, "copies are too slow to hide"
    compute = iteration_of(run.plan, run.rank).lanes[0]
    assert [(wait.start_ms, wait.cause) for wait in compute.waits] == [
        (stall.start_ms, stall.cause) for stall in stalls
    ]
    assert [wait.end_ms - wait.start_ms for wait in compute.waits] == pytest.approx(
        [stall.ms for stall in stalls]
    )


def test_measured_steps_follow_each_other_with_their_waits_in_front() -> None:
    run = with_waits(make_run(slowness=2.0), {3: 5.0})
    lane = iteration_of(run.plan, run.rank).measured
    assert lane is not None
    assert [bar.start_ms for bar in lane.bars[:5]] == [0, 2, 4, 11, 13]
    assert [(wait.start_ms, wait.end_ms) for wait in lane.waits] == [(6, 11)]
    assert lane.waits[0].cause == run.plan.trace.steps[3]
    assert waits_by_group(lane) == {run.plan.trace.steps[3].key: 5.0}


@pytest.mark.parametrize("field", ["step_ms", "step_stall_ms"])
def test_times_of_another_iteration_are_not_drawn(field: str) -> None:
    run = make_run()
    rank = replace(run.rank, **{field: getattr(run.rank, field)[:-1]})
    assert iteration_of(run.plan, rank).measured is None


def test_memory_of_another_iteration_is_not_drawn() -> None:
    run = make_run()
    assert iteration_of(run.plan, run.rank).peak_bytes == tuple(run.rank.step_peak_bytes)
    rank = replace(run.rank, step_peak_bytes=run.rank.step_peak_bytes[:-1])
    assert iteration_of(run.plan, rank).peak_bytes == ()


def test_without_times_marks_are_evenly_spread_and_copies_have_windows() -> None:
    run = make_run(make_trace(is_timed=False))
    shown = iteration_of(run.plan, run.rank)
    num_steps = len(run.plan.trace.steps)
    assert shown.unit == "marks"
    assert not shown.is_predicted
    assert [bar.start_ms for bar in shown.compute] == pytest.approx(range(num_steps))
    compute, out, back = shown.lanes
    assert [compute.are_windows, out.are_windows, back.are_windows] == [False, True, True]
    by_key = {group.key: group for group in run.plan.groups if group.moves}
    assert len(out.bars) == len(back.bars) == len(by_key) > 0
    for bar in out.bars:
        group = by_key[bar.cause.key]
        assert (bar.start_ms, bar.end_ms) == pytest.approx((group.commit_step, group.free_step))
        assert bar.cause.kind is ActionKind.D2H
    for bar in back.bars:
        group = by_key[bar.cause.key]
        assert (bar.start_ms, bar.end_ms) == pytest.approx((group.h2d_step, group.use_step))
        assert bar.cause.kind is ActionKind.H2D


def test_passes_cover_compute_in_order_and_have_the_names_of_pictures() -> None:
    shown = iteration(is_measured=False)
    passes = figures(shown)["passes"]
    assert [item["name"] for item in passes] == ["F0", "F1", "B0", "B1"]
    assert passes[0]["start"] == 0
    assert all(one["end"] <= after["start"] for one, after in itertools.pairwise(passes))


def test_nothing_lies_behind_the_end() -> None:
    shown = iteration(slowness=3.0)
    assert shown.total == max(bar.end_ms for lane in shown.lanes for bar in lane.bars)
    assert shown.measured is not None
    assert shown.total == shown.measured.bars[-1].end_ms


def test_figures_for_the_script_are_those_of_the_lanes() -> None:
    run = make_run(options=PolicyOptions(target_memory_bytes=8 << 20))
    (begin, *_) = [i for i, step in enumerate(run.plan.trace.steps) if not step.is_of_group]
    run = with_waits(run, {2: 4.0, begin: 1.0})
    shown = iteration_of(run.plan, run.rank)
    data = figures(shown)
    assert len(data["lanes"][0]["waits"]["owner"]) == 2, "of a group, and of the output layer"
    assert data["total"] == shown.total
    for lane, drawn in zip(shown.lanes, data["lanes"], strict=True):
        for bars, columns in ((lane.bars, drawn["bars"]), (lane.waits, drawn["waits"])):
            actions = [
                f"{data['owners'][owner]}:{data['kinds'][kind]}"
                for owner, kind in zip(columns["owner"], columns["kind"], strict=True)
            ]
            assert actions == [str(bar.cause) for bar in bars]
            assert columns["start"] == pytest.approx([bar.start_ms for bar in bars], abs=1e-4)
            lengths = [bar.end_ms - bar.start_ms for bar in bars]
            assert columns["length"] == pytest.approx(lengths, abs=1e-4)
            assert columns["bytes"] == [bar.nbytes for bar in bars if any(b.nbytes for b in bars)]
    memory = data["memory"]
    unit = {"KiB": 1 << 10, "MiB": 1 << 20}[memory["unit"]]
    assert memory["target"] * unit == 8 << 20
    for name, values in shown.memory.items():
        assert [value * unit for value in memory["curves"][name]] == pytest.approx(
            values, abs=unit / 1000
        )
    device = device_memory(run.plan)
    assert shown.memory["without"] == device.without_plan
    assert shown.memory["with"] == device.with_plan
    assert shown.memory["measured"] == shown.peak_bytes


def test_modules_beyond_the_colours_share_them() -> None:
    names = [f"module{place}" for place in range(12)]
    run = make_run(make_trace(num_layers=2, modules=tuple(names)), is_measured=False)
    colours = iteration_of(run.plan, run.rank).colours
    assert list(colours) == [*names, OUTPUT_LAYER]
    assert list(colours.values()) == [*range(10), 0, 1, 2]


# The table of groups.


def table(run_rank: RankReport, shown: Iteration) -> list[dict[str, str]]:
    groups = group_table(shown, run_rank)
    titles = [column.title for column in groups.columns]
    return [dict(zip(titles, (cell.text for cell in row), strict=True)) for row in groups.rows]


def test_a_row_tells_place_bytes_and_times_of_its_group() -> None:
    run = make_run(options=PolicyOptions(activation_offload_fraction=0.5), is_measured=False)
    shown = iteration_of(run.plan, run.rank)
    rows = table(run.rank, shown)
    assert len(rows) == len(run.plan.groups)
    spans = {
        str(span.cause): span for span in shown.simulation.spans if span.queue is not Queue.COMPUTE
    }
    starts = shown.step_starts
    seen = 0
    for row, group in zip(rows, run.plan.groups, strict=True):
        assert row["Group"] == str(group.key)
        assert row["Module"] == group.name
        assert row["Layer"] == str(group.key.group // 2)
        assert row["Micro-batch"] == str(group.key.chunk_pass)
        if group.moves:
            name = f"{group.key}.{group.name}"
            assert row["Offload"] == f"{spans[f'{name}:D2H'].start_ms:.2f}"
            assert row["Reload"] == f"{spans[f'{name}:H2D'].start_ms:.2f}"
            assert row["Freed"] == f"{starts[group.free_step]:.2f}"
            assert row["Needed"] == f"{starts[group.use_step]:.2f}"
            assert row["Decision"] == "moves"
            seen += 1
        else:
            assert row["Decision"] == f"stays: {group.reason}"
            assert row["Offload"] == row["Needed"] == ""
            seen += 1
    assert {row["Decision"][:4] for row in rows} == {"move", "stay"}, "both are seen"


def test_layers_and_micro_batches_are_counted_for_each_chunk_and_name() -> None:
    from make_trace import Model, interleaved, trace_of

    trace = trace_of(interleaved(2, 0, 2, 2), Model(2, ("core_attn", "moe_act")))
    run = make_run(trace)
    rows = {row["Group"]: row for row in table(run.rank, iteration_of(run.plan, run.rank))}
    for group in trace.groups:
        row = rows[str(group.key)]
        assert row["Chunk"] == str(group.vp_stage)
        assert row["Layer"] == str(group.key.group // 2)
    by_chunk = {
        chunk: {row["Micro-batch"] for row in rows.values() if row["Chunk"] == chunk}
        for chunk in ("0", "1")
    }
    assert by_chunk == {"0": {"0", "1"}, "1": {"0", "1"}}


def test_lateness_is_told_apart_by_direction_and_by_source() -> None:
    trace = timed(make_trace(), 1.0, 0.4)
    run = make_run(trace)
    use = next(i for i, step in enumerate(trace.steps) if step.kind is StepKind.BACKWARD_USE)
    run = with_waits(run, {use: 7.5})
    late = str(run.plan.groups[0].key)
    rank = replace(run.rank, late_groups={late: 3})
    shown = iteration_of(run.plan, rank)
    rows = {row["Group"]: row for row in table(rank, shown)}
    for kind, title in ((ActionKind.FREE, "Offload late"), (StepKind.BACKWARD_USE, "Reload late")):
        expected: dict[str, float] = {}
        for stall in shown.simulation.stalls:
            if stall.cause.kind is kind:
                key = str(stall.cause.key)
                expected[key] = expected.get(key, 0.0) + stall.ms
        found = {key: float(row[title]) for key, row in rows.items() if row.get(title)}
        assert found == pytest.approx(expected, abs=1e-3)
    assert any(row.get("Reload late") or row.get("Offload late") for row in rows.values())
    assert rows[str(trace.steps[use].key)]["Stalled"] == "7.500"
    assert rows[late]["Late starts"] == "3"
    assert [row["Late starts"] for row in rows.values()].count("") == len(rows) - 1


def test_columns_that_no_group_fills_are_left_out() -> None:
    titles = table(*_untimed())[0].keys()
    assert not titles & {"Offload late", "Reload late", "Stalled", "Late starts", "Chunk"}


def _untimed() -> tuple[RankReport, Iteration]:
    run = make_run(make_trace(is_timed=False))
    return run.rank, iteration_of(run.plan, run.rank)


def test_storages_of_a_moving_group_that_stay_are_told_with_their_reason() -> None:
    from make_trace import Model, one_f_one_b, trace_of

    model = Model(3, ("core_attn",), saves={0: ("a", "b")}, held_outside=("b",))
    run = make_run(trace_of(one_f_one_b(2, 0, 2), model))
    (kept,) = {group.reason for group in run.plan.groups if group.key.group == 0}
    assert kept == ""
    row = table(run.rank, iteration_of(run.plan, run.rank))[0]
    assert row["Decision"].startswith("moves, but 1 storage stays: ")
    assert "holds it too" in row["Decision"]
