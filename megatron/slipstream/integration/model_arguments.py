# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""From megatron's own flags to a model's shape, for a plan without a GPU.

The flags are parsed and validated by megatron, so that every default and every derived value is
what a training would have. What a plan cannot know the sizes of is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Optional

from megatron.slipstream import preflight
from megatron.slipstream.estimate.model_shapes import (
    AttentionBackend,
    Experts,
    LatentAttention,
    ModelShape,
    Parallelism,
    Precision,
)
from megatron.slipstream.estimate.training_setup import (
    Configured,
    default_micro_batches,
    usable_modules,
)
from megatron.slipstream.integration import arguments, cpu_only, doctor


def configured_by_flags(
    flags: Sequence[str],
    num_processes: Optional[int] = None,
    num_micro_batches: Optional[int] = None,
) -> Configured:
    """The training that megatron's flags describe.

    Without a GPU, megatron's modules see the CPU shims from then on.

    Args:
        flags: Those of the training script; those that have nothing to do with sizes do no harm.
        num_processes: How many processes the training has; None for the fewest that its model
            parallelism needs.
        num_micro_batches: How many to plan; None for those of an iteration, or as many of them as
            show what repeats.

    Raises:
        ValueError: megatron refuses the flags, or a plan cannot be made of them.
    """
    environment = {
        # What a launcher and the training script set, and megatron insists on.
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "NVTE_CPU_OFFLOAD_V1": "1",
        "RANK": "0",
        "WORLD_SIZE": "1",
    }
    with doctor._quiet(), doctor._environment(environment):
        args, config = _parse(flags, num_processes)
    for message in _refusals(args, config):
        raise ValueError(message)
    return _configured(args, config, num_micro_batches)


def _parse(flags: Sequence[str], num_processes: Optional[int]) -> tuple[Any, Any]:
    """Megatron's arguments, validated, and the configuration that it makes of them."""
    if {"-h", "--help"} & set(flags):
        raise ValueError("the flags ask for help, so there is nothing to plan; leave --help out")
    if any(flag.split("=")[0] == "--yaml-cfg" for flag in flags):
        arguments.parse_and_validate(flags)  # which refuses it before anything else
    cpu_only.install_training_shims()
    from megatron.training import arguments as megatron_arguments

    with arguments._process_arguments(flags):
        args = megatron_arguments.parse_args(arguments.add_arguments)
    args.world_size = num_processes or doctor._fewest_processes(args)
    arguments._apply_tokenizer(args)
    fused = _hide_fusions(args)
    try:
        megatron_arguments.validate_args(args, {})
        config = megatron_arguments.core_transformer_config_from_args(args)
        for name, value in fused.items():
            setattr(config, name, value)
        return args, config
    except AssertionError as error:
        raise arguments.refused_by_megatron(error) from error
    except (KeyError, TypeError, AttributeError) as error:
        # Megatron's code fails in any way on what it did not expect.
        raise ValueError(
            f"megatron cannot make a model of the flags: {type(error).__name__}: {error}; give "
            "all flags of the training"
        ) from error


def _hide_fusions(args: Any) -> dict[str, Any]:
    """Turn kernels of Transformer Engine off where it is not installed; gives what they were.

    megatron refuses them there, and a plan is made for a machine that has it.
    """
    if preflight.is_installed("transformer_engine"):
        return {}
    names = [name for name in ("apply_rope_fusion", "moe_permute_fusion") if hasattr(args, name)]
    fused = {name: getattr(args, name) for name in names}
    for name in names:
        setattr(args, name, False)
    return fused


class _Refusal(NamedTuple):
    """Something that changes what layers save and that is not modelled."""

    option: str
    is_on: Callable[[Any, Any], Any]
    """Of the arguments and the configuration; what is true is on."""
    cure: str = "leave it out"
    because: str = "what its layers save is not modelled"


def _get(name: str) -> Callable[[Any, Any], Any]:
    return lambda args, config: getattr(config, name, None) or getattr(args, name, None)


_IN_16_BITS = "leave it out for sizes in 16 bits, an upper limit, or plan a recorded trace"
_BY_RECIPE = (
    "what Transformer Engine keeps of a quantised tensor depends on recipe and GPU, and nobody has "
    "measured it"
)

_REFUSED = (
    _Refusal("fp8", _get("fp8"), _IN_16_BITS, _BY_RECIPE),
    _Refusal("fp4", _get("fp4"), _IN_16_BITS, _BY_RECIPE),
    _Refusal(
        "recompute_granularity",
        lambda args, config: config.recompute_granularity == "full" and "full",
        "set 'selective'",
        "layers then keep nothing but their inputs, which no module holds",
    ),
    _Refusal("mtp_num_layers", _get("mtp_num_layers")),
    _Refusal("hybrid_layer_pattern", _get("hybrid_layer_pattern")),
    _Refusal("heterogeneous_layers_config_path", _get("heterogeneous_layers_config_path")),
    _Refusal("experimental_attention_variant", _get("experimental_attention_variant")),
    _Refusal("attention_output_gate", _get("attention_output_gate")),
    _Refusal("qk_l2_norm", _get("qk_l2_norm")),
    _Refusal("fp32_residual_connection", _get("fp32_residual_connection")),
    _Refusal("cpu_offloading", _get("cpu_offloading")),
    _Refusal("moe_expert_capacity_factor", _get("moe_expert_capacity_factor")),
    _Refusal("moe_latent_size", _get("moe_latent_size")),
    _Refusal("moe_apply_probs_on_input", _get("moe_apply_probs_on_input")),
    _Refusal("use_transformer_engine_op_fuser", _get("use_transformer_engine_op_fuser")),
    _Refusal("use_te_activation_func", _get("use_te_activation_func")),
    _Refusal("activation_func_fp8_input_store", _get("activation_func_fp8_input_store")),
    _Refusal("overlap_moe_expert_parallel_comm", _get("overlap_moe_expert_parallel_comm")),
    _Refusal("mlp_chunks_for_training", lambda a, c: getattr(c, "mlp_chunks_for_training", 1) > 1),
    _Refusal("cuda_graph_impl", lambda args, config: _graphs(config)),
    _Refusal(
        "transformer_impl",
        lambda args, config: (
            args.transformer_impl not in ("transformer_engine", "local") and args.transformer_impl
        ),
        "set 'transformer_engine'",
    ),
    _Refusal(
        "moe_grouped_gemm=False",
        lambda args, config: config.num_moe_experts and not config.moe_grouped_gemm,
        "set --moe-grouped-gemm",
        "megatron-core marks the experts only if they are grouped",
    ),
)


def _graphs(config: Any) -> Any:
    implementation = getattr(config, "cuda_graph_impl", "none")
    return implementation != "none" and implementation


def _refusals(args: Any, config: Any) -> Iterator[str]:
    for option, is_on, cure, because in _REFUSED:
        value = is_on(args, config)
        if value:
            shown = option if "=" in option else f"{option}={value}"
            yield f"{shown} is not supported with a plan from flags because {because}; {cure}"
    if args.vocab_size is None and getattr(args, "padded_vocab_size", None) is None:
        yield (
            "vocab_size is not set, so the size of the output layer is not known; set "
            "--vocab-size, or --tokenizer-json"
        )


def _configured(args: Any, config: Any, num_micro_batches: Optional[int]) -> Configured:
    shape = _shape(args, config)
    in_iteration = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    limit = num_micro_batches or default_micro_batches(shape.parallelism)
    notes = []
    if in_iteration > limit and num_micro_batches is None:
        notes.append(
            f"{limit} of {in_iteration} micro-batches are planned, since the rest repeats them "
            "(--num-micro-batches plans others)"
        )
    modules = tuple(args.offload_modules or ()) if config.fine_grained_activation_offloading else ()
    if not modules:
        notes.append("the flags offload nothing; planned as if all modules might move")
    if args.attention_backend.name == "auto" and args.transformer_impl != "local":
        notes.append(f"attention_backend=auto is taken to be {shape.attention_backend}")
    return Configured(
        f"megatron's flags on {args.world_size} GPU{'s' if args.world_size > 1 else ''}",
        shape,
        modules or usable_modules(shape),
        num_micro_batches if num_micro_batches is not None else min(in_iteration, limit),
        config.min_offloaded_tensor_size,
        getattr(config, "activation_offload_fraction", 1.0),
        getattr(config, "delta_offload_bytes_across_pp_ranks", 0),
        tuple(notes),
    )


def _shape(args: Any, config: Any) -> ModelShape:
    dp = args.data_parallel_size if args.use_distributed_optimizer else 1
    cp_comm_type = args.cp_comm_type
    if isinstance(cp_comm_type, list):  # One for all layers, or one for each.
        cp_comm_type = cp_comm_type[0]
    shape = shape_of_config(
        config,
        vocab_size=_padded_vocab_size(args),
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        attention_backend=_backend(args, config),
        # Without rotary embeddings there are no tables of them either.
        apply_rope_fusion=config.apply_rope_fusion or args.position_embedding_type != "rope",
    )
    parallelism = replace(shape.parallelism, dp=dp, cp_comm_type=cp_comm_type or "p2p")
    return replace(shape, parallelism=parallelism)


def shape_of_config(config: Any, **training: Any) -> ModelShape:
    """The shape of a model that megatron-core would make of a ``TransformerConfig``.

    Args:
        config: The configuration.
        training: Fields of :class:`ModelShape` that it does not hold, or that it has otherwise.

    Raises:
        ValueError: A plan cannot be made of them.
    """
    fields: dict[str, Any] = {
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "ffn_hidden_size": config.ffn_hidden_size,
        "num_query_groups": config.num_query_groups,
        "kv_channels": config.kv_channels,
        "gated_linear_unit": config.gated_linear_unit,
        "normalization": config.normalization,
        "qk_layernorm": config.qk_layernorm,
        "window_size": _window(config),
        "latent_attention": _latent(config),
        "experts": _experts(config),
        "moe_layers": _moe_layers(config),
        "precision": _precision(config),
        "bias_activation_fusion": config.bias_activation_fusion,
        "apply_rope_fusion": config.apply_rope_fusion,
        "attention_softmax_in_fp32": config.attention_softmax_in_fp32,
        "attention_dropout": config.attention_dropout,
        "hidden_dropout": config.hidden_dropout,
        "recompute_modules": frozenset(
            config.recompute_modules if config.recompute_granularity == "selective" else ()
        ),
        "parallelism": _parallelism(config),
        "layers_per_chunk": _layers_per_chunk(config),
    }
    return ModelShape(**(fields | training))


def _padded_vocab_size(args: Any) -> int:
    padded = getattr(args, "padded_vocab_size", None)
    if padded is not None:
        return int(padded)
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return -(-int(args.vocab_size) // int(multiple)) * int(multiple)


def _window(config: Any) -> Optional[int]:
    window = getattr(config, "window_size", None)
    is_everywhere = getattr(config, "window_attn_skip_freq", None) is None
    return int(window[0]) if window and is_everywhere and window[0] > 0 else None


def _latent(config: Any) -> Optional[LatentAttention]:
    if not config.multi_latent_attention:
        return None
    return LatentAttention(
        config.q_lora_rank,
        config.kv_lora_rank,
        config.qk_head_dim,
        config.qk_pos_emb_head_dim,
        config.v_head_dim,
    )


def _experts(config: Any) -> Optional[Experts]:
    if not config.num_moe_experts:
        return None
    return Experts(
        config.num_moe_experts,
        config.moe_router_topk,
        config.moe_ffn_hidden_size,
        config.moe_shared_expert_intermediate_size or 0,
    )


def _moe_layers(config: Any) -> tuple[bool, ...]:
    frequency = config.moe_layer_freq
    if not config.num_moe_experts:
        return ()
    if isinstance(frequency, int):
        return tuple(layer % frequency == 0 for layer in range(config.num_layers))
    return tuple(map(bool, frequency))


def _precision(config: Any) -> Precision:
    return "bf16" if config.bf16 else "fp16" if config.fp16 else "fp32"


def _backend(args: Any, config: Any) -> AttentionBackend:
    if args.transformer_impl == "local":
        return "local"
    given = args.attention_backend.name
    if given in ("fused", "flash", "unfused"):
        return given
    return "unfused" if _precision(config) == "fp32" else "fused"


def _parallelism(config: Any) -> Parallelism:
    return Parallelism(
        tp=config.tensor_model_parallel_size,
        sequence_parallel=bool(config.sequence_parallel),
        cp=config.context_parallel_size,
        pp=config.pipeline_model_parallel_size,
        vpp=config.virtual_pipeline_model_parallel_size,
        group_size=config.microbatch_group_size_per_vp_stage,
        ep=config.expert_model_parallel_size,
        etp=config.expert_tensor_parallel_size or config.tensor_model_parallel_size,
    )


def _layers_per_chunk(config: Any) -> tuple[tuple[int, ...], ...]:
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    def count(rank: int, stage: int) -> int:
        layout = getattr(config, "pipeline_model_parallel_layout", None)
        if layout is not None:
            return int(layout.layout[rank][stage].count(LayerType.decoder))
        vp_stage = stage if config.virtual_pipeline_model_parallel_size else None
        return int(get_num_layers_to_build(config, vp_stage, rank))

    stages = range(config.virtual_pipeline_model_parallel_size or 1)
    ranks = range(config.pipeline_model_parallel_size)
    return tuple(tuple(count(rank, stage) for stage in stages) for rank in ranks)
