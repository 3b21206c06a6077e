# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The benchmark of chunk graphs runs on any machine, and compares what it says it compares."""

from __future__ import annotations

from pathlib import Path

from benchmark_runs import benchmark

from benchmarks import chunk_graphs
from benchmarks.rows import read_rows


def test_the_smoke_case_measures_both_ways_in_turn(tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    arguments = f"--case smoke --steps 2 --output {output}".split()
    result = benchmark("chunk_graphs", *arguments, sees_gpu=True)
    assert result.returncode == 0, result.stderr
    rows = read_rows(output)
    steps = [row for row in rows if row["kind"] == "step"]
    assert sorted((row["number"], row["way"]) for row in steps) == [
        (0, "chunk"), (0, "eager"), (1, "chunk"), (1, "eager"),
    ]  # fmt: skip
    assert all(row["ms"] >= row["host_ms"] > 0 for row in steps)
    summaries = {row["way"]: row for row in rows if row["kind"] == "summary"}
    assert summaries["eager"]["slot"] is None
    assert summaries["chunk"]["slot"]["num_slots"] == 1
    assert "chunk" in result.stdout


def test_other_cases_need_a_gpu() -> None:
    assert chunk_graphs.use_gpu() or chunk_graphs.main(["--case", "launch_bound"]) == 2
