# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The number of slots that a model chunk needs: its micro-batches in flight at the same time.

A slot is the memory of one micro-batch with the graphs captured in it. A micro-batch holds one from
its forward pass through the chunk to its backward pass. How many do so at once depends on the
pipeline and hardly on the number of micro-batches of an iteration: with enough slots for the worst
number, every number replays without a new capture.

Not for ``overlap_moe_expert_parallel_comm``, whose schedule calls the layers one by one and so
never runs a chunk as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Optional

from megatron.core import parallel_state

from megatron.slipstream.estimate.schedules import rank_schedule


def chunk_slots(config: Any) -> tuple[int, ...]:
    """Return the number of slots of each of this rank's chunks; needs initialised groups."""
    return slots_per_chunk(
        config.pipeline_model_parallel_size,
        parallel_state.get_pipeline_model_parallel_rank(),
        config.virtual_pipeline_model_parallel_size,
        config.microbatch_group_size_per_vp_stage,
    )


def slots_per_chunk(
    pp_size: int, pp_rank: int, vp_size: Optional[int] = None, group_size: Optional[int] = None
) -> tuple[int, ...]:
    """Return, for each chunk of a rank, the slots that suffice for any number of micro-batches.

    Ranks agree without communication: each can compute those of every other rank.
    """
    most = [0] * (vp_size or 1)
    for count in _decisive_counts(pp_size, vp_size, group_size or pp_size):
        in_flight = [0] * len(most)
        for item in rank_schedule(pp_size, pp_rank, count, vp_size, group_size):
            in_flight[item.vp_stage] += 1 if item.direction == "F" else -1
            most[item.vp_stage] = max(most[item.vp_stage], in_flight[item.vp_stage])
    return tuple(most)


def _decisive_counts(pp_size: int, vp_size: Optional[int], group: int) -> Iterator[int]:
    """Yield numbers of micro-batches that include the worst case of every chunk.

    The number in flight depends on a window of the forward passes as long as the warm-up, and their
    order repeats with every full group; only the last group may be smaller. The warm-up, at most
    ``2 (PP - 1) + (VP - 1) group`` passes with ``group`` at least PP, is shorter than two groups of
    ``VP group`` passes. So three full groups and the rest contain every possible window.
    """
    if vp_size is None:
        yield pp_size
        return
    for count in range(group, 4 * group):
        if count % group == 0 or count % group >= pp_size:
            yield count
