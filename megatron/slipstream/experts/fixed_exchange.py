# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Exchanges rows between ranks at a fixed capacity, so that the host needs no row counts.

Each rank has a slot of ``capacity`` rows for each rank, and a collective of equal parts exchanges
the slots. The number of used rows of each slot is exchanged as well and stays on the device.

[Note: Rows that are not in use]
The rest of a slot holds copies of other rows. It is sorted after all experts, where a grouped GEMM
neither reads nor writes. So its outputs and gradients are arbitrary, and are dropped: rows are
gathered by the index of used rows only, in forward and backward.
"""

from __future__ import annotations

from typing import Any

import torch


class FixedExchange:
    """Row indices of one exchange, on the device.

    Rows are sorted by expert, and experts by rank. Received slots are in source rank order.

    Of int64 ``[num_ranks, num_local_experts]`` each: ``sent`` are the rows for each expert of each
    rank, ``received`` those from each rank for each local expert.
    """

    def __init__(
        self, sent: torch.Tensor, received: torch.Tensor, num_rows: int, capacity: int
    ) -> None:
        device, num_ranks = sent.device, sent.shape[0]
        self.rows_by_rank = sent.sum(1)
        """int64 ``[num_ranks]``: rows needed in each slot."""
        ends = self.rows_by_rank.cumsum(0)
        begins = ends - self.rows_by_rank
        row = torch.arange(num_rows, device=device)
        rank = torch.bucketize(row, ends, right=True).clamp(max=num_ranks - 1)
        within = (row - begins[rank]).clamp(max=capacity - 1)
        self.slot_of_row = rank * capacity + within
        """int64 ``[num_rows]``: the position of each row among all slots."""
        place = torch.arange(capacity, device=device)
        self.row_of_slot = (begins[:, None] + place).clamp(max=num_rows - 1).flatten()
        """int64 ``[num_ranks * capacity]``: the row at each position; see the note above."""

        ends = received.cumsum(1).clamp(max=capacity)
        begins = torch.cat((ends.new_zeros(num_ranks, 1), ends), 1)
        counts = ends - begins[:, :-1]
        self.rows_of_experts = counts.sum(0)
        """int64 ``[num_local_experts]``: rows for each expert, from all ranks."""
        # The expert of each position; for unused positions, one past the last.
        expert = torch.searchsorted(ends, place.expand(num_ranks, -1).contiguous(), right=True)
        unused = capacity - ends[:, -1:]
        counts = torch.cat((counts, unused), 1)
        totals = counts.sum(0)
        first = (totals.cumsum(0) - totals) + (counts.cumsum(0) - counts)
        ordered = (first - begins).gather(1, expert) + place
        self.sorted_of_slot = ordered.flatten()
        """int64 ``[num_ranks * capacity]``: each received row's position when sorted by expert."""
        self.slot_of_sorted = torch.empty_like(self.sorted_of_slot).scatter_(
            0, self.sorted_of_slot, torch.arange(num_ranks * capacity, device=device)
        )

    def to_slots(self, rows: torch.Tensor) -> torch.Tensor:
        """Put the rows to send, ``[num_rows, ...]``, into their slots."""
        return _gather(rows, self.row_of_slot, self.slot_of_row)

    def sort(self, slots: torch.Tensor) -> torch.Tensor:
        """Sort received slots, ``[num_ranks * capacity, ...]``, by expert."""
        return _gather(slots, self.slot_of_sorted, self.sorted_of_slot)

    def unsort(self, rows: torch.Tensor) -> torch.Tensor:
        return _gather(rows, self.sorted_of_slot, self.slot_of_sorted)

    def from_slots(self, slots: torch.Tensor) -> torch.Tensor:
        return _gather(slots, self.slot_of_row, self.row_of_slot)


class _Gather(torch.autograd.Function):
    """Gathers rows by an index, and gradients by the inverse index, without accumulation."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, index: torch.Tensor, back: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(back)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (back,) = ctx.saved_tensors
        return gradients[0].index_select(0, back), None, None


def _gather(rows: torch.Tensor, index: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
    gathered: torch.Tensor = _Gather.apply(rows, index, back)
    return gathered
