# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Slots suffice for megatron-core's own schedules with any number of micro-batches."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, NamedTuple, Optional

import pytest
import torch

from megatron.slipstream.estimate.schedules import Pass, rank_schedule
from megatron.slipstream.integration.graphs.schedules import chunk_slots, slots_per_chunk

pytestmark = pytest.mark.releases


class Layout(NamedTuple):
    """A rank of a pipeline."""

    pp_size: int
    pp_rank: int
    vp_size: Optional[int] = None
    group_size: Optional[int] = None

    @property
    def num_chunks(self) -> int:
        return self.vp_size or 1

    @property
    def group(self) -> int:
        return self.group_size or self.pp_size

    @property
    def slots(self) -> tuple[int, ...]:
        return slots_per_chunk(*self)

    def passes(self, count: int) -> list[Pass]:
        return list(rank_schedule(self.pp_size, self.pp_rank, count, *self[2:]))

    def takes(self, count: int) -> bool:
        rest = count % self.group
        return self.vp_size is None or (count >= self.group and not 0 < rest < self.pp_size)


def layouts(pp_sizes: range, vp_sizes: list[Optional[int]]) -> list[Layout]:
    """Every rank of every pipeline; groups of minimal size, odd size, and twice the stages."""
    return [
        Layout(pp_size, pp_rank, vp_size, group)
        for pp_size in pp_sizes
        for vp_size in vp_sizes
        if vp_size is None or pp_size > 1
        for group in ([None] if vp_size is None else sorted({pp_size, 2 * pp_size - 1}))
        for pp_rank in range(pp_size)
    ]


# --- the order is megatron-core's -----------------------------------------------------------------


class _Stage:
    """A pipeline of which only this rank exists: it receives everything immediately."""

    def __init__(self, layout: Layout) -> None:
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
    monkeypatch: pytest.MonkeyPatch, layout: Layout, num_micro_batches: int
) -> list[Pass]:
    """Passes that megatron-core's schedule runs on this rank, recorded without computing."""
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.process_groups_config import ProcessGroupCollection

    noted: list[Pass] = []

    def forward_step(*_: Any, current_microbatch: int, **options: Any) -> Any:
        noted.append(Pass("F", current_microbatch, options.get("vp_stage") or 0))
        return noted[-1], 0

    def backward_step(_: Any, output: Any, *__: Any) -> Any:
        noted.append(output._replace(direction="B"))

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
            assert layout.passes(count) == expected, (layout, count)
            assert len(set(expected)) == 2 * count * layout.num_chunks


# --- enough for any number of micro-batches, and no more ------------------------------------------


def in_flight_by_counting(layout: Layout, num_micro_batches: int) -> list[int]:
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
        assert list(layout.slots) == needed, layout


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
    ranks = [Layout(pp_size, rank, vp_size, group_size) for rank in range(pp_size)]
    assert [layout.slots for layout in ranks] == per_rank


@pytest.mark.parametrize(
    "pp_size, vp_size, totals",
    [
        (4, 4, [24, 24, 22, 18]),
        (8, 2, [24, 24, 24, 24, 22, 18, 14, 10]),
        (8, 4, [48, 48, 48, 48, 46, 42, 38, 34]),
    ],
)
def test_slots_of_all_chunks_of_a_rank(pp_size: int, vp_size: int, totals: list[int]) -> None:
    ranks = [Layout(pp_size, rank, vp_size) for rank in range(pp_size)]
    assert [sum(layout.slots) for layout in ranks] == totals


def test_slots_of_this_rank_come_from_its_config(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import parallel_state

    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda: 2)
    config = SimpleNamespace(
        pipeline_model_parallel_size=4,
        virtual_pipeline_model_parallel_size=2,
        microbatch_group_size_per_vp_stage=8,
    )
    assert chunk_slots(config) == (11, 5)
