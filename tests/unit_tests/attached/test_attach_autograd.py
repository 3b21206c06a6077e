# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""An attached model may do everything that autograd allows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from attached_models import (
    BACKENDS,
    LAZY,
    Chain,
    counters,
    equal,
    gradients,
    make,
    make_attached,
    numbers,
)
from torch.autograd import forward_ad

WIDTH = 16


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def equal_in_three_iterations(
    part: Callable[[], torch.nn.Module],
    step: Callable[[torch.nn.Module], list[torch.Tensor]],
    backend: str,
) -> bool:
    """Check that ``step`` gives the same with a chain of ``part`` attached; something must move."""
    plain = make(lambda: Chain(part))
    model, attached = make_attached(lambda: Chain(part), "parts.*", backend)
    results = [(step(plain), step(model)) for _ in range(3)]
    assert counters(attached)["parts.*"].num_groups_moved > 0
    return all(equal(right, left) for left, right in results)


# --- changes in place -----------------------------------------------------------------------------


class Recurrent(torch.nn.Module):
    """Changes a state between two uses; the loss does not need the first one."""

    def __init__(self, uses_both: bool = False) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(WIDTH))
        self.uses_both = uses_both

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x.detach().cos()
        before = self.weight * state
        state.add_(x.detach())
        after = x + self.weight * state
        self.seen = before.detach().sum()
        return after + before if self.uses_both else after


def backward(model: torch.nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    loss = model(numbers(0, 4, WIDTH)).square().sum()
    loss.backward()
    return [loss.detach(), *gradients(model)]


def test_a_saved_tensor_may_change_in_place_where_backward_does_not_read_it(backend: str) -> None:
    assert equal_in_three_iterations(Recurrent, backward, backend)


def test_a_saved_tensor_that_backward_reads_may_not_change_in_place(backend: str) -> None:
    model = make(lambda: Chain(lambda: Recurrent(uses_both=True)), "parts.*", backend)
    with pytest.raises(RuntimeError, match="in-?place operation"):
        backward(model)


def test_a_change_in_place_after_the_model_is_refused_as_without(backend: str) -> None:
    """Also if the bytes were copied before and the memory still exists."""

    def step(model: torch.nn.Module) -> None:
        hidden = numbers(0, 4, WIDTH).requires_grad_().exp()
        output = model(hidden)
        hidden.detach().add_(1)
        output.sum().backward()

    def part() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())

    for patterns in (None, "parts.*"):
        model = make(lambda: Chain(part), patterns, backend)
        with pytest.raises(RuntimeError, match="in-?place operation"):
            step(model)


class Force(torch.nn.Module):
    """Moves positions along the gradient of an energy."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = torch.nn.Sequential(
            torch.nn.Linear(3, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1)
        )

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        positions = positions if positions.requires_grad else positions.requires_grad_()
        energy = self.energy(positions).sum()
        (force,) = torch.autograd.grad(energy, positions, create_graph=True)
        return positions - force


@pytest.mark.parametrize("keeps", [False, True], ids=["", "earlier graphs are alive"])
def test_gradients_inside_of_forward_while_the_weights_change_between_graphs(
    backend: str, keeps: bool
) -> None:
    """Gradients of gradients save weights as plain tensors, which the optimizer changes."""
    alive: list[torch.Tensor] = []

    def step(model: torch.nn.Module) -> list[torch.Tensor]:
        model.zero_grad()
        loss = model(numbers(len(alive) // 2, 4, 3)).square().sum()
        alive.append(loss)
        loss.backward(retain_graph=keeps)
        results = [loss.detach(), *(gradient.clone() for gradient in gradients(model))]
        torch.optim.SGD(model.parameters(), 0.01).step()
        return results

    assert equal_in_three_iterations(Force, step, backend)


# --- forward-mode differentiation -----------------------------------------------------------------


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)
        self.norm = torch.nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.tanh(self.linear(x)))


def dual_numbers(model: torch.nn.Module) -> list[torch.Tensor]:
    """Backward through a forward with tangents, which are also used after their level ends."""
    model.zero_grad()
    x = numbers(1, 4, WIDTH)
    with forward_ad.dual_level():
        output = model(forward_ad.make_dual(x, numbers(2, 4, WIDTH)))
        value, tangent = forward_ad.unpack_dual(output)
        loss = value.square().sum() + tangent.square().sum()
        loss.backward(retain_graph=True)
    (tangent * numbers(3, 4, WIDTH)).sum().backward()
    return [value.detach(), tangent.detach(), *gradients(model)]


def test_dual_tensors_are_left_alone(backend: str) -> None:
    assert equal_in_three_iterations(Block, dual_numbers, backend)


def test_a_tangent_of_zeros_has_no_memory_to_move(backend: str) -> None:
    class Multiplies(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            zeros = torch._efficientzerotensor(x.shape)
            return super().forward(x) + self.norm.weight * zeros

    assert equal_in_three_iterations(Multiplies, backward, backend)


class Jvp(Block):
    """Runs itself in a transform of ``torch.func``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value, tangent = torch.func.jvp(super().forward, (x,), (torch.ones_like(x),))
        return value + tangent


def test_a_transform_inside_of_a_module(backend: str) -> None:
    assert equal_in_three_iterations(Jvp, backward, backend)


def test_a_model_inside_of_a_transform_is_left_alone(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Tensors allocated there have no memory, so host memory cannot be allocated there."""

    def transformed(model: torch.nn.Module) -> list[torch.Tensor]:
        model.zero_grad()
        x = numbers(1, 4, WIDTH)
        value, tangent = torch.func.jvp(model, (x,), (numbers(2, 4, WIDTH),))
        (value.square().sum() + tangent.square().sum()).backward()
        return [value.detach(), tangent.detach(), *gradients(model)]

    plain = make(lambda: Chain(Block))
    model, attached = make_attached(lambda: Chain(Block), "parts.*", backend)
    assert equal(transformed(model), transformed(plain))
    assert equal(transformed(model), transformed(plain))
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
        "attach(): the model runs in a transform of torch.func, so nothing of it moves"
    ]
    # Outside of it everything moves as before.
    for _ in range(2):
        assert equal(backward(model), backward(plain))
    assert counters(attached)["parts.*"].num_groups_moved > 0


# --- messages -------------------------------------------------------------------------------------


def test_a_group_of_small_tensors_stays_for_an_option_with_a_name(backend: str) -> None:
    model, attached = make_attached(
        lambda: Chain(Block), "parts.*", backend, min_offloaded_tensor_size=4 * WIDTH + 1
    )
    for _ in range(2):
        backward(model)
    assert "min_offloaded_tensor_size" in attached.report().render()


def test_lazy_copies_would_show() -> None:
    """The comparisons above can fail: a read without a wait gives a wrong result here."""
    model, attached = make_attached(lambda: Chain(Block), "parts.*", LAZY)
    plain = make(lambda: Chain(Block))
    attached.engine.store.copy_streams.before_use = lambda *_: None
    assert not all(equal(backward(model), backward(plain)) for _ in range(3))
