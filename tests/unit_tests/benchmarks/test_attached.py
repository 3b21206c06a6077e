# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The comparison of attach() with alternatives: what it measures without a GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from benchmark_runs import benchmark

from benchmarks.attached import Comparison
from benchmarks.case import COMPARISONS, Variant
from benchmarks.cases import find_case
from benchmarks.rows import read_rows

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="counts what is measured without a GPU"
)


@pytest.mark.parametrize(
    "name", ["smoke_attach", "smoke_attach_recompute", "smoke_attach_reentrant"]
)
def test_tiny_run(name: str, tmp_path: Path) -> None:
    arguments = f"--case {name} --min-iterations 4 --max-iterations 4 --output {tmp_path}"
    result = benchmark(*arguments.split())
    assert result.returncode == 0, result.stderr
    rows = read_rows(tmp_path / "engines.jsonl")
    assert [row["kind"] for row in rows].count("machine") == 1
    summaries = {row["engine"]: row for row in rows if row["kind"] == "summary"}
    assert set(summaries) == set(COMPARISONS["attached"])
    measured = {way: row for way, row in summaries.items() if row["error"] is None}
    assert set(measured) == {"plain", "attach", "save_on_cpu"}
    assert all(row["loss_difference"] == 0 for row in measured.values())
    assert all(row["num_iterations"] == 4 for row in measured.values())
    assert sum(row["kind"] == "iteration" for row in rows) == 3 * 4
    moving = summaries["attach"]
    assert moving["moved_bytes"] > 0
    assert "act_bytes" not in summaries["save_on_cpu"]
    if name == "smoke_attach":
        assert 0.5 * moving["moved_bytes"] < moving["saved_bytes"] <= moving["moved_bytes"]
    table = (tmp_path / "engines.md").read_text()
    assert table.count("needs a GPU") == 2


@pytest.mark.parametrize(
    "patterns, options, error",
    [
        (("foo",), {}, "matches no sub-module of Decoder"),
        (("layers.*",), {"lag": 2}, "OffloadConfig has no option 'lag'"),
        (("layers.*",), {"offload_release_lag": -1}, "offload_release_lag=-1 is negative"),
    ],
)
def test_what_a_user_gets_wrong_is_said(
    patterns: tuple[str, ...], options: dict[str, int], error: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(error)):
        Comparison(find_case("smoke_attach")).build(Variant(patterns), "attach", options)
