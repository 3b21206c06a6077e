# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Differences between the releases of megatron-core that Slipstream runs on.

The rest of ``integration`` is written for the newest of :data:`TESTED_RELEASES` and calls this
module where an older one differs. megatron-core is imported in functions, not at module level:
without a GPU, the shims must be installed first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn, Optional

import torch

from megatron.slipstream.options.fields import DEFAULTS
from megatron.slipstream.options.model import graphed_modules, offloads_with_our_engine
from megatron.slipstream.options.rules import (
    Finding,
    Predicate,
    Rule,
    always,
    as_flag,
    check_rules,
    option_rule,
)
from megatron.slipstream.patches import table
from megatron.slipstream.patches.patching import applied, resolve
from megatron.slipstream.patches.releases import TESTED_RELEASES, is_since, release
from megatron.slipstream.patches.training_loop import bound

# The offload manager


def missing_pass_arguments() -> tuple[int, ...]:
    """Return the pipeline rank, which models of 0.18 do not pass as first argument."""
    if is_since("0.19"):
        return ()
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return (0,)
    return (parallel_state.get_pipeline_model_parallel_rank(),)


def check_models_announce_passes() -> None:
    """Raise ``RuntimeError`` if models lack the method that tells the engine of a pass."""
    for model in ("gpt.gpt_model.GPTModel", "hybrid.hybrid_model.HybridModel"):
        resolve(
            f"megatron.core.models.{model}.preprocess_for_fine_grained_offloading",
            "the engine would not know where a pass begins",
        )


# CUDA graphs of layers


METHODS_OF_GRAPHED_LAYERS = (
    *("_te_cuda_graph_capture", "_te_cuda_graph_replay", "_get_te_cuda_graph_replay_args"),
    *("_should_call_te_cudagraph", "_forward_mlp"),
)
"""Private methods of a ``TransformerLayer`` that layers in graphs override."""


def check_layers_are_graphed() -> None:
    """Raise ``RuntimeError`` if layers lack a method that ours override to capture and replay."""
    for method in METHODS_OF_GRAPHED_LAYERS:
        resolve(
            f"megatron.core.transformer.transformer_layer.TransformerLayer.{method}",
            "CUDA graphs of layers would not be ordered with copies",
        )


def unmark_norms_at_graph_edges(layer: Any) -> None:
    """Unmark norms of a new layer whose input is an input or output of its graphs.

    A graph keeps that memory; and if a graph ends with the router, the group of the norm before it
    would begin inside the graph and end outside. From 0.19 on, layers do this themselves.
    """
    from megatron.core.transformer.transformer_layer import TransformerLayer

    if is_since("0.19") or not isinstance(layer, TransformerLayer):
        return
    captured = graphed_modules(layer.config)
    if "attn" in captured:
        layer.offload_attn_norm = False
    if layer.is_moe_layer:
        ends_at_mlp_norm = bool(captured & {"attn", "moe_router"})
    else:
        ends_at_mlp_norm = len(captured & {"attn", "mlp"}) == 1
    if ends_at_mlp_norm:
        layer.offload_mlp_norm = False


# Options


LATER_OPTIONS: Mapping[str, str] = {
    "activation_offload_fraction": "set offload_target_memory_gib or offload_max_overhead_percent, "
    "which choose how much moves",
    "delta_offload_bytes_across_pp_ranks": "set offload_target_memory_gib, which each pipeline "
    "rank meets by itself",
    "delay_offload_until_cuda_graph": "leave it out",
}
"""Offloading options new in megatron-core 0.19, and the alternative in earlier releases."""


def defaults_of_later_options() -> dict[str, Any]:
    """Return options of later megatron-core releases, with values equivalent to their absence."""
    return {name: DEFAULTS[name] for name in LATER_OPTIONS}


def refuse_later_flags(message: str) -> None:
    """Raise ``ValueError`` if argparse's message is about a flag that only a later release has."""
    for name in LATER_OPTIONS:
        if as_flag(name) in message:
            refuse_later_option(name)


def refuse_later_option(name: str) -> NoReturn:
    """Raise ``ValueError`` for an offloading option that only a later release has."""
    cure = LATER_OPTIONS.get(name, "leave it out")
    rule = _lacks(name, always, name, "that release does not have it", cure)
    raise ValueError(rule.found(release=release()).text)


def _lacks(
    option: str, when: Predicate, shown: str, because: str, cure: str = "leave it out"
) -> Rule:
    """Return the rule that refuses ``shown`` before 0.19 if ``when`` holds."""
    return option_rule(
        option,
        when,
        lambda facts: facts.is_since_0_19,
        f"{shown} is not supported with {{release}} because {because}",
        f"{cure}, or install megatron-core {TESTED_RELEASES[-1]}",
    )


def _not_built(name: str) -> Rule:
    return _lacks(
        name,
        lambda facts: facts.hybrid_layer_pattern is None and getattr(facts, name) is not None,
        f"{name}={{{name}}}",
        "its wheel has no builder of GPT models, and ours does not know the option",
        "build the model in a script of your own that calls install()",
    )


RELEASE_RULES: tuple[Rule, ...] = (
    _lacks(
        "offload_modules",
        lambda f: (
            f.fine_grained_activation_offloading and "fused_group_mlp" in (f.offload_modules or ())
        ),
        "offload_modules=fused_group_mlp",
        "that release does not mark it",
    ),
    _lacks(
        "cuda_graph_impl",
        lambda f: offloads_with_our_engine(f) and f.cuda_graph_impl == "local",
        "cuda_graph_impl=local with offloading",
        "that release supports offloading only with Transformer Engine's graphs",
        "set cuda_graph_impl=transformer_engine or none",
    ),
    _lacks(
        "cuda_graph_granularity",
        lambda f: f.cuda_graph_granularity == "chunk",
        "cuda_graph_granularity=chunk",
        "its training loop has no hook for built models",
    ),
    _lacks(
        "cuda_graph_impl",
        lambda f: f.cuda_graph_impl == "transformer_engine" and f.sequence_packing is not None,
        "cuda_graph_impl=transformer_engine with sequence_packing",
        "its training loop has no hook for built models",
    ),
    _lacks(
        "moe_sync_free_experts",
        lambda f: f.moe_sync_free_experts,
        "moe_sync_free_experts",
        "its expert layers are built otherwise",
    ),
    # What _GPT does not support.
    *map(_not_built, ("mtp_num_layers", "heterogeneous_layers_config_path")),
    *map(_not_built, ("experimental_attention_variant", "spec")),
)
"""Rules against options of later releases that the installed one does not support."""


def check_release(options: Any) -> list[Finding]:
    """Return findings about parsed options that the installed release does not support."""
    return check_rules(RELEASE_RULES, options, release=release(), is_since_0_19=is_since("0.19"))


# Training


def gpt_config(args: Any) -> Any:
    """Return the GPT model configuration that megatron's arguments describe, for a builder."""
    from megatron.training import argument_utils

    return argument_utils.gpt_config_from_args(args) if is_since("0.19") else _GPT(args)


class _GPT:
    """Builds the GPT model that megatron's arguments describe, for wheels without a builder."""

    def __init__(self, args: Any) -> None:
        from megatron.training.arguments import core_transformer_config_from_args

        self.transformer = core_transformer_config_from_args(args)
        self.transformer_layer_spec: Callable[..., Any] = self._layer_spec
        self.pre_wrap_hooks: list[Callable[[list[torch.nn.Module]], list[torch.nn.Module]]] = []
        self._args = args

    def build_model(
        self, pg_collection: Any, pre_process: bool, post_process: bool, vp_stage: Optional[int]
    ) -> torch.nn.Module:
        """Build one model chunk, as the builders of later releases do."""
        from megatron.core.models.gpt import GPTModel

        args = self._args
        model = GPTModel(
            config=self.transformer,
            transformer_layer_spec=self.transformer_layer_spec(self, vp_stage=vp_stage),
            vocab_size=args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            pre_process=pre_process,
            post_process=post_process,
            fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type,
            rotary_percent=args.rotary_percent,
            rotary_base=args.rotary_base,
            rope_scaling=args.use_rope_scaling,
            rope_scaling_factor=args.rope_scaling_factor,
            seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
            pg_collection=pg_collection,
            vp_stage=vp_stage,
        )
        for hook in self.pre_wrap_hooks:
            (model,) = hook([model])
        return model

    def _layer_spec(self, _: Any, vp_stage: Optional[int]) -> Any:
        return gpt_block_spec(self._args, self.transformer, vp_stage)


def gpt_block_spec(args: Any, transformer: Any, vp_stage: Optional[int]) -> Any:
    """Return the spec of a GPT model's layers from megatron's arguments, in every release."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    return get_gpt_decoder_block_spec(
        transformer,
        use_transformer_engine=args.transformer_impl == "transformer_engine",
        normalization=args.normalization,
        qk_l2_norm=args.qk_l2_norm,
        vp_stage=vp_stage,
    )


def slice_for_context_parallel(batch: dict[str, Any], cp_group: Any) -> dict[str, Any]:
    """Return this context-parallel rank's part of each sequence of an unpacked batch."""
    from megatron.core.utils import get_batch_on_this_cp_rank

    unpacked = {**batch, "cu_seqlens": None}
    return get_batch_on_this_cp_rank(unpacked, is_hybrid_cp=False, cp_group=cp_group)


Pretrain = Callable[[Callable[..., Any], Callable[..., Any], Callable[..., Any]], None]
"""``megatron.training.pretrain`` with three arguments: datasets, forward step, and a wrapper for
the function that finalises gradients."""


def bind_pretrain(args: Any, model: Any) -> Pretrain:
    """Bind all arguments of the installed ``pretrain`` except those of :data:`Pretrain`.

    Raises ``AssertionError`` if megatron refuses the arguments.
    """
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.enums import ModelType
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    from megatron import training

    kind, builder = ModelType.encoder_or_decoder, model
    if not is_since("0.19") and not isinstance(model, _GPT):
        builder = model.get_builder_cls()(model)

    def pretrain_by_config(datasets: Any, forward_step: Any, finalizing: Any) -> None:
        # The configuration has the functions that build the model and finalise gradients.
        finalize = container.model.finalize_model_grads_func or finalize_model_grads
        container.model.finalize_model_grads_func = finalizing(finalize)
        training.pretrain(container, datasets, kind, forward_step)

    def pretrain_by_function(datasets: Any, forward_step: Any, finalizing: Any) -> None:
        # 0.18: a function builds the model; the training loop sets the finalising function.
        def build(
            pre_process: bool = True,
            post_process: bool = True,
            vp_stage: Optional[int] = None,
            pg_collection: Any = None,
            **_: Any,
        ) -> torch.nn.Module:
            return builder.build_model(pg_collection, pre_process, post_process, vp_stage)

        with applied([bound(table.FINALIZE, finalizing)]):
            training.pretrain(container, datasets, build, kind, forward_step)

    container = pretrain_cfg_container_from_args(args, model)
    return pretrain_by_config if is_since("0.19") else pretrain_by_function
