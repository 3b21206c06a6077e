# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Copies are measured with memory that is freed again, and errors are reported, not raised."""

from __future__ import annotations

import contextlib
import itertools
import os
from typing import Any

import pytest
import torch
from timed_backend import TimedBackend

from megatron.slipstream.doctor import bandwidth
from megatron.slipstream.plan.trace import Bandwidth


class CountingBackend(TimedBackend):
    """A backend whose copies take a millisecond, later ones less, and that counts host memory."""

    def __init__(self) -> None:
        super().__init__()
        self.num_lent = 0
        self.time_ms = 0.0
        self.ms_per_event = 1.0

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        self.num_lent += 1
        return super().allocate_host(nbytes)

    def free_host(self, buffer: torch.Tensor) -> None:
        self.num_lent -= 1

    def timed_event(self, stream: Any) -> float:
        self.time_ms += self.ms_per_event
        self.ms_per_event *= 0.999
        return self.time_ms

    def elapsed_ms(self, start: float, stop: float) -> float:
        return stop - start


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "NBYTES", 1 << 20)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())


@pytest.mark.usefixtures("small")
def test_the_best_of_all_rounds_counts_and_host_memory_is_given_back() -> None:
    backend = CountingBackend()
    found = bandwidth.measure_bandwidth(backend)
    # Half of the buffer, in the time of the last round, which is the shortest.
    last = (1 << 19) / (backend.ms_per_event * 1e6)
    assert found.d2h_gb_per_s == pytest.approx(last, rel=0.05)
    first = (1 << 19) / 1e6
    assert found.d2h_gb_per_s > 1.1 * first
    assert backend.num_lent == 0


@pytest.mark.usefixtures("small")
def test_the_best_is_taken_of_each_rate_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = [None, Bandwidth(1.0, 8.0, 3.0, 4.0), Bandwidth(5.0, 6.0, 7.0, 2.0)]
    found = itertools.cycle(rounds)
    monkeypatch.setattr(bandwidth.copy_rates, "measure_bandwidth", lambda *_: next(found))
    assert bandwidth.measure_bandwidth(CountingBackend()) == Bandwidth(5.0, 8.0, 7.0, 4.0)


class NoTimes(CountingBackend):
    def timed_event(self, stream: Any) -> None:  # type: ignore[override]
        return None


class NoDeviceMemory(CountingBackend):
    def allocate_scratch(self, nbytes: int) -> None:
        return None


class NoHostMemory(CountingBackend):
    def allocate_host(self, nbytes: int) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory\nmore of it")


class NoCopies(CountingBackend):
    def run_copies(self, copies: Any, stream: Any) -> None:
        raise RuntimeError("the driver refused a copy")


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "kind, error",
    [
        (NoTimes, "copies are too fast"),
        (NoDeviceMemory, "the GPU does not have 1 MiB of free memory"),
        (NoHostMemory, "CUDA error: out of memory"),
        (NoCopies, "the driver refused a copy"),
    ],
)
def test_what_keeps_copies_from_being_measured_is_told(
    monkeypatch: pytest.MonkeyPatch, kind: type[CountingBackend], error: str
) -> None:
    backend = kind()
    monkeypatch.setattr(bandwidth, "CudaBackend", lambda: backend)
    measured = bandwidth.measure(0, frozenset())
    assert isinstance(measured, str)
    assert error in measured
    assert "\n" not in measured
    assert backend.num_lent == 0


@pytest.mark.usefixtures("small")
def test_the_process_runs_beside_the_gpu_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.sched_getaffinity(0)
    beside = frozenset({min(before)})
    during: list[set[int]] = []

    class Watched(CountingBackend):
        def allocate_host(self, nbytes: int) -> torch.Tensor:
            during.append(os.sched_getaffinity(0))
            return super().allocate_host(nbytes)

    monkeypatch.setattr(bandwidth, "CudaBackend", Watched)
    elsewhere = frozenset({max(before) + 1})
    for cpus in (beside | elsewhere, elsewhere):
        assert isinstance(bandwidth.measure(3, cpus), Bandwidth)
    assert during == [beside, before]
    assert os.sched_getaffinity(0) == before
