# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Trains a model within a budget of activations, and notes what each iteration needed."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Optional
from unittest.mock import patch

import tiny_gpt
import torch
from tiny_gpt import (
    ModelCase,
    build_chunks,
    first_difference,
    initialize,
    make_config,
    memory_counted,
    switched_off,
    train_steps,
)

from megatron.slipstream.fine_grained_activation_offload.report import LayerReport
from megatron.slipstream.integration import install
from megatron.slipstream.options.fields import OffloadConfig
from megatron.slipstream.plan.relaxation import Stage
from megatron.slipstream.plan.settings import Assignment

GIB = 1 << 30


@dataclass
class Budgeted:
    """What iterations within a budget needed, on one rank."""

    budget_bytes: int
    difference: Optional[str] = None
    """The first difference to the training without the engine; None if equal."""
    activation_bytes: list[int] = field(default_factory=list)
    """The device peak of each iteration less weights and gradients."""
    assignments: list[Assignment] = field(default_factory=list)
    """That of each iteration."""
    stages: list[Stage] = field(default_factory=list)
    moved_bytes: int = 0
    """Of the last iteration."""
    planned_bytes: int = 0
    """The activations that the last iteration's plan predicts."""
    layers: list[LayerReport] = field(default_factory=list)
    """What the report says of each layer."""
    reported_bytes: int = 0
    """The budget by the report."""
    kinds: tuple[str, ...] = ()
    """The kinds of the layers."""
    least: Assignment = ()
    """The assignment that recomputes the least."""
    error: str = ""

    @property
    def num_until_settled(self) -> int:
        """Number of iterations before the last assignment was final."""
        return self.stages.index(Stage.SETTLED)


def train_within(
    rank: int,
    world_size: int,
    port: int,
    case: ModelCase,
    modules: Sequence[str],
    backend: str,
    budget: float,
    counts: Sequence[int],
    offload: Optional[dict[str, Any]] = None,
    lengths: Sequence[int] = (),
) -> Budgeted:
    """Train with the engine off and within a budget; to be run on every rank.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        port: Port of their rendezvous.
        case: The model.
        modules: Modules that may move.
        backend: The engine's backend.
        budget: The budget, as a share of the activations with the engine off.
        counts: Number of micro-batches of each step.
        offload: Other options of megatron-core.
        lengths: The sequence length of each step; empty: that of the case. The budget is a share of
            the activations of the last step.
    """
    with patch.object(tiny_gpt, "run_step", _of_lengths(lengths)):
        initialize(case, rank, world_size, port)
        expected, baseline = switched_off(case, counts, backend, reads_memory=True)
        install.uninstall()
        chunks = build_chunks(case, make_config(case))
        parameters = sum(p.nbytes for chunk in chunks for p in chunk.parameters())
        del chunks
        activations = baseline - parameters  # its weights existed before
        result = Budgeted(int(budget * activations))
        options = {
            "activation_memory_budget": result.budget_bytes / GIB,
            "offload_backend": backend,
        }
        manager = install.install(OffloadConfig(**options))
        config = make_config(case, modules, **(offload or {}))
        with memory_counted(manager.store.backend, on_cpu=True):
            gc.collect()
            chunks = build_chunks(case, config)
            gradients = sum(p.nbytes for chunk in chunks for p in chunk.parameters())
            steps = _noted(train_steps(case, config, chunks, counts), manager, result, gradients)
            try:
                result.difference = first_difference(expected, steps)
            except ValueError as error:
                result.error = str(error)
        manager.finish_report()
        report = manager.report
        result.moved_bytes, result.reported_bytes = report.d2h_bytes, report.budget_bytes
        result.layers = report.layers
        return result


def _of_lengths(lengths: Sequence[int]) -> Any:
    """A ``run_step`` whose sequences have these lengths, by step."""
    plain = tiny_gpt.run_step

    def run_step(case: ModelCase, config: Any, chunks: Any, step: int, *rest: Any) -> Any:
        if lengths:
            case = replace(case, seq_length=lengths[min(step, len(lengths) - 1)])
        return plain(case, config, chunks, step, *rest)

    return run_step


def _noted(
    steps: Iterator[list[torch.Tensor]], manager: Any, result: Budgeted, gradient_bytes: int
) -> Iterator[list[torch.Tensor]]:
    backend, name = manager.store.backend, "budgeted"
    resident_bytes = backend.begin_peak(name) + gradient_bytes
    for step in steps:
        relaxation = manager.budget.relaxation
        result.activation_bytes.append(backend.peak_bytes(name) - resident_bytes)
        result.assignments.append(relaxation.assignment)
        result.stages.append(relaxation.stage)
        layers = relaxation.visits.layers
        result.kinds = tuple(layer.kind for layer in layers)
        result.least = tuple(layer.settings[-1] for layer in layers)
        result.planned_bytes = manager.report.planned_peak_bytes - resident_bytes
        yield step
        backend.begin_peak(name)
