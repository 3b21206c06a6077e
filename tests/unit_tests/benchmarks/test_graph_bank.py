# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The comparison of context-parallel sizes runs on any machine, and compares like with like."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmark_runs import benchmark

from benchmarks import graph_bank
from benchmarks.case import COMPARISONS
from benchmarks.cases import find_case
from benchmarks.graph_bank import Documents
from benchmarks.rows import read_rows


def test_the_smoke_case_measures_all_ways_in_turn(tmp_path: Path) -> None:
    arguments = "--case smoke_bank --min-iterations 2 --max-iterations 2 --warmups 2"
    result = benchmark(*arguments.split(), "--figures=", "--output", str(tmp_path), sees_gpu=True)
    assert result.returncode == 0, result.stderr
    rows = read_rows(tmp_path / "engines.jsonl")
    steps = [row["engine"] for row in rows if row["kind"] == "iteration"]
    ways = sorted(COMPARISONS["graph_bank"])
    assert [sorted(steps[:4]), sorted(steps[4:])] == [ways] * 2
    summaries = {(row["engine"], row["rank"]): row for row in rows if row["kind"] == "summary"}
    for rank in range(2):
        assert summaries["bank", rank]["loss_difference"] == 0
        assert 0 < summaries["fixed", rank]["loss_difference"] < 1e-5
        sizes = {
            (way, int(size)): figures
            for (way, of_rank), row in summaries.items()
            for size, figures in row["sizes"].items()
            if of_rank == rank
        }
        assert set(sizes) == {("bank", 2), ("bank", 1), ("fixed+graph", 2)}
        for figures in sizes.values():
            assert figures["num_replays"] > 0
            assert figures["num_slots"] == 1
    assert "fixed+graph, rank 0: size 2" in (tmp_path / "engines.md").read_text()


@pytest.mark.parametrize("name", ["bank_cp4", "bank_cp4_large"])
def test_one_size_has_the_documents_of_all_sizes(name: str) -> None:
    case = find_case(name)
    documents = Documents(case)
    dynamic, fixed = (documents.micro_batches(3, is_fixed) for is_fixed in (False, True))
    sizes = {group.size for groups in dynamic for group in groups}
    assert sizes == {1, 2, 4}
    assert {group.size for groups in fixed for group in groups} == {4}

    def pieces(batch: list[graph_bank.MicroBatch]) -> list[graph_bank.Piece]:
        return sorted(piece for groups in batch for group in groups for piece in group.pack)

    assert pieces(dynamic) == pieces(fixed)
    assert len(dynamic) == case.num_micro_batches
    lengths = [piece.length for piece in pieces(dynamic)]
    assert max(lengths) > 20 * sorted(lengths)[len(lengths) // 2]
