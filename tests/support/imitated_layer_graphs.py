# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Transformer Engine's graphs of layers without a GPU: a replay runs the captured function again.

Inputs are copied into static tensors as in a replay, so a set of graphs that is used by two
micro-batches at once gives wrong gradients here too. Copies of the engine are captured and are not
replayed: what moves in graphs is counted, but its bytes never leave.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from megatron.slipstream.fine_grained_activation_offload.cpu_backends import CpuBackend

_MODULES = ("transformer_engine", "transformer_engine.pytorch")


@contextlib.contextmanager
def imitated_layer_graphs() -> Iterator[None]:
    """Inside, megatron-core captures and replays layers without Transformer Engine.

    With a GPU nothing changes: the graphs are those of Transformer Engine.
    """
    if torch.cuda.is_available():
        yield
        return
    from megatron.core.transformer import cuda_graphs, transformer_layer

    layer = transformer_layer.TransformerLayer
    arguments_of = layer._get_te_cuda_graph_replay_args

    def with_engine(self: Any, *arguments: Any, **options: Any) -> Any:
        # It imports Transformer Engine without using it.
        with patch.dict(sys.modules, dict.fromkeys(_MODULES, MagicMock())):
            return arguments_of(self, *arguments, **options)

    with (
        patch.object(cuda_graphs, "HAVE_TE_GRAPHS", True),
        patch.object(cuda_graphs, "make_graphed_callables", make_graphed_callables, create=True),
        patch.object(transformer_layer, "is_te_min_version", lambda *_: True),
        patch.object(cuda_graphs, "is_te_min_version", lambda *_: True),
        patch.object(torch.cuda, "Event", MagicMock),
        patch.object(layer, "_get_te_cuda_graph_replay_args", with_engine),
    ):
        yield


def make_graphed_callables(
    layers: Sequence[torch.nn.Module],
    sample_args: Sequence[tuple[torch.Tensor]],
    *,
    sample_kwargs: Sequence[Mapping[str, torch.Tensor]],
    num_warmup_iters: int,
    _order: Sequence[int],
    _num_layers_per_chunk: Sequence[int],
    **_: Any,
) -> tuple[Callable[..., Any], ...]:
    """Warm up and capture one micro-batch of the layers of one chunk."""
    assert list(_order) == [1, -1]
    assert list(_num_layers_per_chunk) == [len(layers)]
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    calls = list(zip(layers, sample_args, sample_kwargs, strict=True))
    tracker = get_cuda_rng_tracker()
    states = torch.get_rng_state(), tracker.get_states()
    for _ in range(num_warmup_iters):
        _run_all(calls)
    with patch.object(CpuBackend, "is_capturing", lambda _: True):
        _run_all(calls)
    torch.set_rng_state(states[0])
    tracker.set_states(states[1])
    return tuple(_Graph(*call) for call in calls)


def _run_all(calls: Sequence[tuple[torch.nn.Module, Any, Any]]) -> None:
    outputs = [tree_flatten(layer(*args, **kwargs))[0] for layer, args, kwargs in calls]
    for of_layer in reversed(outputs):
        grads = [o for o in of_layer if o.requires_grad]
        torch.autograd.backward(grads, [torch.zeros_like(o) for o in grads])
    for layer, (hidden,), _ in calls:
        hidden.grad = None
        layer.zero_grad(set_to_none=True)


class _Graph:
    """One layer's graphs of one micro-batch."""

    def __init__(
        self, layer: Any, args: tuple[torch.Tensor], kwargs: Mapping[str, torch.Tensor]
    ) -> None:
        self.layer, self.kwargs = layer, kwargs
        (self.hidden,) = args
        self.parameters = [item for item in layer.parameters() if item.requires_grad]
        self.taped: Any = None
        self.returned: Any = None
        """The structure of what the function returned: one tensor, or several."""
        self.is_reset = False

    def __call__(self, hidden: torch.Tensor, **options: Any) -> Any:
        assert not self.is_reset
        tensors = [options[name] for name in self.kwargs]
        outputs = _Replay.apply(self, hidden, *tensors, *self.parameters)
        return tree_unflatten(outputs, self.returned)

    def reset(self) -> None:
        """As Transformer Engine's."""
        self.is_reset = True

    def run(self) -> tuple[torch.Tensor, ...]:
        """The captured function once more, on the static inputs."""
        from megatron.core.transformer import cuda_graphs

        from megatron.slipstream.integration.graphs.layer_copies import LayerCopies

        with (
            torch.enable_grad(),
            patch.object(cuda_graphs, "_IS_GRAPH_CAPTURING", True),
            patch.object(LayerCopies, "engine_of", lambda *_: None),
            _nothing_moves(),
        ):
            outputs = self.layer._te_cuda_graph_capture(self.hidden, **self.kwargs)
        flat, self.returned = tree_flatten(outputs)
        return tuple(flat)

    def gradients(self, outputs: Sequence[torch.Tensor], grads: Sequence[Any]) -> list[Any]:
        """Of the static input and the parameters, by ``backward()`` as in Transformer Engine."""
        from megatron.core.transformer import cuda_graphs

        pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if o.requires_grad]
        inputs = [self.hidden, *self.parameters]
        before = [item.grad for item in inputs]
        for item in inputs:
            item.grad = None
        # Hooks of data parallelism do nothing during a capture.
        with patch.object(cuda_graphs, "_IS_GRAPH_CAPTURING", True):
            torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        found = [item.grad for item in inputs]
        for item, grad in zip(inputs, before, strict=True):
            item.grad = grad
        return found


@contextlib.contextmanager
def _nothing_moves() -> Iterator[None]:
    from megatron.slipstream.integration.seam import model_router

    manager = model_router.installed()
    with contextlib.nullcontext() if manager is None else manager.suspended():
        yield


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: _Graph, hidden: torch.Tensor, *rest: torch.Tensor) -> Any:
        static_inputs = (graph.hidden, *graph.kwargs.values())
        for static, tensor in zip(static_inputs, (hidden, *rest), strict=False):
            if static is not tensor:
                static.data.copy_(tensor)
        outputs = graph.run()
        graph.taped = outputs
        ctx.graph = graph
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        graph = ctx.graph
        outputs, graph.taped = graph.taped, None
        found = graph.gradients(outputs, grads)
        return (None, found[0], *(None for _ in graph.kwargs), *found[1:])
