# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Small copies to the host run as kernels, and leave other tensors to what was there."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.moe import moe_utils, token_dispatcher

from megatron.slipstream.patches.d2h_by_kernel import D2HByKernel


def test_the_dispatcher_copies_by_kernel() -> None:
    assert isinstance(moe_utils.maybe_move_tensor_to_cpu, D2HByKernel)


def test_a_tensor_of_the_host_is_left_as_it_is() -> None:
    tensor = torch.arange(3)
    assert moe_utils.maybe_move_tensor_to_cpu(tensor) is tensor


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_counts_arrive_behind_the_stream() -> None:
    counts = torch.arange(8, device="cuda")
    copy = moe_utils.maybe_move_tensor_to_cpu(counts, as_numpy=True)
    torch.cuda.current_stream().synchronize()
    assert copy.tolist() == list(range(8))


def test_the_expert_map_is_filled_by_one_scatter() -> None:
    indices = torch.tensor([[0, 2], [-1, 1]])
    probs = torch.tensor([[0.25, 0.75], [0.5, 1.0]], requires_grad=True)
    convert = token_dispatcher._DeepepManager._indices_to_multihot
    chosen, weights = convert(SimpleNamespace(num_local_experts=3), indices, probs)
    assert chosen.tolist() == [[True, False, True], [False, True, False]]
    assert weights.tolist() == [[0.25, 0.0, 0.75], [0.0, 1.0, 0.0]]
    weights.sum().backward()
    assert probs.grad.tolist() == [[1.0, 1.0], [0.0, 1.0]]
