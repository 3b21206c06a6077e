# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""An attached model in several threads: one trains, and the others do not affect it."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Optional

import pytest
import torch
from attached_models import (
    BACKENDS,
    LAZY,
    Decoder,
    counters,
    equal,
    has_own_hooks,
    loss_of,
    make,
    make_attached,
    micro_batch,
    one_backward_each,
    train,
)

TIMEOUT_S = 60


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


@pytest.fixture(autouse=True)
def _no_hooks_are_left() -> Any:
    yield
    assert not has_own_hooks()


@pytest.mark.parametrize("backend", BACKENDS)
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


@pytest.mark.parametrize("backend", BACKENDS)
def test_threads_may_train_in_turn(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    expected = train(make(Decoder), one_backward_each)
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
    expected = train(make(Decoder), one_backward_each)
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
