# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Samples of a corpus for dynamic context parallelism: each is a rank's part of a micro-batch.

Samples are numbered as megatron's sampler assigns them: data-parallel rank r of d has, as its m-th
micro-batch, sample ``m * d + r``. With a static context-parallel size above 1 its ranks request the
same sample, and each takes a different part of it. So the parts of a micro-batch, counted over all
data- and context-parallel ranks, are consecutive: its *slots*. A group has as many consecutive
slots as ranks.
"""

from __future__ import annotations

import itertools
import zlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Optional

import numpy as np
import torch
from numpy.typing import NDArray

from megatron.slipstream.context_parallel.limits import CostModel, RankLimits
from megatron.slipstream.context_parallel.scheduler import Group, Share, batches
from megatron.slipstream.packed_sequences.batch import (
    OFFSET_KEYS,
    SEQUENCE_KEYS,
    context_parallel_positions,
    packed_sample,
)
from megatron.slipstream.packed_sequences.dataset import (
    Corpus,
    PackIndex,
    PackingPlan,
    _watched as watched,
    document_stream,
    load_index,
    save_index,
)
from megatron.slipstream.packed_sequences.packing import Pack, PackLimits, Piece

SIZE_KEY = "context_parallel_size"
"""int32 ``[1]``: in a sample, the size of the group that its micro-batch belongs to."""

FINGERPRINT_KEY = "fingerprint"
"""int64 ``[1]``: in a sample, a hash of the group's documents, so equal on all ranks of the group.
"""


@dataclass(frozen=True, kw_only=True)
class GroupPlan(PackingPlan):
    """How a stream of documents becomes groups. Equal plans of one corpus give equal samples.

    ``packs_per_batch`` is the number of micro-batches of a global batch here, and ``limits`` those
    of the largest group, at which documents are cut. Made by :func:`group_plan`.

    Args:
        ranks: The ranks that share micro-batches.
        cost_model: The cost by which groups are balanced.
    """

    ranks: RankLimits
    cost_model: CostModel

    def groups(self, pieces: Iterable[Piece]) -> Iterator[Group]:
        """Yield the stream's pieces in groups, in the order of their slots."""
        for batch in batches(
            pieces, self.ranks, self.cost_model, self.packs_per_batch, self.look_ahead
        ):
            yield from itertools.chain.from_iterable(batch)


def group_plan(
    ranks: RankLimits, cost_model: CostModel, num_micro_batches: int, seed: int
) -> GroupPlan:
    """Return a plan for global batches of ``num_micro_batches`` micro-batches.

    Args:
        ranks: The ranks that share micro-batches.
        cost_model: The cost by which groups are balanced.
        num_micro_batches: Number of micro-batches of each rank in one iteration.
        seed: Seed of the shuffles.
    """
    return GroupPlan(
        limits=ranks.of(ranks.largest),
        packing="balanced",
        packs_per_batch=num_micro_batches,
        num_ranks=ranks.num_ranks,
        seed=seed,
        ranks=ranks,
        cost_model=cost_model,
    )


@dataclass(frozen=True)
class GroupIndex:
    """The pieces and the slots of each group.

    Args:
        packs: The pieces of the groups in order.
        sizes: int32 ``[num_groups]``: number of ranks of each group.
    """

    packs: PackIndex
    sizes: NDArray[np.int32]

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        """The slot after the last one of each group."""
        return np.cumsum(self.sizes, dtype=np.int64)

    def __len__(self) -> int:
        """Return the number of slots."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, slot: int) -> Share:
        if not 0 <= slot < len(self):
            raise IndexError(f"slot {slot} is out of range: there are {len(self)}")
        number = int(np.searchsorted(self._ends, slot, side="right"))
        size, end = int(self.sizes[number]), int(self._ends[number])
        return Share(size, slot - (end - size), self.packs[number])

    def filling(self, ranks: RankLimits) -> float:
        """Return the fraction of all buffers that documents fill, 0 to 1."""
        num_tokens = int(self.packs.pieces[:, 2].sum(dtype=np.int64))
        return num_tokens / (len(self) * ranks.tokens_per_rank)

    def part_with(self, size: int) -> float:
        """Return the fraction of all slots that belong to groups of this size, 0 to 1."""
        return float(self.sizes[self.sizes == size].sum() / len(self))


def build_group_index(
    lengths: NDArray[np.integer[Any]],
    documents: NDArray[np.integer[Any]],
    plan: GroupPlan,
    num_slots: Optional[int] = None,
    what: str = "scheduling documents",
) -> GroupIndex:
    """Schedule until there are enough slots; the last global batch is complete.

    Args:
        lengths: Number of tokens of every document of the corpus.
        documents: Indices of the documents to schedule.
        plan: Limits, costs and seed.
        num_slots: Number of slots; None schedules one epoch.
        what: Text shown with the progress.

    Raises:
        ValueError: There is nothing to schedule.
    """
    if not bool((lengths[documents] > 1).any()):
        raise ValueError(
            f"none of the {len(documents)} documents has two tokens or more, so there is nothing "
            "to train on; set data_path to a corpus that has some, or split to give this set a part"
        )
    stream = document_stream(lengths, documents, plan, 1 if num_slots is None else None)
    sizes = array("i")
    packs = _packs(plan.groups(stream), sizes, plan.packs_per_batch * plan.num_ranks, num_slots)
    index = PackIndex.of(watched(packs, None, what))  # which fills ``sizes`` too
    return GroupIndex(index, np.frombuffer(sizes, dtype=np.int32))


def _packs(
    groups: Iterator[Group], sizes: array[int], slots_per_batch: int, num_slots: Optional[int]
) -> Iterator[Pack]:
    """Yield the groups' packs until there are enough slots; append their sizes to ``sizes``."""
    count = 0
    for size, pack in groups:
        sizes.append(size)
        yield pack
        count += size
        if num_slots is not None and count >= num_slots and count % slots_per_batch == 0:
            return


def load_group_index(folder: Path, name: str) -> Optional[GroupIndex]:
    """Load the index that :func:`save_group_index` wrote; None if there is none of this format."""
    packs = load_index(folder, name)
    return None if packs is None else GroupIndex(packs, np.load(_sizes_path(folder, name)))


def save_group_index(folder: Path, name: str, index: GroupIndex, plan: GroupPlan) -> None:
    """Write an index for :func:`load_group_index`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = _sizes_path(folder, name)
    temporary = path.with_name(f".{path.name}")
    with temporary.open("wb") as stream:
        np.save(stream, index.sizes)
    temporary.replace(path)
    # Last, because an index without its description counts as missing.
    save_index(folder, name, index.packs, plan)


def _sizes_path(folder: Path, name: str) -> Path:
    return folder / f"{name}-sizes.npy"


class SharedDocuments(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """One rank's parts of the micro-batches by sample number.

    Args:
        corpus: The tokens.
        index: The pieces of each slot.
        ranks: The ranks that share micro-batches.
        context_parallel_size: The static size: the number of ranks that request the same sample.
        context_parallel_rank: This rank's index among them.
        masked_token: See :func:`~megatron.slipstream.packed_sequences.batch.packed_sample`.
    """

    def __init__(
        self,
        corpus: Corpus,
        index: GroupIndex,
        ranks: RankLimits,
        context_parallel_size: int = 1,
        context_parallel_rank: int = 0,
        masked_token: Optional[int] = None,
    ) -> None:
        self.corpus = corpus
        self.index = index
        self.ranks = ranks
        self.context_parallel_size = context_parallel_size
        self.context_parallel_rank = context_parallel_rank
        self.masked_token = masked_token

    def __len__(self) -> int:
        return len(self.index) // self.context_parallel_size

    def __getitem__(self, sample: Optional[int]) -> dict[str, torch.Tensor]:
        """Return this rank's part of sample ``sample``; None gives padding, to fill a batch."""
        if sample is None:
            share = Share(self.ranks.sizes[0], 0, [])
        else:
            share = self.index[sample * self.context_parallel_size + self.context_parallel_rank]
        texts = [
            self.corpus.get(piece.document, offset=piece.offset, length=piece.length + 1)
            for piece in share.pack
        ]
        return shared_sample(texts, share, self.ranks.of(share.size), self.masked_token)


def shared_sample(
    texts: list[NDArray[Any]], share: Share, limits: PackLimits, masked_token: Optional[int] = None
) -> dict[str, torch.Tensor]:
    """Return a rank's part of a group's pack, without the first dimension, which collating adds.

    Args:
        texts: The tokens of the group's pieces; see
            :func:`~megatron.slipstream.packed_sequences.batch.packed_sample`.
        share: The rank's part.
        limits: Limits of the group's pack.
        masked_token: As in ``packed_sample``.

    Returns:
        The tensors of ``packed_sample``, with the rank's tokens (``[tokens_per_rank]``) and the
        offsets of the undivided sequences (``[max_sequences + 1]``), plus :data:`SIZE_KEY` and
        :data:`FINGERPRINT_KEY`.
    """
    whole = packed_sample(texts, limits, masked_token)
    sample = dict(whole)
    if share.size > 1:
        mine = context_parallel_positions(whole["cu_seqlens_padded"], share.size, share.rank)
        sample |= {key: whole[key][mine] for key in SEQUENCE_KEYS}
    sample[SIZE_KEY] = torch.tensor([share.size], dtype=torch.int32)
    fingerprint = 0
    for key in ("tokens", *OFFSET_KEYS):
        fingerprint = zlib.crc32(whole[key].numpy().tobytes(), fingerprint)
    sample[FINGERPRINT_KEY] = torch.tensor([fingerprint], dtype=torch.int64)
    return sample
