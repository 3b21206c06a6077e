# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""That training is bit by bit the same with graphs rests on kernels that do not depend on the time
at which they run: in a graph others run beside them that without one are over by then."""

from __future__ import annotations

import random

import pytest
import torch

pytestmark = pytest.mark.gpu

NUM_HEADS = 8
NUM_TOKENS = 2048
NUM_REPLAYS = 300


def _backward_of_attention(dims: tuple[int, int]) -> list[torch.Tensor]:
    """What a captured backward pass through packed sequences writes: gradients of q, k and v.

    Beside it, on another stream, products of matrices take part of the GPU.
    """
    from transformer_engine.pytorch import DotProductAttention

    qk_dim, v_dim = dims
    generator = torch.Generator("cuda").manual_seed(3)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    attention = DotProductAttention(
        NUM_HEADS,
        (qk_dim, v_dim),
        attention_dropout=0.0,
        qkv_format="thd",
        attn_mask_type="padding_causal",
    )
    query, key = (values(NUM_TOKENS, NUM_HEADS, qk_dim).requires_grad_() for _ in range(2))
    value = values(NUM_TOKENS, NUM_HEADS, v_dim).requires_grad_()
    grad = values(NUM_TOKENS, NUM_HEADS * v_dim)
    valid = torch.tensor([0, 1501, 1800, 2000, 2000], dtype=torch.int32, device="cuda")
    padded = torch.tensor([0, 1504, 1808, 2008, 2048], dtype=torch.int32, device="cuda")

    def backward() -> tuple[torch.Tensor, ...]:
        output = attention(
            query,
            key,
            value,
            cu_seqlens_q=valid,
            cu_seqlens_kv=valid,
            cu_seqlens_q_padded=padded,
            cu_seqlens_kv_padded=padded,
            max_seqlen_q=NUM_TOKENS,
            max_seqlen_kv=NUM_TOKENS,
            pad_between_seqs=True,
        )
        return torch.autograd.grad(output, (query, key, value), grad)

    matrix = values(640, 640)
    beside = torch.cuda.Stream()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        backward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        beside.wait_stream(stream)
        with torch.cuda.stream(beside):
            for _ in range(12):
                matrix @ matrix
        gradients = backward()
        stream.wait_stream(beside)

    draw = random.Random(5)
    found = []
    busy = torch.cuda.Stream()
    for _ in range(NUM_REPLAYS):
        with torch.cuda.stream(busy):
            torch.cuda._sleep(draw.randint(1, 200_000))
            values_beside = matrix @ matrix
        graph.replay()
        found.append(torch.cat([gradient.flatten() for gradient in gradients]).view(torch.int16))
        torch.cuda.synchronize()
        del values_beside
    differing = [(found[0] != other).sum() for other in found[1:]]
    return differing


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (96, 64), (192, 128)], ids=str)
def test_gradients_do_not_depend_on_what_runs_beside_them(dims: tuple[int, int]) -> None:
    differing = torch.stack(_backward_of_attention(dims)).tolist()
    assert not any(differing), f"{sum(map(bool, differing))} of {len(differing)}: {differing}"
