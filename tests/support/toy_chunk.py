# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A small model chunk with megatron-core's features: main gradients, hooks, state, randomness."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, Optional

import torch

from megatron.slipstream.fine_grained_activation_offload.graph_capture import ONE_SIZE
from megatron.slipstream.graphs.bank import ChunkGraphs, CpSizes
from megatron.slipstream.graphs.capture import EagerGraphs, GraphBackend
from megatron.slipstream.graphs.chunk import Chunk

WIDTH, TOKENS = 8, 6
SIZES = (1, 2, 4)
SCHEDULES = ["FB", "FFBB", "FFBFBB", "FFFBFBFBBB", "FB", "FFFBBB"]
"""Schedules of one iteration each, with at most three micro-batches in flight."""
STEP = 7
"""Numbers between the first micro-batches of two iterations."""


def table_of(size: int) -> torch.Tensor:
    """A table whose length follows from the size."""
    return torch.linspace(1, 2, TOKENS * size).reshape(-1, 1, 1)


class Sizes(CpSizes):
    """Sizes of micro-batches: the size is an argument, and decides the length of a table."""

    sizes = SIZES

    def __init__(self) -> None:
        self.told: list[tuple[int, Optional[Exception]]] = []
        """What the ranks have agreed on."""
        self.other_rank_fails_at = 0

    def size_of(self, arguments: Mapping[str, Any]) -> int:
        """As ``CpSizes`` has it."""
        if arguments["size"] not in SIZES:
            raise ValueError(f"size {arguments['size']}")
        return int(arguments["size"])

    def arguments_of(self, arguments: Mapping[str, Any], size: int) -> Mapping[str, Any]:
        """As ``CpSizes`` has it."""
        return {**arguments, "size": size, "table": table_of(size)}

    def agree(self, size: int, error: Optional[Exception]) -> None:
        """Note what this rank says; another one fails at a call of this number."""
        self.told.append((size, error))
        if error is not None:
            raise error
        if len(self.told) == self.other_rank_fails_at:
            raise RuntimeError("another rank")


def run_in_order(
    schedule: str, forward: Callable[[int], torch.Tensor], first: int
) -> list[torch.Tensor]:
    """Run an iteration. Returns the losses of its micro-batches.

    Args:
        schedule: ``F`` is the forward of the next micro-batch, ``B`` the oldest one's backward.
        forward: Returns the loss of the micro-batch of this number.
        first: Number of the first micro-batch.
    """
    losses: list[torch.Tensor] = []
    found = []
    for letter in schedule:
        if letter == "F":
            losses.append(forward(first))
            first += 1
            found.append(losses[-1].detach().clone())
        else:
            losses.pop(0).backward()
    return found


class _OwnGradient(torch.autograd.Function):
    """``x @ weight.T`` whose backward adds to ``main_grad`` itself, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        ctx.weight.main_grad.add_((grads[0].flatten(0, -2).t() @ x.flatten(0, -2)).float())
        ctx.weight.grad_added_to_main_grad = True
        return grads[0] @ weight, torch.full_like(weight, float("nan"))


class ToyLayer(torch.nn.Module):
    """Dropout, a linear layer that computes its weight gradient, another one, a token counter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.parts = SimpleNamespace(weight=self.weight)
        """No module, as that of a Mamba mixer which refers to its parameters."""
        self.linear = torch.nn.Linear(WIDTH, WIDTH)
        self.register_buffer("num_tokens", torch.zeros(()))

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.num_tokens += x.shape[0] * scale.sum()
        y = torch.nn.functional.dropout(_OwnGradient.apply(x, self.parts.weight), 0.25)
        return x + torch.tanh(self.linear(y)) * scale


class ToyChunk(torch.nn.Module):
    """Layers in a row; the last one shares the first one's linear layer.

    Args:
        num_layers: Number of layers, at least two.
        checkpoint: Whether every layer is recomputed in backward.
    """

    def __init__(self, num_layers: int = 3, checkpoint: bool = False) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(ToyLayer() for _ in range(num_layers))
        self.layers[-1].linear = self.layers[0].linear
        self.frozen = torch.nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.checkpoint = checkpoint
        self.num_runs = 0

    def forward(self, hidden: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        self.num_runs += 1
        for layer in self.layers:
            if self.checkpoint:
                hidden = torch.utils.checkpoint.checkpoint(layer, hidden, scale, use_reentrant=True)
            else:
                hidden = layer(hidden, scale)
        return hidden * self.frozen


class Training:
    """Trains a :class:`ToyChunk` between two linear layers, with or without graphs.

    Args:
        num_slots: Number of slots; None to train eagerly.
        seed: Seed of weights and data.
        backend: Captures the graphs.
        is_sized: Whether micro-batches have sizes: that of number ``n`` is ``SIZES[n % 3]``.
        offloading: Offloading inside the graphs.
        chunk: Options of :class:`ToyChunk`.
    """

    def __init__(
        self,
        num_slots: Optional[int],
        seed: int = 0,
        num_warmup_iterations: int = 1,
        backend: Optional[GraphBackend] = None,
        is_sized: bool = False,
        offloading: Any = None,
        **chunk: Any,
    ) -> None:
        torch.manual_seed(seed)
        self.before = torch.nn.Linear(WIDTH, WIDTH)
        self.module = ToyChunk(**chunk)
        self.hooks: list[str] = []
        """Events: 'before' and 'after' replays, and 'hook' for each parameter hook."""
        self.results: list[torch.Tensor] = []
        self.graphs: Any = None
        """Its :class:`ChunkGraphs`, if there are slots."""
        self.sizes = Sizes() if is_sized else None
        self._keep: list[Any] = []
        for parameter in self.parameters():
            if parameter.requires_grad:
                self._wrap(parameter)
        if num_slots is not None:
            chunks = {
                size: Chunk(
                    f"chunk 0, size {size}" if is_sized else "chunk 0",
                    self.module,
                    self._run,
                    before_replay=lambda: self.hooks.append("before"),
                    after_replay=lambda: self.hooks.append("after"),
                    save_state=self._save_state,
                    offloading=offloading,
                )
                for size in (SIZES if is_sized else (ONE_SIZE,))
            }
            self.graphs = ChunkGraphs(
                chunks, num_slots, num_warmup_iterations, backend or EagerGraphs(), self.sizes
            )

    def _run(self, hidden: torch.Tensor, **arguments: Any) -> torch.Tensor:
        if hidden.is_leaf:
            assert hidden.grad is None, "a captured backward would add to it in each replay"
        if self.sizes is not None:
            arguments = {"scale": arguments["table"][-TOKENS:] / arguments["size"]}
        output: torch.Tensor = self.module(hidden, **arguments)
        return output

    def parameters(self) -> list[Any]:
        """All parameters of the model."""
        return [*self.before.parameters(), *self.module.parameters()]

    def _wrap(self, parameter: Any) -> None:
        """Like DistributedDataParallel: a hook adds gradients to ``main_grad``."""
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        parameter.grad_added_to_main_grad = False
        accumulator = parameter.expand_as(parameter).grad_fn.next_functions[0][0]

        def hook(*_: Any) -> None:
            self.hooks.append("hook")
            if parameter.grad is not None and not parameter.grad_added_to_main_grad:
                parameter.main_grad.add_(parameter.grad)
            parameter.grad = None

        accumulator.register_hook(hook)
        self._keep.append(accumulator)

    def _save_state(self) -> Callable[[], None]:
        saved = [buffer.clone() for buffer in self.module.buffers()]

        def put_back() -> None:
            for buffer, value in zip(self.module.buffers(), saved, strict=True):
                buffer.copy_(value)

        return put_back

    def begin_iteration(self) -> None:
        """Set gradients to zero."""
        if self.graphs is not None:
            self.graphs.begin_iteration()
        for parameter in self.parameters():
            if parameter.requires_grad:
                parameter.main_grad.zero_()
                parameter.grad_added_to_main_grad = False

    def forward(self, micro_batch: int) -> torch.Tensor:
        """One micro-batch's loss."""
        generator = torch.Generator().manual_seed(micro_batch)
        data = torch.randn(TOKENS, 1, WIDTH, generator=generator)
        arguments: dict[str, Any] = {"scale": torch.rand(TOKENS, 1, 1, generator=generator)}
        if self.sizes is not None:
            size = SIZES[micro_batch % 3]
            arguments = {"table": table_of(size), "size": size}
        hidden = self.before(data)
        if self.graphs is not None:
            output = self.graphs(hidden, arguments)
        else:
            output = self._run(hidden, **arguments)
        loss = (output * torch.randn(TOKENS, 1, WIDTH, generator=generator)).sum()
        output.data = torch.empty(1)  # As pipeline schedules do after they have sent it.
        return loss

    def iteration(self, schedule: str, first: int = 0) -> None:
        """One iteration and its optimizer step.

        Args:
            schedule: ``F`` is the forward of the next micro-batch, ``B`` the oldest one's backward.
            first: Number of the first micro-batch.
        """
        self.begin_iteration()
        self.results += run_in_order(schedule, self.forward, first)
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        self.results += [parameter.main_grad.clone() for parameter in trained]
        self.results += [buffer.clone() for buffer in self.module.buffers()]
        self.results.append(torch.get_rng_state())
        with torch.no_grad():
            for parameter in trained:
                parameter.sub_(parameter.main_grad, alpha=0.01)


def fill_free_slots(training: Training) -> None:
    """Fill the memory of free slots with NaN."""
    for graphs in training.graphs.of_size.values():
        for slot in graphs.slots:
            assert slot.memory.is_free
            with torch.no_grad():
                for tensor in (slot.hidden, slot.output, slot.grad_output, slot.grad_hidden):
                    tensor.fill_(float("nan"))


def equal(left: Training, right: Training) -> bool:
    """Whether all results are bitwise equal, and none is missing."""
    pairs = zip(left.results, right.results, strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


def trained(num_slots: Optional[int], schedules: list[str] = SCHEDULES, **options: Any) -> Training:
    """A training after an iteration of each schedule."""
    training = Training(num_slots, **options)
    for number, schedule in enumerate(schedules):
        training.iteration(schedule, first=STEP * number)
    return training


def captured(num_slots: int, **options: Any) -> Training:
    """A training in its second iteration: captured, before any micro-batch."""
    training = trained(num_slots, ["FB"], **options)
    training.begin_iteration()
    return training
