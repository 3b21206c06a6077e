# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Sync-free experts give the losses and gradients of Megatron's, and the host reads no number."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

# Helpers of planned offloading, whose tests need no GPU either.
sys.path.insert(0, str(Path(__file__).parents[2] / "pipeline_parallel" / "offload_support"))

from host_reads import HostReads
from megatron.core.pipeline_parallel.offload_engine.select import deselect
from megatron.core.transformer.moe.moe_layer import MoELayer
from offloaded_models import MODULES, build, finish, train

ON = {"moe_sync_free_experts": True}
OFFLOADING = {"offload_engine": "slipstream", "offload_backend": "cpu-lazy"}
BF16 = {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}


@pytest.fixture(scope="module", autouse=True)
def _shims_are_undone() -> Iterator[None]:
    yield
    finish()


def build_like(other: Any, *arguments: Any, **options: Any) -> Any:
    """Build a model with sync-free experts and the weights of another one."""
    model = build("moe", *arguments, **BF16, **ON, **options).bfloat16()
    model.load_state_dict(other.state_dict())
    return model


def trained(model: Any) -> dict[str, torch.Tensor]:
    """The last loss, and gradients by names, of experts one by one."""
    results = {"loss": train(model, 1)[0]}
    for name, parameter in model.named_parameters():
        parts = parameter.grad if parameter.dim() == 3 else [parameter.grad]
        number = range(len(parts)) if parameter.dim() == 3 else [""]
        results |= {f"{name}{place}": part for place, part in zip(number, parts, strict=True)}
    return results


def test_losses_and_gradients_are_those_of_megatrons_experts() -> None:
    theirs = build("moe", **BF16).bfloat16()
    expected = trained(theirs)
    try:
        for ours in (
            build_like(theirs),
            build_like(theirs, MODULES["moe"], offload_native="off", **OFFLOADING),
        ):
            found = trained(ours)
            assert found.keys() == expected.keys()
            assert all(torch.equal(expected[name], found[name]) for name in found)
    finally:
        deselect()


def test_the_host_reads_no_number_of_tokens() -> None:
    found = {}
    for options in ({}, ON):
        model = build("moe", **options)
        layer = next(module for module in model.modules() if isinstance(module, MoELayer))
        hidden = torch.randn(16, 2, model.config.hidden_size, requires_grad=True)
        layer(hidden)[0].sum().backward()  # what is made once may read
        with HostReads() as reads:
            layer(hidden)[0].sum().backward()
        found[len(options)] = reads.found
    assert found[0]
    assert not found[1]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({**ON, "tensor_model_parallel_size": 2}, "tensor_model_parallel_size=2"),
        ({"moe_sync_free_capacity_factor": 2.0}, "moe_sync_free_capacity_factor has no effect"),
    ],
)
def test_what_they_do_not_support_is_an_error(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        build("moe", **options)


class Arguments:
    """Arguments of a training: those that are given; others are None."""

    def __init__(self, **given: Any) -> None:
        vars(self).update(given)

    def __getattr__(self, name: str) -> None:
        return None


@pytest.mark.parametrize("was_on", [True, False])
def test_the_optimizers_state_of_other_experts_is_refused(was_on: bool, monkeypatch: Any) -> None:
    from megatron.training import checkpointing

    now = Arguments(**ON, use_distributed_optimizer=True, use_dist_ckpt=True)
    monkeypatch.setattr(checkpointing, "get_args", lambda: now)
    monkeypatch.setattr(checkpointing, "get_checkpoint_version", lambda: 3.0)
    saved = Arguments(moe_sync_free_experts=was_on)
    if was_on:
        checkpointing.check_checkpoint_args(saved)
    else:
        with pytest.raises(AssertionError, match="moe_sync_free_experts"):
            checkpointing.check_checkpoint_args(saved)
        saved.dist_ckpt_optim_fully_reshardable = True
        checkpointing.check_checkpoint_args(saved)


def test_layers_check_whether_rows_found_room() -> None:
    assert inspect.unwrap(MoELayer.forward) is not MoELayer.forward
