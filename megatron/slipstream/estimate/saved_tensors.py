# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Derives the tensors that each part of a transformer layer saves for backward.

A part is a sequence of operations of one layer; parts that megatron-core marks are named after its
``offload_modules``. Two kinds of layers are modelled: those built from Transformer Engine's modules
and those built from megatron-core's plain PyTorch modules (``attention_backend='local'``). Sizes
were checked against recorded traces of both (listed in docs/user-guide/planning.md).

[Note: Transformer Engine's fused norms]
Its linear layers fuse the preceding norm, so that norm is not marked: the query/key/value
projection does so except in multi-latent attention, the first projection of a dense MLP always.
A fused linear layer saves the norm's input and output. Transformer Engine's core attention copies
values that are strided views of the projection's output, so that output is not kept.

[Note: Inputs of linear layers in fp8]
A linear layer in fp8 keeps a quantized copy of its input, which it makes itself: two layers with
the same input have two, and the 16-bit input is saved only if something else needs it. What a norm
or an activation function frees and recomputes is kept by no copy.

[Note: Saved tensors under recomputation]
To recompute a norm or an activation function, megatron-core frees its output after use and reruns
the operation in backward. The output then takes no memory; the module's own group saves the input
for the rerun, and the input is offloaded with the group. Core attention is recomputed outside of
its group, so the tensors that its checkpoint keeps are not offloaded. A checkpoint of whole layers
saves only the input of the first, in a group of its own.
"""

from __future__ import annotations

import itertools
from typing import Optional

from megatron.slipstream.estimate.model_parts import LatentAttention, LayerKind
from megatron.slipstream.estimate.model_shapes import ModelShape, has_feed_forward
from megatron.slipstream.estimate.state_space import GDN_MODULES, MAMBA_MODULES, StateSpaceLayer
from megatron.slipstream.estimate.tensors import (
    Saved,
    SavedTensor,
    TensorMaker,
    is_input_norm_fused,
)
from megatron.slipstream.plan.settings import WHOLE, LayerSetting

MEGATRON_MODULES = (
    *("attn_norm", "qkv_linear", "core_attn", "attn_proj", *GDN_MODULES, *MAMBA_MODULES),
    "mlp_norm",
    *("expert_fc1", "moe_act"),
)
"""megatron-core's ``offload_modules``, in layer order."""

MODULES = (
    *("attn_norm", "qkv_linear", "core_attn", "attn_proj", *GDN_MODULES, *MAMBA_MODULES),
    "mlp_norm",
    *("mlp_fc1", "mlp_act", "mlp_fc2", "shared_experts", "expert_fc1", "moe_act", "expert_fc2"),
)
"""The ``offload_modules`` that are modelled, in layer order."""

CHECKPOINT_INPUTS = "checkpoint_inputs"
"""The part, and the group, of a checkpoint of whole layers (``offload_checkpoint_inputs``)."""

KEPT_BY_RECOMPUTATION = "recomputation reads it too"
"""See [Note: Saved tensors under recomputation]."""

_MASKED_SOFTMAX_MAX_SEQUENCE = 16384
"""The longest sequence for which Transformer Engine's unfused attention has a softmax kernel."""


def saved_tensors(shape: ModelShape, layer: int, setting: Optional[LayerSetting] = None) -> Saved:
    """Return the tensors that the parts of a layer save for one micro-batch on one rank.

    Args:
        shape: The model.
        layer: Index of the layer, from 0.
        setting: What backward recomputes of the layer; None for the shape's.

    Returns:
        The tensors of each part that saves any, in forward order.
    """
    setting = setting_with_tiles(shape, layer, setting)
    kind = shape.kind_of(layer)
    maker = _Layer(shape.with_setting(setting), kind)
    if setting == WHOLE:
        return {CHECKPOINT_INPUTS: maker.layer_input()} if layer in shape.checkpoint_starts else {}
    found: Saved = {}
    if kind in ("G", "M"):
        found = StateSpaceLayer(shape.with_setting(setting), kind).saved()
    if kind == "/":
        found = maker.further_tokens()
    if "*" in kind:
        found = maker.attention()
    if has_feed_forward(kind):
        found |= maker.feed_forward()
    return {part: tensors for part, tensors in found.items() if tensors}


def savers_of(saved: Saved) -> dict[str, tuple[SavedTensor, list[str]]]:
    """Return each storage once, by name, with the parts that save it."""
    found: dict[str, tuple[SavedTensor, list[str]]] = {}
    for part, tensors in saved.items():
        for tensor in tensors:
            found.setdefault(tensor.name, (tensor, []))[1].append(part)
    return found


def marked_modules(
    shape: ModelShape, layer: int, setting: Optional[LayerSetting] = None
) -> tuple[str, ...]:
    """Return the parts of a layer that can be marked as groups, in layer order."""
    kind = shape.kind_of(layer)
    recomputed = setting_with_tiles(shape, layer, setting)
    if recomputed == WHOLE:
        return (CHECKPOINT_INPUTS,) if layer in shape.checkpoint_starts else ()
    are_whole = not shape.mlp_sequence_tiles
    has_attention, has_mlp = "*" in kind, "-" in kind and "mlp" not in recomputed
    has_experts = "E" in kind and "moe" not in recomputed
    shared = shape.experts.shared_ffn_hidden_size if shape.experts else 0
    is_there = {
        "attn_norm": (has_attention or kind == "G") and not is_input_norm_fused(shape, kind),
        **dict.fromkeys(GDN_MODULES, kind == "G"),
        **dict.fromkeys(MAMBA_MODULES, kind == "M"),
        "qkv_linear": has_attention,
        "core_attn": has_attention and "core_attn" not in recomputed,
        "attn_proj": has_attention,
        "mlp_norm": has_feed_forward(kind) and not is_mlp_norm_fused(shape, kind),
        **dict.fromkeys(("mlp_fc1", "mlp_act", "mlp_fc2"), has_mlp),
        "shared_experts": has_experts and shared > 0 and "shared_experts" not in recomputed,
        "expert_fc1": has_experts and are_whole,
        "moe_act": has_experts and are_whole,
        "expert_fc2": has_experts and "moe_act" not in recomputed,
    }
    return tuple(name for name in MODULES if is_there[name])


def setting_with_tiles(
    shape: ModelShape, layer: int, setting: Optional[LayerSetting] = None
) -> LayerSetting:
    """Return a layer's setting with what tiles of its MLP or experts recompute.

    Args:
        shape: The model.
        layer: Index of the layer, from 0.
        setting: The setting without tiles; None for the shape's.
    """
    setting = shape.setting_of(layer) if setting is None else setting
    kind = shape.kind_of(layer)
    if setting == WHOLE or not has_feed_forward(kind) or not shape.mlp_sequence_tiles:
        return setting
    return setting | {"moe_act" if "E" in kind else "mlp"}


def is_mlp_norm_fused(shape: ModelShape, kind: LayerKind) -> bool:
    """Return the same as :func:`is_input_norm_fused` for the norm before the MLP or the experts."""
    return shape.uses_transformer_engine and "E" not in kind


def input_name(kind: LayerKind) -> str:
    """Return the name of a layer's input among its tensors."""
    return "attended" if kind in ("-", "E") else "layer_input"


class _Layer(TensorMaker):
    """Derives the saved tensors of one layer."""

    def layer_input(self) -> tuple[SavedTensor, ...]:
        """Return the layer's input."""
        return (self._tensor(input_name(self._kind), self._hidden),)

    def attention(self) -> Saved:
        """Return the tensors of the parts from the layer's input to attention's residual add."""
        shape = self._shape
        norm, recomputes_norm = self._input_norm()
        saved: Saved = {}
        # The down-projections of queries and of keys and values are two layers.
        copies = 2 if shape.latent_attention and shape.fp8_recipe else 1
        linear = [] if recomputes_norm else [self._input("normed_input", copies * self._hidden)]
        if is_input_norm_fused(shape, self._kind):
            linear = [*norm, *linear]
        else:
            saved["attn_norm"] = norm
        latent = shape.latent_attention
        saved["qkv_linear"] = (
            *linear,
            *(self._latent_projections(latent) if latent else self._qk_norms()),
        )
        rotary = None if shape.apply_rope_fusion or latent else shape.head_dim
        saved["rotary"] = self._rotary_tables(rotary)
        saved["core_attn"] = self._core_attention()
        output = self._attention_output()
        if shape.fp8_recipe:
            output = self._input("attention_output_quantized", output.numel)
        saved["attn_proj"] = (output,)
        saved["attn_residual"] = self._hidden_dropout("attn_dropout_mask")
        return saved

    def feed_forward(self) -> Saved:
        """Return the tensors of the parts from there to the layer's output."""
        shape = self._shape
        is_fused, has_experts = is_mlp_norm_fused(shape, self._kind), "E" in self._kind
        recomputes_norm = shape.recomputes("layernorm") and not is_fused
        norm = self._norm("attended", shape.region_tokens, shape.hidden_size, recomputes_norm)
        make = self._tensor if has_experts else self._input  # The router is in 16 bits.
        normed = () if recomputes_norm else (make("normed_attended", self._hidden),)
        saved: Saved = {}
        if is_fused and shape.recomputes("mlp"):
            saved["mlp_fc1"] = norm[:1]
        elif is_fused:
            saved["mlp_fc1"] = (*norm, *normed)
        else:
            saved["mlp_norm"] = norm
        saved |= self._experts(normed) if has_experts else self._mlp(normed, is_fused)
        saved["mlp_residual"] = self._hidden_dropout("mlp_dropout_mask")
        return saved

    def further_tokens(self) -> Saved:
        """Return the tensors of what begins the prediction of a further token.

        These are the norm at the end of the layers before, and the norms and the projection that
        join its output with the embedding of the next token.
        """
        hidden = self._shape.region_tokens, self._shape.hidden_size
        names = ("layer_input", "further_state", "further_embedding")
        norms = itertools.chain.from_iterable(self._norm(name, *hidden) for name in names)
        return {
            "further_norms": tuple(norms),
            "further_proj": (self._input("further_joined", 2 * self._hidden),),
        }

    # Parts

    def _qk_norms(self) -> tuple[SavedTensor, ...]:
        """Return the tensors that the per-head norms of queries and keys save."""
        shape = self._shape
        if not shape.qk_layernorm:
            return ()
        return (
            *self._norm("query_before_norm", shape.tokens * shape.heads, shape.head_dim),
            *self._norm("key_before_norm", shape.tokens * shape.groups, shape.head_dim),
        )

    def _latent_projections(self, latent: LatentAttention) -> tuple[SavedTensor, ...]:
        shape, tokens = self._shape, self._shape.region_tokens
        recomputes = shape.recomputes("mla_up_proj")
        tensors: list[SavedTensor] = []
        if latent.q_lora_rank is not None:
            compressed = self._tensor("query_latent", tokens * latent.q_lora_rank)
            tensors += self._latent_norm(compressed, tokens, latent.q_lora_rank)
        # A view of the projection's output, which also holds the keys' positional part.
        width = latent.kv_lora_rank + latent.qk_pos_emb_head_dim
        compressed = self._tensor("key_value_latent", tokens * width)
        tensors += self._latent_norm(compressed, tokens, latent.kv_lora_rank)
        if not (shape.apply_rope_fusion or recomputes):
            tensors += self._rotary_tables(latent.qk_pos_emb_head_dim)
        return tuple(tensors)

    def _latent_norm(self, latent: SavedTensor, tokens: int, width: int) -> list[SavedTensor]:
        """Return the tensors saved by a latent vector's norm and the projection after it."""
        # The recomputed part contains the norm.
        if not self._shape.qk_layernorm or self._shape.recomputes("mla_up_proj"):
            return [latent]
        normed = self._input(f"normed_{latent.name}", tokens * width)
        norm = self._norm(latent.name, tokens, width)
        if self._shape.uses_transformer_engine:
            return [latent, *norm[1:], normed]
        return [*norm, normed]

    def _core_attention(self) -> tuple[SavedTensor, ...]:
        shape = self._shape
        query, key, value = self._query_key_value()
        if shape.recomputes("core_attn"):
            return tuple(
                tensor._replace(kept_by=KEPT_BY_RECOMPUTATION) for tensor in (query, key, value)
            )
        inputs = () if shape.recomputes("mla_up_proj") else (query, key, value)
        if shape.attention_backend in ("fused", "flash"):
            statistics = shape.tokens * shape.heads
            output = self._attention_output()
            if shape.parallelism.cp > 1 and "a2a" in shape.parallelism.cp_comm_type:
                # Saved before heads and tokens are transposed back.
                output = output._replace(name="attention_output_by_heads")
            return (*inputs, output, self._float32("log_sum_exp", statistics))
        return (*inputs, *self._scores())

    def _query_key_value(self) -> tuple[SavedTensor, SavedTensor, SavedTensor]:
        shape = self._shape
        latent = shape.latent_attention
        groups, key_width, value_width = shape.groups, shape.head_dim, shape.head_dim
        if latent:
            groups = shape.heads
            key_width = latent.qk_head_dim + latent.qk_pos_emb_head_dim
            value_width = latent.v_head_dim
        stored = shape.tokens * groups * value_width
        if shape.attention_backend in ("unfused", "local"):
            if groups == shape.heads and not latent and shape.attention_backend == "local":
                # Values are a view of the projection's output, all of which is kept.
                stored = shape.tokens * (shape.heads + 2 * groups) * shape.head_dim
            groups = shape.heads  # Keys and values are repeated for each query head.
            stored = max(stored, shape.tokens * groups * value_width)
        return (
            self._tensor("query", shape.tokens * shape.heads * key_width),
            self._tensor("key", shape.tokens * groups * key_width),
            self._tensor("value", stored),
        )

    def _scores(self) -> list[SavedTensor]:
        """Return the ``[b, heads, s, s]`` tensors of softmax and the product with the values."""
        shape = self._shape
        numel = shape.micro_batch_size * shape.heads * shape.sequence**2
        probabilities = self._tensor("probabilities", numel)
        tensors = [probabilities]
        is_16_bit = shape.precision != "fp32"
        if shape.attention_backend == "unfused":
            has_kernel = is_16_bit and shape.sequence <= _MASKED_SOFTMAX_MAX_SEQUENCE
            if not has_kernel:
                tensors.append(SavedTensor("mask", shape.sequence**2, shape.sequence**2))
            if is_16_bit and not has_kernel:
                tensors.append(self._float32("softmax", numel))
        elif is_16_bit and shape.attention_softmax_in_fp32:
            tensors.append(self._float32("softmax", numel))
        if shape.attention_dropout > 0:
            tensors.append(self._dropout_mask("attention_dropout_mask", numel))
            if "softmax" not in [tensor.name for tensor in tensors]:
                # Saved in addition to the softmax output, unless "softmax" is that output and
                # "probabilities" already holds these.
                tensors.append(self._tensor("dropped_probabilities", numel))
        return tensors

    def _attention_output(self) -> SavedTensor:
        latent = self._shape.latent_attention
        width = latent.v_head_dim if latent else self._shape.head_dim
        return self._tensor("attention_output", self._shape.tokens * self._shape.heads * width)

    def _mlp(self, normed: tuple[SavedTensor, ...], is_fused: bool) -> Saved:
        """Return a dense MLP's tensors; ``normed`` is its input if not saved with the norm."""
        shape = self._shape
        if shape.recomputes("mlp"):
            return {} if is_fused else {"mlp_fc1": normed}
        width = shape.ffn_hidden_size // shape.parallelism.tp
        saved: Saved = {} if is_fused else {"mlp_fc1": normed}
        saved["mlp_act"] = self._activation("mlp", shape.tokens, width)
        saved["mlp_fc2"] = (self._input("mlp_activated", shape.tokens * width),)
        return saved

    def _experts(self, normed: tuple[SavedTensor, ...]) -> Saved:
        shape, experts = self._shape, self._shape.experts
        assert experts is not None
        if shape.recomputes("moe"):
            return {"router": normed}
        scores = self._float32("router_scores", shape.region_tokens * experts.num_experts)
        saved: Saved = {"router": (*normed, scores)}
        if experts.shared_ffn_hidden_size:
            saved["shared_experts"] = normed
            if not shape.recomputes("shared_experts"):
                if shape.fp8_recipe and normed:
                    normed = (self._input("normed_attended_quantized", self._hidden),)
                width = experts.shared_ffn_hidden_size // shape.parallelism.tp
                saved["shared_experts"] = (
                    *normed,
                    *self._activation("shared", shape.tokens, width),
                    self._input("shared_activated", shape.tokens * width),
                )
        rows, width = shape.expert_tokens, experts.ffn_hidden_size // shape.parallelism.etp
        saved["expert_fc1"] = (self._input("expert_input", rows * shape.hidden_size),)
        saved["moe_act"] = self._expert_activation(rows, width)
        if not shape.recomputes("moe_act"):
            saved["expert_fc2"] = (self._input("expert_activated", rows * width),)
        return saved

    def _expert_activation(self, rows: int, width: int) -> tuple[SavedTensor, ...]:
        """Return the tensors of the activation function and the routing-probability product."""
        shape = self._shape
        probabilities = self._tensor("routing_probabilities", rows)
        if shape.mlp_sequence_tiles:  # What goes in is 'expert_input'.
            return (probabilities,)
        tensors = self._activation("expert", rows, width)
        if shape.recomputes("moe_act"):
            return tensors[0], probabilities
        if not shape.bias_activation_fusion:
            tensors = (*tensors, self._tensor("expert_unweighted", rows * width))
        return (*tensors, probabilities)

    def _activation(self, prefix: str, rows: int, width: int) -> tuple[SavedTensor, ...]:
        shape = self._shape
        factor = 2 if shape.gated_linear_unit else 1
        projected = self._tensor(f"{prefix}_projected", rows * width * factor)
        if shape.bias_activation_fusion or not shape.gated_linear_unit:
            return (projected,)
        return (
            projected,
            self._tensor(f"{prefix}_gate", rows * width),
            self._tensor(f"{prefix}_linear", rows * width),
        )
