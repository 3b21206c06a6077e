# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Graphs of layers follow a target for memory or overhead, or a warning says that they do not.

The CPU backend with a clock stands for the GPU, and each call of a capture runs immediately.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional
from unittest.mock import MagicMock, patch

import pytest
import torch
from captured_layers import capture_layers, prepare_unwrapped, with_graphs
from imitated_layer_graphs import imitated_layer_graphs
from ranks import run_ranks
from timed_backend import TimedBackend, take_times_on_cpu
from tiny_gpt import ModelCase, build_chunks, initialize, make_config, train
from toy_model import SCHEDULES, make_chunks, run_schedule

from megatron.slipstream.fine_grained_activation_offload.cpu_backends import CpuBackend
from megatron.slipstream.fine_grained_activation_offload.engine import OffloadEngine
from megatron.slipstream.fine_grained_activation_offload.plan_cache import NUM_UNTIL_TIMED
from megatron.slipstream.integration.graphs import goals
from megatron.slipstream.integration.seam.manager import PipelineOffloadManager
from megatron.slipstream.options.fields import OffloadConfig
from megatron.slipstream.plan.candidates import PolicyOptions

MODULES = ("qkv_linear", "core_attn", "attn_proj")
MET: dict[str, Any] = {"offload_target_memory_gib": 1000.0}
GOALS: dict[str, dict[str, Any]] = {
    "target": MET,
    "overhead": {"offload_max_overhead_percent": 0.0},
}
CASES = {
    "layers": ModelCase("dense", num_layers=3),
    "packed layers": ModelCase("dense", num_layers=3, is_packed=True, micro_batch_size=1),
}


def _mask(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(1, 1, len(x), len(x), dtype=torch.bool).triu(1)


def _capture_by_hand(case: ModelCase, layers: Any) -> None:
    """Transformer Engine's warm-up and capture of forward."""
    from megatron.core.transformer import cuda_graphs, transformer_layer

    x = torch.randn(case.seq_length, case.micro_batch_size, case.hidden_size)
    options = {"attention_mask": _mask(x)}
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(transformer_layer, "is_te_min_version", lambda *_: True))
        stack.enter_context(patch.object(torch.cuda, "Event", MagicMock()))
        stack.enter_context(patch.object(cuda_graphs, "_IS_GRAPH_CAPTURING", True))
        for layer in layers:
            layer(x.detach().requires_grad_(), **options)
        stack.enter_context(patch.object(CpuBackend, "is_capturing", lambda _: True))
        outputs = [layer(x.detach().requires_grad_(), **options) for layer in layers]
        del outputs  # Only now: what nothing saves any more does not move.


def _follow(
    rank: int,
    world_size: int,
    port: int,
    case: ModelCase,
    num_steps: int,
    goal: dict[str, Any],
    is_late: bool = False,
) -> tuple[bool, bool, int, list[str]]:
    """Whether the plan has times and graphs move anything, how much it moves, and warnings.

    With ``is_late``, the device finishes all iterations only before the capture.
    """
    from megatron.slipstream.integration import install
    from megatron.slipstream.integration.cpu.cpu_memory import DeviceMemoryMeter

    warnings: list[str] = []

    class Log(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warnings.append(record.getMessage())

    take_times_on_cpu(pytest.MonkeyPatch())
    case = with_graphs(case, (), num_steps)
    initialize(case, rank, world_size, port)
    with imitated_layer_graphs(), DeviceMemoryMeter() as meter:
        manager = install.install(OffloadConfig(offload_backend="cpu", **goal))
        manager.store.backend.meter = meter  # type: ignore[attr-defined]
        config = make_config(case, MODULES)
        chunks = build_chunks(case, config)
        CpuBackend.has_come = not is_late  # type: ignore[attr-defined]
        logging.getLogger("megatron.slipstream").addHandler(Log(logging.WARNING))
        train(case, config, chunks, (1,) * num_steps)
        CpuBackend.has_come = True  # type: ignore[attr-defined]
        if case.is_packed:
            accumulators = prepare_unwrapped(chunks)
            helper = capture_layers(case, config, chunks, 1)
            plan, moves = manager.plan, manager.graphs.moves_anything
            helper.delete_cuda_graphs()
            accumulators.clear()
        else:
            _capture_by_hand(case, chunks[0].decoder.layers)
            plan, moves = manager.plan, manager.graphs.moves_anything
        assert plan is not None
        assert manager.report.tried == []
    install.uninstall()
    return bool(plan.trace.step_ms), moves, plan.moved_nbytes, warnings


@pytest.mark.parametrize(
    "kind, goal, is_late",
    [
        ("layers", "target", True),
        ("layers", "overhead", False),
        ("packed layers", "target", False),
    ],
)
def test_graphs_that_are_captured_late_enough_follow_the_goal(
    kind: str, goal: str, is_late: bool
) -> None:
    ((is_timed, moves, nbytes, warnings),) = run_ranks(
        1, _follow, CASES[kind], NUM_UNTIL_TIMED, GOALS[goal], is_late
    )
    assert is_timed
    assert moves == (nbytes > 0)
    assert not [warning for warning in warnings if "is not followed" in warning]
    if goal == "target":
        assert not moves


@pytest.mark.parametrize("kind", CASES)
def test_graphs_that_are_captured_too_early_move_everything_and_a_warning_says_so(
    kind: str,
) -> None:
    settings = {**MET, "offload_release_lag": 2}
    ((is_timed, moves, nbytes, warnings),) = run_ranks(1, _follow, CASES[kind], 3, settings)
    assert not is_timed
    assert moves
    (warning,) = [text for text in warnings if "is not followed" in text]
    assert "offload_target_memory_gib=1000 is not followed inside CUDA graphs of layers" in warning
    assert "captured after 3 iterations" in warning
    assert f"set cuda_graph_warmup_steps to at least {NUM_UNTIL_TIMED}" in warning
    assert [text for text in warnings if "offload_release_lag=2 has no effect inside" in text]


@pytest.mark.parametrize("is_late", [False, True], ids=["", "times come last"])
def test_after_that_many_iterations_a_plan_has_been_updated_from_times(is_late: bool) -> None:
    backend = TimedBackend()
    manager = PipelineOffloadManager(
        OffloadEngine(backend, PolicyOptions(max_overhead_percent=50.0))
    )
    manager.engine.lifecycle.tries_plans = False
    chunks = make_chunks()
    backend.has_come = not is_late
    for _ in range(NUM_UNTIL_TIMED):
        run_schedule(chunks, SCHEDULES["accumulation"], manager)
    assert manager.plan is not None
    assert bool(manager.plan.trace.step_ms) is not is_late
    backend.has_come = True
    manager.engine.lifecycle.read_times()
    assert manager.plan.trace.step_ms
    before = manager.report.num_iterations
    run_schedule(chunks, SCHEDULES["accumulation"], manager)
    assert manager.report.num_iterations == before + 1
    assert manager.report.num_plans <= 4, "the updated plan is followed, not recorded again"


def _args(**changed: Any) -> SimpleNamespace:
    given = {
        "cuda_graph_impl": "transformer_engine",
        "fine_grained_activation_offloading": True,
        "offload_engine": "slipstream",
        "offload_target_memory_gib": None,
        "offload_max_overhead_percent": None,
        "cuda_graph_warmup_steps": 3,
    }
    return SimpleNamespace(**{**given, **changed})


@pytest.mark.parametrize(
    "changed, expected, said",
    [
        ({}, 3, None),
        (MET, NUM_UNTIL_TIMED, "offload_target_memory_gib=1000.0: setting"),
        (GOALS["overhead"], NUM_UNTIL_TIMED, "offload_max_overhead_percent=0.0: setting"),
        ({**MET, "cuda_graph_warmup_steps": 30}, 30, None),
        ({**MET, "cuda_graph_impl": "none"}, 3, None),
        ({**MET, "fine_grained_activation_offloading": False}, 3, None),
        ({**MET, "offload_engine": "megatron"}, 3, None),
    ],
    ids=str,
)
def test_training_captures_late_enough_for_a_goal(
    changed: dict[str, Any],
    expected: int,
    said: Optional[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    args = _args(**changed)
    goals.prepare_arguments(args)
    assert args.cuda_graph_warmup_steps == expected
    assert [message.startswith(said) for message in caplog.messages if said] == [True] * bool(said)
    assert bool(caplog.messages) == bool(said)


def test_the_page_names_the_number_of_iterations() -> None:
    page = Path(__file__).resolve().parents[3] / "docs/user-guide/cuda-graphs.md"
    assert f"need {NUM_UNTIL_TIMED} warm-up steps" in " ".join(page.read_text().split())
