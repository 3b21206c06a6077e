# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Slots suffice for megatron-core's own schedules with any number of micro-batches."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, Optional

import pytest
import torch

from megatron.slipstream.graphs.in_flight import (
    Pass,
    PipelineLayout,
    most_in_flight,
    passes,
    slots_per_chunk,
)
from megatron.slipstream.integration.graphs.schedules import MEGATRON_SCHEDULES, chunk_slots

pytestmark = pytest.mark.releases


def slots(layout: PipelineLayout) -> tuple[int, ...]:
    return slots_per_chunk(layout, MEGATRON_SCHEDULES)


def layouts(pp_sizes: range, vp_sizes: list[Optional[int]]) -> list[PipelineLayout]:
    """Every rank of every pipeline; groups of minimal size, odd size, and twice the stages."""
    return [
        PipelineLayout(pp_size, pp_rank, vp_size, group)
        for pp_size in pp_sizes
        for vp_size in vp_sizes
        if vp_size is None or pp_size > 1
        for group in ([None] if vp_size is None else sorted({pp_size, 2 * pp_size - 1}))
        for pp_rank in range(pp_size)
    ]


# --- the order is megatron-core's -----------------------------------------------------------------


class _Stage:
    """A pipeline of which only this rank exists: it receives everything immediately."""

    def __init__(self, layout: PipelineLayout) -> None:
        group = SimpleNamespace(size=lambda: layout.pp_size, rank=lambda: layout.pp_rank)
        self.pp_group = group
        self.total_stages, self.current_stage = layout.pp_size, layout.pp_rank
        self.is_pp_first_stage = layout.pp_rank == 0
        self.is_pp_last_stage = layout.pp_rank == layout.pp_size - 1
        self.virtual_pipeline_model_parallel_size = layout.vp_size
        self.config = None

    def __getattr__(self, name: str) -> Any:
        both = name == "send_forward_backward_recv_forward_backward"
        received = torch.zeros(1)
        return lambda *_, **__: (received, received) if both else received


class _TorchOnCpu:
    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *size: Any, device: Any = None, **options: Any) -> torch.Tensor:
        return torch.zeros(*size, **options)


def passes_of_megatron(
    monkeypatch: pytest.MonkeyPatch, layout: PipelineLayout, num_micro_batches: int
) -> list[Pass]:
    """Passes that megatron-core's schedule runs on this rank, recorded without computing."""
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.process_groups_config import ProcessGroupCollection

    noted: list[Pass] = []

    def forward_step(*_: Any, current_microbatch: int, **options: Any) -> Any:
        noted.append(Pass("forward", options.get("vp_stage") or 0, current_microbatch))
        return noted[-1], 0

    def backward_step(_: Any, output: Any, *__: Any) -> Any:
        noted.append(output._replace(direction="backward"))

    monkeypatch.setattr(schedules, "forward_step", forward_step)
    monkeypatch.setattr(schedules, "backward_step", backward_step)
    monkeypatch.setattr(schedules, "deallocate_output_tensor", lambda *_: None)
    monkeypatch.setattr(schedules, "torch", _TorchOnCpu())
    config = ModelParallelConfig(
        pipeline_model_parallel_size=layout.pp_size,
        virtual_pipeline_model_parallel_size=layout.vp_size,
        microbatch_group_size_per_vp_stage=layout.group,
        pipeline_dtype=torch.float32,
    )
    config.hidden_size = 1
    chunks = [torch.nn.Identity() for _ in range(layout.num_chunks)]
    for chunk in chunks:
        chunk.config = config
        chunk.model_type = None
    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    run = schedules.forward_backward_pipelining_with_interleaving
    if layout.vp_size is None:
        run = schedules.forward_backward_pipelining_without_interleaving
    interleaves = layout.vp_size is not None
    run(
        forward_step_func=None,
        data_iterator=[None] * len(chunks) if interleaves else None,
        model=chunks if interleaves else chunks[0],
        num_microbatches=num_micro_batches,
        seq_length=1,
        micro_batch_size=1,
        p2p_communicator=_Stage(layout),
        pg_collection=ProcessGroupCollection(tp=alone, cp=alone),
    )
    return noted


def test_passes_come_in_the_order_in_which_megatron_core_runs_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pick = random.Random(5)
    for layout in pick.sample(layouts(range(2, 9), [None, 1, 2, 3, 4]), 60):
        counts = [count for count in range(1, 4 * layout.group) if layout.takes(count)]
        for count in pick.sample(counts, min(2, len(counts))):
            expected = passes_of_megatron(monkeypatch, layout, count)
            assert list(passes(layout, count, MEGATRON_SCHEDULES)) == expected, (layout, count)
            assert len(set(expected)) == 2 * count * layout.num_chunks


# --- enough for any number of micro-batches, and no more ------------------------------------------


def in_flight_by_counting(layout: PipelineLayout, num_micro_batches: int) -> list[int]:
    """The most passes between forward and backward, computed from the schedule's description.

    Independent of the code under test: a forward pass's chunk follows from its table index, with
    groups of ``g`` micro-batches a chunk and a smaller group last; backward mirrors it.
    """
    g, v = layout.group, layout.num_chunks
    chunk_of: list[int] = []
    for start in range(0, num_micro_batches, g):
        size = min(g, num_micro_batches - start)
        chunk_of += [chunk for chunk in range(v) for _ in range(size)]
    stages_after = layout.pp_size - 1 - layout.pp_rank
    ahead = stages_after if layout.vp_size is None else 2 * stages_after + (v - 1) * g
    ahead = min(ahead, len(chunk_of))
    forward, backward, most = [0] * v, [0] * v, [0] * v
    for done in range(len(chunk_of)):
        if done > ahead:
            backward[v - 1 - chunk_of[done - 1 - ahead]] += 1
        forward[chunk_of[done]] += 1
        most = [max(m, f - b) for m, f, b in zip(most, forward, backward, strict=True)]
    return most


def test_every_number_of_micro_batches_finds_a_slot_and_one_number_needs_them_all() -> None:
    for layout in layouts(range(1, 9), [None, 1, 2, 3, 4]):
        needed = [0] * layout.num_chunks
        for count in range(1, 7 * layout.group + 1):
            if layout.takes(count):
                needed = [
                    max(pair)
                    for pair in zip(needed, in_flight_by_counting(layout, count), strict=True)
                ]
        assert list(slots(layout)) == needed, layout


@pytest.mark.parametrize(
    "pp_size, vp_size, group_size, per_rank",
    [
        (1, None, None, [(1,)]),
        (4, None, None, [(4,), (3,), (2,), (1,)]),
        (2, 2, None, [(4, 2), (3, 1)]),
        (4, 2, None, [(8, 4), (8, 4), (7, 3), (5, 1)]),
        # A smaller last group needs more of the second chunk than full ones: 5, 3 and 1.
        (4, 2, 8, [(15, 7), (13, 6), (11, 5), (9, 4)]),
    ],
)
def test_slots_of_common_layouts(
    pp_size: int, vp_size: Optional[int], group_size: Optional[int], per_rank: list[tuple[int, ...]]
) -> None:
    ranks = [PipelineLayout(pp_size, rank, vp_size, group_size) for rank in range(pp_size)]
    assert [slots(layout) for layout in ranks] == per_rank


@pytest.mark.parametrize(
    "pp_size, vp_size, totals",
    [
        (4, 4, [24, 24, 22, 18]),
        (8, 2, [24, 24, 24, 24, 22, 18, 14, 10]),
        (8, 4, [48, 48, 48, 48, 46, 42, 38, 34]),
    ],
)
def test_slots_of_all_chunks_of_a_rank(pp_size: int, vp_size: int, totals: list[int]) -> None:
    ranks = [PipelineLayout(pp_size, rank, vp_size) for rank in range(pp_size)]
    assert [sum(slots(layout)) for layout in ranks] == totals


def test_fewer_micro_batches_than_stages_need_fewer_slots() -> None:
    first = PipelineLayout(8, 0)
    for count in (3, 4, 6, 8, 20):
        schedule = passes(first, count, MEGATRON_SCHEDULES)
        assert most_in_flight(schedule, 1) == (min(count, 8),)


def test_slots_of_this_rank_come_from_its_config(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import parallel_state

    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda: 2)
    config = SimpleNamespace(
        pipeline_model_parallel_size=4,
        virtual_pipeline_model_parallel_size=2,
        microbatch_group_size_per_vp_stage=8,
    )
    assert chunk_slots(config) == (11, 5)


# --- refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, option",
    [
        ((4, 4), "pp_rank=4"),
        ((1, 0, 2), "virtual_pipeline_model_parallel_size=2"),
        ((4, 0, 2, 3), "microbatch_group_size_per_vp_stage=3"),
    ],
)
def test_a_layout_that_has_no_schedule_is_refused(arguments: tuple[int, ...], option: str) -> None:
    with pytest.raises(ValueError, match=f"^{option} .*; (set|leave)"):
        PipelineLayout(*arguments)


def test_a_number_of_micro_batches_that_megatron_refuses_is_refused() -> None:
    layout = PipelineLayout(4, 0, 2)
    assert [count for count in range(1, 13) if layout.takes(count)] == [4, 8, 12]
    with pytest.raises(ValueError, match="^num_microbatches=6 .*; set"):
        list(passes(layout, 6, MEGATRON_SCHEDULES))
    assert PipelineLayout(4, 0, 2, 5).takes(9)
    assert not PipelineLayout(4, 0, 2, 5).takes(8)


def test_a_schedule_that_is_none_is_not_counted() -> None:
    with pytest.raises(ValueError, match="no backward pass of micro-batch 0"):
        most_in_flight([Pass("backward", 0, 0)], 1)
    with pytest.raises(ValueError, match="no forward pass of micro-batch 0"):
        most_in_flight([Pass("forward", 0, 0)] * 2, 1)
