# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Datasets and micro-batches for training with dynamic context parallelism in megatron.

As ``packed_sequences.py``, except that a rank loads its part of its group's micro-batch, and that
micro-batches carry that group. Every rank reads the data itself, even within a tensor-parallel
group: each needs the size before anything runs, and a broadcast would make the host wait for the
GPU.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from typing import Any, ClassVar, Optional

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.training import get_args

from megatron.slipstream.context_parallel.documents import (
    FINGERPRINT_KEY,
    SIZE_KEY,
    GroupIndex,
    GroupPlan,
    SharedDocuments,
    group_plan,
)
from megatron.slipstream.context_parallel.limits import cost_model, rank_limits
from megatron.slipstream.integration.packed import packed_sequences
from megatron.slipstream.integration.packed.context_parallel_groups import (
    check_agreement,
    context_parallel_groups,
    device_of_ranks,
)
from megatron.slipstream.integration.packed.packed_sequences import (
    PackedDatasetConfig,
    PackedGPTDataset,
    Stage,
    packed_seq_params,
)
from megatron.slipstream.packed_sequences.batch import OFFSET_KEYS
from megatron.slipstream.packed_sequences.dataset import PackIndex, PackingPlan
from megatron.slipstream.patches import table
from megatron.slipstream.patches.table import Feature

logger = logging.getLogger(__name__)

# Datasets


class SharedGPTDataset(PackedGPTDataset):
    """This rank's parts of the micro-batches of one corpus, built by megatron's builder."""

    index_class: ClassVar[type[PackIndex]] = GroupIndex

    def _samples(self, plan: PackingPlan, masked_token: Optional[int]) -> SharedDocuments:
        assert isinstance(plan, GroupPlan)
        return SharedDocuments(
            self.dataset,
            self._index(plan),
            plan.ranks,
            masked_token,
            mpu.get_context_parallel_world_size(),
            mpu.get_context_parallel_rank(),
        )

    def _build_index(self, plan: GroupPlan, num_samples: Optional[int]) -> Any:
        num_slots = None
        if num_samples is not None:
            num_slots = num_samples * mpu.get_context_parallel_world_size()
        what = f"scheduling documents ({self.index_split.name})"
        lengths = self.dataset.sequence_lengths
        return self.index_class.build(lengths, self.indices, plan, num_slots, what)

    def _log_index(self, index: GroupIndex, plan: GroupPlan) -> None:
        sizes = (f"{size}: {100 * index.part_with(size):.1f}%" for size in plan.ranks.sizes)
        logger.info(
            "scheduled %d pieces of documents into %d parts of micro-batches of the %s set: "
            "%.1f%% of their tokens are not padding; parts by context-parallel size: %s",
            len(index.pieces),
            len(index),
            self.index_split.name,
            100 * index.filling(plan.ranks),
            ", ".join(sizes),
        )


def dataset_config(base: GPTDatasetConfig, args: Any) -> PackedDatasetConfig:
    """As ``packed_sequences.dataset_config``, for dynamic context parallelism."""
    ranks, model = rank_limits(args), cost_model(args)

    def plan(global_batch_size: int) -> GroupPlan:
        return group_plan(ranks, model, global_batch_size // args.data_parallel_size, args.seed)

    return dataclasses.replace(
        packed_sequences.dataset_config(base, args),
        train_plan=plan(args.global_batch_size),
        evaluation_plan=plan(args.eval_global_batch_size),
    )


def datasets(num_samples: tuple[int, Optional[int], int], base: GPTDatasetConfig) -> Any:
    """See ``providers.datasets``; all ranks create their process groups here."""
    table.apply(Feature.PADDED_ROUTING)
    args = get_args()
    context_parallel_groups(rank_limits(args))
    config = dataset_config(base, args)
    # Every rank reads; see the top of this file.
    return BlendedMegatronDatasetBuilder(
        SharedGPTDataset, num_samples, lambda: True, config
    ).build()


# Batches


def micro_batch_params(loaded: dict[str, torch.Tensor], args: Any) -> PackedSeqParams:
    """Return a micro-batch's parameters, with its group; raises as :func:`check_agreement`."""
    limits = rank_limits(args)
    groups = context_parallel_groups(limits)
    size = int(loaded[SIZE_KEY])
    if args.dynamic_context_parallel_verify:
        check_agreement(groups, size, int(loaded[FINGERPRINT_KEY]))
    device = device_of_ranks()
    actual, padded = (loaded[key][0].to(device, non_blocking=True) for key in sorted(OFFSET_KEYS))
    # The same number for every micro-batch of this size, as CUDA graphs need.
    params = packed_seq_params(actual, padded, size * limits.tokens_per_rank)
    params.cp_group = groups.of_size[size]
    return params


def forward(
    data_iterator: Optional[Iterator[Any]], model: torch.nn.Module
) -> tuple[torch.Tensor, Optional[torch.Tensor]]:
    """As ``packed_sequences.forward``, with this rank's part of the tokens."""
    args = get_args()
    stage = Stage.of(model, args)
    assert data_iterator is not None, "every rank reads the data"
    loaded = next(data_iterator)
    params = micro_batch_params(loaded, args)
    device = params.cu_seqlens_q.device
    batch = {key: loaded[key].to(device, non_blocking=True) for key in stage.needed}
    if stage.is_ranks_first:
        # As if all groups had the static size: megatron sums the reports of all ranks and divides
        # by it. Every rank must report, or the others wait for it.
        static_size, lengths = int(args.context_parallel_size), params.cu_seqlens_q
        # A rank of a group below the static size also reports for the missing ranks.
        is_counted = params.cp_group.rank() < static_size
        for _ in range(max(1, static_size // params.cp_group.size()) if is_counted else 1):
            packed_sequences.report_sequence_lengths(
                lengths if is_counted else torch.zeros_like(lengths)
            )
    return packed_sequences.run_model(model, batch, params, stage, args)
