# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The options of a training or of a model, under one set of names."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Set
from typing import Any

DEFAULTS: Mapping[str, Any] = {
    **dict.fromkeys(
        """
        context_parallel_size expert_model_parallel_size gtp_weight_remat_size loss_sequence_tiles
        micro_batch_size min_dynamic_context_parallel_size mlp_chunks_for_training
        mlp_sequence_tiles tensor_model_parallel_size
        """.split(),
        1,
    ),
    "activation_offload_fraction": 1.0,
    "apply_rope_fusion": True,
    "attention_backend": "auto",
    "cuda_graph_granularity": "layer",
    "cuda_graph_impl": "none",
    "cuda_graph_modules": (),
    "cuda_graph_warmup_steps": 3,
    "delta_offload_bytes_across_pp_ranks": 0,
    "fp8_recipe": "delayed",
    "has_gpu": True,
    "min_offloaded_tensor_size": 1024 * 1024,
    "moe_flex_dispatcher_backend": "deepep",
    "moe_router_load_balancing_type": "aux_loss",
    "moe_token_dispatcher_type": "allgather",
    "offload_engine": "slipstream",
    "output_interval": 100,
}
"""Values of options that a release or a source of facts lacks; of all others None."""

NAMES: Set[str] = DEFAULTS.keys() | set(
    """
    activation_func_fp8_input_store activation_memory_budget add_bias_linear attention_dropout
    attention_output_gate bf16 calculate_per_token_loss capability ckpt_format cp_comm_type
    cpu_offloading cpu_offloading_num_layers data_parallel_size data_path
    dataloader_defer_npy_index_mmap dataloader_fast_cache_load dataloader_inter_document_masking
    dataloader_type decrease_batch_size_if_needed defer_embedding_wgrad_compute
    delay_offload_until_cuda_graph delay_wgrad_compute deterministic_mode
    distribute_saved_activations dynamic_context_parallel dynamic_context_parallel_verify
    enable_cuda_graph end_weight_decay eval_before_training eval_interval eval_iters
    eval_micro_batch_size experimental_attention_variant expert_gtp_weight_remat_size
    external_cuda_graph fine_grained_activation_offloading
    fine_grained_offloading_max_inflight_offloads fp16 fp32_residual_connection fp4 fp4_param_gather
    fp8 fp8_dot_product_attention fp8_multi_head_attention fp8_output_proj fp8_param_gather
    freeze_all_layers full_validation fused_residual_rmsnorm
    heterogeneous_layers_config_encoded_json heterogeneous_layers_config_path hidden_dropout
    hidden_size hierarchical_context_parallel_sizes hybrid_context_parallel hybrid_layer_pattern
    is_hybrid_model is_since_0_19 load log_interval logits_load_dir lr lr_decay_iters
    lr_decay_samples lr_decay_style lr_warmup_fraction lr_warmup_init lr_warmup_iters
    lr_warmup_samples lr_wsd_decay_iters lr_wsd_decay_samples max_dynamic_context_parallel_size
    max_position_embeddings min_lr mock_data moe_apply_probs_on_input moe_expert_capacity_factor
    moe_expert_rank_capacity_factor moe_ffn_hidden_size moe_grouped_gemm moe_input_jitter_eps
    moe_latent_size moe_layer_freq moe_pad_expert_input_to_capacity moe_paged_stash
    moe_router_padding_for_quantization moe_shared_expert_intermediate_size
    moe_shared_expert_overlap moe_sync_free_capacity_factor moe_sync_free_experts mtp_num_layers
    multi_latent_attention num_distributed_optimizer_instances num_experts num_layers
    num_moe_experts offload_backend offload_checkpoint_inputs offload_host_memory_limit_bytes
    offload_max_overhead_percent offload_modules offload_nvtx_ranges offload_prefetch_depth
    offload_release_lag offload_report_path offload_target_memory_gib offload_trace_path
    offload_verify optimizer optimizer_cuda_graph overlap_dispatch_backward_with_experts_wgrad
    overlap_moe_expert_parallel_comm override_opt_param_scheduler perform_rl_step
    pipeline_model_parallel_layout position_embedding_type qk_l2_norm quant_recipe rampup_batch_size
    recompute_granularity recompute_modules release reset_attention_mask reset_position_ids
    run_record_path save seq_length sequence_packing sequence_parallel sft skip_train spec
    start_weight_decay state_gib step_batch_size_schedule thd_max_packed_sequences thd_max_tokens
    tp_comm_overlap train_iters train_samples transformer_impl use_checkpoint_opt_param_scheduler
    use_fused_weighted_squared_relu use_grouped_gemm_for_dense_mlp
    use_grouped_gemm_for_shared_expert use_kitchen_attention use_mamba_mem_eff_path
    use_megatron_fsdp use_mup use_te_activation_func use_torch_fsdp2 use_transformer_engine_op_fuser
    variable_seq_lengths vocab_size weight_decay
    """.split()
)
"""All facts that rules read: options, and what is known of the machine and the release."""

_OTHER_NAMES = {
    "fp8_param": "fp8_param_gather",
    "num_experts": "num_moe_experts",
    "num_moe_experts": "num_experts",
    "te_precision_config_file": "quant_recipe",
    "kitchen_config_file": "quant_recipe",
    "kitchen_recipe_number": "quant_recipe",
}
"""Names that rules read, by the names of flags or of megatron-core's configuration."""


class Facts:
    """Options as attributes, built once from parsed arguments, a configuration, or both.

    An option has the name of its flag or of its field in ``TransformerConfig``, whichever the
    source has; members of enums are their names. Later sources, objects or mappings, win. An option
    that none has is as in :data:`DEFAULTS`, else None. A name that is not in :data:`NAMES` is an
    ``AttributeError``, so that a rule with a misspelt name fails instead of never speaking.
    """

    def __init__(self, *sources: object, **more: Any) -> None:
        given: dict[str, Any] = {}
        for source in (*sources, more):
            given |= source if isinstance(source, Mapping) else vars(source)
        for name, other in _OTHER_NAMES.items():
            # 0 is the number of a recipe.
            if given.get(name) is not None and given[name] is not False:
                given[other] = given[name]
        if given.get("cuda_graph_impl", "none") is None:
            given["cuda_graph_impl"] = "none"
        if "cpu_offloading" not in given and "cpu_offloading_num_layers" in given:
            given["cpu_offloading"] = (given["cpu_offloading_num_layers"] or 0) > 0
        known = NAMES & given.keys()
        vars(self).update((name, _plain(given[name])) for name in known)

    @classmethod
    def of(cls, options: object, **more: Any) -> Facts:
        """Return ``options`` as facts; facts stay as they are, unless there is more."""
        if isinstance(options, Facts) and not more:
            return options
        return cls(options, **more)

    def __getattr__(self, name: str) -> Any:
        if name not in NAMES:
            raise AttributeError(f"{name!r} is no fact that rules read; add it to NAMES")
        return DEFAULTS.get(name)

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def lacks(self, option: str) -> bool:
        """Whether the source has the option, and it is off."""
        return not self[option] and option in vars(self)

    def fill(self, text: str) -> str:
        """Return a format string over options with their values."""
        return text.format_map(self)


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value.name if isinstance(value, enum.Enum) else value
