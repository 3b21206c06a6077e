# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Trains within a budget while a module's forward runs out of device memory at chosen calls."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from budgeted_training import heard
from device_memory import host_clone
from tiny_gpt import (
    ModelCase,
    build_chunks,
    initialize,
    make_config,
    memory_counted,
    train_steps,
)

from megatron.slipstream.integration import install
from megatron.slipstream.integration.budget import rescue
from megatron.slipstream.integration.budget.memory_budget import PEAK
from megatron.slipstream.integration.layers import layer_settings
from megatron.slipstream.options.fields import OffloadConfig
from megatron.slipstream.plan.settings import Assignment


@dataclass
class Exhausted:
    """What a training said, and left."""

    results: list[list[torch.Tensor]] = field(default_factory=list)
    """Losses and gradients by step."""
    state: list[torch.Tensor] = field(default_factory=list)
    """Buffers, what was logged and the state of the generator, at the end."""
    warnings: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    """The error and its causes."""
    settings: list[Assignment] = field(default_factory=list)
    """Those of the layers at each failure."""
    assignments: list[Assignment] = field(default_factory=list)
    """Those of the layers after each step."""
    peak_bytes: list[int] = field(default_factory=list)
    """The device peak of each step."""
    failed_bytes: list[int] = field(default_factory=list)
    """The device peak of a step until its failure."""
    num_copies: int = 0
    """How often what a forward changes was copied."""
    in_use_bytes: int = 0
    num_iterations: int = 0


class Exhaustion:
    """Raises at some of the calls of a module, counted without recomputations in backward."""

    def __init__(self, module: torch.nn.Module, calls: Sequence[int], bystander: Any) -> None:
        self._calls, self._num_calls = calls, 0
        self._bystander = bystander
        self._output: Any = None
        """A weak reference to what a failed call returned."""
        module.register_forward_pre_hook(self._before)
        module.register_forward_hook(self._after)

    def _before(self, *_: Any) -> None:
        assert self._output is None or self._output() is None, "the failed pass is not freed"
        self._output = None

    def _after(self, _: Any, __: Any, output: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            return
        self._num_calls += 1
        if self._num_calls - 1 in self._calls:
            self._bystander()
            self._output = weakref.ref(output[0])
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0")


def train_exhausted(
    rank: int,
    world_size: int,
    port: int,
    case: ModelCase,
    modules: Sequence[str],
    module: str,
    calls: Sequence[int],
    counts: Sequence[int],
    options: dict[str, Any],
    changed: str = "",
) -> Exhausted:
    """Train; to be run on one rank.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        port: Port of their rendezvous.
        case: The model.
        modules: Modules that may move.
        module: Path of the module whose calls fail.
        calls: The calls that fail; empty: none.
        counts: Number of micro-batches of each step.
        options: Options of the configuration that are imitated where a rescue is decided.
        changed: Path of a buffer that the failing call changes.
    """
    initialize(case, rank, world_size, port)
    result = Exhausted()
    for log in rescue._logs():
        log.clear()
    install.uninstall()
    config = OffloadConfig(activation_memory_budget=0.01, offload_backend="cpu")
    manager = install.install(config)
    model_config = make_config(case, modules)
    with memory_counted(manager.store.backend, on_cpu=True), heard(result.warnings):
        chunks = build_chunks(case, model_config)
        (chunk,) = chunks

        def bystander() -> None:
            result.failed_bytes.append(manager.store.backend.peak_bytes(PEAK))
            result.settings.append(layer_settings.assignment_of([chunk]))
            if changed:
                chunk.get_buffer(changed).zero_()

        Exhaustion(chunk.get_submodule(module), calls, bystander)
        imitated = SimpleNamespace(
            config=SimpleNamespace(**{**vars(chunk.config), **options}),
            modules=chunk.modules,
            parameters=chunk.parameters,
        )
        why_not = rescue.why_not
        try:
            with (
                patch.object(rescue, "why_not", lambda _: why_not(imitated)),
                patch.object(rescue, "ForwardState", wraps=rescue.ForwardState) as states,
            ):
                for step in train_steps(case, model_config, chunks, counts):
                    result.results.append([host_clone(tensor) for tensor in step])
                    result.assignments.append(layer_settings.assignment_of([chunk]))
                    result.peak_bytes.append(manager.store.backend.peak_bytes(PEAK))
                    del step
        except torch.OutOfMemoryError as raised:
            error: Any = raised
            while error is not None:
                result.errors.append(str(error))
                error = error.__cause__
            raised = None  # type: ignore[assignment]
        result.num_copies = states.call_count
        result.state = [tensor.clone() for tensor in chunk.buffers()]
        result.state += [entry for log in rescue._logs() for entry in _tensors_of(log)]
        result.state.append(torch.get_rng_state())
        for parameter in chunk.parameters():
            parameter.grad = None
        gc.collect()
        result.in_use_bytes = manager.store.host_pool.in_use_bytes
        result.num_iterations = manager.report.num_iterations
    return result


def _tensors_of(log: dict[str, Any]) -> list[torch.Tensor]:
    return [entry.values.detach().clone() for entry in log.values()]


def train_each(
    rank: int, world_size: int, port: int, trainings: Sequence[tuple[Any, ...]]
) -> list[Exhausted]:
    """Several trainings in one process, each a function with its arguments."""
    return [train(rank, world_size, port, *arguments) for train, *arguments in trainings]


def train_without_restoring(*arguments: Any) -> Exhausted:
    """:func:`train_exhausted` where nothing is restored before the second attempt."""
    with patch.object(rescue.ForwardState, "restore"):
        return train_exhausted(*arguments)
