# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Captures of chunk graphs: of all sizes and on all ranks, or none; what fits; and their end."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from toy_chunk import STEP, ToyChunk, Training, captured, equal, trained

from megatron.slipstream.fine_grained_activation_offload.step_clock import NUM_TIMED
from megatron.slipstream.graphs.capture import EagerGraphs

with_and_without_sizes = pytest.mark.parametrize("is_sized", [False, True], ids=["", "sizes"])


class _Hooks:
    """Counts calls of close()."""

    leaves_copies = False

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def forward(self) -> Any:
        return contextlib.nullcontext()

    backward = forward

    def close(self) -> None:
        self.log.append("closed")

    def read_times(self) -> None:
        self.log.append("replayed")


class _Offloading:
    """The interface that graphs use; moves nothing."""

    moved_bytes = host_bytes = 0

    def __init__(self, times_replays: bool = False) -> None:
        self.log: list[str] = []
        self._times_replays = times_replays

    def planning(self, run: Callable[[], None]) -> Any:
        planned = SimpleNamespace(run=run, times_replays=self._times_replays)
        planned.timed_slot = lambda _: _Hooks(self.log)
        planned.plan_again = lambda _: None
        return contextlib.nullcontext(planned)

    def note_captured(self) -> None:
        pass

    note_deleted = note_replay = note_captured

    def make_slot(self, memory: Any, is_eager: bool) -> _Hooks:
        self.log.append("made")
        return _Hooks(self.log)


def test_graphs_are_captured_again_after_they_were_deleted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    training = trained(1, ["FB", "FB"])
    caplog.clear()  # The level may be INFO already, as in a patched tree after other tests.
    with caplog.at_level(logging.INFO):
        training.graphs.delete()
        for number in range(2, 5):
            training.iteration("FB", STEP * number)
    assert [record.getMessage()[:33] for record in caplog.records] == [
        "CUDA graphs of chunk 0 are delete",
        "eager graphs of chunk 0: 1 slots",
    ]
    assert equal(training, trained(None, ["FB"] * 5))
    assert training.graphs.num_replays == 3


def test_all_sizes_are_deleted_together_and_captured_again() -> None:
    offloading = _Offloading()
    training = trained(2, ["FB", "FB"], offloading=offloading, is_sized=True)
    training.graphs.delete()
    assert offloading.log == ["made"] * 6 + ["closed"] * 6
    assert not any(graphs.slots for graphs in training.graphs.of_size.values())
    for number in range(2, 4):
        training.iteration("FB", first=STEP * number)
    assert equal(training, trained(None, ["FB"] * 4, is_sized=True))
    assert offloading.log[12:] == ["made"] * 6


@with_and_without_sizes
def test_graphs_in_use_are_not_deleted(is_sized: bool) -> None:
    training = captured(2, is_sized=is_sized)
    loss = training.forward(0)
    with pytest.raises(RuntimeError, match="while 1 micro-batches are in flight"):
        training.graphs.delete()
    assert training.graphs.is_captured
    loss.backward()
    training.graphs.delete()


def test_at_the_end_of_a_training_graphs_go_though_they_are_in_use() -> None:
    offloading = _Offloading()
    training = captured(2, offloading=offloading, is_sized=True)
    training.forward(2)
    training.graphs.close()
    assert offloading.log == ["made"] * 6 + ["closed"] * 6
    assert not training.graphs.is_captured


def test_the_backward_of_an_eager_micro_batch_may_come_after_deletion() -> None:
    training = captured(1)
    replayed, eager = training.forward(0), training.forward(1)
    replayed.backward()
    training.graphs.delete()
    eager.backward()


@pytest.mark.parametrize("what", ["parameter", "main_grad"])
def test_memory_that_moved_is_noticed(what: str) -> None:
    training = trained(1, ["FB", "FB"])
    parameter: Any = training.module.layers[1].weight
    if what == "parameter":
        parameter.data = parameter.data.clone()
    else:
        parameter.main_grad = parameter.main_grad.clone()
    with pytest.raises(RuntimeError, match="have moved since"):
        training.begin_iteration()


def test_parameters_need_a_main_grad() -> None:
    training = trained(1, ["FB"])
    training.module.layers[1].weight.main_grad = None  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"layers\.1\.weight of chunk 0 has no main_grad"):
        training.graphs.begin_iteration()


class _Device(EagerGraphs):
    """The first graph in a pool takes 1 GiB, as much as a pass has at its peak; others 64 MiB."""

    module: ToyChunk

    def __init__(self, free_bytes: int, num_records: int = 100) -> None:
        self.left_bytes, self.num_left = free_bytes, num_records
        self.pools: set[int] = set()
        self.used_bytes = 0
        self.num_runs: list[int] = []
        """Runs of the module before each measured run and each capture."""

    def new_pool(self) -> Any:
        return object()

    def measure(self, work: Any) -> int:
        self.num_runs.append(self.module.num_runs)
        work()
        return 2**30

    def record(self, work: Any, pool: Any) -> Any:
        self.num_runs.append(self.module.num_runs)
        self.num_left -= 1
        if self.num_left < 0:
            raise RuntimeError("out of memory")
        taken = 2**26 if id(pool) in self.pools else 2**30
        self.left_bytes -= taken
        self.used_bytes += taken
        self.pools.add(id(pool))
        return super().record(work, pool)

    def free_bytes(self) -> int:
        return self.left_bytes

    def held_bytes(self) -> int:
        return self.used_bytes


def on_device(num_slots: int, device: _Device, **options: Any) -> Training:
    """A training after its first iteration."""
    training = Training(num_slots, backend=device, **options)
    device.module = training.module
    training.iteration("FB")
    return training


def test_what_is_captured_has_been_run_and_then_measured() -> None:
    """First-use work cannot be captured, and does not count as a pass's memory."""
    device = _Device(2**40)
    on_device(1, device).begin_iteration()
    assert device.num_runs == [2, 3, 4]


def test_sizes_need_no_more_room_than_one() -> None:
    training = on_device(2, _Device(5 * 2**29), is_sized=True)
    training.begin_iteration()  # All sizes run first.
    slot_bytes = [figures.slot_bytes for figures in training.graphs.figures.values()]
    assert slot_bytes == [2**30 + 2**26, 2**27, 2**27]


def assert_failed(training: Training, error: str) -> None:
    """A capture fails, leaves no graphs, and restores the state of the chunk."""
    state = [buffer.clone() for buffer in training.module.buffers()]
    with pytest.raises((RuntimeError, ValueError), match=error):
        training.begin_iteration()
    assert not any(graphs.slots for graphs in training.graphs.of_size.values())
    assert all(map(torch.equal, state, training.module.buffers()))


@with_and_without_sizes
def test_graphs_that_would_not_fit_are_refused_before_they_are_captured(is_sized: bool) -> None:
    device = _Device(5 * 2**29)
    training = on_device(3, device, is_sized=is_sized)
    assert_failed(training, r"3 slots of 1.0 GiB are 3.0 GiB, and 2.5 GiB are free")
    assert device.used_bytes == 0


# Two slots of two graphs for each size: within the first size, between two, and in the last.
@pytest.mark.parametrize("num_records, num_slots_made", [(1, 1), (3, 2), (4, 3), (11, 6)])
def test_if_one_size_cannot_be_captured_all_are_given_up(
    num_records: int, num_slots_made: int
) -> None:
    offloading = _Offloading()
    device = _Device(2**40, num_records)
    training = on_device(2, device, offloading=offloading, is_sized=True)
    assert_failed(training, "out of memory")
    # The other ranks are told; otherwise they would wait.
    assert training.sizes is not None
    assert str(training.sizes.told[-1][1]) == "out of memory"
    assert offloading.log.count("made") == offloading.log.count("closed") == num_slots_made


# After two sizes have been run; after two have been captured; in a timed replay, of which each rank
# says at the end of the step, too, that it failed.
@pytest.mark.parametrize(
    "step, times_replays, num_told, expected",
    [
        (2, False, 2, []),
        (5, False, 5, ["made"] * 4 + ["closed"] * 4),
        (2, True, 3, ["replayed"] * (1 + NUM_TIMED) + ["closed"] * 2),
    ],
)
def test_if_another_rank_fails_this_one_gives_up_what_it_has(
    step: int, times_replays: bool, num_told: int, expected: list[str]
) -> None:
    offloading = _Offloading(times_replays)
    training = trained(2, ["FB"], offloading=offloading, is_sized=True)
    assert training.sizes is not None
    training.sizes.other_rank_fails_at = step
    assert_failed(training, "another rank")
    assert len(training.sizes.told) == num_told
    assert offloading.log == expected
