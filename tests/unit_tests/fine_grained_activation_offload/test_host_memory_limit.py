# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""With too little host memory groups stay on the device, results are right, the user is told."""

from __future__ import annotations

import logging

import pytest
import torch
from hand_driven import LAZY_NATIVE, HandDriven
from toy_model import SCHEDULES, all_equal, make_chunks, make_manager, run_schedule

from megatron.slipstream.fine_grained_activation_offload.cpu_backends import (
    CpuBackend,
    LazyCpuBackend,
)
from megatron.slipstream.fine_grained_activation_offload.engine import OffloadEngine
from megatron.slipstream.fine_grained_activation_offload.storage import Residence
from megatron.slipstream.integration.seam.manager import PipelineOffloadManager

SCHEDULE = SCHEDULES["1F1B first of four"]
NEEDED_BYTES = 245760
"""Host memory in use at once with two chunks and no limit."""
LIMITS = [1, 4096, 20_000, 60_000, 150_000, NEEDED_BYTES - 1]


@pytest.fixture(params=["cpu", "cpu-lazy"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Scarce(LazyCpuBackend):
    """A system with little memory, which the host backend's slabs fill."""

    host_slab_bytes = 16384

    def __init__(self, has_bytes: int, error: type[Exception] = RuntimeError) -> None:
        super().__init__()
        self.has_bytes = has_bytes
        self.num_refused = 0
        self._error = error

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        if nbytes > self.has_bytes:
            self.num_refused += 1
            raise self._error("no memory left")
        self.has_bytes -= nbytes
        return super().allocate_host(nbytes)

    def free_host(self, buffer: torch.Tensor) -> None:
        super().free_host(buffer)
        self.has_bytes += buffer.numel()


def test_what_the_schedule_needs(backend: str) -> None:
    manager = make_manager(backend)
    run_schedule(make_chunks(2), SCHEDULE, manager)
    assert manager.engine.lifecycle.last_plan is not None
    assert manager.engine.lifecycle.last_plan.needed_host_bytes == NEEDED_BYTES


# The limit of the user.


@pytest.mark.parametrize(
    "schedule, limit_bytes",
    [
        *((schedule, LIMITS[len(LIMITS) // 2]) for schedule in SCHEDULES.values()),
        *((SCHEDULES["interleaved first of two"], limit_bytes) for limit_bytes in LIMITS),
    ],
)
def test_gradients_are_right_and_the_pool_keeps_the_limit(schedule: str, limit_bytes: int) -> None:
    chunks = make_chunks(2)
    expected = run_schedule(chunks, schedule, None)
    manager = make_manager("cpu-lazy", host_memory_limit_bytes=limit_bytes)
    for _ in range(3):
        assert all_equal(expected, run_schedule(chunks, schedule, manager))
        assert manager.report.host_allocated_bytes <= limit_bytes
        assert manager.report.host_memory_limit_bytes == limit_bytes
    assert manager.store.host_pool.in_use_bytes == 0


@pytest.mark.parametrize("limit_bytes", LIMITS)
def test_while_recording_groups_stay_as_they_come_and_then_by_plan(
    backend: str, limit_bytes: int
) -> None:
    chunks = make_chunks(2)
    manager = make_manager(backend, host_memory_limit_bytes=limit_bytes)
    run_schedule(chunks, SCHEDULE, manager)
    assert manager.report.total.num_kept_for_host_memory > 0
    assert "offload_host_memory_limit_bytes keeps it" in manager.report.plan
    assert manager.report.num_kept_for_host_memory > 0
    for _ in range(3):
        run_schedule(chunks, SCHEDULE, manager)
        assert manager.report.total.num_kept_for_host_memory == 0, "the plan fits"
        assert manager.report.host_growth_bytes == 0
    assert manager.report.num_plans == 1
    plan = manager.engine.lifecycle.last_plan
    assert plan is not None
    assert manager.report.total.d2h_bytes == plan.moved_nbytes
    assert manager.store.host_pool.high_water_bytes <= limit_bytes


def test_a_limit_that_suffices_keeps_nothing(backend: str) -> None:
    chunks = make_chunks(2)
    free, limited = (
        make_manager(backend),
        make_manager(backend, host_memory_limit_bytes=NEEDED_BYTES),
    )
    for _ in range(2):
        run_schedule(chunks, SCHEDULE, free)
        run_schedule(chunks, SCHEDULE, limited)
        assert limited.report.total == free.report.total
        assert limited.report.total.num_kept_for_host_memory == 0
    assert limited.report.num_kept_for_host_memory == 0


def test_one_warning_names_limit_need_and_how_many_stay(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    chunks = make_chunks(2)
    manager = make_manager(backend, host_memory_limit_bytes=61_440, rank=3)
    with caplog.at_level(logging.WARNING):
        for name in ("1F1B first of four", "all forward, all backward", "1F1B first of four"):
            run_schedule(chunks, SCHEDULES[name], manager)
    assert manager.report.num_plans == 2
    (warning,) = caplog.messages
    assert "offload_host_memory_limit_bytes=61440 (60.0 KiB)" in warning
    assert "240.0 KiB" in warning
    assert "rank 3" in warning
    assert "22 of 30 groups stay" in warning
    assert "raise the limit" in warning


def test_no_warning_where_nothing_is_kept(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    manager = make_manager(backend, host_memory_limit_bytes=NEEDED_BYTES)
    with caplog.at_level(logging.WARNING):
        run_schedule(make_chunks(2), SCHEDULE, manager)
    assert caplog.messages == []


def test_an_iteration_that_departs_from_its_plan_keeps_the_limit(backend: str) -> None:
    chunks = make_chunks(2)
    manager = make_manager(backend, host_memory_limit_bytes=60_000)
    for name in ("accumulation", "1F1B first of four", "accumulation", "interleaved first of two"):
        expected = run_schedule(chunks, SCHEDULES[name], None)
        assert all_equal(expected, run_schedule(chunks, SCHEDULES[name], manager))
        assert manager.report.host_allocated_bytes <= 60_000


def test_larger_shapes_than_planned_keep_the_limit(backend: str) -> None:
    """The plan knows the recorded sizes only: what has no room then stays, and is counted."""
    chunks = make_chunks(2)
    manager = make_manager(backend, host_memory_limit_bytes=NEEDED_BYTES)
    run_schedule(chunks, SCHEDULE, manager)
    expected = run_schedule(chunks, SCHEDULE, None, rows=40)
    assert all_equal(expected, run_schedule(chunks, SCHEDULE, manager, rows=40))
    assert manager.report.total.num_kept_for_host_memory > 0
    assert manager.report.total.num_groups_moved > 0
    assert manager.report.host_allocated_bytes <= NEEDED_BYTES


# One group.


@pytest.mark.parametrize("kind", ["cpu-lazy", LAZY_NATIVE])
def test_a_group_moves_as_a_whole_or_stays(kind: str) -> None:
    hand = HandDriven(kind)
    hand.store.host_pool.limit_bytes = 40_000
    group = hand.group()
    first, second = torch.full((4096,), 1.0), torch.full((8192,), 2.0)
    saved = hand.save(group, first.clone(), second.clone())
    hand.send(group)
    assert [item.storage.residence for item in saved] == [Residence.DEVICE] * 2
    assert hand.store.host_pool.in_use_bytes == 0
    assert hand.store.modules["group"].num_kept_for_host_memory == 1
    assert hand.store.modules["group"].num_groups_moved == 0
    assert all(item.storage.allocation is None for item in saved)
    assert torch.equal(hand.unpack(saved[0]), first)
    assert torch.equal(hand.unpack(saved[1]), second)


def test_a_smaller_group_moves_where_a_larger_one_stays() -> None:
    hand = HandDriven()
    hand.store.host_pool.limit_bytes = 20_000
    large, small = hand.group(), hand.group()
    kept, moved = hand.save(large, torch.ones(8192)), hand.save(small, torch.ones(4096))
    hand.send(large)
    hand.send(small)
    assert kept.storage.residence is Residence.DEVICE
    assert moved.storage.residence is Residence.HOST


# Memory that the system refuses.


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
@pytest.mark.parametrize("has_bytes", [0, 70_000, 200_000])
def test_training_goes_on_where_the_system_refuses_memory(
    error: type[Exception], has_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    chunks = make_chunks(2)
    expected = run_schedule(chunks, SCHEDULE, None)
    backend = Scarce(has_bytes, error)
    manager = PipelineOffloadManager(OffloadEngine(backend))
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            assert all_equal(expected, run_schedule(chunks, SCHEDULE, manager))
    assert backend.num_refused == 1
    (warning,) = caplog.messages
    assert "no memory left" in warning
    assert "set offload_host_memory_limit_bytes" in warning
    assert "offload_host_memory_limit_bytes keeps it" in manager.report.plan
    assert manager.report.num_kept_for_host_memory > 0
    manager.close()
    assert backend.has_bytes == has_bytes


def test_memory_refused_while_following_a_plan_leads_to_another_plan() -> None:
    chunks = make_chunks(2)
    backend = Scarce(1 << 30)
    manager = PipelineOffloadManager(OffloadEngine(backend))
    for _ in range(2):
        run_schedule(chunks, SCHEDULE, manager)
    assert manager.report.num_plans == 1
    backend.has_bytes = 0
    expected = run_schedule(chunks, SCHEDULE, None, rows=80)
    for _ in range(3):
        assert all_equal(expected, run_schedule(chunks, SCHEDULE, manager, rows=80))
    assert backend.num_refused == 1
    assert manager.report.num_plans == 2
    assert manager.report.num_kept_for_host_memory > 0
    assert manager.report.total.num_groups_moved > 0


# Figures, and the end.


def test_the_report_shows_growth_once_and_the_slabs_of_the_pool(backend: str) -> None:
    chunks = make_chunks(2)
    manager = make_manager(backend)
    run_schedule(chunks, SCHEDULE, manager)
    report = manager.report
    assert report.host_growth_bytes == report.host_allocated_bytes == CpuBackend.host_slab_bytes
    assert report.num_host_allocations == 1
    assert report.host_high_water_bytes == NEEDED_BYTES
    assert report.host_waste_bytes == manager.store.host_pool.waste_bytes > 0
    assert report.host_memory_limit_bytes is None
    run_schedule(chunks, SCHEDULE, manager)
    assert report.host_growth_bytes == 0


def test_closing_returns_every_slab() -> None:
    backend = Scarce(1 << 30)
    manager = PipelineOffloadManager(OffloadEngine(backend))
    run_schedule(make_chunks(2), SCHEDULE, manager)
    assert manager.report.num_host_allocations > 1
    assert backend.has_bytes < 1 << 30
    manager.close()
    assert backend.has_bytes == 1 << 30
