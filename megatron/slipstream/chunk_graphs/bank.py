# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Graphs of one model chunk for each context-parallel size, chosen per micro-batch.

The size is baked into a captured graph: the communicator, the steps of the exchange, the positions
of rotary embeddings, the division of sequence offsets. So a bank has :class:`ChunkGraphs` for each
size that a micro-batch may have, and selects them by the micro-batch's size.

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
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Optional, Protocol

import torch

from megatron.slipstream.chunk_graphs.backend import GraphBackend
from megatron.slipstream.chunk_graphs.chunk import Chunk
from megatron.slipstream.chunk_graphs.engine import CaptureFigures, ChunkGraphs, copy_of_call
from megatron.slipstream.chunk_graphs.slot_memory import SlotMemory
from megatron.slipstream.chunk_graphs.static_arguments import StaticArguments


class CpSizes(Protocol):
    """The context-parallel sizes of micro-batches, for a bank."""

    @property
    def sizes(self) -> Sequence[int]:
        """All sizes that a micro-batch may have."""

    def size_of(self, arguments: Mapping[str, Any]) -> int:
        """Return the size of a call.

        Raises:
            ValueError: No size has graphs that can run it.
        """

    def arguments_of(self, arguments: Mapping[str, Any], size: int) -> Mapping[str, Any]:
        """Return a call's arguments, converted to those of a call of another size."""

    def agree(self, size: int, error: Optional[Exception]) -> None:
        """Wait until every rank has called this.

        Args:
            size: The size that was run or captured.
            error: Why it failed; None if it succeeded.

        Raises:
            Exception: ``error``, if there is one.
            RuntimeError: It failed on another rank.
        """


def together(sizes: Optional[CpSizes], size: int, step: Callable[[], None]) -> None:
    """Run a step; raise on every rank if it fails on one: [Note: All ranks capture together].

    Args:
        sizes: The sizes of micro-batches; None if there is only one. Then no rank waits for
            others, and one that fails ends the training.
        size: The size that is run or captured.
        step: The step.
    """
    if sizes is None:
        step()
        return
    error: Optional[Exception] = None
    try:
        step()
    except Exception as raised:
        error = raised
    sizes.agree(size, error)


class GraphBank:
    """Runs one model chunk: eagerly at first, then with the graphs of each micro-batch's size.

    Args:
        chunks: The chunk, for each size. They differ in name and offloading.
        num_slots: Maximum number of micro-batches, of any sizes, in flight in its schedule.
        num_warmup_iterations: See :class:`ChunkGraphs`.
        backend: Captures the graphs.
        sizes: The sizes of micro-batches.
    """

    def __init__(
        self,
        chunks: Mapping[int, Chunk],
        num_slots: int,
        num_warmup_iterations: int,
        backend: GraphBackend,
        sizes: CpSizes,
    ) -> None:
        self.num_slots = num_slots
        self._num_warmup_iterations = max(1, num_warmup_iterations)
        self._backend = backend
        self._sizes = sizes
        self._graphs = {
            size: ChunkGraphs(chunks[size], num_slots, num_warmup_iterations, backend)
            for size in sorted(sizes.sizes, reverse=True)
        }
        self._largest = next(iter(self._graphs.values()))
        self._num_iterations = 0
        self._call: Optional[tuple[torch.Tensor, StaticArguments]] = None
        """Arguments of one micro-batch that ran; None before the first."""

    @property
    def of_size(self) -> Mapping[int, ChunkGraphs]:
        """The graphs of each size, from the largest."""
        return self._graphs

    @property
    def is_captured(self) -> bool:
        """Whether graphs exist, for all sizes or for none."""
        return self._largest.is_captured

    @property
    def num_replays(self) -> int:
        """Number of forward passes that were replayed."""
        return sum(graphs.num_replays for graphs in self._graphs.values())

    @property
    def figures(self) -> Mapping[int, CaptureFigures]:
        """Figures of each size's last capture, largest first; the others share its memory.

        Empty before the first capture.
        """
        return {size: g.figures for size, g in self._graphs.items() if g.figures is not None}

    def begin_iteration(self) -> None:
        """Like :meth:`ChunkGraphs.begin_iteration`; a collective of all ranks when it captures.

        Raises:
            ValueError: See there. No size has graphs afterwards.
            RuntimeError: See there; or the capture failed on another rank.
        """
        self._num_iterations += 1
        if self.is_captured:
            self._largest.begin_iteration()
        elif self._call is not None:
            self._capture(*self._call)
            self._call = None

    def delete(self) -> None:
        """Like :meth:`ChunkGraphs.delete`, for the graphs of all sizes; on every rank."""
        for graphs in self._graphs.values():
            graphs.delete()
        self.close()

    def close(self) -> None:
        """Like :meth:`ChunkGraphs.close`, for the graphs of all sizes."""
        for graphs in self._graphs.values():
            graphs.close()
        self._num_iterations = 0
        self._call = None

    def __call__(self, hidden: torch.Tensor, arguments: Mapping[str, Any]) -> torch.Tensor:
        """Like :meth:`ChunkGraphs.__call__`, with the graphs of the call's size."""
        chunk = self._largest.chunk
        if not (chunk.module.training and torch.is_grad_enabled()):
            return chunk.run(hidden, **arguments)
        size = self._sizes.size_of(arguments)
        if self.is_captured:
            return self._graphs[size](hidden, arguments)
        if self._num_iterations >= self._num_warmup_iterations and self._call is None:
            self._call = copy_of_call(chunk.name, hidden, arguments)
        return chunk.run(hidden, **arguments)

    def _capture(self, sample: torch.Tensor, call: StaticArguments) -> None:
        """See [Note: All ranks capture together]."""
        backend = self._backend
        memories = SlotMemory.of(backend, self.num_slots)
        arguments = call.unflatten(call.tensors)
        try:
            with backend.session():
                for size in self._graphs:
                    prepare = partial(self._prepare, size, sample, arguments, memories)
                    together(self._sizes, size, prepare)
                for size, graphs in self._graphs.items():
                    together(self._sizes, size, graphs.record)
        except BaseException:
            for graphs in self._graphs.values():
                graphs.delete()
            raise

    def _prepare(
        self,
        size: int,
        sample: torch.Tensor,
        arguments: Mapping[str, Any],
        memories: Sequence[SlotMemory],
    ) -> None:
        resized = StaticArguments.flatten(self._sizes.arguments_of(arguments, size))
        of_size = partial(together, self._sizes, size)
        self._graphs[size].prepare(sample, resized, memories, of_size)
