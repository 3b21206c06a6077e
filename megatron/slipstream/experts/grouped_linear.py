# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""One linear layer per expert, over consecutive rows whose group boundaries stay on the device.

Forward, data gradient and weight gradient are one grouped GEMM each. Their shapes depend only on
the total number of rows, so the host does not need the rows per expert, and a CUDA graph replays
with other counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

import torch
from torch.nn import functional

TakeGradient = Callable[[torch.Tensor], Optional[torch.Tensor]]
"""Receives a weight's gradient; returns the gradient for autograd, or None."""


def grouped_linear(
    tokens: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor,
    take_gradient: Optional[TakeGradient] = None,
) -> torch.Tensor:
    """Apply each expert's weight to its rows.

    On a GPU, only bf16 on Hopper and datacenter Blackwell is sync-free: otherwise torch reads
    ``offsets`` on the host.

    Args:
        tokens: ``[num_rows, in_features]``, sorted by expert.
        weight: ``[num_experts, out_features, in_features]``, same dtype.
        offsets: int32 ``[num_experts]``, the end (exclusive) of each expert's rows. Rows past the
            last are not read, and their outputs and gradients stay uninitialized.
        take_gradient: Receives the gradient of ``weight`` in its dtype, instead of autograd.

    Returns:
        ``[num_rows, out_features]``.
    """
    output: torch.Tensor = _GroupedLinear.apply(tokens, weight, offsets, take_gradient)
    return output


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tokens: torch.Tensor,
        weight: torch.Tensor,
        offsets: torch.Tensor,
        take_gradient: Optional[TakeGradient],
    ) -> torch.Tensor:
        ctx.save_for_backward(tokens, weight, offsets)
        ctx.take_gradient = take_gradient
        return functional.grouped_mm(tokens, weight.transpose(1, 2), offs=offsets)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        gradient = gradients[0].contiguous()
        tokens, weight, offsets = ctx.saved_tensors
        of_tokens = of_weight = None
        if ctx.needs_input_grad[0]:
            of_tokens = functional.grouped_mm(gradient, weight, offs=offsets)
        if ctx.needs_input_grad[1]:
            of_weight = functional.grouped_mm(gradient.t(), tokens, offs=offsets)
            if ctx.take_gradient is not None:
                of_weight = ctx.take_gradient(of_weight)
        return of_tokens, of_weight, None, None
