# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""NVIDIA's recipe with offloading for 16 H100 (Nemotron 3.5 Lightning, bfloat16), at a small scale.

A ``HybridModel`` of attention, experts and a further token, graphs of attention and routers,
recomputed norms and activation functions, the first GEMM of experts moved outside of the graphs,
committed behind the next graph's launch, and the distributed optimizer. Losses, gradients and
weights equal those of eager training without the engine; without a GPU, graphs are imitated.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Optional

import pytest
import torch
from captured_layers import with_graphs
from gpu_models import MOE
from imitated_layer_graphs import imitated_layer_graphs
from model_case import ModelCase
from ranks import run_ranks
from replayed_gpt import LayerGraphs, Poison, Training, gradients_and_buffers, start
from tiny_gpt import first_difference, use_gpu

from megatron.slipstream.graphs.capture import graph_pool_bytes
from megatron.slipstream.integration import install
from megatron.slipstream.options.fields import OffloadConfig

OPTIONS: dict[str, Any] = {
    "mtp_num_layers": 1,
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_load_balancing_type": "seq_aux_loss",
    "recompute_granularity": "selective",
    "recompute_modules": ["moe_act", "layernorm"],
}
SMALL = ModelCase(
    "hybrid",
    pattern="*E*E*E/*E",
    num_layers=6,
    micro_batch_size=1,
    bf16=True,
    overrides=OPTIONS,
)
LARGE = replace(
    MOE,
    kind="hybrid",
    pattern="*E*E*E*E/*E",
    num_layers=8,
    seq_length=4096,
    overrides={**MOE.overrides, **OPTIONS, "num_moe_experts": 8},
)
CAPTURED = ("attn", "moe_router", "moe_preprocess")
MOVES = ("expert_fc1",)
COUNTS = (2, 3, 2, 2, 2, 2)


class Found(NamedTuple):
    """Of trainings with graphs."""

    differences: list[Optional[str]]
    """The first difference from eager training, without and with offloading; None if equal."""
    moved_bytes: int
    """Bytes that moved outside of graphs in the last iteration."""
    in_graphs_bytes: int
    """Bytes that one replay of all graphs copies out."""
    peaks_bytes: list[int]
    """Device memory above weights and optimizer, without and with offloading (GPU)."""
    step_ms: list[float]
    """Median time of an iteration, likewise (GPU)."""


class Recipe(Training):
    """A training with megatron-core's optimizer, whose iterations with graphs are measured."""

    def __init__(
        self, case: ModelCase, modules: Sequence[str] = (), layers: Optional[LayerGraphs] = None
    ) -> None:
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        if modules:
            delayed = {"delay_offload_until_cuda_graph": True}
            case = replace(case, overrides={**case.overrides, **delayed})
        wrapper = {"use_distributed_optimizer": True}
        super().__init__(case, wrapper=wrapper, offload_modules=modules, layers=layers)
        config = OptimizerConfig(
            optimizer="adam", lr=1e-3, bf16=True, use_distributed_optimizer=True
        )
        self.optimizer = get_megatron_optimizer(config, self.chunks)
        # Routers count tokens in bfloat16, in a function that torch compiles or, after a few
        # models, runs as written, which rounds otherwise. Small integers are exact in float32.
        for chunk in self.chunks:
            for module in chunk.modules():
                if getattr(module, "local_tokens_per_expert", None) is not None:
                    module.local_tokens_per_expert = module.local_tokens_per_expert.float()
        self.peaks_bytes: list[int] = []
        self.step_ms: list[float] = []

    def passes(self, step: int, item: Any, forward_only: bool = False) -> list[torch.Tensor]:
        """The losses of an iteration, whose time and memory are measured."""
        if not use_gpu() or forward_only:
            return super().passes(step, item, forward_only)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, begin = torch.cuda.memory_allocated(), time.perf_counter()
        losses = super().passes(step, item)
        torch.cuda.synchronize()
        self.step_ms.append(1e3 * (time.perf_counter() - begin))
        outside = torch.cuda.max_memory_allocated() - before
        self.peaks_bytes.append(outside + graph_pool_bytes())
        return losses

    def state(self) -> list[torch.Tensor]:
        """Without the states of random numbers, which nothing draws and recomputation advances."""
        return gradients_and_buffers(self.chunks)

    def update(self) -> None:
        """Change weights as megatron's training loop does."""
        is_successful, _, _ = self.optimizer.step()
        assert is_successful


def train(rank: int, world_size: int, port: int, case: ModelCase) -> Found:
    """Train eagerly, with graphs, and with graphs and offloading."""
    case = start(case, rank, world_size, port)
    counts = COUNTS if use_gpu() else COUNTS[:4]
    expected = Recipe(case).run(counts)
    graphed = with_graphs(case, CAPTURED, 1)
    differences: list[Optional[str]] = []
    peaks: list[int] = []
    step_ms: list[float] = []
    for modules in ((), MOVES):
        engine = install.install(OffloadConfig()) if modules else None
        with imitated_layer_graphs():
            layers = LayerGraphs(graphed, Poison())
            recipe = Recipe(graphed, modules, layers)
            differences.append(first_difference(expected, recipe.run(counts)))
            if use_gpu():
                peaks.append(recipe.peaks_bytes[-1])
                step_ms.append(statistics.median(recipe.step_ms[-3:]))
            if engine is not None:
                in_graphs = sum(item.d2h_bytes for item in engine.graphs.modules.values())
                moved = engine.report.modules["expert_fc1"].d2h_bytes
            layers.helper.delete_cuda_graphs()
        del recipe, layers
    install.uninstall()
    return Found(differences, moved, in_graphs, peaks, step_ms)


def check(case: ModelCase) -> Found:
    (found,) = run_ranks(1, train, case)
    assert found.differences == [None, None]
    assert found.moved_bytes > 0
    assert found.in_graphs_bytes == 0, "expert_fc1 runs outside of the graphs"
    return found


def test_without_a_gpu() -> None:
    check(SMALL)


@pytest.mark.gpu
@pytest.mark.exclusive
def test_on_one_gpu(record_row: Callable[..., None]) -> None:
    found = check(LARGE)
    record_row("hopper_recipe", **found._asdict())
    without, offloading = found.peaks_bytes
    assert offloading < without
