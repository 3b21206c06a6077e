# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""``offload_nvtx_ranges``: profilers see what each copy and release is for."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import pytest
import torch
from toy_model import SCHEDULES, make_chunks, make_manager, run_schedule

from megatron.slipstream.fine_grained_activation_offload.cpu_backends import CpuBackend
from megatron.slipstream.fine_grained_activation_offload.engine import OffloadEngine
from megatron.slipstream.fine_grained_activation_offload.engine_setup import open_backend
from megatron.slipstream.integration.seam.manager import PipelineOffloadManager
from megatron.slipstream.options.fields import OffloadConfig

SCHEDULE = SCHEDULES["1F1B first of four"]


class Profiled(CpuBackend):
    """Remembers the ranges."""

    def __init__(self) -> None:
        super().__init__()
        self.names_ranges = True
        self.labels: list[str] = []

    @contextlib.contextmanager
    def profiler_range(self, label: str) -> Iterator[None]:
        self.labels.append(label)
        yield


@pytest.mark.parametrize("is_native", [False, True])
def test_each_action_has_a_range_of_its_name(is_native: bool) -> None:
    """Where C++ does the work otherwise, too."""
    backend = Profiled()
    manager = PipelineOffloadManager(OffloadEngine(backend, is_native=is_native))
    chunks = make_chunks(2)
    for _ in range(3):
        backend.labels.clear()
        run_schedule(chunks, SCHEDULE, manager)
    assert manager.plan is not None
    actions = [str(action) for actions in manager.plan.actions for action in actions]
    assert actions
    assert backend.labels == actions


def test_without_the_option_there_are_none() -> None:
    assert not make_manager("cpu").store.backend.names_ranges


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is something to profile")
@pytest.mark.parametrize("is_on", [True, False])
def test_without_a_gpu_it_is_said_that_there_are_none(
    is_on: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        open_backend(OffloadConfig(offload_nvtx_ranges=is_on))
    told = [text for text in caplog.messages if "offload_nvtx_ranges=True: no effect" in text]
    assert len(told) == is_on
