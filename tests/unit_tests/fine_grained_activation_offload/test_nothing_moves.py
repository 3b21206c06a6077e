# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Where a plan moves nothing, or nothing was marked, one warning says why."""

from __future__ import annotations

import pytest
from reported_runs import make_trace
from toy_model import make_chunks, make_manager, run_schedule

from megatron.slipstream.fine_grained_activation_offload.counted_modules import ReplayedPass

SCHEDULE = "F0.0 B0.0 F0.1 B0.1"


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]


def test_an_iteration_without_groups_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    manager = make_manager("cpu")
    manager.engine.wanted_modules = ("moe_act", "expert_fc1")
    for _ in range(2):
        manager.init_model_chunk_offload_handler(0, None, 1)
        manager.reset()
    (warning,) = warnings_of(caplog)
    assert "no group of offload_modules=moe_act,expert_fc1 ran; name modules" in warning


def test_an_iteration_with_groups_is_not(caplog: pytest.LogCaptureFixture) -> None:
    manager = make_manager("cpu")
    manager.engine.wanted_modules = ("mlp",)
    for _ in range(2):
        run_schedule(make_chunks(), "F0.0 F0.1 B0.0 B0.1", manager)
    assert manager.report.d2h_bytes > 0
    assert warnings_of(caplog) == []


def test_an_iteration_whose_chunks_are_replayed_is_not(caplog: pytest.LogCaptureFixture) -> None:
    manager = make_manager("cpu")
    manager.engine.wanted_modules = ("mlp",)
    run_schedule(make_chunks(), "F0.0 F0.1 B0.0 B0.1", manager)
    assert manager.plan is not None
    manager.engine.replayed["model chunk 0"] = ReplayedPass({}, plan=manager.plan, host_bytes=0)
    manager.init_model_chunk_offload_handler(0, None, 1)
    manager.reset()
    assert warnings_of(caplog) == []


def test_a_target_that_is_met_without_moving_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The first plan has no times and moves all; the one made from times moves nothing."""
    trace = make_trace()
    manager = make_manager("cpu", target_memory_bytes=1 << 40)
    planner = manager.engine.lifecycle.planner
    planner._has_moved = True
    plan = planner.make(trace).plan
    assert trace.step_ms
    assert trace.memory
    assert plan.moved_nbytes == 0
    (warning,) = warnings_of(caplog)
    assert "nothing moves, since the target for the device peak is met without" in warning
    assert "offload_target_memory_gib allows 1024.0 GiB" in warning
    assert "Choose other modules" not in warning
