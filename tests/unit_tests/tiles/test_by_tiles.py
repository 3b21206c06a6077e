# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A function of rows gives the same by tiles, holds one tile's tensors, and asks hooks once."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.slipstream.tiles.by_tiles import run_by_tiles

ROWS, WIDTH, INSIDE = 12, 4, 32
THREE = ((0, 4), (4, 8), (8, 12))
UNEVEN = ((0, 5), (5, 6), (6, 12))
WHOLE = ((0, 12),)


class TwoLayers(torch.nn.Module):
    """Two linear layers with weights of rows: what an expert computes."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(WIDTH, INSIDE, dtype=dtype)
        self.second = torch.nn.Linear(INSIDE, WIDTH, bias=False, dtype=dtype)
        self.unused = torch.nn.Parameter(torch.ones(3, dtype=dtype))

    def forward(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.second(torch.relu(self.first(rows)) * weights.unsqueeze(-1))
        return output


def inputs(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [
        torch.randn(ROWS, WIDTH, generator=draw, dtype=dtype).requires_grad_(),
        torch.rand(ROWS, generator=draw, dtype=dtype).requires_grad_(),
    ]


def by_tiles(model: torch.nn.Module, bounds: Any, given: list[torch.Tensor]) -> torch.Tensor:
    def run(_: slice, *tiles: torch.Tensor) -> torch.Tensor:
        return model(*tiles)  # type: ignore[no-any-return]

    return run_by_tiles(run, bounds, given, list(model.parameters()))


def results(forward: Callable[..., torch.Tensor], model: torch.nn.Module) -> list[Any]:
    given = inputs(next(model.parameters()).dtype)
    output = forward(given)
    output.backward(torch.arange(output.numel(), dtype=output.dtype).view_as(output) / 10)
    return [output, *(tensor.grad for tensor in (*given, *model.parameters()))]


@pytest.mark.parametrize("bounds", [THREE, UNEVEN, WHOLE], ids=["three", "uneven", "one"])
def test_output_and_gradients_are_those_of_all_rows_at_once(bounds: Any) -> None:
    model, other = TwoLayers(), TwoLayers()
    expected = results(lambda given: model(*given), model)
    actual = results(lambda given: by_tiles(other, bounds, given), other)
    for one, two in zip(expected, actual, strict=True):
        assert (one is None) == (two is None)
        if one is not None:
            torch.testing.assert_close(one, two)
            assert bounds is not WHOLE or torch.equal(one, two)


class Seen(TorchDispatchMode):
    """The largest number of elements of a tensor that an operation creates."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, (tuple, list)) else [output]:
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return output


def test_no_tensor_inside_has_more_rows_than_a_tile() -> None:
    model = TwoLayers()
    with Seen() as seen:
        results(lambda given: by_tiles(model, THREE, given), model)
    assert seen.largest == 4 * INSIDE
    with Seen() as seen:
        results(lambda given: model(*given), model)
    assert seen.largest == ROWS * INSIDE


def test_a_tile_is_gone_before_the_next_begins() -> None:
    """One tile's tensors at a time, forward and backward."""
    alive: list[weakref.ref[torch.Tensor]] = []

    class Watched(TwoLayers):
        def forward(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            assert [r for r in alive if r() is not None] == []
            inside = self.first(rows)
            output: torch.Tensor = self.second(torch.relu(inside) * weights.unsqueeze(-1))
            alive.extend(map(weakref.ref, (rows, inside, output)))
            return output

    model = Watched()
    results(lambda given: by_tiles(model, THREE, given), model)
    assert len(alive) == 6 * 3


def test_only_the_inputs_are_saved() -> None:
    saved: list[torch.Tensor] = []
    model, given = TwoLayers(), inputs()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        by_tiles(model, THREE, given)
    assert [tensor.data_ptr() for tensor in saved] == [tensor.data_ptr() for tensor in given]


def with_main_grad(model: torch.nn.Module, zero_out: bool = False) -> list[str]:
    """Give parameters what data parallelism gives them, with hooks that note their calls."""
    calls: list[str] = []
    for name, parameter in model.named_parameters():
        own: Any = parameter
        own.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        own.grad_added_to_main_grad = False
        if zero_out:
            own.zero_out_wgrad = True

        def hook(own: Any, name: str = name) -> None:
            if own.grad is None:  # no tile depends on it
                return
            calls.append(name)
            if not own.grad_added_to_main_grad or getattr(own, "zero_out_wgrad", False):
                own.main_grad.add_(own.grad)
            own.grad = None

        parameter.register_post_accumulate_grad_hook(hook)
    return calls


@pytest.mark.parametrize("zero_out", [False, True])
def test_gradients_are_added_to_main_grad_and_hooks_run_once(zero_out: bool) -> None:
    model, other = TwoLayers(torch.bfloat16), TwoLayers(torch.bfloat16)
    calls = with_main_grad(model, zero_out)
    for _ in range(2):  # micro-batches
        results(lambda given: by_tiles(model, THREE, given), model)
    assert sorted(calls) == sorted(2 * ["first.weight", "first.bias", "second.weight"])
    expected: dict[str, torch.Tensor] = {
        name: torch.zeros_like(parameter, dtype=torch.float32)
        for name, parameter in other.named_parameters()
    }
    scale = torch.arange(ROWS * WIDTH, dtype=torch.bfloat16).view(ROWS, WIDTH) / 10
    for _ in range(2):
        for first, end in THREE:
            tiles = [tensor[first:end].detach() for tensor in inputs(torch.bfloat16)]
            other.zero_grad(set_to_none=True)
            other(*tiles).backward(scale[first:end])
            for name, parameter in other.named_parameters():
                if parameter.grad is not None:
                    expected[name] += parameter.grad
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.main_grad, expected[name]), name  # type: ignore[attr-defined]


class Fused(torch.autograd.Function):
    """A product that adds its weight's gradient to ``main_grad`` itself, and returns a dummy."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, weight)
        return rows @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, weight = ctx.saved_tensors
        weight.main_grad += gradient.t() @ rows
        weight.grad_added_to_main_grad = True
        return gradient @ weight, torch.full_like(weight, torch.nan)


def test_what_a_layer_adds_to_main_grad_itself_is_not_added_again() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(INSIDE, WIDTH))

        def forward(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return Fused.apply(rows, self.weight) * weights.unsqueeze(-1)  # type: ignore

    model = Layer()
    calls = with_main_grad(model)
    given = inputs(torch.float32)
    by_tiles(model, THREE, given).sum().backward()
    assert calls == ["weight"]
    with torch.no_grad():
        expected = (given[0] * given[1].unsqueeze(-1)).sum(0).expand(INSIDE, WIDTH)
    torch.testing.assert_close(model.weight.main_grad, expected)


def test_a_tensor_that_two_parameters_share_as_gradient_is_added_to_each_once() -> None:
    class TwoBiases(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = torch.nn.Parameter(torch.zeros(WIDTH))
            self.two = torch.nn.Parameter(torch.zeros(WIDTH))

        def forward(self, rows: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
            return rows + (self.one + self.two)

    model = TwoBiases()
    by_tiles(model, THREE, inputs(torch.float32)).sum().backward()
    for parameter in model.parameters():
        assert torch.equal(parameter.grad, torch.full((WIDTH,), float(ROWS)))


class Experts(torch.nn.Module):
    """Rows 0 to 5 are of one expert, 6 to 11 of another; a third has none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        experts = (torch.nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(3))
        self.experts = torch.nn.ModuleList(experts)
        self.scale = torch.nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

    def of(self, rows: slice, tile: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        sizes = [max(0, min(6, rows.stop) - rows.start), max(0, rows.stop - max(6, rows.start)), 0]
        parts = zip(self.experts, tile.split(sizes), strict=True)
        return torch.cat([expert(part) for expert, part in parts]) * self.scale

    def needs(self, rows: slice) -> list[bool]:
        of_experts = [rows.start < 6, rows.stop > 6, False]
        return [True, *(needs for needs in of_experts for _ in ("weight", "bias"))]


def test_a_tile_is_asked_only_for_the_gradients_that_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    compute = torch.autograd.grad

    def grad(output: torch.Tensor, tensors: Any, *arguments: Any, **options: Any) -> Any:
        asked.append(len(tensors) - 2)
        return compute(output, tensors, *arguments, **options)

    monkeypatch.setattr(torch.autograd, "grad", grad)
    model, other = Experts(), Experts()
    assert [name for name, _ in model.named_parameters()][:2] == ["scale", "experts.0.weight"]
    expected = results(lambda given: other.of(slice(0, ROWS), *given), other)
    actual = results(
        lambda given: run_by_tiles(
            model.of, THREE, given, list(model.parameters()), needs=model.needs
        ),
        model,
    )
    # The last tile is also asked for those of the expert without rows, which are zeros.
    assert asked == [1 + 2, 1 + 4, 1 + 2 + 2]
    torch.testing.assert_close(actual[0], expected[0])
    assert actual[2] is expected[2] is None or not actual[2].any()
    for one, two in zip(expected[3:], actual[3:], strict=True):
        torch.testing.assert_close(one, two)


def test_frozen_inputs_and_parameters_get_no_gradient() -> None:
    model = TwoLayers()
    model.first.weight.requires_grad_(False)
    given = inputs()
    given[1].requires_grad_(False)
    by_tiles(model, THREE, given).sum().backward()
    assert given[1].grad is None
    assert model.first.weight.grad is None
    assert given[0].grad is not None
    assert model.second.weight.grad is not None


def test_without_gradients_nothing_is_saved() -> None:
    model = TwoLayers()
    with torch.no_grad():
        output = by_tiles(model, THREE, inputs())
    assert not output.requires_grad
    torch.testing.assert_close(output, model(*inputs()).detach())


def test_gradients_of_a_tile_are_gone_before_the_next_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once they are in ``main_grad``; weights take more memory than a tile."""
    alive: list[weakref.ref[torch.Tensor]] = []
    compute = torch.autograd.grad

    def grad(output: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        assert [tensor for tensor in alive if tensor() is not None] == []
        found = compute(output, *arguments, **options)
        alive.extend(weakref.ref(tensor) for tensor in found if tensor is not None)
        return found

    monkeypatch.setattr(torch.autograd, "grad", grad)
    model = TwoLayers()
    with_main_grad(model)
    results(lambda given: by_tiles(model, THREE, given), model)
    assert len(alive) == 3 * 5
