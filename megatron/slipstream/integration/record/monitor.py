# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Progress and record of a training run, from megatron's callbacks.

In every schedule these are the forward step, the loss function and the function that finalises
gradients after the last backward pass.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch.distributed.tensor import DTensor

from megatron.slipstream.fine_grained_activation_offload.backend import Backend
from megatron.slipstream.fine_grained_activation_offload.cpu_backends import CpuBackend
from megatron.slipstream.fine_grained_activation_offload.engine_setup import make_backend
from megatron.slipstream.graphs.capture import graph_pool_bytes
from megatron.slipstream.integration.cpu.cpu_memory import DeviceMemoryMeter
from megatron.slipstream.plan.render import format_bytes
from megatron.slipstream.plan.whole_files import write_whole

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Monitor(contextlib.AbstractContextManager["Monitor"]):
    """Monitors one rank's training. Use it as a context around ``pretrain``.

    All forward and backward passes of an iteration lie between :meth:`before_forward` of its first
    micro-batch and the end of :meth:`finalizing`. The memory peak between them, minus the memory
    allocated before, is the peak of its activations (and of temporary gradients).
    """

    num_iterations: int
    iteration: Callable[[], int]
    """Returns the number of the current iteration, from 1; a resumed run starts higher."""
    shows: bool
    """Whether to log a line every ``log_interval`` iterations."""
    record: bool
    """Keep figures for :meth:`save`: a device synchronisation per iteration, which resets torch's
    peak memory statistics."""
    bytes_offloaded: Optional[Callable[[], int]] = None
    """Returns the bytes copied to the host in the last complete iteration."""
    evaluation_length: int = 0
    """Micro-batches of one evaluation on this rank; 0 if unknown."""
    log_interval: int = 1
    backend: Optional[Backend] = None
    """The engine's, which also resets the peak statistics in some iterations; None without one."""
    between_iterations: Optional[Callable[[Monitor, int], None]] = None
    """Called before an iteration begins, with the number of the last complete one, whose engine
    figures are available then."""

    def __post_init__(self) -> None:
        backend = self.backend
        if backend is None or (backend.name == "cuda") != torch.cuda.is_available():
            # A backend that emulates a GPU does not count the memory of a real one.
            backend = make_backend("auto")
        self._backend = backend
        self._meter: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self.record and isinstance(backend, CpuBackend):
            self._meter = backend.meter = DeviceMemoryMeter()  # Plans are made from its count.
        self._in_iteration = False
        self._loss: Optional[float] = None
        self._is_settled = True
        self._baseline_bytes = 0
        self._started_s = self._began_s = 0.0
        self._ended_s: Optional[float] = None
        self._losses: list[torch.Tensor] = []
        self._evaluation_losses: list[torch.Tensor] = []
        self._model: list[torch.nn.Module] = []
        self._num_done = 0
        self.figures: dict[str, Any] = {"iterations": [], "evaluations": []}

    def __enter__(self) -> Monitor:
        self._meter.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._settle()
        self._meter.__exit__(*error)

    # Callbacks, in the order of an iteration.

    def before_forward(self) -> None:
        """Called before every micro-batch's forward pass, in training and in evaluation."""
        if not torch.is_grad_enabled():
            self._ended_s = self._ended_s or time.perf_counter()
            return
        if self._in_iteration:
            return
        self._settle()
        self._began_s, self._ended_s = time.perf_counter(), None
        if self.between_iterations is not None and self._num_done > 0:
            self.between_iterations(self, self._num_done)
        self._in_iteration = True
        if self.record:
            _synchronize()
            self._baseline_bytes = self._backend.begin_peak()
            self._started_s = time.perf_counter()

    def after_loss(self, loss_and_tokens: torch.Tensor) -> None:
        """Called on the last pipeline stage with a micro-batch's ``[summed loss, tokens]``."""
        if not self.record and not self.shows:
            return
        if torch.is_grad_enabled():
            self._losses.append(loss_and_tokens)
        else:
            self._evaluation_losses.append(loss_and_tokens)
            if len(self._evaluation_losses) == self.evaluation_length:
                self._close_evaluation()

    def finalizing(self, finalize_model_grads: Callable[..., None]) -> Callable[..., None]:
        """Wrap megatron's function that finalises gradients, the last step before the optimizer."""

        def finalize(model: list[torch.nn.Module], *args: Any, **kwargs: Any) -> None:
            peak_bytes = 0
            if self.record:
                _synchronize()
                peak_bytes = self._backend.peak_bytes() - self._baseline_bytes
            finalize_model_grads(model, *args, **kwargs)
            self._model = model
            self._in_iteration = self._is_settled = False
            self._num_done = self.iteration()
            self._loss = _mean(self._losses)
            self._losses.clear()
            if not self.record:
                return
            figures = {
                "loss": self._loss,
                "activation_peak_bytes": peak_bytes,
                "graph_pool_bytes": graph_pool_bytes(),
                "bytes_offloaded": 0,
                "forward_backward_ms": 1e3 * (time.perf_counter() - self._started_s),
            }
            self.figures["iterations"].append(figures)
            if self._num_done == self.num_iterations:
                self.figures["gradients_sha256"] = _digest(map(_gradient, self._parameters()))

        return finalize

    def _settle(self) -> None:
        """Complete the last iteration's figures, once the engine has finished that iteration."""
        self._close_evaluation()
        if self._is_settled:
            return
        self._is_settled = True
        moved = None if self.bytes_offloaded is None else self.bytes_offloaded()
        if self.record and moved is not None:
            self.figures["iterations"][-1]["bytes_offloaded"] = moved
        done, total = self._num_done, self.num_iterations
        if self.shows and (done % max(self.log_interval, 1) == 0 or done == total):
            # Time of the whole iteration with its optimizer step, excluding any later evaluation.
            ms = 1e3 * ((self._ended_s or time.perf_counter()) - self._began_s)
            figures = [] if self._loss is None else [f"loss {self._loss:.4f}"]
            figures.append(f"{ms:.0f} ms")
            if moved is not None:
                figures.append(f"offloaded {format_bytes(moved)}")
            logger.info("iteration %d/%d: %s", done, total, ", ".join(figures))

    def _close_evaluation(self) -> None:
        """Record an evaluation's loss, at its last micro-batch or when training goes on or ends."""
        if self._evaluation_losses:
            loss = _mean(self._evaluation_losses)
            self.figures["evaluations"].append({"after_iterations": self._num_done, "loss": loss})
            self._evaluation_losses.clear()

    # Results

    def save(self, path: str, is_end: bool = True) -> None:
        """Write the figures of this rank, after a normal end with a digest of the weights."""
        self._settle()
        if is_end and self._model:
            self.figures["weights_sha256"] = _digest(self._parameters())
        self.figures["torch_num_threads"] = torch.get_num_threads()
        write_whole(path, (json.dumps(self.figures, indent=1) + "\n").encode())

    def _parameters(self) -> Iterable[torch.nn.Parameter]:
        return itertools.chain.from_iterable(chunk.parameters() for chunk in self._model)


def _gradient(parameter: torch.nn.Parameter) -> Optional[torch.Tensor]:
    main: Optional[torch.Tensor] = getattr(parameter, "main_grad", None)
    return parameter.grad if main is None else main


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # H2


def _mean(losses: list[torch.Tensor]) -> Optional[float]:
    """Return the loss per token over ``[summed loss, tokens]`` of micro-batches; None if empty."""
    if not losses:
        return None
    total, tokens = torch.stack([loss.double() for loss in losses]).sum(dim=0).tolist()
    return total / max(tokens, 1.0)


def _digest(tensors: Iterable[Optional[torch.Tensor]]) -> str:
    """Return the SHA-256 of the tensors' bytes in order: equal only for bitwise equal tensors.

    Of a tensor that FSDP divides, this rank's part.
    """
    digest = hashlib.sha256()
    for tensor in tensors:
        if tensor is not None:
            part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            raw = part.detach().contiguous().reshape(-1).view(torch.uint8)
            digest.update(raw.cpu().numpy().tobytes())
    return digest.hexdigest()
