# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Core attention in plain PyTorch for sequences that context-parallel ranks share."""

from __future__ import annotations

import copy
from typing import Any, Optional

import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention

from megatron.slipstream.integration.cpu.cpu_modules import LatentCoreAttention, sequence_places
from megatron.slipstream.packed_sequences.batch import context_parallel_positions


class GatheringCoreAttention(LatentCoreAttention):
    """Core attention for packed sequences that a context-parallel group shares.

    The group is the micro-batch's (``PackedSeqParams.cp_group``) if set, else the layer's. Every
    rank attends with its own queries to all keys and values of the group. This needs more memory
    and overlaps less than Transformer Engine's ring, but computes the same function.
    """

    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        # megatron-core's base class refuses to be built with a static size above 1.
        whole = copy.copy(config)
        whole.context_parallel_size = 1
        super().__init__(whole, *arguments, **options)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Optional[torch.Tensor],
        *arguments: Any,
        packed_seq_params: Optional[Any] = None,
        **options: Any,
    ) -> torch.Tensor:
        """As :meth:`LatentCoreAttention.forward`, for this rank's part of the tokens."""
        group = self.pg_collection.cp
        if packed_seq_params is not None and packed_seq_params.cp_group is not None:
            group = packed_seq_params.cp_group
        if packed_seq_params is None or group.size() == 1:
            options["packed_seq_params"] = packed_seq_params
            whole = super().forward(query, key, value, attention_mask, *arguments, **options)
            # With only padding, the output does not require grad, which recomputation refuses.
            return whole if whole.requires_grad else whole + 0 * query.sum()
        offsets = packed_seq_params.cu_seqlens_q_padded
        places = [context_parallel_positions(offsets, group.size(), r) for r in range(group.size())]
        in_order = torch.cat(places).argsort()
        keys = _AllGather.apply(key, group)[in_order]
        values = _AllGather.apply(value, group)[in_order]
        mine = places[group.rank()]
        hidden_size = self.num_attention_heads_per_partition * value.shape[-1]
        # Backward exchanges gradients of keys and values, so every rank must reach it, even
        # one that has only padding.
        output = query.new_zeros(query.shape[0], hidden_size) + 0 * (keys.sum() + values.sum())
        self.hidden_size_per_partition = hidden_size
        for begin, length in sequence_places(packed_seq_params):
            here = ((mine >= begin) & (mine < begin + length)).nonzero().squeeze(1)
            if not len(here):
                continue
            hidden = torch.arange(length) > (mine[here] - begin).unsqueeze(1)
            one = (
                query[here].unsqueeze(1),
                keys[begin : begin + length].unsqueeze(1),
                values[begin : begin + length].unsqueeze(1),
            )
            attended = DotProductAttention.forward(
                self, *one, hidden[None, None], *arguments, **options
            )
            output = output.index_copy(0, here, attended.squeeze(1))
        return output


class _AllGather(torch.autograd.Function):
    """Concatenate the parts of all ranks of a group; backward sums their gradients."""

    @staticmethod
    def forward(
        ctx: Any, part: torch.Tensor, group: torch.distributed.ProcessGroup
    ) -> torch.Tensor:
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(group.size())]
        torch.distributed.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        total = grad_outputs[0].contiguous().clone()
        torch.distributed.all_reduce(total, group=ctx.group)
        return total.chunk(ctx.group.size())[ctx.group.rank()], None
