# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Ranks of one host measure their links at the same moment, and no rank waits without end."""

from __future__ import annotations

import os
import time
from typing import Any
from unittest.mock import patch

import pytest
import torch
from ranks import run_ranks
from timed_backend import TimedBackend
from toy_model import SCHEDULES, make_chunks, run_schedule

from megatron.slipstream.fine_grained_activation_offload import link_bandwidth, rank_barrier
from megatron.slipstream.fine_grained_activation_offload.backend import Bytes
from megatron.slipstream.fine_grained_activation_offload.copy_streams import CopyStreams
from megatron.slipstream.fine_grained_activation_offload.engine import OffloadEngine
from megatron.slipstream.fine_grained_activation_offload.link_bandwidth import (
    NUM_BARRIERS,
    measure_bandwidth,
)
from megatron.slipstream.fine_grained_activation_offload.rank_barrier import RankBarrier
from megatron.slipstream.fine_grained_activation_offload.step_clock import NUM_TIMED, NUM_WARMUPS
from megatron.slipstream.integration.seam.manager import PipelineOffloadManager
from megatron.slipstream.plan.trace import Bandwidth

LATE_S = 0.3
NUM_ITERATIONS = 1 + NUM_WARMUPS + NUM_TIMED
"""After the last of them the link is measured."""


def join(rank: int, num_ranks: int, port: int) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = str(num_ranks)
    address = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group(
        "gloo", init_method=address, rank=rank, world_size=num_ranks
    )


def leave() -> None:
    """Not before the others: the first rank has the store."""
    torch.distributed.barrier()


def come_one_after_another(rank: int, num_ranks: int, port: int) -> tuple[bool, list[bool]]:
    join(rank, num_ranks, port)
    store = torch.distributed.distributed_c10d._get_default_store()
    meeting, last_was_there = RankBarrier(), []
    for late in range(num_ranks):
        if rank == late:
            time.sleep(LATE_S)
            store.set(f"here/{late}", "")
        meeting.meet()
        last_was_there.append(store.check([f"here/{late}"]))
    leave()
    return meeting.is_alone, last_was_there


def test_those_who_come_early_wait_for_the_last() -> None:
    assert run_ranks(2, come_one_after_another) == [(False, [True, True])] * 2


def miss_the_first(rank: int, num_ranks: int, port: int) -> tuple[bool, int]:
    join(rank, num_ranks, port)
    rank_barrier.PATIENCE_S = LATE_S
    meeting = RankBarrier()
    if rank == 1:
        torch.distributed.barrier()  # by now the other one has given up
    with patch.object(rank_barrier.time, "sleep", wraps=time.sleep) as slept:
        meeting.attend(NUM_BARRIERS)
    if rank == 0:
        torch.distributed.barrier()
    leave()
    return meeting.is_alone, slept.call_count


def test_a_rank_that_does_not_come_is_waited_for_once_and_does_not_wait() -> None:
    (early_is_alone, num_early), (late_is_alone, num_late) = run_ranks(2, miss_the_first)
    assert early_is_alone
    assert late_is_alone
    assert num_early > 0
    assert num_late == 0


@pytest.mark.parametrize("world", ["1", None], ids=["one rank", "no group"])
def test_without_other_ranks_there_is_no_wait(
    world: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", world or "8")
    if world is not None:
        monkeypatch.setattr(rank_barrier, "_store", torch.distributed.HashStore)
    assert RankBarrier().is_alone


class LostStore(torch.distributed.HashStore):
    """Of a process that has gone."""

    def add(self, key: str, amount: int) -> int:
        raise torch.distributed.DistStoreError(f"no {key}")


def test_a_lost_store_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(rank_barrier, "_store", LostStore)
    meeting = RankBarrier()
    assert not meeting.is_alone
    meeting.meet()
    assert meeting.is_alone


class Company(RankBarrier):
    """Others that always come."""

    def __init__(self) -> None:
        super().__init__()
        self.num_met = 0
        self.is_alone = False

    def meet(self) -> None:
        self.num_met += 1


class ScriptedBackend(TimedBackend):
    """Copies take 1, 2 and 4 ms in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.num_read = 0

    def elapsed_ms(self, start: Any, stop: Any) -> float:
        self.num_read += 1
        return (1.0, 2.0, 4.0)[self.num_read % 3]


def test_in_company_neither_the_best_nor_the_worst_rate_counts() -> None:
    half = 1 << 20
    device, host = (Bytes.of(torch.empty(2 * half, dtype=torch.uint8)) for _ in range(2))
    company = Company()

    def measure(barrier: RankBarrier | None) -> Bandwidth | None:
        backend = ScriptedBackend()
        return measure_bandwidth(backend, CopyStreams(backend), device, host, barrier)

    found, alone = measure(company), measure(None)
    assert found is not None
    assert alone is not None
    assert found.d2h_gb_per_s == pytest.approx(half / 2.0 / 1e6)
    assert alone.d2h_gb_per_s == pytest.approx(half / 1.0 / 1e6)
    assert company.num_met == NUM_BARRIERS


class SlowToTell(TimedBackend):
    """Tells of the times of iterations some iterations late, as a device that has not come."""

    def __init__(self, num_late: int) -> None:
        super().__init__()
        self.num_left = num_late

    def elapsed_ms(self, start: Any, stop: Any) -> Any:
        return super().elapsed_ms(start, stop) if self.num_left <= 0 else None


def train(rank: int, num_ranks: int, port: int) -> tuple[list[int], bool]:
    """Rank 1 has next to no host memory, and times come later to rank 2 than to the others."""
    join(rank, num_ranks, port)
    rank_barrier.PATIENCE_S = 100.0  # however slow the machine is
    iterations: list[int] = []
    are_alone: list[bool] = []

    class Watched(RankBarrier):
        def meet(self) -> None:
            super().meet()
            iterations.append(iteration)
            are_alone.append(self.is_alone)

    link_bandwidth.RankBarrier = Watched  # type: ignore[misc]
    if rank == 1:
        link_bandwidth.BANDWIDTH_NBYTES *= 1 << 10
    backend = SlowToTell(NUM_ITERATIONS + 2) if rank == 2 else TimedBackend()
    manager = PipelineOffloadManager(OffloadEngine(backend))
    chunks = make_chunks(1)
    for iteration in range(1, NUM_ITERATIONS + 6):  # noqa: B007 - Watched reads it
        run_schedule(chunks, SCHEDULES["accumulation"], manager)
        if rank == 2:
            backend.num_left -= 1
    leave()
    return iterations, any(are_alone)


def test_ranks_measure_after_the_same_iteration_whenever_the_device_tells() -> None:
    assert run_ranks(3, train) == [([NUM_ITERATIONS] * NUM_BARRIERS, False)] * 3
