# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A model whose layers run in nodes that alternate between two micro-batches, engine on or off.

megatron-core overlaps the communication of experts with computation in this way, on a GPU on two
streams. On a CPU there are no streams to overlap on; the order of the calls is the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from garbage import without_garbage_collection
from gpu_models import on_gpu
from megatron_models import build_chunks, initialize, make_config, micro_batches, use_gpu
from model_case import ModelCase

from megatron.slipstream.fine_grained_activation_offload.cpu_backends import CpuBackend
from megatron.slipstream.integration.cpu.cpu_memory import DeviceMemoryMeter

CASE = ModelCase(
    "moe",
    bf16=True,
    num_layers=4,
    dp=2,
    ep=2,
    overrides={
        "overlap_moe_expert_parallel_comm": True,
        "recompute_granularity": "selective",
        "recompute_modules": ["layernorm", "moe_act"],
    },
)


@dataclass(frozen=True)
class InNodes:
    """Result of :func:`compare_in_nodes` on one rank."""

    difference: int
    """Number of tensors that differ bitwise."""
    num_tensors: int
    moved_modules: tuple[str, ...]
    num_late: int
    num_plans: int
    peak_drop_bytes: int
    """Measured on a CPU alone."""
    claimed_drop_bytes: int


def compare_in_nodes(
    rank: int,
    world_size: int,
    port: int,
    engines: Sequence[tuple[Sequence[str], str]],
    recomputes: bool,
    num_iterations: int,
) -> list[InNodes]:
    """Train with the engine off and on; to be run on every rank.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        port: Port of their rendezvous.
        engines: Modules that move, and backend of the engine, of each training with it.
        recomputes: Whether norms and activation functions are recomputed.
        num_iterations: Number of iterations, of two micro-batches each.

    Returns:
        A result for each of ``engines``.
    """
    from megatron.slipstream.integration import install
    from megatron.slipstream.options.fields import OffloadConfig

    case = CASE
    if not recomputes:
        case = replace(CASE, overrides={"overlap_moe_expert_parallel_comm": True})
    if use_gpu():
        case = on_gpu(case, moe_permute_fusion=True)  # The other kernels sum in any order.
    initialize(case, rank, world_size, port)
    # megatron-core caches masks and tables per process, which would count for one run only.
    _train(case, (), CpuBackend(), 1)
    expected, peak_without = _train(case, (), CpuBackend(), num_iterations)
    results = []
    for modules, backend in engines:
        install.uninstall()
        manager = install.install(OffloadConfig(offload_backend=backend))
        actual, peak = _train(case, modules, manager.store.backend, num_iterations)
        claimed = manager.offload_summary_total_bytes
        manager.finish_report()
        pairs = list(zip(expected, actual, strict=True))
        report = manager.report
        install.uninstall()
        results.append(
            InNodes(
                difference=sum(not torch.equal(a, b) for a, b in pairs),
                num_tensors=len(pairs),
                moved_modules=tuple(
                    name for name in report.modules if report.modules[name].d2h_bytes
                ),
                num_late=report.total.num_late,
                num_plans=report.num_plans,
                peak_drop_bytes=peak_without - peak,
                claimed_drop_bytes=claimed,
            )
        )
    return results


def _train(
    case: ModelCase, modules: Sequence[str], backend: Any, num_iterations: int
) -> tuple[list[torch.Tensor], int]:
    """Losses and gradients of all iterations, and the device peak of the last one.

    The peak includes memory that lives between iterations: a layer keeps the inputs of its last
    recomputed norms, which the engine holds too.
    """
    from megatron.core.pipeline_parallel.utils import set_streams
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    set_streams()
    (model,) = build_chunks(case, make_config(case, modules))
    results: list[torch.Tensor] = []
    peak = 0
    with _counted(backend), _no_streams(), without_garbage_collection():
        for _ in range(num_iterations):
            model.zero_grad(set_to_none=False)
            model_parallel_cuda_manual_seed(0, force_reset_rng=True)
            backend.begin_peak()
            losses = _two_micro_batches(model, list(micro_batches(case, 0, 2)))
            if use_gpu():
                torch.cuda.synchronize()  # The nodes' streams are not all the current one.
            peak = backend.peak_bytes()
            gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            results += [*losses, *gradients]
            if modules:
                _end_iteration()
    return results, peak


def _end_iteration() -> None:
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import (
        FineGrainedActivationOffloadingInterface,
    )

    FineGrainedActivationOffloadingInterface.reset()


def _two_micro_batches(model: Any, batches: Sequence[dict[str, Any]]) -> list[torch.Tensor]:
    """The first's forward, its backward interleaved with the second's forward, its backward."""
    from megatron.core.models.common.model_chunk_schedule_plan import (
        TransformerModelChunkSchedulePlan,
    )

    run = TransformerModelChunkSchedulePlan.run
    first, second = map(_inputs, batches)
    nodes = model.build_schedule_plan(**first)
    loss = run(nodes, None)
    later_nodes = model.build_schedule_plan(**second)
    later_loss = run(later_nodes, nodes, b_grad=torch.ones_like(loss))
    run(None, later_nodes, b_grad=torch.ones_like(later_loss))
    return [loss.detach().clone(), later_loss.detach().clone()]


def _inputs(batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    tokens = batch["tokens"]
    length, device = tokens.shape[1], tokens.device
    return {
        "input_ids": tokens,
        "labels": batch["labels"],
        "position_ids": batch["position_ids"],
        "attention_mask": torch.ones(1, 1, length, length, dtype=torch.bool, device=device).triu(1),
    }


@contextmanager
def _counted(backend: Any) -> Iterator[None]:
    if use_gpu() or not isinstance(backend, CpuBackend):
        yield
        return
    resize = torch.UntypedStorage.resize_

    def counted_resize(storage: torch.UntypedStorage, nbytes: int) -> Any:
        result = resize(storage, nbytes)
        backend.meter.note_size(storage)
        return result

    with (
        DeviceMemoryMeter() as backend.meter,
        patch.object(torch.UntypedStorage, "resize_", counted_resize),
    ):
        yield
    backend.meter = None


@contextmanager
def _no_streams() -> Iterator[None]:
    """Context in which a CPU tensor accepts ``record_stream``."""
    if use_gpu():
        yield
        return
    with patch.object(torch.Tensor, "record_stream", lambda *_: None):
        yield
