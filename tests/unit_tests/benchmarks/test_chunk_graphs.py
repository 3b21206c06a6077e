# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The comparison of chunk graphs runs on any machine, and compares the stated variants."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmark_runs import benchmark

from benchmarks import run
from benchmarks.rows import read_rows

WAYS = ["eager", "stock", "chunk", "chunk+offload"]


def test_a_smoke_case_measures_all_ways_in_turn(tmp_path: Path) -> None:
    few = "--warmups 1 --min-iterations 2 --max-iterations 2 --memory-iterations 1"
    result = benchmark(*f"--case smoke_dropless {few} --output {tmp_path}".split())
    assert result.returncode == 0, result.stderr
    rows = read_rows(tmp_path / "engines.jsonl")
    steps = [row for row in rows if row["kind"] == "iteration"]
    assert sorted((row["iteration"], row["engine"]) for row in steps) == [
        (iteration, way) for iteration in range(2) for way in sorted(WAYS)
    ]
    assert all(row["ms"] >= row["host_ms"] > 0 for row in steps)
    summaries = {row["engine"]: row for row in rows if row["kind"] == "summary"}
    assert list(summaries) == WAYS
    assert "slot" not in summaries["eager"]
    assert summaries["chunk"]["slot"]["num_slots"] == 1
    assert all(row["forward_us"] > 0 for row in summaries.values())
    table = (tmp_path / "engines.md").read_text()
    assert "| layers us |" in table
    assert "chunk, rank 0: 1 slots of" in table
    for name in ("chunk", "chunk+offload"):
        assert summaries[name]["error"] is None
        assert summaries[name]["loss_difference"] == 0
    assert summaries["chunk+offload"]["moved_bytes"] > 0
    assert summaries["stock"]["loss_difference"] < 1e-3


@pytest.mark.parametrize("case", ["chunk_small", "graphs_dense"])
def test_other_cases_need_a_gpu(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("torch sees one")
    assert run.main(["--case", case, "--output", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert f"--case {case} needs" in error
    assert "without a GPU there are: smoke" in error
