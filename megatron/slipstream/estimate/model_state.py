# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Memory of a rank between iterations: weights, gradients and the optimizer's state."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from megatron.slipstream.estimate.layers import parts_of_kind
from megatron.slipstream.estimate.model_shapes import ModelShape
from megatron.slipstream.plan.settings import NOTHING

HOST_BYTES = 16
"""Bytes per parameter of an optimizer on the host: the weight, its gradient and Adam's two moments
in float32, whatever their precision on the device. The gradient and the moments are allocated in
the first step."""


class NumParameters(NamedTuple):
    """Parameters on one rank."""

    dense: int
    experts: int

    @property
    def total(self) -> int:
        return self.dense + self.experts


def num_parameters(shape: ModelShape, pp_rank: int) -> NumParameters:
    """Return a pipeline rank's number of parameters, without biases and norm weights."""
    dense = experts = 0
    vocabulary = shape.vocab_size * shape.hidden_size // shape.parallelism.tp
    for chunk in shape.chunks_of(pp_rank):
        for kind, count in Counter(map(shape.kind_of, chunk.layers)).items():
            for part in parts_of_kind(shape.plain, kind, NOTHING):
                is_expert = part.name in ("expert_fc1", "expert_fc2")
                experts += count * part.cost.weights * is_expert
                dense += count * part.cost.weights * (not is_expert)
        # Further tokens are embedded where they are predicted.
        has_embedding = chunk.is_first or (chunk.is_last and shape.num_further_tokens > 0)
        dense += vocabulary * has_embedding
        is_shared = shape.share_embeddings_and_output_weights and has_embedding
        dense += vocabulary * (chunk.is_last and not is_shared)
    return NumParameters(dense, experts)


def state_bytes(shape: ModelShape, pp_rank: int) -> int:
    """Return the device bytes of a pipeline rank's weights, gradients and optimizer state.

    megatron's distributed optimizer (``Parallelism.shards_optimizer``) divides its state among all
    ranks with the same weights: data-parallel and context-parallel ones.
    """
    of, total = shape.optimizer, num_parameters(shape, pp_rank).total
    each = of.moment_bytes + (0 if shape.precision == "fp32" else of.main_bytes)
    on_device = (1 - of.host_share) * each * _optimized(shape, pp_rank)
    weight_bytes = shape.element_bytes if of.weight_bytes is None else of.weight_bytes
    return int(total * (weight_bytes + of.gradient_bytes) + on_device)


def host_state_bytes(shape: ModelShape, pp_rank: int) -> int:
    """Return the bytes that a pipeline rank's optimizer takes on the host after its first step."""
    return int(shape.optimizer.host_share * HOST_BYTES * _optimized(shape, pp_rank))


def _optimized(shape: ModelShape, pp_rank: int) -> float:
    par, found = shape.parallelism, num_parameters(shape, pp_rank)
    if not par.shards_optimizer:
        return found.total
    ranks = par.dp * par.cp
    expert_ranks = max(1, ranks * par.tp // (par.ep * par.etp))
    return found.dense / ranks + found.experts / expert_ranks
