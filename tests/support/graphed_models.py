# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Models of megatron-core on a GPU, trained eagerly and with Transformer Engine's CUDA graphs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Optional

import captured_layers
import torch
from captured_layers import capture_layers, prepare_unwrapped
from device_memory import memory_to_itself
from garbage import give_back_unused_memory
from megatron_models import make_config, micro_batches, run_schedule
from model_case import ModelCase
from tiny_gpt import build_chunks, first_difference, initialize

from megatron.slipstream.graphs.capture import graph_pool_bytes
from megatron.slipstream.integration import install
from megatron.slipstream.options.fields import OffloadConfig

NUM_EAGER_STEPS = 3
MEMORY_NEEDED_BYTES = 16 << 30
"""More device memory than the models need whose graphs' memory is measured."""


def with_graphs(case: ModelCase, modules: Sequence[str], **overrides: Any) -> ModelCase:
    """The case with these parts of each layer captured; the whole layer if empty."""
    return captured_layers.with_graphs(case, modules, NUM_EAGER_STEPS, **overrides)


class Training:
    """A model, with the engine if anything moves. A context manager: one at a time in a process.

    Args:
        case: The model; see :func:`with_graphs`.
        offload_modules: Modules that move; empty for no engine.
        num_micro_batches: Number of micro-batches of each step.
        learning_rate: Rate of plain gradient descent after each step; 0 accumulates gradients.
        rank: Rank of this process.
        world_size: Number of processes.
        port: Port of their rendezvous.
        settings: The engine's settings; None for the defaults.
        offload: megatron-core's other offloading options.
    """

    def __init__(
        self,
        case: ModelCase,
        offload_modules: Sequence[str] = (),
        num_micro_batches: int = 2,
        learning_rate: float = 0.0,
        rank: int = 0,
        world_size: int = 1,
        port: int = 0,
        settings: Optional[OffloadConfig] = None,
        **offload: Any,
    ) -> None:
        initialize(case, rank, world_size, port)
        self.case = case
        self.engine = install.install(settings or OffloadConfig()) if offload_modules else None
        self._num_micro_batches = num_micro_batches
        self._learning_rate = learning_rate
        self._config = make_config(case, offload_modules, **offload)
        self.chunks = build_chunks(case, self._config)
        self._accumulators = prepare_unwrapped(self.chunks)
        self._num_steps = 0
        self._graphs: Any = None
        self.losses: list[torch.Tensor] = []
        """The losses of every micro-batch of every step and evaluation."""

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        if self._graphs is not None:
            self.delete_graphs()
        install.uninstall()
        self.chunks.clear()
        self._accumulators.clear()
        give_back_unused_memory()

    def step(self, count: int = 1) -> None:
        """Train on ``count`` more batches."""
        for _ in range(count):
            self._run(forward_only=False)
            if self._learning_rate:
                with torch.no_grad():
                    for parameter in self.parameters:
                        if parameter.grad is not None:
                            parameter -= self._learning_rate * parameter.grad
                            parameter.grad = None

    def evaluate(self) -> None:
        """Compute the losses of another batch without training, as ``megatron.training`` does."""
        for chunk in self.chunks:
            chunk.eval()
        with torch.no_grad():
            self._run(forward_only=True)
        for chunk in self.chunks:
            chunk.train()

    def capture(self) -> None:
        """Capture like ``megatron.training`` after ``cuda_graph_warmup_steps`` steps.

        Gradients are reset, with graphs and without.
        """
        for parameter in self.parameters:
            parameter.grad = None
        if self.case.overrides.get("cuda_graph_impl") != captured_layers.GRAPHS:
            return
        self._graphs = capture_layers(self.case, self._config, self.chunks, self._num_micro_batches)

    def delete_graphs(self) -> None:
        """Delete the graphs like ``megatron.training`` at the end."""
        self._graphs.delete_cuda_graphs()
        self._graphs = None

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters of all model chunks."""
        return [parameter for chunk in self.chunks for parameter in chunk.parameters()]

    @property
    def gradients(self) -> list[Optional[torch.Tensor]]:
        """The gradient of each parameter; None if it has none."""
        return [
            None if parameter.grad is None else parameter.grad.clone()
            for parameter in self.parameters
        ]

    @property
    def graphed_bytes(self) -> int:
        """Bytes that one replay of all graphs copies out."""
        return sum(self.graphed_modules.values())

    @property
    def reported_bytes(self) -> int:
        """Bytes that replays copied out in the last step, as the report has it."""
        graphs = self.engine.report.graphs if self.engine else {}
        return sum(item.d2h_bytes for item in graphs.values())

    @property
    def graphed_modules(self) -> dict[str, int]:
        """The same for each module with copies."""
        modules = self.engine.graphs.modules if self.engine else {}
        return {name: item.d2h_bytes for name, item in modules.items() if item.d2h_bytes}

    def _run(self, forward_only: bool) -> None:
        batches = list(micro_batches(self.case, self._num_steps, self._num_micro_batches))
        self._num_steps += 1
        self.losses += run_schedule(self.case, self.chunks, batches, forward_only)


@dataclasses.dataclass(frozen=True)
class Compared:
    """Result of :func:`compare` on one rank."""

    difference: Optional[str]
    """The first difference; None if equal."""
    graphed_bytes: int
    """Bytes that one replay of all graphs copies out."""


def compare(
    rank: int,
    world_size: int,
    port: int,
    case: ModelCase,
    scope: Sequence[str],
    offload_modules: Sequence[str],
    num_micro_batches: int,
) -> Compared:
    """Train ``case`` eagerly without the engine, then with graphs and offloading; on every rank.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        port: Port of their rendezvous.
        case: The model.
        scope: The parts of each layer that are captured; the whole layer if empty.
        offload_modules: Modules that move.
        num_micro_batches: Number of micro-batches of each step.
    """
    ranks = (num_micro_batches, 0.0, rank, world_size, port)
    results, graphed_bytes = [], 0
    for model, modules in ((case, ()), (with_graphs(case, scope), offload_modules)):
        offload = {"min_offloaded_tensor_size": 1024} if modules else {}
        with Training(model, modules, *ranks, **offload) as training:
            training.step(NUM_EAGER_STEPS)
            training.capture()
            training.step(2)
            training.evaluate()
            training.step(2)
            gradients = [gradient for gradient in training.gradients if gradient is not None]
            results.append([training.losses, gradients])
            graphed_bytes = training.graphed_bytes
    return Compared(first_difference(*results), graphed_bytes)


def graph_memory(
    rank: int,
    world_size: int,
    port: int,
    case: ModelCase,
    offload_modules: Sequence[str],
    offload: dict[str, Any],
) -> tuple[list[int], int]:
    """Memory of a case's graphs without and with offloading, and bytes that a replay moves.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        port: Port of their rendezvous.
        case: A case from :func:`with_graphs`.
        offload_modules: Modules that move.
        offload: megatron-core's other offloading options.

    Raises:
        AssertionError: Other processes use the memory that this one needs.
    """
    sizes, moved = [], 0
    with memory_to_itself(MEMORY_NEEDED_BYTES):
        for modules in ((), offload_modules):
            before = graph_pool_bytes()
            options = offload if modules else {}
            with Training(case, modules, 2, 0.0, rank, world_size, port, **options) as training:
                training.step(NUM_EAGER_STEPS)
                training.capture()
                sizes.append(graph_pool_bytes() - before)
                training.step(2)
                moved = training.graphed_bytes
    return sizes, moved
