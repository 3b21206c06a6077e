# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Recomputation and a memory budget: the same bits, within the budget, and settings that settle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cpu_memory import DeviceMemoryMeter
from megatron.core.pipeline_parallel.offload_engine.select import deselect, select
from offloaded_models import MODULES, build, finish, same, train

from megatron.slipstream.integration.layers.layer_settings import apply, assignment_of, layers_of
from megatron.slipstream.options.fields import OffloadConfig
from megatron.slipstream.plan.settings import NOTHING, WHOLE

NUM_STEPS = 10
FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
NORM = {"normalization": "LayerNorm"}
"""One operation, as fused norms are: its gradients are summed in one order only."""


@pytest.fixture(scope="module", autouse=True)
def _shims_are_undone() -> Iterator[None]:
    yield
    finish()


@pytest.fixture(autouse=True)
def _built_in_engine_afterwards() -> Iterator[None]:
    yield
    deselect()


def within(gib: float, num_steps: int = NUM_STEPS) -> tuple[list[torch.Tensor], Any]:
    """Train within a budget on a CPU whose memory is counted."""
    options = {"offload_backend": "cpu", "offload_native": "off"}
    manager = select(OffloadConfig(**options, activation_memory_budget=gib))
    with DeviceMemoryMeter() as manager.store.backend.meter:
        found = train(build("moe", MODULES["moe"], **NORM), num_steps)
    manager.store.backend.meter = None
    manager.finish_report()
    return found, manager


def test_a_budget_changes_no_bit_and_is_kept() -> None:
    expected = train(build("moe", **NORM, **FULL), NUM_STEPS)
    _, manager = within(1.0, num_steps=7)
    assert manager.report.d2h_bytes == 0
    budget_bytes = int(0.7 * manager.budget.activation_bytes)
    deselect()
    found, manager = within(budget_bytes / 2**30)
    assert same(expected, found)
    assert manager.budget.is_settled
    assert manager.budget.activation_bytes <= budget_bytes
    settings = {layer.setting for layer in manager.report.layers}
    assert len(settings) > 2, settings


def test_inputs_of_checkpoints_move() -> None:
    expected = train(build("dense", **FULL))
    options = {"offload_backend": "cpu-lazy", "offload_native": "off"}
    manager = select(OffloadConfig(**options, offload_checkpoint_inputs=True))
    found = train(build("dense", ["attn_norm"], **FULL))
    assert same(expected, found)
    assert manager.report.modules["checkpoint_inputs"].d2h_bytes > 0


def test_each_layer_has_its_own_setting() -> None:
    expected = train(build("dense"), 1)
    model = build("dense")
    assert {setting for one in layers_of([model]) for setting in one.settings} >= {NOTHING, WHOLE}
    apply((WHOLE, NOTHING, WHOLE, NOTHING), [model])
    assert assignment_of([model]) == (WHOLE, NOTHING, WHOLE, NOTHING)
    assert same(expected, train(model, 1))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"activation_memory_budget": 1.0}, "offload_engine='slipstream'"),
        ({"activation_memory_budget": "all", "offload_engine": "slipstream"}, "budget='all'"),
        (
            {"activation_memory_budget": 1.0, "offload_engine": "slipstream", **FULL},
            "recompute_granularity=full",
        ),
    ],
)
def test_what_is_not_followed_is_an_error(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        build("dense", MODULES["dense"], **options)
