# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Random models that are valid but unusual: the same one for each seed.

Every block maps ``[BATCH, LENGTH, WIDTH]`` to the same shape. Blocks use autograd in unusual ways:
they share modules and weights, loop, checkpoint inside, change tensors in place, compute gradients
in forward, have hooks, or return views.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

BATCH, LENGTH, WIDTH = 3, 4, 8


class Fault(Exception):
    """Raised where a program makes the model fail."""


class Mlp(torch.nn.Module):
    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, 2 * WIDTH)
        self.down = torch.nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = torch.nn.Dropout(draw.choice([0.0, 0.2]))
        kinds = [torch.nn.GELU(), torch.nn.SiLU(), torch.nn.ReLU(inplace=True), torch.nn.Tanh()]
        self.activation = draw.choice(kinds)
        self.is_residual = draw.random() < 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(self.dropout(self.activation(self.up(x))))
        return x + y if self.is_residual else y


class Attention(torch.nn.Module):
    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.num_heads = draw.choice([1, 2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        weights = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), -1)
        return (weights @ v).transpose(1, 2).flatten(-2)


class Norm(torch.nn.Module):
    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.is_frozen = draw.random() < 0.3
        if self.is_frozen:
            self.norm.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


class Views(torch.nn.Module):
    """Saves parts of one storage, and returns a view."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(WIDTH))
        self.kind = draw.choice(["halves", "expand", "permute", "gather"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.scale
        if self.kind == "halves":
            left, right = y.chunk(2, -1)
            return torch.cat([left * right, right.sin()], -1)
        if self.kind == "expand":
            mean = y.mean(1, keepdim=True).expand(-1, LENGTH, -1)
            return mean * y
        if self.kind == "permute":
            z = y.permute(2, 0, 1).contiguous()
            return (z * z.flip(0)).permute(1, 2, 0)
        order = torch.arange(LENGTH - 1, -1, -1)
        return y.index_select(1, order) * y.cumsum(1)


class Spectrum(torch.nn.Module):
    """Complex and conjugate tensors."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.filter = torch.nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))
        self.conjugates = draw.random() < 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(x, norm="ortho")
        spectrum = spectrum.conj() if self.conjugates else spectrum
        return torch.fft.irfft(spectrum * self.filter, n=WIDTH, norm="ortho")


class Recurrent(torch.nn.Module):
    """Loops over the sequence with a state; ``in_place`` changes a second one between two uses."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.cell = torch.nn.GRUCell(WIDTH, WIDTH)
        self.weight = torch.nn.Parameter(torch.ones(WIDTH))
        self.in_place = draw.random() < 0.5
        self.seen = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, states = x.new_zeros(x.shape[0], WIDTH), []
        total = x[:, 0].detach().clone()
        for step in x.unbind(1):
            hidden = self.cell(step, hidden)
            if self.in_place:
                self.seen = (self.weight * total).detach().sum()
                total.add_(step.detach())
                states.append(hidden + self.weight * total.clone())
            else:
                states.append(hidden)
        return torch.stack(states, 1)


class DeadBranch(torch.nn.Module):
    """Uses a state, changes it in place, and uses it again; the first result is unused."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(WIDTH))
        self.keeps_first = draw.random() < 0.5
        self.first: Optional[torch.Tensor] = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x.detach().cos()
        first = self.weight * state
        self.first = first if self.keeps_first else None
        state.mul_(x.detach())
        return x + self.weight * state


class InPlace(torch.nn.Module):
    """Changes its result in place; no operation has saved it."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)
        self.clamps = draw.random() < 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        y.add_(x)
        return y.clamp_(-2, 2) if self.clamps else y.mul_(0.5)


class _Scaled(torch.autograd.Function):
    """Saves an input, a result and a number; optionally changes its first input in place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor, in_place: bool) -> torch.Tensor:
        result = x.mul_(scale) if in_place else x * scale
        if in_place:
            ctx.mark_dirty(x)
            ctx.save_for_backward(result, scale)
        else:
            ctx.save_for_backward(x, scale, result)
        ctx.in_place = in_place
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        first, scale, *_ = ctx.saved_tensors
        x = first / scale if ctx.in_place else first
        return gradient * scale, (gradient * x).sum((0, 1)), None


class Custom(torch.nn.Module):
    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.in_place = draw.random() < 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Scaled.apply(x.clone() if self.in_place else x, self.scale, self.in_place)


class Force(torch.nn.Module):
    """Follows the gradient of an energy, computed in forward."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.energy = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1)
        )
        self.detaches = draw.random() < 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return x
        position = x.detach().requires_grad_() if self.detaches or not x.requires_grad else x
        (force,) = torch.autograd.grad(self.energy(position).sum(), position, create_graph=True)
        return x - force


class Wrapped(torch.nn.Module):
    """Runs other blocks: in a checkpoint, with hooks, twice, or using a part of the result."""

    def __init__(self, draw: random.Random, inner: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        self.inner = torch.nn.ModuleList(inner)
        kinds = ["checkpoint", "reentrant", "hooks", "twice", "unused", "container"]
        self.kind = draw.choice(kinds)
        if self.kind == "hooks":
            self.inner[0].register_forward_hook(lambda module, args, output: output * 1.5)
            self.inner[-1].register_full_backward_hook(lambda module, grads, _: (grads[0] * 0.5,))

    def _all(self, x: torch.Tensor) -> torch.Tensor:
        for module in self.inner:
            x = module(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind in ("checkpoint", "reentrant") and torch.is_grad_enabled():
            return checkpoint(self._all, x, use_reentrant=self.kind == "reentrant")
        if self.kind == "hooks" and torch.is_grad_enabled():
            x = x * 1.0
            if x.requires_grad:
                x.register_hook(lambda gradient: gradient * 2)
        if self.kind == "twice":
            return self._all(self._all(x))
        if self.kind == "unused":
            self._all(x)
            return x + self.inner[0](x)
        if self.kind == "container":
            return {"output": (self._all(x), None)}["output"][0]
        return self._all(x)


BLOCKS: tuple[Callable[[random.Random], torch.nn.Module], ...] = (
    *(Mlp, Attention, Norm, Views, Spectrum, Recurrent, DeadBranch, InPlace, Custom, Force),
)


class RandomModel(torch.nn.Module):
    """Takes and returns ``[BATCH, LENGTH, WIDTH]``.

    Args:
        draw: Random source of the structure; weights are from torch's generator.
    """

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.entry = torch.nn.Linear(WIDTH, WIDTH)
        self.parts = torch.nn.ModuleList(self._block(draw) for _ in range(draw.randint(1, 5)))
        shared = [draw.randrange(len(self.parts)) for _ in range(draw.randint(0, 2))]
        self.order = [*range(len(self.parts)), *shared]
        draw.shuffle(self.order)
        """The order of the parts; some of them run several times."""
        self.is_u_shaped = draw.random() < 0.4
        self.head = torch.nn.Linear(WIDTH, WIDTH)
        if draw.random() < 0.4:
            self.head.weight = self.entry.weight
        self.fault_before: Optional[int] = None
        """Forward raises before this step of the order."""
        self.backward_fault_before: Optional[int] = None

    @staticmethod
    def _block(draw: random.Random) -> torch.nn.Module:
        if draw.random() < 0.4:
            inner = [draw.choice(BLOCKS)(draw) for _ in range(draw.randint(1, 2))]
            return Wrapped(draw, inner)
        return draw.choice(BLOCKS)(draw)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, skips = self.entry(x), []
        half = (len(self.order) + 1) // 2
        for step, index in enumerate(self.order):
            if step == self.fault_before:
                raise Fault
            if step == self.backward_fault_before and x.requires_grad:
                x.register_hook(_fail)
            x = self.parts[index](x)
            if self.is_u_shaped:
                if step < half:
                    skips.append(x)
                elif skips:
                    x = x + skips.pop()
        return self.head(x)

    def describe(self) -> str:
        """The structure, for a failure's message."""
        kinds = [
            f"{type(part).__name__}({part.kind}: {[type(m).__name__ for m in part.inner]})"
            if isinstance(part, Wrapped)
            else type(part).__name__
            for part in self.parts
        ]
        return f"parts {kinds}, order {self.order}, U-shaped: {self.is_u_shaped}"


def _fail(_: torch.Tensor) -> None:
    raise Fault


def draw_patterns(draw: random.Random, model: RandomModel) -> list[Any]:
    """Draw names of modules to attach to, at least one of which runs."""
    names = [f"parts.{index}" for index in range(len(model.parts))]
    choices: list[list[Any]] = [
        ["parts.*"],
        [torch.nn.Linear],
        ["entry", "head", *draw.sample(names, draw.randint(1, len(names)))],
        draw.sample(names, draw.randint(1, len(names))),
    ]
    return draw.choice(choices)


def loss_of(output: torch.Tensor, seed: int) -> torch.Tensor:
    """A scalar that weighs every element of the model's output differently."""
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed))
    return (functional.softsign(output) * weights).sum()
