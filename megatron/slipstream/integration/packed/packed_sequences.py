# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Packed training in megatron: datasets, batches, and the forward pass of a micro-batch.

For the layout of a batch see ``packed_sequences/batch.py``, [Note: Static packed sequences].
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Optional

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.utils import Split
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import get_args

from megatron.slipstream.options.packing import check_corpora
from megatron.slipstream.options.rules import require
from megatron.slipstream.packed_sequences.batch import (
    OFFSET_KEYS,
    for_context_parallel_rank,
    static_layout,
)
from megatron.slipstream.packed_sequences.dataset import PackedDocuments, PackIndex, PackingPlan
from megatron.slipstream.packed_sequences.packing import pack_limits
from megatron.slipstream.patches import table
from megatron.slipstream.patches.table import Feature

logger = logging.getLogger(__name__)

# Datasets

_WELL_FILLED = 0.95
"""Fraction of a set's tokens in use below which a warning may be logged."""


@dataclasses.dataclass
class PackedDatasetConfig(GPTDatasetConfig):
    """Megatron's dataset options, and how documents are packed."""

    train_plan: Optional[PackingPlan] = None
    """Packing of the training set; not None."""

    evaluation_plan: Optional[PackingPlan] = None
    """Packing of the validation and test sets, whose batch size may differ; not None."""

    packing: str = ""
    """Both plans, serialised, to identify a cached index. Computed by ``__post_init__()``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        plans = [self.plan(Split.train), self.plan(Split.valid)]
        self.packing = json.dumps([dataclasses.asdict(plan) for plan in plans])

    def plan(self, split: Split) -> PackingPlan:
        plan = self.train_plan if split is Split.train else self.evaluation_plan
        assert plan is not None
        return plan


class PackedGPTDataset(MegatronDataset):
    """Packed samples of one corpus, built by megatron's dataset builder.

    Its index is cached in the same place as megatron's: ``data_cache_path``, or beside the corpus.
    """

    config: PackedDatasetConfig

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        masked_token = self.config.tokenizer.eod if self.config.eod_mask_loss else None
        self.samples = self._samples(self.config.plan(self.index_split), masked_token)

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        return int(low_level_dataset.sequence_lengths.shape[0])

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: PackedDatasetConfig) -> Any:
        source = MockGPTDataset if config.mock else GPTDataset
        return source.build_low_level_dataset(dataset_path, config)

    @staticmethod
    def _key_config_attributes() -> list[str]:
        return [*MegatronDataset._key_config_attributes(), "packing"]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, idx: Optional[int]) -> dict[str, torch.Tensor]:
        return self.samples[idx]

    # Overridden by subclasses: samples and their index.

    index_class: ClassVar[type[PackIndex]] = PackIndex

    def _samples(self, plan: PackingPlan, masked_token: Optional[int]) -> Any:
        return PackedDocuments(self.dataset, self._index(plan), plan.limits, masked_token)

    def _build_index(self, plan: Any, num_samples: Optional[int]) -> Any:
        what = f"packing documents ({self.index_split.name})"
        lengths = self.dataset.sequence_lengths
        return self.index_class.build(lengths, self.indices, plan, num_samples, what)

    def _log_index(self, index: Any, plan: Any) -> None:
        limits, filling = plan.limits, index.filling(plan.limits)
        part_full = index.part_with(limits.max_sequences)
        logger.info(
            "packed %d pieces of documents into %d samples of the %s set: %.1f%% of their tokens "
            "are not padding, and %.1f%% of them hold thd_max_packed_sequences=%d",
            len(index.pieces),
            len(index),
            self.index_split.name,
            100 * filling,
            100 * part_full,
            limits.max_sequences,
        )
        if filling < _WELL_FILLED and part_full > 0.5:
            logger.warning(
                "thd_max_packed_sequences=%d leaves %.1f%% of the tokens of the %s set to padding, "
                "which all layers but attention compute too; set thd_max_packed_sequences to more",
                limits.max_sequences,
                100 * (1 - filling),
                self.index_split.name,
            )

    def _index(self, plan: PackingPlan) -> Any:
        """Load the index from the cache, or build it, which gives the same result on every rank."""
        folder = self._cache_folder()
        name = f"{self.unique_description_hash}-{type(self).__name__}-{self.index_split.name}"
        index = None if folder is None else self.index_class.load(folder, name)
        if index is not None:
            return index
        # Megatron requests no samples if it does not evaluate, but refuses an empty set.
        num_samples = self.num_samples if self.num_samples is None else max(self.num_samples, 1)
        index = self._build_index(plan, num_samples)
        # Megatron's builder runs on the first rank first; the others then find its files.
        if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
            self._log_index(index, plan)
            if folder is not None:
                index.save(folder, name, plan)
        return index

    def _cache_folder(self) -> Optional[Path]:
        if self.config.path_to_cache:
            return Path(self.config.path_to_cache)
        if self.config.mock:
            return None
        return Path(self.dataset.path_prefix) / "cache" / f"{type(self).__name__}_indices"


def dataset_config(base: GPTDatasetConfig, args: Any) -> PackedDatasetConfig:
    """Return the configuration of packed datasets, from megatron's and the validated arguments.

    Raises ``ValueError`` if the arguments ask to balance packs of several corpora.
    """
    blends = [base.blend, *(base.blend_per_split or [])]
    require(check_corpora(args, [blend[0] for blend in blends if blend is not None]))
    plan = PackingPlan(
        limits=pack_limits(args),
        packing=args.sequence_packing,
        packs_per_batch=args.global_batch_size,
        num_ranks=args.data_parallel_size,
        seed=args.seed,
    )
    options = {
        field.name: getattr(base, field.name) for field in dataclasses.fields(base) if field.init
    }
    return PackedDatasetConfig(
        **options,
        train_plan=plan,
        evaluation_plan=dataclasses.replace(plan, packs_per_batch=args.eval_global_batch_size),
    )


def datasets(num_samples: tuple[int, Optional[int], int], base: GPTDatasetConfig) -> Any:
    """Return train, validation and test sets of packed samples; see ``providers.datasets``."""
    table.apply(Feature.PADDED_ROUTING)
    config = dataset_config(base, get_args())
    # One rank of each tensor-parallel group reads, on every stage: all layers need the offsets.
    reads = mpu.get_tensor_model_parallel_rank() == 0
    return BlendedMegatronDatasetBuilder(
        PackedGPTDataset, num_samples, lambda: reads, config
    ).build()


# Batches


def packed_seq_params(
    cu_seqlens: torch.Tensor, cu_seqlens_padded: torch.Tensor, max_seqlen: int
) -> PackedSeqParams:
    """Return megatron-core's description of a micro-batch, without reading from the GPU.

    ``total_tokens`` and ``seq_idx`` stay None: setting them would allocate and wait for the GPU at
    every construction, and only state-space layers read them. The offsets are int32 ``[N + 1]``;
    one tensor for both is a ``ValueError``. ``max_seqlen`` is the number of tokens of the buffer,
    over all context-parallel ranks.
    """
    if cu_seqlens is cu_seqlens_padded:
        raise ValueError(
            "cu_seqlens and cu_seqlens_padded are one tensor, which Transformer Engine takes to "
            "mean that nothing lies between sequences; pass two"
        )
    names = {field.name for field in dataclasses.fields(PackedSeqParams)}
    # Up to 0.18 megatron-core infers padding from the tensors being distinct.
    explicit = {"pad_between_seqs": True} if "pad_between_seqs" in names else {}
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=cu_seqlens_padded,
        cu_seqlens_kv_padded=cu_seqlens_padded,
        max_seqlen_q=max_seqlen,
        max_seqlen_kv=max_seqlen,
        **explicit,
    )


def read_micro_batch(
    data_iterator: Optional[Iterator[Any]],
    layout: Mapping[str, Any],
    prepare: Callable[[Any], Any] = lambda sample: sample,
) -> dict[str, torch.Tensor]:
    """Broadcast the micro-batch that the first rank of a tensor-parallel group reads.

    ``layout`` has the shapes and types of its tensors, which are not exchanged; ``prepare`` is
    applied to each sample read.
    """
    device = torch.cuda.current_device()  # the CPU with the CPU shims
    batch: dict[str, torch.Tensor] = {}
    reads = mpu.get_tensor_model_parallel_rank() == 0
    if reads:
        assert data_iterator is not None, "the first tensor-parallel rank reads the data"
        loaded = prepare(next(data_iterator))
        batch = {name: loaded[name].to(device, non_blocking=True).contiguous() for name in layout}
    if mpu.get_tensor_model_parallel_world_size() > 1:
        source = mpu.get_tensor_model_parallel_src_rank()
        group = mpu.get_tensor_model_parallel_group()
        for name, (shape, dtype) in layout.items():
            if not reads:
                batch[name] = torch.empty(shape, dtype=dtype, device=device)
            torch.distributed.broadcast(batch[name], source, group=group)
    return batch


def _batch(
    data_iterator: Optional[Iterator[Any]], needed: set[str], args: Any
) -> dict[str, torch.Tensor]:
    """Return the needed tensors of this rank's micro-batch, in the static layout."""
    size, rank = args.context_parallel_size, mpu.get_context_parallel_rank()
    layout = static_layout(pack_limits(args), size)
    return read_micro_batch(
        data_iterator,
        {key: layout[key] for key in sorted(needed)},
        lambda sample: for_context_parallel_rank(sample, size, rank),
    )


class Stage(NamedTuple):
    """The position of a model chunk in the pipeline, and the tensors that it needs."""

    is_first: bool
    is_ranks_first: bool
    """Whether it is the rank's first chunk in a micro-batch's path."""
    needed: frozenset[str]
    """Names of needed tensors other than the offsets."""

    @classmethod
    def of(cls, model: torch.nn.Module, args: Any) -> Stage:
        """Return the stage of a wrapped model chunk."""
        vp_stage = get_attr_wrapped_model(model, "vp_stage")
        is_first = mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
        is_last = mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
        needed: set[str] = set()
        if is_first or is_last:
            needed |= {"tokens", "labels", "position_ids", "loss_mask"}
        if args.num_experts:
            needed |= {"padding_mask"}
        return cls(is_first, vp_stage in (None, 0), frozenset(needed))


def forward(
    data_iterator: Optional[Iterator[Any]], model: torch.nn.Module
) -> tuple[torch.Tensor, Optional[torch.Tensor]]:
    """Run one packed micro-batch through one model chunk.

    Returns:
        Its output (on the last stage the loss of each token, float ``[1, T]``) and the mask of the
        labels that count, float32 ``[1, T]`` (None in the middle of the pipeline). Losses of
        padding are finite, so multiplying by the mask removes them.
    """
    args = get_args()
    stage = Stage.of(model, args)
    batch = _batch(data_iterator, {*OFFSET_KEYS, *stage.needed}, args)
    params = packed_seq_params(
        batch["cu_seqlens"][0], batch["cu_seqlens_padded"][0], pack_limits(args).max_tokens
    )
    if stage.is_ranks_first:
        report_sequence_lengths(params.cu_seqlens_q)
    return run_model(model, batch, params, stage, args)


def run_model(
    model: torch.nn.Module,
    batch: Mapping[str, torch.Tensor],
    params: PackedSeqParams,
    stage: Stage,
    args: Any,
) -> tuple[torch.Tensor, Optional[torch.Tensor]]:
    """Run the model of :func:`forward` with the tensors that the stage needs."""
    more: dict[str, Any] = {}
    if args.num_experts:
        more["padding_mask"] = _padding_mask_for(batch["padding_mask"], stage.is_first, args)
    if getattr(args, "mtp_num_layers", None):
        more["loss_mask"] = batch.get("loss_mask")
    output = model(
        batch.get("tokens"),
        batch.get("position_ids"),
        None,
        labels=batch.get("labels"),
        packed_seq_params=params,
        **more,
    )
    return output, batch.get("loss_mask")


def _padding_mask_for(mask: torch.Tensor, is_first: bool, args: Any) -> torch.Tensor:
    """Return the padding mask for a stage's model, bool ``[1, tokens]``.

    With sequence parallelism, layers hold only their rank's part of the tokens. Only GPT models on
    the first stage split the mask themselves.
    """
    divides_itself = is_first and args.hybrid_layer_pattern is None
    if divides_itself or not args.sequence_parallel:
        return mask
    parts = mask.chunk(mpu.get_tensor_model_parallel_world_size(), dim=1)
    return parts[mpu.get_tensor_model_parallel_rank()].contiguous()


def report_sequence_lengths(cu_seqlens: torch.Tensor) -> None:
    """Report sequence lengths to megatron, for the throughput that it logs.

    Call once per micro-batch and rank, in training. Otherwise megatron assumes one sequence per
    micro-batch.
    """
    from megatron.training import training

    if torch.is_grad_enabled():
        training.update_seqlen_stats_from_cu_seqlens(cu_seqlens)
