# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A measured pass needs as much memory as a captured one."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from ranks import run_ranks
from tiny_gpt import ModelCase, initialize

from megatron.slipstream.patches import exchanged_tensors, table
from megatron.slipstream.patches.patching import applied

NUMEL = 1000


def _batched(sent: torch.Tensor, received: torch.Tensor, other: int) -> list[Any]:
    return torch.distributed.batch_isend_irecv(
        [
            torch.distributed.P2POp(torch.distributed.isend, sent, other),
            torch.distributed.P2POp(torch.distributed.irecv, received, other),
        ]
    )


def _one_by_one(sent: torch.Tensor, received: torch.Tensor, other: int) -> list[Any]:
    send = torch.distributed.isend(sent, other)
    return [send, torch.distributed.irecv(tensor=received, src=other)]


def _exchanged_tensors_that_live(
    rank: int, num_ranks: int, port: int
) -> list[tuple[int, int, list[float]]]:
    """For each kind of exchange: tensors alive inside and outside, and the received values."""
    initialize(ModelCase(pp=2), rank, num_ranks, port)
    found = []
    for exchange in (_batched, _one_by_one):
        before = torch.distributed.isend, torch.distributed.distributed_c10d.irecv
        with applied(table.EXCHANGES), exchanged_tensors.kept():
            living, came = _exchange(exchange, rank)
            inside = sum(reference() is not None for reference in living)
        outside = sum(reference() is not None for reference in living)
        assert before == (torch.distributed.isend, torch.distributed.distributed_c10d.irecv)
        found.append((inside, outside, came))
    return found


def _exchange(
    exchange: Callable[..., list[Any]], rank: int
) -> tuple[list[weakref.ref[torch.Tensor]], list[float]]:
    living, came = [], []
    for number in range(3):
        sent = torch.full((NUMEL,), float(10 * number + rank))
        received = torch.empty(NUMEL)
        living += [weakref.ref(sent), weakref.ref(received)]
        for work in exchange(sent, received, 1 - rank):
            work.wait()
        came.append(float(received[-1]))
    return living, came


def test_what_is_exchanged_stays_until_the_end() -> None:
    for rank, found in enumerate(run_ranks(2, _exchanged_tensors_that_live)):
        assert found == [(6, 0, [1.0 - rank, 11.0 - rank, 21.0 - rank])] * 2
