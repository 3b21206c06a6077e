# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Attention kernels are deterministic at any timing. Bitwise equality with graphs needs this: in a
graph, kernels run concurrently that run one after another in an eager step."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

pytestmark = pytest.mark.gpu

NUM_HEADS = 8
NUM_TOKENS = 2048
NUM_REPLAYS = 300


def _values(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def _backward_of_attention(dims: tuple[int, int]) -> Callable[[], tuple[torch.Tensor, ...]]:
    """A function that runs packed attention and returns the gradients of q, k and v."""
    from transformer_engine.pytorch import DotProductAttention

    qk_dim, v_dim = dims
    attention = DotProductAttention(
        NUM_HEADS,
        (qk_dim, v_dim),
        attention_dropout=0.0,
        qkv_format="thd",
        attn_mask_type="padding_causal",
    )
    shapes = ((NUM_TOKENS, NUM_HEADS, dim) for dim in (qk_dim, qk_dim, v_dim))
    inputs = [_values(*shape).requires_grad_() for shape in shapes]
    grad = _values(NUM_TOKENS, NUM_HEADS * v_dim)
    valid, padded = (
        torch.tensor(offsets, dtype=torch.int32, device="cuda")
        for offsets in ([0, 1501, 1800, 2000, 2000], [0, 1504, 1808, 2008, NUM_TOKENS])
    )

    def run() -> tuple[torch.Tensor, ...]:
        output = attention(
            *inputs,
            cu_seqlens_q=valid,
            cu_seqlens_kv=valid,
            cu_seqlens_q_padded=padded,
            cu_seqlens_kv_padded=padded,
            max_seqlen_q=NUM_TOKENS,
            max_seqlen_kv=NUM_TOKENS,
            pad_between_seqs=True,
        )
        return torch.autograd.grad(output, inputs, grad)

    return run


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (96, 64), (192, 128)], ids=str)
def test_gradients_do_not_depend_on_what_runs_beside_them(dims: tuple[int, int]) -> None:
    torch.manual_seed(3)
    backward, matrix = _backward_of_attention(dims), _values(640, 640)
    stream, beside, busy = (torch.cuda.Stream() for _ in range(3))
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        backward()
    for other in (beside, busy):  # cuBLAS makes its handle in a stream's first product
        with torch.cuda.stream(other):
            matrix @ matrix
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        beside.wait_stream(stream)
        with torch.cuda.stream(beside):
            products = [matrix @ matrix for _ in range(12)]
        gradients = backward()
        stream.wait_stream(beside)
    del products

    draw = random.Random(5)
    first, differing = None, []
    for _ in range(NUM_REPLAYS):
        with torch.cuda.stream(busy):  # of another length each time
            torch.cuda._sleep(draw.randint(1, 200_000))
            product = matrix @ matrix
        graph.replay()
        found = torch.cat([gradient.flatten() for gradient in gradients]).view(torch.int16)
        torch.cuda.synchronize()
        del product
        first = found if first is None else first
        differing.append(int((found != first).sum()))
    assert not any(differing), f"{sum(map(bool, differing))} of {len(differing)}: {differing}"
