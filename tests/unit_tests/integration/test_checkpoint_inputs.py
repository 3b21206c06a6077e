# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Inputs of checkpoints are a group like any other, and the patches for that are undone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import random as mcore_random
from tiny_gpt import DENSE_MODULES, ModelCase, compare_on_ranks
from toy_model import make_manager

from megatron.slipstream.fine_grained_activation_offload.markers import (
    CHECKPOINT_INPUTS,
    run_checkpoint,
)
from megatron.slipstream.patches import table
from megatron.slipstream.patches.table import Feature

OPTION = {"offload_checkpoint_inputs": True}


def _full(method: str, num_layers: int, **others: Any) -> dict[str, Any]:
    return {
        "recompute_granularity": "full",
        "recompute_method": method,
        "recompute_num_layers": num_layers,
        **others,
    }


def _selective(*names: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": list(names)}


CASES = {
    "each layer": ModelCase(overrides=_full("uniform", 1)),
    "two layers together": ModelCase(num_layers=4, overrides=_full("uniform", 2)),
    "the first three layers": ModelCase(overrides=_full("block", 3, hidden_dropout=0.1)),
    "experts": ModelCase("moe", overrides=_full("uniform", 1)),
    "core attention": ModelCase(overrides=_selective("core_attn")),
    "dense mlp": ModelCase(overrides=_selective("mlp")),
    "whole experts": ModelCase("moe", overrides=_selective("moe")),
}


@pytest.mark.releases
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_inputs_of_checkpoints_move(case: ModelCase) -> None:
    counts = (1, 2, 2)
    (result,) = compare_on_ranks(1, case, ("core_attn",), "cpu-lazy", counts, OPTION)
    assert result.difference is None
    assert CHECKPOINT_INPUTS in result.moved_modules
    assert result.num_late == 0
    assert result.freed_bytes == result.moved_bytes


def test_inputs_of_checkpoints_move_in_pipelines() -> None:
    """Stages send the outputs of checkpoints, which must not be views."""
    case = ModelCase(num_layers=8, pp=2, vpp=2, overrides=_full("uniform", 1))
    results = compare_on_ranks(2, case, ("core_attn",), "cpu-lazy", (2, 2, 2), OPTION)
    assert [result.difference for result in results] == [None] * 2
    assert all(CHECKPOINT_INPUTS in result.moved_modules for result in results)


def test_the_peak_falls_by_the_inputs() -> None:
    case = CASES["each layer"]
    (result,) = compare_on_ranks(1, case, ("core_attn",), "cpu", (2, 2, 2), OPTION, True)
    assert result.peak_drop_bytes == result.planned_drop_bytes > 0


def test_without_the_option_they_stay() -> None:
    case = CASES["each layer"]
    (result,) = compare_on_ranks(1, case, DENSE_MODULES, "cpu", (2, 2, 2), None, True)
    assert result.moved_bytes == 0


@pytest.mark.releases
def test_a_function_that_has_moved_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mcore_random, "CheckpointFunction")
    with pytest.raises(RuntimeError, match="CheckpointFunction.apply does not exist"):
        table.apply(Feature.CHECKPOINT_INPUTS)


def test_a_checkpoint_inside_another_is_no_group_of_its_own() -> None:
    manager = make_manager("cpu")
    manager.engine.moves_checkpoint_inputs = True
    manager.init_model_chunk_offload_handler(0, None, 0, 1)
    x = torch.randn(4, 8, requires_grad=True)

    def outer() -> torch.Tensor:
        with torch.no_grad():  # as a checkpoint runs its part of the model
            run_checkpoint(manager.engine, x.tanh)
        return x.exp()

    run_checkpoint(manager.engine, outer).sum().backward()
    manager.reset()
    plan = manager.plan
    assert [str(step) for step in plan.trace.steps] == [
        f"0.0.{CHECKPOINT_INPUTS}:{kind}" for kind in ("FS", "FC", "BU")
    ]
