# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Models of megatron-core on a GPU, trained eagerly or with Transformer Engine's CUDA graphs."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

import torch

from benchmarks.cases import ModelCase
from benchmarks.models import build_chunks, initialize, make_config, micro_batches, run_schedule
from megatron.slipstream.config import OffloadConfig
from megatron.slipstream.fine_grained_activation_offload.manager import PipelineOffloadManager
from megatron.slipstream.integration import mcore

NUM_EAGER_STEPS = 3


@dataclass
class Outcome:
    """What a run of some steps gave."""

    losses: list[torch.Tensor] = field(default_factory=list)
    """Of every micro-batch of every step."""
    gradients: list[torch.Tensor] = field(default_factory=list)
    """Every parameter's, summed over all steps."""
    reserved_after_capture: int = 0
    """Bytes that the allocator holds once the graphs have been captured and its cache is empty."""
    graph_pool_bytes: int = 0
    """Of these, what belongs to the graphs."""
    peak_bytes: int = 0
    """The most that was allocated in the steps after the capture."""
    graphed_bytes: int = 0
    """What one replay of all graphs copies out."""
    step_ms: list[float] = field(default_factory=list)
    """Of the steps after the capture."""


def with_graphs(case: ModelCase, modules: Sequence[str], **overrides: Any) -> ModelCase:
    """The case with these parts of each layer captured; all of it if there are none."""
    graphs = {
        "cuda_graph_impl": "transformer_engine",
        "cuda_graph_modules": list(modules),
        "cuda_graph_warmup_steps": NUM_EAGER_STEPS,
    }
    return dataclasses.replace(case, overrides={**case.overrides, **graphs, **overrides})


def train(
    case: ModelCase,
    offload_modules: Sequence[str] = (),
    num_steps: int = 3,
    num_micro_batches: int = 2,
    rank: int = 0,
    world_size: int = 1,
    port: int = 0,
    num_timed: int = 0,
    **offload: Any,
) -> Outcome:
    """Some eager steps, the capture if the case has one, and ``num_steps`` more.

    Args:
        case: The model; see :func:`with_graphs`.
        offload_modules: What moves; nothing switches the engine off.
        num_steps: Steps after the eager ones.
        num_micro_batches: Of each step.
        rank: Of this process.
        world_size: How many processes there are.
        port: To meet the others at.
        num_timed: Further steps, whose losses and gradients are not looked at.
        offload: megatron-core's other offloading options.
    """
    from megatron.core.num_microbatches_calculator import (
        init_num_microbatches_calculator,
        unset_num_microbatches_calculator,
    )

    initialize(case, rank, world_size, port)
    unset_num_microbatches_calculator()
    init_num_microbatches_calculator(
        rank, None, num_micro_batches * case.micro_batch_size, case.micro_batch_size, 1
    )
    engine = mcore.install(OffloadConfig()) if offload_modules else None
    try:
        return _train(
            case, offload_modules, num_steps, num_micro_batches, num_timed, engine, offload
        )
    finally:
        mcore.uninstall()
        _free()


def _train(
    case: ModelCase,
    offload_modules: Sequence[str],
    num_steps: int,
    num_micro_batches: int,
    num_timed: int,
    engine: Optional[PipelineOffloadManager],
    offload: dict[str, Any],
) -> Outcome:
    config = make_config(case, offload_modules, **offload)
    chunks = build_chunks(case, config)
    for chunk in chunks:  # as distributed data parallelism has it
        chunk.zero_grad_buffer = chunk.zero_grad  # type: ignore[assignment]
    outcome, helper = Outcome(), None

    def step(number: int, keep: bool = True) -> None:
        batches = list(micro_batches(case, number, num_micro_batches))
        losses = _run(case, chunks, batches)
        if keep:
            outcome.losses += losses

    for number in range(NUM_EAGER_STEPS):
        step(number)
    if case.overrides.get("cuda_graph_impl") == "transformer_engine":
        from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

        for chunk in chunks:
            chunk.zero_grad()
        helper = TECudaGraphHelper(
            model=chunks,
            config=config,
            seq_length=case.seq_length,
            micro_batch_size=case.micro_batch_size,
        )
        helper.create_cudagraphs()
    for chunk in chunks:
        chunk.zero_grad()
    _free()
    outcome.reserved_after_capture = torch.cuda.memory_reserved()
    outcome.graph_pool_bytes = sum(
        segment["total_size"]
        for segment in torch.cuda.memory_snapshot()
        if tuple(segment["segment_pool_id"]) != (0, 0)
    )
    torch.cuda.reset_peak_memory_stats()
    for number in range(NUM_EAGER_STEPS, NUM_EAGER_STEPS + num_steps):
        step(number)
    outcome.peak_bytes = torch.cuda.max_memory_allocated()
    outcome.gradients = [
        torch.zeros(()) if parameter.grad is None else parameter.grad.clone()
        for chunk in chunks
        for parameter in chunk.parameters()
    ]
    for number in range(num_timed):
        torch.cuda.synchronize()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step(number, keep=False)
        stop.record()
        torch.cuda.synchronize()
        outcome.step_ms.append(start.elapsed_time(stop))
    if engine is not None:
        counters = engine.graphs.modules.values()
        outcome.graphed_bytes = sum(item.d2h_bytes for item in counters)
    if helper is not None:
        helper.delete_cuda_graphs()
    return outcome


def _run(case: ModelCase, chunks: Sequence[torch.nn.Module], batches: Any) -> list[torch.Tensor]:
    from megatron.core.transformer.cuda_graphs import set_current_microbatch  # noqa: F401

    return run_schedule(case, chunks, batches)


def _free() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
