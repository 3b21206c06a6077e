# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A slot of a chunk's graphs, and the replay of a micro-batch in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch

from megatron.slipstream.graphs.capture import Graph
from megatron.slipstream.graphs.chunk import CaptureHooks, NoCaptureHooks
from megatron.slipstream.graphs.slot_memory import SlotMemory, StaticInputs
from megatron.slipstream.graphs.static_arguments import StaticArguments


class Slot:
    """One pair of graphs with its static input and output tensors."""

    def __init__(
        self, hidden: torch.Tensor, arguments: StaticArguments, memory: SlotMemory
    ) -> None:
        self.memory = memory
        self.hidden = memory.static("hidden_states", hidden).tensor.requires_grad_()
        statics = [
            memory.static(name, tensor)
            for name, tensor in zip(arguments.names, arguments.tensors, strict=True)
        ]
        self._inputs = StaticInputs(statics)
        self.tensors = tuple(static.tensor for static in statics)
        self.output: torch.Tensor
        self.grad_output: torch.Tensor
        self.grad_hidden: torch.Tensor
        self.forward: Graph
        self.backward: Graph
        self.hooks: CaptureHooks = NoCaptureHooks()
        with torch.no_grad():
            self.feed(hidden, arguments.tensors)

    def feed(self, hidden: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        """Copy a call's tensors to the graphs' static inputs; call with autograd off."""
        self.hidden.copy_(hidden)
        self._inputs.renew(tensors)

    def replay_forward(self) -> None:
        """Compute :attr:`output`. Copies may still run afterwards."""
        if self.hooks.leaves_copies:
            self.memory.tail.replay(self.forward)
        else:
            self.forward.replay()

    def replay_backward(self) -> None:
        """Compute :attr:`grad_hidden`, once the copies of forward have ended."""
        self.memory.tail.wait()  # edge E12
        self.backward.replay()


class SlotAllocation:
    """A micro-batch's use of a slot. It ends with backward, or when autograd drops it."""

    def __init__(self, slot: Slot) -> None:
        self._slot: Optional[Slot] = slot
        slot.memory.is_free = False
        slot.memory.tail.wait()  # edge E12, if its last backward never ran

    @property
    def slot(self) -> Slot:
        """The slot.

        Raises:
            RuntimeError: It has been freed.
        """
        if self._slot is None:
            raise RuntimeError(
                "backward of a micro-batch ran twice, or after its graphs were deleted; a replayed "
                "chunk keeps no activations for a second time"
            )
        return self._slot

    def end(self) -> None:
        """Free the slot."""
        if self._slot is not None:
            self._slot.memory.is_free = True
            self._slot = None

    # If backward never runs, autograd drops this object with the loss.
    __del__ = end


class Replay(torch.autograd.Function):
    """Replays a slot's graphs, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        anchor: Optional[torch.Tensor],
        allocation: SlotAllocation,
        tensors: Sequence[torch.Tensor],
        after_replay: Callable[[], None],
    ) -> torch.Tensor:
        slot = allocation.slot
        slot.feed(hidden, tensors)  # No gradients are recorded in here.
        slot.replay_forward()
        ctx.allocation = allocation
        ctx.after_replay = after_replay
        # A copy: schedules send it and then free it, and the next replay overwrites the slot's.
        return slot.output.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        slot = ctx.allocation.slot
        slot.grad_output.copy_(grad_outputs[0])
        slot.replay_backward()
        grad = slot.grad_hidden.clone() if ctx.needs_input_grad[0] else None
        ctx.allocation.end()
        ctx.after_replay()
        return grad, None, None, None, None
