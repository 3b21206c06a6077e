# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""What the host reads of a tensor is found without a GPU, in forward and in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from host_reads import HostReads

VALUES, MASK = torch.arange(3), torch.tensor([True, False, True])
READS: dict[str, Callable[[], Any]] = {
    "item": lambda: VALUES.sum().item(),
    "tolist": lambda: VALUES.tolist(),
    "cpu": lambda: VALUES.cpu(),
    "to": lambda: VALUES.to(device="cpu"),
    "numpy": lambda: VALUES.numpy(),
    "bool": lambda: bool(MASK.any()),
    "int": lambda: int(VALUES.sum()),
    "nonzero": lambda: torch.nonzero(MASK),
    "index": lambda: VALUES[MASK],
    "masked_select": lambda: VALUES.masked_select(MASK),
    "repeat_interleave": lambda: torch.repeat_interleave(VALUES),
}


@pytest.mark.parametrize("name", READS)
def test_a_read_is_found(name: str) -> None:
    with HostReads() as reads:
        READS[name]()
    assert any(name in found for found in reads.found)


def test_reads_in_backward_are_found() -> None:
    class Reading(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
            return tensor.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            return gradients[0].cpu()

    output = Reading.apply(torch.ones(3, requires_grad=True)).sum()
    with HostReads() as reads:
        output.backward()
    assert [found.split()[0] for found in reads.found] == ["cpu"]


def test_what_stays_on_the_device_is_not_found() -> None:
    with HostReads() as reads:
        order = VALUES.argsort(stable=True)
        VALUES.index_select(0, order).cumsum(0).to(torch.float32)
    assert reads.found == []
    assert VALUES.tolist() == [0, 1, 2]
