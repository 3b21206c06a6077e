# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""An exception at any place leaves the next iteration right, and nothing in use."""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fault_places import ENGINE, Alarm, Fault, Place
from hand_driven import LAZY_NATIVE, HandDriven
from torch.autograd.graph import saved_tensors_hooks
from toy_model import all_equal, make_chunks, make_manager, run_schedule

from megatron.slipstream.fine_grained_activation_offload import host_pool, recorder
from megatron.slipstream.fine_grained_activation_offload.engine import OffloadEngine
from megatron.slipstream.fine_grained_activation_offload.host_pool import HostUsage
from megatron.slipstream.fine_grained_activation_offload.regions import RegionFlag
from megatron.slipstream.fine_grained_activation_offload.storage import SavedStorage
from megatron.slipstream.integration.seam.manager import PipelineOffloadManager

SCHEDULE = "F0.0 F0.1 B0.0 B0.1"
BACKENDS = ["cpu-lazy", LAZY_NATIVE]
NUM_SIGNALS = 60
NUM_BEFORE = 6
"""Iterations after which plan, host layout and C++ steps are followed."""
NUM_LINES_OF_CLEAR = 24
"""Lines with which the recorder ends an iteration."""
NUM_UNTIL_FOLLOWED = 3
"""Iterations after a fault and the next one, before they are followed again."""


@pytest.fixture(autouse=True)
def unraised(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Destructors cannot raise; nothing else than the fault may occur in them."""
    seen: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: seen.append(args.exc_value))
    yield
    assert [error for error in seen if not isinstance(error, Fault)] == []


class Rig:
    """A chunk, an engine, and what a right iteration gives."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self.chunks = make_chunks(1, num_layers=2)
        self.expected = run_schedule(self.chunks, SCHEDULE, None)
        self.manager: Any = None

    def renew(self, num_before: int) -> PipelineOffloadManager:
        """A new engine, after as many iterations."""
        if self.manager is not None:
            self.manager.close()
        self.manager = make_manager(self._backend)
        for _ in range(num_before):
            assert self.is_right()
        return self.manager

    def is_right(self) -> bool:
        return all_equal(self.expected, run_schedule(self.chunks, SCHEDULE, self.manager))

    def fail(self, place: contextlib.AbstractContextManager[None]) -> None:
        """An iteration that raises at the place, or goes on if a destructor did."""
        with place, contextlib.suppress(Fault):
            assert self.is_right()

    def assert_recovers(self) -> None:
        assert self.is_right()
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        store = self.manager.store
        assert store.host_pool.in_use_bytes == 0
        assert store.host_pool.is_idle
        assert not store.copy_streams.keeps_memory


def sweep(
    rig: Rig,
    num_before: int,
    which: slice,
    kind: str,
    is_after: bool = False,
    files: str = ENGINE,
) -> int:
    """Raise at some places of the iteration after ``num_before``. Returns how many.

    Places are the backend's ``calls``, or the ``lines`` of Python of these files.
    """

    def fail_at(number: int) -> Place:
        place = Place(number, is_after)
        if kind == "calls":
            rig.fail(place.among_calls(rig.manager.store.backend, rig.manager.store.is_native))
        else:
            rig.fail(place.among_lines(files))
        return place

    rig.renew(num_before)
    num_places = fail_at(sys.maxsize).num_passed
    rig.renew(num_before)
    numbers = range(num_places)[which]
    for number in numbers:
        place = fail_at(number)
        try:
            rig.assert_recovers()
        except BaseException as error:
            raise AssertionError(f"after a fault at place {number} {place.line}") from error
        if not num_before:
            rig.renew(0)
        for _ in range(NUM_UNTIL_FOLLOWED if num_before else 0):
            assert rig.is_right()
        assert place.is_reached, f"place {number} of {num_places}"
    return len(numbers)


@pytest.mark.parametrize(
    "num_before, stride", [(0, 7), (NUM_BEFORE, 1)], ids=["recording", "following a plan"]
)
@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_call_of_the_backend_raises(
    backend: str, is_after: bool, num_before: int, stride: int
) -> None:
    assert sweep(Rig(backend), num_before, slice(None, None, stride), "calls", is_after) > 10


@pytest.mark.parametrize(
    "num_before, stride", [(0, 101), (NUM_BEFORE, 41)], ids=["recording", "following a plan"]
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_interrupt_at_a_line_of_the_engine(backend: str, num_before: int, stride: int) -> None:
    """Lines of Python: an interrupt by a signal comes between any two of its instructions."""
    assert sweep(Rig(backend), num_before, slice(None, None, stride), "lines") > 10


def test_an_interrupt_at_any_line_of_the_pool_of_host_memory() -> None:
    """Five lines in a row leave it busy, of those after the buffers of an iteration."""
    every_fifth = slice(None, None, 5)
    assert sweep(Rig("cpu-lazy"), NUM_BEFORE, every_fifth, "lines", files=host_pool.__file__) > 100


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_interrupt_while_an_iteration_is_ended_discards_it(backend: str) -> None:
    last = slice(-NUM_LINES_OF_CLEAR, None)
    sweep(Rig(backend), 0, last, "lines", files=recorder.__file__)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_signal_interrupts_an_iteration(backend: str) -> None:
    rig, generator, num_raised = Rig(backend), random.Random(5), 0
    rig.renew(NUM_BEFORE)
    begin = time.perf_counter()
    assert rig.is_right()
    seconds = time.perf_counter() - begin
    for _ in range(NUM_SIGNALS):
        alarm = Alarm(run_schedule, generator.uniform(1e-5, seconds))
        rig.fail(alarm)
        rig.assert_recovers()
        num_raised += alarm.has_raised
    assert num_raised > NUM_SIGNALS // 8


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("move", ["copy_out", "send", "reload"])
def test_what_is_freed_while_an_exception_is_raised_does_not_lose_it(
    backend: str, move: str
) -> None:
    hand = HandDriven(backend)

    def saved() -> Any:
        group = hand.group()
        kept = hand.save(group, torch.ones(1000))
        hand.copy_out(group) if move == "copy_out" else hand.send(group)
        if move == "reload":
            hand.copy_in(group)
        return kept

    def fail() -> Any:
        raise Fault

    with pytest.raises(Fault):
        print(saved(), fail())  # The interpreter's stack alone holds the first argument.
    assert hand.store.host_pool.in_use_bytes == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("copy", ["out", "in"])
def test_a_buffer_of_copies_without_a_signal_is_not_reused_before_the_host_waits(
    backend: str, copy: str
) -> None:
    hand = HandDriven(backend)
    group = hand.group()
    saved = hand.save(group, torch.ones(1000))
    if copy == "in":
        hand.send(group)
    run_copies = hand.backend.run_copies

    def interrupted(*arguments: Any) -> None:
        run_copies(*arguments)
        raise Fault

    hand.backend.run_copies = interrupted  # type: ignore[method-assign]
    with pytest.raises(Fault):
        hand.copy_out(group) if copy == "out" else hand.copy_in(group)
    hand.backend.run_copies = run_copies  # type: ignore[method-assign]
    if copy == "in":
        with pytest.raises(RuntimeError, match=r"an earlier reload of it failed; run forward"):
            hand.unpack(saved)
    del saved
    store, waited = hand.store, []
    assert store.host_pool.in_use_bytes > 0, "a copy may still use it"
    wait_on_host = hand.backend.wait_on_host
    hand.backend.wait_on_host = lambda stream: waited.append(  # type: ignore[method-assign]
        wait_on_host(stream)
    )
    store.recover()
    assert len(waited) == 2, "for both copy streams"
    assert store.host_pool.in_use_bytes == 0


@pytest.mark.parametrize(
    "backend, owner, method",
    [
        *((backend, None, "wait") for backend in BACKENDS),
        ("cpu-lazy", SavedStorage, "__del__"),  # at its first line
    ],
)
def test_memory_of_an_unread_reload_is_kept_if_its_wait_fails(
    backend: str, owner: type | None, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without E6 other tensors could take memory that the copy is still writing."""
    hand = HandDriven(backend)
    group = hand.group()
    saved = hand.save(group, torch.ones(1000))
    hand.send(group)
    hand.copy_in(group)
    with monkeypatch.context() as patch:
        patch.setattr(owner or hand.backend, method, interrupt)
        del saved
    streams = hand.store.copy_streams
    assert [memory.nbytes() for memory in streams._kept.values()] == [4000]
    hand.store.recover()
    assert not streams.keeps_memory


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "owner, method", [(saved_tensors_hooks, "__enter__"), (OffloadEngine, "leave")]
)
def test_a_region_that_an_interrupt_leaves_open_is_left(
    backend: str, owner: type, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = SimpleNamespace(is_active=False)
    rig = Rig(backend)
    manager = rig.renew(0)
    manager.engine.regions.flag = RegionFlag(flags, "is_active", frozenset())
    original = getattr(owner, method)

    def interrupted(hooks: Any, *arguments: Any) -> None:
        if method == "__enter__":
            original(hooks, *arguments)
        raise Fault

    with monkeypatch.context() as patch:
        patch.setattr(owner, method, interrupted)
        rig.fail(contextlib.nullcontext())
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
    rig.assert_recovers()
    assert not flags.is_active


def test_an_interrupt_between_a_planned_buffer_and_its_count_leaves_none_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig("cpu-lazy")
    rig.renew(NUM_BEFORE)
    with monkeypatch.context() as interrupted, contextlib.suppress(Fault):
        interrupted.setattr(HostUsage, "add", interrupt)
        rig.is_right()
    rig.assert_recovers()
    chunks, other = make_chunks(1, num_layers=2), "F0.0 F0.1 B0.1 B0.0"
    run_schedule(chunks, other, rig.manager)  # It departs from the plan, and leaves the layout.
    rig.assert_recovers()


def interrupt(*_: object) -> None:
    raise Fault
