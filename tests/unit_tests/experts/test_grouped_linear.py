# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Grouped linear layers compute what a loop over the experts computes, bit by bit."""

from __future__ import annotations

from typing import Any, Optional

import pytest
import torch

from megatron.slipstream.experts.grouped_linear import grouped_linear

IN, OUT = 16, 24
COUNTS = {
    "several": (5, 9, 2, 8),
    "some without rows": (0, 7, 0, 3),
    "all rows to one": (0, 0, 13, 0),
    "the last without rows": (4, 4, 1, 0),
    "no rows": (0, 0, 0, 0),
}


def _tensors(counts: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(sum(counts))
    shapes = (sum(counts), IN), (len(counts), OUT, IN), (sum(counts), OUT)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def _by_loop(counts: tuple[int, ...], tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    runs = tokens.split(list(counts))
    return torch.cat([run @ one.t() for run, one in zip(runs, weight, strict=True)])


def _grouped(
    counts: tuple[int, ...], tokens: torch.Tensor, weight: torch.Tensor, **options: Any
) -> torch.Tensor:
    offsets = torch.tensor(counts).cumsum(0, dtype=torch.int32)
    return grouped_linear(tokens, weight, offsets, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_it_is_a_loop_over_experts(counts: tuple[int, ...], dtype: torch.dtype) -> None:
    tokens, weight, gradient = _tensors(counts, dtype)
    results = []
    for apply in (_by_loop, _grouped):
        leaves = [tensor.clone().requires_grad_() for tensor in (tokens, weight)]
        output = apply(counts, *leaves)
        output.backward(gradient)
        results.append([output.detach(), *(leaf.grad for leaf in leaves)])
    for left, right in zip(*results, strict=True):
        assert left.dtype == right.dtype == dtype
        assert torch.equal(left, right)


def test_a_frozen_weight_gets_no_gradient() -> None:
    tokens, weight, gradient = _tensors((3, 4), torch.float32)
    _grouped((3, 4), tokens.requires_grad_(), weight).backward(gradient)
    assert tokens.grad is not None
    assert weight.grad is None


@pytest.mark.parametrize("returned", [None, torch.ones(2, OUT, IN)], ids=["nothing", "another"])
def test_a_weight_gradient_may_go_elsewhere(returned: Optional[torch.Tensor]) -> None:
    tokens, weight, gradient = _tensors((3, 4), torch.float32)
    taken: list[torch.Tensor] = []

    def take(of_weight: torch.Tensor) -> Optional[torch.Tensor]:
        taken.append(of_weight.clone())
        return returned

    _grouped((3, 4), tokens, weight.requires_grad_(), take_gradient=take).backward(gradient)
    runs = zip(gradient.split([3, 4]), tokens.split([3, 4]), strict=True)
    expected = torch.stack([of_output.t() @ run for of_output, run in runs])
    assert torch.equal(taken[0], expected)
    assert weight.grad is None if returned is None else torch.equal(weight.grad, returned)


@pytest.mark.gpu
def test_it_never_waits_for_the_gpu() -> None:
    """Rows of no multiple of 8, experts without rows, in bf16."""
    counts = (37, 0, 101, 6)
    tokens, weight, gradient = (tensor.cuda() for tensor in _tensors(counts, torch.bfloat16))
    leaves = [tensor.clone().requires_grad_() for tensor in (tokens, weight)]
    offsets = torch.tensor(counts).cumsum(0, dtype=torch.int32).cuda()
    grouped_linear(*leaves, offsets).backward(gradient)  # what torch sets up once may wait
    for leaf in leaves:
        leaf.grad = None
    torch.cuda.set_sync_debug_mode("error")
    try:
        output = grouped_linear(*leaves, offsets)
        output.backward(gradient)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = [tensor.clone().requires_grad_() for tensor in (tokens, weight)]
    by_loop = _by_loop(counts, *expected)
    by_loop.backward(gradient)
    pairs = [(output, by_loop)]
    pairs += [(left.grad, right.grad) for left, right in zip(leaves, expected, strict=True)]
    for left, right in pairs:
        torch.testing.assert_close(left, right, rtol=1.6e-2, atol=1e-1)
