# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The marks of a group in autograd, as megatron-core's layers place them and for any other module.

megatron-core's own autograd functions call four methods on whatever
``PipelineOffloadManager.pop_forward_chunk`` and ``cur_forward_chunk`` return. Both return an object
made for one mark of one group, so that backward knows its group without searching for a name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Optional

import torch

from megatron.slipstream.fine_grained_activation_offload.group import OffloadTensorGroup

if TYPE_CHECKING:
    from megatron.slipstream.fine_grained_activation_offload.manager import PipelineOffloadManager


class StartMark:
    """The start of one group: forward opens it, backward has finished with it."""

    def __init__(self, manager: PipelineOffloadManager) -> None:
        self._manager = manager
        self._group: Optional[OffloadTensorGroup] = None

    def on_group_start_forward(self, name: str) -> None:
        """The group's operations follow. Called once, on the computation's stream."""
        self._group = self._manager.start_group(name)

    def on_group_start_backward(self) -> None:
        """The group's backward operations have been issued."""
        if self._group is not None:
            self._manager.finish_group(self._group)


class CommitMark:
    """The end of one group: forward has saved everything, backward needs it from here on."""

    def __init__(self, manager: PipelineOffloadManager) -> None:
        self._manager = manager
        self._group: Optional[OffloadTensorGroup] = None

    def on_group_commit_forward(
        self, name: str, forced_released_tensors: Sequence[torch.Tensor] = ()
    ) -> None:
        """The group has saved everything.

        ``forced_released_tensors`` names tensors whose memory may be taken from under other
        references. We never do that: memory goes when its last reference does, so that no
        operation can be left with a tensor that has no bytes.
        """
        self._group = self._manager.commit_group(name)

    def on_group_commit_backward(self, name: str) -> None:
        """The group's backward operations follow."""
        if self._group is not None:
            self._manager.use_group(self._group)


class _StartFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, mark: StartMark, name: str) -> torch.Tensor:
        ctx.mark = mark
        mark.on_group_start_forward(name)
        return tensor

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        ctx.mark.on_group_start_backward()
        return grad_outputs[0], None, None


class _CommitFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, mark: CommitMark, name: str) -> torch.Tensor:
        ctx.mark = mark
        ctx.name = name
        mark.on_group_commit_forward(name)
        return tensor

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        ctx.mark.on_group_commit_backward(ctx.name)
        return grad_outputs[0], None, None


class offload_group:
    """Context manager that makes one group of the operations inside, outside of megatron-core.

    Example:
        with offload_group(manager, "mlp", x) as group:
            y = mlp(group.input)
        y = group.commit(y)
    """

    def __init__(self, manager: PipelineOffloadManager, name: str, tensor: torch.Tensor) -> None:
        self.input = tensor
        """The group's input, shape and dtype unchanged; use it instead of ``tensor`` inside."""
        self._manager = manager
        self._name = name

    def __enter__(self) -> offload_group:
        mark = self._manager.pop_forward_chunk(self._name)
        if mark is not None:
            self.input = _StartFunction.apply(self.input, mark, self._name)
        self._manager.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._manager.__exit__(*exception)

    def commit(self, tensor: torch.Tensor) -> torch.Tensor:
        """Mark the end of the group on one of its outputs, which is returned unchanged."""
        mark = self._manager.cur_forward_chunk()
        if mark is None:
            return tensor
        return _CommitFunction.apply(tensor, mark, self._name)
