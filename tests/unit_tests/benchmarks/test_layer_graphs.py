# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The comparison of layer graphs runs on any machine, and compares the stated variants."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from benchmark_runs import benchmark
from megatron_models import initialize
from ranks import run_ranks

from benchmarks import layer_graphs
from benchmarks.case import Case, Limits, way_labels
from benchmarks.cases import CASES, find_case
from benchmarks.engines import BaseModel
from benchmarks.layer_graphs import LayerWay
from benchmarks.rows import Row, RowWriter, read_rows
from benchmarks.variant import VariantRun, WayFailed

SMALL: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32,
    "vocab_size": 128,
}  # fmt: skip
SMALL_OPTIONS = {
    "ffn_hidden_size": 96, "moe_ffn_hidden_size": 64, "num_query_groups": 2, "num_moe_experts": 4,
    "moe_router_topk": 2, "apply_rope_fusion": False, "moe_permute_fusion": False,
}  # fmt: skip
MEGATRON = "graph+megatron"
ALL = 6
"""All variants."""


def test_the_smoke_case_measures_what_needs_no_gpu_in_turn(tmp_path: Path) -> None:
    few = "--warmups 1 --min-iterations 2 --max-iterations 2"
    result = benchmark(*f"--case smoke_graphs {few} --output {tmp_path}".split())
    assert result.returncode == 0, result.stderr
    rows = read_rows(tmp_path / "engines.jsonl")
    steps = [row for row in rows if row["kind"] == "iteration"]
    assert sorted((row["iteration"], row["engine"]) for row in steps) == [
        (0, "eager"), (0, "eager+offload"), (1, "eager"), (1, "eager+offload"),
    ]  # fmt: skip
    summaries = {row["engine"]: row for row in rows if row["kind"] == "summary"}
    assert list(summaries) == ["graph", "graph+offload", MEGATRON, "eager", "eager+offload"]
    assert all("need a GPU" in row["error"] for way, row in summaries.items() if "graph" in way)
    eager, offloading = summaries["eager"], summaries["eager+offload"]
    assert offloading["error"] is None
    assert offloading["loss_difference"] == 0
    assert offloading["moved_bytes"] > 0
    assert offloading["host_ms"] > 0
    assert offloading["saved_bytes"] > 0
    assert "moved_bytes" not in eager
    assert "| eager+offload |" in (tmp_path / "engines.md").read_text()


def ways_of(name: str) -> tuple[str, ...]:
    case = find_case(name)
    return way_labels(case, case.variants[0], ())


def test_delaying_is_measured_where_something_moves_outside_of_graphs() -> None:
    names = [case.name for case in CASES if case.comparison == "layer_graphs"]
    assert {name for name in names if len(ways_of(name)) == ALL} == {"graphs_moe_experts"}


def _small(case: Case) -> Case:
    """The case, with a model of the same kind that runs on a CPU."""
    overrides = {**case.model.overrides}
    overrides |= {key: value for key, value in SMALL_OPTIONS.items() if key in overrides}
    model = dataclasses.replace(case.model, **SMALL, overrides=overrides)
    return dataclasses.replace(case, model=model, offload={"min_offloaded_tensor_size": 1})


@dataclasses.dataclass
class _Outcome:
    """The records of :func:`_measure_eagerly`."""

    rows: list[Row] = dataclasses.field(default_factory=list)
    captured: list[str] = dataclasses.field(default_factory=list)
    """For each variant with graphs: its parts, the owner of its layers, and delayed modules."""
    num_deleted: int = 0
    num_models: int = 0
    """Ranks that differ in a parameter."""
    failed: str = ""
    """The variant that ended the process."""


LIMITS = Limits(
    min_iterations=2, max_iterations=2, num_warmups=1, num_memory_iterations=1, figures=()
)


def _measure_eagerly(
    rank: int, world_size: int, port: int, name: str, failing: str, path: Path
) -> _Outcome:
    """All variants of a case on a small model, without Transformer Engine's capture.

    A variant called ``failing`` fails in it.
    """
    outcome = _Outcome()

    class Graphs:
        def delete_cuda_graphs(self) -> None:
            outcome.num_deleted += 1

    def capture_layers(model: Any, config: Any, chunks: Any, num_micro_batches: int) -> Graphs:
        layer = type(chunks[0].decoder.layers[0]).__name__.removeprefix("PackedGraph")
        parts = " ".join(part.name for part in config.cuda_graph_modules)
        delayed = " delayed" if config.delay_offload_until_cuda_graph else ""
        outcome.captured.append(f"{parts}: {layer}{delayed}")
        if len(outcome.captured) == 2 and failing:
            raise RuntimeError("unjoined work")
        return Graphs()

    path.touch()
    case = _small(find_case(name))
    initialize(case.model, rank, world_size, port)
    comparison, (variant,) = layer_graphs.Comparison(case), case.variants
    measurement = VariantRun(
        case, comparison, variant, ways_of(name), {}, RowWriter(path, "run"), None
    )
    measure_each = measurement._measure_each

    def note_and_measure(limits: Limits) -> None:
        parameters = set()
        for way in measurement._ways.values():
            chunks = way._chunks  # type: ignore[attr-defined]
            parameters.add(tuple(id(item) for chunk in chunks for item in chunk.parameters()))
        outcome.num_models = len(parameters)
        measure_each(limits)

    with (
        patch.object(layer_graphs, "use_gpu", lambda: True),
        patch.object(layer_graphs, "capture_layers", capture_layers),
        patch.object(measurement, "_measure_each", note_and_measure),
        patch("megatron.core.transformer.transformer_layer.is_te_min_version", lambda *_: True),
        contextlib.suppress(WayFailed),
    ):
        try:
            measurement.measure(LIMITS)
        except WayFailed as error:
            outcome.failed = str(error)
            raise
    return outcome


OURS, THEIRS = "GraphOffloadTransformerLayer", "TransformerLayer"


@pytest.mark.parametrize(
    "name, parts", [("graphs_moe_experts", "attn moe_router"), ("graphs_small", "")]
)
def test_ways_share_weights_and_differ_in_what_their_names_say(
    name: str, parts: str, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    (outcome,) = run_ranks(1, _measure_eagerly, name, "", path)
    ways = ways_of(name)
    delayed = [f"{parts}: {OURS} delayed"] * (len(ways) == ALL)
    graphs = [f"{parts}: {OURS}"] * 2 + delayed
    assert outcome.captured == graphs
    assert outcome.num_deleted == len(graphs)
    assert outcome.num_models == 1
    summaries = {row["engine"]: row for row in read_rows(path) if row["kind"] == "summary"}
    # megatron-core's own engine moves CUDA tensors only.
    assert "torch sees no GPU" in summaries.pop(MEGATRON)["error"]
    assert set(summaries) == set(ways) - {MEGATRON}
    for way, row in summaries.items():
        assert (row["error"], row["loss_difference"]) == (None, 0), way
        assert bool(row.get("moved_bytes")) == ("offload" in way), way
    assert summaries["graph"]["base"] == "eager"
    assert summaries["graph+offload"]["base"] == "graph"
    assert summaries["graph"]["overhead_percent"] != 0 == summaries["eager"]["overhead_percent"]


def test_the_engine_that_is_not_ours_keeps_its_layers() -> None:
    """megatron-core's layers join its copies to the end of graphs; Slipstream's would not."""
    assert find_case("graphs_small").captured == ()
    ((built, captured),) = run_ranks(1, _build_for_megatron)
    assert (built, captured) == (THEIRS, ["attn", "mlp"])


def _build_for_megatron(rank: int, world_size: int, port: int) -> tuple[str, list[str]]:
    case = _small(find_case("graphs_small"))
    initialize(case.model, rank, world_size, port)
    base = BaseModel(case)
    with (
        patch.object(layer_graphs, "use_gpu", lambda: True),
        patch.object(layer_graphs, "make_engine", lambda *_: layer_graphs.Engine("", base, [])),
        patch("megatron.core.transformer.transformer_layer.is_te_min_version", lambda *_: True),
    ):
        way = LayerWay(MEGATRON, base, case.variants[0].modules, {})
    modules = [part.name for part in way._config.cuda_graph_modules]
    return type(way._chunks[0].decoder.layers[0]).__name__, modules


def test_a_way_that_fails_leaves_its_row_and_ends_the_process(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    (outcome,) = run_ranks(1, _measure_eagerly, "graphs_dense", "the second", path)
    assert outcome.failed == "graph+offload"
    (row,) = read_rows(path)
    assert row["engine"] == "graph+offload"
    assert row["error"].startswith("RuntimeError: unjoined work")
