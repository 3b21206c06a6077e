# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The flag of sync-free experts, and the options that it is incompatible with."""

from __future__ import annotations

from typing import Any

from megatron.slipstream.options.rules import Condition, Predicate, Rule, is_one_of, option_rule

_WITH_FAST_GROUPED_GEMM = (9, 10)
"""Major compute capabilities on which torch's grouped GEMM reads offsets on the device."""


def _is_on(facts: Any) -> bool:
    return bool(facts.moe_sync_free_experts)


def _is_on_gpu(facts: Any) -> bool:
    return _is_on(facts) and facts.capability is not None


_ON = "with moe_sync_free_experts"
_unsupported = Condition(_ON, _is_on)


def _is_a_multiple(option: str) -> Predicate:
    # 16 bytes of bf16.
    return lambda facts: (getattr(facts, option) or 0) % 8 == 0


EXPERT_RULES: tuple[Rule, ...] = (
    option_rule(
        "num_experts",
        _is_on,
        lambda f: bool(f.num_experts),
        "moe_sync_free_experts has no effect without num_experts",
        "set num_experts, or leave moe_sync_free_experts out",
    ),
    option_rule(
        "moe_sync_free_capacity_factor",
        lambda f: f.moe_sync_free_capacity_factor is not None,
        lambda f: f.moe_sync_free_capacity_factor >= 1,
        "moe_sync_free_capacity_factor={moe_sync_free_capacity_factor} has no room for tokens that "
        "are divided evenly",
        "set moe_sync_free_capacity_factor=1 or more, or leave it out",
    ),
    option_rule(
        "moe_sync_free_capacity_factor",
        lambda f: f.moe_sync_free_capacity_factor is not None,
        lambda f: f.moe_sync_free_experts and f.expert_model_parallel_size > 1,
        "moe_sync_free_capacity_factor has no effect without moe_sync_free_experts and "
        "expert_model_parallel_size above 1",
        "leave moe_sync_free_capacity_factor out",
    ),
    option_rule(
        "moe_token_dispatcher_type",
        lambda f: _is_on(f) and f.expert_model_parallel_size > 1,
        is_one_of("moe_token_dispatcher_type", ("alltoall", "flex")),  # the latter has its own rule
        "moe_token_dispatcher_type={moe_token_dispatcher_type} is not supported with "
        "moe_sync_free_experts and expert_model_parallel_size={expert_model_parallel_size} because "
        "tokens are exchanged between the ranks of their experts only",
        "set moe_token_dispatcher_type=alltoall",
    ),
    *_unsupported.rows(
        """
        tensor_model_parallel_size in 1: the experts' weights and tokens are not divided;
            set tensor_model_parallel_size=1
        moe_token_dispatcher_type in alltoall, allgather: its communication library tells the host
            how many tokens arrive; set alltoall or allgather
        moe_expert_capacity_factor:
            no token is dropped, which gives the experts a fixed number of rows
        moe_router_padding_for_quantization: it pads each expert by a number that the host reads
        moe_router_load_balancing_type: the host reads whether it has converged;
            set aux_loss, seq_aux_loss, global_aux_loss or none
        add_bias_linear: the experts' biases are added by the host's numbers of tokens;
            set add_bias_linear=False (--disable-bias-linear)
        fp16 fp8 fp4: torch's grouped GEMM multiplies bf16
        """,
        # One name, or a list.
        moe_router_load_balancing_type=lambda f: "sinkhorn" not in f.moe_router_load_balancing_type,
    ),
    option_rule(
        "quant_recipe",
        _is_on,
        lambda f: f.quant_recipe is None,
        "a precision for each module (te_precision_config_file, kitchen_config_file, "
        "kitchen_recipe_number, quant_recipe) is not supported with moe_sync_free_experts because "
        "torch's grouped GEMM multiplies bf16",
        "leave it out",
    ),
    *_unsupported.rows(
        """
        hidden_size moe_ffn_hidden_size moe_latent_size:
            a grouped GEMM reads rows in steps of 16 bytes; set a multiple of 8
        delay_wgrad_compute overlap_dispatch_backward_with_experts_wgrad:
            weight gradients are computed with those of the tokens
        use_transformer_engine_op_fuser: its fused experts are other modules
        moe_paged_stash: it stashes what the fused experts of Transformer Engine
            (use_transformer_engine_op_fuser) save in MXFP8 or NVFP4, and nothing of other experts
        use_megatron_fsdp use_torch_fsdp2: it does not know a weight of all experts;
            use distributed data parallelism (use_distributed_optimizer)
        cuda_graph_impl in none: graphs of layers are not tested with these experts;
            set cuda_graph_impl=none
        """,
        hidden_size=_is_a_multiple("hidden_size"),
        moe_ffn_hidden_size=_is_a_multiple("moe_ffn_hidden_size"),
        moe_latent_size=_is_a_multiple("moe_latent_size"),
    ),
    Condition(f"{_ON} on a GPU", _is_on_gpu)(
        "bf16",
        "torch's grouped GEMM waits for the GPU in any other precision",
        "set bf16=True",
        lambda f: f.bf16,
    ),
    option_rule(
        "moe_sync_free_experts",
        _is_on_gpu,
        lambda f: f.capability[0] in _WITH_FAST_GROUPED_GEMM,
        "moe_sync_free_experts is not supported on a GPU of compute capability {capability} "
        "because torch's grouped GEMM waits for the GPU on any but 9.x and 10.x",
        "leave moe_sync_free_experts out",
    ),
)
"""Requirements on ``ExpertOptions`` and on megatron's options; they also read ``capability``, the
GPU's (major, minor), None without one."""
