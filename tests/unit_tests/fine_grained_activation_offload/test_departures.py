# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""An iteration that departs from its plan: what the plan had begun is carried on from there."""

from __future__ import annotations

from typing import Optional

import pytest
from hand_driven import LAZY_NATIVE
from toy_model import all_equal, make_chunks, make_manager, run_schedule

from megatron.slipstream.fine_grained_activation_offload.report import ModuleCounters
from megatron.slipstream.integration.seam.manager import PipelineOffloadManager

LONG = "F0.0 F0.1 F0.2 B0.0 F0.3 B0.3 B0.2 B0.1"
UNKNOWN = "F0.0 F0.1 F0.2 F0.3 B0.0 B0.1 B0.2 B0.3"


@pytest.fixture(params=["cpu", "cpu-lazy", LAZY_NATIVE])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def figures(manager: PipelineOffloadManager, schedule: str) -> ModuleCounters:
    """Those of an iteration, which computes what it does without the engine."""
    chunks = make_chunks()
    expected = run_schedule(chunks, schedule, None)
    assert all_equal(expected, run_schedule(chunks, schedule, manager))
    return manager.report.total


def bytes_that_left_in_vain(total: ModuleCounters) -> int:
    """Copied out, and on the device until backward."""
    return total.d2h_bytes - total.freed_bytes


def plan_steps(manager: PipelineOffloadManager) -> Optional[tuple[object, ...]]:
    """Of the plan that the next iteration begins with."""
    return (
        None
        if manager.engine.lifecycle.next is None
        else manager.engine.lifecycle.next.plan.trace.steps
    )


def test_what_the_new_plan_has_begun_by_then_begins_at_once(backend: str) -> None:
    # What backward of the second micro-batch needs first is copied back as backward of the first
    # one ends in the short iteration, much later in the long one.
    short, long = "F0.0 F0.1 B0.0 B0.1", "F0.0 F0.1 B0.0 F0.2 B0.2 B0.1"
    manager = make_manager(backend, release_lag=0, prefetch_depth=2)
    for schedule in (short, short, long, long, long):
        figures(manager, schedule)
    assert manager.plan is not None
    assert plan_steps(manager) == manager.plan.trace.steps, "the next one is taken for a long one"
    num_plans = manager.report.num_plans
    total = figures(manager, short)
    assert manager.report.num_plans == num_plans, "it departs to a plan that is known"
    assert total.num_late == 0


def test_what_has_left_is_released_where_no_plan_says_so_any_more(backend: str) -> None:
    # The last group of the third micro-batch is released when the fourth one's first group commits.
    expected = figures(make_manager(backend), UNKNOWN)
    manager = make_manager(backend)
    for _ in range(3):
        figures(manager, LONG)
    assert manager.plan is not None
    assert plan_steps(manager) == manager.plan.trace.steps
    num_plans = manager.report.num_plans
    total = figures(manager, UNKNOWN)
    if manager.store.is_native:  # [Note: Silent groups]
        assert plan_steps(manager) is None, "the next one is recorded"
        figures(manager, UNKNOWN)
    assert manager.report.num_plans == num_plans + 1, "it departs to no plan"
    assert total.freed_bytes > 0
    assert bytes_that_left_in_vain(total) == bytes_that_left_in_vain(expected)
