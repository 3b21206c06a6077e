# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""What the training entry asks of the engine."""

from __future__ import annotations

import pytest
import torch
from toy_model import make_manager

from megatron.slipstream.fine_grained_activation_offload.report import ModuleCounters
from megatron.slipstream.integration import chunk_graphs, training
from megatron.slipstream.integration.training import _Engine


def test_what_moves_inside_graphs_is_offloaded_too() -> None:
    engine = object.__new__(_Engine)
    engine._manager = make_manager("cpu")
    assert engine.bytes_offloaded() == 0
    engine._manager.report.modules = {"core_attn": ModuleCounters(d2h_bytes=3)}
    engine._manager.report.graphs = {"core_attn": ModuleCounters(d2h_bytes=4)}
    assert engine.bytes_offloaded() == 7


def test_graphs_are_let_go_of_before_process_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL keeps a communicator as long as a graph has collectives of it, and waits for that."""

    class Captured:
        is_captured = True

        def close(self) -> None:
            self.is_captured = False

    graphs = Captured()
    seen: list[bool] = []
    chunk_graphs._replayed.add(graphs)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(
        torch.distributed, "destroy_process_group", lambda: seen.append(graphs.is_captured)
    )
    training._leave_process_groups()
    assert seen == [False]
    assert not chunk_graphs._replayed
