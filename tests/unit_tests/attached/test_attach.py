# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Any PyTorch model and training loop computes the same with chosen sub-modules attached."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest
import torch
from attached_models import (
    LAZY,
    Decoder,
    Layer,
    attach_to,
    counters,
    equal,
    has_own_hooks,
    loss_of,
    make,
    make_attached,
    micro_batch,
    one_backward_each,
    plain_results,
    train,
    train_as_plain,
)
from attached_scenarios import INPUT_BYTES, INPUTS, SCENARIOS
from forked import run_function
from torch.utils.checkpoint import checkpoint

from megatron.slipstream.integration.cpu.cpu_memory import DeviceMemoryMeter


@pytest.mark.parametrize("name", SCENARIOS)
def test_loss_and_gradients_are_those_without(name: str, caplog: pytest.LogCaptureFixture) -> None:
    row = SCENARIOS[name]
    attached = train_as_plain(
        row.build,
        row.patterns,
        row.step,
        row.backend,
        plain=row.plain,
        num_iterations=row.num_iterations,
    )
    report = attached.report().ranks[0]
    assert report.total.num_late == row.late or row.late is None
    assert report.num_plans == row.plans or row.plans is None
    assert report.num_iterations == row.iterations or row.iterations is None
    assert report.total.freed_bytes == report.total.d2h_bytes or row.freed is None
    if row.num_modules is not None:
        assert len(attached.modules) == row.num_modules
        assert report.total.num_groups == row.num_modules or row.groups is not None
        assert report.total.freed_bytes == report.total.d2h_bytes > 0
    if row.groups is not None:
        assert {label: each.num_groups for label, each in report.modules.items()} == row.groups
    for label, number in (row.moved or {}).items():
        found = report.modules[label].num_groups_moved
        assert found == number or (found > -number and number < 0)
    for label, nbytes in (row.freed or {}).items():
        assert report.modules[label].freed_bytes == nbytes
    if row.passes is not None:
        passes = [group.key.chunk_pass for group in attached.engine.plan.trace.groups]
        assert [passes.count(number) for number in sorted(set(passes))] == row.passes
    assert caplog.text.count(row.told) == 1 or not row.told


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
    assert moved_bytes(lambda x: x.tanh() * 2) - moved_bytes(lambda x: x * 2) == 3 * INPUT_BYTES


@pytest.mark.parametrize("reentrant", [False, True])
def test_of_a_module_with_a_checkpoint_inside_less_moves(reentrant: bool) -> None:
    class Partly(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = checkpoint(lambda y: y + self.attn(self.attn_norm(y)), x, use_reentrant=reentrant)
            return x + self.mlp(self.mlp_norm(x))

    def build() -> torch.nn.Module:
        model = Decoder()
        for layer in model.layers:
            layer.__class__ = Partly
        return model

    whole_bytes = counters(train_as_plain(Decoder, "layers.*"))["layers.*"].d2h_bytes
    attached = train_as_plain(build, "layers.*", plain=Decoder)
    assert 3 * INPUT_BYTES < counters(attached)["layers.*"].d2h_bytes < whole_bytes
    assert counters(attached)["layers.*"].num_late == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_switched_on_and_off_while_training(reentrant: bool) -> None:
    def step(model: Any, iteration: int) -> list[torch.Tensor]:
        model.checkpointing = reentrant if iteration // 3 % 2 else None
        return one_backward_each(model, iteration)

    expected = plain_results(Decoder, num_iterations=12)
    model, attached = make_attached(Decoder, "layers.*", LAZY)
    assert equal(train(model, step, 12), expected)
    assert list(counters(attached)) == [INPUTS]
    assert counters(attached)[INPUTS].num_late == 0


def test_hooks_lie_around_the_model_only_where_checkpoints_are_seen() -> None:
    class Looks(Decoder):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            seen.append(has_own_hooks())
            return super().forward(ids)

    seen: list[bool] = []
    model = make(Looks, "layers.*", LAZY)
    for model.checkpointing in (None, None, False, False, None, None):
        one_backward_each(model, 0)
    # The first pass knows nothing; later passes know the previous one.
    assert seen == [True, *[False] * 4, *[True] * 4, *[False] * 3]


def test_an_iteration_ends_with_its_backward_and_before_the_optimizer() -> None:
    model, attached = make_attached(Decoder, "layers.*")
    for index in range(3):
        loss = loss_of(model, index)
        assert attached.report().ranks[0].num_iterations == index
        loss.backward()
        assert attached.report().ranks[0].num_iterations == index + 1


def test_an_evaluation_that_forgot_no_grad_is_no_endless_iteration() -> None:
    model, attached = make_attached(Decoder, "layers.*")
    engine = attached.engine
    num_groups = []
    for index in range(40):
        output = model(micro_batch(index))  # the last one lives while the next one runs
        num_groups.append(len(engine.now.groups))
    del output
    assert max(num_groups) <= 4 * 20
    one_backward_each(model, 0)
    assert counters(attached)["layers.*"].num_groups_moved == 3


def train_without_megatron_core() -> int:
    """In a forked process: all of the package is imported again, without megatron-core."""
    for name in list(sys.modules):
        if name.partition(".")[0] in ("megatron", "attached_models"):
            del sys.modules[name]
    sys.modules["megatron.core"] = None  # type: ignore[assignment]  # An import of it fails.
    from attached_models import Decoder, counters, make_attached, one_backward_each, train

    model, attached = make_attached(Decoder, "layers.*")
    train(model, one_backward_each)
    assert counters(attached)["layers.*"].num_groups_moved == 3
    return 0


def test_plain_pytorch_needs_no_megatron_core() -> None:
    done = run_function(train_without_megatron_core)
    assert done.returncode == 0, done.stderr


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
