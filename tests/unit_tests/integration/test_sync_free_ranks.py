# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Sync-free experts on several expert-parallel ranks: megatron-core's results, no wait, no drop."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Optional
from unittest.mock import patch

import pytest
import torch
from expert_layers import (
    BATCH,
    TOKENS,
    differences,
    expert_layer,
    held,
    load_from,
    reduced_over_all_ranks,
    run_layer,
)
from host_reads import HostReads
from megatron.core.transformer.moe.experts import SequentialMLP
from ranks import run_ranks
from tiny_gpt import ModelCase, initialize, make_config

from megatron.slipstream.experts import capacity
from megatron.slipstream.experts.capacity import StepCheck, step_check
from megatron.slipstream.integration.experts.sync_free_experts import with_sync_free_experts

OVERRIDES: dict[str, dict[str, Any]] = {
    "SwiGLU": {},
    "one of four": {"moe_router_topk": 1, "moe_router_pre_softmax": True},
    "three of eight": {"moe_router_topk": 3, "num_moe_experts": 8},
    "probabilities on the input": {
        "moe_router_topk": 1,
        "moe_router_pre_softmax": True,
        "moe_apply_probs_on_input": True,
    },
    "layer recomputed": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "shared experts": {"moe_shared_expert_intermediate_size": 32},
    "all auxiliary losses": {
        "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
        "moe_aux_loss_coeff": [0.01, 0.02, 0.03],
        "moe_z_loss_coeff": 0.001,
    },
}
NUM_ROWS = TOKENS * BATCH * 2


def config_of(num_ranks: int, bf16: bool = False, **overrides: Any) -> Any:
    return make_config(ModelCase("moe", ep=num_ranks, bf16=bf16, overrides=overrides))


def layer_of(config: Any, factor: Optional[float] = None) -> Any:
    return expert_layer(config, SequentialMLP, lambda spec: with_sync_free_experts(spec, factor))


def compare(
    rank: int, num_ranks: int, port: int, bf16: bool, factor: float, overrides: dict[str, Any]
) -> tuple[list[str], list[str]]:
    """Differences from megatron-core's layer, and what the host reads."""
    initialize(ModelCase("moe", ep=num_ranks), rank, num_ranks, port)
    config = config_of(num_ranks, bf16, **overrides)
    theirs = expert_layer(config, SequentialMLP)
    ours = layer_of(config, factor)
    load_from(ours, theirs)
    found: list[str] = []
    for seed in range(2):
        seed = 10 * seed + rank
        expected = run_layer(theirs, config, seed)
        config.finalize_model_grads_func = lambda *_, **__: None  # checked there
        found += differences(expected, run_layer(ours, config, seed))
        with HostReads() as reads:
            again = run_layer(ours, config, seed)
        found += differences(run_layer(theirs, config, seed), again)
        config.finalize_model_grads_func()
        config.finalize_model_grads_func = None
    assert expected["experts.0.linear_fc1.weight"].any()
    assert held(ours) == []
    assert reduced_over_all_ranks(ours) == reduced_over_all_ranks(theirs) == {False}
    return found, reads.found


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("overrides", OVERRIDES.values(), ids=OVERRIDES)
def test_results_are_those_of_experts_one_by_one(overrides: dict[str, Any], bf16: bool) -> None:
    # A layer that is recomputed reads the state of the CPU's random numbers.
    for differing, read in run_ranks(2, compare, bf16, 2.0, overrides):
        assert differing == []
        assert [place for place in read if "tensor_parallel/random.py" not in place] == []


def test_four_ranks() -> None:
    for differing, read in run_ranks(4, compare, False, 3.9, {"num_moe_experts": 8}):
        assert differing == []
        assert read == []


# --- capacity -------------------------------------------------------------------------------------


def send_to(layer: Any, *experts: int) -> None:
    """Send all rows to these two of four experts, of which the first two are the first rank's."""
    with torch.no_grad():
        layer.router.weight.zero_()
        for expert in experts:
            layer.router.weight[expert] = 1.0 + expert / 10


def error_of(step: Callable[[], object]) -> str:
    try:
        step()
    except RuntimeError as error:
        return str(error)
    return ""


def exceed(
    rank: int, num_ranks: int, port: int, factor: Optional[float], has_finalize: bool
) -> tuple[str, str, str]:
    """Errors: of a step with all rows for the first rank, of an even one, of an evaluation."""
    initialize(ModelCase("moe", ep=num_ranks), rank, num_ranks, port)
    config = config_of(num_ranks)
    if has_finalize:
        config.finalize_model_grads_func = lambda *_, **__: None
    layer = layer_of(config, factor)
    layer.set_layer_number(3)
    values = torch.ones(TOKENS, BATCH, config.hidden_size, requires_grad=True)

    def step() -> None:
        (layer(values)[0] + layer(values)[0]).sum().backward()
        if has_finalize:
            config.finalize_model_grads_func()

    send_to(layer, 0, 1)
    too_many = error_of(step)
    send_to(layer, 0, 2)
    even = error_of(step)
    send_to(layer, 0, 1)
    layer.eval()
    with torch.no_grad():
        evaluation = error_of(lambda: layer(values))
    return too_many, even, evaluation


@pytest.mark.parametrize("has_finalize", [True, False], ids=["finalized", "own loop"])
def test_too_many_rows_end_the_step_with_an_error(has_finalize: bool) -> None:
    for rank, (error, even, evaluation) in enumerate(run_ranks(2, exceed, 1.5, has_finalize)):
        capacity = NUM_ROWS * 3 // 4
        assert error == (
            f"rank {rank}, layer 3: {NUM_ROWS} of {NUM_ROWS} rows are for the experts of one rank, "
            f"and moe_sync_free_capacity_factor leaves room for {capacity}; set "
            "moe_sync_free_capacity_factor=2 or more, or leave it out"
        )
        assert even == ""
        assert evaluation == error


@pytest.mark.parametrize("factor", [2.0, None])
def test_the_factor_that_it_asks_for_is_enough(factor: Optional[float]) -> None:
    assert run_ranks(2, exceed, factor, True) == [("", "", "")] * 2


def test_a_function_is_wrapped_once() -> None:
    config = SimpleNamespace(finalize_model_grads_func=lambda: 7)
    hidden = torch.ones(1, requires_grad=True)
    for _ in range(2):
        step_check.at_end_of_step(config, hidden)
    assert config.finalize_model_grads_func() == 7
    assert not hasattr(config.finalize_model_grads_func.__wrapped__, "__wrapped__")


def test_a_backward_ends_with_one_check() -> None:
    checked: list[int] = []
    check = StepCheck()
    with patch.object(capacity, "check_capacity", lambda layers: checked.append(len(layers))):
        for _ in range(2):
            values = torch.ones(2, requires_grad=True)
            hidden = [values * 2, values * 3]
            for tensor in hidden:
                check.at_end_of_step(SimpleNamespace(finalize_model_grads_func=None), tensor)
            (hidden[0] + hidden[1]).sum().backward()
    assert checked == [0, 0]
