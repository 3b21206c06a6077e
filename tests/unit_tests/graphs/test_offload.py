# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Captures of a slot follow the plan, in the slot memory's host memory.

Nothing is captured here: a pass runs in the same order, on the CPU backends.
"""

from __future__ import annotations

from typing import Any, Optional
from unittest.mock import Mock

import pytest
import torch
from offloaded_chunk import OffloadedChunk
from timed_backend import TimedBackend
from toy_model import all_equal, make_manager, micro_batch

from megatron.slipstream.fine_grained_activation_offload.cpu_backends import CpuBackend
from megatron.slipstream.fine_grained_activation_offload.engine import OffloadEngine
from megatron.slipstream.fine_grained_activation_offload.host_pool import HostPool
from megatron.slipstream.fine_grained_activation_offload.storage import Residence
from megatron.slipstream.graphs.capture import Tail
from megatron.slipstream.graphs.offload import (
    NUM_TIMED_RUNS,
    SlotOffloading,
    share_of_host_memory,
)
from megatron.slipstream.graphs.slots import SlotMemory
from megatron.slipstream.plan.candidates import PolicyOptions


class Rig(OffloadedChunk):
    """Runs passes of a micro-batch."""

    def __init__(self, backend: str) -> None:
        super().__init__(lambda: make_manager(backend).engine)
        self._x = micro_batch(0)

    def loss(self, num_layers: int = 3) -> torch.Tensor:
        self.module.zero_grad()
        self._x = micro_batch(0)
        return self.forward(self._x, num_layers).square().sum()

    def gradients(self) -> list[Optional[torch.Tensor]]:
        return [self._x.grad, *(parameter.grad for parameter in self.module.parameters())]

    def run(self) -> None:
        self.loss().backward()

    def plan(self) -> None:
        with self.offloading.planning(self.run) as planned:
            planned.run()


@pytest.fixture(params=["cpu", "cpu-lazy"])
def rig(request: pytest.FixtureRequest) -> Rig:
    rig = Rig(request.param)
    rig.plan()
    return rig


def test_a_pass_in_a_slot_moves_what_was_planned_and_nothing_else_changes(rig: Rig) -> None:
    rig.run()
    expected = [gradient.clone() for gradient in rig.gradients() if gradient is not None]
    slot = rig.offloading.make_slot(SlotMemory(None, Tail()))
    moved_bytes = rig.offloading.moved_bytes
    assert slot.host_bytes == rig.offloading.host_bytes >= moved_bytes > 0
    engine = rig.engines[-1]
    for _ in range(2):
        with slot.forward():
            loss = rig.loss()
        counters = engine.store.modules.values()
        assert sum(module.d2h_bytes for module in counters) == moved_bytes
        groups = engine.now.groups.values()
        storages = {storage for group in groups for storage in group.storages()}
        left = [storage for storage in storages if storage.residence is not Residence.DEVICE]
        assert {storage.residence for storage in left} == {Residence.HOST}
        assert sum(storage.nbytes for storage in left) == moved_bytes, "all that moves"
        del groups, storages, left
        with slot.backward():
            loss.backward()
        actual = [gradient for gradient in rig.gradients() if gradient is not None]
        assert all_equal(expected, actual)
        assert engine.store.host_pool.in_use_bytes == 0
    assert engine.report.num_iterations == 0, "nothing is learned from it"


def test_an_allowed_overhead_is_predicted_from_times_until_the_plan_is_final(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine's own time on the host, which a trial would measure here, is none in a replay."""
    engines: list[OffloadEngine] = []
    rig = Rig("cpu")

    def make_engine() -> OffloadEngine:
        options = PolicyOptions(max_overhead_percent=1.0)
        engines.append(OffloadEngine(TimedBackend(), options))
        return engines[-1]

    rig.make_engine = make_engine
    with rig.offloading.planning(rig.run) as planned:
        assert engines[0].report.num_iterations == NUM_TIMED_RUNS
        for _ in range(2 * NUM_TIMED_RUNS):
            planned.run()
        assert engines[0].lifecycle.is_settled
        assert engines[0].report.tried == []
    assert rig.offloading.make_slot(SlotMemory(None, Tail())).leaves_copies


def test_a_pass_that_does_not_go_as_planned_is_refused(rig: Rig) -> None:
    slot = rig.offloading.make_slot(SlotMemory(None, Tail()))

    def one_layer_more() -> None:
        with slot.forward():
            rig.loss()
            rig.loss(num_layers=1)

    with pytest.raises(RuntimeError, match="of a captured pass is"):
        one_layer_more()


def test_slots_in_one_place_share_its_host_memory_and_the_last_one_returns_it(rig: Rig) -> None:
    memory, other = SlotMemory(None, Tail()), SlotMemory(None, Tail())
    slots = [rig.offloading.make_slot(memory) for _ in range(2)]
    of_one = rig.offloading.host_bytes
    assert slots[0].host_bytes == slots[1].host_bytes == of_one
    elsewhere = rig.offloading.make_slot(other)
    assert rig.offloading.host_bytes == 2 * of_one
    slots[0].close()
    pool = memory.host_pool
    assert pool.allocated_bytes == of_one
    slots[1].close()
    assert memory.host_pool is None
    assert pool.allocated_bytes == 0
    assert elsewhere.host_bytes == of_one, "other memory keeps its own"


def test_the_tail_begins_before_groups_are_released_and_ends_before_host_memory_goes(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    tail = Mock(begin=lambda: events.append("tail begins"), wait=lambda: events.append("tail ends"))
    slot = rig.offloading.make_slot(SlotMemory(None, tail))
    assert slot.leaves_copies
    engine = rig.engines[-1]

    def note(owner: Any, name: str, event: str) -> None:
        usual = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: (events.append(event), usual(*args))[-1])

    note(engine.store, "release_all", "released")
    note(engine, "close", "closed")
    note(engine.store.backend, "wait_on_host", "host waits")
    with slot.forward():
        loss = rig.loss()
    # To release a group makes the graph's stream wait for copies.
    assert events == ["tail begins", "released"]
    with slot.backward():
        loss.backward()
    events.clear()
    slot.close()
    assert events[:3] == ["tail ends", "host waits", "closed"]


def test_a_slot_without_a_plan_moves_nothing() -> None:
    rig = Rig("cpu")
    slot = rig.offloading.make_slot(SlotMemory(None, Tail()))
    assert isinstance(slot, SlotOffloading)
    assert not slot.leaves_copies
    with slot.forward():
        loss = rig.loss()
    with slot.backward():
        loss.backward()
    assert rig.engines[-1].store.modules == {}
    assert rig.offloading.host_bytes == 0
    slot.close()


@pytest.mark.parametrize(
    "limit_bytes, held_bytes, expected", [(None, 5, None), (1000, 100, 200), (1000, 1100, 0)]
)
def test_all_slots_together_keep_to_a_limit_of_host_memory(
    limit_bytes: Optional[int], held_bytes: int, expected: Optional[int]
) -> None:
    whole, earlier = (HostPool(CpuBackend(), limit_bytes) for _ in range(2))
    whole.allocated_bytes = held_bytes
    # The pool holds an eighth more than the plan needs.
    assert share_of_host_memory(whole, 4) == expected
    earlier.become_part_of(whole)
    earlier.reserve(300)
    assert share_of_host_memory(whole, 4) == expected, "slots captured earlier are of the four"


def test_a_slot_fills_nothing_that_it_releases_unless_it_is_verified(rig: Rig) -> None:
    """A CUDA graph would do so in each replay."""
    other = make_manager("cpu", num_verified_iterations=5)
    backend = other.store.backend
    rig.make_engine = lambda: OffloadEngine(backend)
    slot = rig.offloading.make_slot(SlotMemory(None, Tail()))
    with slot.forward():
        assert not backend.poisons_dropped
        loss = rig.loss()
    with slot.backward():
        assert not backend.poisons_dropped
        loss.backward()
    assert backend.poisons_dropped
    slot.close()
    assert backend.poisons_dropped
