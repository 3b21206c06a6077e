# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A model chunk as the engine sees it, and its optional parts."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Optional, Protocol

import torch

from megatron.slipstream.graphs.offload import ChunkOffloading


def _nothing() -> None:
    pass


class CaptureHooks(Protocol):
    """Contexts for the passes of one slot while they are captured."""

    @property
    def leaves_copies(self) -> bool:
        """Whether the forward pass ends before its copies do: they are the slot memory's tail."""

    def forward(self) -> AbstractContextManager[None]:
        """The context of the forward pass."""

    def backward(self) -> AbstractContextManager[None]:
        """The context of the backward pass."""

    def close(self) -> None:
        """Called when the graphs are deleted."""


class NoCaptureHooks:
    """Hooks that do nothing."""

    leaves_copies = False

    def forward(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    backward = forward

    def close(self) -> None:
        pass


def _no_state() -> Callable[[], None]:
    return _nothing


class Constants(Protocol):
    """Tensors that the chunk caches, held as long as its graphs."""

    def in_place(self) -> AbstractContextManager[None]:
        """Make the chunk use the held tensors, and hold those that it creates."""


class _NoConstants:
    def in_place(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A model chunk, as the engine sees it.

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
        make_constants: Called once for each capture.
    """

    name: str
    module: torch.nn.Module
    run: Callable[..., torch.Tensor]
    before_replay: Callable[[], None] = _nothing
    after_replay: Callable[[], None] = _nothing
    save_state: Callable[[], Callable[[], None]] = _no_state
    offloading: Optional[ChunkOffloading] = None
    make_constants: Callable[[], Constants] = _NoConstants
