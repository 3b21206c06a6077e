# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Where compute waits for long, and copies are slow, the host waits too: there and nowhere else."""

from __future__ import annotations

from typing import Optional

import pytest
import torch
from hand_driven import HandDriven
from host_bound import Engine, HostBound, train, waits_everywhere
from make_trace import Model, one_pass, timed

from megatron.slipstream.fine_grained_activation_offload import plan_entry, tuner
from megatron.slipstream.fine_grained_activation_offload.backend import Event
from megatron.slipstream.fine_grained_activation_offload.cuda_backend import (
    WORK_QUEUES,
    CudaBackend,
)
from megatron.slipstream.fine_grained_activation_offload.host_sync_points import (
    MIN_STALL_MS,
    are_copies_slowed,
    host_sync_points,
)
from megatron.slipstream.fine_grained_activation_offload.storage import Residence
from megatron.slipstream.plan.actions import ActionKind
from megatron.slipstream.plan.build import build_plan
from megatron.slipstream.plan.candidates import PolicyOptions
from megatron.slipstream.plan.trace import Bandwidth, StepKind
from megatron.slipstream.plan.walk import simulate

MEASURED = Bandwidth(55.0, 55.0, 50.0, 50.0)


@pytest.mark.parametrize(
    "d2h, h2d, expected",
    [(55.0, 55.0, False), (54.0, 54.0, False), (51.0, 55.0, True), (55.0, 51.0, True)],
)
def test_one_slow_direction_is_enough(d2h: float, h2d: float, expected: bool) -> None:
    assert are_copies_slowed(MEASURED, Bandwidth(d2h, h2d, 50.0, 50.0)) is expected


def test_the_host_waits_where_compute_waits_for_long() -> None:
    trace = timed(one_pass(Model(num_layers=6)), 1.0, 1e-4)  # 10 ms for a copy
    plan = build_plan(trace, PolicyOptions())
    simulation = simulate(plan)
    long = [stall for stall in simulation.stalls if stall.ms >= MIN_STALL_MS]
    assert long
    waits = host_sync_points(plan, simulation)
    assert sum(map(len, waits.values())) == len(long)
    for index, keys in waits.items():
        step = trace.steps[index]
        freed = {a.key for a in plan.actions[index] if a.kind is ActionKind.FREE}
        used = {step.key} if step.kind is StepKind.BACKWARD_USE else set()
        assert set(keys) <= freed | used


class Waiting(HostBound):
    """Tells for what the host has waited."""

    def __init__(self) -> None:
        super().__init__(copy_ms=0.001)
        self.num_outlasted = 0

    def outlast(self, event: Event) -> None:
        assert event is not None
        self.num_outlasted += 1


@pytest.mark.parametrize("is_slow", [False, True])
def test_the_host_waits_only_where_copies_are_slow(
    monkeypatch: pytest.MonkeyPatch, is_slow: bool
) -> None:
    monkeypatch.setattr(tuner, "are_copies_slowed", lambda *_: is_slow)
    monkeypatch.setattr(tuner, "host_sync_points", waits_everywhere)
    engine = Engine(backend := Waiting(), 80.0)
    train(engine)
    before = backend.num_outlasted
    train(engine, 1)
    assert engine.num_moving > 0
    assert backend.num_outlasted - before == (2 * engine.num_moving if is_slow else 0)


def test_a_book_sees_once_more_what_waiting_brings(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = []
    for is_slow in (False, True):
        monkeypatch.setattr(tuner, "are_copies_slowed", lambda *_, is_slow=is_slow: is_slow)
        monkeypatch.setattr(plan_entry.PlanEntry, "is_as_predicted", False)
        engine = Engine(Waiting(), 80.0)
        train(engine)
        rounds.append(engine.report.num_plans)
    assert rounds[1] == rounds[0] + 1


@pytest.mark.parametrize("rank, cure", [(0, "set it"), (1, "set it"), (0, None)])
def test_what_makes_copies_faster_is_said_once(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    rank: int,
    cure: Optional[str],
) -> None:
    monkeypatch.setattr(tuner, "are_copies_slowed", lambda *_: True)
    monkeypatch.setattr(plan_entry.PlanEntry, "is_as_predicted", False)
    monkeypatch.setattr(Waiting, "cure_of_slow_copies", cure)
    engine = Engine(Waiting(), 80.0)
    engine.report.rank = rank
    train(engine)
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


def test_the_device_is_told_to_wait_before_the_host_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else no wait of compute would be timed, but computation that takes longer."""
    hand = HandDriven("cpu")
    group = hand.group()
    saved = hand.save(group, torch.ones(1024))
    told: list[str] = []
    monkeypatch.setattr(hand.backend, "wait", lambda *_: told.append("device"))
    monkeypatch.setattr(hand.backend, "outlast", lambda _: told.append("host"))
    hand.send(group)
    told.clear()
    hand.store.outlast_copies(group)
    assert told == ["host"], "the device was, when the memory was released"
    hand.store.copy_in(group.storages())
    told.clear()
    hand.store.outlast_copies(group)
    assert told == ["device", "host"]
    assert hand.store.read(saved).equal(torch.ones(1024))
    told.clear()
    hand.store.outlast_copies(group)
    assert told == [], "backward has it"


def test_the_host_waits_for_nothing_that_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    hand = HandDriven("cpu")
    monkeypatch.setattr(hand.backend, "outlast", lambda _: pytest.fail("a captured event"))
    group = hand.group()
    saved = hand.save(group, torch.ones(1024))
    hand.store.copy_streams.begin_graph()
    hand.send(group)
    hand.store.outlast_copies(group)
    hand.store.copy_streams.end_graph()
    hand.store.outlast_copies(group)
    assert saved.storage.residence is Residence.HOST
