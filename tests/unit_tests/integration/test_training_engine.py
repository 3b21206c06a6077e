# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The calls of the training entry to the engine."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from toy_model import make_manager

from megatron.slipstream.fine_grained_activation_offload.report import ModuleCounters
from megatron.slipstream.integration.entry import training
from megatron.slipstream.integration.graphs import chunks as chunk_graphs


def test_what_moves_inside_graphs_is_offloaded_too() -> None:
    report = make_manager("cpu").report
    assert training._bytes_offloaded(report) == 0
    report.modules = {"core_attn": ModuleCounters(d2h_bytes=3)}
    report.graphs = {"core_attn": ModuleCounters(d2h_bytes=4)}
    assert training._bytes_offloaded(report) == 7


def test_graphs_are_released_before_process_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL keeps a communicator as long as a graph has its collectives, and waits for the graph."""

    class Captured:
        is_captured = True

        def close(self) -> None:
            self.is_captured = False

    graphs = Captured()
    seen: list[bool] = []
    replayed = chunk_graphs._ReplayedChunk(graphs)
    chunk_graphs._replayed.add(replayed)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(
        torch.distributed, "destroy_process_group", lambda: seen.append(graphs.is_captured)
    )
    training._leave_process_groups()
    assert seen == [False]
    assert not chunk_graphs._replayed


class _Wrapper(torch.nn.Module):
    """The part of a chunk's data parallel wrapper that its graphs use."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = torch.nn.Linear(2, 2)
        self.param_to_bucket_group: dict[torch.nn.Parameter, Any] = {}

    def zero_grad_buffer(self) -> None:
        pass


def _replayed_chunk() -> _Wrapper:
    wrapper = _Wrapper()
    graphs: Any = SimpleNamespace(close=lambda: None)
    chunk_graphs._replace_methods(wrapper, graphs)
    return wrapper


def test_a_chunk_has_its_own_methods_again_once_its_graphs_are_released() -> None:
    wrapper = _replayed_chunk()
    assert "forward" in vars(wrapper.decoder)
    assert "zero_grad_buffer" in vars(wrapper)
    chunk_graphs.close_graphs()
    assert "forward" not in vars(wrapper.decoder)
    assert "zero_grad_buffer" not in vars(wrapper)


def test_a_model_of_replayed_chunks_can_go() -> None:
    gone = weakref.ref(_replayed_chunk())
    gc.collect()
    assert gone() is None
    chunk_graphs.close_graphs()
