# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Options that chunk graphs work with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.enums import Fp8Recipe

from megatron.slipstream.options.chunk_graphs import CHUNK_GRAPH_RULES, check_chunk_graphs
from megatron.slipstream.options.rules import require

CHUNK = {"cuda_graph_granularity": "chunk"}
EXPERTS = {
    "num_experts": 8,
    "moe_token_dispatcher_type": "alltoall",
    "moe_expert_capacity_factor": 1.0,
    "moe_pad_expert_input_to_capacity": True,
}
IN_FP8 = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}


def check(has_gpu: bool = True, **options: Any) -> None:
    require(check_chunk_graphs(SimpleNamespace(**options), has_gpu))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cuda_graph_impl": "transformer_engine", "fp8": "hybrid"},
        CHUNK,
        {**CHUNK, "sequence_packing": "greedy"},
        {**CHUNK, **EXPERTS},
        {**CHUNK, "fine_grained_activation_offloading": True},
        *(
            {**CHUNK, "fp8": "hybrid", "fp8_recipe": recipe}
            for recipe in ("tensorwise", "blockwise", "mxfp8")
        ),
        {**CHUNK, "fp8": "e4m3", "fp8_recipe": Fp8Recipe.tensorwise, "fp8_param": False},
        {**CHUNK, "fp8_recipe": "delayed", "fp8_dot_product_attention": True},  # all in bf16
        {**CHUNK, "recompute_granularity": "selective"},
        {**CHUNK, "recompute_granularity": "full", "hidden_dropout": 0.0},
        {**CHUNK, "recompute_granularity": "selective", "hidden_dropout": 0.1},
        {
            **CHUNK,
            "recompute_granularity": "selective",
            "recompute_modules": ["layernorm"],
            "attention_dropout": 0.1,
        },
    ],
    ids=str,
)
def test_what_goes_together(options: dict[str, Any]) -> None:
    check(**options)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"cuda_graph_impl": "local"}, "cuda_graph_impl=local is not .*; leave it out"),
        ({"cuda_graph_impl": "transformer_engine"}, "cuda_graph_impl=transformer_engine is not"),
        ({"cuda_graph_modules": ["attn"]}, r"cuda_graph_modules=\['attn'\] .* leave it out"),
        ({"cuda_graph_warmup_steps": 0}, "cuda_graph_warmup_steps=0 .* set at least 1"),
        (
            {"fine_grained_activation_offloading": True, "offload_engine": "megatron"},
            "offload_engine=megatron is not supported with cuda_graph_granularity=chunk",
        ),
        ({"num_experts": 8}, "moe_token_dispatcher_type=allgather .*waits for the GPU"),
        (
            {**EXPERTS, "moe_pad_expert_input_to_capacity": False},
            "moe_token_dispatcher_type=alltoall .* moe_pad_expert_input_to_capacity",
        ),
        ({**EXPERTS, "moe_expert_capacity_factor": None}, "moe_token_dispatcher_type=alltoall"),
        ({**EXPERTS, "moe_token_dispatcher_type": "flex"}, "moe_token_dispatcher_type=flex"),
        (
            {
                "num_experts": 8,
                "moe_token_dispatcher_type": "flex",
                "moe_flex_dispatcher_backend": "hybridep",
                "moe_expert_rank_capacity_factor": 1.5,
            },
            "moe_expert_rank_capacity_factor=1.5 .*memory is ready",
        ),
        (
            {"recompute_granularity": "full", "hidden_dropout": 0.1},
            "recompute_granularity=full of layers with dropout .*draw",
        ),
        (
            {"recompute_granularity": "selective", "attention_dropout": 0.1},
            "recompute_granularity=selective of layers with dropout",
        ),
        ({"sequence_packing": "greedy", "apply_rope_fusion": False}, "apply_rope_fusion=False"),
        ({"fp8": "hybrid"}, "fp8_recipe=delayed is not .*set fp8_recipe=tensorwise or blockwise"),
        ({"fp8": "e4m3", "fp8_recipe": Fp8Recipe.delayed}, "fp8_recipe=delayed is not supported"),
        ({"fp8": "e4m3", "fp8_recipe": "custom"}, "fp8_recipe=custom is not supported"),
        ({**IN_FP8, "fp8_dot_product_attention": True}, "fp8_dot_product_attention=True is not"),
        ({**IN_FP8, "fp8_multi_head_attention": True}, "fp8_multi_head_attention=True is not"),
        (
            {**IN_FP8, "fp8_param_gather": True},
            "fp8_param_gather=True is not .*without fixed addresses",
        ),
        (
            {**IN_FP8, "fp8_param_gather": True, "fp8_param": False},
            "fp8_param_gather=True is not supported",
        ),
        ({**IN_FP8, "fp8_param": True}, "fp8_param_gather=True is not supported"),
        *(
            ({option: value}, "a precision for each module .* is not supported with cuda_graph_gr")
            for option, value in {
                "quant_recipe": object(),
                "te_precision_config_file": "precision.yaml",
                "kitchen_config_file": "kitchen.yaml",
                "kitchen_recipe_number": 0,
            }.items()
        ),
        *(
            ({option: value}, f"{option}={value} is not supported with cuda_graph_granularity")
            for option, value in {
                "moe_input_jitter_eps": 0.1,
                "moe_paged_stash": True,
                "overlap_moe_expert_parallel_comm": True,
                "delay_wgrad_compute": True,
                "cpu_offloading_num_layers": 2,
                "fp4": "e2m1",
                "use_transformer_engine_op_fuser": True,
                "use_megatron_fsdp": True,
                "use_torch_fsdp2": True,
                "tp_comm_overlap": True,
                "hybrid_layer_pattern": "M-M-",
                "hybrid_context_parallel": True,
                "variable_seq_lengths": True,
            }.items()
        ),
    ],
)
def test_what_does_not(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(**{**CHUNK, **options})


def test_every_rule_can_be_broken() -> None:
    """Each option with a rule is among the cases above; without chunk graphs none matters."""
    tested = {
        name
        for mark in test_what_does_not.pytestmark
        for options, _ in mark.args[1]
        for name in options
    }
    assert {rule.name for rule in CHUNK_GRAPH_RULES} <= tested
    assert not any(rule.when(SimpleNamespace(cuda_graph_granularity="layer", num_experts=8))
                   for rule in CHUNK_GRAPH_RULES)  # fmt: skip


def test_without_a_gpu_rotary_embeddings_need_not_be_fused() -> None:
    check(False, **CHUNK, sequence_packing="greedy", apply_rope_fusion=False)
