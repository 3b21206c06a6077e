# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Plans are made for the rates that copies reach beside computation."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from host_bound import Engine, HostBound, train
from timed_backend import TimedBackend
from toy_model import SCHEDULES, all_equal, make_chunks, run_schedule

from megatron.slipstream.fine_grained_activation_offload import copy_rates, plan_cache, planner
from megatron.slipstream.fine_grained_activation_offload.activation_store import ActivationStore
from megatron.slipstream.fine_grained_activation_offload.backend import (
    Bytes,
    Copy,
    Stream,
    nbytes_of,
)
from megatron.slipstream.fine_grained_activation_offload.copy_rates import (
    MIN_NBYTES,
    CopyTime,
    rates_beside_compute,
)
from megatron.slipstream.fine_grained_activation_offload.copy_streams import CopyStreams
from megatron.slipstream.fine_grained_activation_offload.cuda_backend import (
    WORK_QUEUES,
    CudaBackend,
)
from megatron.slipstream.fine_grained_activation_offload.engine import OffloadEngine
from megatron.slipstream.fine_grained_activation_offload.step_clock import NUM_TIMED, NUM_WARMUPS
from megatron.slipstream.integration.seam.manager import PipelineOffloadManager
from megatron.slipstream.plan.trace import Bandwidth

MEASURED = Bandwidth(50.0, 40.0, 30.0, 20.0)
GB = 10**9


def test_copies_that_run_alone_give_their_rate() -> None:
    copies = [CopyTime(True, GB, 0, 25), CopyTime(True, GB, 100, 125), CopyTime(False, GB, 30, 50)]
    assert rates_beside_compute(MEASURED, [copies]) == pytest.approx((40.0, 50.0, 24.0, 25.0))


def test_while_others_go_the_other_way_the_lower_rate_is_expected() -> None:
    # 20 ms alone and 20 ms beside the other: 50 * 20 + 30 * 20 = 1600 MB at the measured rates.
    out, back = CopyTime(True, 800 * 10**6, 0, 40), CopyTime(False, 400 * 10**6, 20, 40)
    assert rates_beside_compute(MEASURED, [[out, back]]) == pytest.approx((25.0, 40.0, 15.0, 20.0))


def test_the_median_of_iterations_counts() -> None:
    runs = [[CopyTime(True, GB, 0, ms)] for ms in (25, 40, 500)]
    assert rates_beside_compute(MEASURED, runs).d2h_gb_per_s == pytest.approx(25.0)


@pytest.mark.parametrize("copies", [[], [CopyTime(True, MIN_NBYTES - 1, 0, 500)]])
def test_what_hardly_copies_tells_nothing(copies: Sequence[CopyTime]) -> None:
    assert rates_beside_compute(MEASURED, [copies]) == MEASURED
    assert rates_beside_compute(MEASURED, []) == MEASURED


class SlowBesideCompute(HostBound):
    """Copies reach a fourth of their rate unless they are those of the measurement."""

    BYTES_PER_MS = 1000.0

    def __init__(self) -> None:
        super().__init__(copy_ms=0.0)
        self.is_in_iteration = True

    def run_copies(self, copies: Sequence[Copy], stream: Stream) -> None:
        super().run_copies(copies, stream)
        rate = self.BYTES_PER_MS / (4 if self.is_in_iteration else 1)
        self.now_ms += sum(map(nbytes_of, copies)) / rate


def test_a_plan_made_from_times_has_the_rates_of_its_iterations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(copy_rates, "MIN_NBYTES", 1)
    backend = SlowBesideCompute()
    manager = PipelineOffloadManager(OffloadEngine(backend))
    measure = planner.measure_link

    def measure_alone(store: ActivationStore) -> Bandwidth | None:
        backend.is_in_iteration = False
        try:
            return measure(store)
        finally:
            backend.is_in_iteration = True

    monkeypatch.setattr(planner, "measure_link", measure_alone)
    chunks = make_chunks(1)
    expected = run_schedule(chunks, SCHEDULES["accumulation"], None)
    for _ in range(1 + NUM_WARMUPS + NUM_TIMED + 1):
        assert all_equal(expected, run_schedule(chunks, SCHEDULES["accumulation"], manager))
    assert manager.plan is not None
    assert manager.plan.trace.bandwidth is not None
    gb_per_s = backend.BYTES_PER_MS / 4 / 1e6
    assert manager.plan.trace.bandwidth[:2] == pytest.approx((gb_per_s, gb_per_s), rel=1e-3)


class ScriptedBackend(TimedBackend):
    """Copies take 4, 2 and 3 ms in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.times_ms = itertools.cycle((4.0, 2.0, 3.0))

    def elapsed_ms(self, start: Any, stop: Any) -> float:
        return next(self.times_ms)


def test_the_best_rate_counts() -> None:
    half, backend = 1 << 20, ScriptedBackend()
    device, host = (Bytes.of(torch.empty(2 * half, dtype=torch.uint8)) for _ in range(2))
    found = copy_rates.measure_bandwidth(backend, CopyStreams(backend), device, host)
    assert found is not None
    assert found.d2h_gb_per_s == pytest.approx(half / 2.0 / 1e6)


@pytest.mark.parametrize(
    "d2h, h2d, expected",
    [(55.0, 55.0, False), (54.0, 54.0, False), (51.0, 55.0, True), (55.0, 51.0, True)],
)
def test_one_slow_direction_is_enough(d2h: float, h2d: float, expected: bool) -> None:
    measured = Bandwidth(55.0, 55.0, 50.0, 50.0)
    assert copy_rates.are_slow(Bandwidth(d2h, h2d, 50.0, 50.0), measured) is expected


@pytest.mark.parametrize("rank, cure", [(0, "set it"), (1, "set it"), (0, None)])
def test_what_makes_copies_faster_is_said_once(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    rank: int,
    cure: str | None,
) -> None:
    monkeypatch.setattr(planner, "are_slow", lambda *_: True)
    monkeypatch.setattr(plan_cache.PlanEntry, "is_as_predicted", False)
    monkeypatch.setattr(HostBound, "cure_of_slow_copies", cure)
    engine = Engine(HostBound(copy_ms=0.001), 80.0)
    engine.report.rank = rank
    train(engine)
    assert engine.report.num_plans > 2, "planned more than once from times"
    said = [record.getMessage() for record in caplog.records if "GB/s back" in record.message]
    assert len(said) == (rank == 0 and cure is not None)
    assert all(text.endswith("; set it") for text in said)


def test_a_user_who_has_chosen_the_number_of_queues_is_told_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(WORK_QUEUES, raising=False)
    backend = CudaBackend()
    assert f"set {WORK_QUEUES}=1" in str(backend.cure_of_slow_copies)
    for chosen in ("1", "8"):
        monkeypatch.setenv(WORK_QUEUES, chosen)
        assert backend.cure_of_slow_copies is None
