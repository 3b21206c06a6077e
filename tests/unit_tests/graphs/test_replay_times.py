# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""What moves inside a chunk's graphs is planned from the times of replays.

Without a GPU graphs are eager, and a backend takes wall-clock time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional
from unittest.mock import Mock

import pytest
import torch
from offloaded_chunk import OffloadedChunk
from timed_backend import TimedBackend
from toy_model import all_equal, make_chunks, make_manager, micro_batch

from megatron.slipstream.fine_grained_activation_offload.backend import Event, Stream
from megatron.slipstream.fine_grained_activation_offload.copy_rates import (
    CopyTime,
    slowdown_ms_per_gb,
)
from megatron.slipstream.fine_grained_activation_offload.copy_streams import Timings
from megatron.slipstream.fine_grained_activation_offload.engine import OffloadEngine
from megatron.slipstream.fine_grained_activation_offload.engine_setup import make_backend
from megatron.slipstream.fine_grained_activation_offload.graph_capture import ONE_SIZE
from megatron.slipstream.fine_grained_activation_offload.step_clock import NUM_TIMED, Times
from megatron.slipstream.graphs.bank import ChunkGraphs
from megatron.slipstream.graphs.capture import CudaGraphs, EagerGraphs, Tail
from megatron.slipstream.graphs.chunk import Chunk
from megatron.slipstream.graphs.chunks import NUM_TIMED_CAPTURES, SizeGraphs
from megatron.slipstream.graphs.offload import PlannedPass, SlotOffloading
from megatron.slipstream.graphs.slots import SlotMemory
from megatron.slipstream.plan.candidates import PolicyOptions
from megatron.slipstream.plan.trace import Bandwidth

HIDDEN_ROWS = 7


class Rig(OffloadedChunk):
    """The chunk with its graphs."""

    def __init__(self, device: str = "cpu", **options: Any) -> None:
        self._options, self._device = PolicyOptions(**options), device
        super().__init__(self._timed_engine)
        self.module.to(device)
        for parameter in self.module.parameters():
            parameter.main_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]
        graphs = EagerGraphs() if device == "cpu" else CudaGraphs()
        chunk = Chunk("chunk 0", self.module, self.forward, offloading=self.offloading)
        self.graphs = ChunkGraphs({ONE_SIZE: chunk}, 1, 1, graphs)

    def _timed_engine(self) -> OffloadEngine:
        backend = TimedBackend() if self._device == "cpu" else make_backend(self._device)
        return OffloadEngine(backend, self._options)

    def iteration(self, number: int) -> list[torch.Tensor]:
        """An iteration of one micro-batch: its gradients."""
        self.graphs.begin_iteration()
        for parameter in self.module.parameters():
            parameter.grad = None
            parameter.main_grad.zero_()  # type: ignore[attr-defined]
        x = micro_batch(number, HIDDEN_ROWS).detach().to(self._device).requires_grad_()
        self.graphs(x, {}).square().sum().backward()
        gradients = [
            parameter.main_grad if self.graphs.is_captured else parameter.grad
            for parameter in self.module.parameters()
        ]
        return [gradient.clone() for gradient in (x.grad, *gradients)]  # type: ignore[union-attr]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Times]:
    """What is read of replays."""
    found: list[Times] = []
    read_times = SlotOffloading.read_times

    def noted(slot: SlotOffloading) -> Optional[Times]:
        times = read_times(slot)
        assert times is not None
        found.append(times)
        return times

    monkeypatch.setattr(SlotOffloading, "read_times", noted)
    return found


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_each_replay_times_every_step_and_copy(device: str, read: list[Times]) -> None:
    rig = Rig(device)
    for number in range(3):
        rig.iteration(number)
    assert len(rig.engines) == 1 + NUM_TIMED_CAPTURES + 1, "a plan, timed captures, a slot"
    assert len(read) == NUM_TIMED_CAPTURES * (1 + NUM_TIMED)
    plan = rig.engines[0].plan
    assert plan is not None
    for times in read:
        assert len(times.step_ms) == len(plan.trace.steps)
        assert times.own_ms > 0
        for is_out in (True, False):
            moved = sum(copy.nbytes for copy in times.copies if copy.is_out is is_out)
            assert moved == rig.offloading.moved_bytes
        assert all(0 <= copy.start_ms < copy.stop_ms for copy in times.copies)
    assert rig.engines[-1].store.copy_streams.timings is None, "the last capture takes no times"


class _GraphBackend(TimedBackend):
    """Events know whether they belong to a graph: replays record no others."""

    def __init__(self) -> None:
        super().__init__()
        self._is_in_graph = False

    def begin_graph(self) -> None:
        super().begin_graph()
        self._is_in_graph = True

    def end_graph(self) -> None:
        super().end_graph()
        self._is_in_graph = False

    def timed_event(self, stream: Stream) -> Event:
        return super().timed_event(stream), self._is_in_graph

    def elapsed_ms(self, start: Event, stop: Event) -> Optional[float]:
        assert start[1] == stop[1]
        return super().elapsed_ms(start[0], stop[0])


def test_all_events_of_replays_are_part_of_the_graphs(
    monkeypatch: pytest.MonkeyPatch, read: list[Times]
) -> None:
    """Each engine of the rig has a backend of its own, which knows of its captures only."""
    monkeypatch.setattr(Rig, "_timed_engine", lambda _: OffloadEngine(_GraphBackend()))
    rig = Rig()
    for number in range(2):
        rig.iteration(number)
    assert read
    assert all(times.copies for times in read)


def test_the_engine_of_the_model_is_told_what_replays_move() -> None:
    rig = Rig()
    for number in range(2):
        rig.iteration(number)
    assert rig.replayed is not None
    assert rig.replayed.plan is rig.engines[0].plan
    modules = rig.replayed.modules
    assert sorted(modules) == ["first", "second"]
    for total in (
        sum(counters.d2h_bytes for counters in modules.values()),
        sum(counters.h2d_bytes for counters in modules.values()),
    ):
        assert total == rig.offloading.moved_bytes > 0
    assert rig.replayed.host_bytes == rig.offloading.host_bytes
    rig.graphs.delete()
    assert rig.replayed is None


def test_a_capture_that_failed_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, expected = Rig(), Rig()
    for number in range(2):
        expected.iteration(number)
    rig.iteration(0)
    with monkeypatch.context() as patch:
        patch.setattr(SizeGraphs, "_current_addresses", Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            rig.iteration(1)
    rig.graphs.close()
    for number in range(2):
        rig.iteration(number)
    assert rig.replayed is not None
    assert expected.replayed is not None
    assert rig.replayed.modules == expected.replayed.modules


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_gradients_are_those_without_graphs(device: str, read: list[Times]) -> None:
    rig, plain = Rig(device), make_chunks()[0].to(device)
    for number in range(4):
        actual = rig.iteration(number)
        plain.zero_grad()
        x = micro_batch(number, HIDDEN_ROWS).detach().to(device).requires_grad_()
        y = x
        for layer in plain.layers:
            y = layer(y, None)
        y.square().sum().backward()
        expected = [x.grad, *(parameter.grad for parameter in plain.parameters())]
        assert all_equal(expected, actual)
    assert read


def _of_replays(rig: Rig, monkeypatch: pytest.MonkeyPatch, times: Times) -> Any:
    """The plan that is made where replays take these times."""
    monkeypatch.setattr(SlotOffloading, "read_times", lambda _: times)
    for number in range(2):
        rig.iteration(number)
    return rig.engines[0].plan


def _times(rig: Rig, step_ms: float, copies: Sequence[CopyTime] = ()) -> Times:
    engine = make_manager("cpu").engine
    with rig.marks_go_to(engine):
        rig.begin_pass(engine)
        rig.forward(micro_batch(0)).sum().backward()
        engine.end_iteration()
    assert engine.plan is not None
    num_steps = len(engine.plan.trace.steps)
    return Times((step_ms,) * num_steps, (0.0,) * num_steps, {}, tuple(copies))


def test_the_plan_has_the_times_and_rates_of_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    # 128 MiB each way at 1 GB/s, whatever the link carries.
    ms = (128 << 20) / 1e6
    copies = [CopyTime(True, 128 << 20, 0.0, ms), CopyTime(False, 128 << 20, ms, 2 * ms)]
    plan = _of_replays(rig, monkeypatch, _times(rig, 3.0, copies))
    assert set(plan.trace.step_ms) == {3.0}
    bandwidth = plan.trace.bandwidth
    assert bandwidth.d2h_gb_per_s == pytest.approx(1.0)
    assert bandwidth.h2d_gb_per_s == pytest.approx(1.0)


def test_a_replay_that_hides_no_copy_moves_nothing_within_an_allowed_overhead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eager passes are slow enough to hide all copies."""
    for step_ms, moves in ((1e3, True), (1e-6, False)):
        rig = Rig(max_overhead_percent=1.0)
        plan = _of_replays(rig, monkeypatch, _times(rig, step_ms))
        assert (plan.moved_nbytes > 0) is moves


def test_a_predicted_overhead_includes_how_copies_slow_computation_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(max_overhead_percent=1.0)
    trace = _of_replays(rig, monkeypatch, _times(rig, 1e3)).trace
    assert trace.ms_per_moved_gb == slowdown_ms_per_gb(trace.bandwidth) > 0
    # 1.1% of 20 ms out, 0.7% of 25 ms back.
    assert slowdown_ms_per_gb(Bandwidth(50.0, 40.0, 50.0, 40.0)) == pytest.approx(0.395)


def test_the_first_replay_does_not_count(
    monkeypatch: pytest.MonkeyPatch, read: list[Times]
) -> None:
    counted: list[Sequence[Times]] = []
    monkeypatch.setattr(PlannedPass, "plan_again", lambda _, times: counted.append(times))
    rig = Rig()
    for number in range(2):
        rig.iteration(number)
    assert counted == [read[1 : 1 + NUM_TIMED], read[2 + NUM_TIMED :]]


def test_the_clock_of_an_iteration_takes_no_times_of_a_capture_in_it() -> None:
    """Nothing would record its events: a capture runs nothing."""
    rig = Rig()
    for number in range(2):
        rig.iteration(number)
    slot = rig.offloading.make_slot(SlotMemory(None, Tail()))
    timings = rig.engines[-1].store.copy_streams.timings = Timings()
    x = micro_batch(0, HIDDEN_ROWS)
    with slot.forward():
        loss = rig.forward(x).sum()
    with slot.backward():
        loss.backward()
    assert timings.copies == timings.stalls == []
