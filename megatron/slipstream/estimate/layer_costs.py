# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Compute times of the parts of a model, estimated from its shape.

Matrix products take their FLOPs divided by the GPU's average achieved rate; memory-bound operations
take their bytes divided by the memory bandwidth. In fp8, products of linear layers are faster, and
their inputs are read once more and written by rows and by columns. Backward costs twice the
forward, 2.5 times for attention, three times for scans and delta rules. Communication between GPUs,
kernels too small to fill a GPU and launch-bound parts are not counted; each makes a real step
longer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, Optional

from megatron.slipstream.estimate.gpus import Products, Speed
from megatron.slipstream.estimate.model_parts import LayerKind
from megatron.slipstream.estimate.model_shapes import ModelShape, has_feed_forward
from megatron.slipstream.estimate.saved_tensors import is_mlp_norm_fused, setting_with_tiles
from megatron.slipstream.estimate.state_space import (
    MAMBA_CHUNK,
    RULE_CHUNK,
    DeltaSizes,
    MambaSizes,
)
from megatron.slipstream.estimate.tensors import is_input_norm_fused
from megatron.slipstream.plan.settings import WHOLE, LayerSetting
from megatron.slipstream.plan.trace import OUTPUT_LAYER

BACKWARD_PER_FORWARD = 2.0
ATTENTION_BACKWARD_PER_FORWARD = 2.5
"""Fused attention computes two products in forward and five in backward, including the scores
again."""

SCAN_BACKWARD_PER_FORWARD = 3.0
"""Scans and delta rules save no states of chunks: backward computes them again."""


Phase = Literal["forward", "rerun", "backward"]


class Cost(NamedTuple):
    """Cost of one part of a layer for one micro-batch on one rank."""

    flops: float = 0.0
    """Operations of matrix products in forward."""
    traffic_bytes: float = 0.0
    """Bytes that memory-bound operations read and write in forward."""
    backward_factor: float = BACKWARD_PER_FORWARD
    kind: Products = "16 bits"
    """What the products are, since kinds reach other rates."""
    weights: int = 0
    """Parameters on the rank."""
    rerun_share: float = 0.0
    """The share of the forward that backward runs again, before its own operations."""

    def ms(self, speed: Speed, phase: Phase) -> float:
        """Return the compute time of forward, of what runs again, or of backward without that."""
        factor = {"forward": 1.0, "rerun": self.rerun_share, "backward": self.backward_factor}
        return factor[phase] * speed.compute_ms(self.flops, self.traffic_bytes, self.kind)

    def backward_ms(self, speed: Speed) -> float:
        """Return the compute time of backward, with what runs again."""
        return self.ms(speed, "rerun") + self.ms(speed, "backward")


def layer_costs(
    shape: ModelShape, layer: int, setting: Optional[LayerSetting] = None
) -> dict[str, Cost]:
    """Return the costs of a layer's parts, in forward order.

    Args:
        shape: The model.
        layer: Index of the layer, from 0.
        setting: What backward recomputes of the layer; None for the shape's.
    """
    kind = shape.kind_of(layer)
    setting = setting_with_tiles(shape, layer, setting)
    norm, residual = _norm(shape), _residual(shape)
    found: dict[str, Cost] = {}
    if "*" in kind:
        found |= {"attn_norm": norm, **_attention(shape), "attn_residual": residual}
    if kind == "M":
        found |= {"mamba_norm": norm, **_mamba(shape), "mamba_residual": residual}
    if kind == "G":
        found |= {"attn_norm": norm, **_gated_delta_net(shape), "attn_residual": residual}
    if kind == "/":
        found |= _further_tokens(shape)
    if has_feed_forward(kind):
        feed_forward = _experts(shape) if "E" in kind else _mlp(shape)
        found |= {"mlp_norm": norm, **feed_forward, "mlp_residual": residual}
    again = dict.fromkeys(found, 1.0) if setting == WHOLE else _reruns(shape, kind, setting)
    if shape.mlp_sequence_tiles:  # A tile runs again after its whole layer did.
        again |= dict.fromkeys(TILED_PARTS & found.keys(), 2.0 if setting == WHOLE else 1.0)
    return {part: cost._replace(rerun_share=again.get(part, 0.0)) for part, cost in found.items()}


TILED_PARTS = frozenset({"mlp_fc1", "mlp_act", "mlp_fc2", "expert_fc1", "moe_act", "expert_fc2"})
"""The parts of a layer that ``mlp_sequence_tiles`` computes tile by tile."""

_EXPERTS = ("expert_fc1", "moe_act", "expert_fc2")
_RERUN_PARTS: Mapping[str, tuple[str, ...]] = {
    "core_attn": ("core_attn",),
    "mla_up_proj": ("qkv_linear", "rotary"),
    "mlp": ("mlp_fc1", "mlp_act", "mlp_fc2"),
    "moe_act": ("moe_act",),
    "moe": ("router", "shared_experts", *_EXPERTS, "combine"),
    "shared_experts": ("shared_experts",),
}
"""The parts that backward runs again for each of megatron-core's ``recompute_modules``."""


def _reruns(shape: ModelShape, kind: LayerKind, setting: LayerSetting) -> dict[str, float]:
    """Return the share of each part that backward runs again."""
    again = {part: 1.0 for module in setting for part in _RERUN_PARTS.get(module, ())}
    if "mla_up_proj" in setting and shape.latent_attention is not None:
        up, down = _projection_flops(shape)
        again["qkv_linear"] = up / (up + down)
    # A fused norm runs again with its linear layer.
    mlp_norm = "mlp" if is_mlp_norm_fused(shape, kind) else "layernorm"
    again["attn_norm"] = float("layernorm" in setting and not is_input_norm_fused(shape, kind))
    again["mlp_norm"] = float(mlp_norm in setting)
    return again


def head_costs(shape: ModelShape) -> dict[str, Cost]:
    """Return the costs of the final norm, output layer and loss, in forward order."""
    logits = shape.tokens * shape.vocab_size / shape.parallelism.tp
    found = {
        "final_norm": _norm(shape),
        OUTPUT_LAYER: Cost(2 * logits * shape.hidden_size, logits * shape.element_bytes),
        # Float32 logits are read and written a few times.
        "loss": Cost(0.0, logits * 4 * _LOSS_PASSES),
    }
    # Tiles run again in backward.
    factor = BACKWARD_PER_FORWARD + shape.loss_sequence_tiles
    return {part: cost._replace(backward_factor=factor) for part, cost in found.items()}


_LOSS_PASSES = 4


def attended_pairs(shape: ModelShape) -> float:
    """Return the query-key pairs that causal attention computes for a sequence on a rank."""
    length = shape.seq_length
    window = min(shape.window_size or length, length)
    return (length * window - window * window / 2) / shape.parallelism.cp


def _latent_projections(shape: ModelShape) -> tuple[int, int]:
    """Return the parameters of multi-latent attention's up- and down-projections."""
    latent, hidden = shape.latent_attention, shape.hidden_size
    assert latent is not None
    key_width = latent.qk_head_dim + latent.qk_pos_emb_head_dim
    up = (latent.q_lora_rank or hidden) * shape.heads * key_width
    up += latent.kv_lora_rank * shape.heads * (latent.qk_head_dim + latent.v_head_dim)
    down = hidden * (latent.kv_lora_rank + latent.qk_pos_emb_head_dim + (latent.q_lora_rank or 0))
    return up, down


def _projection_flops(shape: ModelShape) -> tuple[float, float]:
    """Return the operations of the same.

    Ranks of a tensor-parallel group have all down-projections, each for its own tokens.
    """
    up, down = _latent_projections(shape)
    return 2.0 * shape.tokens * up, 2.0 * shape.region_tokens * down


def _attention(shape: ModelShape) -> dict[str, Cost]:
    size, hidden, latent = shape.element_bytes, shape.hidden_size, shape.latent_attention
    tokens = shape.tokens
    key_width = value_width = shape.head_dim
    groups = shape.groups
    if latent:
        key_width = latent.qk_head_dim + latent.qk_pos_emb_head_dim
        value_width, groups = latent.v_head_dim, shape.heads
        project, weights = sum(_projection_flops(shape)), sum(_latent_projections(shape))
    else:
        weights = hidden * (shape.heads + 2 * groups) * shape.head_dim
        project = 2.0 * tokens * weights
    proj_weights = hidden * shape.heads * value_width
    query, key, value = (
        tokens * heads * width * size
        for heads, width in (
            (shape.heads, key_width),
            (groups, key_width),
            (groups, value_width),
        )
    )
    pairs = shape.micro_batch_size * shape.heads * attended_pairs(shape)
    scores = 0.0
    if shape.attention_backend in ("unfused", "local"):
        # The softmax and the two products write and read all scores.
        pairs *= 2
        scores = 4.0 * pairs * size
    return {
        "qkv_linear": _linear(shape, project, shape.region_tokens * hidden, weights),
        "rotary": Cost(0.0, 2.0 * (query + key + value)),
        "core_attn": Cost(
            2.0 * pairs * (key_width + value_width),
            scores,
            ATTENTION_BACKWARD_PER_FORWARD,
            "attention",
        ),
        "attn_proj": _linear(
            shape, 2.0 * tokens * proj_weights, tokens * shape.heads * value_width, proj_weights
        ),
    }


def _mamba(shape: ModelShape) -> dict[str, Cost]:
    sizes, hidden, tokens = MambaSizes.of(shape), shape.hidden_size, shape.tokens
    size, groups = shape.element_bytes, max(sizes.groups, sizes.cp)
    # Within chunks, of each group and each head; into and out of the states of chunks.
    products = MAMBA_CHUNK * (groups * sizes.state + sizes.inner) + 2 * sizes.inner * sizes.state
    states = 4 * 2 * tokens * sizes.inner * sizes.state / MAMBA_CHUNK
    # The convolution writes what the scan reads; the scan's output is written with its gate too,
    # and read and written by a norm.
    moved = sizes.scanned + 2 * sizes.convolved + 2 * sizes.inner + 2 * sizes.inner
    return {
        "mamba_in_proj": _linear(
            shape, 2.0 * tokens * hidden * sizes.projected, shape.region_tokens * hidden,
            hidden * sizes.projected,
        ),
        "mamba_scan": Cost(
            2.0 * tokens * products, tokens * moved * size + states, SCAN_BACKWARD_PER_FORWARD,
            "attention", sizes.num_convolution_weights,
        ),
        "mamba_out_proj": _linear(
            shape, 2.0 * tokens * hidden * sizes.inner, tokens * sizes.inner, hidden * sizes.inner
        ),
    }  # fmt: skip


def _gated_delta_net(shape: ModelShape) -> dict[str, Cost]:
    sizes, hidden, tokens = DeltaSizes.of(shape), shape.hidden_size, shape.tokens
    size, keys = shape.element_bytes, sizes.value_heads * sizes.key_width
    # Of each chunk: keys with keys, the triangle's inverse, keys and values by it, queries with
    # keys, and these with values; into and out of the states of chunks.
    in_chunk = RULE_CHUNK * (3 * keys + 2 * sizes.values + sizes.value_heads * RULE_CHUNK)
    products = in_chunk + 3 * keys * sizes.value_width
    # The convolution reads and writes queries, keys and values; these are normalized, repeated,
    # and read by the rule.
    moved = 4 * (2 * sizes.keys + sizes.values) + 2 * (2 * keys + sizes.values) + sizes.values
    return {
        "gdn_in_proj": _linear(
            shape, 2.0 * tokens * hidden * sizes.projected, shape.region_tokens * hidden,
            hidden * sizes.projected,
        ),
        "gdn_rule": Cost(
            2.0 * tokens * products, 1.0 * tokens * moved * size, SCAN_BACKWARD_PER_FORWARD,
            "attention", sizes.num_convolution_weights,
        ),
        "gdn_norm": Cost(0.0, 5.0 * tokens * sizes.values * size),
        "gdn_out_proj": _linear(
            shape, 2.0 * tokens * hidden * sizes.values, tokens * sizes.values,
            hidden * sizes.values,
        ),
    }  # fmt: skip


def _further_tokens(shape: ModelShape) -> dict[str, Cost]:
    """Return the costs of the norms and the projection before the layers of a further token."""
    weights = 2 * shape.hidden_size**2 // shape.parallelism.tp
    taken = 2 * shape.region_tokens * shape.hidden_size
    norms = 3 * _norm(shape).traffic_bytes + 2.0 * taken * shape.element_bytes
    return {
        "further_norms": Cost(0.0, norms),
        "further_proj": _linear(shape, 2.0 * shape.tokens * weights, taken, weights),
    }


def _mlp(shape: ModelShape) -> dict[str, Cost]:
    return _projections(shape, "mlp", shape.tokens, shape.ffn_hidden_size // shape.parallelism.tp)


def _experts(shape: ModelShape) -> dict[str, Cost]:
    experts = shape.experts
    assert experts is not None
    hidden, size, par = shape.hidden_size, shape.element_bytes, shape.parallelism
    one_copy = shape.region_tokens * hidden * size
    routed = one_copy * experts.topk
    rows, width = shape.expert_tokens, experts.ffn_hidden_size // par.etp
    weights = hidden * experts.num_experts
    found = {
        "router": Cost(
            2.0 * shape.region_tokens * weights, one_copy + 2.0 * routed, weights=weights
        )
    }
    if experts.shared_ffn_hidden_size:
        width_of_shared = experts.shared_ffn_hidden_size // par.tp
        shared = _projections(shape, "shared", shape.tokens, width_of_shared).values()
        found["shared_experts"] = Cost(
            sum(cost.flops for cost in shared),
            sum(cost.traffic_bytes for cost in shared),
            kind=_kind(shape),
            weights=sum(cost.weights for cost in shared),
        )
    num_local = experts.num_experts // par.ep
    of_experts = _projections(shape, "expert", rows, width, num_local).values()
    found |= zip(_EXPERTS, of_experts, strict=True)
    return found | {"combine": Cost(0.0, routed + one_copy)}


def _projections(
    shape: ModelShape, prefix: str, rows: int, width: int, num_experts: int = 1
) -> dict[str, Cost]:
    """Return the costs of two linear layers and the activation function between them."""
    factor = 2 if shape.gated_linear_unit else 1
    weights = shape.hidden_size * width
    flops = 2.0 * rows * weights
    weights *= num_experts
    return {
        f"{prefix}_fc1": _linear(shape, factor * flops, rows * shape.hidden_size, factor * weights),
        f"{prefix}_act": Cost(0.0, 1.0 * rows * width * (factor + 1) * shape.element_bytes),
        f"{prefix}_fc2": _linear(shape, flops, rows * width, weights),
    }


def _linear(shape: ModelShape, flops: float, input_numel: float, weights: int) -> Cost:
    """Return the cost of a linear layer, with the quantization of its input in fp8."""
    each = shape.element_bytes + 2 * shape.linear_input_bytes if shape.fp8_recipe else 0.0
    return Cost(flops, input_numel * each, kind=_kind(shape), weights=weights)


def _kind(shape: ModelShape) -> Products:
    return "fp8" if shape.fp8_recipe else "16 bits"


def _norm(shape: ModelShape) -> Cost:
    return Cost(0.0, 2.0 * shape.region_tokens * shape.hidden_size * shape.element_bytes)


def _residual(shape: ModelShape) -> Cost:
    return Cost(0.0, 3.0 * shape.region_tokens * shape.hidden_size * shape.element_bytes)
