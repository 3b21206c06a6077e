# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The flag of chunk graphs, and the options that they are incompatible with."""

from __future__ import annotations

from typing import Any

from megatron.slipstream.options.rules import Condition, Rule, option_rule


def _is_chunk(facts: Any) -> bool:
    return bool(facts.cuda_graph_granularity == "chunk")


_CHUNK = "with cuda_graph_granularity=chunk"
_unsupported = Condition(_CHUNK, _is_chunk)
_unsupported_in_fp8 = Condition(_CHUNK, lambda f: _is_chunk(f) and f.fp8)


def _has_fixed_numbers_of_tokens(facts: Any) -> bool:
    if facts.moe_token_dispatcher_type == "alltoall":
        is_padded = facts.moe_pad_expert_input_to_capacity
        return facts.moe_expert_capacity_factor is not None and is_padded
    # Rank capacity has its own rule.
    is_hybrid = facts.moe_flex_dispatcher_backend == "hybridep"
    is_limited = facts.moe_expert_rank_capacity_factor is not None
    return facts.moe_token_dispatcher_type == "flex" and is_hybrid and is_limited


def _recomputes_dropout(facts: Any) -> bool:
    if facts.recompute_granularity == "full":
        return bool(facts.hidden_dropout or facts.attention_dropout)
    modules = facts.recompute_modules or ["core_attn"]  # megatron-core's default
    is_recomputed = facts.recompute_granularity is not None and "core_attn" in modules
    return bool(is_recomputed and facts.attention_dropout)


CHUNK_GRAPH_RULES: tuple[Rule, ...] = (
    *_unsupported.rows(
        """
        cuda_graph_impl in none:
            Slipstream captures chunks itself, instead of megatron-core's graphs; leave it out
        cuda_graph_modules: a chunk is captured as a whole
        cuda_graph_warmup_steps: shapes are learned from an iteration without graphs; set at least 1
        """,
        cuda_graph_warmup_steps=lambda f: f.cuda_graph_warmup_steps >= 1,
    ),
    option_rule(
        "num_experts",
        lambda f: _is_chunk(f) and f.num_experts is not None,
        lambda f: f.moe_sync_free_experts or _has_fixed_numbers_of_tokens(f),
        "moe_token_dispatcher_type={moe_token_dispatcher_type} is not supported with "
        "cuda_graph_granularity=chunk because the host waits for the GPU to count the tokens of "
        "each expert",
        "set moe_sync_free_experts with bf16=True, or moe_token_dispatcher_type=alltoall with "
        "moe_expert_capacity_factor and moe_pad_expert_input_to_capacity",
    ),
    option_rule(
        "recompute_granularity",
        _is_chunk,
        lambda f: not _recomputes_dropout(f),
        "recompute_granularity={recompute_granularity} of layers with dropout "
        "(hidden_dropout={hidden_dropout}, attention_dropout={attention_dropout}, "
        "recompute_modules={recompute_modules}) is not supported with "
        "cuda_graph_granularity=chunk because the backward graph cannot draw the forward graph's "
        "random numbers again",
        "set the dropout to 0, or recompute modules without it",
    ),
    *_unsupported.rows(
        """
        moe_input_jitter_eps: its noise is generated on the host in every call
        moe_expert_rank_capacity_factor:
            Slipstream does not yet know when the dispatcher's memory is ready to be captured;
            set moe_expert_capacity_factor with moe_pad_expert_input_to_capacity
        moe_paged_stash: it follows the order of all layers and micro-batches of an iteration, and a
            graph has those of one micro-batch
        overlap_moe_expert_parallel_comm:
            its schedule interleaves the layers of two micro-batches and never runs a whole chunk
        delay_wgrad_compute:
            the weight gradients would be computed outside of the chunk's backward
        """
    ),
    Condition(_CHUNK, lambda f: _is_chunk(f) and bool(f.fine_grained_activation_offloading))(
        "offload_engine",
        "megatron-core's engine cannot be captured with a whole chunk",
        "set offload_engine=slipstream",
        ("slipstream",),
    ),
    _unsupported("cpu_offloading_num_layers", "its copies are issued by the host, layer by layer"),
    *_unsupported_in_fp8.rows(
        """
        fp8_recipe in tensorwise, blockwise, mxfp8:
            it may scale tensors by values of earlier passes, and the host computes those scales
            between passes; set fp8_recipe=tensorwise or blockwise (mxfp8 on Blackwell)
        fp8_dot_product_attention fp8_multi_head_attention: Transformer Engine scales some tensors
            of attention by what the passes before had in them
        """
    ),
    _unsupported(
        "fp8_param_gather",
        "a parameter in FP8 is a tensor of several parts without fixed addresses",
    ),
    option_rule(
        "quant_recipe",
        _is_chunk,
        lambda f: f.quant_recipe is None,
        "a precision for each module (te_precision_config_file, kitchen_config_file, "
        "kitchen_recipe_number, quant_recipe) is not supported with cuda_graph_granularity=chunk "
        "because some may keep state from pass to pass",
        "set fp8 and fp8_recipe for all modules",
    ),
    *_unsupported.rows(
        """
        fp4: gradients are rounded by random numbers, which is not tested in a graph;
            train in bf16 or fp8
        use_transformer_engine_op_fuser:
            its modules keep references to parameters that are replaced during the capture
        use_megatron_fsdp use_torch_fsdp2: parameters have no fixed addresses;
            use distributed data parallelism (use_distributed_optimizer)
        tp_comm_overlap: all micro-batches in flight share its user buffers
        hybrid_layer_pattern: layers D (sparse attention) pass the keys that they choose to later
            layers in Python objects of a pass, which a replay does not have;
            use + (multi-latent attention) instead, or set cuda_graph_granularity=layer
        hybrid_context_parallel: each micro-batch has another context-parallel group
        variable_seq_lengths: a graph has one shape;
            leave it out; sequence_packing gives documents of any length one shape
        """,
        # Layers that predict further tokens, behind a slash, are not captured.
        hybrid_layer_pattern=lambda f: "D" not in (f.hybrid_layer_pattern or "").partition("/")[0],
    ),
    Condition(
        "with cuda_graph_granularity=chunk and sequence_packing={sequence_packing}",
        lambda f: _is_chunk(f) and f.sequence_packing is not None and f.has_gpu,
    )(
        "apply_rope_fusion",
        "unfused rotary embeddings read the lengths of sequences from the GPU",
        "leave --no-rope-fusion out",
        lambda f: f.apply_rope_fusion,
    ),
)
