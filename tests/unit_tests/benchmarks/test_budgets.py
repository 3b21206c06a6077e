# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Budgets for activations beside settings by hand: how they are run and compared."""

from __future__ import annotations

from pathlib import Path

from benchmark_runs import benchmark

from benchmarks.budgets import best_within, table
from benchmarks.rows import Row, read_rows

MIB = 2**20


def summary(variant: str, act_mib: int, percent: float, **more: object) -> Row:
    """A row of a variant."""
    return {
        "kind": "summary",
        "case": "dense",
        "engine": "slipstream",
        "variant": variant,
        "act_bytes": act_mib * MIB,
        "overhead_percent": percent,
        "overhead_percent_standard_error": 0.1,
        **more,
    }


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
    assert {row["loss_difference"] for row in rows.values()} == {0}


def test_a_budget_stands_beside_the_best_by_hand_that_needs_no_more() -> None:
    by_hand = [
        summary("mlp|core_attn", 50, 3.0),
        summary("core_attn|-", 70, 2.0),
        summary("mlp|-", 90, 1.0),
        summary("moe|core_attn", 10, 0.0, error="refused"),
    ]
    assert best_within(by_hand, 80 * MIB) == by_hand[1]
    assert best_within(by_hand, 40 * MIB) is None
    budget = summary(
        "budget=0.8",
        79,
        1.5,
        budget_bytes=80 * MIB,
        planned_peak_bytes=178 * MIB,
        resident_bytes=100 * MIB,
        moved_bytes=20 * MIB,
        recomputed_bytes=10 * MIB,
        settings={"mlp": 2, "keep": 6},
    )
    text = table([budget, *by_hand])
    assert (
        "| 0.8 | 80.0 | 78.0 | 79.0 | +1.50% ± 0.10 | 20.0 | 10.0 | 2 mlp, 6 keep | "
        "+2.00% ± 0.10, core_attn\\|- |"
    ) in text
    assert "| moe\\|core_attn | refused | |" in text
