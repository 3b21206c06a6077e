# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Trains a model within a budget of activations, and notes what each iteration needed."""

from __future__ import annotations

import gc
import itertools
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Optional, Union
from unittest.mock import patch

import pytest
import tiny_gpt
import torch
from megatron.core import parallel_state
from model_case import DENSE_MODULES, MOE_MODULES
from tiny_gpt import (
    ModelCase,
    build_chunks,
    compiled_again,
    first_difference,
    initialize,
    make_config,
    memory_counted,
    switched_off,
    train_steps,
)

from megatron.slipstream.fine_grained_activation_offload.cpu_backends import CpuBackend
from megatron.slipstream.fine_grained_activation_offload.report import LayerReport
from megatron.slipstream.integration import install
from megatron.slipstream.integration.budget import device_limits
from megatron.slipstream.options.fields import OffloadConfig
from megatron.slipstream.plan.relaxation import Stage
from megatron.slipstream.plan.settings import Assignment

GIB = 1 << 30


@dataclass(frozen=True)
class Run:
    """A training within a budget."""

    case: ModelCase
    budget: Union[float, tuple[float, ...]]
    """A share of the activations with the engine off; several: one for each rank."""
    counts: tuple[int, ...] = (2,) * 11
    """The number of micro-batches of each step."""
    backend: str = "cpu"
    modules: tuple[str, ...] = ()
    """What may move; empty: what the engine moves of such a model by default."""
    offload: Optional[dict[str, Any]] = None
    """Other options of megatron-core."""
    lengths: tuple[int, ...] = ()
    """The sequence length of each step; empty: that of the case. The budget is then a share of the
    activations of the last step."""
    late: Optional[tuple[int, float]] = None
    """With the budget 'auto' on a device of this size: the step before which an optimizer's state
    appears, and its bytes as a share of the activations."""
    more: Optional[tuple[int, int, float]] = None
    """A rank that holds more from a step on: the step, the rank, and the bytes of each micro-batch
    as a share of the activations."""
    interrupted: Optional[tuple[int, type, str, int]] = None
    """A step that is run again after a first attempt in which a method, of this type and name, has
    raised in a call of this number, from 1."""
    evaluated_sequences: int = 0
    """The model is evaluated with so many per micro-batch before the first step and after each; 0:
    not at all."""
    has_gradients: bool = False
    """Whether gradients are enabled in evaluations."""


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
    planned_moved_bytes: int = 0
    """The same by its plan."""
    planned_bytes: int = 0
    """The activations that the last iteration's plan predicts."""
    planned_ms: float = 0.0
    """The time that the last iteration's plan predicts; 0 if the backend takes no times."""
    followed_ms: float = 0.0
    """The time of an iteration that followed it."""
    layers: list[LayerReport] = field(default_factory=list)
    """What the report says of each layer."""
    reported_bytes: int = 0
    """The budget by the report."""
    kinds: tuple[str, ...] = ()
    """The kinds of the layers."""
    least: Assignment = ()
    """The assignment that recomputes the least."""
    error: str = ""
    warnings: list[str] = field(default_factory=list)
    """What was said of the budget."""

    @property
    def num_until_settled(self) -> int:
        """Number of iterations before the last assignment was final."""
        return self.stages.index(Stage.SETTLED)


def train_within(rank: int, world_size: int, port: int, *runs: Run) -> list[Budgeted]:
    """Train with the engine off and within a budget; to be run on every rank.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        port: Port of their rendezvous.
        runs: The trainings. Of those that differ only in the budget, one is run without the engine.
    """
    initialize(runs[0].case, rank, world_size, port)
    return [_train(rank, run) for run in runs]


def _train(rank: int, run: Run) -> Budgeted:
    case = run.case
    with patch.object(tiny_gpt, "run_step", of_lengths(run.lengths)), ExitStack() as stack:
        if run.interrupted is not None:
            run_step = _interrupted(*run.interrupted)
            stack.enter_context(patch.object(tiny_gpt, "run_step", run_step))
        if run.lengths:
            tiny_gpt._last_switched_off.clear()
        expected, baseline = switched_off(case, run.counts, run.backend, reads_memory=True)
        install.uninstall()
        chunks = build_chunks(case, make_config(case))
        parameters = sum(p.nbytes for chunk in chunks for p in chunk.parameters())
        del chunks
        activations = baseline - parameters  # its weights existed before
        share = run.budget if isinstance(run.budget, float) else run.budget[rank]
        result = Budgeted(int(share * activations))
        stack.enter_context(heard(result.warnings))
        modules = run.modules or (DENSE_MODULES if case.kind == "dense" else MOE_MODULES)
        budget: Any = result.budget_bytes / GIB
        device = SimpleNamespace(nbytes=0)
        if run.late is not None:
            budget = "auto"
            attribute = patch.object(CpuBackend, "obtainable_bytes", lambda _: device.nbytes)
            stack.enter_context(attribute)
        options = {"activation_memory_budget": budget, "offload_backend": run.backend}
        manager = install.install(OffloadConfig(**options))
        config = make_config(case, modules, **(run.offload or {}))
        counted = memory_counted(manager.store.backend, on_cpu=True)
        with counted as backend, compiled_again(case):
            gc.collect()
            chunks = build_chunks(case, config)
            gradients = sum(p.nbytes for chunk in chunks for p in chunk.parameters())
            resident = gradients + backend.begin_peak("budgeted")
            device.nbytes = int((resident + result.budget_bytes) / (1 - device_limits.MARGIN)) + 1
            steps = train_steps(case, config, chunks, run.counts)
            steps = _noted(steps, manager, result, resident)
            if run.evaluated_sequences:
                evaluated = replace(case, micro_batch_size=run.evaluated_sequences)
                steps = _evaluated(steps, evaluated, config, chunks, run.has_gradients)
            if run.more is not None and run.more[1] == rank:
                steps = _with_more(steps, chunks[0], run.more[0], int(run.more[2] * activations))
            if run.late is not None:
                steps = _with_late_state(steps, run.late[0], int(run.late[1] * activations))
            try:
                result.difference = first_difference(expected, steps)
            except ValueError as error:
                result.error = str(error)
        manager.finish_report()
        report = manager.report
        result.moved_bytes, result.reported_bytes = report.d2h_bytes, report.budget_bytes
        result.planned_moved_bytes = manager.plan.moved_nbytes if manager.plan else 0
        result.layers = report.layers
        result.planned_ms, result.followed_ms = report.planned_ms, report.measured_ms
        return result


@contextmanager
def heard(warnings: list[str]) -> Iterator[None]:
    """Context in which warnings of the package are added to a list."""
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("megatron.slipstream")
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)


def _evaluated(
    steps: Iterator[list[torch.Tensor]],
    case: ModelCase,
    config: Any,
    chunks: Sequence[Any],
    has_gradients: bool,
) -> Iterator[list[torch.Tensor]]:
    def evaluate() -> None:
        # megatron-core keeps one buffer of each kind, of the largest size that was asked for.
        memory_buffer = parallel_state.get_global_memory_buffer()
        with torch.set_grad_enabled(has_gradients), patch.object(memory_buffer, "buffer", {}):
            tiny_gpt.run_step(case, config, chunks, 0, 2, True)

    evaluate()
    for results in steps:
        yield results
        evaluate()


def _with_late_state(
    steps: Iterator[list[torch.Tensor]], number: int, nbytes: int
) -> Iterator[list[torch.Tensor]]:
    state = None
    for step, results in enumerate(steps):
        yield results
        if step + 1 == number:
            state = torch.zeros(nbytes, dtype=torch.uint8)
    del state


class _Hold(torch.autograd.Function):
    """Holds bytes until the backward of a tensor."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
        context.held = torch.zeros(nbytes, dtype=torch.uint8, device=tensor.device)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        del context.held
        return gradients[0], None


def _with_more(
    steps: Iterator[list[torch.Tensor]], chunk: Any, number: int, nbytes: int
) -> Iterator[list[torch.Tensor]]:
    for step, results in enumerate(steps):
        if step + 1 == number:
            chunk.decoder.register_forward_hook(lambda _, __, output: _Hold.apply(output, nbytes))
        yield results


def _interrupted(number: int, owner: type, method: str, which: int) -> Any:
    """A ``run_step`` that is interrupted in a step, and then runs it again."""
    plain, method_before, calls = tiny_gpt.run_step, getattr(owner, method), itertools.count(1)

    def interrupt(*arguments: Any, **options: Any) -> Any:
        if next(calls) == which:
            raise KeyboardInterrupt
        return method_before(*arguments, **options)

    def run_step(case: ModelCase, config: Any, chunks: Any, step: int, *rest: Any) -> Any:
        if step == number and config.fine_grained_activation_offloading:
            with patch.object(owner, method, interrupt), pytest.raises(KeyboardInterrupt):
                plain(case, config, chunks, step, *rest)
            for chunk in chunks:
                chunk.zero_grad(set_to_none=True)
        return plain(case, config, chunks, step, *rest)

    return run_step


def of_lengths(lengths: Sequence[int]) -> Any:
    """A ``run_step`` whose sequences have these lengths, by step."""
    plain = tiny_gpt.run_step

    def run_step(case: ModelCase, config: Any, chunks: Any, step: int, *rest: Any) -> Any:
        if lengths:
            case = replace(case, seq_length=lengths[min(step, len(lengths) - 1)])
        return plain(case, config, chunks, step, *rest)

    return run_step


def _noted(
    steps: Iterator[list[torch.Tensor]], manager: Any, result: Budgeted, resident_bytes: int
) -> Iterator[list[torch.Tensor]]:
    backend, name = manager.store.backend, "budgeted"
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
