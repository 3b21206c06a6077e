# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Budgets for activations beside settings by hand: how they are run and compared."""

from __future__ import annotations

from pathlib import Path

from benchmark_runs import benchmark

from benchmarks.rows import read_rows


def test_settings_by_hand_are_run_with_what_they_recompute_and_move(tmp_path: Path) -> None:
    variants = "--modules mlp|core_attn+attn_proj --modules layer|- --modules budget=0.6"
    limits = "--max-planning 20 --min-iterations 2 --max-iterations 2 --figures memory"
    result = benchmark(
        *f"--case budgets_smoke {variants} {limits} --name hand --output {tmp_path}".split(),
    )
    assert result.returncode == 0, result.stderr
    rows = {
        (row["variant"], row["engine"]): row
        for row in read_rows(tmp_path / "hand.jsonl")
        if row["kind"] == "summary"
    }
    assert not any(row["error"] for row in rows.values())
    moved = rows["mlp|core_attn+attn_proj", "slipstream"]
    whole, off = rows["layer|-", "slipstream"], rows["layer|-", "off"]
    assert moved["moved_bytes"] > 0
    assert "moved_bytes" not in whole
    assert max(whole["act_bytes"], moved["act_bytes"]) < off["act_bytes"]
    budget = rows["budget=0.6", "slipstream"]
    assert abs(budget["budget_bytes"] - 0.6 * off["act_bytes"]) <= 1
    assert budget["act_bytes"] <= budget["budget_bytes"]
    assert budget["is_settled"]
    assert sum(budget["settings"].values()) == 3
    assert "| budget MiB | recomputed MiB |" in (tmp_path / "hand.md").read_text()
    assert {row["loss_difference"] for row in rows.values()} == {0}
