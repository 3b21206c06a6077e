# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""What the training entry asks of the engine."""

from __future__ import annotations

from toy_model import make_manager

from megatron.slipstream.fine_grained_activation_offload.report import ModuleCounters
from megatron.slipstream.integration.training import _Engine


def test_what_moves_inside_graphs_is_offloaded_too() -> None:
    engine = object.__new__(_Engine)
    engine._manager = make_manager("cpu")
    assert engine.bytes_offloaded() == 0
    engine._manager.report.modules = {"core_attn": ModuleCounters(d2h_bytes=3)}
    engine._manager.report.graphs = {"core_attn": ModuleCounters(d2h_bytes=4)}
    assert engine.bytes_offloaded() == 7
