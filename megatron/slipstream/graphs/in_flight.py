# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The number of slots that a model chunk needs: its micro-batches in flight at the same time.

A slot is one pair of captured graphs with the memory in which they were captured. A micro-batch
holds one from its forward pass through the chunk to its backward pass, so a chunk needs as many
slots as the pipeline schedule has micro-batches between the two at once. That depends on the
pipeline and hardly on the number of micro-batches of an iteration: with enough slots for the worst
number, every number replays without a new capture.

This module does not depend on megatron-core. Schedules are passed as :class:`ScheduleFunctions`
(``integration/graphs/schedules.py`` binds megatron-core's own), and the resulting order is
replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Optional


class Pass(NamedTuple):
    """One micro-batch's forward or backward pass through one model chunk of a rank."""

    direction: Literal["forward", "backward"]
    chunk: int
    micro_batch: int


@dataclass(frozen=True)
class PipelineLayout:
    """The part of the parallel layout that decides a rank's schedule.

    Args:
        pp_size: Number of pipeline stages, megatron's ``pipeline_model_parallel_size``.
        pp_rank: This rank's stage, from 0.
        vp_size: Model chunks of each rank in the interleaved schedule, megatron's
            ``virtual_pipeline_model_parallel_size``; None means the schedule without interleaving,
            which differs from interleaving a single chunk.
        group_size: Consecutive micro-batches that a chunk runs before the next chunk runs,
            megatron's ``microbatch_group_size_per_vp_stage``; None means ``pp_size``, as there.

    Raises:
        ValueError: No such schedule exists.
    """

    pp_size: int
    pp_rank: int
    vp_size: Optional[int] = None
    group_size: Optional[int] = None

    def __post_init__(self) -> None:
        if not 0 <= self.pp_rank < self.pp_size:
            raise ValueError(
                f"pp_rank={self.pp_rank} is not a stage of a pipeline with "
                f"pipeline_model_parallel_size={self.pp_size}; set 0 to {self.pp_size - 1}"
            )
        if self.vp_size is not None and (self.vp_size < 1 or self.pp_size == 1):
            raise ValueError(
                f"virtual_pipeline_model_parallel_size={self.vp_size} is not supported with "
                f"pipeline_model_parallel_size={self.pp_size} because only the chunks of several "
                "stages can be interleaved; leave it out"
            )
        if self.vp_size is not None and self.group < self.pp_size:
            raise ValueError(
                f"microbatch_group_size_per_vp_stage={self.group_size} is not supported with "
                f"pipeline_model_parallel_size={self.pp_size} because a smaller group cannot fill "
                f"the pipeline; set at least {self.pp_size}"
            )

    @property
    def num_chunks(self) -> int:
        """Model chunks on this rank."""
        return self.vp_size or 1

    @property
    def group(self) -> int:
        """``group_size``, or its default if None."""
        return self.pp_size if self.group_size is None else self.group_size

    def takes(self, num_micro_batches: int) -> bool:
        """Whether megatron's schedule accepts this number of micro-batches in an iteration."""
        if self.vp_size is None:
            return num_micro_batches >= 1
        remainder = num_micro_batches % self.group
        return num_micro_batches >= self.group and (remainder == 0 or remainder >= self.pp_size)


class ScheduleFunctions(NamedTuple):
    """Functions that decide the order of a rank's passes."""

    num_warmup: Callable[[PipelineLayout, int], int]
    """Forward passes before the first backward pass, given the number of micro-batches."""
    table: Callable[[PipelineLayout, int], Sequence[tuple[int, int]]]
    """Micro-batch and model chunk of each forward pass in order, given the number of
    micro-batches. Backward passes follow the same table with the chunks in reverse."""


def passes(
    layout: PipelineLayout, num_micro_batches: int, functions: ScheduleFunctions
) -> Iterator[Pass]:
    """Yield a rank's passes of one training iteration in order.

    Raises:
        ValueError: Megatron's schedule does not support this number of micro-batches.
    """
    if not layout.takes(num_micro_batches):
        raise ValueError(
            f"num_microbatches={num_micro_batches} is not supported with "
            f"microbatch_group_size_per_vp_stage={layout.group} and "
            f"pipeline_model_parallel_size={layout.pp_size} because the pipeline would have "
            "dependency bubbles; set a global batch size that gives a multiple of the group, or at "
            "least one full group and a rest of no fewer micro-batches than stages"
        )
    table = functions.table(layout, num_micro_batches)
    num_warmup = functions.num_warmup(layout, num_micro_batches)
    last_chunk = layout.num_chunks - 1
    for step in range(num_warmup + len(table)):
        if step < len(table):
            micro_batch, chunk = table[step]
            yield Pass("forward", chunk, micro_batch)
        if step >= num_warmup:
            micro_batch, chunk = table[step - num_warmup]
            yield Pass("backward", last_chunk - chunk, micro_batch)


def most_in_flight(schedule: Iterable[Pass], num_chunks: int) -> tuple[int, ...]:
    """Return, for each chunk, the most micro-batches between forward and backward at once.

    Args:
        schedule: Passes in order.
        num_chunks: Number of chunks in the schedule.

    Raises:
        ValueError: A backward pass precedes its forward pass, or a pass occurs twice.
    """
    in_flight: list[set[int]] = [set() for _ in range(num_chunks)]
    most = [0] * num_chunks
    for direction, chunk, micro_batch in schedule:
        held = in_flight[chunk]
        if (direction == "forward") == (micro_batch in held):
            raise ValueError(
                f"chunk {chunk} has no {direction} pass of micro-batch {micro_batch} to run now"
            )
        held ^= {micro_batch}
        most[chunk] = max(most[chunk], len(held))
    return tuple(most)


def slots_per_chunk(layout: PipelineLayout, functions: ScheduleFunctions) -> tuple[int, ...]:
    """Return, for each chunk of a rank, the slots that suffice for any number of micro-batches.

    Args:
        layout: The rank's layout. Every rank can compute every other rank's slots, so ranks agree
            without communication.
        functions: The schedule's functions.
    """
    worst = [0] * layout.num_chunks
    for num_micro_batches in _decisive_counts(layout):
        schedule = passes(layout, num_micro_batches, functions)
        for chunk, most in enumerate(most_in_flight(schedule, layout.num_chunks)):
            worst[chunk] = max(worst[chunk], most)
    return tuple(worst)


def _decisive_counts(layout: PipelineLayout) -> Iterator[int]:
    """Yield numbers of micro-batches that include the worst case of every chunk.

    The number in flight depends on a window of the table as long as the warm-up, and the table
    repeats with every full group; only its last group may be smaller. The warm-up, at most
    ``2 (PP - 1) + (VP - 1) group`` passes with ``group`` at least PP, is shorter than two groups of
    ``VP group`` passes. So three full groups and the rest contain every possible window.
    """
    if layout.vp_size is None:
        yield layout.pp_size
        return
    yield from filter(layout.takes, range(layout.group, 4 * layout.group))
