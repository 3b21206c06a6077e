# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Every rank's drop of its peak, beside what could drop; and the case that is measured for it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks

from benchmarks.cases import Limits, Variant, engine_labels, find_case
from benchmarks.rank_memory import drop_rows, theoretical_drop_bytes
from benchmarks.rows import Row, read_rows
from benchmarks.table import render
from megatron.slipstream.plan.build import build_plan
from megatron.slipstream.plan.candidates import PolicyOptions
from megatron.slipstream.plan.trace import GroupKey, GroupTrace, StepKind, StorageTrace, Trace
from megatron.slipstream.plan.trace import Step as MarkStep

SMOKE = "smoke_ep2_pp2_vpp2"
NUM_RANKS = 4
LAYER_BYTES = 2 * 32 * 64 * 4
"""Saved by qkv_linear of one layer of the smoke case: [s, b, h] in FP32."""
MIB = 1 << 20


def trace_of(*nbytes: int, lingers_until: int = 0) -> Trace:
    """Groups that commit one after another and are used in reverse order."""
    keys = [GroupKey(0, index) for index in range(len(nbytes))]
    kinds = (StepKind.FORWARD_START, StepKind.FORWARD_COMMIT)
    steps = [MarkStep(kind, key, "core_attn") for key in keys for kind in kinds]
    steps += [MarkStep(StepKind.BACKWARD_USE, key, "core_attn") for key in reversed(keys)]
    return Trace(
        tuple(steps),
        tuple(GroupTrace(key, "core_attn", 0, (key.group,)) for key in keys),
        tuple(
            StorageTrace(size, (key,), lingers_until=lingers_until if key.group == 0 else 0)
            for size, key in zip(nbytes, keys, strict=True)
        ),
    )


def test_the_group_in_use_is_not_counted() -> None:
    plan = build_plan(trace_of(1000, 100, 10), PolicyOptions())
    assert theoretical_drop_bytes(plan) == 1100


def test_what_something_else_holds_cannot_drop_meanwhile() -> None:
    sizes = (1000, 100, 10, 1, 1)
    plan = build_plan(trace_of(*sizes), PolicyOptions())
    assert theoretical_drop_bytes(plan) == 1111
    # The first one is held until backward has come to the third.
    held = replace(plan, trace=trace_of(*sizes, lingers_until=12))
    assert theoretical_drop_bytes(held) == 1100


def summary(engine: str, rank: int, peak_mib: float, **fields: Any) -> Row:
    common = {"variant": "core_attn", "engine": engine, "rank": rank, "num_ranks": 2}
    return {**common, "step_ms": 1.0, "peak_bytes": int(peak_mib * MIB), **fields}


def test_each_rank_is_compared_with_its_own_baseline() -> None:
    drops = {"theoretical_drop_bytes": 400 * MIB, "movable_drop_bytes": 500 * MIB}
    rows = [summary("off", 0, 1000), summary("off", 1, 900), summary("megatron", 0, 650)]
    rows += [summary("slipstream", 0, 610, **drops), summary("slipstream", 1, 700, **drops)]
    first, second = drop_rows(rows)
    assert (first["drop_bytes"], first["drop_percent"]) == (390 * MIB, 97.5)
    assert (first["builtin_drop_bytes"], first["builtin_drop_percent"]) == (350 * MIB, 70.0)
    assert (second["drop_bytes"], second["drop_percent"]) == (200 * MIB, 50.0)
    assert second["builtin_peak_bytes"] is None
    assert second["builtin_drop_percent"] is None


def test_without_a_baseline_or_a_peak_there_is_no_row() -> None:
    assert drop_rows([summary("slipstream", 0, 610)]) == []
    no_peak = {name: value for name, value in summary("off", 0, 1).items() if name != "peak_bytes"}
    assert drop_rows([no_peak, summary("slipstream", 0, 610)]) == []


def test_the_planned_variant_is_measured_with_auto_only() -> None:
    *single, planned = find_case("moe_ep4_pp2_vpp2").variants
    every = ("off", "megatron", "slipstream")
    assert [engine_labels(variant, every) for variant in single] == [every] * 4
    assert engine_labels(planned, every) == ("off", "megatron", "slipstream:auto")


@pytest.mark.parametrize(
    "name, num_ranks", [("moe_ep4_pp2_vpp2", 8), ("moe_ep2_pp2_vpp2", 4), ("moe_ep4", 4)]
)
def test_data_parallel_ranks_are_counted_and_experts_divide_them(name: str, num_ranks: int) -> None:
    case = find_case(name)
    assert case.num_ranks == num_ranks
    assert case.model.dp % case.model.ep == 0
    assert case.num_micro_batches % case.model.pp == 0


def measure_smoke(rank: int, num_ranks: int, port: int, rows: Path) -> int:
    from benchmarks.worker import Job, work

    os.environ["LOCAL_WORLD_SIZE"] = str(num_ranks)
    case = find_case(SMOKE)
    variants = (case.variants[0], case.variants[-1])
    limits = Limits(
        min_iterations=2,
        max_iterations=2,
        seconds=1.0,
        num_warmups=1,
        max_planning=12,
        num_memory_iterations=1,
        figures=("memory",),
    )
    return work(Job(case, variants, ("slipstream",), {}, limits, rows, "run", "command"))


def test_the_smoke_case_tells_every_ranks_drop(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.touch()
    assert run_ranks(NUM_RANKS, measure_smoke, path) == [0] * NUM_RANKS
    rows = read_rows(path)
    found = drop_rows(row for row in rows if row["kind"] == "summary")
    assert {(row["engine"], row["rank"]) for row in found} == {
        (engine, rank) for engine in ("slipstream", "slipstream:auto") for rank in range(NUM_RANKS)
    }
    for row in found:
        stage = row["rank"] // 2
        if row["engine"] == "slipstream":
            # Five and three passes of one layer in flight; the last of them is in use.
            expected = (4, 2)[stage] * LAYER_BYTES
            assert row["theoretical_drop_bytes"] == row["movable_drop_bytes"] == expected
        else:
            assert 40 < row["drop_percent"] < 110
    summaries = [row for row in rows if row["kind"] == "summary"]
    assert all(row["is_settled"] for row in summaries if row["engine"].startswith("slipstream"))
    assert not any("host_us_per_group" in row for row in summaries)
    assert all(row["num_micro_batches"] == 4 for row in summaries)
    assert all(row["loss_difference"] in (0, None) for row in summaries)
    text = render(rows, "rows.jsonl")
    assert "| modules | engine | rank | peak MiB off | ours | built-in |" in text
    assert "|  | slipstream | 3 |" in text


def reduce_with_engines(rank: int, num_ranks: int, port: int) -> dict[str, Any]:
    """Gradients of an iteration without the engine, and with it, of dense parameters."""
    from megatron.core import parallel_state
    from megatron_models import initialize

    from benchmarks.engines import BaseModel, build_offloading_chunks, make_engine

    case = find_case(SMOKE)
    initialize(case.model, rank, num_ranks, port)
    base = BaseModel(case)
    variant = Variant(("qkv_linear", "core_attn"))
    chunks = build_offloading_chunks(base, variant)
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
    # With data of their own; otherwise there would be nothing to reduce.
    assert ranks[2]["off losses"] != ranks[3]["off losses"]
    assert ranks[2]["off losses"] == ranks[2]["slipstream losses"]
