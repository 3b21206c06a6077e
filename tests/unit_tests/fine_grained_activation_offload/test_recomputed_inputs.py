# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The inputs of what is recomputed leave, and are back before the recomputation reads them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Optional

import pytest
import torch
from hand_driven import LAZY_NATIVE, HandDriven
from marked_group import offload_group
from toy_model import WIDTH, make_manager

from megatron.slipstream.integration.seam.manager import PipelineOffloadManager
from megatron.slipstream.plan.trace import StepKind

# Hidden leaves.


class SavesALeaf(torch.autograd.Function):
    """Doubles its input, of which it saves a detached copy of its own that requires a gradient."""

    made: list[torch.Tensor]
    keeps = False
    """Whether Python code holds a reference to the leaf, too."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        leaf = tensor.detach().requires_grad_()
        SavesALeaf.made = [leaf] if SavesALeaf.keeps else []
        ctx.save_for_backward(leaf)
        return tensor * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (leaf,) = ctx.saved_tensors
        assert leaf.is_leaf
        assert leaf.requires_grad
        with torch.enable_grad():
            # What autograd, and hooks on gradients, see of the leaf itself.
            accumulate: Any = leaf.view_as(leaf).grad_fn.next_functions[0][0]
            assert torch.equal(accumulate.variable, leaf)
            return torch.autograd.grad(leaf * 2, leaf, gradients[0])[0]


@pytest.fixture(params=["cpu-lazy", LAZY_NATIVE])
def bench(request: pytest.FixtureRequest) -> HandDriven:
    return HandDriven(request.param)


def _run_and_send(bench: HandDriven) -> tuple[torch.Tensor, torch.Tensor, weakref.ref[Any]]:
    """The input, the output and the memory that the function saved, its group sent to the host."""
    torch.manual_seed(0)
    x = torch.randn(40, 8, requires_grad=True)
    hidden = (x * 3)[5:]
    gone = weakref.ref(hidden.untyped_storage())
    group = bench.group()
    pack = partial(bench.store.pack, group)
    with torch.autograd.graph.saved_tensors_hooks(pack, bench.unpack):
        y = SavesALeaf.apply(hidden)
    del hidden
    bench.send(group)
    return x, y, gone


def test_a_leaf_that_only_autograd_keeps_gives_its_memory_up(bench: HandDriven) -> None:
    x, y, gone = _run_and_send(bench)
    assert gone() is None
    y.backward(torch.ones_like(y))
    expected = torch.zeros_like(x)
    expected[5:] = 6
    assert x.grad is not None
    assert torch.equal(x.grad, expected)


def test_nothing_is_taken_from_a_leaf_with_other_references(
    bench: HandDriven, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SavesALeaf, "keeps", True)
    x, y, gone = _run_and_send(bench)
    (leaf,) = SavesALeaf.made
    assert gone() is not None
    assert torch.equal(leaf, (x * 3)[5:])
    y.backward(torch.ones_like(y))
    assert x.grad is not None
    assert torch.equal(x.grad[5:], torch.full_like(leaf, 6))


def test_a_leaf_that_another_graph_has_saved_is_not_hidden(bench: HandDriven) -> None:
    torch.manual_seed(0)
    leaf = torch.randn(40, 8, requires_grad=True)
    expected = leaf.detach().clone()
    other = leaf * leaf  # saves the leaf outside of any group
    group = bench.group()
    saved = bench.save(group, leaf)
    del leaf
    bench.send(group)
    other.sum().backward()
    assert torch.equal(bench.store.read(saved), expected)


# A recomputation that reads before backward comes to the end of the group.


class Recomputed:
    """Recomputes a function of ``x`` once the gradient of ``hook_tensor`` is there."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._function = function
        self._context: Any = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.output = _RecomputedFunction.apply(x, self)
        return self.output

    def discard(self, hook_tensor: torch.Tensor) -> None:
        self.output.untyped_storage().resize_(0)
        hook_tensor.register_hook(self._recompute)

    def _recompute(self, _: torch.Tensor) -> None:
        (x,) = self.context.saved_tensors
        self.context.x = x.detach().requires_grad_()
        with torch.enable_grad():
            self.context.y = self._function(self.context.x)
        memory = self.context.y.untyped_storage()
        self.output.untyped_storage().resize_(memory.nbytes()).copy_(memory)


class _RecomputedFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, recomputed: Recomputed) -> torch.Tensor:
        ctx.save_for_backward(x.detach().requires_grad_())
        recomputed.context = ctx
        with torch.no_grad():
            return recomputed._function(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        torch.autograd.backward(ctx.y, gradients)
        return ctx.x.grad, None


class Layer(torch.nn.Module):
    """As MLA's attention: what is recomputed behind ``core`` begins in a group that ends before."""

    def __init__(self) -> None:
        super().__init__()
        self.down = torch.nn.Linear(WIDTH, WIDTH)
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.core = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, manager: Optional[PipelineOffloadManager]) -> torch.Tensor:
        if manager is None:
            return x + self.core(torch.sin(self.up(self.down(x)))).exp()
        recomputed = Recomputed(lambda compressed: torch.sin(self.up(compressed)))
        with offload_group(manager, "up") as group:
            hidden = recomputed(self.down(x))
        hidden = group.commit(hidden)
        with offload_group(manager, "core") as group:
            out = self.core(hidden).exp()
        out = group.commit(out)
        recomputed.discard(out)
        return x + out


def _train(
    layers: torch.nn.ModuleList, manager: Optional[PipelineOffloadManager], num_iterations: int = 3
) -> list[torch.Tensor]:
    results = []
    for iteration in range(num_iterations):
        layers.zero_grad(set_to_none=True)
        for micro_batch in range(2):
            torch.manual_seed(10 * iteration + micro_batch)
            x = torch.randn(6, WIDTH)
            if manager is not None:
                manager.init_model_chunk_offload_handler(0, None, 0, 1)
            for layer in layers:
                x = layer(x, manager)
            x.square().sum().backward()
        if manager is not None:
            manager.reset()
        results += [parameter.grad.clone() for parameter in layers.parameters()]
    return results


def _layers() -> torch.nn.ModuleList:
    torch.manual_seed(3)
    return torch.nn.ModuleList(Layer() for _ in range(4))


@pytest.mark.parametrize("backend", ["cpu-lazy", LAZY_NATIVE])
def test_a_group_is_used_where_a_recomputation_reads_it(backend: str) -> None:
    manager = make_manager(backend)
    expected, actual = _train(_layers(), None), _train(_layers(), manager)
    assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))
    plan = manager.plan
    assert plan is not None
    trace = plan.trace
    assert {group.name for group in trace.groups if group.is_read_first} == {"up"}
    for group in trace.groups:
        if group.is_read_first:
            core = group.key._replace(group=group.key.group + 1)
            use = trace.step_index[StepKind.BACKWARD_USE, group.key]
            assert use == trace.step_index[StepKind.BACKWARD_USE, core] - 1
            assert not any(trace.storages[index].held_outside for index in group.storages)
    total = manager.report.total
    assert total.d2h_bytes == total.freed_bytes > 0
    assert total.num_late == 0, "the plan reloads for the recomputation"


def test_a_group_that_stays_is_used_at_the_same_step(caplog: pytest.LogCaptureFixture) -> None:
    """Its reads are noticed too: else each iteration would depart from its plan."""
    caplog.set_level("INFO")
    manager = make_manager("cpu", activation_offload_fraction=0.5)
    _train(_layers(), manager, 6)
    plan = manager.plan
    assert plan is not None
    assert any(group.name == "up" and not group.moves for group in plan.groups)
    assert not any("is not in the plan" in record.message for record in caplog.records)


def test_looking_at_a_graph_is_no_use() -> None:
    manager = make_manager("cpu")
    layers = _layers()
    manager.init_model_chunk_offload_handler(0, None, 0, 1)
    x = torch.randn(6, WIDTH)
    with offload_group(manager, "up") as group:
        y = layers[0].down(x).exp()
    y = group.commit(y)
    steps = manager.engine.now.num_steps
    assert y.grad_fn.next_functions[0][0]._saved_result is not None
    assert manager.engine.now.num_steps == steps
    y.sum().backward()
    manager.reset()
