# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Settings of layers change until CUDA graphs are captured, and hold inside of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Optional

import pytest
import torch
from captured_layers import capture_layers, with_graphs
from gpu_models import on_gpu
from imitated_layer_graphs import imitated_layer_graphs
from megatron_models import use_gpu, wrap
from model_case import DENSE_MODULES, ModelCase
from ranks import run_ranks
from replayed_gpt import gradients_and_buffers, start
from tiny_gpt import build_chunks, first_difference, make_config, run_step

from megatron.slipstream.integration import install
from megatron.slipstream.integration.graphs.chunks import replay_chunks
from megatron.slipstream.integration.layers.layer_settings import apply, layers_of
from megatron.slipstream.options.fields import OffloadConfig
from megatron.slipstream.patches import releases
from megatron.slipstream.plan.settings import NOTHING, WHOLE, Assignment, LayerSetting

pytestmark = pytest.mark.releases

MLP = LayerSetting(("mlp",))
NUM_ITERATIONS = 6
NUM_WARMUPS = 3


def build(case: ModelCase, modules: Sequence[str] = ()) -> tuple[Any, list[Any]]:
    config = make_config(case, modules)
    return config, wrap(config, build_chunks(case, config))


def iterate(case: ModelCase, model: tuple[Any, list[Any]], step: int) -> list[torch.Tensor]:
    """The losses and gradients of an iteration.

    States of random numbers differ: a checkpoint cannot set back those that graphs can use, and
    fused attention advances them without dropout, too.
    """
    config, chunks = model
    for chunk in chunks:
        chunk.zero_grad_buffer()
    result = run_step(case, config, chunks, step, 2)
    for chunk in chunks:
        chunk.finish_grad_sync()
    return [tensor.to("cpu", copy=True) for tensor in result + gradients_and_buffers(chunks)]


def train_plainly(case: ModelCase) -> list[list[torch.Tensor]]:
    model = build(case)
    torch.manual_seed(11)
    return [iterate(case, model, step) for step in range(NUM_ITERATIONS)]


def install_engine() -> Any:
    backend = "cuda" if use_gpu() else "cpu"
    return install.install(OffloadConfig(offload_backend=backend, offload_checkpoint_inputs=True))


def refuses(assignment: Assignment, chunks: Sequence[Any]) -> bool:
    with pytest.raises(RuntimeError, match="delete the graphs first"):
        apply(assignment, chunks)
    return True


def in_chunk_graphs(rank: int, world_size: int, port: int, case: ModelCase) -> Optional[str]:
    """Train in graphs of chunks, of which settings are changed before the capture."""
    case = start(case, rank, world_size, port)
    expected = train_plainly(case)
    install_engine()
    model = build(case, DENSE_MODULES)
    chunks = model[1]
    (graphs,) = replay_chunks(chunks, NUM_WARMUPS)
    torch.manual_seed(11)
    actual = []
    for step in range(NUM_ITERATIONS):
        if step == 1:
            apply((MLP, NOTHING, NOTHING), chunks)
        if step == 2:
            apply((WHOLE, MLP, NOTHING), chunks)
        actual.append(iterate(case, model, step))
        if graphs.is_captured:
            assert refuses((NOTHING, NOTHING, NOTHING), chunks)
    assert graphs.num_replays > 0
    graphs.delete()
    apply((NOTHING, NOTHING, NOTHING), chunks)
    return first_difference(expected, actual)


def in_layer_graphs(
    rank: int, world_size: int, port: int, case: ModelCase, scope: Sequence[str]
) -> Optional[str]:
    """Train in Transformer Engine's graphs of layers, likewise."""
    case = start(case, rank, world_size, port)
    expected = train_plainly(case)
    install_engine()
    graphed = with_graphs(case, scope, NUM_WARMUPS)
    with imitated_layer_graphs():
        model = build(graphed, DENSE_MODULES)
        config, chunks = model
        options = layers_of(chunks)
        chosen: Assignment = (options[0].settings[0], NOTHING, options[0].settings[0])
        assert chosen[0] != NOTHING
        torch.manual_seed(11)
        actual = []
        for step in range(NUM_ITERATIONS):
            if step == 1:
                apply(chosen, chunks)
            if step == NUM_WARMUPS:
                helper = capture_layers(graphed, config, chunks, 2)
                assert refuses(tuple(one.minimum for one in options), chunks)
            actual.append(iterate(graphed, model, step))
        helper.delete_cuda_graphs()
        apply(tuple(one.minimum for one in options), chunks)
    return first_difference(expected, actual)


CASE = ModelCase("dense", num_layers=3, overrides={"normalization": "LayerNorm"})
GPU_CASE = on_gpu(ModelCase("dense", num_layers=3, has_own_norms=True))
PACKED = replace(CASE, is_packed=True, micro_batch_size=1)
offloads_in_graphs_of_chunks = pytest.mark.skipif(
    not releases.is_since("0.19"), reason="that release has no offloading in chunk graphs"
)


@offloads_in_graphs_of_chunks
def test_graphs_of_chunks() -> None:
    assert run_ranks(1, in_chunk_graphs, CASE) == [None]


def test_graphs_of_layers() -> None:
    assert run_ranks(1, in_layer_graphs, PACKED, ("attn",)) == [None]


@pytest.mark.gpu
@offloads_in_graphs_of_chunks
def test_graphs_of_chunks_on_a_gpu() -> None:
    assert run_ranks(1, in_chunk_graphs, GPU_CASE) == [None]


@pytest.mark.gpu
@pytest.mark.parametrize("scope", [(), ("attn",)], ids=str)
def test_graphs_of_layers_on_a_gpu(scope: tuple[str, ...]) -> None:
    assert run_ranks(1, in_layer_graphs, GPU_CASE, scope) == [None]
