# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Training with dynamic context parallelism in megatron: its datasets and micro-batches.

As ``packed_sequences.py``, except that a rank loads its part of what its group shares, and that
micro-batches say which group that is. Every rank reads for itself, those of a tensor-parallel group
too: all of them have to know the size before anything runs, and the host would have to wait for the
GPU to learn it from a broadcast.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from typing import Any, Optional

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.utils import Split
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import get_args

from megatron.slipstream.context_parallel.documents import (
    FINGERPRINT_KEY,
    SIZE_KEY,
    GroupIndex,
    GroupPlan,
    SharedDocuments,
    build_group_index,
    group_plan,
    load_group_index,
    save_group_index,
)
from megatron.slipstream.context_parallel.options import cost_model, rank_limits
from megatron.slipstream.integration import packed_sequences
from megatron.slipstream.integration.context_parallel_groups import (
    check_agreement,
    context_parallel_groups,
)
from megatron.slipstream.integration.packed_sequences import (
    PackedDatasetConfig,
    PackedGPTDataset,
    packed_seq_params,
)
from megatron.slipstream.integration.padded_routing import exclude_padding_from_routing
from megatron.slipstream.packed_sequences.batch import OFFSET_KEYS

logger = logging.getLogger(__name__)

# Datasets


class SharedGPTDataset(PackedGPTDataset):
    """This rank's parts of the micro-batches of one corpus, as megatron's builder makes them."""

    def __init__(
        self,
        dataset: Any,
        dataset_path: Optional[str],
        indices: Any,
        num_samples: Optional[int],
        index_split: Split,
        config: PackedDatasetConfig,
    ) -> None:
        MegatronDataset.__init__(
            self, dataset, dataset_path, indices, num_samples, index_split, config
        )
        plan = config.plan(index_split)
        assert isinstance(plan, GroupPlan)
        self.samples = SharedDocuments(  # type: ignore[assignment]
            dataset,
            self._group_index(plan),
            plan.ranks,
            mpu.get_context_parallel_world_size(),
            mpu.get_context_parallel_rank(),
            masked_token=config.tokenizer.eod if config.eod_mask_loss else None,
        )

    def _group_index(self, plan: GroupPlan) -> GroupIndex:
        """From the cache, or scheduled now, which gives the same on every rank."""
        folder = self._cache_folder()
        name = f"{self.unique_description_hash}-{type(self).__name__}-{self.index_split.name}"
        index = None if folder is None else load_group_index(folder, name)
        if index is not None:
            return index
        num_slots = None
        if self.num_samples is not None:
            # Megatron asks for none where it will not evaluate, and then refuses an empty set.
            num_slots = max(self.num_samples, 1) * mpu.get_context_parallel_world_size()
        what = f"scheduling documents ({self.index_split.name})"
        lengths = self.dataset.sequence_lengths
        index = build_group_index(lengths, self.indices, plan, num_slots, what)
        # Megatron's builder lets the first rank go first; the others then find its files.
        if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
            _log_sizes(self.index_split.name, index, plan)
            if folder is not None:
                save_group_index(folder, name, index, plan)
        return index


def _log_sizes(name: str, index: GroupIndex, plan: GroupPlan) -> None:
    sizes = ", ".join(f"{size}: {100 * index.part_with(size):.1f}%" for size in plan.ranks.sizes)
    logger.info(
        "scheduled %d pieces of documents into %d parts of micro-batches of the %s set: %.1f%% of "
        "their tokens are not padding; parts by context-parallel size: %s",
        len(index.packs.pieces),
        len(index),
        name,
        100 * index.filling(plan.ranks),
        sizes,
    )


def dataset_config(base: GPTDatasetConfig, args: Any) -> PackedDatasetConfig:
    """The configuration of datasets for dynamic context parallelism.

    Args:
        base: Megatron's.
        args: Validated arguments.

    Raises:
        ValueError: As ``packed_sequences.dataset_config``.
    """
    ranks, model = rank_limits(args), cost_model(args)

    def plan(global_batch_size: int) -> GroupPlan:
        return group_plan(ranks, model, global_batch_size // args.data_parallel_size, args.seed)

    return dataclasses.replace(
        packed_sequences.dataset_config(base, args),
        train_plan=plan(args.global_batch_size),
        evaluation_plan=plan(args.eval_global_batch_size),
    )


def datasets(num_samples: tuple[int, Optional[int], int], base: GPTDatasetConfig) -> Any:
    """Train, validation and test set; called by all ranks, which make their process groups here.

    Args:
        num_samples: At least so many samples of each; None: one epoch.
        base: Megatron's configuration of unpacked datasets.
    """
    exclude_padding_from_routing()
    args = get_args()
    context_parallel_groups(rank_limits(args))
    config = dataset_config(base, args)
    builder = BlendedMegatronDatasetBuilder(SharedGPTDataset, num_samples, _reads_data, config)
    return builder.build()


def _reads_data() -> bool:
    """Every rank; see the top of this file."""
    return True


# Batches


def micro_batch_params(loaded: dict[str, torch.Tensor], args: Any) -> PackedSeqParams:
    """The description of a micro-batch, with the group that this rank shares it with.

    Args:
        loaded: A sample with its first dimension, on the CPU.
        args: Validated arguments.

    Raises:
        RuntimeError: Ranks disagree; see :func:`check_agreement`. Only with
            ``dynamic_context_parallel_verify``.
    """
    limits = rank_limits(args)
    groups = context_parallel_groups(limits)
    size = int(loaded[SIZE_KEY])
    if args.dynamic_context_parallel_verify:
        check_agreement(groups, size, int(loaded[FINGERPRINT_KEY]))
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    actual, padded = (loaded[key][0].to(device, non_blocking=True) for key in sorted(OFFSET_KEYS))
    # The same number for every micro-batch of this size, as CUDA graphs need.
    params = packed_seq_params(actual, padded, size * limits.tokens_per_rank)
    params.cp_group = groups.of_size[size]
    return params


def forward(
    data_iterator: Optional[Iterator[Any]], model: torch.nn.Module
) -> tuple[torch.Tensor, Optional[torch.Tensor]]:
    """A rank's part of one micro-batch through one model chunk; see ``packed_sequences.forward``.

    Returns:
        As there, of this rank's tokens.
    """
    args = get_args()
    vp_stage = get_attr_wrapped_model(model, "vp_stage")
    is_first = mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    is_last = mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    assert data_iterator is not None, "every rank reads the data"
    loaded = next(data_iterator)
    params = micro_batch_params(loaded, args)
    needed = {"tokens", "labels", "position_ids", "loss_mask"} if is_first or is_last else set()
    needed |= {"padding_mask"} if args.num_experts else set()
    device = params.cu_seqlens_q.device
    batch = {key: loaded[key].to(device, non_blocking=True) for key in needed}
    if vp_stage in (None, 0):
        _count_work(params, int(args.context_parallel_size))
    more: dict[str, Any] = {}
    if args.num_experts:
        more["padding_mask"] = packed_sequences._padding_mask_for(
            batch["padding_mask"], is_first, args
        )
    output = model(
        batch.get("tokens"),
        batch.get("position_ids"),
        None,
        labels=batch.get("labels"),
        packed_seq_params=params,
        **more,
    )
    return output, batch.get("loss_mask")


def _count_work(params: PackedSeqParams, static_size: int) -> None:
    """Tell megatron the lengths of the sequences, as often as it takes them to be the same.

    It adds up what all ranks say, and divides by the static size. Every rank has to say something,
    or the others wait for it.
    """
    size, rank = params.cp_group.size(), params.cp_group.rank()
    # A rank of a group below the static size speaks for those that are missing.
    times = max(1, static_size // size) if rank < static_size else 0
    lengths = params.cu_seqlens_q
    for _ in range(max(1, times)):
        packed_sequences._count_work(lengths if times else torch.zeros_like(lengths))
