# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Dispatch without waits: megatron-core's map, and small copies that bypass the queue."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe import token_dispatcher

from megatron.slipstream.patches.d2h_by_kernel import SLOT_NUMEL, D2HByKernel
from megatron.slipstream.patches.multihot_map import indices_to_multihot

pytestmark = pytest.mark.releases

TOKENS, EXPERTS, TOP_K = 65, 7, 3


def _routing(device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct experts per token, some masked; probabilities."""
    generator = torch.Generator().manual_seed(3)
    scores = torch.rand(TOKENS, EXPERTS, generator=generator)
    indices = scores.topk(TOP_K, dim=1).indices
    indices[torch.rand(TOKENS, TOP_K, generator=generator) < 0.3] = -1
    indices[0] = -1
    probs = torch.rand(TOKENS, TOP_K, generator=generator)
    return indices.to(device), probs.to(device)


def _by_megatron(indices: torch.Tensor, probs: torch.Tensor) -> Any:
    class Manager:
        num_local_experts = EXPERTS

    return token_dispatcher._DeepepManager._indices_to_multihot(Manager(), indices, probs)


def test_the_map_and_its_gradient_are_megatrons() -> None:
    indices, probs = _routing()
    weights = torch.rand(TOKENS, EXPERTS)
    results = []
    for convert in (_by_megatron, lambda i, p: indices_to_multihot(i, p, EXPERTS)):
        leaf = probs.clone().requires_grad_()
        chosen, values = convert(indices, leaf)
        (values * weights).sum().backward()
        results.append((chosen, values.detach(), leaf.grad))
    for left, right in zip(*results, strict=True):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)


def test_what_is_not_on_a_gpu_is_left_to_megatron() -> None:
    seen = []
    copies = D2HByKernel(lambda tensor, **options: seen.append((tensor, options)) or tensor)
    tensor = torch.arange(3)
    assert copies(tensor, as_numpy=True) is tensor
    assert copies(7) == 7
    assert [options["as_numpy"] for _, options in seen] == [True, False]


@pytest.mark.gpu
def test_the_map_is_made_without_a_wait() -> None:
    indices, probs = _routing("cuda")
    expected = _by_megatron(indices, probs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            _by_megatron(indices, probs)
        result = indices_to_multihot(indices, probs, EXPERTS)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("as_numpy", [False, True])
def test_values_arrive_and_stay_as_long_as_they_are_referenced(
    dtype: torch.dtype, as_numpy: bool
) -> None:
    copies = D2HByKernel(lambda tensor, **_: pytest.fail("it should not be asked"))
    kept = []
    for number in range(50):
        counts = torch.arange(number, number + 12, dtype=dtype, device="cuda").view(3, 4)
        moved = copies(counts, as_numpy=as_numpy, record_stream=True)
        torch.cuda.synchronize()
        if number % 5 == 0:
            kept.append((moved, counts.cpu()))
        del moved
    for moved, expected in kept:
        assert torch.equal(torch.as_tensor(moved), expected)
    # One for each token that is kept, and one that was passed on.
    assert sum(map(len, copies._free.values())) + len(copies._in_use) <= len(kept) + 1


@pytest.mark.gpu
def test_larger_and_other_tensors_are_left_to_megatron() -> None:
    seen = []
    copies = D2HByKernel(lambda tensor, **_: seen.append(tensor))
    copies(torch.zeros(SLOT_NUMEL + 1, dtype=torch.int64, device="cuda"))
    copies(torch.zeros(3, device="cuda"))
    assert len(seen) == 2


@pytest.mark.gpu
@pytest.mark.exclusive
def test_a_small_copy_does_not_wait_for_a_large_one() -> None:
    """Calls of the dispatcher's own copy, recorded; and those of ours."""
    nbytes = 512 << 20
    device = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    counts = torch.arange(16, device="cuda")
    bulk, own = torch.cuda.Stream(), torch.cuda.Stream()

    def milliseconds(move: Any) -> float:
        torch.cuda.synchronize()
        with torch.cuda.stream(bulk):
            host.copy_(device, non_blocking=True)
        start_s = time.perf_counter()
        with torch.cuda.stream(own):
            moved = move(counts)
            own.synchronize()
        assert moved.tolist() == list(range(16))
        return 1e3 * (time.perf_counter() - start_s)

    copies = D2HByKernel(token_dispatcher.maybe_move_tensor_to_cpu)
    milliseconds(copies)
    ours = min(milliseconds(copies) for _ in range(3))
    megatrons = min(milliseconds(token_dispatcher.maybe_move_tensor_to_cpu) for _ in range(3))
    assert ours < 1.0
    assert megatrons > 4.0, "the premise of d2h_by_kernel no longer holds on this GPU"
