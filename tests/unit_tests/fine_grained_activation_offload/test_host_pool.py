# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Host buffers: little waste, no allocation in steady state, and none lent without its event."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.slipstream.fine_grained_activation_offload.backend import CpuBackend
from megatron.slipstream.fine_grained_activation_offload.host_pool import (
    MIN_BUFFER_BYTES,
    HostPool,
    size_class_bytes,
)

KIB, MIB = 1 << 10, 1 << 20


class CountingBackend(CpuBackend):
    """Notes the sizes of the buffers that are allocated and not yet returned."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}

    def allocate_host(self, nbytes: int) -> torch.Tensor:
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


@settings(max_examples=300, deadline=None, derandomize=True)
@given(nbytes=st.integers(MIN_BUFFER_BYTES, 1 << 40))
def test_a_size_class_wastes_less_than_an_eighth(nbytes: int) -> None:
    size = size_class_bytes(nbytes)
    assert 0 <= size - nbytes < nbytes / 8


@pytest.mark.parametrize("exponent", [12, 20, 30, 36])
def test_the_waste_stays_below_an_eighth_around_powers_of_two(exponent: int) -> None:
    for nbytes in range((1 << exponent), (1 << exponent) + 3):
        assert 0 <= size_class_bytes(nbytes) - nbytes < nbytes / 8


@settings(max_examples=300, deadline=None, derandomize=True)
@given(small=st.integers(1, 1 << 32), more=st.integers(0, 1 << 20))
def test_a_larger_request_never_gets_a_smaller_class(small: int, more: int) -> None:
    assert size_class_bytes(small) <= size_class_bytes(small + more)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(nbytes=st.integers(1, 1 << 40))
def test_a_size_class_serves_a_request_of_its_own_size(nbytes: int) -> None:
    # Or a buffer that is given back would be filed under a class it does not serve.
    size = size_class_bytes(nbytes)
    assert size_class_bytes(size) == size


def test_an_octave_has_eight_classes() -> None:
    classes = {size_class_bytes(nbytes) for nbytes in range(64 * KIB + 1, 128 * KIB + 1, 64)}
    assert len(classes) == 8


@pytest.mark.parametrize("nbytes", [0, 1, MIN_BUFFER_BYTES - 1, MIN_BUFFER_BYTES])
def test_small_requests_share_the_smallest_buffer(nbytes: int) -> None:
    assert size_class_bytes(nbytes) == MIN_BUFFER_BYTES


# Lending.


def test_a_buffer_is_as_long_as_its_class(pool: HostPool) -> None:
    lease = pool.borrow(70 * KIB)
    assert lease.buffer.dtype is torch.uint8
    assert lease.buffer.dim() == 1
    assert lease.buffer.numel() == size_class_bytes(70 * KIB) == pool.lent_bytes


def test_steady_state_allocates_nothing_although_sizes_vary_within_a_class(pool: HostPool) -> None:
    # Tokens per expert vary from iteration to iteration.
    rng = random.Random(0)

    def iteration() -> None:
        leases = [pool.borrow(rng.randint(60 * KIB + 1, 64 * KIB)) for _ in range(4)]
        for lease in leases:
            pool.give_back(lease)

    iteration()
    assert pool.num_allocations == 4
    for _ in range(20):
        iteration()
    assert pool.num_allocations == 4
    assert pool.allocated_bytes == 4 * 64 * KIB


def test_no_buffer_is_lent_twice_at_once(pool: HostPool) -> None:
    leases = [pool.borrow(8 * KIB) for _ in range(3)]
    pool.give_back(leases.pop())
    leases += [pool.borrow(8 * KIB) for _ in range(2)]
    assert len({lease.buffer.data_ptr() for lease in leases}) == 4


def test_a_buffer_of_another_class_is_not_lent(pool: HostPool) -> None:
    pool.give_back(pool.borrow(1 * MIB))
    assert pool.borrow(8 * KIB).buffer.numel() == 8 * KIB
    assert pool.num_allocations == 2


def test_a_new_buffer_has_nobody_to_wait_for(pool: HostPool) -> None:
    assert pool.borrow(8 * KIB).last_use is None


def test_the_last_use_goes_with_the_buffer_to_the_next_borrower(pool: HostPool) -> None:
    # The next borrower's copy has to wait for it (edge E2).
    event = object()
    lease = pool.borrow(8 * KIB)
    address = lease.buffer.data_ptr()
    lease.last_use = event
    pool.give_back(lease)
    again = pool.borrow(8 * KIB - 100)
    assert again.buffer.data_ptr() == address
    assert again.last_use is event


def test_the_buffer_that_was_given_back_first_is_lent_first(pool: HostPool) -> None:
    # Its last reader has most likely finished, so that nobody waits.
    leases = [pool.borrow(8 * KIB) for _ in range(3)]
    for name, lease in zip("abc", leases, strict=True):
        lease.last_use = name
    for place in (1, 2, 0):
        pool.give_back(leases[place])
    assert [pool.borrow(8 * KIB).last_use for _ in range(3)] == ["b", "c", "a"]


# Figures.


def test_the_high_water_mark_is_the_most_that_was_lent_at_once(pool: HostPool) -> None:
    first, second = pool.borrow(8 * KIB), pool.borrow(64 * KIB)
    pool.give_back(first)
    pool.give_back(second)
    third = pool.borrow(64 * KIB)
    assert pool.lent_bytes == 64 * KIB
    assert pool.high_water_bytes == 72 * KIB
    assert pool.allocated_bytes == 72 * KIB
    pool.give_back(third)
    assert pool.lent_bytes == 0
    assert pool.high_water_bytes == 72 * KIB


def test_allocated_bytes_are_those_of_the_backend(pool: HostPool, backend: CountingBackend) -> None:
    for nbytes in (1, 5000, 70_000):
        pool.borrow(nbytes)
    assert pool.allocated_bytes == sum(backend.alive.values())
    assert pool.num_allocations == len(backend.alive) == 3


@pytest.mark.parametrize("given_back", [True, False], ids=["free", "lent"])
def test_closing_returns_every_buffer(
    pool: HostPool, backend: CountingBackend, given_back: bool
) -> None:
    leases = [pool.borrow(nbytes) for nbytes in (8 * KIB, 8 * KIB, 1 * MIB)]
    if given_back:
        for lease in leases:
            pool.give_back(lease)
    pool.close()
    assert backend.alive == {}
    assert pool.allocated_bytes == 0


def test_closing_twice_returns_nothing_twice(pool: HostPool, backend: CountingBackend) -> None:
    pool.give_back(pool.borrow(8 * KIB))
    pool.close()
    pool.close()
    assert backend.alive == {}


def test_a_buffer_given_back_after_closing_is_never_lent_again(
    pool: HostPool, backend: CountingBackend
) -> None:
    # A storage that outlives the engine gives its buffer back when it is deleted.
    late = pool.borrow(8 * KIB)
    pool.close()
    pool.give_back(late)
    again = pool.borrow(8 * KIB)
    assert again.buffer.data_ptr() in backend.alive
