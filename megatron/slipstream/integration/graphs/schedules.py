# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""megatron-core's pipeline schedules, for the slot count of chunk graphs."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from megatron.slipstream.graphs.in_flight import (
    PipelineLayout,
    ScheduleFunctions,
    slots_per_chunk,
)


def _num_warmup(layout: PipelineLayout, num_micro_batches: int) -> int:
    from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches

    # Stub of the communicator, from which the function reads only the pipeline position. Works for
    # any rank, and before process groups exist.
    communicator = SimpleNamespace(
        pp_group=SimpleNamespace(size=lambda: layout.pp_size, rank=lambda: layout.pp_rank),
        virtual_pipeline_model_parallel_size=layout.vp_size,
    )
    _, _, num_warmup, _ = get_pp_rank_microbatches(
        num_micro_batches, layout.num_chunks, layout.group, p2p_communicator=communicator
    )
    return int(num_warmup)


def _table(layout: PipelineLayout, num_micro_batches: int) -> Sequence[tuple[int, int]]:
    from megatron.core.pipeline_parallel.schedules import get_schedule_table

    return list(get_schedule_table(num_micro_batches, layout.num_chunks, layout.group))


MEGATRON_SCHEDULES = ScheduleFunctions(_num_warmup, _table)
"""megatron-core's own functions. Not for ``overlap_moe_expert_parallel_comm``, whose schedule calls
the layers one by one and so never runs a chunk as a whole."""


def chunk_slots(config: Any) -> tuple[int, ...]:
    """Return the number of slots of each of this rank's chunks; needs initialised groups."""
    from megatron.core import parallel_state

    layout = PipelineLayout(
        pp_size=config.pipeline_model_parallel_size,
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        vp_size=config.virtual_pipeline_model_parallel_size,
        group_size=config.microbatch_group_size_per_vp_stage,
    )
    return slots_per_chunk(layout, MEGATRON_SCHEDULES)
