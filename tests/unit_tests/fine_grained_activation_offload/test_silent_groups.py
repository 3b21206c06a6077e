# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Groups that stay cost nothing in backward, as long as all iterations are alike."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Optional

import pytest
import torch
from hand_driven import LAZY_NATIVE
from marked_group import run_in_group
from toy_model import WIDTH, Chunk, all_equal, make_chunks, make_manager, run_schedule

from megatron.slipstream.integration.seam.manager import PipelineOffloadManager
from megatron.slipstream.plan.trace import KINDS_OF_BACKWARD, StepKind

ONE, TWO = "F0.0 B0.0", "F0.0 F0.1 B0.0 B0.1"
NUM_ALIKE = 3
"""Iterations after which marks are left out."""
NUM_GROUPS = 6
TOO_LARGE = 10**6
"""No tensor has so many elements, so all groups stay."""


class StayingChunk(Chunk):
    """A chunk whose groups all stay. It keeps its last output."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        super().__init__(num_layers=3)
        self.output: Any = None

    def forward(
        self, x: torch.Tensor, manager: Optional[PipelineOffloadManager] = None
    ) -> torch.Tensor:
        if manager is not None:
            manager.init_model_chunk_offload_handler(0, None, self.vp_stage, TOO_LARGE)
        x = x * 2  # The input of the first group is no leaf.
        for layer in self.layers:
            hidden = run_in_group(manager, "first", layer.first, layer.norm(x))
            x = x + run_in_group(manager, "second", layer.second, hidden)
        self.output = x
        return x

    def num_marks(self) -> int:
        """The number of groups that backward of the last output marks."""
        return sum("Mark" in node.name() for node in _nodes(self.output.grad_fn))


def _nodes(node: Any) -> Iterator[Any]:
    seen, waiting = set(), [node]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting.extend(before for before, _ in node.next_functions)


def run(chunk: StayingChunk, manager: PipelineOffloadManager, schedule: str = ONE) -> int:
    """Run an iteration. Returns the number of marks in its last backward pass."""
    expected = run_schedule([chunk], schedule, None)
    assert all_equal(expected, run_schedule([chunk], schedule, manager))
    return chunk.num_marks()


@pytest.fixture
def silent() -> tuple[StayingChunk, PipelineOffloadManager]:
    """A chunk whose marks are left out from now on, and its engine."""
    chunk, manager = StayingChunk(), make_manager(LAZY_NATIVE)
    assert [run(chunk, manager) for _ in range(NUM_ALIKE)] == [NUM_GROUPS] * NUM_ALIKE
    return chunk, manager


def test_marks_are_left_out_and_the_plan_is_followed(silent: Any) -> None:
    chunk, manager = silent
    for _ in range(3):
        assert run(chunk, manager) == 1, "the first group starts in Python"
        assert manager.engine.lifecycle.next.plan is manager.plan is not None
        assert manager.report.num_plans == 1
        assert manager.report.modules["first"].num_groups == 3


def test_in_python_none_is_left_out() -> None:
    chunk, manager = StayingChunk(), make_manager("cpu-lazy")
    for _ in range(NUM_ALIKE + 2):
        assert run(chunk, manager) == NUM_GROUPS


def test_an_iteration_that_departs_is_planned_when_it_comes_again(silent: Any) -> None:
    chunk, manager = silent
    run(chunk, manager, TWO)
    assert manager.engine.lifecycle.next is None, "some of its marks are unknown"
    assert run(chunk, manager, TWO) == NUM_GROUPS, "it is recorded"
    assert manager.report.num_plans == 2
    for _ in range(NUM_ALIKE + 1):
        assert run(chunk, manager, TWO) == NUM_GROUPS, "another iteration may differ again"
    num_steps = len(manager.plan.trace.steps)
    run(chunk, manager)
    assert len(manager.plan.trace.steps) == num_steps // 2, "it departs to the first plan"
    assert manager.report.num_plans == 2


@pytest.mark.parametrize("backend", ["cpu-lazy", LAZY_NATIVE])
@pytest.mark.parametrize("other", [TWO, "F0.0 F0.1 F0.2 B0.0 B0.1 B0.2"], ids=["two", "three"])
def test_an_isolated_iteration_is_planned(backend: str, other: str) -> None:
    """It comes each time after as many others as leave out marks."""
    chunk, manager = StayingChunk(), make_manager(backend)
    for _ in range(3):
        for _ in range(2 * NUM_ALIKE):
            run(chunk, manager)
        run(chunk, manager, other)
    assert manager.report.num_plans == 2
    assert manager.plan is not None
    num_passes = {key.chunk_pass for key in manager.plan.trace.group_by_key}
    assert len(num_passes) == other.count("F"), "the last iteration had its plan"
    assert manager.engine.lifecycle.next is not None


@pytest.mark.parametrize("backend", ["cpu-lazy", LAZY_NATIVE])
def test_an_iteration_without_backward_is_another_while_marks_are_set(backend: str) -> None:
    """Steps of groups that stay are skipped only where their marks are left out."""
    chunk, manager = StayingChunk(), make_manager(backend)
    for schedule in (ONE, TWO) * (2 * NUM_ALIKE):
        run(chunk, manager, schedule)
    num_plans = manager.report.num_plans
    _output = chunk(torch.randn(7, WIDTH, requires_grad=True), manager)
    manager.reset()
    assert manager.report.num_plans == num_plans + 1
    assert manager.plan is not None
    assert {step.kind for step in manager.plan.trace.steps}.isdisjoint(KINDS_OF_BACKWARD)


def test_an_iteration_that_ends_early_is_planned(silent: Any) -> None:
    chunk, manager = StayingChunk(), make_manager(LAZY_NATIVE)
    accumulation = "F0.0 B0.0 F0.1 B0.1"
    for _ in range(NUM_ALIKE + 1):
        num_marks = run(chunk, manager, accumulation)
    assert num_marks == 0
    num_steps = len(manager.plan.trace.steps)  # type: ignore[union-attr]
    run(chunk, manager)
    assert manager.plan is not None
    assert len(manager.plan.trace.steps) == num_steps // 2
    assert manager.report.num_plans == 2


def test_offloading_is_suspended_between_forward_and_backward(silent: Any) -> None:
    chunk, manager = silent
    x = torch.randn(7, WIDTH, requires_grad=True)
    (expected,) = torch.autograd.grad(chunk(x).sum(), x)
    output = chunk(x, manager)
    manager.disable_offload()
    (actual,) = torch.autograd.grad(output.sum(), x)
    manager.enable_offload()
    manager.reset()
    assert torch.equal(expected, actual)
    assert manager.engine.lifecycle.next is None, "some of its marks are unknown"
    assert run(chunk, manager) == NUM_GROUPS
    assert manager.report.num_plans == 1, "it is the first one again"


def test_a_group_is_silent_where_nothing_is_due_in_its_backward() -> None:
    manager, chunks = make_manager("cpu"), make_chunks()
    run_schedule(chunks, ONE, manager)
    plan = manager.plan
    assert plan is not None
    names = {group.key: group.name for group in plan.groups if not group.moves}
    assert sorted(names.values()) == ["first", "second"], "the last layer stays"
    # The use of its first group, which backward reaches last, starts the next copy back.
    assert [names[key] for key in plan.silent] == ["second"]
    due = [
        step.key
        for step, actions in zip(plan.trace.steps, plan.actions, strict=True)
        if actions and step.kind in KINDS_OF_BACKWARD
    ]
    assert not plan.silent.intersection(due)
    assert any(step.kind is StepKind.BACKWARD_USE for step in plan.trace.steps)
