# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The benchmark of context-parallel sizes runs on any machine, and compares like with like."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmark_runs import benchmark

from benchmarks import graph_bank
from benchmarks.graph_bank import CASES, Documents
from benchmarks.rows import read_rows


def test_the_smoke_case_measures_all_ways_in_turn(tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    arguments = f"--case smoke --steps 2 --output {output}".split()
    result = benchmark("graph_bank", *arguments, sees_gpu=True)
    assert result.returncode == 0, result.stderr
    rows = read_rows(output)
    steps = [row["way"] for row in rows if row["kind"] == "step"]
    assert [sorted(steps[:4]), sorted(steps[4:])] == [sorted(graph_bank.WAYS)] * 2
    summaries = {row["way"]: row for row in rows if row["kind"] == "summary"}
    assert summaries["bank"]["loss_difference"] == 0
    assert 0 < summaries["fixed"]["loss_difference"] < 1e-5
    sizes = {(row["way"], row["size"]): row for row in rows if row["kind"] == "size"}
    assert set(sizes) == {("bank", 2), ("bank", 1), ("fixed+graph", 2)}
    assert all(row["num_replays"] > 0 and row["num_slots"] == 1 for row in sizes.values())
    assert "fixed+graph" in result.stdout


@pytest.mark.parametrize("name", ["launch_bound", "larger"])
def test_one_size_has_the_documents_of_all_sizes(name: str) -> None:
    documents = Documents(CASES[name], 4)
    dynamic, fixed = (documents.micro_batches(3, is_fixed) for is_fixed in (False, True))
    sizes = {group.size for groups in dynamic for group in groups}
    assert sizes == {1, 2, 4}
    assert {group.size for groups in fixed for group in groups} == {4}

    def pieces(batch: list[graph_bank.MicroBatch]) -> list[graph_bank.Piece]:
        return sorted(piece for groups in batch for group in groups for piece in group.pack)

    assert pieces(dynamic) == pieces(fixed)
    assert len(dynamic) == CASES[name].num_micro_batches
    lengths = [piece.length for piece in pieces(dynamic)]
    assert max(lengths) > 20 * sorted(lengths)[len(lengths) // 2]


@pytest.mark.parametrize("arguments", [["--ranks", "3", "--case", "smoke"], ["--ranks", "64"]])
def test_ranks_that_cannot_be_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert torch.cuda.device_count() < 64
    assert graph_bank.main(arguments) == 2
    assert "--ranks" in capsys.readouterr().err
