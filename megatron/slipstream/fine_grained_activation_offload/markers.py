# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The mark of a group in autograd, placed by megatron-core's layers or around any other module.

[Note: One mark per group]
A group has one mark in the graph, at its end: there forward has saved everything, and backward
needs it. Its start has no node in the graph. A node there would group the terms of a sum: if the
marked tensor has other readers, its gradient would be summed in another order and rounded
differently than without offloading. megatron-core makes that mark only if ``pop_forward_chunk``
returns an object to call, so it returns None.
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


class MarkedManager(GroupOwner, Protocol):
    """The interface of the manager for marks."""

    def pop_forward_chunk(self, name: str) -> None: ...
    def end_on(self, tensor: torch.Tensor, name: str) -> torch.Tensor: ...
    def __enter__(self) -> Any: ...
    def __exit__(self, *exception: object) -> None: ...


class CommitMark:
    """The end of one group: forward has saved everything, backward needs it from here on."""

    def __init__(self, owner: GroupOwner) -> None:
        self._owner = owner
        self._group: Optional[OffloadTensorGroup] = None

    def on_group_commit_forward(
        self, name: str, forced_released_tensors: Sequence[torch.Tensor] = ()
    ) -> None:
        """The group has saved everything.

        ``forced_released_tensors`` are tensors whose memory may be freed despite other references.
        Memory is normally freed with its last reference, so that no operation can read a tensor
        without bytes; but if a schedule holds tensors that it no longer reads, it is freed: [Note:
        Layers that run in nodes].
        """
        self._group = self._owner.commit_group(name, forced_released_tensors)

    def on_group_commit_backward(self, name: str) -> None:
        """The group's backward operations follow."""
        if self._group is not None:
            self._owner.use_group(self._group)


def at_first_gradient(tensors: Iterable[torch.Tensor], come: Callable[[], None]) -> None:
    """Call ``come`` once, when backward has the gradient of the first of these tensors.

    Args:
        tensors: The tensors; those without gradient are skipped.
        come: A function without arguments that does not change gradients.
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
    """``tensor``, with a node in the graph that calls ``come`` when backward reaches it."""
    marked: torch.Tensor = _MarkFunction.apply(tensor, come)
    return marked


class offload_group:
    """Context manager that makes its operations one group, for models outside of megatron-core.

    Example:
        with offload_group(manager, "mlp") as group:
            y = mlp(x)
        y = group.commit(y)
    """

    def __init__(self, manager: MarkedManager, name: str) -> None:
        self._manager = manager
        self._name = name

    def __enter__(self) -> offload_group:
        self._manager.pop_forward_chunk(self._name)
        self._manager.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._manager.__exit__(*exception)

    def commit(self, tensor: torch.Tensor) -> torch.Tensor:
        """Mark the end of the group on one of its outputs, which is returned unchanged."""
        return self._manager.end_on(tensor, self._name)
