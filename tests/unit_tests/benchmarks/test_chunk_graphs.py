# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The benchmark of chunk graphs runs on any machine, and compares what it says it compares."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from benchmark_runs import benchmark

from benchmarks import chunk_graphs
from benchmarks.rows import read_rows
from megatron.slipstream.packed_sequences.packing import PackLimits


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


def test_packed_cases_fill_the_buffer_with_documents_of_varying_length() -> None:
    limits = PackLimits(max_tokens=4096, max_sequences=64)
    documents = chunk_graphs._documents(np.random.default_rng(0), limits, 8192)
    lengths = [len(document) - 1 for document in documents]
    assert 2048 < sum(lengths) <= 4096
    assert len(set(lengths)) > len(lengths) / 2
