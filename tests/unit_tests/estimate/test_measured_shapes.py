# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Computed shapes match the measurements on H200s in benchmarks/results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from model_case import DENSE_MODULES, MOE_MODULES

from benchmarks.cases import find_case
from megatron.slipstream.estimate.gpus import find_speed
from megatron.slipstream.estimate.layers import (
    marked_modules,
    saved_tensors,
)
from megatron.slipstream.estimate.model_shapes import (
    Experts,
    LatentAttention,
    ModelShape,
    Parallelism,
)
from megatron.slipstream.estimate.model_state import num_parameters
from megatron.slipstream.estimate.synthetic import DEFAULT_MIN_NUMEL, Workplan, synthetic_trace
from megatron.slipstream.plan.build import build_plan
from megatron.slipstream.plan.candidates import PolicyOptions
from megatron.slipstream.plan.trace import Trace

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results"
TOLERANCE = 0.02
H200 = find_speed("h200")

Row = dict[str, Any]


def rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def trace_of(shape: ModelShape, modules: tuple[str, ...], count: int, rank: int = 0) -> Trace:
    return synthetic_trace(Workplan(shape, H200, modules, count), rank)


# --- equality_h200: bytes offloaded in an iteration, by set of modules ----------------------------

# The models of tests/functional_tests/test_gpu.py.
DENSE = ModelShape(
    num_layers=6,
    hidden_size=2048,
    num_attention_heads=16,
    ffn_hidden_size=6144,
    vocab_size=8192,
    seq_length=4096,
    num_query_groups=8,
    apply_rope_fusion=False,
)
MOE = replace(
    DENSE,
    hidden_size=1024,
    seq_length=2048,
    micro_batch_size=2,
    ffn_hidden_size=3072,
    experts=Experts(num_experts=4, topk=2, ffn_hidden_size=1024),
)
MLA = ModelShape(
    num_layers=4,
    hidden_size=1024,
    num_attention_heads=8,
    ffn_hidden_size=3072,
    vocab_size=8192,
    seq_length=2048,
    latent_attention=LatentAttention(512, 256, 128, 64, 128),
    apply_rope_fusion=False,
)
FP32 = replace(
    DENSE,
    hidden_size=1024,
    seq_length=1024,
    ffn_hidden_size=3072,
    precision="fp32",
    attention_backend="unfused",
)
PP2, PP2_VPP2 = Parallelism(pp=2), Parallelism(pp=2, vpp=2)
# For each model name in the rows: its shape, and the micro-batches of an iteration.
EQUALITY_MODELS: dict[str, tuple[ModelShape, int]] = {
    "dense": (DENSE, 2),
    "moe": (MOE, 2),
    "mla": (MLA, 1),
    "moe, dropout": (replace(MOE, attention_dropout=0.1, hidden_dropout=0.1), 2),
    "moe, norms and moe_act recomputed": (
        replace(MOE, recompute_modules=frozenset({"layernorm", "moe_act"})),
        2,
    ),
    "dense, fp32, unfused attention": (FP32, 2),
    "PP2": (replace(DENSE, parallelism=PP2), 6),
    "PP2, MoE": (replace(MOE, parallelism=PP2), 3),
    "PP2 VPP2, one layer per chunk": (replace(DENSE, num_layers=4, parallelism=PP2_VPP2), 8),
    "EP2": (replace(MOE, parallelism=Parallelism(ep=2)), 2),
    "hybrid": (replace(MOE, num_layers=12, layer_kinds=("*", "-", "*", "E") * 3), 2),
}


def equality_rows() -> Iterator[tuple[str, tuple[str, ...], int, int]]:
    """Model, modules, rank and bytes; the mean of expert-parallel ranks, as routing is uneven."""
    found = rows(RESULTS / "equality_h200_202611.jsonl")
    for row in found:
        model, rank = row["model"], row.get("rank", 0)
        if model == "EP2" and rank:
            continue
        modules = row["modules"]
        if modules == "all":
            modules = MOE_MODULES if model in ("PP2, MoE", "EP2") else DENSE_MODULES
        nbytes = row["moved_bytes"]
        if model == "EP2":
            nbytes = sum(other["moved_bytes"] for other in found if other["model"] == "EP2") // 2
        yield model, tuple(modules), rank, nbytes


EQUALITY_ROWS = list(equality_rows())


def test_there_are_rows_of_each_kind() -> None:
    assert {model for model, *_ in EQUALITY_ROWS} == set(EQUALITY_MODELS)
    assert len(EQUALITY_ROWS) == 27


@pytest.mark.parametrize(
    "model, modules, rank, nbytes",
    EQUALITY_ROWS,
    ids=[f"{model}, {'+'.join(modules)}, rank {rank}" for model, modules, rank, _ in EQUALITY_ROWS],
)
def test_as_much_leaves_as_left(
    model: str, modules: tuple[str, ...], rank: int, nbytes: int
) -> None:
    shape, count = EQUALITY_MODELS[model]
    trace = trace_of(shape, modules, count, rank)
    # The engine at that time counted marks, and moved the model's input without need.
    storages = tuple(replace(item, lingers_until=0) for item in trace.storages)
    trace = replace(trace, storages=storages, step_ms=(), bandwidth=None)
    moved = build_plan(trace, PolicyOptions()).moved_nbytes
    assert moved == pytest.approx(nbytes, rel=TOLERANCE)


# --- overhead_h200: whole iterations --------------------------------------------------------------


def benchmark_shape(name: str) -> ModelShape:
    model = find_case(name).model
    overrides = dict(model.overrides)
    experts = None
    if model.kind == "moe":
        names = ("num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size")
        experts = Experts(*(overrides[name] for name in names))
    return ModelShape(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=overrides["num_query_groups"],
        ffn_hidden_size=overrides.get("ffn_hidden_size", 3 * model.hidden_size),
        vocab_size=model.vocab_size,
        seq_length=model.seq_length,
        micro_batch_size=model.micro_batch_size,
        experts=experts,
        parallelism=Parallelism(pp=model.pp, vpp=model.vpp),
    )


SUMMARIES = [
    row
    for path in sorted((RESULTS / "overhead_h200_202611").glob("*.jsonl"))
    for row in rows(path)
    if row["kind"] == "summary" and "act_bytes" in row  # else its memory was not measured
]


def summaries(engine: str) -> list[Any]:
    """One row of each case, variant and rank, since the others are repetitions."""
    found = {}
    for row in SUMMARIES:
        if row["engine"] == engine:
            found[row["case"], row["variant"], row["rank"]] = row
    return [
        pytest.param(row, id=f"{case}, {variant}, rank {rank}")
        for (case, variant, rank), row in found.items()
    ]


def trace_of_row(row: Row) -> Trace:
    shape, count = benchmark_shape(row["case"]), find_case(row["case"]).num_micro_batches
    return trace_of(shape, tuple(row["variant"].split("+")), count, row["rank"])


@pytest.mark.parametrize("row", summaries("off"))
def test_activations_peak_where_they_did(row: Row) -> None:
    peak = max(reading.peak_bytes for reading in trace_of_row(row).memory)
    assert peak == pytest.approx(row["act_bytes"], rel=TOLERANCE)


@pytest.mark.parametrize("row", summaries("off"))
def test_weights_and_gradients_take_what_they_took(row: Row) -> None:
    # Weights and gradients in 16 bits, no optimizer. The measurement includes library buffers.
    nbytes = 4 * num_parameters(benchmark_shape(row["case"]), row["rank"]).total
    assert 0.94 * row["resident_bytes"] < nbytes <= row["resident_bytes"]


@pytest.mark.parametrize("row", summaries("megatron"))
def test_the_built_in_engine_copied_what_each_group_saves(row: Row) -> None:
    """It copies each group separately, shared storages twice, and keeps a last layer."""
    shape = benchmark_shape(row["case"])
    modules = row["variant"].split("+")
    each = [
        sum(
            tensor.nbytes
            for module in marked_modules(shape, layer)
            if module in modules
            for tensor in saved_tensors(shape, layer)[module]
            if tensor.numel >= DEFAULT_MIN_NUMEL
        )
        for layer in range(shape.num_layers)
    ]
    chunks = shape.chunks_of(row["rank"])
    count = find_case(row["case"]).num_micro_batches
    copied = count * sum(sum(each[layer] for layer in chunk.layers) for chunk in chunks)
    # At the end of the pipeline backward follows directly, so the last layer stays; elsewhere it
    # stays in one micro-batch, the last.
    kept = count if chunks[-1].is_last else 1
    copied -= kept * each[-1]
    assert row["d2h_bulk_bytes"] == pytest.approx(copied, rel=TOLERANCE)


@pytest.mark.parametrize("row", summaries("slipstream"))
def test_as_many_groups_are_marked_as_were(row: Row) -> None:
    assert len(trace_of_row(row).groups) == row["num_groups"]


@pytest.mark.parametrize("row", [row for row in summaries("slipstream") if "dense" in row.id])
def test_the_dense_case_computes_as_long_as_it_did(row: Row) -> None:
    predicted = sum(trace_of_row(row).step_ms)
    assert predicted == pytest.approx(row["compute_ms"], rel=0.04)


@pytest.mark.parametrize("row", [row for row in summaries("slipstream") if "pp2" in row.id])
def test_waits_in_the_pipeline_are_predicted(row: Row) -> None:
    predicted = sum(trace_of_row(row).step_ms)
    assert predicted == pytest.approx(row["compute_ms"], rel=0.06)


def test_the_table_has_the_bandwidth_of_the_rows() -> None:
    (machine,) = [
        row
        for row in rows(RESULTS / "overhead_h200_202611" / "moe_by_time.jsonl")
        if row["kind"] == "machine"
    ]
    assert H200.bandwidth._asdict() == pytest.approx(machine["bandwidth"], rel=0.001)
