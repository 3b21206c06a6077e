# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Derive a model's shape from megatron's flags, for a plan without a GPU.

Megatron parses and validates the flags, so every default and derived value is the same as in
training. Models whose sizes cannot be derived are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Optional
from unittest import mock

from megatron.slipstream.estimate.gpus import FP8_RATE
from megatron.slipstream.estimate.layers import CHECKPOINT_INPUTS
from megatron.slipstream.estimate.model_shapes import (
    QUANTIZED_BYTES,
    AttentionBackend,
    ModelShape,
    Optimizer,
)
from megatron.slipstream.estimate.training_setup import (
    Configured,
    default_micro_batches,
    parallelism_of_options,
    pattern_fields,
    shape_of_options,
    usable_modules,
)
from megatron.slipstream.fine_grained_activation_offload.pass_policy import PassPolicy
from megatron.slipstream.integration.cpu import cpu_only
from megatron.slipstream.integration.entry import arguments, checks
from megatron.slipstream.integration.seam.compat import defaults_of_later_options
from megatron.slipstream.options import preflight, rules
from megatron.slipstream.options.facts import Facts
from megatron.slipstream.options.fields import OffloadConfig
from megatron.slipstream.options.modules import OF_LATENT_ATTENTION, OUTSIDE_LAYERS, has_layers


def configured_by_flags(
    flags: Sequence[str],
    num_processes: Optional[int] = None,
    num_micro_batches: Optional[int] = None,
    state_gib: Optional[float] = None,
) -> Configured:
    """Return the training setup that megatron's flags describe.

    Without a GPU, the CPU shims stay in place afterwards.

    Args:
        flags: Flags of the training script.
        num_processes: By default the minimum of the model parallelism.
        num_micro_batches: Number of micro-batches to plan; None for those of an iteration, or
            fewer if they suffice to show its steady state.
        state_gib: Weights, gradients and optimizer of a rank; None derives them from the
            parameters, for which some options are refused.

    Raises:
        ValueError: Training would refuse the flags on any machine, or they cannot be planned.
    """
    with checks.as_in_training():
        arguments.use_one_device_queue(flags)
        cpu_only.install_training_shims()
        args = checks.parse_for(flags, num_processes)
        arguments.apply_tokenizer(args)
        rules.require(checks.check_options(args))
        config = _config(args)
    # The configuration's values where they are set, else the arguments'.
    of_config = {name: value for name, value in vars(config).items() if value}
    rules.require(rules.check_rules(PLAN_RULES, Facts(args, of_config, state_gib=state_gib)))
    return _configured(args, config, num_micro_batches)


def _config(args: Any) -> Any:
    """Return the configuration that megatron creates from the arguments and validates."""
    from megatron.training import arguments as megatron_arguments

    try:
        with checks.naming_refusals(), _as_with_transformer_engine(args) as fused:
            megatron_arguments.validate_args(args, {})
            config = megatron_arguments.core_transformer_config_from_args(args)
        for name, value in fused.items():
            setattr(config, name, value)
        return config
    except (KeyError, TypeError, AttributeError) as error:
        # Megatron's code may raise any exception on unexpected input.
        raise ValueError(
            f"megatron cannot make a model of the flags: {type(error).__name__}: {error}; give "
            "all flags of the training"
        ) from error


@contextmanager
def _as_with_transformer_engine(args: Any) -> Iterator[dict[str, Any]]:
    """Let megatron validate for a machine with Transformer Engine, installed here or not.

    Without it, megatron refuses fp8 and some kernels. Those are turned off; yields their values.
    """
    if preflight.is_installed("transformer_engine"):
        yield {}
        return
    from megatron.core import utils
    from packaging.version import Version

    names = ("apply_rope_fusion", "moe_permute_fusion")
    fused = {name: getattr(args, name) for name in names}
    for name in names:
        setattr(args, name, False)
    with mock.patch.object(utils, "_te_version", Version("2.20.0")):
        yield fused


def _is_at_most_1(option: str) -> rules.Predicate:
    return lambda facts: (getattr(facts, option) or 1) <= 1


PLAN_RULES: tuple[rules.Rule, ...] = (
    *rules.Condition("with a plan from flags", rules.always).rows(
        """
        hybrid_layer_pattern: what D (sparse attention) saves is not modelled; plan a recorded
            iteration of the model (offload_trace_path) instead, or a pattern of + for D
        use_mamba_mem_eff_path: what Mamba saves on its other path is not modelled;
            leave --disable-mamba-mem-eff-path out
        deterministic_mode: what a gated delta net saves without its kernels is not modelled
        fp4: what Transformer Engine keeps of a quantised tensor depends on recipe and GPU and has
            not been measured;
            leave it out for sizes in 16 bits, an upper limit, or plan a recorded trace
        fp8_recipe fp8_dot_product_attention mtp_num_layers heterogeneous_layers_config_path
            experimental_attention_variant attention_output_gate qk_l2_norm fp32_residual_connection
            cpu_offloading moe_expert_capacity_factor moe_latent_size moe_apply_probs_on_input
            use_transformer_engine_op_fuser use_te_activation_func activation_func_fp8_input_store
            overlap_moe_expert_parallel_comm delay_wgrad_compute defer_embedding_wgrad_compute
            moe_paged_stash moe_expert_rank_capacity_factor fused_residual_rmsnorm
            use_grouped_gemm_for_dense_mlp use_grouped_gemm_for_shared_expert use_kitchen_attention
            hybrid_context_parallel logits_load_dir perform_rl_step mlp_chunks_for_training
            heterogeneous_layers_config_encoded_json use_fused_weighted_squared_relu
            overlap_dispatch_backward_with_experts_wgrad distribute_saved_activations:
            what its layers save is not modelled
        offload_checkpoint_inputs: inputs that checkpoints of modules keep are not modelled;
            leave it out, or set recompute_granularity=full
        activation_memory_budget: training chooses from what it measures;
            leave it out; --frontier of 'slipstream plan' shows what budgets give
        offload_engine in slipstream: megatron-core's engine follows no plan;
            set offload_engine=slipstream
        loss_sequence_tiles in 1, None, auto:
            only tiles whose length follows from shapes are modelled; set loss_sequence_tiles=auto
        mlp_sequence_tiles in 1, None, auto:
            only tiles whose length follows from shapes are modelled; set mlp_sequence_tiles=auto
        cuda_graph_impl in none: what its layers save is not modelled
        cuda_graph_granularity in layer: what its layers save is not modelled
        transformer_impl in transformer_engine, local: what its layers save is not modelled;
            set transformer_impl=transformer_engine
        moe_grouped_gemm: megatron-core marks the experts only if they are grouped;
            set --moe-grouped-gemm
        moe_token_dispatcher_type: the tokens that it gathers are not modelled;
            set --moe-token-dispatcher-type alltoall
        """,
        hybrid_layer_pattern=lambda f: not has_layers(f, "D"),
        use_mamba_mem_eff_path=lambda f: (
            f.use_mamba_mem_eff_path is not False or not has_layers(f, "M")
        ),
        deterministic_mode=lambda f: not f.deterministic_mode or not has_layers(f, "G"),
        fp8_recipe=lambda f: not f.fp8 or f.fp8_recipe in QUANTIZED_BYTES,
        mtp_num_layers=lambda f: not f.mtp_num_layers or has_layers(f, "/"),
        offload_checkpoint_inputs=lambda f: (
            not f.offload_checkpoint_inputs or f.recompute_granularity == "full"
        ),
        mlp_chunks_for_training=_is_at_most_1("mlp_chunks_for_training"),
        moe_grouped_gemm=lambda f: not f.num_moe_experts or f.moe_grouped_gemm,
        # With one rank, nothing is gathered.
        moe_token_dispatcher_type=lambda f: (
            f.moe_token_dispatcher_type != "allgather"
            or not f.num_moe_experts
            or f.expert_model_parallel_size == f.tensor_model_parallel_size == 1
        ),
    ),
    *rules.Condition("with a plan from flags", lambda f: f.state_gib is None).rows(
        """
        use_megatron_fsdp use_torch_fsdp2 fp4_param_gather freeze_all_layers optimizer
            fp8_param_gather num_distributed_optimizer_instances gtp_weight_remat_size
            expert_gtp_weight_remat_size:
            state is planned as 16-bit weights, their gradients and Adam's state;
            set --state-gib to the GiB of weights, gradients and optimizer on a rank
        """,
        optimizer=rules.is_one_of("optimizer", ("adam",)),
        fp8_param_gather=lambda f: not f.fp8_param_gather or f.fp8_recipe == "mxfp8",
        num_distributed_optimizer_instances=_is_at_most_1("num_distributed_optimizer_instances"),
        gtp_weight_remat_size=_is_at_most_1("gtp_weight_remat_size"),
        expert_gtp_weight_remat_size=_is_at_most_1("expert_gtp_weight_remat_size"),
    ),
    rules.option_rule(
        "vocab_size",
        rules.always,
        lambda f: f.vocab_size is not None,
        "vocab_size is not set, so the size of the output layer is not known",
        "set --vocab-size, or --tokenizer-json",
    ),
)
"""Restrictions of a plan on options that training supports."""


def _configured(args: Any, config: Any, num_micro_batches: Optional[int]) -> Configured:
    shape = _shape(args, config)
    in_iteration = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    count = num_micro_batches
    if count is None:
        count = min(in_iteration, default_micro_batches(shape.parallelism))
    moved = (args.offload_modules or ()) if config.fine_grained_activation_offloading else ()
    latent = [name for name in moved if name in OF_LATENT_ATTENTION]
    outside = [name for name in moved if name in OUTSIDE_LAYERS]
    planned = ("qkv_linear" if name in latent else name for name in moved if name not in outside)
    modules = tuple(dict.fromkeys(planned))
    if modules and args.offload_checkpoint_inputs:
        modules = (CHECKPOINT_INPUTS, *modules)
    is_auto = args.attention_backend.name == "auto" and args.transformer_impl != "local"
    is_deterministic = shape.deterministic_mode and shape.attention_backend == "fused"
    notes = (
        (in_iteration > count and num_micro_batches is None,
         f"{count} of {in_iteration} micro-batches are planned, since the rest repeats them "
         "(--num-micro-batches plans others)"),
        (latent, f"planned as qkv_linear, which contains them: {', '.join(latent)}"),
        (outside, f"planned as if they stayed: {', '.join(outside)}"),
        (not modules, "the flags offload nothing; planned as if all modules might move"),
        (shape.fp8_recipe,
         "sizes and times under fp8 are derived, not measured: products of linear layers take "
         f"1 / {FP8_RATE:g} of those in 16 bits, and their inputs are quantized"),
        (args.position_embedding_type == "learned_absolute",
         "state leaves out the position embeddings, of max_position_embeddings rows"),
        (is_auto, f"attention_backend=auto is taken to be {shape.attention_backend}"),
        (is_deterministic,
         "deterministic attention is planned as on Hopper, with cuDNN before 9.25"),
    )  # fmt: skip
    own = OffloadConfig.of(args)
    model = SimpleNamespace(**{**defaults_of_later_options(), **vars(config)})
    options = PassPolicy.of(model).applied_to(own.policy_options())
    return Configured(
        "megatron's flags",
        shape,
        modules or usable_modules(shape),
        count,
        config.min_offloaded_tensor_size,
        # Host memory is that of another machine, so a limit applies only if it is given.
        replace(options, host_memory_limit_bytes=own.offload_host_memory_limit_bytes),
        tuple(text for applies, text in notes if applies),
    )


def _shape(args: Any, config: Any) -> ModelShape:
    cp_comm_type = args.cp_comm_type
    if isinstance(cp_comm_type, list):  # One for all layers, or one for each.
        cp_comm_type = cp_comm_type[0]
    vocab_size = getattr(args, "padded_vocab_size", None)
    if vocab_size is None:
        multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
        vocab_size = -(-args.vocab_size // multiple) * multiple
    parallelism = parallelism_of_options(
        config,
        dp=args.data_parallel_size,
        shards_optimizer=bool(args.use_distributed_optimizer),
        cp_comm_type=cp_comm_type,
    )
    return shape_of_config(
        config,
        args.hybrid_layer_pattern,
        parallelism=parallelism,
        vocab_size=vocab_size,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        attention_backend=_backend(args, config),
        # Without rotary embeddings there are no rotary tables.
        apply_rope_fusion=config.apply_rope_fusion or args.position_embedding_type != "rope",
        optimizer=_optimizer(args),
        mlp_sequence_tiles=args.mlp_sequence_tiles == "auto",
        loss_sequence_tiles=args.loss_sequence_tiles == "auto",
    )


def _optimizer(args: Any) -> Optimizer:
    """Return the bytes of gradients and optimizer state.

    megatron-core's optimizer on the host has its state in float32 on both sides. Transformer
    Engine's keeps only the lower half of a main weight beside a 16-bit weight.
    """
    is_16_bit = (args.fp16 or args.bf16) and not args.accumulate_allreduce_grads_in_fp32
    found = Optimizer(2 if is_16_bit else 4)
    if args.fp8:
        weight_bytes = 2 * QUANTIZED_BYTES[args.fp8_recipe]
        found = replace(found, weight_bytes=weight_bytes + (0 if args.fp8_param_gather else 2))
    if args.optimizer_cpu_offload:
        return replace(found, host_share=args.optimizer_offload_fraction)
    if not args.use_precision_aware_optimizer:
        return found
    main_bytes = args.main_params_dtype.itemsize
    if args.bf16 and main_bytes == 4 and (not args.fp8 or args.fp8_recipe == "delayed"):
        main_bytes = 2
    moment_bytes = args.exp_avg_dtype.itemsize + args.exp_avg_sq_dtype.itemsize
    return replace(found, main_bytes=main_bytes, moment_bytes=moment_bytes)


def shape_of_config(config: Any, pattern: Optional[str], **training: Any) -> ModelShape:
    """Return the shape of the model that a ``TransformerConfig`` describes.

    ``pattern`` is the ``hybrid_layer_pattern`` of a hybrid model; ``training`` has fields of
    :class:`ModelShape` that the configuration lacks, or that override its values.
    """
    counts = () if "|" in (pattern or "") else _layers_per_chunk(config)
    if pattern is None:
        return shape_of_options(config, layers_per_chunk=counts, **training)
    return shape_of_options(config, **pattern_fields(config, pattern, counts), **training)


def _backend(args: Any, config: Any) -> AttentionBackend:
    if args.transformer_impl == "local":
        return "local"
    given = args.attention_backend.name
    if given in ("fused", "flash", "unfused"):
        return given
    return "fused" if config.bf16 or config.fp16 else "unfused"


def _layers_per_chunk(config: Any) -> tuple[tuple[int, ...], ...]:
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    def count(rank: int, stage: int) -> int:
        layout = config.pipeline_model_parallel_layout
        if layout is not None:
            return int(layout.layout[rank][stage].count(LayerType.decoder))
        vp_stage = stage if config.virtual_pipeline_model_parallel_size else None
        return int(get_num_layers_to_build(config, vp_stage, rank))

    stages = range(config.virtual_pipeline_model_parallel_size or 1)
    ranks = range(config.pipeline_model_parallel_size)
    return tuple(tuple(count(rank, stage) for stage in stages) for rank in ranks)
