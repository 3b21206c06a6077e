# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Trains within a budget while forward runs out of device memory: at chosen calls, or where a
device ends that the budget takes for a larger one."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from budgeted_training import heard
from device_memory import host_clone
from tiny_gpt import (
    DENSE_MODULES,
    ModelCase,
    build_chunks,
    initialize,
    make_config,
    memory_counted,
    run_step,
    switched_off,
    train_steps,
)

from megatron.slipstream.fine_grained_activation_offload import planner
from megatron.slipstream.fine_grained_activation_offload.cpu_backends import CpuBackend
from megatron.slipstream.integration import install
from megatron.slipstream.integration.budget import rescue
from megatron.slipstream.integration.budget.device_limits import MARGIN
from megatron.slipstream.integration.budget.memory_budget import PEAK
from megatron.slipstream.integration.cpu.cpu_memory import DeviceMemoryMeter
from megatron.slipstream.integration.layers import layer_settings
from megatron.slipstream.options.fields import OffloadConfig
from megatron.slipstream.plan.settings import Assignment
from megatron.slipstream.plan.trace import Bandwidth


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
    """Raises at some of the calls of a module, counted without recomputations in backward.

    If ``in_backward``, it raises where backward has the gradient of what they return.
    """

    def __init__(
        self, module: torch.nn.Module, calls: Sequence[int], bystander: Any, in_backward: bool
    ) -> None:
        self._calls, self._num_calls = calls, 0
        self._in_backward = in_backward
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
            if self._in_backward:
                output[0].register_hook(self._fail)
                return
            self._output = weakref.ref(output[0])
            self._fail()

    def _fail(self, *_: Any) -> None:
        self._bystander()
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
    in_backward: bool = False,
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
        in_backward: Whether the calls fail in their backward.
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

        Exhaustion(chunk.get_submodule(module), calls, bystander, in_backward)
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


@dataclass
class Settled:
    """A training on a device that is smaller than it seems."""

    num_iterations: int = 0
    """How many it took until nothing was measured any more."""
    assignments: list[Assignment] = field(default_factory=list)
    """Those of the layers after each iteration."""
    peak_bytes: list[int] = field(default_factory=list)
    """The device peak of each iteration beside weights and gradients."""
    end_bytes: int = 0
    """Where the device ends, beside weights and gradients."""
    failed: list[int] = field(default_factory=list)
    """For each forward that ran out of memory, the number of its iteration."""


def train_until_settled(
    rank: int,
    world_size: int,
    port: int,
    case: ModelCase,
    count: int,
    ends: tuple[float, float],
    max_iterations: int,
) -> Settled:
    """Train until nothing is measured any more; to be run on one rank.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        port: Port of their rendezvous.
        case: The model.
        count: Number of micro-batches of an iteration.
        ends: Where the device seems to end, and where it does for one forward after the first
            iteration, as shares of the activations with the engine off.
        max_iterations: The most iterations.
    """
    initialize(case, rank, world_size, port)
    result = Settled()
    with _counted_time(), ExitStack() as stack:
        _, baseline = switched_off(case, (count,), "cpu", reads_memory=True)
        install.uninstall()
        device = SimpleNamespace(seems=0)
        stack.enter_context(patch.object(CpuBackend, "obtainable_bytes", lambda _: device.seems))
        manager = install.install(
            OffloadConfig(activation_memory_budget="auto", offload_backend="cpu")
        )
        config = make_config(case, DENSE_MODULES)
        backend = stack.enter_context(memory_counted(manager.store.backend, on_cpu=True))
        chunks = build_chunks(case, config)
        gradients = sum(p.nbytes for chunk in chunks for p in chunk.parameters())
        for parameter in (p for chunk in chunks for p in chunk.parameters()):
            parameter.grad = torch.zeros_like(parameter)
        resident = backend.begin_peak("settled")
        seems, ends_at = (int(share * (baseline - gradients)) for share in ends)
        result.end_bytes = ends_at
        device.seems = int((resident + seems) / (1 - MARGIN)) + 1
        note_peak = DeviceMemoryMeter._note_peak

        def note(meter: DeviceMemoryMeter) -> None:
            is_forward = torch._C._current_graph_task_id() == -1
            may_fail = is_forward and result.num_iterations > 0 and not result.failed
            if may_fail and meter.allocated_bytes > resident + ends_at:
                result.failed.append(result.num_iterations)
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
            note_peak(meter)

        stack.enter_context(patch.object(DeviceMemoryMeter, "_note_peak", note))
        while not manager.is_settled and result.num_iterations < max_iterations:
            run_step(case, config, chunks, result.num_iterations, count)
            result.num_iterations += 1
            result.assignments.append(layer_settings.assignment_of(chunks))
            result.peak_bytes.append(backend.peak_bytes("settled") - resident)
            backend.begin_peak("settled")
    return result


@contextmanager
def _counted_time() -> Iterator[None]:
    """Context in which the CPU backend takes times, which are numbers of operations."""
    count, dispatch = 0, DeviceMemoryMeter.__torch_dispatch__

    def counted(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        return dispatch(*arguments)

    patches = {
        "takes_time": True,
        "timed_event": lambda *_: count,
        "elapsed_ms": lambda _, start, stop: 0.01 * (stop - start),
    }
    with (
        patch.multiple(CpuBackend, **patches),
        patch.object(DeviceMemoryMeter, "__torch_dispatch__", counted),
        patch.object(planner, "measure_link", lambda _: Bandwidth(*[1.0] * 4)),
    ):
        yield


def train_each(
    rank: int, world_size: int, port: int, trainings: Sequence[tuple[Any, ...]]
) -> list[Exhausted]:
    """Several trainings in one process, each a function with its arguments."""
    return [train(rank, world_size, port, *arguments) for train, *arguments in trainings]


def train_without_restoring(*arguments: Any) -> Exhausted:
    """:func:`train_exhausted` where nothing is restored before the second attempt."""
    with patch.object(rescue.ForwardState, "restore"):
        return train_exhausted(*arguments)
