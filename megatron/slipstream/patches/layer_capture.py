# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Decorators by which the CUDA graphs of layers take packed sequences.

What those of a layer's methods call is its ``packed``: the ``PackedLayers`` of its chunk, None
unless they take packed sequences. Nothing of megatron-core is imported here, since its layers are
imported before its schedules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Optional

import torch

# Methods of a layer


def learns_arguments(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``forward``: the first calls record the arguments to capture."""

    @functools.wraps(forward)
    def run(layer: Any, *arguments: Any, **options: Any) -> Any:
        if layer.packed is not None and layer.training and torch.is_grad_enabled():
            layer.packed.learn(layer, *arguments, **options)
        return forward(layer, *arguments, **options)

    return run


def needs_free_graphs(should_call: Callable[..., Any]) -> Callable[..., bool]:
    """Decorate ``_should_call_te_cudagraph``: a micro-batch without free graphs runs eagerly."""

    @functools.wraps(should_call)
    def is_graphed(layer: Any, *arguments: Any, **options: Any) -> bool:
        if not should_call(layer, *arguments, **options):
            return False
        packed = layer.packed
        if packed is None or not layer.cuda_graphs or not packed.is_captured:
            return True
        return bool(packed.has_slot_for(layer))

    return is_graphed


def keeps_padding_mask(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``_forward_mlp``, which gets no mask in a capture or a replay."""

    @functools.wraps(forward)
    def run(layer: Any, *arguments: Any, **options: Any) -> Any:
        if layer.packed is not None and layer.packed.mask_now is not None:
            options.setdefault("padding_mask", layer.packed.mask_now)
        return forward(layer, *arguments, **options)

    return run


def captures_packed(run: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``_te_cuda_graph_capture``: static inputs stand for the layer's arguments."""

    @functools.wraps(run)
    def capture(layer: Any, *arguments: Any, **inputs: Any) -> Any:
        packed, plain = layer.packed, functools.partial(run, layer)
        if packed is None or not packed.has_learned(layer):
            return plain(*arguments, **inputs)
        return packed.capture(layer, plain, *arguments, **inputs)

    return capture


def replays_packed(run: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``_te_cuda_graph_replay``: arguments are copied to the graphs' static inputs."""

    @functools.wraps(run)
    def replay(layer: Any, *arguments: Any, **options: Any) -> Any:
        packed, plain = layer.packed, functools.partial(run, layer)
        if packed is None or not packed.is_captured:
            return plain(*arguments, **options)
        return packed.replay(layer, plain, *arguments, **options)

    return replay


def passes_static_inputs(run: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``_get_te_cuda_graph_replay_args``: static inputs are among the arguments."""

    @functools.wraps(run)
    def arguments_of(
        layer: Any, *arguments: Any, **inputs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        positional, named = run(layer, *arguments, **inputs)
        if layer.packed is not None:
            named = {**named, **layer.packed.inputs_now}
        return positional, named

    return arguments_of


# Methods of ``TECudaGraphHelper``


def capture_packed(original: Any) -> Any:
    """Decorate ``create_cudagraphs``: layers are captured with packed sequences."""

    @functools.wraps(original)
    def create(helper: Any) -> None:
        packed = _packed(helper)
        if packed is None:
            original(helper)
        else:
            packed.capture_with(helper)

    return create


def delete_packed(original: Any) -> Any:
    """Decorate ``delete_cuda_graphs``: the graphs of all sizes are deleted."""

    @functools.wraps(original)
    def delete(helper: Any) -> None:
        packed = _packed(helper)
        if packed is not None:
            packed.delete_with(helper)
        original(helper)

    return delete


def _packed(helper: Any) -> Optional[Any]:
    """Return the ``PackedLayers`` of a layer that has run with packed sequences, or None."""
    for layer in helper.flattened_callables:
        packed = getattr(layer, "packed", None)
        if packed is not None and packed.has_learned(layer):
            return packed
    return None
