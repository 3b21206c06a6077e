# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Slots: the memory of one micro-batch in flight, and the graphs that a chunk replays in it.

The graphs in a slot memory are used one at a time. A bank has graphs of each context-parallel size
in every memory. A micro-batch takes the memory, and with it the graphs of its size, so those of the
other sizes there are idle until its backward has been launched. The graphs of a chunk's layers use
it in the same way.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Optional, Protocol

import torch

from megatron.slipstream.fine_grained_activation_offload.activation_store import ActivationStore
from megatron.slipstream.fine_grained_activation_offload.graph_capture import pool_for_graphs
from megatron.slipstream.fine_grained_activation_offload.host_pool import HostPool
from megatron.slipstream.graphs.capture import Graph, GraphBackend, Tail
from megatron.slipstream.graphs.static_arguments import StaticArguments, TensorFacts

logger = logging.getLogger(__name__)

MAX_SMALL_BYTES = 64 * 1024
"""Tensors up to this size are copied together, whatever their types: the launch costs more than the
copy. Larger ones are copied faster one by one."""


class Static:
    """A tensor that graphs read: like another one, or that one itself if it is constant."""

    def __init__(self, like: torch.Tensor, is_constant: bool = False) -> None:
        self.is_constant = is_constant
        self.tensor = like if is_constant else like.detach().clone()
        is_small = self.tensor.nbytes <= MAX_SMALL_BYTES
        self.words = _as_words(self.tensor) if is_small else None
        """Its memory as int32; None if that is impossible, or the tensor is large."""


class StaticInputs:
    """The static inputs of graphs, in the order of a call's tensors."""

    def __init__(self, statics: Iterable[Static]) -> None:
        self._statics = tuple(statics)

    def renew(self, sources: Sequence[torch.Tensor]) -> None:
        """Copy a call's tensors, except constants, of the shapes of the inputs; with autograd off.

        The same tensor is copied again: NCCL, ``.data`` and other writers outside of autograd
        change its contents without a trace. Small tensors are copied by one operation: packed
        sequences have offsets and masks of a few thousand bytes, and each launch costs as much as
        that of a large copy.
        """
        to: list[Any] = []
        words: list[torch.Tensor] = []
        for static, source in zip(self._statics, sources, strict=True):
            if static.is_constant:
                continue
            source_words = None if static.words is None else _as_words(source)
            if source_words is None:
                static.tensor.copy_(source)
            else:
                to.append(static.words)
                words.append(source_words)
        if to:
            torch._foreach_copy_(to, words)


def _as_words(tensor: torch.Tensor) -> Any:
    """Return a view of a tensor as int32; None if it is not contiguous, or not in whole words."""
    if not tensor.is_contiguous():
        return None
    if tensor.dtype == torch.int32:
        return tensor
    size = tensor.element_size()
    if tensor.nbytes % 4 or tensor.storage_offset() * size % 4:
        return None
    # Dimensions of size 1 may have any stride, which a view of another dtype does not accept.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.int32)


class SlotMemory:
    """Memory for one micro-batch in flight."""

    def __init__(self, pool: Any, tail: Tail) -> None:
        self.pool = pool
        self.tail = tail
        self.is_free = True
        """Whether no micro-batch in flight uses it."""
        self.host_pool: Optional[HostPool] = None
        """Host memory for activations that graphs here offload; None without offloading."""
        self._num_host_users = 0
        self._statics: dict[tuple[str, TensorFacts], Static] = {}

    def share_host_pool(self, store: ActivationStore) -> HostPool:
        """Return the host memory for graphs that copy by a store, shared with one more user."""
        if self.host_pool is None:
            self.host_pool = pool_for_graphs(store)
        self._num_host_users += 1
        return self.host_pool

    def leave_host_pool(self) -> None:
        """Call when a user's copies have ended. The last user frees the host memory."""
        self._num_host_users -= 1
        if self.host_pool is not None and not self._num_host_users:
            self.host_pool.close()
            self.host_pool = None

    def static(self, name: str, like: torch.Tensor, is_constant: bool = False) -> Static:
        """Return the static input of that name; graphs with equal inputs share it."""
        key = (name, TensorFacts.of(like))
        if key not in self._statics:
            self._statics[key] = Static(like, is_constant)
        return self._statics[key]


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


class Slot:
    """One pair of graphs with its static input and output tensors."""

    def __init__(
        self,
        hidden: torch.Tensor,
        arguments: StaticArguments,
        memory: SlotMemory,
        constants: frozenset[str] = frozenset(),
    ) -> None:
        self.memory = memory
        self.hidden = memory.static("hidden_states", hidden).tensor.requires_grad_()
        statics = [
            memory.static(name, tensor, name in constants)
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
    """A micro-batch's use of a slot memory. It ends with backward, or when autograd drops it."""

    def __init__(self, memory: SlotMemory) -> None:
        self._memory: Optional[SlotMemory] = memory
        memory.is_free = False
        memory.tail.wait()  # edge E12, if its last backward never ran

    def check(self) -> None:
        """Raise ``RuntimeError`` if it has ended."""
        if self._memory is None:
            raise RuntimeError(
                "backward of a micro-batch ran twice, or after its graphs were deleted; a replayed "
                "chunk keeps no activations for a second time"
            )

    def end(self) -> None:
        if self._memory is not None:
            self._memory.is_free = True
            self._memory = None

    # If backward never runs, autograd drops this object with the loss.
    __del__ = end


class SlotMemories(tuple[SlotMemory, ...]):
    """The slot memories of a model chunk: one for each micro-batch in flight."""

    were_too_few = False
    """Whether a micro-batch has found all in use."""

    @classmethod
    def of(cls, backend: GraphBackend, count: int) -> SlotMemories:
        return cls(SlotMemory(backend.new_pool(), backend.new_tail()) for _ in range(count))

    @property
    def num_in_flight(self) -> int:
        return sum(not memory.is_free for memory in self)

    def take(self, name: str, preferred: int = 0) -> Optional[tuple[int, SlotAllocation]]:
        """Take a free memory, if possible the preferred one, for a micro-batch.

        Returns its number and its use; None, with a warning that names the graphs, if all are in
        use.
        """
        for number in (preferred, *range(len(self))):
            if self[number].is_free:
                return number, SlotAllocation(self[number])
        if not self.were_too_few:
            self.were_too_few = True
            logger.warning(
                "more than %d micro-batches of %s are in flight at the same time, so some of them "
                "run without CUDA graphs, with the same result but slower; check whether the "
                "pipeline schedule is megatron-core's",
                len(self),
                name,
            )
        return None


class Replay(torch.autograd.Function):
    """Replays a slot's graphs, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        anchor: Optional[torch.Tensor],
        slot: Slot,
        allocation: SlotAllocation,
        tensors: Sequence[torch.Tensor],
        after_replay: Callable[[], None],
    ) -> torch.Tensor:
        slot.feed(hidden, tensors)  # No gradients are recorded in here.
        slot.replay_forward()
        ctx.slot, ctx.allocation = slot, allocation
        ctx.after_replay = after_replay
        # A copy: schedules send it and then free it, and the next replay overwrites the slot's.
        return slot.output.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        slot: Slot = ctx.slot
        ctx.allocation.check()
        slot.grad_output.copy_(grad_outputs[0])
        slot.replay_backward()
        grad = slot.grad_hidden.clone() if ctx.needs_input_grad[0] else None
        ctx.allocation.end()
        ctx.after_replay()
        return grad, None, None, None, None, None
