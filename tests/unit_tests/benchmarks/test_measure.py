# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Device memory of an engine's iterations."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from benchmarks.measure import measure_memory
from megatron.slipstream.fine_grained_activation_offload.cpu_backends import CpuBackend


def test_a_peak_is_not_lost_where_the_engine_reads_memory_after_it() -> None:
    backend = CpuBackend()

    def run(iteration: int) -> list[torch.Tensor]:
        high = torch.empty(1000, dtype=torch.uint8)
        backend.reset_peak_memory()
        del high
        backend.reset_peak_memory()
        return []

    manager = SimpleNamespace(store=SimpleNamespace(backend=backend))
    assert measure_memory(run, manager).act_bytes == 1000
    assert measure_memory(run).act_bytes == 1000
