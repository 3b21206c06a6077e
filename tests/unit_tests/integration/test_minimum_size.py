# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The minimum size counts the memory that a saved tensor keeps alive, not its own elements."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from attached_models import equal, gradients
from hand_driven import LAZY_NATIVE, HandDriven
from tiny_gpt import ModelCase, compare_on_ranks

from megatron.slipstream.attached.handle import Attached, attach
from megatron.slipstream.options.fields import OffloadConfig

Tensor = torch.Tensor

GROUPS, HEADS, WIDTH = 2, 6, 8
TOKENS = (16, 4)


def keys_of_a_fused_projection() -> Tensor:
    """Keys of grouped-query attention: an eighth of the projection's output."""
    fused = torch.randn(*TOKENS, GROUPS, (HEADS + 2) * WIDTH)
    return fused.split([HEADS * WIDTH, WIDTH, WIDTH], dim=-1)[1]


VIEWS: dict[str, Callable[[], Tensor]] = {
    "keys": keys_of_a_fused_projection,
    "class token": lambda: torch.randn(16, 64, 8)[:, 0],
    "one row": lambda: torch.randn(64, 128)[3],
    "two elements": lambda: torch.randn(8192)[100:102],
    "other type": lambda: torch.randn(8192).view(torch.complex64)[7:9],
}
"""Small views of 8192 elements."""


@pytest.fixture(params=["cpu-lazy", LAZY_NATIVE])
def bench(request: pytest.FixtureRequest) -> HandDriven:
    return HandDriven(request.param)


@pytest.mark.parametrize("name", VIEWS)
def test_a_small_view_of_large_memory_moves(bench: HandDriven, name: str) -> None:
    view = VIEWS[name]()
    expected, gone = view.clone(), weakref.ref(view.untyped_storage())
    group = bench.group()
    saved = bench.save(group, view, min_numel=4096)
    del view
    gc.collect()
    bench.send(group)
    assert gone() is None
    assert torch.equal(bench.unpack(saved), expected)


def test_only_the_saved_part_of_the_memory_is_copied(bench: HandDriven) -> None:
    base = torch.randn(64, 1024)
    group = bench.group()
    saved = bench.save(group, base[9], base[3], min_numel=4096)
    expected = base[3].clone()
    del base
    bench.send(group)
    assert torch.equal(bench.unpack(saved[1]), expected)
    moved = sum(item.d2h_bytes for item in bench.store.modules.values())
    assert moved == 7 * 1024 * 4  # rows 3 to 9


@pytest.mark.parametrize("numel", [4095, 4096])
def test_the_minimum_is_that_of_the_memory(bench: HandDriven, numel: int) -> None:
    group = bench.group()
    kept = bench.save(group, torch.randn(numel).expand(64, numel), min_numel=4096)
    assert isinstance(kept, Tensor) is (numel < 4096)


# --- a small view that is saved before the large tensor, and after it ----------------------------


class SavesBoth(torch.nn.Module):
    def __init__(self, is_small_first: bool) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(32, 32)
        self.is_small_first = is_small_first

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        first = y[:, 0]
        if self.is_small_first:
            small = first * first.sin()
            large = y * y.cos()
        else:
            large = y * y.cos()
            small = first * first.sin()
        return large + small[:, None]


def train(is_small_first: bool, path: str | None) -> tuple[list[Tensor], Attached | None]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(SavesBoth(is_small_first) for _ in range(5)))
    attached = None
    if path is not None:
        config = OffloadConfig(offload_backend="cpu-lazy", offload_native=path)
        attached = attach(model, SavesBoth, config, min_offloaded_tensor_size=1000)
    losses = []
    for step in range(3):
        torch.manual_seed(step)
        losses.append(model(torch.randn(4, 64, 32)).square().mean())
        losses[-1].backward()
    return [*(loss.detach() for loss in losses), *gradients(model)], attached


@pytest.mark.parametrize("path", ["auto", "off"])
def test_the_order_of_saving_does_not_matter(path: str) -> None:
    moved = []
    for is_small_first in (False, True):
        results, attached = train(is_small_first, path)
        assert equal(results, train(is_small_first, None)[0])
        assert attached is not None
        assert attached.engine.plan is not None
        storages = attached.engine.plan.trace.storages
        assert not any(storage.held_outside for storage in storages)
        counted = attached.report().ranks[0].modules["SavesBoth"]
        moved.append((counted.num_groups_moved, counted.d2h_bytes, counted.freed_bytes))
    assert moved[0] == moved[1]
    assert moved[0][0] == 4


# --- megatron-core --------------------------------------------------------------------------------


@pytest.mark.parametrize("native", ["auto", "off"])
def test_values_that_keep_a_fused_projection_move(native: str) -> None:
    """The local attention saves values as a view of the whole projection."""
    case = ModelCase(overrides={"num_query_groups": 4})
    projected = 3 * case.seq_length * case.micro_batch_size * case.hidden_size
    offload = {"min_offloaded_tensor_size": projected, "offload_native": native}
    (done,) = compare_on_ranks(1, case, ["core_attn"], "cpu-lazy", [2, 2, 2], offload)
    assert done.difference is None
    num_moved = 2 * (case.num_layers - 1)  # micro-batches; the last layer stays
    assert done.moved_bytes == done.freed_bytes == num_moved * projected * 4
