# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Copies inside graphs of layers change no bit. Without a GPU graphs are imitated."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from imitated_layer_graphs import imitated_layer_graphs
from megatron.core.pipeline_parallel import fine_grained_activation_offload as facade
from megatron.core.pipeline_parallel.offload_engine.select import deselect, select_at_first_call
from offloaded_models import MODULES, NUM_MICRO_BATCHES, build, capture_layers, finish, same, train

BF16 = {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
ON = {"offload_engine": "slipstream", "offload_backend": "cpu", "offload_native": "off"}
GRAPHS = {"cuda_graph_impl": "transformer_engine", "cuda_graph_warmup_steps": 1}
IN_GRAPHS = ("qkv_linear", "core_attn", "attn_proj", "attn_norm", "mlp_norm")


@pytest.fixture
def nothing_is_left():
    yield
    deselect()
    finish()


def captured(kind: str, scope: list[str]) -> tuple[list[Any], set[str]]:
    """The losses and gradients with graphs from the second iteration on, and what moves in them."""
    helpers = []

    def capture(step: int) -> None:
        if step == GRAPHS["cuda_graph_warmup_steps"]:
            helpers.append(capture_layers(model))

    with imitated_layer_graphs():
        options = {**BF16, **ON, **GRAPHS, "cuda_graph_modules": scope}
        model = build(kind, MODULES[kind], **options).bfloat16()
        results = train(model, before=capture)
        engine = facade.PipelineOffloadManager.OFFLOAD_MGR
        moved = {name for name, item in engine.graphs.modules.items() if item.d2h_bytes}
        replayed = engine.report.graphs  # in the last iteration
        for name, item in engine.graphs.modules.items():
            assert replayed[name].d2h_bytes == NUM_MICRO_BATCHES * item.d2h_bytes
        for layer in filter(lambda layer: layer.cuda_graphs, model.decoder.layers):
            _, options = layer._get_te_cuda_graph_replay_args(torch.zeros(1))
            assert options["cuda_graph_event"] is layer.graph_copies.event
            assert layer._should_call_te_cudagraph()
            with torch.no_grad():
                assert not layer._should_call_te_cudagraph()
        helpers[0].delete_cuda_graphs()
    return results, moved


@cache
def expected(kind: str) -> list[torch.Tensor]:
    return train(build(kind, **BF16).bfloat16())


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize(
    ("kind", "scope", "moves"),
    [
        ("dense", [], set(IN_GRAPHS)),
        ("dense", ["attn"], set(IN_GRAPHS[:3])),
        ("moe", ["attn", "moe_router"], set(IN_GRAPHS[:3])),
        ("hybrid", ["attn"], set(IN_GRAPHS[:3])),
    ],
)
def test_copies_in_graphs_change_no_bit(kind: str, scope: list[str], moves: set[str]) -> None:
    found, moved = captured(kind, scope)
    assert same(expected(kind), found)
    assert moved == moves


def test_one_graph_of_the_iteration_is_refused() -> None:
    on = {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn"]}
    with pytest.raises(ValueError, match="cuda_graph_impl=full_iteration is not supported"):
        select_at_first_call(SimpleNamespace(**ON, **on, cuda_graph_impl="full_iteration"))
