# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The flag of sync-free experts: what it does not go together with is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Optional

import pytest

from megatron.slipstream.options.experts import EXPERT_RULES, check_experts

HOPPER = (9, 0)
VALID = {"moe_sync_free_experts": True, "num_experts": 8, "bf16": True, "hidden_size": 64}
REFUSED: list[dict[str, Any]] = [
    {"num_experts": None},
    {"tensor_model_parallel_size": 2},
    {"moe_token_dispatcher_type": "flex"},
    {"moe_expert_capacity_factor": 1.0},
    {"moe_router_padding_for_quantization": True},
    {"moe_router_load_balancing_type": "sinkhorn"},
    {"add_bias_linear": True},
    {"fp16": True},
    {"fp8": "hybrid"},
    {"fp4": "e2m1"},
    {"te_precision_config_file": "recipe.yaml"},
    {"hidden_size": 68},
    {"moe_ffn_hidden_size": 100},
    {"moe_latent_size": 12},
    {"delay_wgrad_compute": True},
    {"overlap_dispatch_backward_with_experts_wgrad": True},
    {"use_transformer_engine_op_fuser": True},
    {"moe_paged_stash": True},
    {"use_megatron_fsdp": True},
    {"use_torch_fsdp2": True},
    {"cuda_graph_impl": "transformer_engine"},
    {"bf16": False},
]


TWO_RANKS = {"expert_model_parallel_size": 2, "moe_token_dispatcher_type": "alltoall"}
OF_RANKS: list[tuple[dict[str, Any], str]] = [
    ({**TWO_RANKS, "moe_sync_free_capacity_factor": 0.9}, "factor=0.9 has no room for"),
    ({"moe_sync_free_capacity_factor": 2.0}, "factor has no effect without"),
    (
        {**TWO_RANKS, "moe_token_dispatcher_type": "allgather"},
        "set moe_token_dispatcher_type=allto",
    ),
]


def found(options: dict[str, Any], capability: Optional[tuple[int, int]] = HOPPER) -> list[str]:
    findings = check_experts(SimpleNamespace(**{**VALID, **options}), capability)
    return [finding.text for finding in findings]


@pytest.mark.parametrize("options", REFUSED, ids=str)
def test_what_does_not_go_together_is_refused(options: dict[str, Any]) -> None:
    (text,) = found(options)
    (option,) = options
    assert option in text
    assert found({**options, "moe_sync_free_experts": False}) == []


@pytest.mark.parametrize("options, text", OF_RANKS, ids=str)
def test_options_of_several_ranks(options: dict[str, Any], text: str) -> None:
    (finding,) = found(options)
    assert text in finding
    assert found({**TWO_RANKS, "moe_sync_free_capacity_factor": 1.0}) == []


@pytest.mark.parametrize(
    "options",
    [
        {},
        TWO_RANKS,
        {"moe_token_dispatcher_type": "alltoall", "moe_ffn_hidden_size": 1408},
        {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"]},
        {"num_experts": None, "num_moe_experts": 8},
    ],
    ids=str,
)
def test_other_options_are_accepted(options: dict[str, Any]) -> None:
    assert found(options) == []


def test_float32_is_for_machines_without_a_gpu() -> None:
    assert found({"bf16": False}, capability=None) == []


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (12, 0)], ids=str)
def test_a_gpu_on_which_the_grouped_gemm_waits_is_refused(capability: tuple[int, int]) -> None:
    (text,) = found({}, capability)
    assert str(capability) in text
    assert found({}, (10, 0)) == []


def test_every_rule_is_tried_here() -> None:
    assert len(EXPERT_RULES) == len(REFUSED) + len(OF_RANKS) + 1  # and the GPU's
