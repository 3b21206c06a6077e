# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Memory is read with the gradients that appear meanwhile apart from all else."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.slipstream.fine_grained_activation_offload import recorder as recorder_module
from megatron.slipstream.fine_grained_activation_offload.cpu_backends import CpuBackend
from megatron.slipstream.fine_grained_activation_offload.recorder import MemoryReader, Recorder
from megatron.slipstream.integration.seam.gradients import Gradients
from megatron.slipstream.plan.trace import GroupKey, MemoryReading, Step, StepKind


class ScriptedBackend(CpuBackend):
    """Reads these bytes, allocated and at the peak, one after the other."""

    def __init__(self, readings: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        self._readings = iter(readings)

    def memory(self) -> tuple[int, int]:
        return next(self._readings)

    def reset_peak_memory(self) -> None:
        pass


def model_with_gradients(backend: CpuBackend) -> torch.nn.Linear:
    """One whose gradients, of 40 and 20 bytes, the backend counts."""
    model = torch.nn.Linear(2, 5)
    backend.gradients = Gradients(lambda: [model])
    return model


def train(model: torch.nn.Module) -> None:
    model(torch.ones(1, 2)).sum().backward()


def test_a_gradient_counts_as_one_from_where_it_appears() -> None:
    backend = ScriptedBackend([(100, 100), (180, 200), (170, 190), (150, 150), (150, 250)])
    model = model_with_gradients(backend)
    train(model)
    reader = MemoryReader(backend)
    reader.begin_step()
    reader.end_step()
    reader.come_to_gradient(60)
    reader.begin_step()
    reader.end_step()
    reader.begin_step()
    assert reader.readings([3, 4]) == (
        MemoryReading(100, 200, 3, 200 - 60),
        MemoryReading(150, 250, 4, 250 - 120),
    )


@pytest.mark.parametrize("reads_memory", [True, False])
def test_the_recorder_hears_of_gradients_while_it_reads_memory(
    reads_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[int] = []
    note: Any = lambda _, nbytes: heard.append(nbytes)  # noqa: E731
    monkeypatch.setattr(recorder_module.MemoryReader, "come_to_gradient", note)
    backend = CpuBackend()
    model = model_with_gradients(backend)
    recorder = Recorder(backend)
    recorder.reads_memory = reads_memory
    recorder.watch_gradients()
    train(model)
    assert sorted(heard) == ([20, 40] if reads_memory else [])
    heard.clear()
    recorder.clear()
    model.zero_grad()
    train(model)
    assert heard == []


class Released:
    """A storage of 8 bytes whose device memory was released, and is not free yet."""

    owner = SimpleNamespace(vp_stage=0, key=GroupKey(0, 0))
    position, serial, nbytes = 0, 1, 8
    is_memory_gone = is_original_emptied = False


@pytest.mark.parametrize("ends", ["memory", "storage"])
def test_memory_is_free_once_nothing_has_it_or_its_storage_is_no_more(ends: str) -> None:
    recorder = Recorder(CpuBackend())
    step = Step(StepKind.FORWARD_COMMIT, Released.owner.key, "mlp")
    recorder.add_step(step)
    storage: Any = Released()
    recorder.set_absent(storage)
    recorder.end_step()
    assert recorder.absent_bytes_now() == 0
    storage.is_memory_gone = ends == "memory"
    if ends == "storage":
        del storage
    assert recorder.absent_bytes_now() == 8
    recorder.add_step(step)
    assert recorder.absent_bytes == 8
