# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""megatron-core's fused rotation of queries, with every block size that Triton may choose."""

from __future__ import annotations

import itertools

import pytest
import torch
from megatron.core.fusions import fused_mla_yarn_rope_apply as fused

from megatron.slipstream.patches import rotary_kernels, table
from megatron.slipstream.patches.table import Feature

pytestmark = [pytest.mark.gpu, pytest.mark.releases]

OFFSETS = (0, 608, 808, 2032, 2032, 2032, 2048)
"""Offsets of the sequences of two ranks; this is the first rank."""
NUM_TOKENS = OFFSETS[-1] // 2
NUM_LAUNCHES = 300
BEFORE_0_20 = rotary_kernels.IN_PLACE[:2]
NAMES = [name for name in rotary_kernels.IN_PLACE if name in vars(fused)]


def _positions() -> torch.Tensor:
    """Positions of the rank's tokens: the first and the last of four parts of each sequence."""
    parts = []
    for start, end in itertools.pairwise(OFFSETS):
        quarter = (end - start) // 4
        parts += [torch.arange(quarter), torch.arange(3 * quarter, 4 * quarter)]
    return torch.cat(parts).cuda()


def _rotated_forward(
    values: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Deinterleave: even elements to the left half, odd ones to the right."""
    first, second = values[..., 0::2], values[..., 1::2]
    half = first.shape[-1]
    left = first * cos[..., :half] - second * sin[..., :half]
    right = second * cos[..., half:] + first * sin[..., half:]
    return left, right


def _expected(name: str, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Reference in float32 by torch; its backward is the derivative of forward."""
    nope = x.shape[-1] - cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    rotated = x[..., nope:].float().requires_grad_()
    outputs = _rotated_forward(rotated, cos, sin)
    if "fwd" in name:
        result = torch.cat(outputs, -1)
    else:
        gradients = rotated.detach().chunk(2, -1)
        (result,) = torch.autograd.grad(outputs, rotated, gradients)
    return torch.cat([x[..., :nope].float(), result], -1)


@pytest.mark.parametrize("num_heads, nope, dim", [(8, 64, 32), (16, 128, 64), (12, 64, 32)])
@pytest.mark.parametrize("name", NAMES)
def test_every_block_size_rotates_right_every_time(
    name: str, num_heads: int, nope: int, dim: int
) -> None:
    table.apply(Feature.FUSED_ROTATION)
    tuned = getattr(fused, name)
    tuned.nargs = {"head_num": num_heads}
    torch.manual_seed(1)
    cos, sin = (torch.randn(OFFSETS[-1], dim, device="cuda") for _ in range(2))
    x = torch.randn(NUM_TOKENS, num_heads, nope + dim, device="cuda", dtype=torch.bfloat16)
    offsets = torch.tensor(OFFSETS, dtype=torch.int32, device="cuda")
    expected = _expected(name, x, cos[_positions()], sin[_positions()])
    wrong = {}
    for config in tuned.prune_configs({}):
        heads = config.kwargs["BLOCK_H"]
        grid = (NUM_TOKENS, -(-num_heads // heads))
        results = []
        for _ in range(NUM_LAUNCHES):
            rotated = x.clone()
            strides = rotated.stride()[:2]
            layout = (*strides, 0, 2)
            if name not in BEFORE_0_20:  # Without positions; not inverse, not interleaved.
                layout = (None, *strides, cos.stride(0), sin.stride(0), 0, 2, False, False)
            tuned.fn[grid](
                *(rotated, cos, sin, nope, dim, num_heads, None, len(OFFSETS) - 1, offsets),
                *layout,
                **config.kwargs,
                num_warps=config.num_warps,
            )
            results.append(rotated)
        torch.testing.assert_close(results[0].float(), expected, rtol=2**-7, atol=2**-7)
        wrong[heads] = sum(not torch.equal(rotated, results[0]) for rotated in results)
    assert not any(wrong.values()), f"launches that differ from the first, by block: {wrong}"
