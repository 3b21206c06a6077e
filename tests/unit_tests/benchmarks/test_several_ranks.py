# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A case on several ranks: the peak of each rank, and reduced gradients."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from ranks import run_ranks

from benchmarks.case import Limits, Variant
from benchmarks.cases import find_case
from benchmarks.rows import read_rows
from benchmarks.table import render

SMOKE = "smoke_ep2_pp2_vpp2"
NUM_RANKS = 4
LAYER_BYTES = 2 * 32 * 64 * 4
"""Bytes that qkv_linear of one layer of the smoke case saves: [s, b, h] in FP32."""


def measure_smoke(rank: int, num_ranks: int, port: int, rows: Path) -> int:
    from benchmarks.worker import Job, work

    os.environ["LOCAL_WORLD_SIZE"] = str(num_ranks)
    case = find_case(SMOKE)
    limits = Limits(
        min_iterations=2,
        max_iterations=2,
        seconds=1.0,
        num_warmups=1,
        max_planning=12,
        num_memory_iterations=1,
        figures=("memory",),
    )
    return work(Job(case, case.variants[:1], ("slipstream",), {}, limits, rows, "run", ()))


def test_the_smoke_case_tells_every_ranks_saving(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.touch()
    assert run_ranks(NUM_RANKS, measure_smoke, path) == [0] * NUM_RANKS
    rows = read_rows(path)
    summaries = [row for row in rows if row["kind"] == "summary"]
    ours = [row for row in summaries if row["engine"] != "off"]
    assert {(row["engine"], row["rank"]) for row in ours} == {
        ("slipstream", rank) for rank in range(NUM_RANKS)
    }
    for row in ours:
        # Five and three passes of one layer in flight; the last of them is in use.
        assert row["planned_away_bytes"] == (4, 2)[row["rank"] // 2] * LAYER_BYTES
    assert all(row["is_settled"] for row in ours)
    assert not any("host_us_per_group" in row for row in summaries)
    assert all(row["num_micro_batches"] == 4 for row in summaries)
    assert all(row["loss_difference"] in (0, None) for row in summaries)
    text = render(rows, "rows.jsonl")
    assert "| modules | rank | engine |" in text
    assert "|  | 3 | slipstream |" in text


def reduce_with_engines(rank: int, num_ranks: int, port: int) -> dict[str, Any]:
    """Gradients of dense parameters in an iteration without the engine, and with it."""
    from megatron.core import parallel_state
    from megatron_models import initialize

    from benchmarks.engines import BaseModel, build_twin, make_engine

    case = find_case(SMOKE)
    initialize(case.model, rank, num_ranks, port)
    base = BaseModel(case)
    variant = Variant(("qkv_linear", "core_attn"))
    chunks = build_twin(base, base.case.model, variant.modules)[0]
    found: dict[str, Any] = {}
    for label, with_chunks in (("off", None), ("slipstream", chunks)):
        engine = make_engine(base, label, with_chunks, {})
        for _ in range(2):  # the second follows a plan
            losses = engine.run(0)
        named = [item for chunk in base.chunks for item in chunk.named_parameters()]
        found[label] = [
            (name, item.main_grad.clone().numpy())  # type: ignore[attr-defined]
            for name, item in named
            if getattr(item, "allreduce", True)
        ]
        found[f"{label} losses"] = [float(loss) for loss in losses]
        found[f"{label} moved"] = engine.manager.report.d2h_bytes if engine.manager else 0
        engine.close()
    found["dp_rank"] = parallel_state.get_data_parallel_rank()
    torch.distributed.barrier()
    return found


def test_all_engines_reduce_gradients_over_data_parallel_ranks() -> None:
    ranks = run_ranks(NUM_RANKS, reduce_with_engines)
    assert [rank["dp_rank"] for rank in ranks] == [0, 1, 0, 1]
    for first, second in (ranks[:2], ranks[2:]):
        assert first["slipstream moved"] > 0
        for (name, ours), (_, others) in zip(first["off"], second["off"], strict=True):
            assert (ours == others).all(), name
            assert abs(ours).max() > 0, name
        for rank in (first, second):
            for (name, off), (_, with_engine) in zip(rank["off"], rank["slipstream"], strict=True):
                assert (off == with_engine).all(), name
    # Each rank has its own data; otherwise reduction would change nothing.
    assert ranks[2]["off losses"] != ranks[3]["off losses"]
    assert ranks[2]["off losses"] == ranks[2]["slipstream losses"]
