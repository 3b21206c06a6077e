# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A chosen module may save tensors of any kind: what has no memory of its own stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensor_kinds import KINDS, SIZE, STAYING, tensor_of_kind

from megatron.slipstream.attached.handle import Attached, attach
from megatron.slipstream.options.fields import OffloadConfig
from megatron.slipstream.plan.staying import Staying

PATHS = ["auto", "off"]
"""``offload_native``: with the hooks in C++, and without."""


class Saves(torch.autograd.Function):
    """Saves a tensor of any kind for backward, and counts how often it comes back as itself."""

    num_returned = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, hidden: list[torch.Tensor]) -> torch.Tensor:
        (special,) = hidden  # As arguments, torch opens or refuses some kinds.
        ctx.save_for_backward(x, special)
        ctx.kind = (type(special), special.layout, special.shape if not special.is_nested else None)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, special = ctx.saved_tensors
        shape = special.shape if not special.is_nested else None
        assert ctx.kind == (type(special), special.layout, shape)
        Saves.num_returned += 1
        return gradient * x.cos(), None


class Layer(torch.nn.Module):
    def __init__(self, kind: str, held_as: str) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(SIZE, SIZE)
        special = tensor_of_kind(kind)
        if held_as == "buffer":
            self.register_buffer("special", special)
        elif held_as == "parameter":
            self.special = torch.nn.Parameter(special, requires_grad=False)
        else:
            self.special = special

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + Saves.apply(self.linear(x), [self.special])


def train(kind: str, held_as: str, path: str | None) -> tuple[list[Any], Attached | None]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Layer(kind, held_as) for _ in range(3)))
    attached = None
    if path is not None:
        config = OffloadConfig(offload_backend="cpu-lazy", offload_native=path)
        attached = attach(model, Layer, config, min_offloaded_tensor_size=1)
    results = []
    for step in range(3):
        x = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        loss.backward()
        results.append(loss.item())
    return results + [layer.linear.weight.grad.tolist() for layer in model], attached


CASES = [
    (kind, held_as)
    for kind in KINDS
    for held_as in ("attribute", "buffer", "parameter")
    if (kind, held_as) != ("vmap", "parameter")  # torch cannot make it.
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("kind", "held_as"), CASES)
def test_a_saved_tensor_of_any_kind_comes_back(kind: str, held_as: str, path: str) -> None:
    expected, _ = train(kind, held_as, None)
    before = Saves.num_returned
    results, attached = train(kind, held_as, path)
    assert results == expected
    assert Saves.num_returned == before + 9
    assert attached is not None
    rank = attached.report().ranks[0]
    assert rank.is_native is (path == "auto")
    assert attached.engine.plan is not None
    named = {STAYING[kind].text}
    if held_as != "attribute":
        named.add(Staying.PARAMETER.text)
    for group in attached.engine.plan.trace.groups:
        assert named & set(group.stays)
    moved = rank.modules["Layer"]
    assert moved.num_groups_moved == 2
    # Of two layers the linear part's input and output, except the model's input, which is held.
    assert moved.d2h_bytes == 3 * 4 * SIZE * 4
