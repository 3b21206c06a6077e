# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A bank of graphs: each micro-batch replays those of its size, in memory that sizes share."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Optional

import pytest
import torch
from toy_chunk import TOKENS, WIDTH, Training, equal

from megatron.slipstream.chunk_graphs.backend import Cost, EagerGraphs
from megatron.slipstream.chunk_graphs.bank import GraphBank
from megatron.slipstream.chunk_graphs.chunk import Chunk
from megatron.slipstream.chunk_graphs.engine import ChunkGraphs
from megatron.slipstream.chunk_graphs.slot_memory import (
    MAX_SMALL_BYTES,
    Static,
    StaticInputs,
)
from megatron.slipstream.fine_grained_activation_offload.step_clock import NUM_TIMED

SIZES = (1, 2, 4)
SCHEDULES = ["FB", "FFBB", "FFBFBB", "FFFBFBFBBB", "FB", "FFFBBB"]
"""Schedules of one iteration each, with at most three micro-batches in flight."""


class _Sizes:
    """Sizes of a toy: the size is an argument, and decides the length of a table."""

    sizes = SIZES

    def __init__(self) -> None:
        self.told: list[tuple[int, Optional[Exception]]] = []
        self.other_rank_fails_at = 0

    def size_of(self, arguments: Mapping[str, Any]) -> int:
        if arguments["size"] not in SIZES:
            raise ValueError(f"size {arguments['size']}")
        return int(arguments["size"])

    def arguments_of(self, arguments: Mapping[str, Any], size: int) -> Mapping[str, Any]:
        return {**arguments, "size": size, "table": _table(size)}

    def agree(self, size: int, error: Optional[Exception]) -> None:
        self.told.append((size, error))
        if error is not None:
            raise error
        if len(self.told) == self.other_rank_fails_at:
            raise RuntimeError("another rank")


def _table(size: int) -> torch.Tensor:
    return torch.linspace(1, 2, TOKENS * size).reshape(-1, 1, 1)


class _CaptureHooks:
    """Counts calls of close()."""

    leaves_copies = False

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def forward(self) -> Any:
        return contextlib.nullcontext()

    backward = forward

    def close(self) -> None:
        self.log.append("closed")


class _Offloading:
    """The interface that the engine uses; moves nothing."""

    moved_bytes = host_bytes = 0

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def planning(self, run: Callable[[], None], times_replays: bool) -> Any:
        return contextlib.nullcontext(SimpleNamespace(run=run, times_replays=False))

    def note_captured(self) -> None:
        pass

    note_deleted = note_captured

    def note_replay(self) -> None:
        pass

    def make_slot(self, memory: Any, is_eager: bool) -> _CaptureHooks:
        self.log.append("made")
        return _CaptureHooks(self.log)


class _TimedOffloading(_Offloading):
    """Times replays before the capture of all slots."""

    def planning(self, run: Callable[[], None], times_replays: bool) -> Any:
        hooks = _CaptureHooks(self.log)
        hooks.read_times = lambda: self.log.append("replayed")  # type: ignore[attr-defined]
        planned = SimpleNamespace(run=run, times_replays=True, timed_slot=lambda _: hooks)
        planned.plan_again = lambda _: None
        return contextlib.nullcontext(planned)


class Sized(Training):
    """A toy chunk whose micro-batches have sizes: that of number ``n`` is ``SIZES[n % 3]``.

    Args:
        num_slots: Number of slots; None to train eagerly.
        backend: Captures the graphs.
        offloading: Offloading of every size.
    """

    def __init__(
        self,
        num_slots: Optional[int],
        backend: Optional[EagerGraphs] = None,
        offloading: Optional[Any] = None,
    ) -> None:
        super().__init__(None)
        self.sizes = _Sizes()
        self.bank: Any = None
        if num_slots is None:
            return
        chunks = {
            size: Chunk(
                f"chunk 0, size {size}",
                self.module,
                self.run,
                save_state=self._save_state,
                offloading=offloading,
            )
            for size in SIZES
        }
        self.bank = GraphBank(chunks, num_slots, 1, backend or EagerGraphs(), self.sizes)
        self.graphs = self.bank

    def run(self, hidden: torch.Tensor, table: torch.Tensor, size: int) -> torch.Tensor:
        output: torch.Tensor = self.module(hidden, scale=table[-TOKENS:] / size)
        return output

    def forward(self, micro_batch: int) -> torch.Tensor:
        size = SIZES[micro_batch % 3]
        generator = torch.Generator().manual_seed(micro_batch)
        data = torch.randn(TOKENS, 1, WIDTH, generator=generator)
        hidden = self.before(data)
        arguments = {"table": _table(size), "size": size}
        run = self.run if self.bank is None else lambda h, **a: self.bank(h, a)
        output = run(hidden, **arguments)
        return (output * torch.randn(TOKENS, 1, WIDTH, generator=generator)).sum()


def trained(
    num_slots: Optional[int], schedules: Sequence[str] = SCHEDULES, **options: Any
) -> Sized:
    training = Sized(num_slots, **options)
    for number, schedule in enumerate(schedules):
        training.iteration(schedule, first=7 * number)
    return training


def of_size(training: Sized) -> dict[int, ChunkGraphs]:
    return dict(training.bank.of_size)


def test_each_micro_batch_runs_as_without_graphs() -> None:
    banked = trained(3)
    assert equal(banked, trained(None))
    replays = {size: graphs.num_replays for size, graphs in of_size(banked).items()}
    numbers = [7 * i + n for i, s in enumerate(SCHEDULES) for n in range(s.count("F")) if i]
    assert replays == {size: sum(SIZES[n % 3] == size for n in numbers) for size in SIZES}
    assert banked.bank.num_replays == sum(replays.values())
    assert min(replays.values()) > 2


def test_all_sizes_are_captured_after_one_micro_batch_from_the_largest() -> None:
    training = Sized(2)
    training.iteration("FB")  # of size 1
    assert not training.bank.is_captured
    assert training.bank.figures == {}
    training.begin_iteration()
    assert training.bank.is_captured
    assert training.sizes.told == [(size, None) for size in (4, 2, 1, 4, 2, 1)]
    assert list(training.bank.figures) == [4, 2, 1]


def test_sizes_share_the_memory_of_a_place_and_places_share_none() -> None:
    class Pools(EagerGraphs):
        def new_pool(self) -> Any:
            return object()

    training = trained(3, backend=Pools())
    slots = [graphs._slots for graphs in of_size(training).values()]
    for largest, *others in zip(*slots, strict=True):
        for slot in others:
            assert slot.pool is largest.pool
            assert slot.hidden is largest.hidden
            assert slot.grad_output is largest.grad_output
            assert slot.tensors[0] is not largest.tensors[0]  # tables are of different lengths
    for size_slots in slots:
        assert len({id(slot.pool) for slot in size_slots}) == 3
        assert len({id(slot.hidden) for slot in size_slots}) == 3


def test_an_input_that_sizes_share_is_copied_again_when_another_size_had_it() -> None:
    training = trained(1, ["FB", "FB"])
    (first, second, _) = of_size(training).values()
    shared = first._slots[0].memory.static("mask", torch.zeros(3))
    assert shared is second._slots[0].memory.static("mask", torch.ones(3))
    one, other = torch.ones(3), torch.full((3,), 2.0)
    for source in (one, other, one):
        StaticInputs([shared]).renew([source])
        assert torch.equal(shared.tensor, source)


def test_small_inputs_of_all_types_are_copied_by_one_operation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copied: list[int] = []
    copy = torch._foreach_copy_
    monkeypatch.setattr(
        torch, "_foreach_copy_", lambda to, sources: copied.append(len(to)) or copy(to, sources)
    )
    sources = [
        torch.arange(3, dtype=torch.int32),
        torch.ones(2),
        torch.arange(4),
        torch.tensor([[True, False, True, True]]),
        torch.randn(2, 6, dtype=torch.bfloat16),
        # The others are copied one by one: of no whole number of words, not contiguous, large.
        torch.tensor([True]),
        torch.ones(()),
        torch.arange(6).view(2, 3).t(),
        torch.ones(MAX_SMALL_BYTES // 4 + 1),
    ]
    statics = [Static(torch.zeros_like(source)) for source in sources]
    inputs = StaticInputs(statics)
    inputs.renew(sources)
    assert copied == [5]
    assert all(map(torch.equal, (static.tensor for static in statics), sources))
    inputs.renew(sources)
    assert copied == [5], "nothing has changed"
    sources[2].add_(1)
    sources[7].add_(1)
    inputs.renew(sources)
    assert copied == [5, 1]
    assert all(map(torch.equal, (static.tensor for static in statics), sources))
    mask = torch.tensor([False, True, True, False, True, False])
    for elsewhere in (mask.repeat(4).view(4, 6)[:, 1:2].t(), mask[1:5].view(1, 4)):
        sources[3] = elsewhere  # not contiguous, or not at the start of a word
        inputs.renew(sources)
        assert copied == [5, 1]
        assert torch.equal(statics[3].tensor, elsewhere)


def test_a_place_is_taken_whatever_the_size() -> None:
    training = trained(3, ["FB"])
    training.begin_iteration()
    losses = [training.forward(number) for number in range(3)]
    for graphs in of_size(training).values():
        assert [slot.is_free for slot in graphs._slots] == [False] * 3
        assert graphs.num_replays == 1
    losses.pop(1).backward()
    for graphs in of_size(training).values():
        assert [slot.is_free for slot in graphs._slots] == [False, True, False]


def test_more_in_flight_than_slots_run_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    schedules = ["FB", "FFFBBB", "FFFBBB"]
    with caplog.at_level(logging.WARNING):
        training = trained(2, schedules)
    assert equal(training, trained(None, schedules))
    assert training.bank.num_replays == 4
    assert "more than 2 micro-batches of chunk 0, size" in caplog.text


def test_what_lies_in_free_places_is_never_read() -> None:
    training = Sized(3)
    for number, schedule in enumerate(SCHEDULES):
        for graphs in of_size(training).values():
            for slot in graphs._slots:
                with torch.no_grad():
                    for tensor in (slot.hidden, slot.output, slot.grad_output, slot.grad_hidden):
                        tensor.fill_(float("nan"))
        training.iteration(schedule, first=7 * number)
    assert equal(training, trained(None))


def test_evaluation_runs_eagerly_whatever_the_size() -> None:
    training = trained(1, ["FB", "FB"])
    num_replays, num_runs = training.bank.num_replays, training.module.num_runs
    with torch.no_grad():
        training.bank(torch.zeros(TOKENS, 1, WIDTH), {"table": _table(3), "size": 3})
    assert training.bank.num_replays == num_replays
    assert training.module.num_runs == num_runs + 1


@pytest.mark.parametrize("num_iterations", [1, 2])
def test_other_sizes_are_refused(num_iterations: int) -> None:
    training = trained(1, ["FB"] * num_iterations)
    training.begin_iteration()
    with pytest.raises(ValueError, match="size 3"):
        training.bank(torch.zeros(TOKENS, 1, WIDTH), {"table": _table(3), "size": 3})


def test_all_sizes_are_deleted_together_and_captured_again() -> None:
    log: list[str] = []
    training = trained(2, ["FB", "FB"], offloading=_Offloading(log))
    training.bank.delete()
    assert log == ["made"] * 6 + ["closed"] * 6
    assert not any(graphs.is_captured for graphs in of_size(training).values())
    for number in range(2, 4):
        training.iteration("FB", first=7 * number)
    assert equal(training, trained(None, ["FB"] * 4))
    assert log[12:] == ["made"] * 6


def test_graphs_in_use_are_not_deleted() -> None:
    training = trained(1, ["FB"])
    training.begin_iteration()
    loss = training.forward(2)
    with pytest.raises(RuntimeError, match="while 1 micro-batches are in flight"):
        training.bank.delete()
    assert training.bank.is_captured
    loss.backward()
    training.bank.delete()


def test_at_the_end_of_a_training_graphs_of_all_sizes_go_though_they_are_in_use() -> None:
    log: list[str] = []
    training = trained(2, ["FB"], offloading=_Offloading(log))
    training.begin_iteration()
    training.forward(2)
    training.bank.close()
    assert log == ["made"] * 6 + ["closed"] * 6
    assert not any(graphs.is_captured for graphs in of_size(training).values())


class _FailsAt(EagerGraphs):
    """Fails to capture after a number of captures."""

    def __init__(self, num_records: int) -> None:
        self.num_left = num_records

    def record(self, work: Any, pool: Any) -> Any:
        self.num_left -= 1
        if self.num_left < 0:
            raise RuntimeError("out of memory")
        return super().record(work, pool)


# Two slots of two graphs for each size: within the first size, between two, and in the last.
@pytest.mark.parametrize("num_records, num_slots_made", [(1, 1), (3, 2), (4, 3), (11, 6)])
def test_if_one_size_cannot_be_captured_all_are_given_up(
    num_records: int, num_slots_made: int
) -> None:
    log: list[str] = []
    training = Sized(2, backend=_FailsAt(num_records), offloading=_Offloading(log))
    training.iteration("FB")
    state = [buffer.clone() for buffer in training.module.buffers()]
    with pytest.raises(RuntimeError, match="out of memory"):
        training.begin_iteration()
    # The other ranks are told; otherwise they would wait.
    assert str(training.sizes.told[-1][1]) == "out of memory"
    assert log.count("made") == log.count("closed") == num_slots_made
    assert not any(graphs._slots for graphs in of_size(training).values())
    after = training.module.buffers()
    assert all(torch.equal(one, other) for one, other in zip(state, after, strict=True))


# After two sizes have been run; after two have been captured.
@pytest.mark.parametrize("step, num_slots_made", [(2, 0), (5, 4)])
def test_if_another_rank_fails_this_one_gives_up_what_it_has(
    step: int, num_slots_made: int
) -> None:
    log: list[str] = []
    training = Sized(2, offloading=_Offloading(log))
    training.sizes.other_rank_fails_at = step
    training.iteration("FB")
    with pytest.raises(RuntimeError, match="another rank"):
        training.begin_iteration()
    assert len(training.sizes.told) == step
    assert log == ["made"] * num_slots_made + ["closed"] * num_slots_made
    assert not training.bank.is_captured


def test_no_rank_replays_a_timed_graph_that_another_could_not_capture() -> None:
    log: list[str] = []
    training = Sized(2, offloading=_TimedOffloading(log))
    training.sizes.other_rank_fails_at = 2
    training.iteration("FB")
    with pytest.raises(RuntimeError, match="another rank"):
        training.begin_iteration()
    # Each rank says at the end of the step, too, that it failed.
    assert [str(error) for _, error in training.sizes.told] == ["None", "None", "another rank"]
    assert log == ["replayed"] * (1 + NUM_TIMED) + ["closed", "closed"]


class _Device(EagerGraphs):
    """The first graph in a pool takes 1 GiB, as much as a pass has at its peak; others 64 MiB."""

    def __init__(self, free_bytes: int) -> None:
        self.left_bytes = free_bytes
        self.pools: set[int] = set()
        self.used_bytes = 0

    def new_pool(self) -> Any:
        return object()

    def measure(self, work: Any) -> Cost:
        work()
        return Cost(2**30)

    def record(self, work: Any, pool: Any) -> Any:
        taken = 2**26 if id(pool) in self.pools else 2**30
        self.left_bytes -= taken
        self.used_bytes += taken
        self.pools.add(id(pool))
        return super().record(work, pool)

    def free_bytes(self) -> int:
        return self.left_bytes

    def held_bytes(self) -> int:
        return self.used_bytes


def test_sizes_need_no_more_room_than_one() -> None:
    training = trained(2, ["FB", "FB"], backend=_Device(5 * 2**29))  # All sizes run first.
    slot_bytes = [figures.slot_bytes for figures in training.bank.figures.values()]
    assert slot_bytes == [2**30 + 2**26, 2**27, 2**27]
    with pytest.raises(ValueError, match=r"2 slots of 1.0 GiB are 2.0 GiB, and 1.5 GiB are free"):
        trained(2, ["FB", "FB"], backend=_Device(3 * 2**29))
