# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Graphs of whole chunks change no bit. Without a GPU a replay runs the chunk again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron.core.pipeline_parallel.offload_engine.select import deselect, select
from megatron.training.captured_models import captures_model
from offloaded_models import (
    MODULES,
    NUM_MICRO_BATCHES,
    NUM_STEPS,
    build,
    finish,
    packs,
    rows,
    same,
    train,
    wrap,
)

from megatron.slipstream.integration.graphs.chunks import (
    close_graphs,
    graphs_of,
    replay_chunks,
)
from megatron.slipstream.options.fields import OffloadConfig

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="compares with a chunk that a replay runs again"
)
ON = {"cuda_graph_granularity": "chunk", "cuda_graph_warmup_steps": 1}
OFFLOADING = {"offload_backend": "cpu-lazy", "offload_native": "off"}
STATIC = {"moe_expert_capacity_factor": 1.25, "moe_pad_expert_input_to_capacity": True}
"""Experts whose shapes do not depend on the routing."""


@pytest.fixture(scope="module", autouse=True)
def _shims_are_undone() -> Iterator[None]:
    yield
    finish()


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    close_graphs()
    deselect()


@pytest.mark.parametrize(
    ("kind", "batches", "offloads"),
    [
        ("dense", rows, True),
        ("moe", rows, True),
        ("hybrid", rows, True),
        ("moe", packs, True),
        ("moe", packs, False),
    ],
    ids=["dense", "moe", "hybrid", "packed", "packed-stays"],
)
def test_graphs_of_chunks_change_no_bit(kind: str, batches: Any, offloads: bool) -> None:
    options = {} if kind == "dense" else STATIC
    expected = train(wrap(build(kind, **options)), batches=batches)
    if offloads:
        select(OffloadConfig(**OFFLOADING))
        options = {**options, **OFFLOADING, "offload_engine": "slipstream"}
    model = wrap(build(kind, MODULES[kind] if offloads else (), **options, **ON))
    (graphs,) = replay_chunks([model], ON["cuda_graph_warmup_steps"])
    found = train(model, batches=batches)
    assert same(expected, found)
    assert graphs.num_replays == NUM_MICRO_BATCHES * (NUM_STEPS - ON["cuda_graph_warmup_steps"])
    chunks = [one.chunk for one in graphs.of_size.values()]
    assert all((chunk.offloading is not None) == offloads for chunk in chunks)
    assert not offloads or all(chunk.offloading.moved_bytes > 0 for chunk in chunks)


@pytest.mark.parametrize("granularity", ["layer", "chunk"])
def test_the_training_loop_replays_chunks_if_the_field_says_so(granularity: str) -> None:
    seen = []

    @captures_model
    def loop(forward_step: None, models: list[Any]) -> list[torch.Tensor]:
        seen.append(graphs_of(models[0].module.decoder))
        return train(models[0])

    options = {**OFFLOADING, **ON, "offload_engine": "slipstream"}
    options["cuda_graph_granularity"] = granularity
    model = wrap(build("dense", MODULES["dense"], **options))
    found = loop(None, [model])
    assert same(train(wrap(build("dense"))), found)
    assert (seen[0] is not None) == (granularity == "chunk")
    assert graphs_of(model.module.decoder) is None


@pytest.mark.parametrize(
    ("kind", "options", "name"),
    [
        ("moe", {}, "moe_token_dispatcher_type=alltoall"),
        ("dense", {"moe_input_jitter_eps": 0.1}, "moe_input_jitter_eps"),
        (
            "dense",
            {"hidden_dropout": 0.1, "recompute_granularity": "full"},
            "recompute_granularity",
        ),
    ],
)
def test_what_has_no_static_shape_is_an_error(kind: str, options: Any, name: str) -> None:
    if "recompute_granularity" in options:
        options |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    model = wrap(build(kind, **options, **ON))
    with pytest.raises(ValueError, match=name):
        replay_chunks([model], 1)
