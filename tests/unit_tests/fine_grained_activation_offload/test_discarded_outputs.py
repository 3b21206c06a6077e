# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Outputs that are discarded in forward and recomputed in backward, while a copy out reads them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Optional

import pytest
import torch
from hand_driven import LAZY_NATIVE, HandDriven
from marked_group import offload_group
from toy_model import make_manager

from megatron.slipstream.fine_grained_activation_offload.storage import Residence
from megatron.slipstream.integration.seam.manager import PipelineOffloadManager
from megatron.slipstream.plan.trace import StepKind

WIDTH = 48
COUNTS = (3, 4, 2, 3)
"""Micro-batches of each iteration: each departs from the plan of the one before."""


class Recomputed:
    """A function whose output's memory is given up until backward comes to another tensor."""

    def __init__(self, function: torch.nn.Module) -> None:
        self.function = function
        self.output: Any = None
        self.context: Any = None

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        outer = self

        class Forget(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
                ctx.save_for_backward(value)
                outer.context = ctx
                return outer.function(value)

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> Any:
                torch.autograd.backward(ctx.again, gradient)
                return ctx.value.grad

        self.output = Forget.apply(value)
        return self.output

    def discard(self, hook: torch.Tensor) -> None:
        self.output.untyped_storage().resize_(0)
        hook.register_hook(self._recompute)

    def _recompute(self, _: torch.Tensor) -> None:
        context, self.context = self.context, None
        (value,) = context.saved_tensors
        context.value = value.detach().requires_grad_()
        with torch.enable_grad():
            context.again = self.function(context.value)
        storage = self.output.untyped_storage()
        storage.resize_(context.again.untyped_storage().nbytes())
        storage.copy_(context.again.untyped_storage())
        self.output = None


class Layer(torch.nn.Module):
    """A norm that is recomputed, and three parts, some of which are groups."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        parts = ("qkv_linear", "core_attn", "attn_proj")
        self.parts = torch.nn.ModuleDict({name: torch.nn.Linear(WIDTH, WIDTH) for name in parts})

    def forward(
        self,
        value: torch.Tensor,
        manager: Optional[PipelineOffloadManager],
        groups: Sequence[str],
        tells: bool,
    ) -> torch.Tensor:
        norm = Recomputed(self.norm)
        output = norm(value)
        for name, part in self.parts.items():
            if manager is None or name not in groups:
                output = torch.tanh(part(output))
                continue
            with offload_group(manager, name) as group:
                output = torch.tanh(part(output))
            output = group.commit(output)
        if manager is not None and tells:
            manager.store.before_discard(norm.output)
        norm.discard(output)
        return value + output


def _gradients(
    layers: Sequence[Layer],
    num_micro_batches: int,
    manager: Optional[PipelineOffloadManager] = None,
    groups: Sequence[str] = (),
    tells: bool = False,
) -> list[torch.Tensor]:
    """Of one iteration, each micro-batch's backward after the next one's forward."""
    for layer in layers:
        layer.zero_grad(set_to_none=True)
    generator = torch.Generator().manual_seed(num_micro_batches)
    waiting: deque[torch.Tensor] = deque()
    for _ in range(num_micro_batches):
        value = torch.randn(7, WIDTH, generator=generator).requires_grad_()
        if manager is not None:
            manager.init_model_chunk_offload_handler(0, None, 0, 1)
        for layer in layers:
            value = layer(value, manager, groups, tells)
        if manager is not None:
            manager.engine.mark_gradient(StepKind.BACKWARD_START, [value])
        waiting.append(value.square().sum())
        if len(waiting) == 2:
            waiting.popleft().backward()
    while waiting:
        waiting.popleft().backward()
    if manager is not None:
        manager.reset()
    return [p.grad for layer in layers for p in layer.parameters() if p.grad is not None]


@pytest.mark.parametrize("tells", [False, True], ids=["", "told before"])
@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize(
    "groups",
    [("qkv_linear",), ("qkv_linear", "core_attn"), ("qkv_linear", "core_attn", "attn_proj")],
    ids="+".join,
)
def test_what_is_recomputed_is_what_backward_reads(
    groups: Sequence[str], lag: int, tells: bool
) -> None:
    torch.manual_seed(0)
    layers = [Layer() for _ in range(3)]
    manager = make_manager("cpu-lazy", release_lag=lag)
    for count in COUNTS:
        expected = _gradients(layers, count)
        actual = _gradients(layers, count, manager, groups, tells)
        assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True)), count


def test_a_copy_out_of_what_is_discarded_is_called_back() -> None:
    """Also where it is filled again in the same place, which looks like the memory of before."""
    manager = make_manager("cpu-lazy", release_lag=3)
    manager.init_model_chunk_offload_handler(0, None, 0, 1)
    value = torch.randn(7, WIDTH, requires_grad=True)
    with offload_group(manager, "core_attn") as group:
        output = group.commit(value.exp())
    saved = output.untyped_storage()._cdata
    storage = manager.store._by_memory[saved]()
    assert storage is not None
    assert storage.residence is Residence.OFFLOADING
    manager.store.before_discard(value)  # of which nothing was saved
    assert storage.residence is Residence.OFFLOADING
    manager.store.before_discard(output)
    assert storage.residence is Residence.STAYS
    assert storage.allocation is None
    expected = output.detach().clone()
    output.untyped_storage().fill_(0)
    output.untyped_storage().copy_(expected.untyped_storage())
    output.sum().backward()
    assert value.grad is not None
    assert torch.equal(value.grad, expected)


@pytest.mark.parametrize("backend", ["cpu", LAZY_NATIVE])
@pytest.mark.parametrize("what", ["emptied", "emptied and filled elsewhere", "changed in place"])
def test_only_what_is_emptied_counts_as_recomputed(what: str, backend: str) -> None:
    """A tensor changed in place while it is copied stays too, for another reason."""
    bench = HandDriven(backend)
    tensor = torch.randn(64)
    group = bench.group()
    kept = bench.save(group, tensor)
    bench.copy_out(group)
    if what == "changed in place":
        tensor.add_(1)
    else:
        nbytes, address = tensor.untyped_storage().nbytes(), tensor.data_ptr()
        tensor.untyped_storage().resize_(0)
        if what == "emptied and filled elsewhere":
            taken = [torch.empty(64) for _ in range(20)]
            tensor.untyped_storage().resize_(nbytes)
            assert tensor.data_ptr() != address
            del taken
    bench.store.release(group)
    assert kept.storage.is_on_device
    (traced,) = bench.recorder.finish(0, bench.groups).storages
    assert traced.held_outside
    assert traced.is_recomputed is (what != "changed in place")
