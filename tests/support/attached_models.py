# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A hand-written transformer and a plain training loop, to test ``attach()`` on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Optional

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron.slipstream.attached.handle import Attached, attach
from megatron.slipstream.fine_grained_activation_offload.report import ModuleCounters
from megatron.slipstream.options.fields import OffloadConfig

WIDTH = 32
VOCABULARY = 50
LAZY = "cpu-lazy"
BACKENDS = ["cpu", LAZY]


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.out = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn_norm = torch.nn.LayerNorm(WIDTH)
        self.attn = Attention()
        self.mlp_norm = torch.nn.LayerNorm(WIDTH)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 4 * WIDTH),
            torch.nn.GELU(),
            torch.nn.Dropout(0.1),
            torch.nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(torch.nn.Module):
    """Takes token ids ``[b, s]``, returns logits ``[b, s, VOCABULARY]``.

    Args:
        num_layers: Layers.
        checkpointing: None, or ``use_reentrant`` of the checkpoint around every layer.
    """

    def __init__(self, num_layers: int = 4, checkpointing: Optional[bool] = None) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(num_layers))
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)
        self.checkpointing = checkpointing

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = self.run(layer, x)
        return self.head(x)

    def run(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Run one layer; subclasses override it to change the code around layers."""
        if self.checkpointing is None:
            return layer(x)
        return checkpoint(layer, x, use_reentrant=self.checkpointing)


class Chain(torch.nn.Module):
    """Runs its parts in order."""

    def __init__(self, part: Callable[[], torch.nn.Module], num_parts: int = 3) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList(part() for _ in range(num_parts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x


def numbers(seed: int, *shape: int) -> torch.Tensor:
    """Random numbers that depend only on the seed and the shape."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make(
    build: Callable[[], torch.nn.Module], patterns: Any = None, *arguments: Any, **options: Any
) -> Any:
    """A model with the same weights on every call, attached if there are patterns."""
    torch.manual_seed(5)
    model = build()
    if patterns is not None:
        attach_to(model, patterns, *arguments, **options)
    return model


def make_attached(
    build: Callable[[], torch.nn.Module], *arguments: Any, **options: Any
) -> tuple[Any, Attached]:
    """The same model, and the result of :func:`attach_to` for it."""
    model = make(build)
    return model, attach_to(model, *arguments, **options)


def attach_to(
    model: torch.nn.Module, patterns: Any, backend: str = "cpu", **options: Any
) -> Attached:
    """Attach so that tensors of every size move."""
    options.setdefault("min_offloaded_tensor_size", 1)
    return attach(model, patterns, OffloadConfig(offload_backend=backend), **options)


def micro_batch(index: int) -> torch.Tensor:
    """Token ids ``[2, 8]`` of one micro-batch."""
    return torch.randint(0, VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(index))


def loss_of(model: torch.nn.Module, index: int) -> torch.Tensor:
    """The loss of one micro-batch."""
    ids = micro_batch(index)
    return torch.nn.functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    """A copy of every gradient; of a sharded gradient, this rank's part."""
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [getattr(grad, "to_local", lambda grad=grad: grad)().clone() for grad in grads]


Step = Callable[[torch.nn.Module, int], list[torch.Tensor]]


def train(
    model: torch.nn.Module, step: Step, num_iterations: int = 3, seed: int = 0
) -> list[torch.Tensor]:
    """The losses and gradients of some iterations with an optimizer."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    results: list[torch.Tensor] = []
    for iteration in range(num_iterations):
        torch.manual_seed(seed + iteration)  # of the dropout
        results += [loss.detach().clone() for loss in step(model, iteration)]
        results += gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    return results


def one_backward_each(model: torch.nn.Module, iteration: int) -> list[torch.Tensor]:
    """Gradient accumulation over two micro-batches."""
    losses = []
    for index in range(2):
        loss = loss_of(model, 10 * iteration + index)
        loss.backward()
        losses.append(loss)
    return losses


@cache
def plain_results(
    build: Callable[[], torch.nn.Module], step: Step = one_backward_each, num_iterations: int = 3
) -> list[torch.Tensor]:
    """What :func:`train` gives of a model without the engine; computed once for all tests."""
    return train(make(build), step, num_iterations)


def train_as_plain(
    build: Callable[[], torch.nn.Module],
    patterns: Any,
    step: Step = one_backward_each,
    backend: str = LAZY,
    *,
    plain: Optional[Callable[[], torch.nn.Module]] = None,
    num_iterations: int = 3,
) -> Attached:
    """Train an attached model; all losses and gradients must equal those of ``plain``.

    Args:
        build: Makes the model to attach.
        patterns: Names of the modules to attach.
        step: An iteration without the optimizer.
        backend: Backend of the engine.
        plain: Makes the model to compare with; ``build`` if None.
        num_iterations: Number of iterations.
    """
    model, attached = make_attached(build, patterns, backend)
    results = train(model, step, num_iterations)
    assert equal(results, plain_results(plain or build, step, num_iterations))
    return attached


def equal(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    """Whether two lists of tensors are equal bit by bit (NaN equals nothing)."""
    return len(left) == len(right) > 0 and all(
        torch.equal(a, b) for a, b in zip(left, right, strict=True)
    )


def counters(attached: Attached) -> dict[str, ModuleCounters]:
    """The counters of the last iteration by label."""
    return attached.report().ranks[0].modules


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was warned of."""
    return [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]


def has_own_hooks() -> bool:
    """Whether saved-tensor hooks are still set."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
