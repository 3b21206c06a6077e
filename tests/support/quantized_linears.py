# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Linear layers in FP8; without a GPU, stand-ins that cache weights like Transformer Engine's.

In the first micro-batch of an iteration they quantize their weight into cached memory, and the
gradient of the weight overwrites the main gradient. In later ones they use the cached weight, and
add to the main gradient. Eager graphs have the flag of the first micro-batch baked in.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from megatron.slipstream.graphs.capture import EagerGraphs, Graph, Recorded, Work

LARGEST = torch.finfo(torch.float8_e4m3fn).max
_BAKED_IN = ("is_first_microbatch", "disable_parameter_transpose_cache")


class QuantizedLinear(torch.nn.Module):
    """``x @ weight.T`` with a quantized weight.

    Args:
        width: Width of input and output.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(width, width) / width**0.5)
        keep_weights_quantized(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return forward(self, x)


def keep_weights_quantized(module: Any) -> None:
    """Give a module with a ``weight`` the attributes that :func:`forward` needs."""
    module.is_first_microbatch = True
    module.disable_parameter_transpose_cache = False
    module.kept = None


def forward(module: Any, x: torch.Tensor) -> torch.Tensor:
    """The layer's forward pass, the parts of megatron-core and Transformer Engine together."""
    is_first = None if module.disable_parameter_transpose_cache else module.is_first_microbatch
    module.is_first_microbatch = False
    quantized = module.kept if is_first is not None else None
    if quantized is None:
        quantized = _quantize(module.weight)
        if is_first is not None:
            module.kept = quantized
    elif is_first:
        for kept, value in zip(quantized, _quantize(module.weight), strict=True):
            kept.data.copy_(value)  # autograd does not see writes of kernels
    result: torch.Tensor = _Product.apply(x, module.weight, *quantized, bool(is_first))
    return result


@torch.no_grad()
def _quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = weight.abs().amax().float() / LARGEST
    return (weight.float() / scale).to(torch.float8_e4m3fn), scale


class _Product(torch.autograd.Function):
    """Adds the weight's gradient to the main gradient itself, and returns a dummy gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        quantized: torch.Tensor,
        scale: torch.Tensor,
        overwrites: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, quantized, scale)
        ctx.weight = weight
        ctx.overwrites = overwrites
        return x @ (quantized.to(x.dtype) * scale.to(x.dtype)).t()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, quantized, scale = ctx.saved_tensors
        weight = ctx.weight
        gradient = (grads[0].flatten(0, -2).t() @ x.flatten(0, -2)).float()
        if ctx.overwrites:
            weight.main_grad.copy_(gradient)
        else:
            weight.main_grad.add_(gradient)
        weight.grad_added_to_main_grad = True
        no_gradient = torch.full_like(weight, float("nan"))
        of_input = grads[0] @ (quantized.to(x.dtype) * scale.to(x.dtype))
        return of_input, no_gradient, None, None, None


def train_in_fp8(block: torch.nn.Module) -> None:
    """Make megatron-core's linear layers of a block behave as in FP8 training.

    With a GPU they do already, except that megatron-core needs Apex to add gradients to main
    gradients itself.
    """
    if torch.cuda.is_available():
        for module in block.modules():
            if hasattr(module, "fuse_wgrad_accumulation"):
                module.fuse_wgrad_accumulation = True
        return
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    def run(module: Any, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return forward(module, x), None

    for module in block.modules():
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
            keep_weights_quantized(module)
            module.forward = partial(run, module)


class MarksBakedIn(EagerGraphs):
    """Eager graphs whose replays run the layers with the flags of the capture.

    Args:
        modules: Modules that contain the layers.
    """

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._layers: list[Any] = [
            layer
            for module in modules
            for layer in module.modules()
            if hasattr(layer, "is_first_microbatch")
        ]

    def record(self, work: Work, pool: Any) -> Recorded:
        marks = _marks(self._layers)
        graph, results = super().record(work, pool)
        return Recorded(_Marked(graph, self._layers, marks), results)


class _Marked(Graph):
    def __init__(self, graph: Graph, layers: list[Any], marks: list[tuple[Any, ...]]) -> None:
        self._graph = graph
        self._layers = layers
        self._marks = marks

    def replay(self) -> None:
        # In a real replay no layer's code runs, so its side effects are undone.
        now = _marks(self._layers)
        _set_marks(self._layers, self._marks)
        try:
            self._graph.replay()
        finally:
            _set_marks(self._layers, now)


def _marks(layers: list[Any]) -> list[tuple[Any, ...]]:
    return [tuple(getattr(layer, name) for name in _BAKED_IN) for layer in layers]


def _set_marks(layers: list[Any], marks: list[tuple[Any, ...]]) -> None:
    for layer, values in zip(layers, marks, strict=True):
        for name, value in zip(_BAKED_IN, values, strict=True):
            setattr(layer, name, value)
