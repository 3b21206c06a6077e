# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""``derive_schedule`` gives the operations that the engine issues when it follows the plan.

The proof of ``check`` and the times of ``simulate`` use a schedule that is derived without the
engine. Here it is compared with the operations that the engine puts on its queues.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from toy_model import SCHEDULES, WIDTH, Chunk, Layer, make_chunks, micro_batch
from watched_backend import Issued, Queues, WatchedBackend, WatchedManager, num_signals

from megatron.slipstream.fine_grained_activation_offload.copy_streams import CopyStreams, Signal
from megatron.slipstream.integration.seam.manager import PipelineOffloadManager
from megatron.slipstream.plan.actions import Plan
from megatron.slipstream.plan.edges import EDGES, Edge, OpKind, Queue
from megatron.slipstream.plan.host_layout import HostBuffer
from megatron.slipstream.plan.operations import Operation, Schedule, derive_schedule

# The two sides of the comparison.


def issued_by_engine(backend: WatchedBackend) -> Queues:
    """An entry without the storages that stay, which a schedule does not contain."""
    moved = backend.addresses.keys()
    return {
        queue: [
            entry._replace(storages=tuple(number for number in entry.storages if number in moved))
            for entry in entries
            if not moved.isdisjoint(entry.storages)
        ]
        for queue, entries in backend.issued.items()
    }


def issued_by_schedule(schedule: Schedule, parts: Sequence[Operation]) -> Queues:
    issued: Queues = {queue: [] for queue in Queue}
    waited = {queue: [0 for _ in Queue] for queue in Queue}
    places: list[int] = []
    for part, signals in zip(parts, schedule.waits(parts, EDGES), strict=True):
        queue = part.kind.queue
        for signal in signals:
            other = parts[signal].kind.queue
            waited[queue][other] = max(waited[queue][other], places[signal])
        entry = Issued(part.kind, part.step, part.storages, tuple(waited[queue]))
        issued[queue].append(entry)
        places.append(num_signals(issued[queue]))
    return issued


def split(operations: Sequence[Operation], engine: Queues) -> list[Operation]:
    """The engine's operations storage by storage, so that the waits of each are compared.

    Storages are used in the order in which autograd reads them, and abandoned in any order.
    """
    parts = [
        operation._replace(storages=storages)
        for operation in operations
        if operation.kind is not OpKind.COMPUTE
        for storages in (
            [(storage,) for storage in operation.storages]
            if operation.kind in (OpKind.RELEASE, OpKind.USE, OpKind.ABANDON)
            else [operation.storages]
        )
    ]
    place = {entry[:3]: place for place, entry in enumerate(engine[Queue.COMPUTE])}
    found = []
    for key, group in itertools.groupby(parts, lambda part: (part.kind, part.step)):
        together = list(group)
        if key[0] in (OpKind.USE, OpKind.ABANDON):
            together.sort(key=lambda part: place.get((part.kind, part.step, part.storages), -1))
        found += together
    return found


# An iteration that follows a plan from its first to its last step.


class Case(NamedTuple):
    schedule: str
    release_lag: int = 1
    prefetch_depth: int = 1
    num_layers: int = 3
    has_table: bool = False
    """Every layer of every pass saves one more tensor, which the model keeps."""

    def chunks(self) -> list[Chunk]:
        chunks = make_chunks(2, self.num_layers)
        if self.has_table:
            table = torch.linspace(0.5, 1.5, WIDTH)
            for layer in (layer for chunk in chunks for layer in chunk.layers):
                assert isinstance(layer, Layer)
                layer.second = partial(second_with_table, layer, table)  # type: ignore[method-assign]
        return chunks


CASES = {
    **{name: Case(name) for name in SCHEDULES},
    "released late, reloaded early": Case("1F1B first of four", release_lag=3, prefetch_depth=4),
    "fetched at the last moment": Case("interleaved first of two", prefetch_depth=0),
    "interleaved, fetched early": Case("interleaved first of two", prefetch_depth=6, num_layers=2),
    "something else holds a storage": Case("1F1B first of two", has_table=True),
}

ROWS = (64, 24, 100)
"""Micro-batches are of different lengths, as packed sequences are."""


def second_with_table(layer: Layer, table: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    return layer.down(hidden * (hidden * table))


Backward = Callable[[int, torch.Tensor], None]
"""Called with the number of a forward pass and its output."""


def backward(_: int, output: torch.Tensor) -> None:
    output.square().sum().backward()


def run(
    chunks: Sequence[Chunk], schedule: str, manager: PipelineOffloadManager, backward: Backward
) -> None:
    outputs: dict[str, tuple[int, torch.Tensor]] = {}
    for action in schedule.split():
        stage, index = (int(part) for part in action[1:].split("."))
        if action[0] == "F":
            x = micro_batch(index, ROWS[index % len(ROWS)])
            outputs[action[1:]] = len(outputs), chunks[stage](x, manager)
        else:
            backward(*outputs[action[1:]])
    manager.reset()


class Followed(NamedTuple):
    plan: Plan
    schedule: Schedule
    backend: WatchedBackend


def follow(case: Case, num_iterations: int = 1, is_read: bool = True) -> Followed:
    """Record an iteration, and follow its plan repeatedly; the last iteration is watched.

    The pool is empty when the first of them starts, like the planner's ledger.
    """
    manager = WatchedManager(release_lag=case.release_lag, prefetch_depth=case.prefetch_depth)

    def announce(chunk_pass: int, _: torch.Tensor) -> None:
        """The marks of a backward pass in which autograd reads nothing."""
        for group in reversed([g for g in manager.committed if g.key.chunk_pass == chunk_pass]):
            manager.engine.use_group(group)

    chunks, schedule = case.chunks(), SCHEDULES[case.schedule]
    run(chunks, schedule, manager, backward)
    plan = manager.engine.lifecycle.last_plan
    assert plan is not None
    manager.close()
    manager.watched.slabs.clear()
    for _ in range(num_iterations):
        manager.watch(plan.trace)
        run(chunks, schedule, manager, backward if is_read else announce)
    assert manager.engine.lifecycle.last_plan is plan
    return Followed(plan, derive_schedule(plan), manager.watched)


def assert_is_followed(followed: Followed) -> None:
    """Each action was at its step, and moving groups saved the trace's storages."""
    plan, _, backend = followed
    due = [(step, str(action)) for step, due in enumerate(plan.actions) for action in due]
    assert backend.performed == due
    assert due
    for group in plan.groups:
        if group.moves:
            assert backend.saved[group.key] == [*plan.trace.group_by_key[group.key].storages]
    assert backend.num_blocked == 0


def assert_issues_the_same(followed: Followed) -> None:
    """Operations, storages, steps, the order in each queue, and the waits."""
    engine = issued_by_engine(followed.backend)
    parts = split(followed.schedule.operations, engine)
    assert engine == issued_by_schedule(followed.schedule, parts)


def assert_abandons_the_same(followed: Followed) -> None:
    """The same if backward reads nothing; reloaded memory is released when the iteration ends."""
    plan, schedule, backend = followed
    last = len(plan.trace.steps) - 1
    operations = [
        operation._replace(step=last) if operation.kind is OpKind.ABANDON else operation
        for operation in schedule.unread()
    ]
    engine = issued_by_engine(backend)
    assert engine == issued_by_schedule(schedule, split(operations, engine))


@pytest.fixture(params=CASES.values(), ids=list(CASES))
def followed(request: pytest.FixtureRequest) -> Followed:
    return follow(request.param)


def test_the_engine_issues_what_the_schedule_says(followed: Followed) -> None:
    assert_is_followed(followed)
    assert_issues_the_same(followed)


def test_the_engine_lends_the_host_bytes_that_the_schedule_says(followed: Followed) -> None:
    _, schedule, backend = followed
    (slab,) = backend.slabs
    starts = {number: address - slab for number, address in backend.addresses.items()}
    assert starts == {number: buffer.start for number, buffer in schedule.buffers.items()}
    used_before = {number: set(buffer.used_before) for number, buffer in schedule.buffers.items()}
    assert backend.used_before == used_before
    assert backend.in_use_bytes
    for step, in_use_bytes in backend.in_use_bytes.items():
        assert in_use_bytes == schedule.host_bytes[step]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_also_from_a_pool_that_has_served_before(case: Case) -> None:
    # Buffers then lie where earlier iterations left room, so what a copy out waits for by E2 is
    # told by the bytes that it overwrites.
    plan, schedule, backend = followed = follow(case, num_iterations=3)
    assert_is_followed(followed)
    buffers = {
        number: HostBuffer(buffer.start, buffer.stop, tuple(backend.used_before[number]))
        for number, buffer in schedule.buffers.items()
    }
    assert_issues_the_same(Followed(plan, replace(schedule, buffers=buffers), backend))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_is_never_read_is_abandoned_as_the_schedule_says(case: Case) -> None:
    followed = follow(case, is_read=False)
    assert_is_followed(followed)
    assert_abandons_the_same(followed)


def test_memory_that_a_later_group_saves_again_is_let_go_earlier_and_after_the_same_wait() -> None:
    # Without lag the first group of a layer releases the storage before the second has saved it:
    # from there it is the model that keeps it, until the commit at the latest, where the schedule
    # has the release.
    _, schedule, backend = followed = follow(Case("1F1B first of two", release_lag=0))
    assert_is_followed(followed)
    engine = issued_by_engine(backend)
    described = issued_by_schedule(schedule, split(schedule.operations, engine))
    assert engine[Queue.D2H] == described[Queue.D2H]
    assert engine[Queue.H2D] == described[Queue.H2D]
    let_go = [
        {e.storages: e for e in queues[Queue.COMPUTE] if e.kind is OpKind.RELEASE}
        for queues in (engine, described)
    ]
    assert let_go[0].keys() == let_go[1].keys()
    pairs = [(let_go[0][storages], let_go[1][storages]) for storages in let_go[0]]
    assert all(real.step <= stated.step for real, stated in pairs)
    assert any(real.step < stated.step for real, stated in pairs)
    copies = engine[Queue.D2H]
    for real, _ in pairs:
        own = next(i for i, copy in enumerate(copies, 1) if set(real.storages) <= {*copy.storages})
        assert real.waited[Queue.D2H] >= own


# The comparison finds differences.


def test_the_cases_have_in_them_what_is_to_be_compared() -> None:
    plan, schedule, _ = follow(CASES["1F1B first of two"])
    holders = [plan.trace.storages[storage.index].holders for storage in plan.storages]
    assert any(len(keys) == 2 for keys in holders)
    assert len({storage.nbytes for storage in plan.storages}) > 3
    assert any(len(operation.storages) > 1 for operation in schedule.operations)
    assert any(len(buffer.used_before) > 1 for buffer in schedule.buffers.values())
    kept = follow(CASES["something else holds a storage"]).plan.groups
    assert any(group.moves and group.kept_storages for group in kept)


@pytest.mark.parametrize("one_in", [1, 3])
@pytest.mark.parametrize("edge", [edge for edge in Edge if edge.rule is not None], ids=str)
def test_waits_that_the_engine_does_not_make_are_found(
    monkeypatch: pytest.MonkeyPatch, edge: Edge, one_in: int
) -> None:
    wait = CopyStreams._wait

    def dropping(
        streams: CopyStreams, asked: Edge, stream: Any, stream_id: Any, signal: Signal, *label: str
    ) -> None:
        if asked is not edge or signal.event.num_signals % one_in:
            wait(streams, asked, stream, stream_id, signal, *label)

    monkeypatch.setattr(CopyStreams, "_wait", dropping)
    followed = follow(CASES["1F1B first of two"], is_read=edge is not Edge.E6)
    assert_is_followed(followed)
    with pytest.raises(AssertionError):
        (assert_issues_the_same if edge is not Edge.E6 else assert_abandons_the_same)(followed)


@pytest.mark.parametrize("direction", ["copy_out", "copy_in"])
def test_copies_in_another_order_are_found(monkeypatch: pytest.MonkeyPatch, direction: str) -> None:
    copy = getattr(CopyStreams, direction)

    def reversing(streams: CopyStreams, moves: Sequence[Any], *rest: Any, **options: Any) -> Any:
        return copy(streams, moves[::-1], *rest, **options)

    monkeypatch.setattr(CopyStreams, direction, reversing)
    followed = follow(CASES["1F1B first of two"])
    assert_is_followed(followed)
    with pytest.raises(AssertionError):
        assert_issues_the_same(followed)
