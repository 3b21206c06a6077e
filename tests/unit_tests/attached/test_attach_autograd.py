# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""An attached model may do everything that autograd, ``torch.func`` and compilers allow."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
from attached_models import (
    LAZY,
    WIDTH,
    Chain,
    Decoder,
    Layer,
    attach_to,
    counters,
    equal,
    gradients,
    make,
    make_attached,
    numbers,
    one_backward_each,
    plain_results,
    train,
    warnings_of,
)
from torch._dynamo import compiled_autograd
from torch._dynamo.convert_frame import input_codes
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad

from megatron import slipstream

ENGINE = str(Path(slipstream.__file__).parent)
Run = Callable[[torch.nn.Module], list[torch.Tensor]]
X = numbers(3, 4, WIDTH)

# Autograd detects devices at the first backward, and finds one more while torch traces: then no
# process forked from this one could run a backward.
torch.ones(1, requires_grad=True).sum().backward()


@pytest.fixture(autouse=True)
def _nothing_is_compiled() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def mlp() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.Linear(WIDTH, WIDTH)
    )


chain = partial(Chain, mlp)


def backward(model: torch.nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    loss = model(X).square().sum()
    loss.backward()
    return [loss.detach(), *gradients(model)]


# --- what a module does ---------------------------------------------------------------------------


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


def forces(keeps: bool, model: Any) -> list[torch.Tensor]:
    """Gradients of gradients save weights as plain tensors, which the optimizer changes."""
    model.zero_grad()
    model.alive = getattr(model, "alive", [])
    loss = model(numbers(len(model.alive), 4, 3)).square().sum()
    model.alive.append(loss)
    loss.backward(retain_graph=keeps)
    results = [loss.detach(), *(gradient.clone() for gradient in gradients(model))]
    torch.optim.SGD(model.parameters(), 0.01).step()
    return results


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


class Multiplies(Block):
    """A tangent of zeros has no memory to move."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.norm.weight * torch._efficientzerotensor(x.shape)


class Jvp(Block):
    """Runs itself in a transform of ``torch.func``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value, tangent = torch.func.jvp(super().forward, (x,), (torch.ones_like(x),))
        return value + tangent


CASES: dict[str, tuple[Callable[[], torch.nn.Module], Run]] = {
    "a change in place of what backward does not read": (Recurrent, backward),
    "gradients inside of forward": (Force, partial(forces, False)),
    "gradients inside of forward, earlier graphs are alive": (Force, partial(forces, True)),
    "dual tensors": (Block, dual_numbers),
    "a tangent of zeros": (Multiplies, backward),
    "a transform inside": (Jvp, backward),
}


@pytest.mark.parametrize("name", CASES)
def test_something_moves_and_the_results_are_those_without(name: str, backend: str) -> None:
    part, step = CASES[name]
    plain = make(partial(Chain, part))
    model, attached = make_attached(partial(Chain, part), "parts.*", backend)
    for _ in range(3):
        assert equal(step(model), step(plain))
    assert counters(attached)["parts.*"].num_groups_moved > 0


def test_a_saved_tensor_that_backward_reads_may_not_change_in_place(backend: str) -> None:
    model = make(lambda: Chain(lambda: Recurrent(uses_both=True)), "parts.*", backend)
    with pytest.raises(RuntimeError, match="in-?place operation"):
        backward(model)


def test_a_change_in_place_after_the_model_is_refused_as_without(backend: str) -> None:
    """Also if the bytes were copied before and the memory still exists."""

    def step(model: torch.nn.Module) -> None:
        hidden = X.clone().requires_grad_().exp()
        output = model(hidden)
        hidden.detach().add_(1)
        output.sum().backward()

    def part() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())

    for patterns in (None, "parts.*"):
        model = make(lambda: Chain(part), patterns, backend)
        with pytest.raises(RuntimeError, match="in-?place operation"):
            step(model)


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
    assert warnings_of(caplog) == [
        "attach(): the model runs in a transform of torch.func, so nothing of it moves"
    ]
    # Outside of it everything moves as before.
    for _ in range(2):
        assert equal(backward(model), backward(plain))
    assert counters(attached)["parts.*"].num_groups_moved > 0


# --- transforms -----------------------------------------------------------------------------------


def loss_with(model: torch.nn.Module, x: torch.Tensor) -> Callable[[Any], torch.Tensor]:
    return lambda weights: torch.func.functional_call(model, weights, (x,)).square().sum()


def func_grad(model: torch.nn.Module) -> list[torch.Tensor]:
    return list(torch.func.grad(loss_with(model, X))(dict(model.named_parameters())).values())


def gradient_of_each_sample(model: torch.nn.Module) -> list[torch.Tensor]:
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def of_one(weights: Any, x: torch.Tensor) -> Any:
        return torch.func.grad(loss_with(model, x.unsqueeze(0)))(weights)

    return list(torch.func.vmap(of_one, in_dims=(None, 0))(weights, X).values())


def jvp(model: torch.nn.Module) -> list[torch.Tensor]:
    return list(torch.func.jvp(model, (X,), (torch.ones_like(X),)))


def vmap(model: torch.nn.Module) -> list[torch.Tensor]:
    return [torch.func.vmap(model)(X.unsqueeze(1))]


def linearize(model: torch.nn.Module) -> list[torch.Tensor]:
    output, linear = torch.func.linearize(model, X)
    return [output, linear(torch.ones_like(X))]


def forward_mode(model: torch.nn.Module) -> list[torch.Tensor]:
    with forward_ad.dual_level():
        output = model(forward_ad.make_dual(X, torch.ones_like(X)))
        return list(forward_ad.unpack_dual(output))


def nested(layout: torch.layout) -> Run:
    def run(model: torch.nn.Module) -> list[torch.Tensor]:
        model.zero_grad()
        rows = torch.nested.nested_tensor(
            [torch.ones(2, WIDTH), torch.ones(3, WIDTH)], layout=layout
        )
        torch.nested.to_padded_tensor(model(rows), 0.0).sum().backward()
        return gradients(model)

    return run


def one_graph(model: torch.nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    loss = torch.compile(model, fullgraph=True, backend="aot_eager")(X).square().sum()
    loss.backward()
    return [loss.detach(), *gradients(model)]


def one_graph_without_gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    with torch.no_grad():
        return [torch.compile(model, fullgraph=True, backend="aot_eager")(X)]


def exported(model: torch.nn.Module) -> list[torch.Tensor]:
    return [torch.export.export(model, (X,)).module()(X)]


RUNS: dict[str, Run] = {
    "func.grad": func_grad,
    "gradients of samples": gradient_of_each_sample,
    "func.jvp": jvp,
    "vmap": vmap,
    "linearize": linearize,
    "forward mode": forward_mode,
    "nested, strided": nested(torch.strided),
    "nested, jagged": nested(torch.jagged),
    "fullgraph": one_graph,
    "fullgraph, no_grad": one_graph_without_gradients,
    "export": exported,
}


@cache
def of_plain_chain(run: Run) -> list[torch.Tensor]:
    return run(make(chain))


@pytest.mark.parametrize("name", RUNS)
def test_the_result_is_that_without_and_training_moves_afterwards(name: str, backend: str) -> None:
    run = RUNS[name]
    model, attached = make_attached(chain, "parts.*", backend)
    assert equal(run(model), of_plain_chain(run))
    for _ in range(3):
        assert equal(backward(model), of_plain_chain(backward))
    assert counters(attached)["parts.*"].num_groups_moved == 2
    assert equal(run(model), of_plain_chain(run))


def test_modules_compiled_as_one_graph_before_they_are_attached_move() -> None:
    def compiled() -> torch.nn.Module:
        model = chain()
        for index, part in enumerate(model.parts):
            model.parts[index] = torch.compile(part, fullgraph=True, backend="aot_eager")
        return model

    plain = make(compiled)
    model, attached = make_attached(compiled, "parts.*")
    for _ in range(3):
        assert equal(backward(model), backward(plain))
    assert counters(attached)["parts.*"].num_groups_moved == 2


def short_backward(model: torch.nn.Module) -> None:
    model(X[:1].clone()).sum().backward()  # Not a view, which keeps all of X.


def test_a_first_iteration_that_moves_nothing_does_not_decide_for_good(backend: str) -> None:
    # Save nothing but the inputs of its parts.
    linears = partial(Chain, partial(torch.nn.Linear, WIDTH, WIDTH), 4)
    plain = make(linears)
    model, attached = make_attached(
        linears, "parts.*", backend, min_offloaded_tensor_size=2 * WIDTH
    )
    short_backward(model)
    assert counters(attached)["parts.*"].num_groups_moved == 0
    for _ in range(3):
        assert equal(backward(model), backward(plain))
    assert counters(attached)["parts.*"].num_groups_moved == 3
    num_plans = attached.report().ranks[0].num_plans
    for _ in range(3):
        short_backward(model)
        assert equal(backward(model), backward(plain))
    assert attached.report().ranks[0].num_plans == num_plans, "what was seen once is known"


class Frozen(torch.nn.Module):
    """Uses its weight and a buffer detached."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.register_buffer("scale", torch.rand(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.linear(x.relu(), self.weight.detach())
        return x @ self.scale.t().detach()


def test_weights_that_are_used_detached_are_no_activations() -> None:
    model, attached = make_attached(partial(Chain, Frozen), "parts.*")
    x = X.clone().requires_grad_()
    model(x).sum().backward()
    # In the first iteration everything that counts as an activation moves.
    assert counters(attached)["parts.*"].d2h_bytes == 3 * X.nbytes


def test_a_saved_model_loads_without_slipstream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, attached = make_attached(lambda: torch.nn.Sequential(torch.nn.Linear(4, 4)), "0")
    path = tmp_path / "model.pt"
    torch.save(model, path)
    for name in [name for name in sys.modules if name.startswith("megatron.slipstream")]:
        monkeypatch.setitem(sys.modules, name, None)  # An import of it fails.
    loaded = torch.load(path, weights_only=False)
    loaded(torch.ones(2, 4)).sum().backward()
    torch.compile(loaded, fullgraph=True, backend="aot_eager")(torch.ones(2, 4))


# --- compiled autograd ----------------------------------------------------------------------------


def around_all(model: torch.nn.Module) -> list[torch.Tensor]:
    with compiled_autograd._enable(lambda graph: graph):
        return backward(model)


def around_backward(model: torch.nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    loss = model(X).square().sum()
    with compiled_autograd._enable(lambda graph: graph):
        loss.backward()
    return [loss.detach(), *gradients(model)]


def by_setting(model: torch.nn.Module) -> list[torch.Tensor]:
    with torch._dynamo.config.patch(compiled_autograd=True):
        return backward(model)


@pytest.mark.parametrize("step", [around_all, around_backward, by_setting])
def test_compiled_autograd_is_left_alone(step: Run, caplog: pytest.LogCaptureFixture) -> None:
    plain = make(chain)
    expected = [step(plain) for _ in range(3)]
    model, attached = make_attached(chain, "parts.*")
    store, num_copies = attached.engine.store, []
    for results in expected:
        assert equal(step(model), results)
        num_copies.append(sum(item.d2h_copies for item in store.modules.values()))
        assert store.host_pool.in_use_bytes == 0
    # Around backward() only, it is not known before the first one.
    assert (num_copies[0] > 0) is (step is around_backward)
    assert num_copies[1:] == [num_copies[0]] * 2
    told = warnings_of(caplog)
    assert len(told) == 1, told
    assert "compiled autograd runs the backward, so nothing moves" in told[0]
    for content in (attached.report().render(), repr(attached)):
        assert told[0].removeprefix("attach(): ") in content


# --- compilers ------------------------------------------------------------------------------------


def without_dropout() -> Any:
    """Of compiled graphs it draws other numbers."""
    return make(partial(Decoder, 2)).eval()


@pytest.mark.parametrize(
    "what, first",
    [
        ("layers", "attached"),
        ("layers in place", "compiled"),
        ("model", "compiled"),
        ("model in place", "attached"),
    ],
)
def test_compiled_modules(what: str, first: str) -> None:
    """With a compiler that does not fuse: fusion would change the results."""
    compiler = CompileCounterWithBackend("aot_eager")
    model = without_dropout()
    if first == "attached":
        attached = attach_to(model, "layers.*", LAZY)
    call = _compile(model, what, compiler)
    if first == "compiled":
        attached = attach_to(call, "layers.*", LAZY)
    assert equal(
        train(call, one_backward_each, 2), plain_results(without_dropout, num_iterations=2)
    )
    assert compiler.frame_count == 1, "one graph for all layers, or for the whole model"
    assert counters(attached)["layers.*"].num_groups_moved == 1


@torch._dynamo.config.patch(skip_nnmodule_hook_guards=True)
def test_code_that_was_compiled_for_a_model_without_hooks_is_not_used() -> None:
    plain = torch.compile(without_dropout(), backend="aot_eager")
    expected = plain_results(without_dropout, num_iterations=2)
    assert equal(train(plain, one_backward_each, 2), expected)
    for first in ("attached", "compiled"):
        model = without_dropout()
        if first == "attached":
            attached = attach_to(model, "layers.*", LAZY)
        call: Any = torch.compile(model, backend="aot_eager")
        if first == "compiled":
            attached = attach_to(call, "layers.*", LAZY)
        one_backward_each(plain, 0)
        assert equal(train(call, one_backward_each, 2), expected), first
        assert counters(attached)["layers.*"].num_groups_moved == 1, first


@pytest.mark.parametrize("checkpointing", [None, False], ids=["", "checkpoint"])
def test_the_engine_is_not_compiled_with_a_training_step(checkpointing: Optional[bool]) -> None:
    class Breaks(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(1):
                torch._dynamo.graph_break()  # in a loop: the rest is not compiled
            return super().forward(x)

    model = make(partial(Decoder, 2, checkpointing), "layers.*", LAZY)
    model.layers[1].__class__ = Breaks
    model.eval()
    results = train(model, torch.compile(one_backward_each, backend="aot_eager"), 2)
    assert equal(results, plain_results(without_dropout, num_iterations=2))
    codes = [code for reference in input_codes.seen if (code := reference()) is not None]
    own = [code.co_name for code in codes if code.co_filename.startswith(ENGINE)]
    # A finaliser has no effect that a compiler could change, and runs at any time. A hook only asks
    # whether it may break the graph, and breaks it there.
    assert {name for name in own if not name.endswith("__call__") and "___call___" not in name} <= {
        "__del__"
    }
    assert codes


def _compile(model: Any, what: str, compiler: Any) -> Any:
    if what == "model":
        return torch.compile(model, backend=compiler)
    if what == "model in place":
        model.compile(backend=compiler)
    for index, layer in enumerate(model.layers):
        if what == "layers in place":
            layer.compile(backend=compiler)
        elif what == "layers":
            model.layers[index] = torch.compile(layer, backend=compiler)
    return model
