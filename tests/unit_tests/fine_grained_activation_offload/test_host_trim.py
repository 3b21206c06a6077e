# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Once plans are settled, host memory that they do not need goes back to the system."""

from __future__ import annotations

import logging

import pytest
import torch
from host_bound import Engine, HostBound, train
from toy_model import SCHEDULES, all_equal, make_chunks, micro_batch, run_schedule

from megatron.slipstream.fine_grained_activation_offload import lifecycle
from megatron.slipstream.fine_grained_activation_offload.cpu_backends import LazyCpuBackend
from megatron.slipstream.fine_grained_activation_offload.engine import OffloadEngine
from megatron.slipstream.fine_grained_activation_offload.lifecycle import NUM_ALIKE
from megatron.slipstream.integration.seam.manager import PipelineOffloadManager
from megatron.slipstream.plan.candidates import PolicyOptions

SCHEDULE = SCHEDULES["accumulation"]


class SmallSlabs(LazyCpuBackend):
    """Copies run as late as they may, and slabs are counted."""

    host_slab_bytes = 4096

    def __init__(self) -> None:
        super().__init__()
        self.held_bytes = self.num_freed = 0
        self.has_memory = True

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        if not self.has_memory:
            raise RuntimeError("CUDA error: out of memory")
        self.held_bytes += nbytes
        return super().allocate_host(nbytes)

    def free_host(self, buffer: torch.Tensor) -> None:
        self.held_bytes -= buffer.numel()
        self.num_freed += 1
        super().free_host(buffer)


def train_settled(manager: PipelineOffloadManager, schedule: str = SCHEDULE) -> None:
    """Until host memory would go: an iteration that is recorded, then those that are alike."""
    for _ in range(1 + NUM_ALIKE):
        run_schedule(make_chunks(1), schedule, manager)


def test_what_the_plans_do_not_need_is_given_back(caplog: pytest.LogCaptureFixture) -> None:
    chunks = make_chunks(1)
    expected = run_schedule(chunks, SCHEDULE, None)
    backend = SmallSlabs()
    manager = PipelineOffloadManager(OffloadEngine(backend))
    with caplog.at_level(logging.INFO):
        for _ in range(NUM_ALIKE):
            assert all_equal(expected, run_schedule(chunks, SCHEDULE, manager))
        assert "held is freed" not in caplog.text
        grown = backend.held_bytes
        assert all_equal(expected, run_schedule(chunks, SCHEDULE, manager))
    assert "held is freed" in caplog.text
    held = backend.held_bytes
    assert manager.plan is not None
    assert manager.plan.peak_host_bytes <= held < 1.1 * manager.plan.peak_host_bytes < grown
    for _ in range(4):
        assert all_equal(expected, run_schedule(chunks, SCHEDULE, manager))
        assert manager.report.host_growth_bytes == 0
    assert manager.report.total.num_groups_moved > 0
    pool = manager.store.host_pool
    assert backend.held_bytes == pool.allocated_bytes == held, "and is not needed again"


def test_passes_without_gradients_in_between_change_nothing() -> None:
    backend = SmallSlabs()
    manager = PipelineOffloadManager(OffloadEngine(backend))
    chunk = make_chunks(1)[0]
    for _ in range(1 + NUM_ALIKE):
        run_schedule([chunk], SCHEDULE, manager)
        with torch.no_grad():
            chunk(micro_batch(0), manager)
        manager.reset()
    assert backend.num_freed > 0


def test_what_little_there_is_stays() -> None:
    backend = SmallSlabs()
    backend.host_slab_bytes = 1 << 20
    manager = PipelineOffloadManager(OffloadEngine(backend))
    train_settled(manager)
    assert backend.held_bytes == 1 << 20


def test_nothing_goes_while_anything_is_lent() -> None:
    backend = SmallSlabs()
    manager = PipelineOffloadManager(OffloadEngine(backend))
    train_settled(manager, SCHEDULES["one micro-batch"])
    held = backend.held_bytes
    pool = manager.store.host_pool
    allocation = pool.allocate(4096)
    train_settled(manager)
    assert backend.held_bytes >= held
    pool.free(allocation)
    train_settled(manager)
    assert backend.held_bytes == pool.allocated_bytes


def test_where_nothing_moves_nothing_is_held() -> None:
    engine = Engine(HostBound(copy_ms=1.0), 1.0)
    pool = engine.store.host_pool
    train(engine, 1)
    assert pool.allocated_bytes > 0
    train(engine)
    assert engine.num_moving == 0
    train(engine, 1 + NUM_ALIKE)
    assert pool.allocated_bytes == 0


def test_what_is_measured_and_tried_is_not_settled() -> None:
    engine = Engine(HostBound(copy_ms=0.001), 1.0)
    engine.store.backend.host_slab_bytes = 4096
    pool = engine.store.host_pool
    train(engine, 1)
    held = pool.allocated_bytes
    while not engine.is_settled:
        assert pool.allocated_bytes == held > 0
        train(engine, 1)
    train(engine, 1 + NUM_ALIKE)
    assert 0 < pool.allocated_bytes < held


def test_where_sizes_vary_the_pool_stays() -> None:
    backend = SmallSlabs()
    manager = PipelineOffloadManager(OffloadEngine(backend))
    chunks = make_chunks(1)
    for rows in (70, 50, 60) * 5:
        run_schedule(chunks, SCHEDULE, manager, rows=rows)
    assert backend.num_freed == 0
    for _ in range(NUM_ALIKE):
        run_schedule(chunks, SCHEDULE, manager, rows=70)
    assert backend.num_freed > 0, "else it would have stayed anyway"


@pytest.mark.parametrize("max_times", [1, 2])
def test_plans_that_change_for_ever_have_memory_pinned_only_so_often(
    max_times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "MAX_TRIMS", max_times)
    backend = SmallSlabs()
    manager = PipelineOffloadManager(OffloadEngine(backend))
    train_settled(manager)
    num_freed = backend.num_freed
    assert num_freed > 0
    train_settled(manager, SCHEDULES["1F1B first of two"])
    assert (backend.num_freed > num_freed) is (max_times > 1)


def test_should_the_system_refuse_the_slab_the_pool_grows_as_before() -> None:
    chunks = make_chunks(1)
    expected = run_schedule(chunks, SCHEDULE, None)
    backend = SmallSlabs()
    manager = PipelineOffloadManager(OffloadEngine(backend))
    trim_to = manager.store.host_pool.trim_to

    def refused(nbytes: int) -> None:
        backend.has_memory = False
        trim_to(nbytes)
        backend.has_memory = True

    manager.store.host_pool.trim_to = refused  # type: ignore[method-assign]
    train_settled(manager)
    assert backend.held_bytes == 0
    assert all_equal(expected, run_schedule(chunks, SCHEDULE, manager))
    assert manager.report.total.num_groups_moved > 0
    assert manager.store.host_pool.limit_bytes is None


def test_a_limit_is_kept() -> None:
    backend = SmallSlabs()
    limit = 1 << 20
    manager = PipelineOffloadManager(
        OffloadEngine(backend, PolicyOptions(host_memory_limit_bytes=limit))
    )
    train_settled(manager)
    assert manager.store.host_pool.limit_bytes == limit
    assert 0 < backend.held_bytes < limit
