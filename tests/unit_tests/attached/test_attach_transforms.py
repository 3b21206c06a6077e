# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Other transforms of torch on an attached model: nothing moves in them, all moves afterwards."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from attached_models import (
    BACKENDS,
    WIDTH,
    Chain,
    counters,
    equal,
    gradients,
    has_own_hooks,
    make,
    make_attached,
    numbers,
)
from torch._dynamo import compiled_autograd
from torch.autograd import forward_ad

Run = Callable[[torch.nn.Module], list[torch.Tensor]]


def mlp() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.Linear(WIDTH, WIDTH)
    )


chain = partial(Chain, mlp)
X = numbers(3, 4, WIDTH)

# Autograd detects devices at the first backward, and finds one more while torch traces: then no
# process forked from this one could run a backward.
torch.ones(1, requires_grad=True).sum().backward()


def backward(model: torch.nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    loss = model(X).square().sum()
    loss.backward()
    return [loss.detach(), *gradients(model)]


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


@pytest.fixture(autouse=True)
def _no_hooks_are_left() -> Any:
    yield
    assert not has_own_hooks()
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", RUNS)
def test_the_result_is_that_without_and_training_moves_afterwards(name: str, backend: str) -> None:
    run = RUNS[name]
    plain = make(chain)
    model, attached = make_attached(chain, "parts.*", backend)
    assert equal(run(model), run(plain))
    for _ in range(3):
        assert equal(backward(model), backward(plain))
    assert counters(attached)["parts.*"].num_groups_moved == 2
    assert equal(run(model), run(plain))


def test_a_module_compiled_as_one_graph_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    model, attached = make_attached(chain, "parts.*")
    one_graph(model)
    assert "compiled with fullgraph=True, so nothing of them moves" in caplog.text


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


@pytest.mark.parametrize("backend", BACKENDS)
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


def test_a_saved_model_loads_without_slipstream(tmp_path: Path) -> None:
    model, attached = make_attached(lambda: torch.nn.Sequential(torch.nn.Linear(4, 4)), "0")
    path = tmp_path / "model.pt"
    torch.save(model, path)
    code = (
        "import sys\n"
        "sys.modules['megatron.slipstream'] = None\n"
        "import torch\n"
        "model = torch.load(sys.argv[1], weights_only=False)\n"
        "model(torch.ones(2, 4)).sum().backward()\n"
        "torch.compile(model, fullgraph=True, backend='aot_eager')(torch.ones(2, 4))\n"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, timeout=200)


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
    told = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(told) == 1, told
    assert "compiled autograd runs the backward, so nothing moves" in told[0]
    for content in (attached.report().render(), repr(attached)):
        assert told[0].removeprefix("attach(): ") in content
