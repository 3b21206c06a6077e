# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The context-parallel sizes of micro-batches, for a bank of graphs.

The size determines three arguments of a model chunk: the group (``PackedSeqParams.cp_group``), the
number of tokens of the whole buffer (``max_seqlen``), and the table of rotary embeddings, which has
that length. Everything else has the same shape for every size.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Optional

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams

from megatron.slipstream.context_parallel.limits import RankLimits
from megatron.slipstream.graphs.bank import CpSizes
from megatron.slipstream.integration.packed.context_parallel_groups import (
    ContextParallelGroups,
    context_parallel_groups,
    device_of_ranks,
)


def sizes_of(model: torch.nn.Module, limits: Optional[RankLimits]) -> CpSizes:
    """Return the sizes of a model chunk's micro-batches.

    With dynamic context parallelism it needs the process groups, a collective of all ranks.
    """
    if limits is None:
        return CpSizes()
    return DynamicSizes(model, limits, context_parallel_groups(limits))


_OFFSETS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")


class DynamicSizes(CpSizes):
    """The sizes of dynamic context parallelism."""

    def __init__(
        self, model: torch.nn.Module, limits: RankLimits, groups: ContextParallelGroups
    ) -> None:
        self._model = model
        self._limits = limits
        self._everyone = groups.everyone
        self._groups = {size: groups.of_size[size] for size in limits.sizes}
        """By size, the group with which its graphs are captured."""

    @property
    def sizes(self) -> Sequence[int]:
        return self._limits.sizes

    def size_of(self, arguments: Mapping[str, Any]) -> int:
        """Return a micro-batch's size; ``ValueError`` without graphs of its group or capacity."""
        params: Optional[PackedSeqParams] = arguments.get("packed_seq_params")
        if params is None or params.cp_group is None:
            raise ValueError(
                "a micro-batch without PackedSeqParams.cp_group is not supported with graphs of "
                "each context-parallel size because the size is unknown; set the group that "
                "shares it, a group of one rank included"
            )
        size = int(params.cp_group.size())
        if self._groups.get(size) is not params.cp_group:
            self._refuse_group(params.cp_group)
        capacity = size * self._limits.tokens_per_rank
        num_sequences = params.cu_seqlens_q.numel() - 1
        if params.max_seqlen_q > capacity or num_sequences > self._limits.max_sequences:
            raise ValueError(
                f"a pack of {params.max_seqlen_q} tokens and room for {num_sequences} sequences is "
                f"not supported with the graphs of context_parallel_size={size} because they are "
                f"captured for {capacity} tokens ({self._limits.tokens_per_rank} of each rank) and "
                f"{self._limits.max_sequences} sequences; set a larger context-parallel size, "
                "thd_max_tokens or thd_max_packed_sequences"
            )
        return size

    def _refuse_group(self, group: Any) -> None:
        size = group.size()
        known = ", ".join(map(str, self.sizes))
        if size not in self._groups:
            raise ValueError(
                f"a micro-batch with context_parallel_size={size} is not supported because graphs "
                f"are captured for {known}; set min_dynamic_context_parallel_size and "
                "max_dynamic_context_parallel_size to what micro-batches have"
            )
        ranks = torch.distributed.get_process_group_ranks
        raise ValueError(
            f"a micro-batch is shared by a group of ranks {ranks(group)} that graphs of "
            f"context_parallel_size={size} were not captured with, which was that of ranks "
            f"{ranks(self._groups[size])}; set PackedSeqParams.cp_group to "
            f"context_parallel_groups(limits).of_size[{size}]"
        )

    def arguments_of(self, arguments: Mapping[str, Any], size: int) -> Mapping[str, Any]:
        # One sequence fills the buffer.
        params = self._params_of(arguments["packed_seq_params"], size)
        changed = {**arguments, "packed_seq_params": params}
        if arguments.get("rotary_pos_emb") is not None:
            changed["rotary_pos_emb"] = self._table_of(params)
        return changed

    def _params_of(self, params: PackedSeqParams, size: int) -> PackedSeqParams:
        resized = copy.copy(params)
        num_tokens = size * self._limits.tokens_per_rank
        resized.max_seqlen_q = resized.max_seqlen_kv = num_tokens
        resized.cp_group = self._groups[size]
        # Offsets that share a tensor keep sharing it.
        made: dict[int, torch.Tensor] = {}
        for name in _OFFSETS:
            offsets = getattr(params, name)
            if offsets is None:
                continue
            if id(offsets) not in made:
                made[id(offsets)] = torch.full_like(offsets, num_tokens)
                made[id(offsets)][0] = 0
            setattr(resized, name, made[id(offsets)])
        return resized

    def _table_of(self, params: PackedSeqParams) -> torch.Tensor:
        embedding: Any = getattr(self._model, "rotary_pos_emb", None)
        if not isinstance(embedding, RotaryEmbedding):
            raise ValueError(
                f"rotary embeddings of {type(embedding).__name__} are not supported with graphs of "
                "each context-parallel size because their table does not follow from a length; "
                "set position_embedding_type=rope"
            )
        table = embedding(params.max_seqlen_q, packed_seq=True, cp_group=params.cp_group)
        return table[0] if isinstance(table, tuple) else table

    def agree(self, size: int, error: Optional[Exception]) -> None:
        num_failed = torch.tensor(int(error is not None), device=device_of_ranks())
        # First over all stages and tensor-parallel ranks, then within each.
        for group in (parallel_state.get_model_parallel_group(), self._everyone):
            torch.distributed.all_reduce(num_failed, group=group)
        if error is not None:
            raise error
        if int(num_failed):
            raise RuntimeError(
                f"CUDA graphs of context_parallel_size={size} could not be captured on every rank, "
                "so this one gives up those that it has captured; see the error of the other ranks"
            )
