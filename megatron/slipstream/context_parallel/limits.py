# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Capacity and cost of a micro-batch at each context-parallel size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Optional

from megatron.slipstream.packed_sequences.packing import PackLimits, pack_limits

Cost = Callable[[int, int], int]
"""Cost of a micro-batch for each of its ranks, as a function of its size and of the sum of its
pieces' squared lengths."""

EXCHANGE_PERCENT = 0.5
"""Cost of a token for each other rank of a group, in percent of its cost in a layer's matrices.
Most of the exchange overlaps with attention, so this is a guess that only breaks near-ties, in
favour of smaller groups."""


@dataclass(frozen=True)
class RankLimits:
    """The ranks that share micro-batches, and the size of each rank's buffer.

    A group of ``size`` ranks holds a pack of ``size * tokens_per_rank`` tokens, each rank an equal
    part of every piece. So a rank's buffer does not depend on the group's size, and a longer
    document needs a larger group.

    ``num_ranks`` counts all data- and context-parallel ranks (megatron's data-parallel group with
    context parallelism), of which groups are consecutive ones. ``tokens_per_rank`` includes
    padding, and ``max_sequences`` is the most pieces of a micro-batch of any size. Raises
    ``ValueError`` if no such groups exist, or their pieces cannot be divided.
    """

    num_ranks: int
    tokens_per_rank: int
    max_sequences: int
    min_size: int = 1
    max_size: Optional[int] = None

    def __post_init__(self) -> None:
        possible = _powers_of_two(self.num_ranks)
        for name, size in (("min", self.min_size), ("max", self.max_size)):
            if size is not None and size not in possible:
                raise ValueError(
                    f"{name}_dynamic_context_parallel_size={size} is not supported with "
                    f"{self.num_ranks} data- and context-parallel ranks because they cannot be "
                    "divided into such groups by halving; set one of "
                    f"{', '.join(map(str, possible))}"
                )
        if not self.sizes:
            raise ValueError(
                f"min_dynamic_context_parallel_size={self.min_size} is not supported with "
                f"max_dynamic_context_parallel_size={self.max_size} because no size is between "
                "them; set a smaller one"
            )
        if self.largest > 1 and self.tokens_per_rank % 2:
            raise ValueError(
                f"thd_max_tokens={self.tokens_per_rank} is not supported with "
                "dynamic_context_parallel because every rank has two equal parts of each sequence; "
                "set an even number"
            )
        self.of(self.largest)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes that groups may have, from the smallest; each divides the next."""
        most = self.num_ranks if self.max_size is None else self.max_size
        return tuple(s for s in _powers_of_two(self.num_ranks) if self.min_size <= s <= most)

    @property
    def largest(self) -> int:
        return self.sizes[-1]

    def of(self, size: int) -> PackLimits:
        return PackLimits(
            max_tokens=size * self.tokens_per_rank,
            max_sequences=self.max_sequences,
            alignment=2 * size if size > 1 else 1,
        )

    def smallest_for(self, length: int) -> int:
        """Return the smallest size that holds ``length`` tokens; ``ValueError`` if none does."""
        for size in self.sizes:
            # The piece padded to whole parts fits if the piece does: see PackLimits.
            if length <= size * self.tokens_per_rank:
                return size
        raise ValueError(
            f"a sequence of {length} tokens is not supported with groups of up to {self.largest} "
            f"ranks because each holds {self.tokens_per_rank} tokens; cut it, or set a larger "
            "thd_max_tokens"
        )


def _powers_of_two(num_ranks: int) -> tuple[int, ...]:
    """Return the powers of two that divide the number of ranks: such groups fill all ranks."""
    return tuple(2**power for power in range(num_ranks.bit_length()) if num_ranks % 2**power == 0)


@dataclass(frozen=True)
class CostModel:
    """Cost of the parts of a micro-batch, in any unit. Integers, so that all machines agree.

    Args:
        linear: Cost of each token of a rank's buffer. Padding costs as much as text.
        attention: Cost of each pair of tokens of one piece (its squared length), divided among the
            ranks of the group.
        exchange: Cost of each token of a rank's buffer for each other rank of the group: the ring
            exchange of keys and values.
    """

    linear: int = 1
    attention: int = 1
    exchange: int = 0

    @classmethod
    def of_layer(cls, num_weights: int, attention_width: int) -> CostModel:
        """Return the cost of one transformer layer, in operations.

        Args:
            num_weights: Weights that each token is multiplied by; only active experts count.
            attention_width: Number of attention heads times their size.
        """
        linear = 2 * num_weights
        return cls(
            linear=linear,
            # Two products over the pairs; causal attention needs half of the pairs.
            attention=2 * attention_width,
            exchange=round(linear * EXCHANGE_PERCENT / 100),
        )

    def per_rank(self, limits: RankLimits) -> Cost:
        """Return the function for a micro-batch's cost per rank, times ``limits.largest``."""
        scale, tokens = limits.largest, limits.tokens_per_rank

        def cost(size: int, squares: int) -> int:
            fixed = tokens * (self.linear + self.exchange * (size - 1))
            return fixed * scale + self.attention * squares * (scale // size)

        return cost


def rank_limits(args: Any) -> RankLimits:
    """Return the ranks that share micro-batches and their limits; raises as :class:`RankLimits`."""
    context_parallel_size = args.context_parallel_size
    return RankLimits(
        num_ranks=args.data_parallel_size * context_parallel_size,
        tokens_per_rank=args.seq_length // context_parallel_size,
        max_sequences=pack_limits(args).max_sequences,
        min_size=args.min_dynamic_context_parallel_size,
        max_size=args.max_dynamic_context_parallel_size,
    )


def cost_model(args: Any) -> CostModel:
    """Return the cost model of the model's layers."""
    hidden = args.hidden_size
    heads = args.num_attention_heads
    if getattr(args, "multi_latent_attention", False):
        width = heads * (args.qk_head_dim + args.qk_pos_emb_head_dim + args.v_head_dim) // 2
        projections = _latent_projections(args)
    else:
        width = heads * args.kv_channels
        groups = args.num_query_groups if args.group_query_attention else heads
        projections = 2 * hidden * (width + groups * args.kv_channels)
    matrices = 3 if args.swiglu else 2
    feed_forward = matrices * hidden * args.ffn_hidden_size
    if args.num_experts:
        active = args.moe_router_topk * args.moe_ffn_hidden_size
        active += getattr(args, "moe_shared_expert_intermediate_size", None) or 0
        feed_forward = matrices * hidden * active
    return CostModel.of_layer(projections + feed_forward, width)


def _latent_projections(args: Any) -> int:
    """Return the number of weights of a layer's multi-latent attention projections."""
    hidden, heads = args.hidden_size, args.num_attention_heads
    query_size = heads * (args.qk_head_dim + args.qk_pos_emb_head_dim)
    query = hidden * query_size
    if args.q_lora_rank:
        query = (hidden + query_size) * args.q_lora_rank
    down = hidden * (args.kv_lora_rank + args.qk_pos_emb_head_dim)
    up = args.kv_lora_rank * heads * (args.qk_head_dim + args.v_head_dim)
    return int(query + down + up + heads * args.v_head_dim * hidden)
