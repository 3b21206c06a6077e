# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Runs a function of rows tile by tile, forward and again in backward.

[Note: A tile is computed again]
Forward runs each tile without saving anything but the function's inputs, and backward runs each
once more with gradients, so that neither holds more than one tile's tensors. For the loss, backward
could instead read gradients that forward computes, as Liger's fused kernel does: it spares the
output layer's third matrix product, some 2% of a step of an 8-billion-parameter model. But the
gradient of the weights is a sum over tokens of the logits' gradient times the gradient of each
token's loss, and a model returns the losses of tokens, ``[b, s]``: mask and scale come later, in
the schedule's loss function. Forward would have to guess them. Liger's takes a mean, on one rank,
and rounds the weights' gradient to their type in each piece; here the vocabulary is divided among
tensor-parallel ranks, and gradients are added to ``main_grad``. So what runs in a tile is the
model's own output layer and loss, whichever they are, and their rounding is that of the model.

[Note: Gradients of parameters]
Each tile's gradients are asked for with ``autograd.grad``, so no hook of a parameter runs; autograd
then gets one gradient per parameter, and the hooks of data parallelism run once, after the last
tile. Tiles are added in their order: by the layer itself (``gradient_accumulation_fusion``), else
to ``main_grad``, else to the gradient of the first tile.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch

Bounds = tuple[tuple[int, int], ...]


Needs = Callable[[slice], Sequence[bool]]
"""Returns for each parameter whether some rows depend on it."""


@dataclass(frozen=True)
class Work:
    """A function of rows, and how it is divided."""

    run: Callable[..., torch.Tensor]
    """Called with a slice of the rows and the inputs' rows; returns as many rows. It must compute
    each row alone, and the same in forward and backward: it draws no random numbers."""
    bounds: Bounds
    """First and end row of each tile; the end of the last one is the number of rows."""
    num_inputs: int
    """Number of inputs that have these rows. What follows are parameters."""
    needs: Needs
    """Of the parameters that follow."""


def run_by_tiles(
    run: Callable[..., torch.Tensor],
    bounds: Bounds,
    inputs: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
    around: Callable[..., Any] = lambda apply: apply,
    needs: Optional[Needs] = None,
) -> torch.Tensor:
    """Run a function of rows tile by tile: [Note: A tile is computed again].

    Args:
        run: :attr:`Work.run`.
        bounds: :attr:`Work.bounds`.
        inputs: Tensors ``[rows, ...]``, which are saved for backward.
        parameters: Other tensors that ``run`` reads and that may need gradients.
        around: Wraps the call that saves the inputs.
        needs: Of ``parameters``, so that no tile adds zeros to a gradient; None: all rows depend on
            all of them.
    """
    is_trained = [parameter.requires_grad for parameter in parameters]
    trained = list(itertools.compress(parameters, is_trained))

    def needs_trained(rows: slice) -> Sequence[bool]:
        if needs is None:
            return [True] * len(trained)
        return list(itertools.compress(needs(rows), is_trained))

    work = Work(run, bounds, len(inputs), needs_trained)
    output: torch.Tensor = around(_ByTiles.apply)(work, *inputs, *trained)
    return output


class _ByTiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, work: Work, *tensors: torch.Tensor) -> torch.Tensor:
        inputs = tensors[: work.num_inputs]
        ctx.work, ctx.parameters = work, tensors[work.num_inputs :]
        ctx.save_for_backward(*inputs)
        output: Optional[torch.Tensor] = None
        for first, end in work.bounds:
            rows = slice(first, end)
            tile = work.run(rows, *(tensor[rows] for tensor in inputs))
            if output is None:
                output = tile.new_empty((work.bounds[-1][1], *tile.shape[1:]))
            output[rows] = tile
            del tile
        assert output is not None
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Optional[torch.Tensor], ...]:
        work: Work = ctx.work
        inputs = ctx.saved_tensors
        is_asked = ctx.needs_input_grad[1 : 1 + work.num_inputs]
        gradients = [
            torch.empty_like(tensor) if asked else None
            for tensor, asked in zip(inputs, is_asked, strict=True)
        ]
        sums = [_GradientSum(parameter) for parameter in ctx.parameters]
        for first, end in work.bounds:
            rows = slice(first, end)
            with torch.enable_grad():
                tiles = [
                    tensor[rows].detach().requires_grad_(asked)
                    for tensor, asked in zip(inputs, is_asked, strict=True)
                ]
                output = work.run(rows, *tiles)
            needed = _needed(sums, work.needs(rows), end == work.bounds[-1][1])
            asked_for = [*itertools.compress(tiles, is_asked), *(n.parameter for n in needed)]
            of_output = gradient[rows].contiguous()
            parts = [*torch.autograd.grad(output, asked_for, of_output, allow_unused=True)]
            del output, tiles, asked_for
            for whole in gradients:
                if whole is not None:
                    part = parts.pop(0)
                    whole[rows] = 0 if part is None else part
            for total, part in zip(needed, parts, strict=True):
                total.add(part)
            del parts, part
        return (None, *gradients, *(total.end() for total in sums))


def _needed(
    sums: Sequence[_GradientSum], needs: Sequence[bool], is_last: bool
) -> list[_GradientSum]:
    """Return the sums that a tile adds to; the last one also to those that no tile needs."""
    pairs = zip(sums, needs, strict=True)
    return [total for total, is_needed in pairs if is_needed or (is_last and not total.is_asked)]


class _GradientSum:
    """The sum of a parameter's gradients over tiles: [Note: Gradients of parameters]."""

    def __init__(self, parameter: Any) -> None:
        self.parameter = parameter
        self.is_asked = False
        """Whether a tile was asked for its gradient."""
        self._sum: Optional[torch.Tensor] = None
        self._has_flag = hasattr(parameter, "grad_added_to_main_grad")
        self._goes_to_main = self._has_flag and getattr(parameter, "main_grad", None) is not None
        self._is_added = False
        if self._has_flag:
            # It tells whether the layer itself adds to main_grad.
            self._before = parameter.grad_added_to_main_grad
            parameter.grad_added_to_main_grad = False

    def add(self, gradient: Optional[torch.Tensor]) -> None:
        """Add the gradient of the next tile; None if the tile does not depend on it."""
        self.is_asked = True
        if gradient is None:
            return
        if self._has_flag and self.parameter.grad_added_to_main_grad:
            self._is_added = True
        elif self._goes_to_main:
            self.parameter.main_grad.add_(gradient)
            self._is_added = True
        elif self._sum is None:
            # A matrix product makes its own tensor. A vector may be a view of the gradient of the
            # output, or be given to several parameters.
            self._sum = gradient if gradient.dim() > 1 else gradient.clone()
        else:
            self._sum.add_(gradient)

    def end(self) -> Optional[torch.Tensor]:
        """Return the gradient for autograd; None if no tile depends on the parameter."""
        parameter = self.parameter
        if self._has_flag:
            parameter.grad_added_to_main_grad = self._is_added or self._before
        if not self._is_added:
            return self._sum
        # Hooks need a gradient; with this attribute, they add even what is added already.
        if getattr(parameter, "zero_out_wgrad", False):
            return torch.zeros_like(parameter)
        return torch.empty_like(parameter)
