# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Runs a model chunk with graphs for each context-parallel size, chosen per micro-batch.

The size is baked into a captured graph: the communicator, the steps of the exchange, the positions
of rotary embeddings, the division of sequence offsets. So there are :class:`SizeGraphs` for each
size that a micro-batch may have; without context parallelism, for one.

[Note: Sizes share slot memory]
Whatever their sizes, there are never more micro-batches in flight than slots. So every
:class:`SlotMemory` holds graphs of each size. While a micro-batch uses one of them, the others
there are idle: all share device memory, host memory and static inputs, and another size adds little
more than the graphs themselves.

[Note: All ranks capture together]
A pass runs before it is captured, and ranks of a group wait for one another in it. So all sizes are
captured between the same two iterations, on every rank, from the largest to the smallest: passes of
every size run first, while graphs hold no memory yet; then every size is captured. After each
step, and after each capture that is replayed for its times, the ranks exchange whether it
succeeded. If it failed on any rank, all ranks delete their graphs and raise an error.

Not every rank has had a micro-batch of each size before. But it is known which arguments depend on
the size, so the arguments of one call are converted to those of all sizes
(:meth:`CpSizes.arguments_of`).

[Note: Captured between iterations]
Work is run once before its capture, for first-use effects (workspaces, autotuning). That adds to
gradients, so it happens right before an iteration sets them to zero. Other state that the chunk
changes is restored (``Chunk.save_state``), and so are random number generators.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Optional

import torch

from megatron.slipstream.fine_grained_activation_offload.graph_capture import ONE_SIZE
from megatron.slipstream.graphs.capture import GraphBackend
from megatron.slipstream.graphs.chunk import Chunk
from megatron.slipstream.graphs.chunks import CaptureFigures, SizeGraphs
from megatron.slipstream.graphs.slots import SlotMemories
from megatron.slipstream.graphs.static_arguments import StaticArguments

logger = logging.getLogger(__name__)


class CpSizes:
    """The context-parallel sizes of micro-batches: here one, which never changes."""

    @property
    def sizes(self) -> Sequence[int]:
        return (ONE_SIZE,)

    def size_of(self, arguments: Mapping[str, Any]) -> int:
        """Return the size of a call; ``ValueError`` if no size has graphs that can run it."""
        return ONE_SIZE

    def arguments_of(self, arguments: Mapping[str, Any], size: int) -> Mapping[str, Any]:
        """Return a call's arguments, converted to those of a call of another size."""
        return arguments

    def agree(self, size: int, error: Optional[Exception]) -> None:
        """Raise ``error``, or ``RuntimeError`` if another rank failed; a collective of all ranks.

        With one size no rank waits for others, and one that fails ends the training.
        """
        if error is not None:
            raise error

    def together(self, size: int, step: Callable[[], None]) -> None:
        """Run a step; raise on all ranks if it fails on one: [Note: All ranks capture together]."""
        error: Optional[Exception] = None
        try:
            step()
        except Exception as raised:
            error = raised
        self.agree(size, error)


class ChunkGraphs:
    """Runs one model chunk: eagerly at first, then with the graphs of each micro-batch's size.

    Args:
        chunks: The chunk, for each size. They differ in name and offloading.
        num_slots: Maximum number of micro-batches, of any sizes, in flight in its schedule.
        num_warmup_iterations: Eager iterations at the start, at least one: the last of them
            provides the arguments of calls.
        backend: Captures the graphs.
        sizes: The sizes of micro-batches; None if there is only one.
    """

    def __init__(
        self,
        chunks: Mapping[int, Chunk],
        num_slots: int,
        num_warmup_iterations: int,
        backend: GraphBackend,
        sizes: Optional[CpSizes] = None,
    ) -> None:
        self.of_size = {
            size: SizeGraphs(chunks[size], num_slots, backend)
            for size in sorted(chunks, reverse=True)
        }
        """The graphs of each size, from the largest."""
        self._largest = next(iter(self.of_size.values()))
        self._num_warmup_iterations = max(1, num_warmup_iterations)
        self._backend = backend
        self._sizes = sizes or CpSizes()
        self._num_iterations = 0
        self._call: Optional[tuple[torch.Tensor, StaticArguments]] = None
        """Arguments of one eager micro-batch; None before it ran and after the capture."""

    @property
    def is_captured(self) -> bool:
        return bool(self._largest.slots)

    @property
    def num_replays(self) -> int:
        return sum(graphs.num_replays for graphs in self.of_size.values())

    @property
    def figures(self) -> Mapping[int, CaptureFigures]:
        """Figures of each size's last capture, largest first; the others share its memory."""
        return {size: g.figures for size, g in self.of_size.items() if g.figures is not None}

    def begin_iteration(self) -> None:
        """Call at the start of an iteration, before gradients are set to zero; may capture.

        See [Note: Captured between iterations]. With several sizes, a capture is a collective of
        all ranks.

        Raises:
            ValueError: The graphs would not fit in device memory, or parameters have no
                ``main_grad``. No size has graphs afterwards.
            RuntimeError: Memory that is baked into the graphs has been replaced; or the capture
                failed on another rank.
        """
        self._num_iterations += 1
        if self.is_captured:
            self._largest.check_addresses()
        elif self._call is not None:
            self._capture(*self._call)
            self._call = None

    def delete(self) -> None:
        """Delete the graphs. The next iterations run eagerly, then the chunk is captured again.

        Call it on every rank at the end of an iteration when the shapes of micro-batches change.
        Raises ``RuntimeError`` if micro-batches are in flight.
        """
        name = self._largest.chunk.name
        in_flight = self._largest.memories.num_in_flight
        if in_flight:
            raise RuntimeError(
                f"graphs of {name} cannot be deleted while {in_flight} micro-batches are in "
                "flight; delete them between iterations"
            )
        if self.is_captured:
            logger.info(
                "CUDA graphs of %s are deleted; it is captured again after %d iterations",
                name,
                self._num_warmup_iterations,
            )
        self.close()

    def close(self) -> None:
        """Release the graphs at the end of training, even with micro-batches in flight."""
        for graphs in self.of_size.values():
            graphs.close()
        self._num_iterations = 0
        self._call = None

    def __call__(self, hidden: torch.Tensor, arguments: Mapping[str, Any]) -> torch.Tensor:
        """Run a micro-batch's forward on ``hidden``, float ``[s, b, h]``, which gets a gradient.

        Returns hidden states of the same shape, in newly allocated memory; raises ``ValueError`` if
        no graphs were captured for such arguments.
        """
        chunk = self._largest.chunk
        # Without a backward pass nothing would free a slot.
        if not (chunk.module.training and torch.is_grad_enabled()):
            return chunk.run(hidden, **arguments)
        size = self._sizes.size_of(arguments)
        if self.is_captured:
            return self.of_size[size](hidden, arguments)
        if self._num_iterations >= self._num_warmup_iterations and self._call is None:
            self._call = _copy_of_call(chunk, hidden, arguments)
        return chunk.run(hidden, **arguments)

    def _capture(self, sample: torch.Tensor, call: StaticArguments) -> None:
        """See [Note: All ranks capture together]."""
        memories = SlotMemories.of(self._backend, self._largest.num_slots)
        try:
            with self._backend.session():
                for size in self.of_size:
                    prepare = partial(self._prepare, size, sample, call, memories)
                    self._sizes.together(size, prepare)
                for size, graphs in self.of_size.items():
                    self._sizes.together(size, graphs.record)
        except BaseException:
            for graphs in self.of_size.values():
                graphs.close()
            raise

    def _prepare(
        self, size: int, sample: torch.Tensor, call: StaticArguments, memories: SlotMemories
    ) -> None:
        arguments = self._sizes.arguments_of(call.unflatten(call.tensors), size)
        of_size = partial(self._sizes.together, size)
        self.of_size[size].prepare(sample, StaticArguments.flatten(arguments), memories, of_size)


def _copy_of_call(
    chunk: Chunk, hidden: torch.Tensor, arguments: Mapping[str, Any]
) -> tuple[torch.Tensor, StaticArguments]:
    """Copy a call's arguments except constants; ``ValueError`` if one of them gets a gradient."""
    call = StaticArguments.flatten(arguments)
    for what, tensor in zip(call.names, call.tensors, strict=True):
        if tensor.requires_grad:
            raise ValueError(
                f"{what} of {chunk.name} needs a gradient, but CUDA graphs of chunks compute it "
                "for hidden states only; train without them"
            )
    copies = tuple(
        tensor if name in chunk.constant_arguments else tensor.detach().clone()
        for name, tensor in zip(call.names, call.tensors, strict=True)
    )
    return hidden.detach().clone(), dataclasses.replace(call, tensors=copies)
