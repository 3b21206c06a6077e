# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A report survives its file, adds up, and shows every rank and module."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import pytest

from megatron.slipstream.fine_grained_activation_offload.report import (
    HEADS,
    LayerReport,
    ModuleCounters,
    RankReport,
    Report,
    TriedPlan,
)
from megatron.slipstream.plan.candidates import PolicyOptions

MIB = 1 << 20


def make_rank(rank: int, modules: Sequence[str] = ("core_attn", "attn_proj")) -> RankReport:
    """A rank's report in which figures differ from their defaults."""
    counters = {
        name: ModuleCounters(
            num_groups=8 + place,
            num_groups_moved=6,
            d2h_bytes=(3 + place) * MIB,
            d2h_copies=12,
            h2d_bytes=2 * MIB,
            h2d_copies=11,
            freed_bytes=1 * MIB,
            peak_drop_bytes=(place + 1) * 1000,
            num_late=5,
            num_kept_for_host_memory=1 + place,
            stall_ms=0.25,
        )
        for place, name in enumerate(modules)
    }
    return RankReport(
        rank=rank,
        modules=counters,
        plan=f"the plan\nof {rank}",
        planned_peak_bytes=100,
        baseline_peak_bytes=200,
        host_allocated_bytes=7 * MIB,
        host_growth_bytes=2 * MIB,
        host_high_water_bytes=5 * MIB,
        host_waste_bytes=MIB // 4,
        host_memory_limit_bytes=8 * MIB,
        num_host_allocations=9,
        num_kept_for_host_memory=6,
        num_iterations=4,
        num_plans=2,
        options=PolicyOptions(release_lag=2, max_overhead_percent=1.5),
        notes=["it is so"],
        tried_percent=0.5,
        tried=[TriedPlan(2, 3, MIB, 0.5, 0.25)],
        step_ms=[1.25, 2.0],
        step_stall_ms=[0.5, 0.0],
        step_peak_bytes=[90, 110],
        later_bytes=10,
        late_groups={"0.3": 5},
        iteration_ms=[12.5, 11.0],
        warnings={"it is late": 2},
        settings={"num_layers": 4, "offload_modules": ["core_attn"], "bf16": True},
        environment={"torch": "2.11.0"},
        layers=make_layers(),
        tiles={"output_layer": 16},
        budget_bytes=6 * MIB,
        budget_reason="of 9 GiB",
    )


def make_layers() -> list[LayerReport]:
    """Six layers of two kinds: two move, three recompute, the last of which have no known time."""
    keep = LayerReport(kind="dense", saved_bytes=4 * MIB, moved_bytes=MIB, reason="it fits")
    less = LayerReport("mlp", "dense", 4 * MIB, 0, 3 * MIB, 0.5, "less memory")
    whole = LayerReport("layer", "experts", 8 * MIB, 0, 8 * MIB)
    return [keep, less, less, whole, keep, whole]


# Figures.


def test_the_total_is_the_sum_of_every_figure() -> None:
    rank = make_rank(0)
    for field in fields(ModuleCounters):
        parts = [getattr(counters, field.name) for counters in rank.modules.values()]
        assert getattr(rank.total, field.name) == sum(parts) != 0, field.name
    assert rank.d2h_bytes == 7 * MIB
    assert rank.freed_bytes == 2 * MIB
    assert rank.peak_drop_bytes == 3000


def test_the_text_has_the_ranks_by_pipeline_stage() -> None:
    ranks = [make_rank(number) for number in range(4)]
    assert "stage" not in Report(ranks).render()
    for rank in ranks:
        rank.pp_rank = rank.rank % 2
    rows = [line.split() for line in Report(ranks).render().splitlines()]
    shown = [row for row in rows if row[:1] == ["pipeline"] or row[1:2] == ["total"]]
    assert [row[0] for row in shown] == ["pipeline", "0", "2", "pipeline", "1", "3"]
    assert [row for row in shown if row[0] == "pipeline"] == [
        ["pipeline", "stage", "0"],
        ["pipeline", "stage", "1"],
    ]


def test_layers_are_a_line_for_each_kind_and_setting() -> None:
    lines = Report([make_rank(0)]).render().splitlines()
    start = lines.index("layers of rank 0, per micro-batch")
    assert lines[start - 2 : start] == [
        "budget of rank 0 for activations: 6.0 MiB (of 9 GiB)",
        "rank 0 runs in pieces of the sequence: output_layer in 16",
    ]
    assert [re.split(r"  +", line.strip()) for line in lines[start + 1 : start + 5]] == [
        [*HEADS],
        ["0, 4", "dense", "nothing", "6.0 MiB", "2.0 MiB", "0 B", "it fits"],
        ["1, 2", "dense", "mlp", "2.0 MiB", "0 B", "6.0 MiB", "1.0 ms", "less memory"],
        ["3, 5", "experts", "layer", "0 B", "0 B", "16.0 MiB"],
    ]
    assert "layers of" not in Report([RankReport()]).render()


# JSON.


def test_json_gives_back_the_same_report() -> None:
    report = Report([make_rank(0), make_rank(3, modules=[])])
    assert Report.from_json(report.to_json()) == report


HEAD = '"schema": "slipstream-report", "version": 1'


@pytest.mark.parametrize(
    "text",
    [
        '{"ranks": [{}]}',
        f"{{{HEAD}}}",
        f'{{{HEAD}, "ranks": 3}}',
        f'{{{HEAD}, "ranks": [3]}}',
        f'{{{HEAD}, "ranks": [], "num_sheep": 3}}',
        f'{{{HEAD}, "ranks": [{{"modules": []}}]}}',
        f'{{{HEAD}, "ranks": [{{"modules": {{"core_attn": 3}}}}]}}',
        f'{{{HEAD}, "ranks": [{{"modules": {{"core_attn": {{"num_sheep": 3}}}}}}]}}',
        f'{{{HEAD}, "ranks": [{{"num_sheep": 3}}]}}',
        f'{{{HEAD}, "ranks": [{{"rank": "0"}}]}}',
        f'{{{HEAD}, "ranks": [{{"step_ms": [1, "2"]}}]}}',
        f'{{{HEAD}, "ranks": [{{"planned_ms": NaN}}]}}',
        f'{{{HEAD}, "ranks": [{{"warnings": {{"text": null}}}}]}}',
        f'{{{HEAD}, "ranks": [{{"options": {{"num_sheep": 3}}}}]}}',
        f'{{{HEAD}, "ranks": [{{"options": {{"release_lag": "1"}}}}]}}',
        f'{{{HEAD}, "ranks": [{{"settings": {{"deep": {"[" * 9999}',
        f'{{{HEAD}, "ranks": [{{"settings": {{"deep": {"[" * 9999}{"]" * 9999}}}}}]}}',
        "[" * 99999 + "]" * 99999,
    ],
)
def test_what_is_not_a_report_is_refused_as_one(text: str) -> None:
    with pytest.raises(ValueError, match="is not a whole slipstream-report: .*; give a file that"):
        Report.from_json(text)


def test_what_is_wrong_with_a_report_is_told_with_its_place() -> None:
    text = f'{{{HEAD}, "ranks": [{{}}, {{"modules": {{"a": {{"num_late": 0.5}}}}}}]}}'
    with pytest.raises(ValueError) as caught:
        Report.from_json(text, "report.json")
    assert str(caught.value).startswith(
        "report.json is not a whole slipstream-report: ranks[1].modules.a.num_late: "
    )


def test_another_file_than_a_report_is_named_with_its_cure() -> None:
    text = '{"schema": "slipstream-trace", "version": 1}'
    reason = "holds a 'slipstream-trace', not a slipstream-report"
    cure = "give a file that --offload-report-path wrote"
    with pytest.raises(ValueError, match=f"^report.json {reason}; {cure}$"):
        Report.from_json(text, "report.json")


def test_a_field_that_a_report_lacks_has_its_default() -> None:
    (rank,) = Report.from_json(f'{{{HEAD}, "ranks": [{{"modules": {{}}, "rank": 3}}]}}').ranks
    assert rank == RankReport(3)
    assert rank.options is None


# Files.


def test_a_saved_report_can_be_read_back(tmp_path: Path) -> None:
    report = Report([make_rank(0)])
    path = tmp_path / "new" / "folder" / "report.json"
    report.save(path)
    assert Report.from_json(path.read_text()) == report
    assert [item.name for item in path.parent.iterdir()] == ["report.json"]


@pytest.mark.parametrize("written", [0, 10], ids=["at-once", "half-way"])
def test_an_error_while_saving_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    # A full disk may let part of the text through.
    path = tmp_path / "report.json"
    old = Report([make_rank(0)])
    old.save(path)

    def fail(self: Path, data: bytes) -> int:
        with self.open("wb") as file:
            file.write(data[:written])
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(OSError, match="No space left"):
        Report([make_rank(1)]).save(path)
    assert Report.from_json(path.read_text()) == old


def test_a_report_that_json_cannot_hold_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    old = Report([make_rank(0)])
    old.save(path)
    broken = RankReport(plan=object())  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        Report([broken]).save(path)
    assert Report.from_json(path.read_text()) == old
    assert json.loads(path.read_text())["ranks"][0]["num_plans"] == 2


# Several ranks.


def test_merging_puts_the_ranks_in_order() -> None:
    reports = [Report([make_rank(2)]), Report([make_rank(0), make_rank(3)]), Report([make_rank(1)])]
    assert Report.merge(reports).ranks == [make_rank(rank) for rank in range(4)]


# Text.


def test_there_is_a_row_per_rank_and_module_and_a_total_per_rank() -> None:
    lines = Report([make_rank(0), make_rank(1, modules=["moe_act"])]).render().split("\n")
    rows = [line.split()[:2] for line in lines[2:7]]
    assert rows == [
        ["0", "attn_proj"],
        ["0", "core_attn"],
        ["0", "total"],
        ["1", "moe_act"],
        ["1", "total"],
    ]


def test_a_row_shows_its_figures_under_their_headings() -> None:
    lines = Report([make_rank(0, modules=["core_attn"])]).render().split("\n")
    assert lines[0] == "Activation offload, per iteration"
    heading, row = lines[1:3]
    assert len(heading) == len(row)

    def ends(text: str, cells: Sequence[str]) -> list[int]:
        """Where each cell ends; they are looked for from left to right."""
        places, start = [], 0
        for cell in cells:
            start = text.index(cell, start) + len(cell)
            places.append(start)
        return places

    cells = "8|6|3.0 MiB|12|1.0 MiB|2.0 MiB|5|0.25".split("|")
    names = "groups moved D2H copies freed H2D late stall_ms".split()
    # From behind the module's name on: the columns after it are aligned to the right.
    assert ends(row[16:], cells) == ends(heading[16:], names)


def test_every_rank_shows_its_host_memory() -> None:
    lines = Report([make_rank(0), make_rank(1, modules=["moe_act"])]).render().split("\n")
    memory = (
        "7.0 MiB in 9 slabs (2.0 MiB new in the last iteration), at most 5.0 MiB in use, waste "
        "256.0 KiB (5.0%); limit 8.0 MiB, for which groups stay on the device: 6 by plan and "
    )
    assert f"host memory of rank 0: {memory}3 when there was no room" in lines
    assert f"host memory of rank 1: {memory}1 when there was no room" in lines


def test_host_memory_without_a_limit_in_steady_state() -> None:
    rank = RankReport(host_allocated_bytes=7 * MIB, host_high_water_bytes=5 * MIB)
    rank.num_host_allocations = 9
    assert (
        "host memory of rank 0: 7.0 MiB in 9 slabs (nothing new in the last iteration), at most "
        "5.0 MiB in use, waste 0 B (0.0%)"
    ) in Report([rank]).render().split("\n")


def test_the_first_rank_shows_its_plan() -> None:
    text = Report([make_rank(0), make_rank(1)]).render()
    assert "iterations: 4, plans made: 2" in text
    assert text.endswith("\n\nPlan of rank 0\nthe plan\nof 0")
    assert "of 1" not in text


def test_a_rank_without_a_plan_shows_none() -> None:
    assert "Plan of rank" not in Report([RankReport()]).render()


def test_an_empty_report_can_be_shown() -> None:
    assert Report([]).render().split("\n")[1].split()[:2] == ["rank", "module"]


def test_planned_and_measured_times_are_shown_where_there_are_any() -> None:
    assert "from its first mark" not in Report([RankReport(rank=0)]).render()
    timed = Report([RankReport(rank=3, planned_ms=351.25, measured_ms=360.0)])
    line = "iteration of rank 3: 360.0 ms from its first mark to its end, 351.2 ms planned"
    assert line in timed.render().splitlines()


def test_what_was_tried_out_is_shown() -> None:
    trials = [TriedPlan(28, 96, 12 << 30, 3.5, 0.2), TriedPlan(4, 96, 4 << 30, 0.625, 0.125)]
    lines = Report([RankReport(rank=2, tried=trials)]).render().splitlines()
    expensive, kept = (line for line in lines if "tried out" in line)
    assert expensive.startswith("offloading of rank 2, tried out: +3.50% (± 0.20)")
    assert kept.startswith("offloading of rank 2, tried out: +0.62% (± 0.12)")
    assert expensive.endswith("with 28 of 96 groups moving (12.0 GiB each way)")
    assert "tried out" not in Report([RankReport(rank=2)]).render()
