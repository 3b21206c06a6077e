# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""An attached model is suspended, detached, copied, and runs in several threads."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
from attached_models import (
    LAZY,
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
    plain_results,
    train,
)
from torch.multiprocessing.reductions import StorageWeakRef

TIMEOUT_S = 60


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


def test_nothing_moves_while_suspended() -> None:
    expected = plain_results(Decoder)
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
    assert attached.report().ranks[0].num_iterations == before + 6, "of the model itself"
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


# --- threads --------------------------------------------------------------------------------------


class Other:
    """A second thread that runs the model while the first one is in its forward.

    The first one reaches layer 1 and waits; the second one runs to layer 2 and waits; the first
    one ends its forward; the second one ends its own.
    """

    def __init__(self, model: Any, run: Callable[[], Any]) -> None:
        self._run = run
        self.error: Optional[BaseException] = None
        self.result: Any = None
        self.had_hooks = False
        self._is_inside, self._may_end = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._main, name="other")
        self._handles = [
            model.layers[1].mlp.register_forward_pre_hook(self._in_first),
            model.layers[2].mlp.register_forward_pre_hook(self._in_second),
        ]

    def _main(self) -> None:
        try:
            self.result = self._run()
        except BaseException as error:
            self.error = error
        self.had_hooks = has_own_hooks()
        self._is_inside.set()

    def _in_first(self, *_: Any) -> None:
        if threading.current_thread() is not self._thread and self._thread.ident is None:
            self._thread.start()
            assert self._is_inside.wait(TIMEOUT_S)

    def _in_second(self, *_: Any) -> None:
        if threading.current_thread() is self._thread:
            self._is_inside.set()
            assert self._may_end.wait(TIMEOUT_S)

    def end(self) -> None:
        self._may_end.set()
        self._thread.join(TIMEOUT_S)
        for handle in self._handles:
            handle.remove()


@contextlib.contextmanager
def beside(model: Any, run: Callable[[], Any]) -> Iterator[Other]:
    other = Other(model, run)
    try:
        yield other
    finally:
        other.end()


def step_beside(other: Other) -> Callable[[Any, int], list[torch.Tensor]]:
    """A forward while the other thread is in its own, then backward after that has ended."""

    def step(model: Any, iteration: int) -> list[torch.Tensor]:
        loss = loss_of(model, iteration)
        other.end()
        loss.backward()
        return [loss]

    return step


def plain(model: Any, iteration: int) -> list[torch.Tensor]:
    loss = loss_of(model, iteration)
    loss.backward()
    return [loss]


def test_one_thread_evaluates_while_another_trains(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    reference = make(Decoder)
    model, attached = make_attached(Decoder, "layers.*", backend)
    reference.eval(), model.eval()
    expected = train(reference, plain)

    def predict() -> torch.Tensor:
        with torch.no_grad():
            return model(micro_batch(9))

    with beside(model, predict) as other:
        assert equal(train(model, step_beside(other)), expected)
    assert other.error is None
    assert not other.had_hooks
    assert equal(train(model, plain), train(reference, plain))
    assert counters(attached)["layers.*"].num_groups_moved == 3
    assert caplog.messages == []


def test_a_second_thread_with_gradients_is_right_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reference = make(Decoder)
    model, attached = make_attached(Decoder, "layers.*", LAZY)
    reference.eval(), model.eval()
    parameters = list(model.parameters())
    expected = train(reference, plain)

    def differentiate() -> list[torch.Tensor]:
        return list(torch.autograd.grad(loss_of(model, 9), parameters))

    first = make(Decoder).eval()
    second = list(torch.autograd.grad(loss_of(first, 9), list(first.parameters())))
    with beside(model, differentiate) as other:
        assert equal(train(model, step_beside(other)), expected)
    assert other.error is None
    assert equal(other.result, second)
    assert counters(attached)["layers.*"].num_groups_moved == 3
    (message,) = caplog.messages
    assert "two threads run the model with gradients at the same time" in message
    assert "torch.no_grad()" in message


def test_suspending_holds_for_one_thread(caplog: pytest.LogCaptureFixture) -> None:
    model, attached = make_attached(Decoder, "layers.*")
    model.eval()
    train(model, plain)

    def suspended() -> list[torch.Tensor]:
        with attached.suspended():
            return list(torch.autograd.grad(loss_of(model, 9), list(model.parameters())))

    with beside(model, suspended) as other:
        train(model, step_beside(other), num_iterations=1)
    assert other.error is None
    assert counters(attached)["layers.*"].num_groups_moved == 3
    assert caplog.messages == []


def test_detaching_amid_the_forward_of_another_thread_is_refused() -> None:
    model, attached = make_attached(Decoder, "layers.*")
    with beside(model, attached.detach) as other:
        model(micro_batch(0)).sum().backward()
    assert isinstance(other.error, RuntimeError)
    assert "the thread 'MainThread' trains the model" in str(other.error)
    assert not has_own_hooks()
    attached.detach()
    attached.detach()


def test_detaching_while_a_forward_of_another_thread_waits_is_refused() -> None:
    model, attached = make_attached(Decoder, "layers.*")
    loss = loss_of(model, 0)
    refusals: list[str] = []

    def detach() -> None:
        try:
            attached.detach()
        except RuntimeError as error:
            refusals.append(str(error))

    in_a_thread(detach)
    loss.backward()
    in_a_thread(detach)
    assert len(refusals) == 1
    assert not model.layers[0]._forward_hooks


def in_a_thread(run: Callable[[], Any]) -> None:
    thread = threading.Thread(target=run)
    thread.start()
    thread.join(TIMEOUT_S)


def test_threads_may_train_in_turn(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    expected = plain_results(Decoder)
    model, attached = make_attached(Decoder, "layers.*", backend)

    def step(model: Any, iteration: int) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []

        def run() -> None:
            torch.manual_seed(iteration)
            losses.extend(one_backward_each(model, iteration))

        in_a_thread(run)
        return losses

    assert equal(train(model, step), expected)
    assert counters(attached)["layers.*"].num_groups_moved == 3
    assert caplog.messages == []


def test_a_thread_that_ended_amid_its_forward_makes_room_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = plain_results(Decoder)
    model, attached = make_attached(Decoder, "layers.*")

    # torch calls no hook for SystemExit.
    with monkeypatch.context() as patch:
        patch.setattr(model.layers[2].mlp, "forward", lambda _: sys.exit())

        def run() -> None:
            with contextlib.suppress(SystemExit):
                model(micro_batch(0))

        in_a_thread(run)
    # A part alone: its iteration ends with its backward only if no model runs.
    model.layers[0](torch.ones(2, 8, 32)).sum().backward()
    assert attached.report().ranks[0].num_iterations == 1
    model.zero_grad()
    assert equal(train(model, one_backward_each), expected)
    assert counters(attached)["layers.*"].num_groups_moved == 3
