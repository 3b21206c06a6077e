# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The cure in a rule's message is accepted by that rule and by all others."""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from model_options import VALID_MODEL

from megatron.slipstream.integration.attach.handle import ATTACH_RULES
from megatron.slipstream.options.budget import BUDGET_RULES
from megatron.slipstream.options.chunk_graphs import CHUNK_GRAPH_RULES, check_chunk_graphs
from megatron.slipstream.options.context_parallel import (
    DYNAMIC_RULES,
    check_dynamic_context_parallel,
)
from megatron.slipstream.options.experts import EXPERT_RULES, check_experts
from megatron.slipstream.options.fields import (
    RULES,
    DynamicContextParallelOptions,
    ExpertOptions,
    OffloadConfig,
    PackingOptions,
    TileOptions,
)
from megatron.slipstream.options.model import CHECKPOINT_RULES, MODEL_RULES, check_model_options
from megatron.slipstream.options.packing import PACKING_RULES, check_packing
from megatron.slipstream.options.rules import Rule, check_rules, require
from megatron.slipstream.options.tiles import TILE_RULES, check_tiles

Options = Mapping[str, Any]

MODEL: dict[str, Any] = {
    **dataclasses.asdict(OffloadConfig()),
    **dataclasses.asdict(PackingOptions()),
    **dataclasses.asdict(DynamicContextParallelOptions()),
    **dataclasses.asdict(ExpertOptions()),
    **dataclasses.asdict(TileOptions()),
    **VALID_MODEL,
    "fine_grained_offloading_max_inflight_offloads": None,
    "delay_offload_until_cuda_graph": False,
    "cuda_graph_granularity": "layer",
    "seq_length": 128,
    "micro_batch_size": 1,
    "context_parallel_size": 1,
    "data_parallel_size": 8,
}
CHUNK = {
    **MODEL,
    "fine_grained_activation_offloading": False,
    "cuda_graph_granularity": "chunk",
}
PACKED = {**MODEL, "sequence_packing": "greedy"}
BALANCED = {**PACKED, "sequence_packing": "balanced", "calculate_per_token_loss": True}
DYNAMIC = {**BALANCED, "dynamic_context_parallel": True}
SYNC_FREE = {**MODEL, "moe_sync_free_experts": True, "num_experts": 8, "bf16": True}
EXPERTS = {
    "moe_token_dispatcher_type": "alltoall",
    "moe_expert_capacity_factor": 1.0,
    "moe_pad_expert_input_to_capacity": True,
}
RANK_CAPACITY = {
    "moe_token_dispatcher_type": "flex",
    "moe_flex_dispatcher_backend": "hybridep",
    "moe_expert_rank_capacity_factor": 1.5,
}


class Case(NamedTuple):
    """Options that break a rule, and all cures in its message."""

    broken: Options
    cures: Sequence[Options]


def off(option: str, value: Any = True, **beside: Any) -> Case:
    """An option to leave out."""
    return Case({option: value, **beside}, [{option: None}])


def either(option: str, value: Any, **cures: Any) -> Case:
    """An option to set to one of these values, under any name."""
    return Case({option: value}, [{option: cure} for cure in cures.values()])


OWN = [
    either("offload_engine", "x", a="slipstream", b="megatron"),
    either("offload_native", "x", a="auto", b="off"),
    either("offload_backend", "x", a="auto", b="cuda", c="cpu", d="cpu-lazy"),
    either("offload_release_lag", -1, a=0, b=2),
    either("offload_prefetch_depth", -1, a=0, b=2),
    either("offload_target_memory_gib", 0.0, a=0.5, b=None),
    either("offload_max_overhead_percent", -1, a=0, b="auto", c=None),
    Case(
        {"offload_max_overhead_percent": 1.0, "offload_target_memory_gib": 1.0},
        [{"offload_max_overhead_percent": None}, {"offload_target_memory_gib": None}],
    ),
    either("activation_memory_budget", 0.0, a=0.5, b="auto", c=None),
    Case(
        {"activation_memory_budget": 1.0, "offload_target_memory_gib": 1.0},
        [{"activation_memory_budget": None}, {"offload_target_memory_gib": None}],
    ),
    either("offload_host_memory_limit_bytes", 0, a=1, b=None),
    either("offload_verify", -1, a=0, b=1),
]
TE_GRAPHS = {"cuda_graph_impl": "transformer_engine"}
OF_MODEL = [
    Case(
        {"offload_modules": [], "num_moe_experts": 8},
        [
            {"offload_modules": [name]}
            for name in "attn_norm qkv_linear core_attn mlp_norm expert_fc1 moe_act "
            "fused_group_mlp".split()
        ]
        + [{"offload_modules": ["core_attn", "attn_proj"]}],
    ),
    either("offload_modules", ["attn_proj"], a=["core_attn", "attn_proj"]),
    either("offload_modules", ["core_attn", "expert_fc1", "moe_act"], a=["core_attn"]),
    either("activation_offload_fraction", 1.5, a=0.0, b=1.0),
    either("min_offloaded_tensor_size", -1, a=0),
    either("delta_offload_bytes_across_pp_ranks", -1, a=1),
    either("fine_grained_offloading_max_inflight_offloads", -1, a=0, b=None),
    Case(
        {"delay_offload_until_cuda_graph": True},
        [TE_GRAPHS, {"delay_offload_until_cuda_graph": False}],
    ),
    either("cpu_offloading", True, a=False),
    either("cuda_graph_impl", "full_iteration", a="transformer_engine"),
    Case(
        {"cuda_graph_impl": "local", "num_moe_experts": 8},
        [
            TE_GRAPHS,
            {
                "cuda_graph_modules": ["attn"],
                "offload_modules": ["expert_fc1", "fused_group_mlp", "moe_act"],
            },
        ],
    ),
    Case(
        {**TE_GRAPHS, "cuda_graph_modules": ["moe", "attn"]},
        [{"cuda_graph_modules": ["attn"]}, {"cuda_graph_modules": ["moe_router", "attn"]}],
    ),
    Case({**TE_GRAPHS, "cuda_graph_warmup_steps": 0}, [{"cuda_graph_warmup_steps": 1}]),
]
FP8 = {"fp8": "hybrid", "fp8_recipe": "blockwise"}
OF_CHUNK_GRAPHS = [
    either("cuda_graph_impl", "local", a="none"),
    off("cuda_graph_modules", ["attn"]),
    either("cuda_graph_warmup_steps", 0, a=1),
    Case({"num_experts": 8}, [EXPERTS, {"moe_sync_free_experts": True, "bf16": True}]),
    Case(
        {"recompute_granularity": "full", "hidden_dropout": 0.1, "attention_dropout": 0.1},
        [
            {"hidden_dropout": 0.0, "attention_dropout": 0.0},
            {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
        ],
    ),
    off("moe_input_jitter_eps", 0.1),
    Case(
        {"num_experts": 8, **RANK_CAPACITY},
        [{"moe_expert_rank_capacity_factor": None, **EXPERTS}],
    ),
    off("moe_paged_stash"),
    off("overlap_moe_expert_parallel_comm"),
    off("delay_wgrad_compute"),
    Case(
        {"fine_grained_activation_offloading": True, "offload_engine": "megatron"},
        [{"offload_engine": "slipstream"}],
    ),
    off("cpu_offloading_num_layers", 2),
    Case(
        {"fp8": "hybrid", "fp8_recipe": "delayed"},
        [{"fp8_recipe": recipe} for recipe in ("tensorwise", "blockwise", "mxfp8")],
    ),
    off("fp8_dot_product_attention", **FP8),
    off("fp8_multi_head_attention", **FP8),
    off("fp8_param_gather", **FP8),
    Case({"quant_recipe": object()}, [{"quant_recipe": None, **FP8}]),
    Case({"fp4": "e2m1"}, [{"fp4": None}, {"fp4": None, **FP8}]),
    off("use_transformer_engine_op_fuser"),
    Case({"use_megatron_fsdp": True}, [{"use_megatron_fsdp": False}]),
    Case({"use_torch_fsdp2": True}, [{"use_torch_fsdp2": False}]),
    off("tp_comm_overlap"),
    off("hybrid_layer_pattern", "M-M-"),
    off("hybrid_context_parallel"),
    Case(
        {"variable_seq_lengths": True},
        [
            {"variable_seq_lengths": None},
            {"variable_seq_lengths": None, "sequence_packing": "greedy"},
        ],
    ),
    Case({"sequence_packing": "greedy", "apply_rope_fusion": False}, [{"apply_rope_fusion": True}]),
]


def _accept_own(facts: SimpleNamespace) -> None:
    names = [field.name for field in dataclasses.fields(OffloadConfig)]
    OffloadConfig(**{name: getattr(facts, name) for name in names})


def _accept(facts: SimpleNamespace) -> None:
    """The checks of training, in any order."""
    _accept_own(facts)
    require(check_packing(facts))
    require(check_dynamic_context_parallel(facts))
    require(check_experts(facts, getattr(facts, "capability", (9, 0))))
    require(check_chunk_graphs(facts, has_gpu=True))
    require(check_tiles(facts))
    require(check_model_options(facts))


def _accept_with_checkpoints(facts: SimpleNamespace) -> None:
    require(check_rules(CHECKPOINT_RULES, facts))
    _accept(facts)


def _accept_with_budget(facts: SimpleNamespace) -> None:
    require(check_rules(BUDGET_RULES, facts))


def _accept_attached(facts: SimpleNamespace) -> None:
    require(check_rules(ATTACH_RULES, facts))
    _accept_own(facts)


class Backend(enum.Enum):
    """Options with megatron-core's names and defaults."""

    fused = 2
    unfused = 3


NO_SINKHORN = either(
    "moe_router_load_balancing_type",
    "sinkhorn",
    a="aux_loss",
    b="seq_aux_loss",
    c="global_aux_loss",
    d="none",
)

NO_LOCAL_GRAPHS = Case(
    {"cuda_graph_impl": "local"},
    [
        TE_GRAPHS,
        {"cuda_graph_impl": "none"},
        {"cuda_graph_impl": "none", "cuda_graph_granularity": "chunk"},
    ],
)
PACKED_IN_PARTS = {"context_parallel_size": 2, "calculate_per_token_loss": True}
SHUFFLED = {"dataloader_type": "cyclic"}
OF_PACKING = [
    Case(
        {"sequence_packing": None, "thd_max_packed_sequences": 4},
        [
            {"sequence_packing": "greedy"},
            {"sequence_packing": "balanced"},
            {"thd_max_packed_sequences": None},
        ],
    ),
    Case(
        {"sequence_packing": None, "thd_max_tokens": 128},
        [
            {"sequence_packing": "greedy"},
            {"sequence_packing": "balanced"},
            {"thd_max_tokens": None},
        ],
    ),
    either("micro_batch_size", 2, a=1),
    Case({"thd_max_tokens": 64}, [{"seq_length": 64}, {"thd_max_tokens": None}]),
    Case({"context_parallel_size": 2}, [{"calculate_per_token_loss": True}]),
    off("reset_position_ids"),
    off("reset_attention_mask"),
    Case(
        {"dataloader_inter_document_masking": True},
        [{"dataloader_inter_document_masking": None}, {"sequence_packing": None}],
    ),
    Case({"sft": True}, [{"sft": None}, {"sequence_packing": None}]),
    Case(
        {"hybrid_context_parallel": True},
        [{"hybrid_context_parallel": None}, {"sequence_packing": None}],
    ),
    off("dataloader_fast_cache_load"),
    off("dataloader_defer_npy_index_mmap"),
    either("dataloader_type", "external", a="single"),
    Case(
        {**SHUFFLED, "sequence_packing": "balanced"},
        [{"dataloader_type": "single"}, {"sequence_packing": "greedy"}],
    ),
    *(
        Case({option: value, "sequence_packing": "balanced"}, [{"sequence_packing": "greedy"}])
        for option, value in {
            "rampup_batch_size": [1, 1, 8],
            "step_batch_size_schedule": "1:2",
            "decrease_batch_size_if_needed": True,
        }.items()
    ),
    NO_SINKHORN,
    either("hybrid_layer_pattern", "M-M-", a="*-E*"),
    off("experimental_attention_variant", "gated_delta_net"),
    Case(
        {"attention_backend": Backend.unfused, "transformer_impl": "transformer_engine"},
        [{"attention_backend": Backend.fused}],
    ),
    NO_LOCAL_GRAPHS,
    Case({**TE_GRAPHS, "cuda_graph_warmup_steps": 0}, [{"cuda_graph_warmup_steps": 1}]),
    Case(
        {**TE_GRAPHS, "apply_rope_fusion": False},
        [{"apply_rope_fusion": True}, {"cuda_graph_modules": ["mlp"]}],
    ),
    off("fp8", "hybrid", **TE_GRAPHS),
    off("fp4", "e2m1", **TE_GRAPHS),
    off("overlap_moe_expert_parallel_comm", **TE_GRAPHS),
    off("delay_wgrad_compute", **TE_GRAPHS),
    Case({**TE_GRAPHS, "offload_engine": "megatron"}, [{"offload_engine": "slipstream"}]),
    either("position_embedding_type", "mrope", a="rope"),
    Case(
        {"mtp_num_layers": 1, **PACKED_IN_PARTS},
        [{"mtp_num_layers": None}, {"context_parallel_size": 1}, {"sequence_packing": None}],
    ),
    Case(
        {"pipeline_model_parallel_layout": "Et|tmL", "mtp_num_layers": 1},
        [
            {"pipeline_model_parallel_layout": None},
            {"mtp_num_layers": None},
            {"sequence_packing": None},
        ],
    ),
    Case(
        {"mtp_num_layers": 1, "num_experts": 8, "sequence_parallel": True},
        [{"sequence_parallel": None}, {"mtp_num_layers": None}],
    ),
    Case(
        {"hybrid_layer_pattern": "*E/*E", "num_experts": 8, "mtp_num_layers": None},
        [{"hybrid_layer_pattern": "*E"}],
    ),
]
OF_DYNAMIC_SIZES = [
    *(
        Case(
            {"dynamic_context_parallel": False, option: value},
            [{"dynamic_context_parallel": True}, {option: default}],
        )
        for option, value, default in (
            ("min_dynamic_context_parallel_size", 2, 1),
            ("max_dynamic_context_parallel_size", 2, None),
            ("dynamic_context_parallel_verify", True, False),
        )
    ),
    either("sequence_packing", "greedy", a="balanced"),
    either("calculate_per_token_loss", False, a=True),
    either("cp_comm_type", "a2a", a="p2p"),
    off("hierarchical_context_parallel_sizes", [2, 4]),
    off("mtp_num_layers", 1),
    either("hybrid_layer_pattern", "*-/*-", a="*-"),
    NO_LOCAL_GRAPHS,
    off("use_megatron_fsdp"),
    off("fp8_dot_product_attention"),
    off("fp8_multi_head_attention"),
]
TWO_RANKS = {"expert_model_parallel_size": 2, "moe_token_dispatcher_type": "alltoall"}
OF_EXPERTS = [
    Case({"num_experts": None}, [{"num_experts": 8}, {"moe_sync_free_experts": False}]),
    Case(
        {**TWO_RANKS, "moe_sync_free_capacity_factor": 0.5},
        [{"moe_sync_free_capacity_factor": 1.0}, {"moe_sync_free_capacity_factor": None}],
    ),
    Case(
        {"moe_sync_free_capacity_factor": 2.0},
        [{"moe_sync_free_capacity_factor": None}, TWO_RANKS],
    ),
    Case(
        {"expert_model_parallel_size": 2, "moe_token_dispatcher_type": "allgather"},
        [{"moe_token_dispatcher_type": "alltoall"}],
    ),
    either("tensor_model_parallel_size", 2, a=1),
    either("moe_token_dispatcher_type", "flex", a="alltoall", b="allgather"),
    off("moe_expert_capacity_factor", 1.0),
    off("moe_router_padding_for_quantization"),
    NO_SINKHORN,
    Case({"add_bias_linear": True}, [{"add_bias_linear": False}]),
    off("fp16"),
    off("fp8", "hybrid"),
    off("fp4", "e2m1"),
    off("quant_recipe", object()),
    either("hidden_size", 68, a=72),
    either("moe_ffn_hidden_size", 100, a=104),
    either("moe_latent_size", 12, a=16),
    off("delay_wgrad_compute"),
    off("overlap_dispatch_backward_with_experts_wgrad"),
    off("use_transformer_engine_op_fuser"),
    off("moe_paged_stash"),
    off("use_megatron_fsdp"),
    off("use_torch_fsdp2"),
    either("cuda_graph_impl", "transformer_engine", a="none"),
    Case({"bf16": False}, [{"bf16": True}]),
    Case({"capability": (8, 0)}, [{"moe_sync_free_experts": False}]),
]
TILED = {**MODEL, "loss_sequence_tiles": "auto", "mlp_sequence_tiles": 4}
OF_TILES = [
    either("loss_sequence_tiles", 0, a=1, b=2, c="auto"),
    either("mlp_sequence_tiles", True, a=1, b=2, c="auto"),
    off("overlap_moe_expert_parallel_comm"),
    either("gtp_weight_remat_size", 2, a=1),
    off("use_megatron_fsdp"),
    off("use_torch_fsdp2"),
    either("cuda_graph_impl", "full_iteration", a="none"),
    Case({"mtp_num_layers": 1}, [{"loss_sequence_tiles": 1}]),
    off("defer_embedding_wgrad_compute"),
    off("use_mup"),
    off("fp8_output_proj"),
    off("fp8", "hybrid"),
    off("fp4", "e2m1"),
    off("delay_wgrad_compute"),
    off("overlap_dispatch_backward_with_experts_wgrad"),
    either("mlp_chunks_for_training", 2, a=1),
    off("tp_comm_overlap"),
    off("moe_paged_stash"),
    Case(
        {"recompute_granularity": "selective", "recompute_modules": ["mlp", "layernorm"]},
        [{"recompute_modules": ["layernorm"]}],
    ),
    Case(
        {"offload_modules": ["core_attn", "moe_act"], "num_moe_experts": 8},
        [{"offload_modules": ["core_attn"]}],
    ),
    Case({**TE_GRAPHS, "cuda_graph_modules": ["attn", "mlp"]}, [{"cuda_graph_modules": ["attn"]}]),
]
OF_ATTACH = [
    either("offload_engine", "megatron", a="slipstream"),
    off("offload_report_path", "report.json"),
    off("offload_trace_path", "trace.json"),
    either("offload_checkpoint_inputs", True, a=False),
    Case(
        {"activation_memory_budget": 1.0},
        [
            {"activation_memory_budget": None},
            {"activation_memory_budget": None, "offload_target_memory_gib": 1.0},
        ],
    ),
]
OF_CHECKPOINTS = [
    Case(
        {"recompute_granularity": None},
        [{"recompute_granularity": "full"}, {"offload_checkpoint_inputs": False}],
    ),
    Case(
        {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
        [
            *({"recompute_modules": ["layernorm", name]} for name in ("core_attn", "mlp")),
            *(
                {
                    "recompute_modules": [name],
                    "num_moe_experts": 8,
                    "moe_shared_expert_intermediate_size": 8,
                }
                for name in ("moe", "shared_experts")
            ),
            {"recompute_granularity": "full"},
            {"offload_checkpoint_inputs": False},
        ],
    ),
]
OF_BUDGET = [
    Case(
        {name: value},
        [{name: off}, {"activation_memory_budget": None, "cuda_graph_impl": "none"}],
    )
    for name, value, off in (
        ("recompute_granularity", "full", None),
        ("cuda_graph_impl", "transformer_engine", "none"),
        ("cuda_graph_granularity", "chunk", "layer"),
        ("overlap_moe_expert_parallel_comm", True, None),
    )
]


class Table(NamedTuple):
    """A table of rules with its cases, in its order."""

    rules: Sequence[Rule]
    cases: Sequence[Case]
    valid: Options
    """A configuration that the rules accept."""
    accept: Any


TABLES = {
    "offload": Table(RULES, OWN, MODEL, _accept_own),
    "model": Table(MODEL_RULES, OF_MODEL, MODEL, _accept),
    "chunk graphs": Table(CHUNK_GRAPH_RULES, OF_CHUNK_GRAPHS, CHUNK, _accept),
    "packing": Table(PACKING_RULES, OF_PACKING, PACKED, _accept),
    "dynamic": Table(DYNAMIC_RULES, OF_DYNAMIC_SIZES, DYNAMIC, _accept),
    "experts": Table(EXPERT_RULES, OF_EXPERTS, SYNC_FREE, _accept),
    "tiles": Table(TILE_RULES, OF_TILES, TILED, _accept),
    "checkpoints": Table(
        CHECKPOINT_RULES,
        OF_CHECKPOINTS,
        {**MODEL, "offload_checkpoint_inputs": True, "recompute_granularity": "full"},
        _accept_with_checkpoints,
    ),
    "budget": Table(
        BUDGET_RULES,
        OF_BUDGET,
        {**MODEL, "activation_memory_budget": "auto"},
        _accept_with_budget,
    ),
    "attach": Table(ATTACH_RULES, OF_ATTACH, MODEL, _accept_attached),
}


def _all_cases() -> Iterator[Any]:
    for name, table in TABLES.items():
        for index, case in enumerate(table.cases):
            rule = table.rules[index] if index < len(table.rules) else None
            option = rule.name if rule else "?"
            yield pytest.param(table, rule, case, id=f"{name}-{index}-{option}")


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_every_rule_has_its_cures_here(table: Table) -> None:
    assert len(table.cases) == len(table.rules)
    table.accept(SimpleNamespace(**table.valid))


@pytest.mark.parametrize("table, rule, case", _all_cases())
def test_every_cure_is_accepted(table: Table, rule: Rule, case: Case) -> None:
    broken = {**table.valid, **case.broken}
    with pytest.raises(ValueError) as refused:
        table.accept(SimpleNamespace(**broken))
    assert _beginning(rule, broken) in str(refused.value)
    for cure in case.cures:
        table.accept(SimpleNamespace(**{**broken, **cure}))


@pytest.mark.parametrize("table, rule, case", _all_cases())
def test_every_option_that_a_cure_names_is_set_here(table: Table, rule: Rule, case: Case) -> None:
    """A message with a cure that is not tried above is found."""
    tried = {option for cure in case.cures for option in cure}
    known = {other.name for name in TABLES for other in TABLES[name].rules} | EXPERTS.keys()
    known |= RANK_CAPACITY.keys() | {"cuda_graph_granularity", "dynamic_context_parallel"}
    words = set(re.findall(r"[a-z0-9]+(?:_[a-z0-9]+)+", rule.cure))
    # Sizes that determine other options, and names of choices.
    assert words & known <= tried | case.broken.keys() | {"offload_modules"}


def _beginning(rule: Rule, facts: Options) -> str:
    """The message up to its first value."""
    return rule.message.partition("{")[0]
