# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The benchmark of layer graphs runs on any machine, and compares what it says it compares."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional
from unittest.mock import patch

import pytest
from benchmark_runs import benchmark
from ranks import run_ranks
from rich.console import Console

from benchmarks import layer_graphs
from benchmarks.layer_graphs import (
    CASES,
    EAGER,
    GRAPH,
    MEGATRON,
    WAYS,
    Case,
    Counts,
    Measurement,
    Way,
    WayFailed,
)
from benchmarks.rows import Row, read_rows

SMALL: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32,
    "vocab_size": 128,
}  # fmt: skip
SMALL_OPTIONS = {
    "ffn_hidden_size": 96, "moe_ffn_hidden_size": 64, "num_query_groups": 2, "num_moe_experts": 4,
    "moe_router_topk": 2, "apply_rope_fusion": False, "moe_permute_fusion": False,
}  # fmt: skip


def test_the_smoke_case_measures_what_needs_no_gpu_in_turn(tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    arguments = f"--case smoke --steps 2 --output {output}".split()
    result = benchmark("layer_graphs", *arguments)
    assert result.returncode == 0, result.stderr
    rows = read_rows(output)
    steps = [row for row in rows if row["kind"] == "step"]
    assert sorted((row["number"], row["way"]) for row in steps) == [
        (0, "eager"), (0, "eager+offload"), (1, "eager"), (1, "eager+offload"),
    ]  # fmt: skip
    summaries = {row["way"]: row for row in rows if row["kind"] == "summary"}
    assert list(summaries) == [GRAPH, f"{GRAPH}+offload", MEGATRON, EAGER, f"{EAGER}+offload"]
    assert all("need a GPU" in row["error"] for way, row in summaries.items() if GRAPH in way)
    eager, offloading = summaries[EAGER], summaries[f"{EAGER}+offload"]
    assert offloading["error"] is None
    assert offloading["loss_difference"] == 0
    assert offloading["claimed_bytes"] > 0
    assert eager["claimed_bytes"] is None
    assert "eager+offload" in result.stdout


def test_other_cases_need_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    if layer_graphs.use_gpu():
        pytest.skip("torch sees one")
    assert layer_graphs.main(["--case", "smoke", "dense"]) == 2
    assert "--case dense: torch sees no GPU" in capsys.readouterr().err


def test_delaying_is_measured_where_something_moves_outside_of_graphs() -> None:
    delayed = {name for name, case in CASES.items() if len(case.ways) == len(WAYS)}
    assert delayed == {"moe_experts"}


def _small(case: Case) -> Case:
    """The case with a model of the same kind for a CPU."""
    overrides = {**case.model.overrides}
    overrides |= {key: value for key, value in SMALL_OPTIONS.items() if key in overrides}
    model = dataclasses.replace(case.model, **SMALL, overrides=overrides)
    return dataclasses.replace(case, model=model, offload={"min_offloaded_tensor_size": 1})


@dataclasses.dataclass
class _Outcome:
    """Records of :func:`_measure_eagerly`."""

    rows: list[Row] = dataclasses.field(default_factory=list)
    captured: list[str] = dataclasses.field(default_factory=list)
    """Of each way with graphs: its parts, whose layers they are, and what is put off."""
    num_deleted: int = 0
    num_models: int = 0
    """That differ in a parameter."""


def _measure_eagerly(rank: int, world_size: int, port: int, name: str, failing: str) -> _Outcome:
    """All of a case on a small model, with nothing in the place of Transformer Engine's capture.

    A way called ``failing`` fails in it.
    """
    outcome = _Outcome()

    class Graphs:
        def delete_cuda_graphs(self) -> None:
            outcome.num_deleted += 1

    def capture_layers(model: Any, config: Any, chunks: Any, num_micro_batches: int) -> Graphs:
        layer = type(chunks[0].decoder.layers[0]).__name__
        parts = " ".join(part.name for part in config.cuda_graph_modules)
        delayed = " delayed" if config.delay_offload_until_cuda_graph else ""
        outcome.captured.append(f"{parts}: {layer}{delayed}")
        if len(outcome.captured) == 2 and failing:
            raise RuntimeError("unjoined work")
        return Graphs()

    def write(kind: str, **fields: Any) -> None:
        outcome.rows.append({"kind": kind, **fields})

    measurement = Measurement(_small(CASES[name]), Counts(2, 1, 2), write, Console(quiet=True))
    close = measurement.close

    def note_and_close() -> None:
        outcome.num_models = len(
            {
                tuple(id(item) for chunk in way._chunks for item in chunk.parameters())
                for way in measurement._ways
            }
        )
        close()

    with (
        patch.object(layer_graphs, "can_capture", lambda: True),
        patch.object(layer_graphs, "capture_layers", capture_layers),
        patch.object(measurement, "close", note_and_close),
        patch("megatron.core.transformer.transformer_layer.is_te_min_version", lambda *_: True),
        contextlib.suppress(WayFailed),
    ):
        measurement.run(CASES[name].ways)
    return outcome


OURS, THEIRS = "GraphOffloadTransformerLayer", "TransformerLayer"


@pytest.mark.parametrize("name, parts", [("moe_experts", "attn moe_router"), ("launch_bound", "")])
def test_ways_share_weights_and_differ_in_what_their_names_say(name: str, parts: str) -> None:
    (outcome,) = run_ranks(1, _measure_eagerly, name, "")
    ways = CASES[name].ways
    delayed = [f"{parts}: {OURS} delayed"] * (len(ways) == len(WAYS))
    graphs = [f"{parts}: {OURS}"] * 2 + delayed
    assert outcome.captured == graphs
    assert outcome.num_deleted == len(graphs)
    assert outcome.num_models == 1
    summaries = {row["way"]: row for row in outcome.rows if row["kind"] == "summary"}
    # megatron-core's own engine moves CUDA tensors only.
    assert "torch sees no GPU" in summaries.pop(MEGATRON)["error"]
    assert set(summaries) == set(ways) - {MEGATRON}
    for way, row in summaries.items():
        assert (row["error"], row["loss_difference"]) == (None, 0), way
        assert bool(row["claimed_bytes"]) == ("offload" in way), way
    assert summaries[GRAPH]["slower_percent"] == 0 != summaries[EAGER]["slower_percent"]


def test_the_engine_that_is_not_ours_keeps_its_layers() -> None:
    """They join its copies to the end of graphs; ours would not."""
    case = layer_graphs.CASES["launch_bound"]
    assert (case.captured, case.captured_by_megatron) == ((), ("attn", "mlp"))
    ((built, captured),) = run_ranks(1, _build_for_megatron)
    assert (built, captured) == (THEIRS, ["attn", "mlp"])


def _build_for_megatron(rank: int, world_size: int, port: int) -> tuple[str, list[str]]:
    case = _small(CASES["launch_bound"])
    layer_graphs.initialize(case.model, rank, world_size, port)
    base = layer_graphs.BaseModel(case)
    with (
        patch.object(layer_graphs, "make_engine", lambda *_: None),
        patch("megatron.core.transformer.transformer_layer.is_te_min_version", lambda *_: True),
    ):
        way = Way(MEGATRON, base, 3)
    modules = [part.name for part in way._config.cuda_graph_modules]
    return type(way._chunks[0].decoder.layers[0]).__name__, modules


def test_a_way_that_fails_leaves_its_row_and_ends_the_measurement() -> None:
    (outcome,) = run_ranks(1, _measure_eagerly, "dense", "the second")
    (row,) = outcome.rows
    assert row["way"] == f"{GRAPH}+offload"
    assert row["error"].startswith("RuntimeError: unjoined work")


def test_the_rest_is_measured_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def run(command: list[str]) -> Any:
        started.append(command[3:])
        return SimpleNamespace(returncode=len(started))

    def measure(case: Case, *_: Any) -> Optional[str]:
        return MEGATRON if case.name == "moe" else None

    monkeypatch.setattr(layer_graphs, "use_gpu", lambda: True)
    monkeypatch.setattr(layer_graphs, "_measure", measure)
    monkeypatch.setattr(layer_graphs.subprocess, "run", run)
    monkeypatch.setattr(layer_graphs, "release_host_memory", lambda: None)
    monkeypatch.setattr(layer_graphs.os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as ended:
        layer_graphs.main(["--steps", "7", "--run", "now"])
    assert ended.value.code == 2
    same = ["--steps=7", "--warmups=3", "--run=now", "--eager-steps=3"]
    assert started == [
        ["--case", "moe", "--ways", *(way for way in CASES["moe"].ways if way != MEGATRON), *same],
        ["--case", "moe_experts", "launch_bound", *same],
    ]
