# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The flags of packed training, and the options that they are incompatible with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from megatron.slipstream.options.facts import Facts
from megatron.slipstream.options.model import graphed_modules
from megatron.slipstream.options.rules import (
    Condition,
    Finding,
    Rule,
    check_by,
    check_rules,
    option_rule,
)
from megatron.slipstream.packed_sequences.packing import pack_limits


def _packs(facts: Any) -> bool:
    return facts.sequence_packing is not None


_PACKS = "with sequence_packing={sequence_packing}"
_unsupported = Condition(_PACKS, _packs)
_unsupported_if_balanced = Condition(
    "with sequence_packing=balanced", lambda f: f.sequence_packing == "balanced"
)


def _captures_layers(facts: Any) -> bool:
    return _packs(facts) and bool(facts.cuda_graph_impl == "transformer_engine")


def _captures_attention(facts: Any) -> bool:
    parts = graphed_modules(facts)
    return _captures_layers(facts) and (not parts or "attn" in parts)


_LAYERS = f"{_PACKS} and cuda_graph_impl={{cuda_graph_impl}}"
_unsupported_in_layers = Condition(_LAYERS, _captures_layers)


def _needs_packing(option: str) -> Rule:
    return option_rule(
        option,
        lambda facts: not _packs(facts),
        lambda facts: getattr(facts, option) is None,
        f"{option}={{{option}}} has no effect without sequence_packing",
        f"set sequence_packing=greedy or balanced, or leave {option} out",
    )


def _predicts_more(facts: Any) -> bool:
    """Whether multi-token prediction is on; hybrid models have it in their pattern."""
    return bool(facts.mtp_num_layers) or "/" in (facts.hybrid_layer_pattern or "")


def _predicts_more_with_experts(facts: Any) -> bool:
    return _predicts_more(facts) and bool(facts.num_experts)


def _balances_by_token(facts: Any) -> bool:
    given = facts.moe_router_load_balancing_type
    kinds = {given} if isinstance(given, str) else set(given)
    return not kinds & {"sinkhorn", "quantile_balancing"}


PACKED_LAYER_RULES: tuple[Rule, ...] = (
    _unsupported_in_layers(
        "cuda_graph_warmup_steps",
        "what layers are called with is learned from an iteration without graphs",
        "set at least 1",
        lambda f: f.cuda_graph_warmup_steps >= 1,
    ),
    Condition(_LAYERS, _captures_attention)(
        "apply_rope_fusion",
        "unfused rotary embeddings read the lengths of sequences from the GPU",
        "leave --no-rope-fusion out, or attn out of cuda_graph_modules",
        lambda f: f.apply_rope_fusion,
    ),
    *_unsupported_in_layers.rows(
        """
        fp8 fp4: the graphs of a layer would share quantized weights that each of them computes
        overlap_moe_expert_parallel_comm: its schedule interleaves the layers of two micro-batches
        delay_wgrad_compute:
            the graphs of weight gradients are found by the number of the micro-batch
        """
    ),
    Condition(
        _LAYERS, lambda f: _captures_layers(f) and bool(f.fine_grained_activation_offloading)
    )(
        "offload_engine",
        "megatron-core's engine expects a graph for each micro-batch",
        "set offload_engine=slipstream",
        ("slipstream",),
    ),
)

PACKING_RULES: tuple[Rule, ...] = (
    _needs_packing("thd_max_packed_sequences"),
    _needs_packing("thd_max_tokens"),
    option_rule(
        "micro_batch_size",
        _packs,
        lambda f: f.micro_batch_size == 1 and f.eval_micro_batch_size in (None, 1),
        "micro_batch_size={micro_batch_size} (eval_micro_batch_size={eval_micro_batch_size}) is "
        "not supported with sequence_packing={sequence_packing} because a micro-batch is one "
        "buffer of packed documents",
        "set 1 and a larger seq_length",
    ),
    Condition("seq_length={seq_length} and context_parallel_size={context_parallel_size}", _packs)(
        "thd_max_tokens",
        "pipeline stages exchange tensors of seq_length / context_parallel_size tokens",
        "set seq_length to thd_max_tokens times context_parallel_size, or leave thd_max_tokens out",
        lambda f: (
            f.thd_max_tokens is None or f.thd_max_tokens * f.context_parallel_size == f.seq_length
        ),
    ),
    option_rule(
        "calculate_per_token_loss",
        lambda f: _packs(f) and f.context_parallel_size > 1,
        lambda f: f.calculate_per_token_loss,
        "sequence_packing={sequence_packing} is not supported with "
        "context_parallel_size={context_parallel_size} unless the loss is per token, because "
        "ranks have different numbers of labels that count",
        "set calculate_per_token_loss=True",
    ),
    *_unsupported.rows(
        """
        reset_position_ids: packing restarts positions in every document
        reset_attention_mask: packing hides documents from each other
        dataloader_inter_document_masking: both pack documents, and only one can make the batches;
            leave one of them out
        sft: its dataset makes its own packs; leave one of them out
        hybrid_context_parallel: its scheduler makes its own micro-batches; leave one of them out
        dataloader_fast_cache_load dataloader_defer_npy_index_mmap:
            it expects the index files of megatron's own datasets
        dataloader_type in None, single, cyclic: megatron then does not make the batches;
            set 'single'
        """
    ),
    *_unsupported_if_balanced.rows(
        """
        dataloader_type in None, single: shuffled micro-batches are no longer balanced within a
            batch; set 'single' (documents are shuffled before they are packed), or
            sequence_packing=greedy
        rampup_batch_size step_batch_size_schedule decrease_batch_size_if_needed:
            packs are spread over batches of one size; set sequence_packing=greedy
        """
    ),
    *_unsupported.rows(
        """
        moe_router_load_balancing_type:
            it routes each token depending on all others, padding included;
            set aux_loss, seq_aux_loss, global_aux_loss or none
        hybrid_layer_pattern: other layers than attention, MLP and MoE are not known to keep
            documents apart (the state of some carries over);
            use only * (attention), + (multi-latent attention), - (MLP) and E (MoE)
        experimental_attention_variant: such layers are not known to keep documents apart
        """,
        moe_router_load_balancing_type=_balances_by_token,
        hybrid_layer_pattern=lambda f: not set(f.hybrid_layer_pattern or "") - set("*+-E|/"),
    ),
    Condition(_PACKS, lambda f: _packs(f) and f.transformer_impl == "transformer_engine")(
        "attention_backend",
        "Transformer Engine's FlashAttention 2 and unfused attention take no padding between "
        "sequences",
        "set fused",
        ("auto", "fused"),
    ),
    _unsupported(
        "cuda_graph_impl",
        "those graphs have no sequence offsets",
        "set transformer_engine, or leave it out and set cuda_graph_granularity=chunk",
        ("none", "transformer_engine"),
    ),
    *PACKED_LAYER_RULES,
    _unsupported(
        "position_embedding_type",
        "its positions are not those of tokens in a document",
        "set rope",
        lambda f: f.position_embedding_type != "mrope",
    ),
    option_rule(
        "mtp_num_layers",
        lambda f: _packs(f) and f.context_parallel_size > 1,
        lambda f: not _predicts_more(f),
        "mtp_num_layers={mtp_num_layers} (hybrid_layer_pattern={hybrid_layer_pattern}) is not "
        "supported with sequence_packing={sequence_packing} and "
        "context_parallel_size={context_parallel_size} because megatron-core's document offsets "
        "ignore the padding between documents",
        "leave one of them out",
    ),
    Condition(
        "with sequence_packing={sequence_packing} and mtp_num_layers={mtp_num_layers}",
        lambda f: _packs(f) and bool(f.mtp_num_layers),
    )(
        "pipeline_model_parallel_layout",
        "intermediate pipeline stages do not get the tokens of packed documents",
        "leave one of them out",
        lambda f: f.pipeline_model_parallel_layout is None,
    ),
    Condition(
        "with sequence_packing={sequence_packing}, num_experts={num_experts} and "
        "sequence_parallel={sequence_parallel}",
        lambda f: _packs(f) and f.sequence_parallel,
    )(
        "mtp_num_layers",
        "megatron-core shifts a rank's part of the padding mask as if it were the whole mask",
        "leave sequence_parallel or mtp_num_layers out",
        lambda f: not _predicts_more_with_experts(f),
    ),
    option_rule(
        "hybrid_layer_pattern",
        lambda f: _packs(f) and f.hybrid_layer_pattern is not None,
        lambda f: not _predicts_more_with_experts(f),
        "hybrid_layer_pattern={hybrid_layer_pattern!r} (mtp_num_layers={mtp_num_layers}) is not "
        "supported with sequence_packing={sequence_packing} and num_experts={num_experts} "
        "because megatron-core's HybridModel does not pass the padding mask to the experts of "
        "multi-token prediction",
        "leave the parts after / out",
    ),
)


def check_packing(options: Any) -> list[Finding]:
    """Check the arguments of packed training."""
    facts = Facts.of(options)
    findings = check_rules(PACKING_RULES, facts)
    if _packs(facts) and not findings:
        return check_by(lambda: pack_limits(facts), "seq_length")
    return findings


CORPORA = Rule(
    "data_path",
    "error",
    "data_path with {number} corpora is not supported with sequence_packing=balanced because each "
    "is packed separately, and a batch that mixes them is not balanced",
    "set data_path to one corpus, or sequence_packing=greedy",
)


def check_corpora(args: Any, blends: Iterable[Sequence[str]]) -> list[Finding]:
    """Check the number of corpora, path prefixes, that each set of packed samples mixes."""
    largest = max(map(len, blends), default=0)
    is_mixed = args.sequence_packing == "balanced" and largest > 1
    return [CORPORA.found(number=largest)] if is_mixed else []
