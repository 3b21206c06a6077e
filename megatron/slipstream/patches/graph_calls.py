# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Decorators of a graphable layer's methods that capture and replay its CUDA graphs.

What they call is the layer's ``graph_copies``: None unless it offloads in its graphs. Nothing of
megatron-core is imported here, since its layers are imported before its schedules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def captures_copies(run: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``_te_cuda_graph_capture``: the engine's copies become part of the graphs."""

    @functools.wraps(run)
    def capture(layer: Any, *arguments: Any, **inputs: Any) -> Any:
        copies, plain = layer.graph_copies, functools.partial(run, layer)
        if copies is None:
            return plain(*arguments, **inputs)
        return copies.capture(layer, plain, *arguments, **inputs)

    return capture


def notes_replay(run: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``_te_cuda_graph_replay``: the engine counts what a replay copies."""

    @functools.wraps(run)
    def replay(layer: Any, *arguments: Any, **inputs: Any) -> Any:
        outputs = run(layer, *arguments, **inputs)
        if layer.graph_copies is not None:
            layer.graph_copies.note_replay(layer)
        return outputs

    return replay


def replays_beside_copies(run: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``_get_te_cuda_graph_replay_args``: work after a graph does not wait for copies."""

    @functools.wraps(run)
    def arguments_of(
        layer: Any, *arguments: Any, **inputs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        positional, named = run(layer, *arguments, **inputs)
        if layer.graph_copies is not None:
            named = {**named, **layer.graph_copies.stream_of(layer)}
        return positional, named

    return arguments_of


def replays_with_backward(should_call: Callable[..., Any]) -> Callable[..., bool]:
    """Decorate ``_should_call_te_cudagraph``: a pass without backward runs eagerly.

    It would use the graphs of a micro-batch in flight.
    """

    @functools.wraps(should_call)
    def is_graphed(layer: Any, *arguments: Any, **inputs: Any) -> bool:
        if not should_call(layer, *arguments, **inputs):
            return False
        return not layer.cuda_graphs or torch.is_grad_enabled()

    return is_graphed
