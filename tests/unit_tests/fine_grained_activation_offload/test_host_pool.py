# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Host buffers: little waste, no allocation in steady state, and none in use without its events."""

from __future__ import annotations

import itertools
import logging
import random
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Optional

import pytest
import torch
from fault_places import Fault, Place
from hypothesis import assume, example, given, settings, strategies as st
from make_trace import Schedule, interleaved, one_f_one_b

from megatron.slipstream.fine_grained_activation_offload.backend import Backend
from megatron.slipstream.fine_grained_activation_offload.cpu_backends import (
    CpuBackend,
    LazyCpuBackend,
)
from megatron.slipstream.fine_grained_activation_offload.host_pool import (
    BUFFERS_PER_SLAB,
    HostAllocation,
    HostMemoryFull,
    HostPool,
)
from megatron.slipstream.plan import host_layout
from megatron.slipstream.plan.host_layout import MIN_BUFFER_BYTES, FreeRanges, size_class_bytes

KIB, MIB = 1 << 10, 1 << 20
SLAB = 256 * KIB


class CountingBackend(CpuBackend):
    """Notes the sizes of the slabs that are allocated and not yet returned."""

    host_slab_bytes = SLAB

    def __init__(self, has_bytes: Optional[int] = None) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.num_calls = 0
        self.has_bytes = has_bytes

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        self.num_calls += 1
        if self.has_bytes is not None and sum(self.alive.values()) + nbytes > self.has_bytes:
            raise RuntimeError("CUDA error: out of memory\nsome advice")
        buffer = super().allocate_host(nbytes)
        self.alive[buffer.data_ptr()] = nbytes
        return buffer

    def free_host(self, buffer: torch.Tensor) -> None:
        del self.alive[buffer.data_ptr()]


@pytest.fixture
def backend() -> CountingBackend:
    return CountingBackend()


@pytest.fixture
def pool(backend: CountingBackend) -> HostPool:
    return HostPool(backend)


# Size classes.


@settings(max_examples=300, deadline=None)
@given(nbytes=st.integers(1, 1 << 40), more=st.integers(0, 2))
@example(nbytes=1 << 13, more=1)
@example(nbytes=1 << 36, more=1)
def test_a_size_class_is_aligned_and_wastes_less_than_a_sixteenth(nbytes: int, more: int) -> None:
    size = size_class_bytes(nbytes)
    assert size % 512 == 0
    assert size_class_bytes(size) == size <= size_class_bytes(nbytes + more)
    assert nbytes < 2 * MIN_BUFFER_BYTES or 0 <= size - nbytes < nbytes / 16


def test_an_octave_has_sixteen_classes() -> None:
    classes = {size_class_bytes(nbytes) for nbytes in range(64 * KIB + 1, 128 * KIB + 1, 64)}
    assert len(classes) == 16


@pytest.mark.parametrize("nbytes", [0, 1, MIN_BUFFER_BYTES - 1, MIN_BUFFER_BYTES])
def test_small_requests_share_the_smallest_buffer(nbytes: int) -> None:
    assert size_class_bytes(nbytes) == MIN_BUFFER_BYTES


def test_a_buffer_is_as_long_as_its_class(pool: HostPool) -> None:
    allocation = pool.allocate(70 * KIB)
    assert allocation.buffer.nbytes == size_class_bytes(70 * KIB) == pool.in_use_bytes


# Lending.


@pytest.mark.parametrize("backend_type", [CpuBackend, LazyCpuBackend])
def test_every_buffer_is_aligned_to_512_bytes(backend_type: Callable[[], Backend]) -> None:
    pool = HostPool(backend_type())
    rng = random.Random(0)
    allocations: list[HostAllocation] = []
    for _ in range(200):
        allocations.append(pool.allocate(rng.randint(1, 300 * KIB)))
        if rng.random() < 0.4:
            pool.free(allocations.pop(rng.randrange(len(allocations))))
        assert allocations == [] or allocations[-1].buffer.address % 512 == 0


def test_no_byte_is_lent_twice_at_once(pool: HostPool) -> None:
    rng = random.Random(0)
    allocations: dict[int, HostAllocation] = {}
    for number in range(1, 300):
        allocation = pool.allocate(rng.randint(1, 100 * KIB))
        allocation.buffer.view().fill_(number % 251)
        allocations[number] = allocation
        if rng.random() < 0.6:
            done = rng.choice(list(allocations))
            assert bool((allocations[done].buffer.view() == done % 251).all())
            pool.free(allocations.pop(done))
    assert all(
        bool((allocation.buffer.view() == n % 251).all()) for n, allocation in allocations.items()
    )


def test_many_buffers_come_from_one_slab(pool: HostPool, backend: CountingBackend) -> None:
    for _ in range(16):
        pool.allocate(16 * KIB)
    assert list(backend.alive.values()) == [SLAB]
    pool.allocate(1)
    assert backend.num_calls == 2


def test_a_slab_for_large_buffers_holds_many_of_them_and_no_rest(
    pool: HostPool, backend: CountingBackend
) -> None:
    size = size_class_bytes(100 * KIB + 1)
    pool.allocate(100 * KIB + 1)
    assert list(backend.alive.values()) == [BUFFERS_PER_SLAB * size]
    other = HostPool(backend)
    other.allocate(15 * KIB)
    assert other.allocated_bytes == SLAB - SLAB % (15 * KIB)


def test_memory_of_many_small_buffers_serves_a_large_one(pool: HostPool) -> None:
    small = [pool.allocate(16 * KIB) for _ in range(16)]
    for allocation in small:
        pool.free(allocation)
    pool.allocate(SLAB)
    assert pool.num_slabs == 1


def test_memory_of_a_large_buffer_serves_many_small_ones(pool: HostPool) -> None:
    pool.free(pool.allocate(SLAB))
    slab_bytes = pool.allocated_bytes
    for _ in range(slab_bytes // (16 * KIB)):
        pool.allocate(16 * KIB)
    assert pool.num_slabs == 1


def test_the_last_use_goes_with_the_bytes_to_the_next_borrower(pool: HostPool) -> None:
    # The next user's copy has to wait for it (edge E2).
    event = object()
    allocation = pool.allocate(8 * KIB)
    address = allocation.buffer.address
    assert (allocation.buffer.nbytes, allocation.last_use) == (8 * KIB, ())
    allocation.last_use = (event,)
    pool.free(allocation)
    again = pool.allocate(8 * KIB - 100)
    assert again.buffer.address == address
    assert again.last_use == (event,)


def test_a_buffer_of_several_earlier_ones_has_all_their_last_uses(pool: HostPool) -> None:
    allocations = [pool.allocate(SLAB // 4) for _ in range(3)]
    for name, allocation in zip("abc", allocations, strict=True):
        allocation.last_use = (name,)
    for place in (1, 2, 0):
        pool.free(allocations[place])
    assert sorted(pool.allocate(SLAB // 2).last_use) == ["a", "b"]
    assert pool.allocate(SLAB // 4).last_use == ("c",)


def test_the_buffer_that_was_given_back_first_is_lent_first(pool: HostPool) -> None:
    # Its last reader has most likely finished, so that nothing waits.
    allocations = [pool.allocate(8 * KIB) for _ in range(6)]
    for name, allocation in zip("abcdef", allocations, strict=True):
        allocation.last_use = (name,)
    for place in (3, 5, 1):
        pool.free(allocations[place])
    # 'f' lies beside memory that has never been used, which is taken last.
    assert [pool.allocate(8 * KIB).last_use for _ in range(3)] == [("d",), ("b",), ("f",)]


# Waste and growth, with tokens per expert that vary.


def make_schedule(pp_size: int, pp_rank: int, vp_size: int) -> Schedule:
    if vp_size == 1:
        return one_f_one_b(pp_size, pp_rank, 2 * pp_size)
    return interleaved(pp_size, pp_rank, 2 * pp_size, vp_size)


class MoeIterations:
    """Iterations of a model whose experts' buffers have other sizes every time.

    Each micro-batch of each layer allocates ``num_varying`` buffers of ``low`` to ``high`` bytes
    and one of each size of ``fixed``; in some steps all sizes are smaller, as sequences are packed.
    """

    def __init__(
        self,
        schedule: Schedule,
        num_layers: int,
        num_varying: int,
        sizes: tuple[int, int],
        fixed: tuple[int, ...],
        smallest_step: float = 1.0,
        seed: int = 0,
    ) -> None:
        self._schedule = schedule
        self._num_layers = num_layers
        self._num_varying = num_varying
        self._sizes = sizes
        self._fixed = fixed
        self._smallest_step = smallest_step
        self._rng = random.Random(seed)
        self.most_lent = 0
        """The most buffers that were out at once."""

    def run(self, pool: HostPool) -> None:
        out: dict[tuple[int, int], list[HostAllocation]] = {}
        scale = self._rng.uniform(self._smallest_step, 1.0)
        for direction, micro_batch, vp_stage in self._schedule:
            if direction == "F":
                out[micro_batch, vp_stage] = [
                    pool.allocate(int(nbytes * scale))
                    for _ in range(self._num_layers)
                    for nbytes in self._layer()
                ]
                self.most_lent = max(self.most_lent, sum(map(len, out.values())))
            else:
                for allocation in reversed(out.pop((micro_batch, vp_stage))):
                    pool.free(allocation)

    def _layer(self) -> list[int]:
        varying = [self._rng.randint(*self._sizes) for _ in range(self._num_varying)]
        return [*varying, *self._fixed]


@settings(max_examples=60, deadline=None)
@given(
    pipeline=st.sampled_from([(pp, rank) for pp in (1, 2, 4) for rank in range(pp)]),
    vp_size=st.integers(1, 3),
    num_layers=st.integers(4, 10),
    num_varying=st.integers(1, 4),
    low=st.integers(8, 256),
    more=st.integers(0, 256),
    fixed=st.lists(st.integers(8, 512), max_size=3),
    smallest_step=st.sampled_from([1.0, 0.7, 0.4]),
    seed=st.integers(0, 1 << 20),
)
def test_less_than_an_eighth_is_wasted(
    pipeline: tuple[int, int],
    vp_size: int,
    num_layers: int,
    num_varying: int,
    low: int,
    more: int,
    fixed: list[int],
    smallest_step: float,
    seed: int,
) -> None:
    iterations = MoeIterations(
        make_schedule(*pipeline, vp_size),
        num_layers,
        num_varying,
        (low * KIB, (low + more) * KIB),
        tuple(nbytes * KIB for nbytes in fixed),
        smallest_step,
        seed,
    )
    pool = HostPool(CountingBackend())
    last_slab = 0
    for _ in range(6):
        before = pool.allocated_bytes
        iterations.run(pool)
        last_slab = max(last_slab, pool.allocated_bytes - before)
        assert pool.in_use_bytes == 0
    assume(iterations.most_lent >= 32)
    assert pool.waste_bytes < pool.high_water_bytes / 8


def test_memory_beyond_what_is_lent_is_waste_or_the_rest_of_the_last_slab() -> None:
    backend = CountingBackend()
    pool = HostPool(backend)
    iterations = MoeIterations(
        make_schedule(4, 0, 2), 4, 3, (20 * KIB, 60 * KIB), (128 * KIB, 512), smallest_step=0.7
    )
    for _ in range(10):
        iterations.run(pool)
    beyond = pool.allocated_bytes - pool._usage.high_water_requested
    assert 0 < beyond - pool.waste_bytes <= list(backend.alive.values())[-1]


@pytest.mark.parametrize("smallest_step", [1.0, 0.6], ids=["alike", "packed sequences"])
@pytest.mark.parametrize("vp_size", [1, 2])
@pytest.mark.parametrize("pp_size", [1, 4])
def test_the_number_of_slabs_is_constant_although_sizes_vary_from_step_to_step(
    pp_size: int, vp_size: int, smallest_step: float
) -> None:
    pool = HostPool(CountingBackend())
    iterations = MoeIterations(
        make_schedule(pp_size, 0, vp_size),
        8,
        3,
        (20 * KIB, 200 * KIB),
        (64 * KIB, 512),
        smallest_step,
    )
    for _ in range(10):
        iterations.run(pool)
    num_slabs, high_water_bytes = pool.num_slabs, pool.high_water_bytes
    for _ in range(20):
        iterations.run(pool)
    # More is only taken where more is in use than ever before.
    assert pool.num_slabs <= num_slabs + (pool.high_water_bytes > high_water_bytes)


def test_buffers_that_run_out_while_others_are_free_take_their_space(pool: HostPool) -> None:
    """Memory of one step serves the next of as many bytes, with any sizes."""
    rng = random.Random(0)
    for step in range(50):
        nbytes = rng.randint(5, 60) * KIB
        allocations = [pool.allocate(nbytes) for _ in range(4000 * KIB // size_class_bytes(nbytes))]
        for allocation in rng.sample(allocations, len(allocations)):
            pool.free(allocation)
        assert step == 0 or pool.allocated_bytes <= 5000 * KIB
    num_slabs = pool.num_slabs
    for nbytes in (7 * KIB, 59 * KIB, 31 * KIB):
        allocations = [pool.allocate(nbytes) for _ in range(4000 * KIB // size_class_bytes(nbytes))]
        for allocation in allocations:
            pool.free(allocation)
    assert pool.num_slabs == num_slabs


# The limit.


@settings(max_examples=100, deadline=None)
@given(
    limit=st.integers(0, 2000),
    sizes=st.lists(st.integers(1, 300), max_size=40),
    seed=st.integers(0, 1 << 20),
)
def test_the_pool_never_passes_its_limit(limit: int, sizes: list[int], seed: int) -> None:
    rng = random.Random(seed)
    backend = CountingBackend()
    pool = HostPool(backend, limit * KIB)
    allocations: list[HostAllocation] = []
    for nbytes in sizes:
        try:
            allocations.append(pool.allocate(nbytes * KIB))
        except HostMemoryFull:
            room = limit * KIB - pool.allocated_bytes
            assert size_class_bytes(nbytes * KIB) > room
        if allocations and rng.random() < 0.3:
            pool.free(allocations.pop(rng.randrange(len(allocations))))
        assert sum(backend.alive.values()) == pool.allocated_bytes <= limit * KIB


def test_all_of_a_limit_can_be_lent(pool: HostPool) -> None:
    pool.limit_bytes = 40 * KIB
    for _ in range(5):
        pool.allocate(8 * KIB)
    assert pool.in_use_bytes == pool.allocated_bytes == 40 * KIB
    with pytest.raises(HostMemoryFull):
        pool.allocate(1)


def test_what_did_not_fit_leaves_the_pool_as_it_was(pool: HostPool) -> None:
    pool.limit_bytes = 40 * KIB
    pool.allocate(32 * KIB)
    before = (pool.in_use_bytes, pool.allocated_bytes, pool._free.ranges())
    with pytest.raises(HostMemoryFull):
        pool.allocate(16 * KIB)
    assert (pool.in_use_bytes, pool.allocated_bytes, pool._free.ranges()) == before
    assert pool.allocate(8 * KIB).buffer.nbytes == 8 * KIB


def test_when_the_system_refuses_memory_that_is_the_limit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend = CountingBackend(has_bytes=SLAB)
    pool = HostPool(backend)
    allocation = pool.allocate(16 * KIB)
    assert not pool.was_refused
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            with pytest.raises(HostMemoryFull):
                pool.allocate(SLAB)
    assert pool.was_refused
    assert pool.limit_bytes == pool.allocated_bytes == SLAB
    assert backend.num_calls == 2, "each attempt takes long"
    (warning,) = caplog.messages
    assert "CUDA error: out of memory" in warning
    assert "some advice" not in warning
    assert "set offload_host_memory_limit_bytes" in warning
    pool.free(allocation)
    assert pool.allocate(SLAB).buffer.nbytes == SLAB


# Figures.


def test_the_high_water_mark_is_the_most_that_was_lent_at_once(pool: HostPool) -> None:
    first, second = pool.allocate(8 * KIB), pool.allocate(64 * KIB)
    pool.free(first)
    pool.free(second)
    third = pool.allocate(64 * KIB)
    assert pool.in_use_bytes == 64 * KIB
    assert pool.high_water_bytes == 72 * KIB
    assert pool.allocated_bytes == SLAB
    pool.free(third)
    assert pool.in_use_bytes == 0
    assert pool.high_water_bytes == 72 * KIB


def test_waste_is_slack_and_what_was_free_but_too_short(pool: HostPool) -> None:
    pool.allocate(33 * KIB)  # its class is 34 KiB; the slab holds sixteen of them
    assert pool.waste_bytes == 1 * KIB
    pool.limit_bytes = pool.allocated_bytes + 512 * KIB
    pool.allocate(512 * KIB)  # 510 KiB of the first slab are left, too few
    assert pool.waste_bytes == 1 * KIB + 510 * KIB
    pool.allocate(128 * KIB)  # they serve after all
    assert pool.waste_bytes == 1 * KIB + 382 * KIB


def test_allocated_bytes_are_those_of_the_backend(pool: HostPool, backend: CountingBackend) -> None:
    for nbytes in (1, 5000, 300_000, 6_000_000):
        pool.allocate(nbytes)
    assert pool.allocated_bytes == sum(backend.alive.values())
    assert pool.num_slabs == len(backend.alive) == 3


@pytest.mark.parametrize("given_back", [True, False], ids=["free", "in use"])
def test_closing_returns_every_slab(
    pool: HostPool, backend: CountingBackend, given_back: bool
) -> None:
    allocations = [pool.allocate(nbytes) for nbytes in (8 * KIB, 8 * KIB, 1 * MIB)]
    assert len(backend.alive) == 2
    if given_back:
        for allocation in allocations:
            pool.free(allocation)
    for _ in range(2):
        pool.close()
        assert backend.alive == {}
        assert pool.allocated_bytes == pool.in_use_bytes == 0


def test_a_closed_pool_has_wasted_nothing(pool: HostPool) -> None:
    pool.allocate(33 * KIB)
    pool.close()
    assert pool.high_water_bytes == pool.waste_bytes == 0
    pool.allocate(8 * KIB)
    assert pool.high_water_bytes == 8 * KIB
    assert pool.waste_bytes == 0


def test_a_buffer_given_back_after_closing_is_never_lent_again(
    pool: HostPool, backend: CountingBackend
) -> None:
    # A storage that outlives the engine gives its buffer back when it is deleted.
    late = pool.allocate(8 * KIB)
    pool.close()
    pool.free(late)
    assert pool.in_use_bytes == 0
    again = pool.allocate(8 * KIB)
    (slab,) = backend.alive
    assert slab <= again.buffer.address < slab + SLAB


def test_a_buffer_of_before_closing_is_not_taken_for_one_at_the_same_address(
    backend: CountingBackend,
) -> None:
    memory = backend.allocate_host(SLAB)
    backend.allocate_host = lambda nbytes: memory[:nbytes]  # type: ignore[method-assign]
    backend.free_host = lambda buffer: None  # type: ignore[method-assign]
    pool = HostPool(backend)
    late = pool.allocate(8 * KIB)
    pool.close()
    again = pool.allocate(8 * KIB)
    assert again.buffer.address == late.buffer.address
    pool.free(late)
    assert pool.in_use_bytes == 8 * KIB


def test_a_buffer_may_be_given_back_in_the_middle_of_any_call(
    monkeypatch: pytest.MonkeyPatch, pool: HostPool, backend: CountingBackend
) -> None:
    # By a storage that is deleted just then, because Python collects garbage.
    rng = random.Random(0)
    dropped: list[HostAllocation] = []

    def interrupt(name: str) -> None:
        method = getattr(FreeRanges, name)

        def interrupted(free: FreeRanges, *arguments: object) -> object:
            if dropped and rng.random() < 0.3:
                pool.free(dropped.pop())
            return method(free, *arguments)

        monkeypatch.setattr(FreeRanges, name, interrupted)

    for name in ("_insert", "_remove"):
        interrupt(name)
    for _ in range(200):
        allocations = [pool.allocate(rng.randint(1, 30 * KIB)) for _ in range(12)]
        rng.shuffle(allocations)
        dropped += allocations[:6]
        for allocation in allocations[6:]:
            pool.free(allocation)
    for allocation in dropped:
        pool.free(allocation)
    assert pool.in_use_bytes == 0
    assert pool._free.ranges() == [(slab, 0, n) for slab, n in enumerate(backend.alive.values())]


def test_a_buffer_given_back_twice_is_free_once(pool: HostPool) -> None:
    allocation = pool.allocate(8 * KIB)
    pool.free(allocation)
    pool.free(allocation)
    assert pool.in_use_bytes == 0
    addresses = {pool.allocate(8 * KIB).buffer.address for _ in range(2)}
    assert len(addresses) == 2


class _Storage:
    """Owns a buffer of a pool."""

    def __init__(self, pool: HostPool, nbytes: int) -> None:
        self.allocation = pool.allocate(nbytes)
        self.allocation.owner = weakref.ref(self)


@pytest.mark.parametrize("in_destructor", [False, True])
def test_an_interrupt_while_free_ranges_change_loses_and_shares_no_byte(
    in_destructor: bool, backend: CountingBackend
) -> None:
    """In a destructor, the iteration goes on; otherwise the pool recovers next."""
    for number in itertools.count():
        pool, rng = HostPool(backend), random.Random(0)
        storages = [_Storage(pool, 8 * KIB) for _ in range(12)]
        rng.shuffle(storages)
        for _ in range(4):
            pool.free(storages.pop().allocation)
        place = Place(number)
        with place.among_lines(host_layout.__file__), suppress(Fault):
            if not in_destructor:
                pool.free(storages.pop().allocation)
                storages.append(_Storage(pool, 4 * KIB))
            pool.free(storages.pop().allocation)
        if not place.is_reached:
            break
        if in_destructor:
            with pytest.raises(HostMemoryFull):
                pool.allocate(4 * KIB)
        pool.recover(lambda: None)
        storages += [_Storage(pool, 8 * KIB) for _ in range(8)]
        buffers = [one.allocation.buffer for one in storages]
        places = sorted((one.address, one.address + one.nbytes) for one in buffers)
        assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(places))
        for storage in storages:
            pool.free(storage.allocation)
        assert pool.in_use_bytes == 0
        assert pool._free.ranges() == [(n, 0, one.nbytes) for n, one in enumerate(pool._slab_bytes)]
        pool.close()
    assert number > 8
