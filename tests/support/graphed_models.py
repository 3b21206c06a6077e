# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Models of megatron-core on a GPU, trained eagerly and with Transformer Engine's CUDA graphs."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Sequence
from typing import Any, Optional

import torch

from benchmarks.cases import ModelCase
from benchmarks.models import (
    accumulators_on_side_stream,
    build_chunks,
    initialize,
    make_config,
    micro_batches,
    run_schedule,
)
from megatron.slipstream.config import OffloadConfig
from megatron.slipstream.integration import mcore

NUM_EAGER_STEPS = 3


def with_graphs(case: ModelCase, modules: Sequence[str], **overrides: Any) -> ModelCase:
    """The case with these parts of each layer captured; all of it if there are none."""
    graphs = {
        "cuda_graph_impl": "transformer_engine",
        "cuda_graph_modules": list(modules),
        "cuda_graph_warmup_steps": NUM_EAGER_STEPS,
    }
    return dataclasses.replace(case, overrides={**case.overrides, **graphs, **overrides})


class Training:
    """A model, and the engine if anything moves. A context manager: one at a time in a process.

    Args:
        case: The model; see :func:`with_graphs`.
        offload_modules: What moves; nothing leaves the engine out.
        num_micro_batches: Of each step.
        learning_rate: Of plain gradient descent after each step; 0 lets gradients add up.
        rank: Of this process.
        world_size: How many processes there are.
        port: To meet the others at.
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
        **offload: Any,
    ) -> None:
        from megatron.core import num_microbatches_calculator as calculator

        initialize(case, rank, world_size, port)
        calculator.unset_num_microbatches_calculator()
        calculator.init_num_microbatches_calculator(
            rank, None, num_micro_batches * case.micro_batch_size, case.micro_batch_size, 1
        )
        self.case = case
        self.engine = mcore.install(OffloadConfig()) if offload_modules else None
        self._num_micro_batches = num_micro_batches
        self._learning_rate = learning_rate
        self._config = make_config(case, offload_modules, **offload)
        self.chunks = build_chunks(case, self._config)
        for chunk in self.chunks:  # as distributed data parallelism has it
            chunk.zero_grad_buffer = chunk.zero_grad  # type: ignore[assignment]
        with accumulators_on_side_stream():
            self._accumulators = [_accumulator(parameter) for parameter in self.parameters]
        self._num_steps = 0
        self._graphs: Any = None
        self.losses: list[torch.Tensor] = []
        """Of every micro-batch of every step and evaluation."""

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        if self._graphs is not None:
            self.delete_graphs()
        mcore.uninstall()
        self.chunks.clear()
        self._accumulators.clear()
        free()

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
        """The losses of another batch, without training."""
        for chunk in self.chunks:
            chunk.eval()
        self._run(forward_only=True)
        for chunk in self.chunks:
            chunk.train()

    def capture(self) -> None:
        """What ``megatron.training`` does after ``cuda_graph_warmup_steps`` steps.

        Gradients so far are gone afterwards, with graphs and without.
        """
        for parameter in self.parameters:
            parameter.grad = None
        if self.case.overrides.get("cuda_graph_impl") != "transformer_engine":
            return
        from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

        helper = TECudaGraphHelper(
            self.chunks, self._config, self.case.seq_length, self.case.micro_batch_size
        )
        helper.create_cudagraphs()
        self._graphs = helper
        free()

    def delete_graphs(self) -> None:
        """What ``megatron.training`` does at the end."""
        self._graphs.delete_cuda_graphs()
        self._graphs = None

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Of all model chunks."""
        return [parameter for chunk in self.chunks for parameter in chunk.parameters()]

    @property
    def gradients(self) -> list[Optional[torch.Tensor]]:
        """Each parameter's, None where there is none."""
        return [
            None if parameter.grad is None else parameter.grad.clone()
            for parameter in self.parameters
        ]

    @property
    def graphed_bytes(self) -> int:
        """What one replay of all graphs copies out."""
        counters = self.engine.graphs.modules.values() if self.engine else ()
        return sum(item.d2h_bytes for item in counters)

    def _run(self, forward_only: bool) -> None:
        batches = list(micro_batches(self.case, self._num_steps, self._num_micro_batches))
        self._num_steps += 1
        self.losses += run_schedule(self.case, self.chunks, batches, forward_only)


def graph_pool_bytes() -> int:
    """Device memory that belongs to graphs."""
    return sum(
        segment["total_size"]
        for segment in torch.cuda.memory_snapshot()
        if tuple(segment["segment_pool_id"]) != (0, 0)
    )


def free() -> None:
    """Give unused device memory back."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def _accumulator(parameter: torch.nn.Parameter) -> Any:
    """What accumulates the parameter's gradient, the same one for as long as it is kept."""
    view: Any = parameter.expand_as(parameter)
    return view.grad_fn.next_functions[0][0]
