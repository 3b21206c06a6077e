# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A group's mark in the autograd graph, for megatron-core's layers or any other module.

[Note: One mark per group]
A group has one mark in the graph, at its end, where forward has saved everything and backward
starts to need it. There is no node at its start, since that would change the order of a sum: if the
marked tensor has other consumers, its gradient would be accumulated in a different order, and so
round differently than without offloading. megatron-core adds a start node only if
``pop_forward_chunk`` returns an object, so it returns None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Optional, Protocol

import torch

from megatron.slipstream.fine_grained_activation_offload.group import OffloadTensorGroup


class GroupOwner(Protocol):
    """The interface of a mark's owner."""

    def commit_group(
        self, name: str, given_up: Sequence[torch.Tensor] = ()
    ) -> Optional[OffloadTensorGroup]: ...
    def use_group(self, group: OffloadTensorGroup) -> None: ...


class CommitMark:
    """Marks a group's end: forward has saved everything; backward needs it from here on."""

    def __init__(self, owner: GroupOwner) -> None:
        self._owner = owner
        self._group: Optional[OffloadTensorGroup] = None

    def on_group_commit_forward(
        self, name: str, forced_released_tensors: Sequence[torch.Tensor] = ()
    ) -> None:
        """Commit the group, which has saved everything.

        ``forced_released_tensors`` are tensors whose memory may be freed despite other references.
        Memory is normally freed with its last reference, so that no operation can read a freed
        tensor. But if a schedule holds tensors that it no longer reads, their memory is freed
        anyway: [Note: Layers that run in nodes].
        """
        self._group = self._owner.commit_group(name, forced_released_tensors)

    def on_group_commit_backward(self, name: str) -> None:
        """Note that the group's backward operations follow."""
        if self._group is not None:
            self._owner.use_group(self._group)


def at_first_gradient(tensors: Iterable[torch.Tensor], come: Callable[[], None]) -> None:
    """Call ``come`` once, when backward has the gradient of any of these tensors.

    Those that do not require gradients are skipped; ``come`` must not change gradients.
    """
    waiting = [come]

    def arrive(_: torch.Tensor) -> None:
        if waiting:  # Backward reaches each of them, possibly twice.
            waiting.pop()()

    for tensor in tensors:
        if tensor.requires_grad:
            tensor.register_hook(arrive)


class _MarkFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, come: Callable[[], object]) -> torch.Tensor:
        ctx.come = come
        return tensor

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        ctx.come()
        return grad_outputs[0], None


def mark(tensor: torch.Tensor, come: Callable[[], object]) -> torch.Tensor:
    """Return ``tensor`` with a graph node that calls ``come`` when backward reaches it."""
    marked: torch.Tensor = _MarkFunction.apply(tensor, come)
    return marked


CHECKPOINT_INPUTS = "checkpoint_inputs"
"""Name of the groups of tensors that checkpoints save."""


def run_checkpoint(engine: Any, run: Callable[[], Any]) -> Any:
    """Run a checkpoint; the tensors that it saves form a group if the engine moves them.

    ``run`` calls an autograd function that runs part of the model without gradients and saves its
    inputs.
    """
    if not engine.moves_checkpoint_inputs or engine.owner_of_marks() is not engine:
        return run()
    engine.start_group(CHECKPOINT_INPUTS)
    # Without the flag: the modules inside save nothing, and must run as in the recomputation.
    engine.regions.enter(engine.take_started(), engine, sets_flag=False)
    try:
        output = run()
    finally:
        engine.leave()
    # Backward's first read comes when it reaches the checkpoint, so no mark is needed: [Note:
    # Recomputation reads first].
    engine.commit_group(CHECKPOINT_INPUTS)
    return output
