# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Graphs of layers take packed sequences and change no bit. Without a GPU graphs are imitated."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from imitated_layer_graphs import imitated_layer_graphs
from megatron.core.pipeline_parallel import fine_grained_activation_offload as facade
from megatron.core.pipeline_parallel.offload_engine.select import deselect
from megatron.training.captured_models import captures_model
from offloaded_models import (
    MODULES,
    NUM_MICRO_BATCHES,
    NUM_STEPS,
    build,
    capture_layers,
    finish,
    packs,
    same,
    train,
)

from megatron.slipstream.integration.graphs.packed_layers import PackedLayers

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="trains in float32, which fused attention does not take"
)
GRAPHS = {
    "cuda_graph_impl": "transformer_engine",
    "cuda_graph_warmup_steps": 1,
    "sequence_packing": "greedy",
}
OFFLOADING = {"offload_engine": "slipstream", "offload_backend": "cpu", "offload_native": "off"}


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    deselect()
    finish()


def trained(kind: str, **options: Any) -> tuple[list[torch.Tensor], int, set[str]]:
    """Losses and gradients in the training loop, number of replays, and what moves in them."""
    helpers: list[Any] = []
    moved: set[str] = set()

    def capture(step: int) -> None:
        if step == GRAPHS["cuda_graph_warmup_steps"]:
            helpers.append(capture_layers(model))

    @captures_model
    def loop(forward_step: None, models: list[Any]) -> list[torch.Tensor]:
        results = train(models[0], before=capture, batches=packs)
        engine: Any = facade.PipelineOffloadManager.OFFLOAD_MGR
        if model.config.fine_grained_activation_offloading:
            moved.update(name for name, item in engine.report.graphs.items() if item.d2h_bytes)
        packed: Any = next(one.packed for one in models[0].decoder.layers if one.packed is not None)
        assert packed.is_captured
        helpers[0].delete_cuda_graphs()
        assert not packed.is_captured
        return results

    replay = patch.object(PackedLayers, "replay", autospec=True, side_effect=PackedLayers.replay)
    with imitated_layer_graphs(), replay as replays:
        model = build(kind, **GRAPHS, **OFFLOADING, **options)
        results = loop(None, [model])
    assert all(getattr(layer, "packed", None) is None for layer in model.decoder.layers)
    return results, replays.call_count, moved


@cache
def expected(kind: str) -> list[torch.Tensor]:
    return train(build(kind), batches=packs)


@pytest.mark.parametrize(
    ("kind", "scope", "num_layers", "offloads"),
    [
        ("dense", [], 4, True),
        ("dense", ["mlp"], 4, True),
        ("moe", ["attn", "moe_router"], 4, True),
        ("moe", ["attn", "moe_router"], 4, False),
        ("moe", ["moe_router"], 4, True),
        ("hybrid", ["attn"], 2, True),
    ],
)
def test_graphs_change_no_bit(kind: str, scope: list[str], num_layers: int, offloads: bool) -> None:
    modules = MODULES[kind] if offloads else ()
    found, num_replays, moved = trained(kind, offload_modules=modules, cuda_graph_modules=scope)
    assert same(expected(kind), found)
    num_replayed = NUM_STEPS - GRAPHS["cuda_graph_warmup_steps"]
    assert num_replays == num_replayed * NUM_MICRO_BATCHES * num_layers
    assert bool(moved) == (offloads and scope not in (["mlp"], ["moe_router"]))
