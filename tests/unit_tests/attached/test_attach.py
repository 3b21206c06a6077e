# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Any PyTorch model computes the same with chosen sub-modules attached."""

from __future__ import annotations

import copy
import gc
import io
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from attached_models import (
    BACKENDS,
    LAZY,
    VOCABULARY,
    WIDTH,
    Decoder,
    Layer,
    attach_to,
    counters,
    equal,
    gradients,
    has_own_hooks,
    loss_of,
    make,
    make_attached,
    micro_batch,
    one_backward_each,
    train,
    train_as_plain,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.slipstream.fine_grained_activation_offload.copy_streams import CopyStreams
from megatron.slipstream.integration.cpu.cpu_memory import DeviceMemoryMeter

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def _no_hooks_are_left() -> Any:
    yield
    assert not has_own_hooks()


class Encoder(torch.nn.Module):
    """``torch.nn.TransformerEncoder`` between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        layer = torch.nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 3)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(ids)))


# --- equality -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "build, patterns, num_groups",
    [
        (Decoder, "layers.*", 4),
        (Decoder, ["layers.*.attn", "layers.*.mlp"], 8),
        (Decoder, [torch.nn.Linear, torch.nn.LayerNorm], 25),
        (Decoder, ["**.mlp.*", "embedding"], 17),
        (Encoder, "encoder.layers.*", 3),
        (Encoder, [torch.nn.MultiheadAttention, "encoder.layers.*.linear?"], 9),
    ],
    ids=["layers", "two patterns", "types", "tiny modules", "encoder layers", "encoder parts"],
)
def test_loss_and_gradients_are_those_without(
    backend: str, build: Callable[[], torch.nn.Module], patterns: Any, num_groups: int
) -> None:
    attached = train_as_plain(build, patterns, backend=backend)
    assert len(attached.modules) == num_groups
    total = attached.report().ranks[0].total
    assert total.num_groups == num_groups
    assert total.freed_bytes == total.d2h_bytes > 0
    assert total.num_late == 0


def test_a_wait_that_is_missing_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparisons here can fail."""
    expected = train(make(Decoder), one_backward_each)
    monkeypatch.setattr(CopyStreams, "before_use", lambda *_: None)
    model = make(Decoder, "layers.*", "cpu-lazy")
    assert not equal(train(model, one_backward_each), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype: torch.dtype) -> None:
    def step(model: torch.nn.Module, iteration: int) -> list[torch.Tensor]:
        with torch.autocast("cpu", dtype):
            loss = loss_of(model, iteration)
        loss.backward()
        return [loss]

    attached = train_as_plain(Decoder, ["layers.*"], step)
    assert counters(attached)["layers.*"].num_groups_moved == 3


def test_memory_falls_by_what_moves() -> None:
    def peak_bytes(patterns: Any) -> tuple[int, int]:
        model = make(lambda: Decoder(8))
        attached = None if patterns is None else attach_to(model, patterns)
        ids = torch.zeros(4, 32, dtype=torch.long)
        for _ in range(2):
            model(ids).square().mean().backward()  # gradients and host memory are there then
        with DeviceMemoryMeter() as meter:
            if attached is not None:
                attached.engine.store.backend.meter = meter
            model(ids).square().mean().backward()
        freed = 0 if attached is None else counters(attached)["layers.*"].freed_bytes
        return meter.peak_bytes, freed

    plain_bytes, _ = peak_bytes(None)
    attached_bytes, freed_bytes = peak_bytes("layers.*")
    assert freed_bytes > 0.6 * plain_bytes
    # At the peak one layer computes, and the next one is being copied.
    assert attached_bytes < plain_bytes - 0.7 * freed_bytes


# --- inputs and results of modules ----------------------------------------------------------------


@dataclass
class Result:
    hidden: torch.Tensor
    aside: Any = None


class Returns(torch.nn.Module):
    """A layer that returns its result in some form."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.layer = Layer()
        self.form = form

    def forward(self, *, hidden: torch.Tensor, scale: float) -> Any:
        inputs, hidden = hidden, self.layer(hidden) * scale
        match self.form:
            case "tuple":
                return hidden, inputs, None
            case "nested":
                return [{"a": (hidden,)}, scale]
            case "dictionary":
                return {"hidden": hidden, "inputs": inputs}
            case "data class":
                return Result(hidden, aside=(inputs,))
            case "object":
                return _Object(hidden)
        return _Opaque(hidden)

    def unpack(self, output: Any) -> torch.Tensor:
        match self.form:
            case "tuple":
                return output[0] + output[1]
            case "nested":
                return output[0]["a"][0]
            case "dictionary":
                return output["hidden"] + output["inputs"]
        return output.hidden


class _Object:
    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


class _Opaque:
    __slots__ = ("hidden",)

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


class Forms(torch.nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.parts = torch.nn.ModuleList(Returns(form) for _ in range(3))
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for part in self.parts:
            x = part.unpack(part(hidden=x, scale=0.5))
        return self.head(x)


@pytest.mark.parametrize("form", ["tuple", "nested", "dictionary", "data class", "object"])
def test_outputs_and_keyword_inputs_of_any_form(form: str) -> None:
    attached = train_as_plain(lambda: Forms(form), "parts.*")
    assert counters(attached)["parts.*"].num_groups_moved == 2
    assert counters(attached)["parts.*"].num_late == 0


def test_an_output_without_visible_tensors_is_said_and_right(
    caplog: pytest.LogCaptureFixture,
) -> None:
    train_as_plain(lambda: Forms("opaque"), "parts.*")
    assert caplog.text.count("returns, a _Opaque, so its saved tensors are reloaded late") == 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_other_hooks_of_a_module_save_belongs_to_its_group(when: str) -> None:
    def moved_bytes(hook: Any) -> int:
        model = make(Decoder)
        for layer in model.layers:
            if when == "before":
                layer.mlp.register_forward_pre_hook(lambda _, args: (hook(args[0]),))
            else:
                layer.mlp.register_forward_hook(lambda _, __, output: hook(output))
        attached = attach_to(model, "layers.*.mlp", LAZY)
        train(model, one_backward_each)
        return counters(attached)["layers.*.mlp"].freed_bytes

    # tanh saves its result, and no other operation does.
    result_bytes = 2 * 8 * WIDTH * 4
    assert moved_bytes(lambda x: x.tanh() * 2) - moved_bytes(lambda x: x * 2) == 3 * result_bytes


def test_what_backward_does_not_reach_stays() -> None:
    """This fails if a module is found by an input that it returns, which backward does reach."""

    class Monitors(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer()

        def forward(self, x: torch.Tensor) -> Any:
            return x, self.layer(x)

    class Monitored(Decoder):
        def __init__(self) -> None:
            super().__init__()
            self.monitors = torch.nn.ModuleList(Monitors() for _ in self.layers)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embedding(ids)
            self.seen = []
            for layer, monitor in zip(self.layers, self.monitors, strict=True):
                x, seen = monitor(layer(x))
                self.seen.append(seen)
            return self.head(x)

    attached = train_as_plain(Monitored, ["layers.*", "monitors.*"])
    moved = {name: each.num_groups_moved for name, each in counters(attached).items()}
    assert moved == {"layers.*": 3, "monitors.*": 0}


def test_outputs_may_be_changed_in_place() -> None:
    class InPlace(Decoder):
        def run(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
            return layer(x).mul_(0.5).add_(1.0)

    attached = train_as_plain(InPlace, "layers.*")
    assert counters(attached)["layers.*"].num_late == 0


class ChangesResult(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x).exp()
        y.detach().add_(1)
        return y


class ChangesWeight(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        with torch.no_grad():
            self.mlp[0].weight.add_(1)
        return y


@pytest.mark.parametrize("changes", [ChangesResult, ChangesWeight])
@pytest.mark.parametrize("size", [1, 1 << 20], ids=["moved", "kept"])
@pytest.mark.parametrize("patterns", [None, "layers.*", "embedding"], ids=str)
def test_a_saved_tensor_may_not_be_changed_in_place(
    patterns: Any, size: int, changes: type[Layer]
) -> None:
    """As without hooks, which disable this check of autograd, in regions and outside of them."""
    model = make(Decoder, patterns, LAZY, min_offloaded_tensor_size=size)
    for layer in model.layers:
        layer.__class__ = changes
    with pytest.raises(RuntimeError, match="in-?place operation"):
        loss_of(model, 0).backward()


def test_a_pass_without_backward_leaves_nothing_behind() -> None:
    """Even for a result that its own operation saves."""

    class Ends(Decoder):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            result = super().forward(ids).exp()
            results.append(StorageWeakRef(result.untyped_storage()))
            return result

    results: list[StorageWeakRef] = []
    model = make(Ends, "layers.*")
    for _ in range(3):
        model(micro_batch(0))
    assert all(result.expired() for result in results)


def test_a_shared_module_makes_a_group_each_time() -> None:
    class Shared(Decoder):
        def __init__(self) -> None:
            super().__init__(2)
            self.layers.append(self.layers[0])

    attached = train_as_plain(Shared, "layers.*")
    assert len(attached.modules) == 2
    assert counters(attached)["layers.*"].num_groups == 3
    assert counters(attached)["layers.*"].num_groups_moved == 2


def test_of_calls_inside_each_other_the_outer_makes_the_group() -> None:
    """Also where the inner module is not registered in the outer one."""

    class Nests(Decoder):
        def __init__(self) -> None:
            super().__init__(3)
            others = list(self.layers)
            self.outer = torch.nn.ModuleList(_Calls(other) for other in others)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embedding(ids)
            for outer in self.outer:
                x = outer(x)
            return self.head(x)

    class _Calls(torch.nn.Module):
        def __init__(self, other: torch.nn.Module) -> None:
            super().__init__()
            self.hidden = [other]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.hidden[0](x) * 2

    attached = train_as_plain(Nests, ["outer.*", "layers.*"])
    assert {name: c.num_groups for name, c in counters(attached).items()} == {"outer.*": 3}


# --- passes and iterations ------------------------------------------------------------------------


def _both_at_once(model: torch.nn.Module, iteration: int) -> list[torch.Tensor]:
    losses = [loss_of(model, 10 * iteration + index) for index in range(2)]
    torch.stack(losses).sum().backward()
    return losses


def _first_in_first_out(model: torch.nn.Module, iteration: int) -> list[torch.Tensor]:
    losses = [loss_of(model, 10 * iteration), loss_of(model, 10 * iteration + 1)]
    losses[0].backward()
    losses.append(loss_of(model, 10 * iteration + 2))
    losses[1].backward()
    losses[2].backward()
    return losses


def _last_in_first_out(model: torch.nn.Module, iteration: int) -> list[torch.Tensor]:
    losses = [loss_of(model, 10 * iteration + index) for index in range(3)]
    for loss in reversed(losses):
        loss.backward()
    return losses


def _kept_graph(model: torch.nn.Module, iteration: int) -> list[torch.Tensor]:
    loss = loss_of(model, iteration)
    loss.backward(retain_graph=True)
    loss.backward()
    # Something refers to the graph while the next iteration runs.
    model.graph = loss
    return [loss]


def _kept_forever(model: torch.nn.Module, iteration: int) -> list[torch.Tensor]:
    loss = loss_of(model, iteration)
    loss.backward(retain_graph=True)
    model.graphs = [*getattr(model, "graphs", []), loss]
    return [loss]


def _second_order(model: torch.nn.Module, iteration: int) -> list[torch.Tensor]:
    with sdpa_kernel(SDPBackend.MATH):  # The other ones have no second derivative.
        loss = loss_of(model, iteration)
    weights = list(model.parameters())
    first = torch.autograd.grad(loss, weights, create_graph=True)
    penalty = torch.stack([grad.square().sum() for grad in first]).sum()
    (loss + penalty).backward()
    return [loss, penalty]


@pytest.mark.parametrize(
    "step, num_passes",
    [
        (one_backward_each, 1),
        (_both_at_once, 2),
        (_first_in_first_out, 3),
        (_last_in_first_out, 3),
        (_kept_graph, 1),
        (_kept_forever, 1),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_passes_that_wait_together_are_one_iteration_with_one_plan(
    step: Any, num_passes: int
) -> None:
    attached = train_as_plain(Decoder, "layers.*", step)
    report = attached.report().ranks[0]
    assert report.num_plans == 1
    assert report.modules["layers.*"].num_groups == 4 * num_passes
    assert report.modules["layers.*"].num_groups_moved > 2 * num_passes
    assert report.modules["layers.*"].num_late == 0


def test_gradients_of_gradients() -> None:
    attached = train_as_plain(Decoder, "layers.*", _second_order)
    report = attached.report().ranks[0]
    assert (report.num_iterations, report.num_plans, report.total.num_late) == (4, 1, 0)
    assert report.total.num_groups_moved == 3


def test_an_iteration_ends_with_its_backward_and_before_the_optimizer() -> None:
    model, attached = make_attached(Decoder, "layers.*")
    for index in range(3):
        loss = loss_of(model, index)
        assert attached.report().ranks[0].num_iterations == index
        loss.backward()
        assert attached.report().ranks[0].num_iterations == index + 1


@pytest.mark.parametrize("keeps", [False, True], ids=["dropped", "kept"])
def test_a_forward_for_a_metric_does_not_change_the_plan(keeps: bool) -> None:
    """With gradients enabled, although it should run under ``no_grad``."""
    kept: list[torch.Tensor] = []

    def step(model: torch.nn.Module, iteration: int) -> list[torch.Tensor]:
        losses = one_backward_each(model, iteration)
        kept[:] = [loss_of(model, 99)] if keeps else []
        return [*losses, loss_of(model, 98).detach()]

    attached = train_as_plain(Decoder, "layers.*", step, num_iterations=5)
    report = attached.report().ranks[0]
    assert report.total.num_groups_moved > 0
    assert report.total.num_late == 0
    assert report.num_plans == 1


def test_an_evaluation_that_forgot_no_grad_is_no_endless_iteration() -> None:
    model, attached = make_attached(Decoder, "layers.*")
    engine = attached.engine
    num_groups = []
    for index in range(100):
        output = model(micro_batch(index))  # the last one lives while the next one runs
        num_groups.append(len(engine.now.groups))
    del output
    assert max(num_groups) <= 4 * 20
    one_backward_each(model, 0)
    assert counters(attached)["layers.*"].num_groups_moved == 3


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_passes_without_gradients_are_left_alone(mode: Any) -> None:
    def step(model: torch.nn.Module, iteration: int) -> list[torch.Tensor]:
        with mode():
            loss_of(model, 97)
        loss = loss_of(model, iteration)
        model.eval()
        with mode():
            aside = loss_of(model, 98)
        model.train()
        loss.backward()
        return [loss, aside]

    attached = train_as_plain(Decoder, "layers.*", step)
    report = attached.report().ranks[0]
    assert (report.num_iterations, report.num_plans, report.total.num_late) == (4, 1, 0)


def test_an_output_that_the_loss_does_not_use() -> None:
    class TwoHeads(Decoder):
        def __init__(self) -> None:
            super().__init__()
            self.heads = torch.nn.ModuleList(torch.nn.Linear(WIDTH, VOCABULARY) for _ in range(2))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embedding(ids)
            for layer in self.layers:
                x = layer(x)
            self.unused = self.heads[1](x * 2)  # alive until the next pass
            return self.heads[0](x)

    attached = train_as_plain(TwoHeads, ["layers.*", "heads.*"])
    report = attached.report().ranks[0]
    assert (report.num_plans, report.total.num_late) == (1, 0)
    assert report.modules["layers.*"].num_groups_moved == 3
    assert report.num_iterations == 7, "the last one ends with the next forward"


def test_two_losses_with_a_backward_each() -> None:
    class TwoHeads(Encoder):
        def __init__(self) -> None:
            super().__init__()
            self.tower = torch.nn.Sequential(*(Layer() for _ in range(3)))

        def forward(self, ids: torch.Tensor) -> Any:
            x = self.encoder(self.embedding(ids))
            return self.head(x), self.tower(x)

    def step(model: torch.nn.Module, iteration: int) -> list[torch.Tensor]:
        losses = [output.square().mean() for output in model(micro_batch(iteration))]
        losses[0].backward(retain_graph=True)
        losses[1].backward()
        return losses

    attached = train_as_plain(TwoHeads, ["encoder.layers.*", "tower.*"], step)
    report = attached.report().ranks[0]
    assert (report.num_plans, report.total.num_late) == (1, 0)
    assert report.modules["tower.*"].num_groups_moved == 2


def test_backward_inside_of_forward() -> None:
    """As in models of forces, which are gradients of energies."""

    class Force(Decoder):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embedding(ids)
            position = x
            for layer in self.layers[:2]:
                x = layer.mlp(x)
            (force,) = torch.autograd.grad(x.sum(), position, create_graph=True)
            x = force + x
            for layer in self.layers[2:]:
                x = layer.mlp(x)
            return self.head(x)

    attached = train_as_plain(Force, "layers.*.mlp")
    report = attached.report().ranks[0]
    assert report.num_plans == 1
    assert report.modules["layers.*.mlp"].num_groups == 4


def test_a_part_of_the_model_called_without_the_model() -> None:
    """As in trainers that compute the loss from hidden states."""

    def step(model: torch.nn.Module, iteration: int) -> list[torch.Tensor]:
        return one_backward_each(model.decoder, iteration)

    attached = train_as_plain(Backbone, "decoder.layers.*", step)
    report = attached.report().ranks[0]
    assert (report.num_iterations, report.num_plans) == (8, 1)
    assert report.modules["decoder.layers.*"].num_groups_moved == 3


def test_a_part_called_after_the_model_is_a_pass_of_its_own() -> None:
    def step(model: Any, iteration: int) -> list[torch.Tensor]:
        x = model.embedding(micro_batch(iteration))
        loss = loss_of(model, iteration) + model.layers[0](x).square().mean()
        loss.backward()
        return [loss]

    attached = train_as_plain(Decoder, "layers.*", step)
    assert _groups_of_passes(attached) == [4, 1]


def test_a_model_that_calls_itself_is_one_pass() -> None:
    class Recursive(Decoder):
        def forward(self, ids: torch.Tensor, depth: int = 2) -> torch.Tensor:
            own = super().forward(ids)
            return own + self(ids, depth - 1) if depth else own

    attached = train_as_plain(Recursive, "layers.*")
    assert _groups_of_passes(attached) == [12]


def _groups_of_passes(attached: Any) -> list[int]:
    """The number of groups of each pass of the last iteration."""
    passes = [group.key.chunk_pass for group in attached.engine.plan.trace.groups]
    return [passes.count(number) for number in sorted(set(passes))]


def test_a_part_of_the_model_some_of_which_backward_never_reaches() -> None:
    def step(model: Any, iteration: int) -> list[torch.Tensor]:
        loss = loss_of(model.decoder, iteration)
        model.unused = model.decoder.layers[0](model.decoder.embedding(micro_batch(iteration)))
        loss.backward()
        return [loss]

    attached = train_as_plain(Backbone, "decoder.layers.*", step, num_iterations=6)
    report = attached.report().ranks[0]
    assert (report.num_iterations, report.num_plans) == (5, 1)
    assert report.modules["decoder.layers.*"].num_groups == 5


class Backbone(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = Decoder()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.decoder(ids)


# --- exceptions -----------------------------------------------------------------------------------


def _raise_in_backward(layer: Layer, patch: pytest.MonkeyPatch, error: type[BaseException]) -> None:
    forward = layer.mlp.forward

    def failing(x: torch.Tensor) -> torch.Tensor:
        output = forward(x)
        output.register_hook(lambda _: _throw(error))
        return output

    patch.setattr(layer.mlp, "forward", failing)


def _throw(error: type[BaseException], *_: object) -> Any:
    raise error


@pytest.mark.parametrize(
    "error, iteration, keeps_traceback",
    [(ZeroDivisionError, 0, False), (ZeroDivisionError, 3, True), (KeyboardInterrupt, 2, True)],
    ids=["in the first iteration", "later", "interrupt"],
)
@pytest.mark.parametrize("where", ["in a region", "between regions", "in a hook", "in backward"])
def test_what_follows_an_exception_is_right(
    where: str,
    iteration: int,
    error: type[BaseException],
    keeps_traceback: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, attached = make_attached(Decoder, ["layers.*.attn", "layers.*.mlp"], "cpu-lazy")
    layer: Any = model.layers[1]
    train(model, one_backward_each, iteration)
    with monkeypatch.context() as patch:
        if where == "in a region":
            patch.setattr(layer.mlp[2], "forward", lambda _: _throw(error))
        elif where == "between regions":
            patch.setattr(layer.mlp_norm, "forward", lambda _: _throw(error))
        elif where == "in a hook":
            handle = layer.mlp.register_forward_pre_hook(lambda *_: _throw(error), prepend=True)
        else:
            _raise_in_backward(layer, patch, error)
        with pytest.raises(error) as raised:
            one_backward_each(model, 0)
        if where == "in a hook":
            handle.remove()
        if error is not KeyboardInterrupt:
            assert not has_own_hooks()
    if not keeps_traceback:
        del raised
        gc.collect()
    plain = make(Decoder)
    plain.load_state_dict(model.state_dict())
    plain.zero_grad()
    model.zero_grad()
    assert equal(train(model, one_backward_each), train(plain, one_backward_each))
    report = attached.report().ranks[0]
    assert report.total.num_groups_moved == 6
    assert report.total.num_late == 0
    assert report.num_plans == (2 if where == "in backward" else 1)


def test_a_region_that_raises_starts_no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device may be out of memory."""
    model, attached = make_attached(Decoder, "layers.*", LAZY)
    copied: list[Any] = []
    monkeypatch.setattr(attached.engine.store, "copy_out", lambda *each: copied.append(each))
    layer: Any = model.layers[0]
    with monkeypatch.context() as patch:
        patch.setattr(layer.mlp, "forward", lambda _: _throw(torch.OutOfMemoryError))
        with pytest.raises(torch.OutOfMemoryError):
            model(micro_batch(0))
    assert copied == []
    model(micro_batch(0))
    assert len(copied) == 4


def test_an_exception_that_the_model_catches() -> None:
    class Retries(Decoder):
        def run(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
            try:
                return layer(x, None)
            except TypeError:
                return layer(x)

    train_as_plain(Retries, "layers.*")


def test_an_interrupt_that_the_model_catches(monkeypatch: pytest.MonkeyPatch) -> None:
    class Skips(Decoder):
        def run(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
            try:
                return layer(x)
            except KeyboardInterrupt:
                return x

    plain = make(Skips)
    model, attached = make_attached(Skips, "layers.*", LAZY)
    for which in (1, 3):
        with monkeypatch.context() as patch:
            for each in (plain, model):
                mlp: Any = each.layers[which].mlp
                patch.setattr(mlp, "forward", lambda _: _throw(KeyboardInterrupt))
            assert equal(train(model, one_backward_each), train(plain, one_backward_each))
            assert not has_own_hooks()
    assert equal(train(model, one_backward_each), train(plain, one_backward_each))
    assert counters(attached)["layers.*"].num_groups_moved == 3


def test_no_hooks_stay_set_once_an_interrupted_model_is_detached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, attached = make_attached(Decoder, "layers.*")
    with monkeypatch.context() as patch:
        patch.setattr(model.layers[2].mlp, "forward", lambda _: _throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            model(micro_batch(0))
    assert has_own_hooks(), "torch reports no interrupt"
    attached.detach()
    assert not has_own_hooks()


# --- the handle -----------------------------------------------------------------------------------


def test_nothing_moves_while_suspended() -> None:
    expected = train(make(Decoder), one_backward_each)
    model, attached = make_attached(Decoder, "layers.*", LAZY)
    with attached.suspended():
        assert equal(train(model, one_backward_each), expected)
    assert attached.report().ranks[0].num_iterations == 0
    one_backward_each(model, 0)
    assert attached.report().ranks[0].num_iterations == 2


def test_what_has_moved_comes_back_after_suspending_and_detaching(backend: str) -> None:
    plain = make(Decoder)
    model, attached = make_attached(Decoder, "layers.*", backend)
    for ending in ("suspend", "detach"):
        for each in (plain, model):
            each.zero_grad()
            torch.manual_seed(1)
            loss = loss_of(each, 0)
            if each is model and ending == "suspend":
                with attached.suspended():
                    loss.backward()
            elif each is model:
                attached.detach()
                attached.detach()
                assert attached.engine.store.host_pool.in_use_bytes > 0
                loss.backward()
            else:
                loss.backward()
        assert equal(gradients(model), gradients(plain))
    pool = attached.engine.store.host_pool
    assert (pool.in_use_bytes, pool.allocated_bytes) == (0, 0)
    assert all(not module._forward_hooks for module in model.modules())
    assert all(not module._forward_pre_hooks for module in model.modules())


def test_a_context_detaches() -> None:
    model = make(Decoder)
    with attach_to(model, "layers.*") as attached:
        one_backward_each(model, 0)
    one_backward_each(model, 1)
    assert attached.report().ranks[0].num_iterations == 2
    assert attached.engine.store.host_pool.allocated_bytes == 0


def test_a_trace_for_the_planner(tmp_path: Path) -> None:
    from megatron.slipstream.plan.files import load_trace

    model, attached = make_attached(Decoder, "layers.*")
    path = tmp_path / "trace.json"
    with pytest.raises(RuntimeError, match="no iteration has been recorded"):
        attached.save_trace(str(path))
    one_backward_each(model, 0)
    attached.save_trace(str(path))
    assert {group.name for group in load_trace(str(path)).groups} == {"layers.*"}


def test_a_model_and_its_engine_go_without_the_garbage_collector() -> None:
    """Removing them frees host memory, which is scarce."""
    model, attached = make_attached(partial(Decoder, checkpointing=False), ["layers.*", "head"])
    train(model, one_backward_each)
    references = [weakref.ref(model), weakref.ref(attached.engine)]
    gc.collect()
    gc.disable()
    try:
        del model, attached
        assert [reference() for reference in references] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_of_the_model_is_not_attached(how: str) -> None:
    model, attached = make_attached(Decoder, "layers.*")
    one_backward_each(model, 0)
    if how == "deepcopy":
        other = copy.deepcopy(model)
    else:
        stream = io.BytesIO()
        torch.save(model, stream)
        stream.seek(0)
        other = torch.load(stream, weights_only=False)
    before = attached.report().ranks[0].num_iterations
    for each in (model, other):
        each.zero_grad()
    assert equal(train(other, one_backward_each), train(model, one_backward_each))
    assert attached.report().ranks[0].num_iterations == before + 8, "of the model itself"
    assert torch.equal(other.head.weight, model.head.weight)


def test_replicas_in_threads_are_refused() -> None:
    model = make(Decoder, "layers.*")
    replica = model._replicate_for_data_parallel()
    with pytest.raises(RuntimeError, match="DataParallel.*use DistributedDataParallel"):
        replica(micro_batch(0))


def test_two_models_share_nothing() -> None:
    first, attached = make_attached(Decoder, "layers.*", LAZY)
    second, other = make_attached(Decoder, "layers.*.mlp", LAZY)

    def step(model: torch.nn.Module, iteration: int) -> list[torch.Tensor]:
        teacher = loss_of(second, 50)
        losses = one_backward_each(model, iteration)
        teacher.backward()
        return losses

    def plain_step(model: torch.nn.Module, iteration: int) -> list[torch.Tensor]:
        loss_of(plain_second, 50).backward()
        return one_backward_each(model, iteration)

    plain_second = make(Decoder)
    plain_second.load_state_dict(second.state_dict())
    torch.manual_seed(0)
    expected = train(make(Decoder), plain_step)
    second.zero_grad()
    assert equal(train(first, step), expected)
    assert equal(gradients(second), gradients(plain_second))
    assert attached.report().ranks[0].num_plans == other.report().ranks[0].num_plans == 1


def test_under_other_hooks_nothing_is_done(caplog: pytest.LogCaptureFixture) -> None:
    def step(model: torch.nn.Module, iteration: int) -> list[torch.Tensor]:
        with torch.autograd.graph.save_on_cpu():
            loss = loss_of(model, iteration)
        loss.backward()
        return [loss]

    attached = train_as_plain(Decoder, "layers.*", step)
    assert attached.report().ranks[0].num_iterations == 0
    assert caplog.text.count("the model runs under other saved-tensor hooks") == 1


def test_plain_pytorch_needs_no_megatron_core() -> None:
    code = (
        "import sys\n"
        "sys.modules['megatron.core'] = None\n"
        "sys.path.insert(0, 'tests/support')\n"
        "from attached_models import *\n"
        "model, attached = make_attached(Decoder, 'layers.*')\n"
        "train(model, one_backward_each)\n"
        "assert counters(attached)['layers.*'].num_groups_moved == 3\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=240)
