# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Sync-free experts: megatron-core's results, names and checkpoints, and no wait of the host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from expert_layers import (
    differences,
    expert_config,
    expert_layer,
    expert_spec,
    held,
    in_a_process,
    load_from,
    reduced_over_all_ranks,
    run_layer,
)
from host_reads import HostReads
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron.slipstream.integration.experts.sync_free_experts import (
    RowsOfExperts,
    SyncFreeExpertsLayer,
    SyncFreeGroupedLinear,
    SyncFreeGroupedMLP,
    with_sync_free_experts,
)

OVERRIDES: dict[str, dict[str, Any]] = {
    "SwiGLU": {},
    "not gated": {"gated_linear_unit": False, "activation_func": torch.nn.functional.gelu},
    "clamped": {"activation_func_clamp_value": 0.5, "glu_linear_offset": 1.0},
    "allgather": {"moe_token_dispatcher_type": "allgather"},
    "three of seven": {"moe_router_topk": 3, "num_moe_experts": 7},
    "one of four, probabilities on the input": {
        "moe_router_topk": 1,
        "moe_router_pre_softmax": True,
        "moe_apply_probs_on_input": True,
    },
    "activation function recomputed": {
        "recompute_granularity": "selective",
        "recompute_modules": ["moe_act"],
    },
    "layer recomputed": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "shared experts": {"moe_shared_expert_intermediate_size": 32},
    "expert bias": {
        "moe_router_enable_expert_bias": True,
        "moe_router_score_function": "sigmoid",
        "moe_router_dtype": "fp32",
    },
    "all auxiliary losses": {
        "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
        "moe_aux_loss_coeff": [0.01, 0.02, 0.03],
        "moe_z_loss_coeff": 0.001,
    },
    "groups of experts": {
        "num_moe_experts": 8,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
    },
}


# --- results --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("overrides", OVERRIDES.values(), ids=OVERRIDES)
@in_a_process
def test_results_are_those_of_experts_one_by_one(overrides: dict[str, Any], bf16: bool) -> None:
    config = expert_config(bf16, **overrides)
    theirs = expert_layer(config, SequentialMLP)
    ours = expert_layer(config, SequentialMLP, with_sync_free_experts)
    load_from(ours, theirs)
    for seed in range(3):
        results = run_layer(ours, config, seed)
        assert differences(run_layer(theirs, config, seed), results) == []
    assert held(ours) == []
    assert reduced_over_all_ranks(ours) == reduced_over_all_ranks(theirs) == {True}
    assert results["experts.0.linear_fc1.weight"].any()


@in_a_process
def test_experts_without_tokens_get_gradients_of_zero() -> None:
    config = expert_config(moe_router_topk=1, moe_router_pre_softmax=True, num_moe_experts=8)
    theirs = expert_layer(config, SequentialMLP)
    with torch.no_grad():  # all tokens go to two experts
        theirs.router.weight.copy_(torch.randn(1, config.hidden_size).expand(8, -1) * 1e-3)
        theirs.router.weight[2], theirs.router.weight[5] = 1.0, -1.0
    ours = expert_layer(config, SequentialMLP, with_sync_free_experts)
    load_from(ours, theirs)
    results = run_layer(ours, config)
    assert differences(run_layer(theirs, config), results) == []
    idle = [i for i in range(8) if not results[f"experts.{i}.linear_fc2.weight"].any()]
    assert idle == [0, 1, 3, 4, 6, 7]


@in_a_process
def test_new_weights_are_those_of_grouped_experts() -> None:
    config = expert_config()
    ours = expert_layer(config, TEGroupedMLP, with_sync_free_experts)
    theirs = expert_layer(config, TEGroupedMLP)
    assert differences(run_layer(theirs, config), run_layer(ours, config)) == []


# --- no wait --------------------------------------------------------------------------------------


@pytest.mark.parametrize("overrides", OVERRIDES.values(), ids=OVERRIDES)
@in_a_process
def test_the_host_reads_nothing(overrides: dict[str, Any]) -> None:
    config = expert_config(**overrides)
    layer = expert_layer(config, TEGroupedMLP, with_sync_free_experts)
    run_layer(layer, config)  # what is made once may read
    with HostReads() as reads:
        run_layer(layer, config)
    assert reads.found == []


@pytest.mark.parametrize("kind", ["alltoall", "allgather"])
@in_a_process
def test_megatrons_own_layer_reads_the_numbers_of_tokens(kind: str) -> None:
    config = expert_config(moe_token_dispatcher_type=kind)
    layer = expert_layer(config, SequentialMLP)
    with HostReads() as reads:
        run_layer(layer, config)
    assert any("experts.py" in place for place in reads.found)
    assert any("token_dispatcher.py" in place or "moe_utils.py" in place for place in reads.found)


# --- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "not gated"])
@in_a_process
def test_experts_one_by_one_load_what_ours_saved(gated: bool) -> None:
    config = expert_config(gated_linear_unit=gated)
    ours = expert_layer(config, SequentialMLP, with_sync_free_experts)
    theirs = expert_layer(config, SequentialMLP)
    load_from(theirs, ours)
    assert differences(run_layer(theirs, config), run_layer(ours, config)) == []


@in_a_process
def test_a_state_dict_has_the_names_of_grouped_experts() -> None:
    config = expert_config()
    ours = expert_layer(config, TEGroupedMLP, with_sync_free_experts)
    theirs = expert_layer(config, TEGroupedMLP)
    with torch.no_grad():
        theirs.experts.linear_fc1.weight2.fill_(0.5)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    ours.load_state_dict(theirs.state_dict())
    expected = run_layer(theirs, config)
    assert differences(expected, run_layer(ours, config)) == []
    theirs.experts.linear_fc1.weight2.data.zero_()
    theirs.load_state_dict(ours.state_dict())
    assert differences(expected, run_layer(theirs, config)) == []


@in_a_process
def test_weights_saved_by_name_of_shard_are_refused() -> None:
    layer = expert_layer(expert_config(), SequentialMLP, with_sync_free_experts)
    with pytest.raises(ValueError, match="set singleton_local_shards=False"):
        layer.sharded_state_dict(metadata={"singleton_local_shards": True, "dp_cp_group": None})


# --- gradients of the distributed optimizer -------------------------------------------------------


def _linear(**attributes: Any) -> Any:
    config = SimpleNamespace(
        use_cpu_initialization=True,
        expert_model_parallel_size=1,
        params_dtype=torch.bfloat16,
        gradient_accumulation_fusion=True,
        perform_initialization=True,
        gated_linear_unit=True,
    )
    groups = SimpleNamespace(ep=None, expt_dp=None)
    linear = SyncFreeGroupedLinear(
        2,
        16,
        8,
        config=config,
        init_method=torch.nn.init.normal_,
        pg_collection=groups,
        tp_comm_buffer_name="fc2",
    )
    linear.weight.main_grad = torch.ones(2, 8, 16)
    for name, value in attributes.items():
        setattr(linear.weight, name, value)
    return linear


def _backward(linear: Any) -> torch.Tensor:
    """One pass; returns the weight's gradient as autograd has it without fusion."""
    tokens, rows = torch.randn(5, 16, dtype=torch.bfloat16), torch.tensor([2, 5])
    rows = RowsOfExperts(rows.to(torch.int32))
    linear(tokens, rows)[0].sum().backward()
    weight = linear.weight.detach().requires_grad_()
    ends = tokens.split([2, 3])
    torch.cat([x @ w.t() for x, w in zip(ends, weight, strict=True)]).sum().backward()
    assert weight.grad is not None
    return weight.grad


@in_a_process
def test_fused_accumulation_adds_to_the_main_gradient() -> None:
    linear = _linear()
    gradient = _backward(linear)
    assert linear.weight.grad is None
    assert torch.equal(linear.weight.main_grad, 1 + gradient.float())


@in_a_process
def test_ddp_is_told_that_the_gradient_has_been_added() -> None:
    linear = _linear(grad_added_to_main_grad=False)
    gradient = _backward(linear)
    assert linear.weight.grad_added_to_main_grad
    assert linear.weight.grad is not None, "DDP's hook would not run"
    assert torch.equal(linear.weight.main_grad, 1 + gradient.float())
    linear = _linear(grad_added_to_main_grad=False, zero_out_wgrad=True)
    gradient = _backward(linear)
    assert not linear.weight.grad.any()
    assert torch.equal(linear.weight.main_grad, 1 + gradient.float())


# --- specs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("experts", [SequentialMLP, TEGroupedMLP])
@in_a_process
def test_a_spec_is_copied_with_layer_and_experts_replaced(experts: type) -> None:
    spec = expert_spec(expert_config(), experts)
    changed = with_sync_free_experts(spec)
    assert changed.func is SyncFreeExpertsLayer
    assert changed.keywords["submodules"].experts.func is SyncFreeGroupedMLP
    assert spec.func is MoELayer
    assert spec.keywords["submodules"].experts.func is experts, "the original is as it was"


@in_a_process
def test_a_configuration_that_does_not_go_together_is_refused() -> None:
    config = expert_config(add_bias_linear=True)
    with pytest.raises(ValueError, match="add_bias_linear=True is not supported with moe_sync"):
        expert_layer(config, SequentialMLP, with_sync_free_experts)


@in_a_process
def test_shared_experts_may_overlap() -> None:
    config = expert_config(
        moe_shared_expert_intermediate_size=32, moe_shared_expert_overlap=True, num_moe_experts=4
    )
    theirs = expert_layer(config, TEGroupedMLP)
    ours = expert_layer(config, TEGroupedMLP, with_sync_free_experts)
    assert differences(run_layer(theirs, config), run_layer(ours, config)) == []
