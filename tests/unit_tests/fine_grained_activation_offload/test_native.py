# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The hooks in C++ do what those in Python do: the same bits, the same operations in one order.

That a store behaves alike with either is in ``test_activation_store.py``.
"""

from __future__ import annotations

import gc
import logging
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hand_driven import LAZY_NATIVE
from marked_group import offload_group
from torch.utils.checkpoint import checkpoint
from toy_model import SCHEDULES, WIDTH, all_equal, make_chunks, make_manager, run_schedule

from megatron.slipstream.fine_grained_activation_offload.backend import Bytes, Copy, nbytes_of
from megatron.slipstream.fine_grained_activation_offload.cpu_backends import LazyCpuBackend
from megatron.slipstream.fine_grained_activation_offload.engine import OffloadEngine
from megatron.slipstream.fine_grained_activation_offload.native_store import make_store
from megatron.slipstream.fine_grained_activation_offload.plan_executor import PlanExecutor
from megatron.slipstream.fine_grained_activation_offload.recorder import Recorder
from megatron.slipstream.fine_grained_activation_offload.regions import RegionFlag, Regions
from megatron.slipstream.integration.seam.manager import PipelineOffloadManager
from megatron.slipstream.plan import selection
from megatron.slipstream.plan.actions import ActionKind
from megatron.slipstream.plan.candidates import PolicyOptions
from megatron.slipstream.plan.model import IterationModel
from megatron.slipstream.plan.staying import Staying, texts_of
from megatron.slipstream.plan.trace import GroupKey, StepKind

OUTPUT_MARKS = (StepKind.OUTPUT_START, StepKind.OUTPUT_END)
BACKENDS = ["cpu, native", LAZY_NATIVE]


def is_right(manager: PipelineOffloadManager, schedule: str, chunks: Any, rows: int = 7) -> bool:
    expected = run_schedule(chunks, schedule, None, rows=rows)
    return all_equal(expected, run_schedule(chunks, schedule, manager, rows=rows))


class Log(LazyCpuBackend):
    """Notes all that is asked of it, with streams and events by the order in which they appear."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[tuple[Any, ...]] = []
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []
        self._slab_starts: dict[int, int] = {}
        """By address of its storage, where a slab begins in it: on a page."""

    def _number(self, thing: Any) -> int:
        self._kept.append(thing)  # so that no other thing has its identity
        return self._numbers.setdefault(id(thing), len(self._numbers))

    def record(self, stream: Any) -> Any:
        event = super().record(stream)
        self.entries.append(("record", self._number(stream), self._number(event)))
        return event

    def wait(self, stream: Any, event: Any) -> None:
        self.entries.append(("wait", self._number(stream), self._number(event)))
        super().wait(stream, event)

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        slab = super().allocate_host(nbytes)
        self._slab_starts[slab.untyped_storage().data_ptr()] = int(slab.storage_offset())
        return slab

    def _place(self, piece: Bytes) -> int:
        return piece.start - self._slab_starts.get(piece.storage.data_ptr(), 0)

    def run_copies(self, copies: Sequence[Copy], stream: Any) -> None:
        pieces = [
            (self._place(to), self._place(source), nbytes_of((to, source))) for to, source in copies
        ]
        self.entries.append(("copy", self._number(stream), pieces))
        super().run_copies(copies, stream)

    def drop_device(self, storage: torch.UntypedStorage) -> None:
        self.entries.append(("drop", storage.nbytes()))
        super().drop_device(storage)

    def allocate_device(self, nbytes: int, device: torch.device) -> torch.UntypedStorage:
        self.entries.append(("allocate", nbytes))
        return super().allocate_device(nbytes, device)


Program = list[tuple[str, int]]


def log_of(is_native: bool, program: Program, make: Callable[[], Any]) -> list[tuple[Any, ...]]:
    backend = Log()
    manager = PipelineOffloadManager(OffloadEngine(backend, PolicyOptions(), is_native=is_native))
    chunks = make()
    for name, rows in program:
        run_schedule(chunks, SCHEDULES[name], manager, rows=rows)
    return backend.entries


PROGRAMS: dict[str, Program] = {
    "alike": [("1F1B first of two", 7)] * 4,
    # Departures, and sizes that vary.
    "departures": [
        ("accumulation", 7),
        ("one micro-batch", 7),
        ("accumulation", 7),
        ("accumulation", 50),
    ]
    * 2,
    # The first pass has its marks by then.
    "departures at a second pass": [
        *[("one micro-batch", 7)] * 2,
        *[("all forward, all backward", 7)] * 2,
    ],
    "in turn": [("1F1B first of four", 7), ("1F1B first of two", 7)] * 3,
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_graph_that_is_dropped_gives_everything_back(backend: str) -> None:
    chunk = make_chunks(1)[0]
    manager = make_manager(backend)
    for _ in range(2):
        run_schedule([chunk], SCHEDULES["one micro-batch"], manager)
    output = chunk(torch.randn(7, 48, requires_grad=True), manager)
    assert manager.store.host_pool.in_use_bytes > 0
    del output
    gc.collect()
    assert manager.store.host_pool.in_use_bytes == 0
    assert manager.store.native is not None
    assert manager.store.native.num_known == 0


@pytest.mark.parametrize("backend", ["cpu", *BACKENDS])
def test_an_engine_goes_with_its_last_graph_and_needs_no_garbage_collector(backend: str) -> None:
    chunk = make_chunks(1)[0]
    manager = make_manager(backend)
    for _ in range(2):
        run_schedule([chunk], SCHEDULES["one micro-batch"], manager)
    x = torch.randn(7, 48, requires_grad=True)
    output = chunk(x, manager)
    gone = weakref.ref(manager.engine)
    gc.collect()
    gc.disable()
    try:
        del manager
        assert gone() is not None, "backward is still to read"
        output.sum().backward()
        del output, x
        assert gone() is None
    finally:
        gc.enable()


def test_groups_do_not_outlive_their_iteration() -> None:
    """Each refers to its name. The last ones may be kept until others start."""
    manager, (chunk,) = make_manager(LAZY_NATIVE), headed_chunks()
    num_references = []
    name = "".join(["a ", "name"])
    for _ in range(12):
        x = torch.randn(7, WIDTH, requires_grad=True)
        output = chunk(x, manager)
        with offload_group(manager, name) as group:
            output = torch.tanh(2 * output)
        output = group.commit(output)
        manager.start_on(output, name)
        with manager:
            output = torch.tanh(2 * output)
        manager.end_on(output, name).sum().backward()
        manager.reset()
        num_references.append(sys.getrefcount(name))
    assert manager.report.total.num_groups_moved > 0
    assert len(set(num_references[-6:])) == 1


class MarkedChunk(torch.nn.Module):
    """Layers that call the manager as megatron-core's do, with the input of each group."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor, manager: PipelineOffloadManager | None) -> torch.Tensor:
        if manager is not None:
            manager.init_model_chunk_offload_handler(0, None, 0, 1)
        return self.layers_only(x, manager)

    def layers_only(self, x: torch.Tensor, manager: PipelineOffloadManager | None) -> torch.Tensor:
        for layer in self.layers:
            x = torch.sigmoid(x)
            if manager is None:
                x = torch.tanh(layer(x))
                continue
            manager.start_on(x, "group")
            with manager:
                x = torch.tanh(layer(x))
            x = manager.end_on(x, "group")
        return x


MANY_ROWS = 50


class HeadedChunk(MarkedChunk):
    """With an output layer, which large micro-batches pass twice, and its marks."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, manager: PipelineOffloadManager | None) -> torch.Tensor:
        num_rows = len(x)
        x = super().forward(x, manager)
        for _ in range(2 if num_rows == MANY_ROWS else 1):
            if manager is not None:
                manager.engine.mark_output(StepKind.OUTPUT_START)
                manager.engine.mark_gradient(StepKind.OUTPUT_BACKWARD_END, [x.detach(), x])
            x = self.head(x)
            if manager is not None:
                manager.engine.mark_output(StepKind.OUTPUT_END)
                manager.engine.mark_gradient(StepKind.OUTPUT_BACKWARD_START, [x])
        # Backward has the gradient of the second one first, and of both if it reads both.
        result = 2 * x
        if manager is not None:
            manager.engine.mark_gradient(StepKind.BACKWARD_START, [x, result])
        return x + result


def marked_chunks() -> Any:
    torch.manual_seed(5)
    return [MarkedChunk()]


def headed_chunks() -> Any:
    torch.manual_seed(5)
    return [HeadedChunk()]


@pytest.fixture
def acts_between_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans release and reload at marks of no group where such a mark is next to the planned one.

    Without times a plan has nothing to do there.
    """
    count_steps = selection._count_steps

    def steps(model: IterationModel, options: PolicyOptions) -> dict[GroupKey, tuple[int, int]]:
        trace = model.trace

        def is_of_none(index: int) -> bool:
            return 0 <= index < len(trace.steps) and not trace.steps[index].is_of_group

        return {
            key: (free_step + is_of_none(free_step + 1), h2d_step - is_of_none(h2d_step - 1))
            for key, (free_step, h2d_step) in count_steps(model, options).items()
        }

    monkeypatch.setattr(selection, "_count_steps", steps)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("make", [make_chunks, marked_chunks, headed_chunks])
def test_both_issue_the_same_operations(
    name: str, make: Callable[[], Any], request: pytest.FixtureRequest
) -> None:
    """With marks in Python, in C++, and of no group."""
    if make is headed_chunks:
        request.getfixturevalue("acts_between_groups")
    log = log_of(False, PROGRAMS[name], make)
    assert log_of(True, PROGRAMS[name], make) == log
    assert {entry[0] for entry in log} == {"record", "wait", "copy", "drop", "allocate"}


class HoldingChunk(MarkedChunk):
    """Each group saves two storages that move, of which something else may hold the first."""

    holds = False
    held: list[torch.Tensor]

    def layers_only(self, x: torch.Tensor, manager: PipelineOffloadManager | None) -> torch.Tensor:
        assert manager is not None
        self.held = []
        for layer in self.layers:
            x = torch.sigmoid(x)
            manager.start_on(x, "group")
            with manager:
                x = layer(x)
                if self.holds:
                    self.held.append(x)
                x = torch.sin(torch.tanh(torch.sin(x)))
            x = manager.end_on(x, "group")
        return x


def test_both_issue_the_same_operations_where_something_else_holds_memory() -> None:
    """Python does what the plan has at such a mark, C++ the rest."""
    logs = []
    for is_native in (False, True):
        backend = Log()
        engine = OffloadEngine(backend, PolicyOptions(), is_native=is_native)
        manager, chunk = PipelineOffloadManager(engine), HoldingChunk()
        for number in range(6):
            chunk.holds = number == 4
            run_schedule([chunk], SCHEDULES["accumulation"], manager)  # type: ignore[list-item]
        logs.append(backend.entries)
    assert logs[0] == logs[1]


@pytest.mark.usefixtures("acts_between_groups")
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_right_with_marks_of_no_group_in_cpp(name: str) -> None:
    manager, chunks = make_manager(LAZY_NATIVE), headed_chunks() * 2
    for _ in range(5):
        assert is_right(manager, SCHEDULES[name], chunks)
    plan = manager.plan
    assert plan is not None
    acted = {
        (step.kind, action.kind)
        for step, actions in zip(plan.trace.steps, plan.actions, strict=True)
        for action in actions
        if not step.is_of_group
    }
    assert (StepKind.OUTPUT_BACKWARD_END, ActionKind.H2D) in acted
    assert (StepKind.OUTPUT_START, ActionKind.FREE) in acted


def test_a_departure_at_a_mark_of_no_group_goes_on_in_python(
    caplog: pytest.LogCaptureFixture,
) -> None:
    manager, chunks = make_manager(LAZY_NATIVE), headed_chunks()
    for rows in (7, 7, 7, MANY_ROWS, MANY_ROWS):
        with caplog.at_level(logging.INFO):
            assert is_right(manager, SCHEDULES["accumulation"], chunks, rows=rows)
    departures = [text for text in caplog.messages if "is not in the plan" in text]
    assert len(departures) == 1
    assert "0.output_layer:OS" in departures[0]
    assert manager.plan is not None
    keys = {step.key.group for step in manager.plan.trace.steps if step.kind in OUTPUT_MARKS}
    assert keys == {-2, -3}, "of the first call and of the second"


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("backend", ["cpu-lazy", LAZY_NATIVE])
def test_marks_of_recomputed_layers_are_none_in_backward(
    backend: str, use_reentrant: bool, caplog: pytest.LogCaptureFixture
) -> None:
    manager, (chunk,) = make_manager(backend), marked_chunks()

    def run(manager: PipelineOffloadManager | None) -> list[torch.Tensor]:
        chunk.zero_grad(set_to_none=True)
        x = torch.ones(7, WIDTH, requires_grad=True)
        if manager is not None:
            manager.init_model_chunk_offload_handler(0, None, 0, 1)
        y = checkpoint(chunk.layers_only, x, manager, use_reentrant=use_reentrant)
        chunk.layers_only(y, manager).sum().backward()
        if manager is not None:
            assert manager.engine.now.plan is not None or num_plans == 0, "it has not departed"
            manager.reset()
        return [x.grad, *(p.grad for p in chunk.parameters())]  # type: ignore[list-item]

    expected, num_plans = run(None), 0
    for _ in range(5):
        assert all_equal(expected, run(manager))
        num_plans = manager.report.num_plans
    assert num_plans == 1
    assert manager.report.total.num_groups_moved > 0
    assert "is not in the plan" not in caplog.text


def test_gradients_mark_once_and_only_in_their_iteration() -> None:
    manager, (chunk,) = make_manager(LAZY_NATIVE), headed_chunks()
    for _ in range(4):
        assert is_right(manager, SCHEDULES["one micro-batch"], [chunk])
    num_planned = len(manager.plan.trace.steps) if manager.plan is not None else 0
    x = torch.randn(7, WIDTH, requires_grad=True)
    output = chunk(x, manager)
    assert manager.engine.now.native is not None
    output.sum().backward(retain_graph=True)
    assert manager.engine.now.num_steps == num_planned
    output.sum().backward(retain_graph=True)
    assert manager.engine.now.num_steps == num_planned
    assert manager.engine.now.native is not None, "no mark has departed from the plan"
    manager.reset()
    late = chunk(x, manager)
    manager.reset()
    running = chunk(x, manager)
    num_steps = manager.engine.now.num_steps
    late.sum().backward()
    assert manager.engine.now.num_steps == num_steps
    running.sum().backward()
    manager.reset()


def test_a_gradient_of_an_earlier_iteration_is_no_mark_of_the_running_one() -> None:
    """Where the next step of its plan is the same mark of a pass with the same number."""
    manager, (chunk,) = make_manager(LAZY_NATIVE), headed_chunks()
    x = torch.randn(7, WIDTH, requires_grad=True)
    for number in range(6):
        late = chunk(x, manager)
        is_late_in_cpp = manager.engine.now.native is not None
        manager.reset()
        running = chunk(x, manager)
        if number == 5:
            assert is_late_in_cpp
            assert manager.engine.now.native is not None
            num_steps = manager.engine.now.num_steps
            late.sum().backward()
            assert manager.engine.now.num_steps == num_steps
        running.sum().backward()
        manager.reset()


def test_marks_outside_of_passes_are_none() -> None:
    manager, (chunk,) = make_manager(LAZY_NATIVE), marked_chunks()
    for _ in range(4):
        assert is_right(manager, SCHEDULES["accumulation"], [chunk])
    x = torch.randn(7, WIDTH, requires_grad=True)
    output = chunk(x, manager)
    assert manager.engine.now.native is not None
    num_steps = manager.engine.now.num_steps
    with torch.no_grad():
        manager.init_model_chunk_offload_handler(0, None, 0, 1)
    chunk.layers_only(x, manager)
    assert manager.engine.now.num_steps == num_steps
    output.sum().backward()
    manager.reset()


@pytest.mark.parametrize("backend", ["cpu-lazy", LAZY_NATIVE])
def test_tensors_that_nodes_give_up_are_announced(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, given_up = make_manager(backend), []
    give_up = manager.store.give_up

    def note(group: Any, tensors: Sequence[torch.Tensor]) -> None:
        given_up.append([tensor is x for tensor in tensors])
        give_up(group, tensors)

    monkeypatch.setattr(manager.store, "give_up", note)
    for _ in range(4):
        manager.init_model_chunk_offload_handler(0, None, 0, 1)
        manager.engine.run_in_nodes()
        x = torch.randn(7, WIDTH, requires_grad=True) * 2
        for _ in range(3):
            manager.start_on(x, "mlp_norm")
            with manager:
                y = torch.sin(x)
            x = manager.end_on(y, "mlp_norm", given_up=[x]) * 2
        is_in_cpp = manager.engine.now.native is not None
        x.sum().backward()
        manager.reset()
    assert is_in_cpp is manager.store.is_native
    num_moved = sum(group.moves for group in manager.plan.groups)  # type: ignore[union-attr]
    assert given_up == [[True]] * (3 + 3 * num_moved)
    assert num_moved > 0


def test_a_gradient_of_a_leaf_is_marked_in_python() -> None:
    """As the input of an output layer that is alone on its stage."""
    manager, (chunk,) = make_manager(LAZY_NATIVE), marked_chunks()
    marks = []
    for _ in range(4):
        x, leaf = (torch.randn(7, WIDTH, requires_grad=True) for _ in range(2))
        output = chunk(x, manager)
        manager.engine.mark_gradient(StepKind.BACKWARD_START, [leaf])
        (output + leaf).sum().backward()
        marks.append(manager.engine.now.num_steps)
        manager.reset()
    assert marks == [4 * 4 + 1] * 4


@pytest.mark.parametrize("make", [marked_chunks, headed_chunks])
def test_marks_of_a_followed_plan_are_not_python_s(
    make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Except the start of an iteration's first group, which chooses the plan, and its end."""
    chunks, schedule = make(), SCHEDULES["1F1B first of two"]
    calls: list[str] = []
    come_to, enter_region = PlanExecutor.come_to, Regions.enter

    def come(executor: PlanExecutor, now: Any, kind: Any, at: Any) -> None:
        calls.append(f"{at.key}:{kind.value}")
        come_to(executor, now, kind, at)

    def enter(regions: Regions, *arguments: Any) -> None:
        calls.append("enter")
        enter_region(regions, *arguments)

    manager = make_manager(LAZY_NATIVE)
    for _ in range(4):
        assert is_right(manager, schedule, chunks)
    monkeypatch.setattr(PlanExecutor, "come_to", come)
    monkeypatch.setattr(Regions, "enter", enter)
    assert is_right(manager, schedule, chunks)
    assert manager.report.total.num_groups_moved > 0
    assert calls == ["0.0:FS", "enter", "0.0:BE"]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_right_with_marks_in_cpp(name: str) -> None:
    manager, chunks = make_manager(LAZY_NATIVE), marked_chunks() * 2
    for _ in range(5):
        assert is_right(manager, SCHEDULES[name], chunks)
    assert manager.report.total.num_groups_moved > 0
    assert manager.store.native.num_known == 0


def test_groups_that_stay_are_not_tracked() -> None:
    chunk = marked_chunks()[0]
    manager = make_manager(LAZY_NATIVE, activation_offload_fraction=0.5)
    for _ in range(4):
        manager.init_model_chunk_offload_handler(0, None, 0, 1, activation_offload_fraction=0.5)
        output = chunk.layers_only(torch.randn(7, WIDTH, requires_grad=True), manager)
        held = {key: bool(group.held) for key, group in manager.engine.now.groups.items()}
        plan = manager.engine.now.plan
        output.sum().backward()
        manager.reset()
    assert plan is not None
    assert held == {group.key: group.moves for group in plan.groups}
    assert sorted(held.values()) == [False, False, True, True]


class Flag:
    is_set = False


@pytest.mark.parametrize("without", [(), ("group",)])
def test_the_flag_is_set_in_tracked_regions_alone_and_is_what_it_was_afterwards(
    without: tuple[str, ...],
) -> None:
    manager, chunks = make_manager(LAZY_NATIVE), marked_chunks()
    flag = Flag()
    manager.engine.regions.flag = RegionFlag(flag, "is_set", frozenset(without))
    was, seen = False, set()

    def check(*_: Any) -> None:
        plan, *_, key = manager.engine.now.plan, *manager.engine.now.groups
        is_tracked = plan is None or plan.tracks(key)
        assert flag.is_set is ((is_tracked and not without) or was)
        seen.add((is_tracked, was))

    for layer in chunks[0].layers:
        layer.register_forward_pre_hook(check)
    # The first iterations are recorded and measured, in Python.
    for was in (False, True) * 3:
        flag.is_set = was
        run_schedule(chunks, SCHEDULES["accumulation"], manager)
        assert flag.is_set is was
    assert seen >= {(True, False), (True, True)}
    assert manager.engine.regions.entered == []


def test_nothing_moves_under_the_hooks_of_others() -> None:
    """They must see all that is saved, as those of a checkpoint."""
    manager, chunks = make_manager(LAZY_NATIVE), marked_chunks()
    schedule = SCHEDULES["accumulation"]
    for _ in range(4):
        assert is_right(manager, schedule, chunks)
    packed: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run_schedule(chunks, schedule, None)
        num_packed = len(packed)
        run_schedule(chunks, schedule, manager)
    assert len(packed) == 2 * num_packed


def test_suspended_marks_do_nothing_in_the_middle_of_an_iteration() -> None:
    manager, (chunk,) = make_manager(LAZY_NATIVE), marked_chunks()
    for _ in range(4):
        assert is_right(manager, SCHEDULES["accumulation"], [chunk])
    x, y = (torch.randn(7, WIDTH, requires_grad=True) for _ in range(2))
    first = chunk(x, manager)
    num_steps = manager.engine.now.num_steps
    manager.disable_offload()
    second = chunk.layers_only(y, manager)
    manager.enable_offload()
    assert manager.engine.now.num_steps == num_steps
    (first.sum() + second.sum()).backward()
    expected = [tensor.grad for tensor in (x, y)]
    for tensor in (x, y):
        tensor.grad = None
    (chunk(x, None).sum() + chunk(y, None).sum()).backward()
    assert all_equal(expected, [tensor.grad for tensor in (x, y)])
    manager.reset()


def test_the_backend_says_what_it_manages() -> None:
    backend = Log()
    store = make_store(backend, Recorder(backend), is_native=True)
    group = store.make_pass(0, 0, 1, 0).open_group("mlp")
    elsewhere = torch.empty(4, device="meta")
    assert store.pack(group, elsewhere) is elsewhere
    assert texts_of(group.kinds_staying) == (Staying.ELSEWHERE.text,)
