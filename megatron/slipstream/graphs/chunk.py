# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A model chunk as its graphs see it, and its parameters during a capture.

[Note: Parameters of a capture]
While a slot is captured, every parameter is replaced by another one with the same memory. Backward
accumulates gradients in these, on the stream of the capture and without the data parallel
wrapper's hooks. Their own hooks add each gradient to ``main_grad`` at the same point, as part of
the graph. So autograd runs as in ``backward()``, which recomputation requires, and outside of
graphs it does not handle parameters: the host time of a replay does not depend on the number of
layers.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Optional

import torch

from megatron.slipstream.graphs.offload import ChunkOffloading

Constants = Callable[[], AbstractContextManager[None]]


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A model chunk, as its graphs see it.

    Args:
        name: The chunk's name, for messages.
        module: Holds the chunk's parameters, each with a ``main_grad``.
        run: Computes hidden states from hidden states and other arguments by name, none of which
            gets a gradient.
        before_replay: Called before each forward replay, instead of hooks of the modules.
        after_replay: Called after each backward replay, instead of hooks of the parameters.
        save_state: Called before the chunk runs for a capture. Returns a function that is called
            afterwards to restore the state that runs change, other than gradients.
        offloading: Offloads activations inside the graphs; None to keep them on the device.
        hold_constants: Called once for each capture. Returns a function, held as long as the
            graphs, whose context makes the chunk use the same tensors again that it caches.
        constant_arguments: Names of tensors among the arguments that have the same contents in all
            calls with the same shapes. Graphs read those of the call that they are captured with.
    """

    name: str
    module: torch.nn.Module
    run: Callable[..., torch.Tensor]
    before_replay: Callable[[], None] = lambda: None
    after_replay: Callable[[], None] = lambda: None
    save_state: Callable[[], Callable[[], None]] = lambda: lambda: None
    offloading: Optional[ChunkOffloading] = None
    hold_constants: Callable[[], Constants] = lambda: contextlib.nullcontext
    constant_arguments: frozenset[str] = frozenset()


class CaptureParameters:
    """The parameters of a chunk during a capture; ``ValueError`` if one has no ``main_grad``."""

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        self._others: dict[torch.nn.Parameter, Any] = {}
        for full_name, parameter in module.named_parameters():
            if parameter.requires_grad and getattr(parameter, "main_grad", None) is None:
                raise ValueError(
                    f"{full_name} of {name} has no main_grad, to which CUDA graphs of chunks add "
                    "gradients; wrap the model in megatron-core's DistributedDataParallel"
                )
            other: Any = torch.nn.Parameter(parameter.detach(), parameter.requires_grad)
            other.__dict__.update(parameter.__dict__)
            other.grad_added_to_main_grad = False
            if other.requires_grad:
                other.register_post_accumulate_grad_hook(_add_to_main_grad)
            self._others[parameter] = other
        places = {id(place): place for part in module.modules() for place in _places_in(part)}
        self._own = [
            (place, own_name, parameter)
            for place in places.values()
            for own_name, parameter in place.items()
            # Objects may also refer to parameters of other modules.
            if isinstance(parameter, torch.nn.Parameter) and parameter in self._others
        ]
        """The places and names of each parameter; a shared one has several."""

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        try:
            for place, name, parameter in self._own:
                place[name] = self._others[parameter]
            yield
        finally:
            for place, name, parameter in self._own:
                place[name] = parameter


def _places_in(module: torch.nn.Module) -> Iterator[dict[str, Any]]:
    """Yield what holds parameters: the module, and its objects that are no modules.

    A Mamba mixer has such an object, which gives each context-parallel rank its part of them.
    """
    yield module._parameters
    for item in vars(module).values():
        if isinstance(getattr(item, "__dict__", None), dict):
            yield vars(item)


@torch.no_grad()
def _add_to_main_grad(parameter: Any) -> None:
    # Layers that add to main_grad themselves return a dummy gradient.
    if not parameter.grad_added_to_main_grad:
        parameter.main_grad.add_(parameter.grad)
    parameter.grad = None
