# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""In every schedule, gradients are those of the engine switched off, bit by bit."""

from __future__ import annotations

import gc
import logging

import pytest
import torch
from hand_driven import LAZY_NATIVE
from marked_group import offload_group
from torch.utils.checkpoint import checkpoint
from toy_model import (
    SCHEDULES,
    Chunk,
    all_equal,
    make_chunks,
    make_manager,
    micro_batch,
    run_schedule,
)

from megatron.slipstream.fine_grained_activation_offload.counted_modules import (
    ReplayedGraph,
    ReplayedPass,
)
from megatron.slipstream.fine_grained_activation_offload.graph_capture import ONE_SIZE, GraphId
from megatron.slipstream.fine_grained_activation_offload.group import OffloadTensorGroup
from megatron.slipstream.fine_grained_activation_offload.storage import Residence
from megatron.slipstream.integration.seam.manager import PipelineOffloadManager
from megatron.slipstream.plan.trace import StepKind

BACKENDS = ["cpu-lazy", LAZY_NATIVE]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize(
    "backend, lag, depth",
    [
        ("cpu", 1, 1),
        *(
            (backend, lag, depth)
            for backend in ("cpu-lazy", LAZY_NATIVE)
            for lag, depth in ((0, 0), (1, 1), (3, 2))
        ),
    ],
)
def test_gradients_are_those_without_the_engine(
    backend: str, schedule: str, lag: int, depth: int
) -> None:
    chunks = make_chunks(2)
    expected = run_schedule(chunks, schedule, None)
    manager = make_manager(backend, release_lag=lag, prefetch_depth=depth)
    for _ in range(3):
        assert all_equal(expected, run_schedule(chunks, schedule, manager))
    assert manager.report.total.d2h_copies > 0


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_one_layer_per_chunk(backend: str, schedule: str) -> None:
    chunks = make_chunks(2, num_layers=1)
    expected = run_schedule(chunks, schedule, None)
    manager = make_manager(backend)
    for _ in range(3):
        assert all_equal(expected, run_schedule(chunks, schedule, manager))


def test_a_planned_iteration_is_never_late_and_moves_what_is_planned(backend: str) -> None:
    chunks = make_chunks(2)
    manager = make_manager(backend)
    for _ in range(3):
        run_schedule(chunks, SCHEDULES["1F1B first of four"], manager)
    total = manager.report.total
    assert total.num_late == 0
    assert manager.engine.lifecycle.last_plan is not None
    assert total.d2h_bytes == total.h2d_bytes == manager.engine.lifecycle.last_plan.moved_nbytes
    assert total.freed_bytes == manager.engine.lifecycle.last_plan.moved_nbytes
    assert manager.report.num_plans == 1


def test_host_memory_is_allocated_only_while_recording(backend: str) -> None:
    chunks = make_chunks(2)
    manager = make_manager(backend)
    run_schedule(chunks, SCHEDULES["1F1B first of four"], manager)
    allocations = manager.report.num_host_allocations
    for _ in range(4):
        run_schedule(chunks, SCHEDULES["1F1B first of four"], manager)
    assert manager.report.num_host_allocations == allocations
    assert manager.store.host_pool.in_use_bytes == 0


def test_micro_batch_counts_that_change_from_step_to_step(backend: str) -> None:
    chunks = make_chunks(1)
    manager = make_manager(backend)
    counts = [4, 2, 4, 1, 6, 2, 6, 4, 1]
    for count in counts:
        schedule = _one_f_one_b(count)
        expected = run_schedule(chunks, schedule, None)
        assert all_equal(expected, run_schedule(chunks, schedule, manager))
        assert manager.report.total.d2h_copies > 0, "it must never silently stop"
        assert all_equal(expected, run_schedule(chunks, schedule, manager))
        assert manager.report.total.num_late == 0, "this count has its plan"
    assert manager.report.num_plans == len(set(counts))


def _one_f_one_b(count: int) -> str:
    warm_up = min(2, count)
    actions = [f"F0.{index}" for index in range(warm_up)]
    for index in range(count):
        actions.append(f"B0.{index}")
        if warm_up + index < count:
            actions.append(f"F0.{warm_up + index}")
    return " ".join(actions)


def test_other_shapes_in_the_planned_order(backend: str) -> None:
    chunks = make_chunks(1)
    manager = make_manager(backend)
    for rows in (7, 3, 12, 5, 5, 1):
        expected = run_schedule(chunks, SCHEDULES["accumulation"], None, rows)
        actual = run_schedule(chunks, SCHEDULES["accumulation"], manager, rows)
        assert all_equal(expected, actual)
    assert manager.report.num_plans == 1


@pytest.mark.parametrize("when", ["before the first step", "between steps", "between forwards"])
def test_forward_only_passes_change_nothing(backend: str, when: str) -> None:
    chunks = make_chunks(1)
    schedule = SCHEDULES["accumulation"]
    expected = run_schedule(chunks, schedule, None)
    manager = make_manager(backend)

    def evaluate(resets: bool = True) -> None:
        with torch.no_grad():
            chunks[0](micro_batch(99), manager)
        if resets:
            manager.reset()

    if when == "before the first step":
        evaluate()
    for _ in range(3):
        if when == "between forwards":
            x = micro_batch(0)
            y = chunks[0](x, manager)
            evaluate(resets=False)
            y.square().sum().backward()
            manager.reset()
        assert all_equal(expected, run_schedule(chunks, schedule, manager))
        if when == "between steps":
            evaluate()
    assert manager.report.total.num_late == 0
    assert manager.report.num_plans == (2 if when == "between forwards" else 1)


def test_a_restart_after_an_exception_is_logged(
    backend: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = make_chunks(1)
    manager = make_manager(backend)
    with monkeypatch.context() as patch:
        patch.setattr(chunks[0].layers[1], "first", None)  # In a region.
        with pytest.raises(TypeError):
            run_schedule(chunks, SCHEDULES["one micro-batch"], manager)
    gc.collect()
    with caplog.at_level(logging.WARNING):
        run_schedule(chunks, SCHEDULES["one micro-batch"], manager)
    assert "recording starts again" in caplog.text


def test_a_forward_whose_backward_never_comes_does_not_disturb_others(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    chunks = make_chunks(1)
    x = micro_batch(0)
    chunks[0](x, None).square().sum().backward()
    expected = x.grad
    chunks[0].zero_grad()
    manager = make_manager(backend)
    for _ in range(3):
        x = micro_batch(0)
        y = chunks[0](x, manager)
        dropped = chunks[0](micro_batch(1), manager)
        del dropped
        z = chunks[0](micro_batch(2), manager)
        y.square().sum().backward()
        z.sum().backward()
        manager.reset()
        assert x.grad is not None
        assert expected is not None
        assert torch.equal(x.grad, expected)
    assert "recording starts again" not in caplog.text, "the other pass waits for its backward"


def test_suspended_marks_do_nothing(backend: str) -> None:
    chunks = make_chunks(1)
    expected = run_schedule(chunks, SCHEDULES["accumulation"], None)
    manager = make_manager(backend)
    manager.disable_offload()
    assert all_equal(expected, run_schedule(chunks, SCHEDULES["accumulation"], manager))
    assert manager.report.num_iterations == 0
    manager.enable_offload()
    assert all_equal(expected, run_schedule(chunks, SCHEDULES["accumulation"], manager))
    assert manager.report.total.d2h_copies > 0


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputed_layers_beside_offloaded_ones(backend: str, use_reentrant: bool) -> None:
    chunk = make_chunks(1)[0]

    def run(manager: PipelineOffloadManager | None) -> list[torch.Tensor]:
        chunk.zero_grad(set_to_none=True)
        x = micro_batch(0)
        y = x
        if manager is not None:
            manager.init_model_chunk_offload_handler(0, None, 0, 1)
        for index, layer in enumerate(chunk.layers):
            if index == 1:
                y = checkpoint(layer, y, manager, use_reentrant=use_reentrant)
            else:
                y = layer(y, manager)
        y.square().sum().backward()
        if manager is not None:
            manager.reset()
        return [x.grad, *(p.grad for p in chunk.parameters())]  # type: ignore[list-item]

    expected = run(None)
    manager = make_manager(backend)
    for _ in range(3):
        assert all_equal(expected, run(manager))


class _SavingOnBothSides(torch.nn.Module):
    """A group between operations that save tensors of the same shape."""

    def forward(self, x: torch.Tensor, manager: PipelineOffloadManager | None) -> torch.Tensor:
        squared = torch.sin(x).square()
        if manager is None:
            y = torch.cos(squared)
        else:
            with offload_group(manager, "core_attn") as group:
                y = group.commit(torch.cos(squared))
        return torch.exp(0.1 * y) * torch.tanh(y)


def test_groups_inside_a_checkpoint_that_counts_what_is_saved(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    layer = _SavingOnBothSides()

    def run(manager: PipelineOffloadManager | None) -> list[torch.Tensor]:
        x = micro_batch(0)
        y = x
        if manager is not None:
            manager.init_model_chunk_offload_handler(0, None, 0, 1)
        for _ in range(3):
            y = checkpoint(layer, y, manager, use_reentrant=False)
        y.square().sum().backward()
        if manager is not None:
            manager.reset()
        return [x.grad]  # type: ignore[list-item]

    expected = run(None)
    manager = make_manager(backend)
    for _ in range(3):
        assert all_equal(expected, run(manager))
    assert manager.report.total.d2h_copies == 0
    assert caplog.text.count("runs under other saved-tensor hooks") == 1
    assert manager.plan is not None
    reasons = {group.reason for group in manager.plan.groups}
    assert reasons == {"it saves only tensors that other saved-tensor hooks take"}


def test_a_graph_kept_for_a_second_backward(backend: str) -> None:
    chunk = make_chunks(1)[0]

    def run(manager: PipelineOffloadManager | None) -> list[torch.Tensor]:
        chunk.zero_grad(set_to_none=True)
        x = micro_batch(0)
        y = chunk(x, manager).square().sum()
        y.backward(retain_graph=True)
        y.backward()
        if manager is not None:
            manager.reset()
        return [x.grad]  # type: ignore[list-item]

    expected = run(None)
    manager = make_manager(backend)
    for _ in range(3):
        assert all_equal(expected, run(manager))


def test_backward_after_the_iteration_was_closed(backend: str) -> None:
    chunk = make_chunks(1)[0]
    x = micro_batch(0)
    chunk(x, None).square().sum().backward()
    expected = x.grad
    manager = make_manager(backend)
    for _ in range(3):
        x = micro_batch(0)
        y = chunk(x, manager).square().sum()
        manager.reset()
        y.backward()
        assert expected is not None
        assert x.grad is not None
        assert torch.equal(x.grad, expected)


def _forward_that_keeps_results(chunk: Chunk, manager: PipelineOffloadManager) -> torch.Tensor:
    """Each group's result is saved by an operation that no group marks, too."""
    manager.init_model_chunk_offload_handler(0, None, 0, 1)
    y = micro_batch(0)
    for layer in chunk.layers:
        normed = layer.norm(y)
        with offload_group(manager, "first") as group:
            hidden = torch.exp(normed)
        y = group.commit(hidden).square()
    return y


def test_what_is_held_outside_stays_once_that_is_known(backend: str) -> None:
    """The first group's result is saved by an operation that no group marks."""
    chunk = make_chunks(1)[0]

    def step(manager: PipelineOffloadManager) -> None:
        y = _forward_that_keeps_results(chunk, manager)
        y.sum().backward()
        manager.reset()

    manager = make_manager(backend)
    step(manager)
    assert manager.report.total.d2h_copies > 0
    for _ in range(2):
        step(manager)
        assert manager.report.total.d2h_copies == 0
    assert "an operation outside the chosen modules holds it" in manager.report.plan


def test_what_is_known_to_be_held_outside_stays_without_a_plan_too(backend: str) -> None:
    chunk = make_chunks(1)[0]
    manager = make_manager(backend)
    for num_passes in (1, 2):
        outputs = []
        for _ in range(num_passes):
            outputs.append(_forward_that_keeps_results(chunk, manager))
            manager.engine.mark_gradient(StepKind.BACKWARD_START, [outputs[-1]])
        for output in outputs:
            output.sum().backward()
        manager.reset()
        assert manager.report.num_plans == num_passes, "one for each number of passes"
        assert (manager.report.total.d2h_copies > 0) is (num_passes == 1)


@pytest.mark.parametrize("has_head", [False, True], ids=["first stage", "last stage"])
def test_what_the_last_groups_saved_is_learnt_too(backend: str, has_head: bool) -> None:
    """In the recorded iteration nothing that comes after them pushes them out."""
    chunk = make_chunks(1)[0]

    def step(manager: PipelineOffloadManager) -> None:
        y = _forward_that_keeps_results(chunk, manager)
        if has_head:
            manager.engine.mark_output(StepKind.OUTPUT_START)
            y = 2 * y
            manager.engine.mark_output(StepKind.OUTPUT_END)
        manager.engine.mark_gradient(StepKind.BACKWARD_START, [y])
        y.sum().backward()
        manager.reset()

    manager = make_manager(backend)
    step(manager)
    assert len(manager.engine.recorder.held_outside) == len(chunk.layers)
    for _ in range(2):
        step(manager)
        assert manager.report.total.d2h_copies == 0


def test_what_the_last_group_saved_and_others_hold_for_a_while_is_learnt_too(backend: str) -> None:
    """The last layer's output stays a local variable until the loss is computed."""
    chunk = make_chunks(1)[0]
    manager = make_manager(backend)
    manager.store.backend.memory = lambda: (0, 0)  # type: ignore[method-assign]
    manager.init_model_chunk_offload_handler(0, None, 0, 1)
    y = micro_batch(0)
    for layer in chunk.layers:
        with offload_group(manager, "first") as group:
            y = layer.up(y).chunk(2, dim=-1)[0].tanh()
        y = group.commit(y)
    manager.engine.mark_output(StepKind.OUTPUT_START)
    loss = y.sum()
    manager.engine.mark_output(StepKind.OUTPUT_END)
    del y
    manager.engine.mark_gradient(StepKind.BACKWARD_START, [loss])
    loss.backward()
    manager.reset()
    assert manager.plan is not None
    trace = manager.plan.trace
    begins = next(i for i, s in enumerate(trace.steps) if s.kind is StepKind.BACKWARD_START)
    lingers = [storage.lingers_until for storage in trace.storages]
    assert lingers[-1] == begins
    assert set(lingers[1:-1]) == {0}  # The first one is the input, which has another reference.


def test_a_commit_without_a_start_is_ignored(backend: str) -> None:
    manager = make_manager(backend)
    manager.init_model_chunk_offload_handler(0, None, 0, 1)
    x = micro_batch(0)
    y = offload_group(manager, "core_attn").commit(x)
    y.sum().backward()
    manager.reset()
    assert manager.report.num_iterations == 0


def run_iteration(chunk: Chunk, manager: PipelineOffloadManager, fraction: float) -> None:
    """One micro-batch, of whose groups ``fraction`` move."""
    manager.init_model_chunk_offload_handler(0, None, 0, 1, 0, fraction)
    y = micro_batch(0)
    for layer in chunk.layers:
        y = layer(y, manager)
    y.sum().backward()
    manager.reset()


def test_fraction_zero_moves_nothing_after_recording(backend: str) -> None:
    chunk = make_chunks(1)[0]
    manager = make_manager(backend)
    for _ in range(2):
        run_iteration(chunk, manager, fraction=0.0)
    assert manager.report.total.d2h_copies == 0
    assert "activation_offload_fraction keeps it" in manager.report.plan


def test_what_groups_save_that_stay_is_not_looked_at(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (chunk,) = make_chunks(1)
    manager = make_manager(backend, activation_offload_fraction=0.5)
    looked_at = set()
    hooks = manager.store.hooks

    def watching(group: OffloadTensorGroup, reader: object) -> object:
        looked_at.add(group.key)
        return hooks(group, reader)

    monkeypatch.setattr(manager.store, "hooks", watching)
    for _ in range(2):
        looked_at.clear()
        run_iteration(chunk, manager, fraction=0.5)
    assert manager.plan is not None
    assert looked_at == {group.key for group in manager.plan.groups if group.moves}
    assert 0 < len(looked_at) < len(manager.plan.groups)


def test_all_that_is_being_copied_out_can_be_released_at_once(backend: str) -> None:
    (chunk,) = make_chunks(1)
    manager = make_manager(backend, release_lag=2)
    x = micro_batch(0)
    chunk(x, None).square().sum().backward()
    expected, x.grad = x.grad, None
    loss = chunk(x, manager).square().sum()

    def residences() -> set[Residence]:
        groups = manager.engine.now.groups.values()
        return {storage.residence for group in groups for storage in group.storages()}

    assert residences() == {Residence.OFFLOADING, Residence.HOST}
    manager.store.release_all(manager.engine.now.groups.values())
    assert residences() == {Residence.HOST}
    loss.backward()
    manager.reset()
    assert expected is not None
    assert x.grad is not None
    assert torch.equal(x.grad, expected)


def test_what_a_layer_has_marked_stays(backend: str) -> None:
    copied = []
    for is_marked in (False, True):
        manager = make_manager(backend)
        manager.init_model_chunk_offload_handler(0, None, 0, 1)
        hidden = micro_batch(0) + 1.0
        if is_marked:
            manager.mark_not_offload(hidden)
        with offload_group(manager, "first") as group:
            hidden = hidden.square()
        group.commit(hidden).sum().backward()
        manager.reset()
        copied.append(manager.report.total.d2h_copies)
        manager.mark_not_offload(None)
    assert copied == [1, 0]


def test_closing_returns_all_host_memory(backend: str) -> None:
    manager = make_manager(backend)
    run_schedule(make_chunks(1), SCHEDULES["accumulation"], manager)
    assert manager.store.host_pool.allocated_bytes > 0
    manager.close()
    assert manager.store.host_pool.allocated_bytes == 0


def test_memory_that_lingers_after_it_was_let_go_is_learnt(backend: str) -> None:
    """The input stays a local variable until forward has returned, as megatron-core's does."""
    chunk = make_chunks(1, num_layers=4)[0]

    def step(manager: PipelineOffloadManager) -> None:
        manager.init_model_chunk_offload_handler(0, None, 0, 1)
        local = micro_batch(0).detach() * 2
        y = local
        for layer in chunk.layers:
            with offload_group(manager, "first") as group:
                y = layer.up(y).chunk(2, dim=-1)[0].tanh()
            y = group.commit(y)
        loss = y.sum()
        del local
        loss.backward()
        manager.reset()

    manager = make_manager(backend)
    manager.store.backend.memory = lambda: (0, 0)  # type: ignore[method-assign]
    step(manager)
    assert manager.plan is not None
    trace = manager.plan.trace
    first_use = next(i for i, s in enumerate(trace.steps) if s.kind is StepKind.BACKWARD_USE)
    lingers = [storage.lingers_until for storage in trace.storages]
    assert lingers[0] == first_use, "its memory is there until backward begins"
    moved = {storage.index: storage for storage in manager.plan.storages}
    assert moved[0].free_step < first_use == moved[0].gone_step(trace)
    assert set(lingers[1:]) == {0}


def _run_with_marks(
    manager: PipelineOffloadManager, chunk: Chunk, num_backwards: int = 1, iterations: int = 1
) -> list[str]:
    """The marks of no group, of the last of some iterations of one micro-batch."""
    for _ in range(iterations):
        output = chunk(micro_batch(0), manager)
        doubled = 2 * output
        manager.engine.mark_gradient(StepKind.BACKWARD_START, [output.detach(), output, doubled])
        for index in range(num_backwards):
            (output + doubled).sum().backward(retain_graph=index + 1 < num_backwards)
        steps = (
            manager.plan.trace.steps if manager.plan is not None else manager.engine.recorder.steps
        )
        found = [str(step) for step in steps if not step.is_of_group]
        manager.reset()
    return found


def test_backward_begins_once_and_where_gradients_are(backend: str) -> None:
    (chunk,) = make_chunks(1)
    manager = make_manager(backend)
    assert _run_with_marks(manager, chunk) == ["0.backward:BS"]
    assert _run_with_marks(manager, chunk, iterations=3) == ["0.backward:BS"]
    assert _run_with_marks(manager, chunk, num_backwards=2) == ["0.backward:BS"]
    assert manager.report.num_plans == 1


def test_backward_of_an_iteration_that_has_ended_marks_nothing(backend: str) -> None:
    (chunk,) = make_chunks(1)
    manager = make_manager(backend)
    late = chunk(micro_batch(0), manager)
    manager.engine.mark_gradient(StepKind.BACKWARD_START, [late])
    manager.reset()
    output = chunk(micro_batch(1), manager)
    num_steps = manager.engine.now.num_steps
    late.sum().backward()
    assert manager.engine.now.num_steps == num_steps
    output.sum().backward()
    manager.reset()


def test_passes_without_groups_or_gradients_have_no_such_marks(backend: str) -> None:
    (chunk,) = make_chunks(1)
    manager = make_manager(backend)
    weight = torch.ones(3, requires_grad=True)
    manager.engine.mark_gradient(StepKind.BACKWARD_START, [weight * 2])  # no pass at all
    manager.init_model_chunk_offload_handler(0, None, None)
    doubled = weight * 2
    manager.engine.mark_gradient(StepKind.BACKWARD_START, [doubled])
    doubled.sum().backward()
    assert manager.engine.now.num_steps == 0
    chunk(micro_batch(0), manager)
    num_steps = manager.engine.now.num_steps
    assert num_steps > 0
    doubled = weight * 2
    with torch.no_grad():
        manager.engine.mark_gradient(StepKind.BACKWARD_START, [doubled])
    manager.disable_offload()
    manager.engine.mark_gradient(StepKind.BACKWARD_START, [doubled])
    doubled.sum().backward()
    assert manager.engine.now.num_steps == num_steps


def test_an_iteration_that_graphs_replay_whole_moves_nothing_outside(backend: str) -> None:
    manager = make_manager(backend)
    chunks = make_chunks(1)
    run_schedule(chunks, SCHEDULES["one micro-batch"], manager)
    assert manager.report.d2h_bytes > 0
    manager.graphs.of_layers[GraphId(0, 1, 0, ONE_SIZE)] = ReplayedGraph({})
    manager.init_model_chunk_offload_handler(0, None, 0, 1)  # replays mark nothing
    manager.reset()
    assert manager.report.d2h_bytes == 0
    assert manager.report.num_iterations == 2


def test_an_iteration_whose_chunks_are_replayed_moves_what_its_graphs_do() -> None:
    manager = make_manager("cpu")
    manager.engine.wanted_modules = ("first", "second")
    run_schedule(make_chunks(), "F0.0 B0.0", manager)
    assert manager.plan is not None
    moved = manager.report.modules
    assert sum(counters.d2h_bytes for counters in moved.values()) > 0
    passes = [ReplayedPass(moved, plan=manager.plan, host_bytes=nbytes) for nbytes in (5, 7)]
    manager.engine.replayed.update(
        {f"model chunk {index}": each for index, each in enumerate(passes)}
    )
    assert manager.report.graphs == {}, "not in the last iteration"
    manager.init_model_chunk_offload_handler(0, None, 1)
    passes[0].num_replays, passes[1].num_replays = 3, 1
    manager.reset()
    report = manager.report
    assert report.num_iterations == 2
    assert report.modules == {}, "nothing moves outside of the graphs"
    for name, counters in moved.items():
        assert vars(report.graphs[name]) == {key: 4 * n for key, n in vars(counters).items()}
    assert report.graph_host_bytes == 12
    manager.finish_report()
    assert [line for line in report.plan.splitlines() if "chunk" in line] == [
        "model chunk 0:",
        "model chunk 1:",
    ]
    assert report.absent_modules == []
    manager.init_model_chunk_offload_handler(0, None, 1)
    manager.reset()
    assert [item.d2h_bytes for item in manager.report.graphs.values()] == [0, 0], "no replays"
    manager.finish_report()
    assert manager.report.absent_modules == []
