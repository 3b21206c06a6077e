# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Compute times of the parts of a model, estimated from its shape.

Matrix products take their FLOPs divided by the GPU's average achieved rate; memory-bound operations
take their bytes divided by the memory bandwidth. Backward costs twice the forward, 2.5 times for
attention. Communication between GPUs, kernels too small to fill a GPU and launch-bound parts are
not counted; each makes a real step longer.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron.slipstream.estimate.model_shapes import ModelShape
from megatron.slipstream.plan.trace import OUTPUT_LAYER

BACKWARD_PER_FORWARD = 2.0
ATTENTION_BACKWARD_PER_FORWARD = 2.5
"""Fused attention computes two products in forward and five in backward, including the scores
again."""


class Cost(NamedTuple):
    """Cost of one part of a layer for one micro-batch on one rank."""

    flops: float = 0.0
    """Operations of matrix products in forward."""
    traffic_bytes: float = 0.0
    """Bytes that memory-bound operations read and write in forward."""
    backward_factor: float = BACKWARD_PER_FORWARD
    is_recomputed: bool = False
    """Whether backward reruns the forward."""

    @property
    def backward_flops(self) -> float:
        """Operations of matrix products in backward."""
        return self.flops * (self.backward_factor + self.is_recomputed)

    @property
    def backward_traffic_bytes(self) -> float:
        """Bytes that memory-bound operations read and write in backward."""
        return self.traffic_bytes * (self.backward_factor + self.is_recomputed)


def layer_costs(shape: ModelShape, layer: int) -> dict[str, Cost]:
    """Return the costs of a layer's parts, in forward order.

    Args:
        shape: The model.
        layer: Index of the layer, from 0.
    """
    attention, residual = _attention(shape), _residual(shape)
    feed_forward = _experts(shape) if shape.is_moe(layer) else _mlp(shape)
    return {
        "attn_norm": _norm(shape),
        **attention,
        "attn_residual": residual,
        "mlp_norm": _norm(shape),
        **feed_forward,
        "mlp_residual": residual,
    }


def head_costs(shape: ModelShape) -> dict[str, Cost]:
    """Return the costs of the final norm, output layer and loss, in forward order."""
    logits = shape.tokens * shape.vocab_size / shape.parallelism.tp
    return {
        "final_norm": _norm(shape),
        OUTPUT_LAYER: Cost(2 * logits * shape.hidden_size, logits * shape.element_bytes),
        # Float32 logits are read and written a few times.
        "loss": Cost(0.0, logits * 4 * _LOSS_PASSES),
    }


_LOSS_PASSES = 4


def attended_pairs(shape: ModelShape) -> float:
    """Return the query-key pairs that causal attention computes for a sequence on a rank."""
    length = shape.seq_length
    window = min(shape.window_size or length, length)
    return (length * window - window * window / 2) / shape.parallelism.cp


def _attention(shape: ModelShape) -> dict[str, Cost]:
    size, hidden, latent = shape.element_bytes, shape.hidden_size, shape.latent_attention
    tokens, tp = shape.tokens, shape.parallelism.tp
    key_width = value_width = shape.head_dim
    groups = shape.groups
    if latent:
        key_width = latent.qk_head_dim + latent.qk_pos_emb_head_dim
        value_width, groups = latent.v_head_dim, shape.heads
        query_in = latent.q_lora_rank or hidden
        weights = query_in * shape.heads * key_width
        weights += latent.kv_lora_rank * groups * (latent.qk_head_dim + value_width)
        # Down projections are replicated on the tensor-parallel ranks, each for its own tokens.
        down = hidden * (latent.kv_lora_rank + latent.qk_pos_emb_head_dim)
        down += hidden * latent.q_lora_rank if latent.q_lora_rank else 0
        project = 2.0 * (tokens * weights + shape.region_tokens * down)
    else:
        project = 2.0 * tokens * hidden * (shape.heads + 2 * groups) * shape.head_dim
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
        "qkv_linear": Cost(project, is_recomputed=shape.recomputes("mla_up_proj")),
        "rotary": Cost(0.0, 2.0 * (query + key + value)),
        "core_attn": Cost(
            2.0 * pairs * (key_width + value_width),
            scores,
            ATTENTION_BACKWARD_PER_FORWARD,
            shape.recomputes("core_attn"),
        ),
        "attn_proj": Cost(2.0 * tokens * hidden * shape.num_attention_heads / tp * value_width),
    }


def _mlp(shape: ModelShape) -> dict[str, Cost]:
    width = shape.ffn_hidden_size // shape.parallelism.tp
    return _projections(shape, "mlp", shape.tokens, width, shape.recomputes("mlp"))


def _experts(shape: ModelShape) -> dict[str, Cost]:
    experts = shape.experts
    assert experts is not None
    hidden, size, par = shape.hidden_size, shape.element_bytes, shape.parallelism
    recomputed = shape.recomputes("moe")
    one_copy = shape.region_tokens * hidden * size
    routed = one_copy * experts.topk
    rows, width = shape.expert_tokens, experts.ffn_hidden_size // par.etp
    found = {
        "router": Cost(
            2.0 * shape.region_tokens * hidden * experts.num_experts,
            one_copy + 2.0 * routed,
            is_recomputed=recomputed,
        )
    }
    if experts.shared_ffn_hidden_size:
        shared = _projections(
            shape,
            "shared",
            shape.tokens,
            experts.shared_ffn_hidden_size // par.tp,
            recomputed or shape.recomputes("shared_experts"),
        )
        found["shared_experts"] = Cost(
            sum(cost.flops for cost in shared.values()),
            sum(cost.traffic_bytes for cost in shared.values()),
            is_recomputed=shared["shared_fc1"].is_recomputed,
        )
    first, activation, second = _projections(shape, "expert", rows, width, recomputed).values()
    activation = activation._replace(is_recomputed=recomputed or shape.recomputes("moe_act"))
    return found | {
        "expert_fc1": first,
        "moe_act": activation,
        "expert_fc2": second,
        "combine": Cost(0.0, routed + one_copy, is_recomputed=recomputed),
    }


def _projections(
    shape: ModelShape, prefix: str, rows: int, width: int, is_recomputed: bool
) -> dict[str, Cost]:
    """Return the costs of two linear layers and the activation function between them."""
    factor = 2 if shape.gated_linear_unit else 1
    flops = 2.0 * rows * shape.hidden_size * width
    return {
        f"{prefix}_fc1": Cost(factor * flops, is_recomputed=is_recomputed),
        f"{prefix}_act": Cost(
            0.0,
            1.0 * rows * width * (factor + 1) * shape.element_bytes,
            is_recomputed=is_recomputed,
        ),
        f"{prefix}_fc2": Cost(flops, is_recomputed=is_recomputed),
    }


def _norm(shape: ModelShape) -> Cost:
    nbytes = 2.0 * shape.region_tokens * shape.hidden_size * shape.element_bytes
    return Cost(0.0, nbytes, is_recomputed=shape.recomputes("layernorm"))


def _residual(shape: ModelShape) -> Cost:
    return Cost(0.0, 3.0 * shape.region_tokens * shape.hidden_size * shape.element_bytes)
