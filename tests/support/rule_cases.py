# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""For every rule of a table: options that break it, its cures, and options that nearly break it."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Optional

from megatron.core.enums import Fp8Recipe
from model_options import VALID_MODEL

from megatron.slipstream.integration.seam.compat import RELEASE_RULES
from megatron.slipstream.options.budget import BUDGET_RULES
from megatron.slipstream.options.chunk_graphs import CHUNK_GRAPH_RULES
from megatron.slipstream.options.context_parallel import DYNAMIC_RULES
from megatron.slipstream.options.engine import ATTACH_RULES, RULES
from megatron.slipstream.options.experts import EXPERT_RULES
from megatron.slipstream.options.fields import GROUPS
from megatron.slipstream.options.model import (
    CHECKPOINT_RULES,
    GRAPH_RULES,
    MODEL_RULES,
    MODULE_NAMES,
)
from megatron.slipstream.options.modules import OWN_MODULE_RULES, OWN_MODULES
from megatron.slipstream.options.packing import PACKING_RULES
from megatron.slipstream.options.rules import Rule
from megatron.slipstream.options.tiles import TILE_RULES
from megatron.slipstream.options.training import MACHINE_RULES, SCHEDULE_RULES

Options = Mapping[str, Any]

MODEL: dict[str, Any] = {
    **{field.name: field.default for group, _ in GROUPS for field in dataclasses.fields(group)},
    **VALID_MODEL,
    "fine_grained_offloading_max_inflight_offloads": None,
    "delay_offload_until_cuda_graph": False,
    "seq_length": 128,
    "micro_batch_size": 1,
    "context_parallel_size": 1,
    "data_parallel_size": 8,
    "capability": (9, 0),
}
"""A valid model with offloading."""

TRAINING: dict[str, Any] = {
    **MODEL,
    "fine_grained_activation_offloading": False,
    **{"train_iters": 10, "train_samples": None, "skip_train": False, "full_validation": False},
    **{"lr": 0.01, "min_lr": 0.0, "lr_warmup_init": 0.0, "lr_warmup_fraction": None},
    **{"lr_warmup_iters": 0, "lr_decay_iters": None, "lr_wsd_decay_iters": None},
    **{"lr_warmup_samples": 0, "lr_decay_samples": None, "lr_wsd_decay_samples": None},
    **{"lr_decay_style": "linear", "lr_wsd_decay_style": "linear", "weight_decay": 0.01},
    **{"start_weight_decay": None, "end_weight_decay": None, "eval_interval": 1, "eval_iters": 1},
    **{"weight_decay_incr_style": "constant", "log_interval": 1, "mock_data": True},
    **{"use_checkpoint_opt_param_scheduler": False, "override_opt_param_scheduler": False},
    **{"global_batch_size": 4, "has_gpu": False},
}
"""A valid training without a GPU."""
BY_SAMPLES = {"train_iters": None, "train_samples": 40}

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
    """What a rule says of some options."""

    broken: Options
    """They break this rule, and no other of its table."""
    cures: Sequence[Options]
    """Each, beside them, is accepted by all rules: what the message says to set."""
    nearly: Optional[Options] = None
    """Beside them, the rule accepts: the nearest that works. None: see :class:`Table`."""


def off(option: str, value: Any = True, **beside: Any) -> Case:
    """An option to leave out."""
    return Case({option: value, **beside}, [{option: None}])


def offs(options: str, **beside: Any) -> list[Case]:
    """Options to leave out, each by itself."""
    return [off(option, **beside) for option in options.split()]


def either(option: str, value: Any, **cures: Any) -> Case:
    """An option to set to one of these values, under any name."""
    return Case({option: value}, [{option: cure} for cure in cures.values()])


OWN = [
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
    *offs("moe_paged_stash overlap_moe_expert_parallel_comm delay_wgrad_compute"),
    Case(
        {"fine_grained_activation_offloading": True, "offload_engine": "megatron"},
        [{"offload_engine": "slipstream"}],
    ),
    off("cpu_offloading_num_layers", 2),
    Case(
        {"fp8": "hybrid", "fp8_recipe": "delayed"},
        [{"fp8_recipe": recipe} for recipe in ("tensorwise", "blockwise", "mxfp8")],
    ),
    *offs("fp8_dot_product_attention fp8_multi_head_attention fp8_param_gather", **FP8),
    Case({"quant_recipe": object()}, [{"quant_recipe": None, **FP8}]),
    Case({"fp4": "e2m1"}, [{"fp4": None}, {"fp4": None, **FP8}]),
    off("use_transformer_engine_op_fuser"),
    Case({"use_megatron_fsdp": True}, [{"use_megatron_fsdp": False}]),
    Case({"use_torch_fsdp2": True}, [{"use_torch_fsdp2": False}]),
    off("tp_comm_overlap"),
    Case(
        {"hybrid_layer_pattern": "*-D-"},
        [{"hybrid_layer_pattern": "*-|+-GM"}, {"cuda_graph_granularity": "layer"}],
    ),
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


class Backend(enum.Enum):
    """Options with megatron-core's names and defaults."""

    fused = 2
    unfused = 3
    auto = 5


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
    *offs("reset_position_ids reset_attention_mask"),
    Case(
        {"dataloader_inter_document_masking": True},
        [{"dataloader_inter_document_masking": None}, {"sequence_packing": None}],
    ),
    Case({"sft": True}, [{"sft": None}, {"sequence_packing": None}]),
    Case(
        {"hybrid_context_parallel": True},
        [{"hybrid_context_parallel": None}, {"sequence_packing": None}],
    ),
    *offs("dataloader_fast_cache_load dataloader_defer_npy_index_mmap"),
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
    either("hybrid_layer_pattern", "M-M-", a="*-E*", b="+-E"),
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
    *offs("overlap_moe_expert_parallel_comm delay_wgrad_compute", **TE_GRAPHS),
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
    *offs("use_megatron_fsdp fp8_dot_product_attention fp8_multi_head_attention"),
]
TWO_RANKS = {"expert_model_parallel_size": 2, "moe_token_dispatcher_type": "alltoall"}
OF_EXPERTS = [
    Case({"num_experts": None}, [{"num_experts": 8}, {"moe_sync_free_experts": False}]),
    Case(
        {**TWO_RANKS, "moe_sync_free_capacity_factor": 0.5},
        [{"moe_sync_free_capacity_factor": 1.0}, {"moe_sync_free_capacity_factor": None}],
        {"moe_sync_free_capacity_factor": 1.0},
    ),
    Case(
        {"moe_sync_free_capacity_factor": 2.0},
        [{"moe_sync_free_capacity_factor": None}, TWO_RANKS],
        TWO_RANKS,
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
    *offs(
        "delay_wgrad_compute overlap_dispatch_backward_with_experts_wgrad "
        "use_transformer_engine_op_fuser moe_paged_stash use_megatron_fsdp use_torch_fsdp2"
    ),
    either("cuda_graph_impl", "transformer_engine", a="none"),
    Case({"bf16": False}, [{"bf16": True}]),
    Case({"capability": (8, 0)}, [{"moe_sync_free_experts": False}]),
]
OF_TILES = [
    either("loss_sequence_tiles", 0, a=1, b=2, c="auto"),
    either("mlp_sequence_tiles", True, a=1, b=2, c="auto"),
    off("overlap_moe_expert_parallel_comm"),
    either("gtp_weight_remat_size", 2, a=1),
    *offs("use_megatron_fsdp use_torch_fsdp2"),
    either("cuda_graph_impl", "full_iteration", a="none"),
    Case({"mtp_num_layers": 1}, [{"loss_sequence_tiles": 1}]),
    *offs("defer_embedding_wgrad_compute use_mup fp8_output_proj"),
    off("fp8", "hybrid"),
    off("fp4", "e2m1"),
    *offs("delay_wgrad_compute overlap_dispatch_backward_with_experts_wgrad"),
    either("mlp_chunks_for_training", 2, a=1),
    *offs("tp_comm_overlap moe_paged_stash"),
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
        ("use_megatron_fsdp", True, False),
        ("use_torch_fsdp2", True, False),
        ("hybrid_context_parallel", True, False),
    )
]


WITH_EXPERTS = {
    **MODEL,
    **{"num_moe_experts": 8, "moe_layer_freq": 2, "moe_shared_expert_intermediate_size": 64},
    **{"multi_latent_attention": True, "moe_grouped_gemm": True},
}


def own_module(name: str, broken: Options, cure: Options) -> Case:
    """A module of ours that cannot move: it is left out, or the cure makes it move."""
    beside = ["expert_fc1", name]
    nearly = {"offload_modules": ["expert_fc1"]}
    cures = [nearly, cure] if cure else [nearly]
    return Case({"offload_modules": beside, **broken}, cures, nearly)


def recomputed(name: str, module: str) -> Case:
    """A module of ours inside of one of ``recompute_modules``."""
    broken = {"recompute_granularity": "selective", "recompute_modules": ["layernorm", module]}
    return own_module(name, broken, {"recompute_modules": ["layernorm"]})


OF_OWN_MODULES = [
    own_module("mlp_act", {"offload_engine": "megatron"}, {"offload_engine": "slipstream"}),
    own_module("mlp_act", {"cuda_graph_impl": "local", "cuda_graph_modules": ["attn"]}, TE_GRAPHS),
    own_module(
        "embedding",
        {"cuda_graph_granularity": "chunk", **EXPERTS},
        {"cuda_graph_granularity": "layer"},
    ),
    own_module("mlp_fc1", {"moe_layer_freq": [1, 1]}, {}),
    recomputed("mlp_fc1", "mlp"),
    own_module(
        "mlp_fc2",
        {"use_transformer_engine_op_fuser": True},
        {"use_transformer_engine_op_fuser": False},
    ),
    own_module("expert_fc2", {"moe_grouped_gemm": False}, {}),
    recomputed("expert_fc2", "moe"),
    own_module("expert_fc2", {"moe_paged_stash": True}, {"moe_paged_stash": False}),
    own_module("shared_experts", {"moe_shared_expert_intermediate_size": None}, {}),
    recomputed("shared_experts", "shared_experts"),
    own_module(
        "shared_experts",
        {"moe_shared_expert_overlap": True},
        {"moe_shared_expert_overlap": False},
    ),
    own_module(
        "mla_down_proj", {"multi_latent_attention": False}, {"offload_modules": ["qkv_linear"]}
    ),
    recomputed("mla_up_proj", "mla_up_proj"),
    own_module("gdn_rule", {"hybrid_layer_pattern": "*EME"}, {}),
    own_module("mamba_scan", {"hybrid_layer_pattern": "*EGE"}, {}),
]
CHUNKS = {"cuda_graph_granularity": "chunk"}
IN_GRAPHS = [
    *(
        Case({**graphs, option: value}, [{option: default}])
        for graphs, option, value, default in (
            (TE_GRAPHS, "offload_release_lag", 2, 1),
            (TE_GRAPHS, "offload_prefetch_depth", 0, 1),
            (TE_GRAPHS, "fine_grained_offloading_max_inflight_offloads", 0, None),
            (TE_GRAPHS, "offload_nvtx_ranges", True, False),
            (TE_GRAPHS, "offload_verify", 5, 0),
            (CHUNKS, "offload_nvtx_ranges", True, False),
            (CHUNKS, "offload_verify", 5, 0),
        )
    ),
    Case(
        {"recompute_granularity": "full", "offload_engine": "megatron"},
        [{"offload_checkpoint_inputs": True, "offload_engine": "slipstream"}],
    ),
]
OFFLOADING = {"fine_grained_activation_offloading": True}
ON_GPU = {"has_gpu": True}
OF_MACHINE = [
    Case({**OFFLOADING, "offload_engine": "megatron"}, [{"offload_engine": "slipstream"}], ON_GPU),
    Case(
        {**OFFLOADING, "offload_backend": "cuda"},
        [{"offload_backend": "auto"}, {"offload_backend": "cpu"}],
        ON_GPU,
    ),
    Case(
        {**OFFLOADING, "activation_memory_budget": "auto"},
        [{"activation_memory_budget": 1.0}],
        ON_GPU,
    ),
    *(
        Case({option: value}, [{option: off}, {option: None}], ON_GPU)
        for option, value, off in (
            ("cuda_graph_impl", "transformer_engine", "none"),
            ("enable_cuda_graph", True, False),
            ("external_cuda_graph", True, False),
            ("optimizer_cuda_graph", True, False),
        )
    ),
    Case({"transformer_impl": "transformer_engine"}, [{"transformer_impl": "local"}], ON_GPU),
    Case(
        {"hybrid_layer_pattern": "M*", "transformer_impl": "local"},
        [{"hybrid_layer_pattern": "*-E"}],
    ),
    Case({"eval_interval": None}, [{"eval_interval": 1}], {"skip_train": True}),
    Case(
        {"train_iters": 0},
        [{"train_iters": 1}, {"train_samples": 8}],
        {"skip_train": True},
    ),
    Case({"num_layers": 0}, [{"num_layers": 1}], {"num_layers": None}),
    Case(
        {"vocab_size": 0},
        [{"vocab_size": 1}, {"tokenizer_json": "tokenizer.json", "vocab_size": 64}],
        {"vocab_size": None},
    ),
    Case({"log_interval": 0}, [{"log_interval": 1}], {"log_interval": 1}),
    Case({"data_path": ["text"]}, [{"mock_data": False}, {"data_path": None}], {"mock_data": None}),
    Case(
        {**ON_GPU, "sequence_packing": "greedy", "transformer_impl": "local"},
        [{"transformer_impl": "transformer_engine"}],
        {"has_gpu": False},
    ),
    Case(
        {**ON_GPU, "tensor_model_parallel_size": 2, "num_experts": 4},
        [{"tensor_model_parallel_size": 1}, {"sequence_parallel": True}],
        {"hybrid_layer_pattern": "*-"},
    ),
    Case(
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        [{"sequence_parallel": False}],
        {"tensor_model_parallel_size": 1},
    ),
    Case(
        {"num_experts": 2, "moe_grouped_gemm": True, "ckpt_format": "torch_dist", "save": "here"},
        [{"ckpt_format": "torch"}, {"moe_grouped_gemm": False}],
        {"save": None},
    ),
    Case(
        {"eval_before_training": True, "eval_iters": 0},
        [{"eval_iters": 1}, {"eval_before_training": False}],
        {"full_validation": True},
    ),
    Case(
        {"eval_before_training": True, "skip_train": True},
        [{"eval_before_training": False}],
        {"skip_train": False},
    ),
    Case(
        {"output_interval": -1, "run_record_path": "record.json"},
        [{"output_interval": 0}, {"output_interval": 1}],
    ),
    Case(
        {"output_interval": 5},
        [
            {"run_record_path": "record.json"},
            {**OFFLOADING, "offload_report_path": "report.json"},
            {**OFFLOADING, "offload_trace_path": "trace.json"},
            {"output_interval": 100},
        ],
    ),
]
RISING = {"weight_decay_incr_style": "linear", "start_weight_decay": 0.1}
WSD = {"lr_decay_style": "WSD"}
OF_SCHEDULE = [
    either("lr", None, a=1e-3),
    either("min_lr", -1.0, a=0.0, b=0.01),
    either("lr_warmup_init", 1.0, a=0.01),
    either("lr_warmup_fraction", 1.0, a=0.99),
    either("lr_decay_iters", -1, a=1),
    Case({"lr_warmup_iters": 10}, [{"lr_warmup_iters": 9}, {"lr_decay_iters": 11}]),
    Case(WSD, [{"lr_wsd_decay_iters": 2}, {"lr_decay_style": "cosine"}]),
    Case({**BY_SAMPLES, "lr_decay_samples": -1}, [{"lr_decay_samples": 1}]),
    Case(
        {**BY_SAMPLES, "lr_warmup_samples": 40},
        [{"lr_warmup_samples": 39}, {"lr_decay_samples": 41}],
    ),
    Case({**BY_SAMPLES, **WSD}, [{"lr_wsd_decay_samples": 8}, {"lr_decay_style": "cosine"}]),
    either("weight_decay", -0.1, a=0.0),
    Case({**RISING, "end_weight_decay": 0.05}, [{"end_weight_decay": 0.1}]),
    Case(
        {"use_checkpoint_opt_param_scheduler": True, "override_opt_param_scheduler": True},
        [
            {"use_checkpoint_opt_param_scheduler": False},
            {"override_opt_param_scheduler": False},
        ],
    ),
]


class Part(enum.Enum):
    """Parts of a layer, as megatron-core's configuration has them."""

    attn = 1
    moe_router = 3


CHUNK_EXPERTS = {"num_experts": 8, **EXPERTS}
IN_FP8 = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
BALANCED = {"sequence_packing": "balanced"}
TE_LAYERS = {"transformer_impl": "transformer_engine"}
LEARNED = {"position_embedding_type": "learned_absolute"}
LOCAL_EXPERTS = {
    **{"cuda_graph_impl": "local", "cuda_graph_modules": ["attn"], "num_moe_experts": 8},
    "offload_modules": ["expert_fc1", "moe_act"],
}
PRECISION = "a precision for each module"


class Table(NamedTuple):
    """A table of rules with its cases, in its order."""

    rules: Sequence[Rule]
    cases: Sequence[Case]
    valid: Options
    """Options that all rules accept."""
    off: Options = {}
    """Nearly broken, if a case has nothing of its own: the same options without the feature that
    the rules are about. Empty: the first cure, at the edge of what is accepted."""
    refused: Sequence[tuple[Options, str]] = ()
    """Other ways to break a rule, and what the message begins with or contains."""
    accepted: Sequence[Options] = ()
    """Options beside the valid ones that all rules accept."""


NO_OFFLOADING = {"fine_grained_activation_offloading": False}
OLDER = {"is_since_0_19": False}
OF_RELEASE = [
    Case(
        {"offload_modules": ["fused_group_mlp"], "num_experts": 2},
        [{"offload_modules": ["expert_fc1"]}],
    ),
    Case(LOCAL_EXPERTS, [{**TE_GRAPHS, "cuda_graph_modules": []}, {"cuda_graph_impl": "none"}]),
    Case({**NO_OFFLOADING, **CHUNKS}, [{"cuda_graph_granularity": "layer"}]),
    Case({"sequence_packing": "greedy", **TE_GRAPHS}, [{"cuda_graph_impl": "none"}]),
    Case(
        {"moe_sync_free_experts": True, "num_experts": 8, "bf16": True},
        [{"moe_sync_free_experts": False}],
    ),
    off("mtp_num_layers", 1),
    off("heterogeneous_layers_config_path", "layers.json"),
    off("experimental_attention_variant", "gated_delta_net"),
    off("spec", ["module", "name"]),
]
TABLES = {
    "offload": Table(RULES, OWN, MODEL),
    "model": Table(
        MODEL_RULES,
        OF_MODEL,
        MODEL,
        NO_OFFLOADING,
        refused=[
            ({**LOCAL_EXPERTS, "delay_offload_until_cuda_graph": True}, "delay_offload_until_cuda"),
        ],
        accepted=[
            {**TE_GRAPHS, "cuda_graph_modules": [Part.attn, Part.moe_router]},
            {**TE_GRAPHS, "delay_offload_until_cuda_graph": True},
            {"cuda_graph_warmup_steps": 0},
            LOCAL_EXPERTS,
            {
                **{"offload_engine": "megatron", "delay_offload_until_cuda_graph": True},
                "fine_grained_offloading_max_inflight_offloads": 2,
            },
        ],
    ),
    "own modules": Table(
        OWN_MODULE_RULES,
        OF_OWN_MODULES,
        WITH_EXPERTS,
        accepted=[{"offload_modules": [*OWN_MODULES]}, {"offload_modules": sorted(MODULE_NAMES)}],
    ),
    "checkpoints": Table(
        CHECKPOINT_RULES,
        OF_CHECKPOINTS,
        {**MODEL, "offload_checkpoint_inputs": True, "recompute_granularity": "full"},
        NO_OFFLOADING,
    ),
    "graphs": Table(
        GRAPH_RULES,
        IN_GRAPHS,
        MODEL,
        NO_OFFLOADING,
        refused=[
            ({"recompute_granularity": "full"}, "recompute_granularity=full"),
            (
                {
                    **{"recompute_granularity": "full", "offload_checkpoint_inputs": True},
                    "offload_engine": "megatron",
                },
                "recompute_granularity=full",
            ),
        ],
        accepted=[{"recompute_granularity": "selective"}],
    ),
    "budget": Table(
        BUDGET_RULES,
        OF_BUDGET,
        {**MODEL, "activation_memory_budget": "auto"},
        {"activation_memory_budget": None},
    ),
    "packing": Table(
        PACKING_RULES,
        OF_PACKING,
        {**MODEL, "sequence_packing": "greedy"},
        {"sequence_packing": None},
        refused=[
            ({"seq_length": None}, "seq_length=None"),
            ({"eval_micro_batch_size": 2}, "micro_batch_size=1 (eval_micro_batch_size=2)"),
            ({"moe_router_load_balancing_type": ["aux_loss", "quantile_balancing"]}, "moe_router_"),
            ({"attention_backend": "flash", **TE_LAYERS}, "attention_backend=flash"),
            (
                {**TE_GRAPHS, "apply_rope_fusion": False, "cuda_graph_modules": ["attn"]},
                "apply_rope_fusion=False",
            ),
            ({"hybrid_layer_pattern": "*-/*-", **PACKED_IN_PARTS}, "mtp_num_layers=None (hybrid"),
            ({"thd_max_packed_sequences": 0}, "thd_max_packed_sequences=0"),
            ({"seq_length": 6, **PACKED_IN_PARTS}, "seq_length=6"),
        ],
        accepted=[
            {"sequence_packing": None, "micro_batch_size": 4, "reset_position_ids": True},
            {**BALANCED, "dataloader_type": "single", "eval_micro_batch_size": 1},
            {"dataloader_type": "cyclic", "rampup_batch_size": ["8", "8", "100"]},
            {"thd_max_tokens": 128, "thd_max_packed_sequences": 1},
            {"thd_max_tokens": 64, **PACKED_IN_PARTS},
            {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"], "mtp_num_layers": 1},
            {"mtp_num_layers": 1, "num_experts": 4},
            {"mtp_num_layers": 1, "sequence_parallel": True},
            {"pipeline_model_parallel_layout": "E|t|tL"},
            {"hybrid_layer_pattern": "*-*E|*-", "num_experts": 4, "sequence_parallel": True},
            {"hybrid_layer_pattern": "*-/*-"},
            {"attention_backend": Backend.auto, **TE_LAYERS},
            {"attention_backend": "unfused", "transformer_impl": "local"},
            TE_GRAPHS,
            {**TE_GRAPHS, "apply_rope_fusion": False, "cuda_graph_modules": ["moe_router"]},
            {"fp8": "e4m3", "apply_rope_fusion": False, "offload_engine": "megatron"},
            {"sequence_packing": None, "mtp_num_layers": 1, **PACKED_IN_PARTS},
        ],
    ),
    "dynamic": Table(
        DYNAMIC_RULES,
        OF_DYNAMIC_SIZES,
        {
            **MODEL,
            **{"sequence_packing": "balanced", "calculate_per_token_loss": True},
            "dynamic_context_parallel": True,
        },
        {"dynamic_context_parallel": False},
        refused=[
            ({"cp_comm_type": ["p2p", "a2a"]}, "cp_comm_type=['p2p', 'a2a']"),
            ({"cuda_graph_impl": "full_iteration"}, "cuda_graph_impl=full_iteration"),
            ({"min_dynamic_context_parallel_size": 3}, "min_dynamic_context_parallel_size=3"),
            ({"max_dynamic_context_parallel_size": 16}, "max_dynamic_context_parallel_size=16"),
            (
                {
                    "min_dynamic_context_parallel_size": 4,
                    "max_dynamic_context_parallel_size": 2,
                },
                "min_dynamic_context_parallel_size=4",
            ),
            ({**LEARNED, "max_position_embeddings": 512}, "max_position_embeddings=512"),
        ],
        accepted=[
            TE_GRAPHS,
            {"dynamic_context_parallel": False, "sequence_packing": None, "mtp_num_layers": 1},
            {"cp_comm_type": ["p2p"], "hybrid_layer_pattern": "*-*E"},
            {"cp_comm_type": "p2p", "dynamic_context_parallel_verify": True},
            {"cuda_graph_granularity": "chunk"},
            {"min_dynamic_context_parallel_size": 2, "max_dynamic_context_parallel_size": 2},
            {**LEARNED, "max_position_embeddings": 1024},
            {"data_parallel_size": None, "max_dynamic_context_parallel_size": 16},
        ],
    ),
    "experts": Table(
        EXPERT_RULES,
        OF_EXPERTS,
        {**MODEL, "moe_sync_free_experts": True, "num_experts": 8, "bf16": True},
        {"moe_sync_free_experts": False},
        refused=[
            ({"te_precision_config_file": "recipe.yaml"}, PRECISION),
            *(({"capability": other}, "moe_sync_free") for other in ((8, 0), (8, 9), (12, 0))),
        ],
        accepted=[
            {**TWO_RANKS, "moe_sync_free_capacity_factor": 1.0},
            {"moe_token_dispatcher_type": "alltoall", "moe_ffn_hidden_size": 1408},
            {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"]},
            {"num_experts": None, "num_moe_experts": 8},
            {"bf16": False, "capability": None},
            {"capability": (10, 0)},
        ],
    ),
    "tiles": Table(
        TILE_RULES,
        OF_TILES,
        {**MODEL, "loss_sequence_tiles": "auto", "mlp_sequence_tiles": 4},
        {"loss_sequence_tiles": 1, "mlp_sequence_tiles": 1},
    ),
    "chunk graphs": Table(
        CHUNK_GRAPH_RULES,
        OF_CHUNK_GRAPHS,
        {**MODEL, **NO_OFFLOADING, "cuda_graph_granularity": "chunk"},
        {"cuda_graph_granularity": "layer"},
        refused=[
            (TE_GRAPHS, "cuda_graph_impl=transformer_engine"),
            (
                {**CHUNK_EXPERTS, "moe_pad_expert_input_to_capacity": False},
                "moe_token_dispatcher_type=alltoall",
            ),
            (
                {**CHUNK_EXPERTS, "moe_expert_capacity_factor": None},
                "moe_token_dispatcher_type=alltoall",
            ),
            (
                {**CHUNK_EXPERTS, "moe_token_dispatcher_type": "flex"},
                "moe_token_dispatcher_type=flex",
            ),
            ({"recompute_granularity": "full", "hidden_dropout": 0.1}, "recompute_granularity="),
            (
                {"recompute_granularity": "selective", "attention_dropout": 0.1},
                "recompute_granularity=selective of layers with dropout",
            ),
            ({"fp8": "e4m3", "fp8_recipe": Fp8Recipe.delayed}, "fp8_recipe=delayed"),
            ({"fp8": "e4m3", "fp8_recipe": "custom"}, "fp8_recipe=custom"),
            (
                {**IN_FP8, "fp8_param_gather": True, "fp8_param": False},
                "fp8_param_gather=True",
            ),
            ({**IN_FP8, "fp8_param": True}, "fp8_param_gather=True"),
            ({"te_precision_config_file": "precision.yaml"}, PRECISION),
            ({"kitchen_config_file": "kitchen.yaml"}, PRECISION),
            ({"kitchen_recipe_number": 0}, PRECISION),
        ],
        accepted=[
            {"cuda_graph_granularity": "layer", **TE_GRAPHS, "fp8": "hybrid"},
            {"sequence_packing": "greedy"},
            {"sequence_packing": "greedy", "apply_rope_fusion": False, "has_gpu": False},
            CHUNK_EXPERTS,
            {"fine_grained_activation_offloading": True},
            {"fp8": "e4m3", "fp8_recipe": Fp8Recipe.tensorwise, "fp8_param": False},
            {"fp8_recipe": "delayed", "fp8_dot_product_attention": True},  # all in bf16
            {"recompute_granularity": "selective"},
            {"recompute_granularity": "full", "hidden_dropout": 0.0},
            {"recompute_granularity": "selective", "hidden_dropout": 0.1},
            {
                **{"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
                "attention_dropout": 0.1,
            },
        ],
    ),
    "attach": Table(ATTACH_RULES, OF_ATTACH, MODEL),
    "machine": Table(
        MACHINE_RULES,
        OF_MACHINE,
        TRAINING,
        accepted=[{**ON_GPU, "transformer_impl": "local"}],
    ),
    "release": Table(
        RELEASE_RULES,
        OF_RELEASE,
        {**MODEL, **OLDER, "release": "megatron-core 0.18.2"},
        {"is_since_0_19": True},
    ),
    "schedule": Table(SCHEDULE_RULES, OF_SCHEDULE, TRAINING, {"skip_train": True}),
}
TOGETHER = [
    rule
    for name, table in TABLES.items()
    if name not in ("attach", "graphs", "machine", "release", "schedule")
    for rule in table.rules
]
"""The rules that a cure must not violate, beside those of its own table."""
