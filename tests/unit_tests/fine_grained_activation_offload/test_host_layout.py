# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Host buffers of iterations that follow their plan lie as computed, and nothing is searched."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from hand_driven import LAZY_NATIVE
from make_trace import Model, one_f_one_b, trace_of
from toy_model import SCHEDULES, all_equal, make_chunks, make_manager, run_schedule

from megatron.slipstream.fine_grained_activation_offload.cpu_backends import CpuBackend
from megatron.slipstream.fine_grained_activation_offload.host_pool import HostAllocation, HostPool
from megatron.slipstream.fine_grained_activation_offload.native import native_module
from megatron.slipstream.fine_grained_activation_offload.plan_cache import (
    MAX_LAYOUTS_LEFT,
    Phase,
    PlanEntry,
)
from megatron.slipstream.integration.seam.manager import PipelineOffloadManager
from megatron.slipstream.plan.actions import ActionKind, Plan
from megatron.slipstream.plan.build import build_plan
from megatron.slipstream.plan.candidates import PolicyOptions
from megatron.slipstream.plan.host_layout import (
    FreeRanges,
    HostLayout,
    HostRequest,
    lay_out,
)
from megatron.slipstream.plan.operations import derive_schedule

KIB = 1024
SCHEDULE = SCHEDULES["1F1B first of two"]
SLABS = (64 * KIB, 48 * KIB, 64 * KIB)


class Use(NamedTuple):
    """A signal after copies."""

    stream: str
    position: int


def use_in_python(position: int) -> Any:
    return Use("h2d", position)


def uses_in_cpp() -> Callable[[int], Any]:
    native = native_module()
    assert native is not None
    waits, stream = native.Waits(CpuBackend()), object()
    return lambda _: waits.signal(object(), stream, "h2d")


class Iteration:
    """Asks the pool for what is planned, and gives it back, with a signal for each last copy."""

    def __init__(
        self,
        pool: HostPool,
        requests: Sequence[HostRequest],
        first: int,
        make_use: Callable[[int], Any] = use_in_python,
    ) -> None:
        self._make_use = make_use
        self._pool = pool
        self._requests = requests
        self._position = first
        self.in_use: dict[int, HostAllocation] = {}
        self.addresses: dict[int, tuple[int, int]] = {}
        self.waits: dict[int, set[Use]] = {}

    def run(self, is_planned: bool, skipped: Sequence[int] = ()) -> Iterator[int]:
        """Yields after each request."""
        for storage, nbytes in self._requests:
            self._position += 1
            if storage in skipped:
                continue
            if nbytes:
                allocation = self._pool.allocate_planned(storage, nbytes) if is_planned else None
                allocation = allocation or self._pool.allocate(nbytes)
                self.in_use[storage] = allocation
                self.addresses[storage] = allocation.buffer.first(1).view().data_ptr(), nbytes
                self.waits[storage] = set(allocation.last_use)
            else:
                allocation = self.in_use.pop(storage)
                allocation.last_use = (self._make_use(self._position),)
                self._pool.free(allocation)
            yield storage

    def places(self) -> dict[int, tuple[int, int]]:
        """Slab and offset of each buffer."""
        slabs = [slab.view().data_ptr() for slab in self._pool._slab_bytes]
        found = {}
        for storage, (address, _) in self.addresses.items():
            slab = max((start, n) for n, start in enumerate(slabs) if start <= address)
            found[storage] = (slab[1], address - slab[0])
        return found

    def overlaps(self) -> bool:
        """Whether two buffers in use have a byte in common."""
        ranges = sorted(self.addresses[storage] for storage in self.in_use)
        return any(a + n > b for (a, n), (b, _) in zip(ranges, ranges[1:], strict=False))


def requests_of(seed: int) -> list[HostRequest]:
    draw = random.Random(seed)
    num_groups = draw.randint(2, 5)
    labels = [f"s{index}" for index in range(2 * num_groups)]
    model = Model(
        num_layers=num_groups,
        saves={group: draw.sample(labels, draw.randint(1, 3)) for group in range(num_groups)},
        nbytes={label: draw.randint(1, 8 * KIB) for label in labels},
    )
    plan = build_plan(trace_of(one_f_one_b(2, 0, 3), model), PolicyOptions())
    return derive_schedule(plan).host_requests()


def make_pool(slabs: Sequence[int], is_native: bool = False) -> HostPool:
    pool = HostPool(CpuBackend(), native=native_module() if is_native else None)
    for nbytes in slabs:
        pool._add_slab(nbytes)
    return pool


def layout_of(requests: Sequence[HostRequest], slabs: Sequence[int] = SLABS) -> HostLayout:
    layout = lay_out(requests, slabs)
    assert layout is not None
    return layout


@pytest.mark.parametrize("seed", range(12))
def test_buffers_lie_where_the_pool_would_put_them(seed: int) -> None:
    requests = requests_of(seed)
    asked = Iteration(make_pool(SLABS), requests, 0)
    pool = make_pool(SLABS)
    planned = Iteration(pool, requests, 0)
    assert pool.follow(pool.make_layout(layout_of(requests)))
    with patch.object(FreeRanges, "take", side_effect=AssertionError("the pool is asked")):
        for _ in planned.run(True):
            pass
    for _ in asked.run(False):
        pass
    assert planned.places() == asked.places()
    # Each waits for the same copies.
    assert {s: newest(uses) for s, uses in planned.waits.items()} == {
        s: newest(uses) for s, uses in asked.waits.items()
    }


def newest(uses: set[Use]) -> int:
    return max((use.position for use in uses), default=0)


def test_the_first_user_of_a_byte_waits_for_the_copies_of_the_iteration_before() -> None:
    requests = requests_of(3)
    pool = make_pool(SLABS)
    last = 0
    for number in range(3):
        iteration = Iteration(pool, requests, 1000 * number)
        assert pool.follow(pool.make_layout(layout_of(requests)))
        first = next(iteration.run(True))
        assert newest(iteration.waits[first]) == last
        rest = Iteration(pool, requests, 1000 * number)
        pool.free(iteration.in_use[first])
        assert pool.follow(pool.make_layout(layout_of(requests)))
        for _ in rest.run(True):
            pass
        last = rest._position


IN_BOTH = pytest.mark.parametrize("is_native", [False, True], ids=["Python", "C++"])


@IN_BOTH
@pytest.mark.parametrize("seed", range(24))
def test_no_byte_is_in_use_twice_whatever_an_iteration_asks_for(seed: int, is_native: bool) -> None:
    """Storages that are not there, other requests in between, buffers that come back late."""
    draw = random.Random(seed)
    requests = requests_of(seed)
    storages = [storage for storage, nbytes in requests if nbytes]
    pool = make_pool([256 * KIB], is_native)
    make_use = uses_in_cpp() if is_native else use_in_python
    layout = layout_of(requests, pool.slab_lengths)
    others: list[HostAllocation] = []
    for number in range(6):
        skipped = draw.sample(storages, draw.randint(0, 2))
        iteration = Iteration(pool, requests, 1000 * number, make_use)
        is_followed = pool.follow(pool.make_layout(layout))
        assert is_followed is (pool.in_use_bytes == 0)
        for _ in iteration.run(True, skipped):
            ranges = dict(iteration.addresses)
            if draw.random() < 0.05:
                others.append(pool.allocate(draw.randint(1, 6 * KIB)))
            for index, other in enumerate(others):
                key = -1 - index
                iteration.in_use[key] = other
                iteration.addresses[key] = other.buffer.first(1).view().data_ptr(), 1
            assert not iteration.overlaps()
            for index in range(len(others)):
                del iteration.in_use[-1 - index]
            iteration.addresses = ranges
            if others and draw.random() < 0.3:
                pool.free(others.pop())
        while others:
            pool.free(others.pop())
    assert pool.in_use_bytes == 0
    pool.allocate(pool.allocated_bytes)  # all of it is one range again


@IN_BOTH
def test_a_buffer_that_comes_back_late_is_not_given_to_the_next(is_native: bool) -> None:
    requests = [HostRequest(0, 4 * KIB), HostRequest(0, 0), HostRequest(1, 4 * KIB)]
    pool = make_pool([8 * KIB], is_native)
    assert pool.follow(pool.make_layout(layout_of(requests, [8 * KIB])))
    first = pool.allocate_planned(0, 4 * KIB)
    assert first is not None
    assert pool.allocate_planned(1, 4 * KIB) is None, "the first one is still in use"
    second = pool.allocate(4 * KIB)
    assert second.buffer.start != first.buffer.start


@IN_BOTH
def test_the_next_user_of_bytes_is_not_given_them_before_the_first(is_native: bool) -> None:
    """The first user may come late, and then has the same bytes."""
    requests = [HostRequest(0, 4 * KIB), HostRequest(0, 0), HostRequest(1, 4 * KIB)]
    pool = make_pool([8 * KIB], is_native)
    assert pool.follow(pool.make_layout(layout_of(requests, [8 * KIB])))
    assert pool.allocate_planned(1, 4 * KIB) is None


@IN_BOTH
@pytest.mark.parametrize("is_back", [True, False])
def test_a_buffer_is_given_once_in_an_iteration(is_back: bool, is_native: bool) -> None:
    """Even if it is back: the next user of its bytes waits for the planned copies only."""
    requests = [HostRequest(0, 4 * KIB), HostRequest(0, 0), HostRequest(1, 4 * KIB)]
    pool = make_pool([8 * KIB], is_native)
    layout = pool.make_layout(layout_of(requests, [8 * KIB]))
    for _ in range(2):
        assert pool.follow(layout)
        first = pool.allocate_planned(0, 4 * KIB)
        assert first is not None
        if is_back:
            pool.free(first)
        assert pool.allocate_planned(0, 4 * KIB) is None
        if not is_back:
            pool.free(first)


@IN_BOTH
def test_a_layout_goes_with_its_slabs(is_native: bool) -> None:
    """The buffers of an earlier layout lie in memory that has been returned."""
    plan = build_plan(trace_of(one_f_one_b(2, 0, 3), Model(2)), PolicyOptions())
    entry = PlanEntry(plan, plan.trace.steps_key, phase=Phase.SETTLED)
    pool = make_pool([4 << 20], is_native)
    before = entry.layout_in(pool)
    assert before is not None
    assert entry.layout_in(pool) is before
    pool.trim_to(2 << 20)
    layout = entry.layout_in(pool)
    assert layout is not before
    assert pool.follow(layout)
    storage = plan.storages[0]
    buffer = pool.allocate_planned(storage.index, storage.nbytes).buffer
    slab = pool._slab_bytes[0]
    assert slab.address <= buffer.address < slab.address + slab.nbytes
    pool.close()
    assert entry.layout_in(pool) is None, "there is no memory"


# The engine.


def settled(manager: PipelineOffloadManager, chunks: Any, expected: Sequence[torch.Tensor]) -> None:
    """Train until the host layout is followed."""
    for _ in range(4):
        assert all_equal(expected, run_schedule(chunks, SCHEDULE, manager))


@pytest.mark.parametrize("backend", ["cpu-lazy", LAZY_NATIVE])
def test_while_a_plan_is_followed_the_pool_is_not_asked(backend: str) -> None:
    chunks = make_chunks(1)
    expected = run_schedule(chunks, SCHEDULE, None)
    manager = make_manager(backend)
    settled(manager, chunks, expected)
    with (
        patch.object(HostPool, "allocate", side_effect=AssertionError("the pool is asked")),
        patch.object(FreeRanges, "put", side_effect=AssertionError("ranges are kept")),
    ):
        for _ in range(3):
            assert all_equal(expected, run_schedule(chunks, SCHEDULE, manager))
    assert manager.report.total.num_groups_moved > 0


@pytest.mark.parametrize("backend", ["cpu-lazy", LAZY_NATIVE])
def test_gradients_are_right_if_nothing_comes_back_as_planned(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each group is then reloaded by its first reader, and its bytes are in use until then."""
    (chunk,), manager = make_chunks(1), make_manager(backend)
    schedule = SCHEDULES["1F1B first of four"]
    expected = run_schedule([chunk], schedule, None)
    for _ in range(4):
        run_schedule([chunk], schedule, manager)

    def without_reloads(plan: Plan) -> Plan:
        actions = tuple(
            tuple(action for action in due if action.kind is not ActionKind.H2D)
            for due in plan.actions
        )
        changed = copy(plan)
        vars(changed)["actions"] = actions  # a cached property
        return changed

    (entry,) = manager.engine.lifecycle.plans._entries.values()
    compile_steps, perform = manager.store.compile_steps, manager.engine.executor.perform
    entry.steps = compile_steps(without_reloads(entry.plan))
    monkeypatch.setattr(
        manager.engine.executor,
        "perform",
        lambda now, action: action.kind is ActionKind.H2D or perform(now, action),
    )
    for _ in range(2):
        assert manager.engine.lifecycle.next.plan is entry.plan
        assert all_equal(expected, run_schedule([chunk], schedule, manager))
        assert manager.report.total.num_late > 0
        assert manager.store.host_pool.in_use_bytes == 0


@pytest.mark.parametrize("other", ["one micro-batch", "accumulation"])
def test_an_iteration_that_departs_asks_the_pool(other: str) -> None:
    chunks = make_chunks(1)
    manager = make_manager("cpu-lazy")
    expected = run_schedule(chunks, SCHEDULE, None)
    for _ in range(3):
        settled(manager, chunks, expected)
        expected_other = run_schedule(chunks, SCHEDULES[other], None)
        assert all_equal(expected_other, run_schedule(chunks, SCHEDULES[other], manager))
    assert manager.store.host_pool.in_use_bytes == 0


def test_where_sizes_vary_the_pool_is_asked_for_good() -> None:
    chunks = make_chunks(1)
    manager = make_manager("cpu-lazy")
    expected = {rows: run_schedule(chunks, SCHEDULE, None, rows=rows) for rows in (70, 50)}
    for rows in (70, 70, 50, 70, 50, 70, 50, 50):
        assert all_equal(expected[rows], run_schedule(chunks, SCHEDULE, manager, rows=rows))
    (entry,) = manager.engine.lifecycle.plans._entries.values()
    assert entry.num_layouts_left == MAX_LAYOUTS_LEFT
    assert entry.phase is not Phase.WARM_UP
    with patch.object(HostPool, "follow", side_effect=AssertionError("a layout is followed")):
        run_schedule(chunks, SCHEDULE, manager, rows=70)
