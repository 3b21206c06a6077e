# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Rows arrive sorted by expert and return to their places, whatever their numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from megatron.slipstream.experts.fixed_exchange import FixedExchange


def exchanges(counts: torch.Tensor, num_rows: int, capacity: int) -> list[FixedExchange]:
    """Of all ranks; ``counts`` is ``[source, rank, local expert]``."""
    return [
        FixedExchange(counts[rank], counts[:, rank].contiguous(), num_rows, capacity)
        for rank in range(len(counts))
    ]


def swap(slots: list[torch.Tensor]) -> list[torch.Tensor]:
    """A collective of equal parts: each rank's part of each other one."""
    parts = [tensor.chunk(len(slots)) for tensor in slots]
    return [torch.cat([part[rank] for part in parts]) for rank in range(len(slots))]


@st.composite
def drawn_counts(draw: st.DrawFn) -> torch.Tensor:
    num_ranks, num_local = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    num_rows = draw(st.integers(1, 12))
    experts = st.integers(0, num_ranks * num_local - 1)
    chosen = [
        draw(st.lists(experts, min_size=num_rows, max_size=num_rows)) for _ in range(num_ranks)
    ]
    counts = [torch.bincount(torch.tensor(row), minlength=num_ranks * num_local) for row in chosen]
    return torch.stack(counts).view(num_ranks, num_ranks, num_local)


@settings(max_examples=200, deadline=None)
@given(counts=drawn_counts(), spare=st.integers(0, 3))
def test_rows_go_to_their_experts_and_come_back(counts: torch.Tensor, spare: int) -> None:
    num_ranks, _, num_local = counts.shape
    num_rows = int(counts[0].sum())
    every = exchanges(counts, num_rows, int(counts.sum(2).max()) + spare)
    # A row says where it comes from and which expert it is for.
    experts = [torch.arange(num_ranks * num_local).repeat_interleave(c.flatten()) for c in counts]
    rows = [
        torch.stack((torch.full((num_rows,), rank), torch.arange(num_rows), experts[rank]), 1)
        .double()
        .requires_grad_()
        for rank in range(num_ranks)
    ]
    received = swap([e.to_slots(r) for e, r in zip(every, rows, strict=True)])
    inside = [e.sort(slots) for e, slots in zip(every, received, strict=True)]
    for rank, (exchange, found) in enumerate(zip(every, inside, strict=True)):
        assert torch.equal(exchange.rows_of_experts, counts[:, rank].sum(0))
        in_use = found[: int(exchange.rows_of_experts.sum())]
        wanted = torch.arange(rank * num_local, (rank + 1) * num_local)
        assert torch.equal(in_use[:, 2].long(), wanted.repeat_interleave(exchange.rows_of_experts))
        # By expert, rows keep the order of their source, and there their own.
        assert in_use[:, [2, 0, 1]].tolist() == sorted(in_use[:, [2, 0, 1]].tolist())
    # What is not in use is arbitrary behind the experts, forward and backward.
    for exchange, found in zip(every, inside, strict=True):
        found.data[int(exchange.rows_of_experts.sum()) :] = torch.nan
    outputs = swap([e.unsort(found * 2) for e, found in zip(every, inside, strict=True)])
    returned = [e.from_slots(slots) for e, slots in zip(every, outputs, strict=True)]
    for before, after in zip(rows, returned, strict=True):
        assert torch.equal(after, 2 * before)
    for found, exchange in zip(inside, every, strict=True):
        num_used = int(exchange.rows_of_experts.sum())
        found.register_hook(lambda g, n=num_used: torch.cat((g[:n], g[n:] * torch.nan)))
    sum((after * (1 + rank)).sum() for rank, after in enumerate(returned)).backward()
    for rank, before in enumerate(rows):
        assert torch.equal(before.grad, torch.full_like(before, 2.0 * (1 + rank)))


def test_rows_beyond_the_capacity_touch_no_memory_of_others() -> None:
    counts = torch.tensor([[[5, 0], [0, 1]], [[1, 2], [3, 0]]])
    (first, _) = exchanges(counts, 6, 3)
    assert first.rows_by_rank.tolist() == [5, 1]
    for index, limit in ((first.slot_of_row, 6), (first.row_of_slot, 6), (first.sorted_of_slot, 6)):
        assert index.min() >= 0
        assert index.max() < limit
    assert (first.slot_of_row // 3).tolist() == [0] * 5 + [1], "in the slots of their own ranks"
    assert first.rows_of_experts.tolist() == [4, 2]
    assert sorted(first.sorted_of_slot.tolist()) == list(range(6))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_it_never_waits(device: str) -> None:
    counts = torch.tensor([[[5, 0], [0, 1]], [[1, 2], [3, 0]]], device=device)
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        (first, _) = exchanges(counts, 6, 6)
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert first.rows_of_experts.tolist() == [6, 2]
