# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Layers captured one by one, as graphs are: what moves in them, when, and that it is right.

The adversary stands for the GPU: a wait across the border of a graph is not made, so what one graph
needs of another has to have been joined to that one's end.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, Optional
from unittest.mock import Mock

import pytest
import torch
from hand_driven import LAZY_NATIVE
from toy_model import SCHEDULES, WIDTH, Chunk, all_equal, make_chunks, make_manager, run_schedule

from megatron.slipstream.fine_grained_activation_offload.graph_capture import (
    ONE_SIZE,
    GraphedLayer,
    GraphId,
    _takes_turns,
)
from megatron.slipstream.fine_grained_activation_offload.report import Report
from megatron.slipstream.fine_grained_activation_offload.verify import Verifier
from megatron.slipstream.integration.seam.manager import PipelineOffloadManager

NUM_LAYERS = 4


class Captured:
    """One pass of a model chunk, layer by layer, each with a graph for forward and for backward."""

    def __init__(self, chunk: Chunk, manager: Optional[PipelineOffloadManager]) -> None:
        self.chunk = chunk
        self.manager = manager
        self.layers: list[tuple[torch.Tensor, torch.Tensor, Optional[GraphedLayer]]] = []
        self.log: list[str] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        graphs = self.manager.graphs if self.manager else None
        for number, layer in enumerate(self.chunk.layers):
            x = x.detach().requires_grad_()
            graphed = graphs.begin_forward(self.chunk.vp_stage, number, [x]) if graphs else None
            output = layer(x, self.manager)
            if graphs:
                graphs.end_forward(lambda number=number: self.log.append(f"forward {number}"))
            self.layers.append((x, output, graphed))
            x = output
        return x

    def backward(self, grad: torch.Tensor) -> torch.Tensor:
        graphs = self.manager.graphs if self.manager else None
        for number in reversed(range(len(self.layers))):
            x, output, graphed = self.layers.pop()
            if graphs:
                graphs.begin_backward(graphed)
            output.backward(grad)
            if graphs:
                graphs.end_backward(lambda number=number: self.log.append(f"backward {number}"))
            assert x.grad is not None
            grad = x.grad
        return grad


def warm_up(chunks: list[Chunk], manager: PipelineOffloadManager) -> None:
    """A layer's steps before it is captured."""
    manager.graphs.open(manager.plan)
    for chunk in chunks:
        for layer in chunk.layers:
            manager.disable_offload()
            layer(torch.ones(2, WIDTH), manager)
            manager.enable_offload()
            manager.graphs.reserve()


def trained(chunks: list[Chunk], backend: str, schedule: str, fraction: float = 1.0) -> Any:
    """An engine with a plan. Models pass the fraction when a pass begins."""
    manager = make_manager(backend)
    manager.init_model_chunk_offload_handler = partial(  # type: ignore[method-assign]
        manager.init_model_chunk_offload_handler, activation_offload_fraction=fraction
    )
    for _ in range(3):
        run_schedule(chunks, SCHEDULES[schedule], manager)
    return manager


def step(chunks: list[Chunk], manager: Optional[PipelineOffloadManager], order: str) -> list[Any]:
    """Passes in an order such as 'F0 F1 B1 B0' (of these chunks); outputs and gradients."""
    for chunk in chunks:
        chunk.zero_grad()
    torch.manual_seed(3)
    passes: dict[str, Captured] = {}
    results = []
    for kind, name in ((item[0], item[1:]) for item in order.split()):
        if kind == "F":
            passes[name] = Captured(chunks[int(name[0])], manager)
            results.append(passes[name].forward(torch.randn(8, WIDTH)).detach())
        else:
            results.append(passes.pop(name).backward(torch.randn(8, WIDTH)))
    results += [parameter.grad for chunk in chunks for parameter in chunk.parameters()]
    return results


ORDERS = {
    "one micro-batch": (1, "F0 B0"),
    "1F1B first of two": (1, "F0a F0b B0a F0c B0b B0c"),
    "interleaved first of two": (2, "F0a F0b F1a F1b B1a B0a B1b B0b"),
}


@pytest.mark.parametrize("backend", ["cpu-lazy", LAZY_NATIVE])
@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("schedule", ORDERS)
def test_results_are_those_without_offloading(backend: str, fraction: float, schedule: str) -> None:
    num_chunks, order = ORDERS[schedule]
    chunks = make_chunks(num_chunks, NUM_LAYERS)
    expected = step(chunks, None, order)
    manager = trained(chunks, backend, schedule, fraction)
    warm_up(chunks, manager)
    result = step(chunks, manager, order)
    manager.graphs.close()
    assert all_equal(expected, result)
    assert manager.graphs.moves_anything is (fraction > 0)


def test_a_layer_is_back_before_its_own_graph_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = make_chunks(1, NUM_LAYERS)
    manager = trained(chunks, "cpu-lazy", "one micro-batch")
    warm_up(chunks, manager)
    captured = Captured(chunks[0], manager)
    captured.forward(torch.randn(8, WIDTH))
    away = [
        [storage.residence.name for group in graphed.groups for storage in group.storages()]
        for _, _, graphed in captured.layers
        if graphed is not None
    ]
    assert all("HOST" in names for names in away[:-1])
    captured.backward(torch.randn(8, WIDTH))
    counters = list(manager.graphs.modules.values())
    assert sum(item.num_late for item in counters) == 0
    assert sum(item.d2h_copies for item in counters) == sum(item.h2d_copies for item in counters)
    # Others go on when all is computed, and the graph ends when all is copied.
    assert captured.log == [f"forward {n}" for n in range(NUM_LAYERS)] + [
        f"backward {n}" for n in reversed(range(NUM_LAYERS))
    ]


@pytest.mark.parametrize("has_marks", [True, False], ids=["marks outside too", "graphs only"])
def test_the_report_tells_what_graphs_move(has_marks: bool) -> None:
    chunks = make_chunks(1, NUM_LAYERS)
    manager = trained(chunks, "cpu", "one micro-batch")
    assert manager.report.graphs == {}
    assert "graphs" not in Report([manager.report]).render()
    warm_up(chunks, manager)
    step(chunks, manager, "F0 B0")
    manager.graphs.close()
    of_one = manager.graphs.modules
    for graph in [*manager.graphs.of_layers] * 2 + [GraphId(0, 99, 0, ONE_SIZE)]:
        manager.graphs.note_replay(graph)  # Two micro-batches, and one that was not captured.
    if has_marks:
        run_schedule(chunks, SCHEDULES["one micro-batch"], manager)
    else:
        manager.init_model_chunk_offload_handler(0, None, None)
        manager.reset()
    report = Report([manager.report])
    assert manager.report.graphs["first"].d2h_bytes == 2 * of_one["first"].d2h_bytes > 0
    assert manager.report.graph_host_bytes == manager.graphs.host_bytes > 0
    assert "first, in graphs" in report.render()
    assert "more for CUDA graphs" in report.render()
    assert Report.from_json(report.to_json()) == report


def test_graphs_move_what_the_plan_moves() -> None:
    chunks = make_chunks(1, NUM_LAYERS)
    manager = trained(chunks, "cpu", "one micro-batch")
    plan = manager.plan
    warm_up(chunks, manager)
    step(chunks, manager, "F0 B0")
    moved = {
        name: sum(group.moves for group in plan.groups if group.name == name)
        for name in ("first", "second")
    }
    assert {n: c.num_groups_moved for n, c in manager.graphs.modules.items()} == moved


def test_nothing_moves_where_nothing_was_planned(caplog: pytest.LogCaptureFixture) -> None:
    chunks = make_chunks(1, NUM_LAYERS)
    manager = make_manager("cpu-lazy")
    expected = step(chunks, None, "F0 B0")
    warm_up(chunks, manager)
    assert all_equal(expected, step(chunks, manager, "F0 B0"))
    assert not manager.graphs.moves_anything
    assert "cuda_graph_warmup_steps" in caplog.text


@pytest.mark.parametrize("backend", ["cpu-lazy", LAZY_NATIVE])
def test_host_memory_of_graphs_serves_nothing_else(backend: str) -> None:
    chunks = make_chunks(1, NUM_LAYERS)
    manager = trained(chunks, backend, "one micro-batch")
    warm_up(chunks, manager)
    baked: set[int] = set()
    copy_out = manager.store.copy_streams.copy_out

    def noting(moves: Any, *rest: Any, **options: Any) -> Any:
        baked.update(allocation.buffer.address for _, allocation in moves)
        return copy_out(moves, *rest, **options)

    manager.store.copy_streams.copy_out = noting
    step(chunks, manager, "F0 B0")
    manager.graphs.close()
    in_graphs, (pool,) = set(baked), manager.graphs.pools
    assert in_graphs
    assert pool is not manager.store.host_pool
    baked.clear()
    expected = run_schedule(chunks, SCHEDULES["accumulation"], None)
    assert all_equal(expected, run_schedule(chunks, SCHEDULES["accumulation"], manager))
    assert baked
    assert not baked & in_graphs


@pytest.mark.parametrize("backend", ["cpu-lazy", LAZY_NATIVE])
def test_without_enough_host_memory_groups_stay(backend: str) -> None:
    chunks = make_chunks(1, NUM_LAYERS)
    expected = step(chunks, None, "F0 B0")
    manager = trained(chunks, backend, "one micro-batch")
    warm_up(chunks, manager)
    manager.graphs.pools[0].limit_bytes = 0
    manager.graphs.pools[0].close()
    assert all_equal(expected, step(chunks, manager, "F0 B0"))
    assert not manager.graphs.moves_anything
    assert sum(c.num_kept_for_host_memory for c in manager.graphs.modules.values()) > 0


def test_graphs_that_are_captured_again_get_the_host_memory_of_those_before() -> None:
    chunks = make_chunks(1, NUM_LAYERS)
    expected = step(chunks, None, "F0 B0")
    manager = trained(chunks, "cpu-lazy", "one micro-batch")
    outside = manager.store.host_pool
    limit_bytes = outside.limit_bytes = 2 * outside.allocated_bytes
    moved_bytes = []
    for _ in range(4):
        warm_up(chunks, manager)
        assert all_equal(expected, step(chunks, manager, "F0 B0"))
        manager.graphs.close()
        assert outside.limit_bytes + manager.graphs.host_bytes == limit_bytes
        moved_bytes.append(sum(c.d2h_bytes for c in manager.graphs.modules.values()))
    assert moved_bytes == [moved_bytes[0]] * 4
    assert moved_bytes[0] > 0


def test_host_memory_that_graphs_were_refused_is_not_taken_from_others() -> None:
    chunks = make_chunks(1, NUM_LAYERS)
    manager = trained(chunks, "cpu-lazy", "one micro-batch")
    outside = manager.store.host_pool
    limit_bytes = outside.limit_bytes = 2 * outside.allocated_bytes
    backend = manager.store.backend
    backend.allocate_host = Mock(side_effect=MemoryError)  # type: ignore[method-assign]
    warm_up(chunks, manager)
    assert manager.graphs.host_bytes == 0
    assert outside.limit_bytes == limit_bytes


def test_inputs_of_a_graph_stay() -> None:
    """A graph keeps its inputs permanently, so that copying them out frees nothing."""
    chunks = make_chunks(1, NUM_LAYERS)
    manager = trained(chunks, "cpu-lazy", "one micro-batch")
    warm_up(chunks, manager)
    graphs, layer = manager.graphs, chunks[0].layers[0]
    x = torch.randn(8, WIDTH, requires_grad=True)
    kept = x * 2
    graphs.begin_forward(0, 0, [kept])
    manager.pop_forward_chunk("first")
    with manager:
        out = layer.down(kept)
    mark = manager.cur_forward_chunk()
    mark.on_group_commit_forward("first")
    graphs.end_forward(lambda: None)
    graphs.begin_forward(0, 1, [])
    graphs.end_forward(lambda: None)
    assert graphs.modules["first"].num_groups_moved == 0
    out.sum().backward()


def test_training_goes_on_without_graphs_afterwards() -> None:
    chunks = make_chunks(1, NUM_LAYERS)
    manager = trained(chunks, "cpu-lazy", "accumulation")
    warm_up(chunks, manager)
    step(chunks, manager, "F0 B0")
    expected = run_schedule(chunks, SCHEDULES["accumulation"], None)
    for _ in range(4):
        assert all_equal(expected, run_schedule(chunks, SCHEDULES["accumulation"], manager))
    assert not manager.graphs.is_open


def test_a_set_of_graphs_moves_what_moves_in_any_of_its_micro_batches() -> None:
    chunks = make_chunks(1, NUM_LAYERS)
    manager = trained(chunks, "cpu-lazy", "1F1B first of two")
    graphs, plan = manager.graphs, manager.plan
    needed = []
    for num_sets in (1, 2, 4):
        graphs.open(plan, (num_sets,))
        numbers = {number for _, number, _, _ in graphs._decisions}
        assert numbers == set(range(num_sets))
        assert {len(plans) for plans in graphs._decisions.values()} == {4 // num_sets}
        for name in {name for _, _, name, _ in graphs._decisions}:
            graphs.note_warmup(name)
        for number in range(num_sets):
            graphs.begin_set(0, number, True, manager.store.new_host_pool(0))
            needed.append(graphs._needed_bytes())
        graphs.close()
    assert min(needed) > 0
    assert max(needed) == needed[0]  # A set of all micro-batches moves what any of them moves.


def test_the_last_layer_of_each_chunk_is_known() -> None:
    chunks = make_chunks(2, NUM_LAYERS)
    manager = trained(chunks, "cpu", "interleaved first of two")
    warm_up(chunks, manager)
    step(chunks, manager, ORDERS["interleaved first of two"][1])
    manager.graphs.close()
    last = [[manager.graphs.is_last(stage, n) for n in range(NUM_LAYERS)] for stage in range(2)]
    assert last == [[False] * (NUM_LAYERS - 1) + [True]] * 2


def test_a_capture_that_the_engine_knows_nothing_of_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """megatron-core's layers would wait for the copy stream, which is not captured: no graph."""
    manager = make_manager("cpu")
    assert manager.d2h_stream is not None
    monkeypatch.setattr(manager.store.backend, "is_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="megatron.slipstream.with_graph_offloading"):
        manager.d2h_stream  # noqa: B018


def test_a_capture_without_warm_up_is_refused() -> None:
    manager = make_manager("cpu")
    manager.graphs.open(None)
    with pytest.raises(RuntimeError, match="has not been warmed up"):
        manager.graphs.begin_forward(0, 0, [])


def test_every_storage_is_freed() -> None:
    chunks = make_chunks(1, NUM_LAYERS)
    manager = trained(chunks, "cpu-lazy", "one micro-batch")
    warm_up(chunks, manager)
    step(chunks, manager, "F0 B0")
    manager.graphs.close()
    assert all(known() is None for known in manager.store._by_memory.values())
    assert manager.graphs.pools[0].in_use_bytes == 0


def test_one_set_for_all_micro_batches_moves_what_moves_in_any_of_them() -> None:
    chunks = make_chunks(1, NUM_LAYERS)
    moved = []
    for first_stays in (False, True):
        manager = trained(chunks, "cpu", "accumulation")
        plan = manager.plan
        if first_stays:
            groups = [
                dataclasses.replace(group, moves=False, reason="stays")
                if group.key.chunk_pass == 0
                else group
                for group in plan.groups
            ]
            manager.engine.lifecycle.last.plan = dataclasses.replace(plan, groups=tuple(groups))
        warm_up(chunks, manager)
        step(chunks, manager, "F0 B0")
        manager.graphs.close()
        moved.append(manager.graphs.modules["first"].num_groups_moved)
    assert moved[0] == moved[1] > 0


def test_micro_batches_that_take_turns_are_told_from_those_in_flight_at_once() -> None:
    """One that is taken for the other would share its host memory, and follow its decisions."""
    plans = {name: trained(make_chunks(2, 1), "cpu", name).plan for name in SCHEDULES}
    take_turns = {name for name, plan in plans.items() if _takes_turns(plan)}
    assert take_turns == {"one micro-batch", "accumulation"}


def test_a_graph_neither_verifies_nor_fills_what_it_releases() -> None:
    """It would do so in each replay; a host that compares bytes would end the capture."""
    chunks = make_chunks(1, NUM_LAYERS)
    manager = trained(chunks, "cpu", "one micro-batch")
    store = manager.store
    store.verifier = verifier = Verifier(store.backend)
    warm_up(chunks, manager)
    seen = []
    drop = store.backend.drop_device

    def noting(storage: torch.UntypedStorage) -> None:
        seen.append((store.verifier, store.backend.poisons_dropped))
        drop(storage)

    store.backend.drop_device = noting  # type: ignore[method-assign]
    step(chunks, manager, "F0 B0")
    assert seen
    assert set(seen) == {(None, False)}
    assert store.verifier is verifier
    assert store.backend.poisons_dropped
