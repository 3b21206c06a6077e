# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Losses and gradients are those of the same run without offloading, bit by bit, on a CPU."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from megatron.core.pipeline_parallel import fine_grained_activation_offload as facade
from megatron.core.pipeline_parallel.offload_engine.select import deselect, select
from offloaded_models import KINDS, MODULES, build, finish, same, train

from megatron.slipstream.fine_grained_activation_offload.engine_setup import host_limit
from megatron.slipstream.options.fields import OffloadConfig


@pytest.fixture(scope="module", autouse=True)
def _shims_are_undone():
    yield
    finish()


@pytest.fixture(autouse=True)
def _built_in_engine_afterwards():
    yield
    deselect()


@pytest.mark.parametrize("native", ["off", "auto"])
@pytest.mark.parametrize("kind", KINDS)
def test_offloading_changes_no_bit(kind: str, native: str) -> None:
    expected = train(build(kind))
    manager = select(OffloadConfig(offload_backend="cpu-lazy", offload_native=native))
    found = train(build(kind, MODULES[kind]))
    assert len(found) == len(expected)
    assert same(expected, found)
    assert manager.report.d2h_bytes > 0
    assert {name for name in MODULES[kind] if manager.report.modules[name].d2h_bytes}


@pytest.mark.parametrize("mark", ["start_on", "end_on"])
def test_marks_of_layers_reach_the_engine(mark: str) -> None:
    manager = select(OffloadConfig(offload_backend="cpu", offload_native="off"))
    with patch.object(manager, mark, wraps=getattr(manager, mark)) as seen:
        train(build("dense", MODULES["dense"]))
    assert {call.args[1] for call in seen.call_args_list} >= set(MODULES["dense"])


def test_deselecting_gives_marks_to_the_built_in_engine() -> None:
    select(OffloadConfig(offload_backend="cpu"))
    assert host_limit.pools
    deselect()
    assert facade.PipelineOffloadManager.OFFLOAD_MGR is None
    assert not host_limit.pools
