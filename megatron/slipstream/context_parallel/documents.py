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
from typing import Any, Optional, Self

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
    PackedDocuments,
    PackIndex,
    PackingPlan,
    training_stream,
    watched,
)
from megatron.slipstream.packed_sequences.packing import Pack, PackLimits, Piece

SIZE_KEY = "context_parallel_size"
"""int32 ``[1]``: in a sample, the size of the group that its micro-batch belongs to."""

FINGERPRINT_KEY = "fingerprint"
"""int64 ``[1]`` of a sample: a hash of the group's documents, so equal on all its ranks."""


@dataclass(frozen=True, kw_only=True)
class GroupPlan(PackingPlan):
    """How a stream of documents becomes groups. Equal plans of one corpus give equal samples.

    ``packs_per_batch`` is the number of micro-batches of a global batch here, and ``limits`` those
    of the largest group, at which documents are cut. Made by :func:`group_plan`.
    """

    ranks: RankLimits
    cost_model: CostModel

    def groups(self, pieces: Iterable[Piece]) -> Iterator[Group]:
        for batch in batches(
            pieces, self.ranks, self.cost_model, self.packs_per_batch, self.look_ahead
        ):
            yield from itertools.chain.from_iterable(batch)


def group_plan(
    ranks: RankLimits, cost_model: CostModel, num_micro_batches: int, seed: int
) -> GroupPlan:
    """Return a plan for global batches of ``num_micro_batches`` micro-batches."""
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
class GroupIndex(PackIndex):
    """The pieces and the slots of each group, by slot; ``sizes`` is int32 ``[num_groups]``."""

    sizes: NDArray[np.int32]

    @classmethod
    def build(
        cls,
        lengths: NDArray[np.integer[Any]],
        documents: NDArray[np.integer[Any]],
        plan: GroupPlan,
        num_samples: Optional[int] = None,
        what: str = "scheduling documents",
    ) -> Self:
        """Schedule until there are ``num_samples`` slots; the last global batch is complete."""
        stream = training_stream(lengths, documents, plan, num_samples is not None)
        sizes = array("i")
        slots_per_batch = plan.packs_per_batch * plan.num_ranks
        packs = _packs(plan.groups(stream), sizes, slots_per_batch, num_samples)
        # Packs are made while they are read, and with them the sizes.
        return cls.of(
            watched(packs, None, what), sizes=lambda: np.frombuffer(sizes, dtype=np.int32)
        )

    @cached_property
    def _last_slots(self) -> NDArray[np.int64]:
        return np.cumsum(self.sizes, dtype=np.int64)

    def __len__(self) -> int:
        return int(self._last_slots[-1]) if len(self._last_slots) else 0

    def __getitem__(self, slot: int) -> Share:
        if not 0 <= slot < len(self):
            raise IndexError(f"slot {slot} is out of range: there are {len(self)}")
        number = int(np.searchsorted(self._last_slots, slot, side="right"))
        size, end = int(self.sizes[number]), int(self._last_slots[number])
        return Share(size, slot - (end - size), self.pack(number))

    def filling(self, limits: RankLimits) -> float:
        """Return the fraction of all buffers that documents fill, 0 to 1."""
        return self.num_tokens / (len(self) * limits.tokens_per_rank)

    def part_with(self, size: int) -> float:
        """Return the fraction of all slots that belong to groups of this size, 0 to 1."""
        return float(self.sizes[self.sizes == size].sum() / len(self))


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


class SharedDocuments(PackedDocuments):
    """One rank's parts of the micro-batches by sample number.

    ``context_parallel_size`` is the static size, the number of ranks that request the same sample,
    and ``context_parallel_rank`` this rank's index among them.
    """

    def __init__(
        self,
        corpus: Corpus,
        index: GroupIndex,
        limits: RankLimits,
        masked_token: Optional[int] = None,
        context_parallel_size: int = 1,
        context_parallel_rank: int = 0,
    ) -> None:
        super().__init__(corpus, index, limits, masked_token)
        self.context_parallel_size = context_parallel_size
        self.context_parallel_rank = context_parallel_rank

    def __len__(self) -> int:
        return len(self.index) // self.context_parallel_size

    def __getitem__(self, sample: Optional[int]) -> dict[str, torch.Tensor]:
        """Return this rank's part of sample ``sample``; None gives padding, to fill a batch."""
        if sample is None:
            share = Share(self.limits.sizes[0], 0, [])
        else:
            share = self.index[sample * self.context_parallel_size + self.context_parallel_rank]
        limits = self.limits.of(share.size)
        return shared_sample(self.texts(share.pack), share, limits, self.masked_token)


def shared_sample(
    texts: list[NDArray[Any]], share: Share, limits: PackLimits, masked_token: Optional[int] = None
) -> dict[str, torch.Tensor]:
    """Return a rank's part of a group's pack, without the first dimension, which collating adds.

    These are the tensors of :func:`~megatron.slipstream.packed_sequences.batch.packed_sample` with
    the rank's tokens (``[tokens_per_rank]``) and the offsets of the undivided sequences
    (``[max_sequences + 1]``), plus :data:`SIZE_KEY` and :data:`FINGERPRINT_KEY`. ``limits`` are
    those of the group's pack.
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
