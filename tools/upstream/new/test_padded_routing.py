# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Padding has no part in the capacity and bias of experts, and in the divisor of their losses."""

from types import SimpleNamespace

import torch
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter


def test_expert_bias_does_not_count_padding() -> None:
    counts = torch.zeros(3)
    router = SimpleNamespace(enable_expert_bias=True, local_tokens_per_expert=counts)
    routing_map = torch.tensor([[1, 0, 1], [0, 1, 1], [1, 1, 0]], dtype=torch.bool)
    padding = torch.tensor([False, True, False])
    count = getattr(TopKRouter._apply_expert_bias, "__wrapped__", TopKRouter._apply_expert_bias)
    count(router, routing_map, padding_mask=padding)
    assert counts.tolist() == [2, 1, 1]


def test_the_divisor_of_a_buffer_of_padding_is_one(monkeypatch) -> None:
    monkeypatch.setattr(
        moe_utils, "reduce_from_tensor_model_parallel_region", lambda tensor, group: tensor
    )
    empty = torch.zeros(4, 3, dtype=torch.bool)
    *counts, total = moe_utils.get_tokens_per_expert_and_token_count(
        empty, None, topk=2, with_padding_mask=True
    )
    assert total.item() == 1
    assert counts[0].tolist() == [0, 0, 0]


def test_padding_does_not_compete_for_capacity(monkeypatch) -> None:
    from megatron.core.transformer.moe import router as module

    seen = {}

    def dropping(probs, routing_map, **options):
        seen.update(probs=probs, routing_map=routing_map)
        return probs, routing_map

    chosen = torch.ones(4, 2, dtype=torch.bool)
    monkeypatch.setattr(module, "apply_router_token_dropping", dropping)
    monkeypatch.setattr(
        module, "topk_routing_with_score_function", lambda *_, **__: (torch.ones(4, 2), chosen)
    )
    config = SimpleNamespace(
        num_moe_experts=2,
        moe_router_pre_softmax=False,
        moe_router_num_groups=None,
        moe_router_group_topk=None,
        moe_router_topk_scaling_factor=None,
        moe_router_fusion=False,
        moe_expert_capacity_factor=1.0,
        moe_token_drop_policy="probs",
        moe_pad_expert_input_to_capacity=False,
    )
    router = SimpleNamespace(
        config=config,
        routing_type="aux_loss",
        topk=1,
        score_function="softmax",
        expert_bias=None,
        router_replay=None,
        training=False,
        apply_z_loss=lambda logits, padding_mask: logits,
        _apply_expert_bias=lambda routing_map, padding_mask: None,
    )
    padding = torch.tensor([[False, True, False, True]])
    TopKRouter.routing(router, torch.zeros(1, 4, 2), padding_mask=padding)
    assert seen["routing_map"].all(dim=1).tolist() == [True, False, True, False]
    assert seen["probs"].sum(dim=1).tolist() == [2, 0, 2, 0]
