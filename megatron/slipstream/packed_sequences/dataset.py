# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Packed samples of a corpus: the pieces of documents that each sample holds.

The stream of documents is endless: one shuffle of the corpus per epoch. It is packed from its
beginning, so the first samples do not depend on the number of samples, and training that resumes at
sample n sees the same samples as without the interruption. The last documents of an epoch share
samples with the first ones of the next.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import sys
import time
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, Optional, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray

from megatron.slipstream.packed_sequences.batch import packed_sample
from megatron.slipstream.packed_sequences.packing import (
    LOOK_AHEAD,
    Pack,
    PackLimits,
    Piece,
    balanced,
    greedy,
    split,
)

logger = logging.getLogger(__name__)

_FORMAT = 1
"""Format number of an index's files. Files with another number are not read."""

_AT_A_TIME = 1 << 16
"""Number of documents converted to Python objects at once: a corpus may have billions."""

_QUIET_S = 1.0
_LINE_EVERY_S = 10.0


class Corpus(Protocol):
    """The part of megatron-core's ``IndexedDataset`` that is used."""

    @property
    def sequence_lengths(self) -> NDArray[np.int32]:
        """Return the number of tokens of each document."""

    def get(self, idx: int, offset: int = 0, length: Optional[int] = None) -> NDArray[Any]:
        """Return ``length`` tokens of a document, from ``offset``."""


@dataclass(frozen=True)
class PackingPlan:
    """How a stream of documents becomes samples. Equal plans of one corpus give equal samples."""

    limits: PackLimits
    packing: Literal["greedy", "balanced"] = "greedy"
    packs_per_batch: int = 1
    num_ranks: int = 1
    seed: int = 0
    look_ahead: int = LOOK_AHEAD

    def __post_init__(self) -> None:
        if self.packing not in ("greedy", "balanced"):
            raise ValueError(
                f"sequence_packing={self.packing!r} is unknown; set 'greedy' or 'balanced'"
            )

    def packs(self, pieces: Iterable[Piece]) -> Iterator[Pack]:
        """Pack the stream's pieces into samples."""
        if self.packing == "greedy":
            return greedy(pieces, self.limits, self.look_ahead)
        return balanced(pieces, self.limits, self.packs_per_batch, self.num_ranks, self.look_ahead)


def document_stream(
    lengths: NDArray[np.integer[Any]],
    documents: NDArray[np.integer[Any]],
    plan: PackingPlan,
    num_epochs: Optional[int],
) -> Iterator[Piece]:
    """Yield the pieces of the documents, epoch after epoch, each epoch in its own order.

    The model reads n - 1 tokens of a document of n tokens: the last one is only a label, since
    attention does not cross documents. A document of fewer than 2 tokens gives no piece.
    ``lengths`` has all documents of the corpus, ``documents`` the indices of those to use; None
    epochs are endless.
    """
    epochs = itertools.count() if num_epochs is None else range(num_epochs)
    for epoch in epochs:
        # Not a Generator: its permutations may change with numpy's version.
        order = np.random.RandomState([plan.seed, epoch]).permutation(documents)
        for begin in range(0, len(order), _AT_A_TIME):
            some = order[begin : begin + _AT_A_TIME]
            for document, length in zip(some.tolist(), (lengths[some] - 1).tolist(), strict=True):
                yield from split(document, length, plan.limits.max_tokens)


def training_stream(
    lengths: NDArray[np.integer[Any]],
    documents: NDArray[np.integer[Any]],
    plan: PackingPlan,
    is_endless: bool,
) -> Iterator[Piece]:
    """Return :func:`document_stream` of one epoch or without end, or raise ``ValueError``."""
    if not bool((lengths[documents] > 1).any()):
        raise ValueError(
            f"none of the {len(documents)} documents has two tokens or more, so there is nothing "
            "to train on; set data_path to a corpus that has some, or split to give this set a part"
        )
    return document_stream(lengths, documents, plan, None if is_endless else 1)


@dataclass(frozen=True)
class PackIndex:
    """The pieces of each sample.

    Args:
        pieces: int32 ``[num_pieces, 3]``: document, offset and length, sample by sample.
        ends: int64 ``[num_samples]``: the end of each sample's pieces in ``pieces``.
    """

    pieces: NDArray[np.int32]
    ends: NDArray[np.int64]

    @classmethod
    def of(cls, packs: Iterable[Pack], **others: Any) -> Self:
        """Build the index of samples that hold these packs; ``others`` return its other arrays."""
        # Arrays that grow in place: lists of tuples would need ten times the memory.
        pieces, ends = array("i"), array("q")
        for pack in packs:
            pieces.extend(itertools.chain.from_iterable(pack))
            ends.append(len(pieces) // 3)
        rows = np.frombuffer(pieces, dtype=np.int32).reshape(-1, 3)
        made = {name: make() for name, make in others.items()}
        return cls(rows, np.frombuffer(ends, dtype=np.int64), **made)

    @classmethod
    def build(
        cls,
        lengths: NDArray[np.integer[Any]],
        documents: NDArray[np.integer[Any]],
        plan: Any,
        num_samples: Optional[int] = None,
        what: str = "packing documents",
    ) -> Self:
        """Pack until there are enough samples; for arguments see :func:`document_stream`.

        Without a number, one epoch is packed, whose last samples may be nearly empty. ``what`` is
        shown with the progress. Raises ``ValueError`` if there is nothing to train on.
        """
        stream = training_stream(lengths, documents, plan, num_samples is not None)
        packs = itertools.islice(plan.packs(stream), num_samples)
        return cls.of(watched(packs, num_samples, what))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, sample: int) -> Any:
        return self.pack(sample)

    def pack(self, number: int) -> Pack:
        begin = self.ends[number - 1] if number else 0
        return [Piece(*row) for row in self.pieces[begin : self.ends[number]].tolist()]

    def filling(self, limits: Any) -> float:
        """Return the fraction of all buffers that documents fill, 0 to 1."""
        return self.num_tokens / (len(self) * limits.max_tokens)

    @property
    def num_tokens(self) -> int:
        return int(self.pieces[:, 2].sum(dtype=np.int64))

    def part_with(self, num_pieces: int) -> float:
        """Return the fraction of samples that hold ``num_pieces`` pieces, 0 to 1."""
        return float((np.diff(self.ends, prepend=0) == num_pieces).mean())

    # Files

    @classmethod
    def load(cls, folder: Path, name: str) -> Optional[Self]:
        """Load the index that :meth:`save` wrote; None if there is none of this format."""
        paths = cls._paths(folder, name)
        if not all(path.is_file() for path in paths.values()):
            return None
        description = paths.pop("description")
        if json.loads(description.read_text(encoding="utf-8")).get("format") != _FORMAT:
            return None
        return cls(**{field: np.load(path, mmap_mode="r") for field, path in paths.items()})

    def save(self, folder: Path, name: str, plan: PackingPlan) -> None:
        """Write an index for :meth:`load`; the description, written last, marks it complete."""
        folder.mkdir(parents=True, exist_ok=True)
        content = {"format": _FORMAT, "num_samples": len(self), "plan": asdict(plan)}
        for field, path in reversed(self._paths(folder, name).items()):
            temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
            with temporary.open("wb") as stream:
                if field == "description":
                    stream.write(json.dumps(content, indent=1).encode() + b"\n")
                else:
                    np.save(stream, getattr(self, field))
            temporary.replace(path)

    @classmethod
    def _paths(cls, folder: Path, name: str) -> dict[str, Path]:
        paths = {"description": folder / f"{name}-description.json"}
        return paths | {f.name: folder / f"{name}-{f.name}.npy" for f in fields(cls)}


class PackedDocuments(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Packed samples of a corpus by sample number."""

    def __init__(
        self, corpus: Corpus, index: Any, limits: Any, masked_token: Optional[int] = None
    ) -> None:
        self.corpus = corpus
        self.index = index
        self.limits = limits
        self.masked_token = masked_token

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, sample: Optional[int]) -> dict[str, torch.Tensor]:
        """Return sample number ``sample``; None gives one without documents, to fill a batch."""
        pack = [] if sample is None else self.index[sample]
        return packed_sample(self.texts(pack), self.limits, self.masked_token)

    def texts(self, pack: Pack) -> list[NDArray[Any]]:
        """Return the tokens of each piece, and the one after them."""
        return [
            self.corpus.get(piece.document, offset=piece.offset, length=piece.length + 1)
            for piece in pack
        ]


# Progress


def watched(packs: Iterator[Pack], total: Optional[int], what: str) -> Iterator[Pack]:
    """Yield the packs and show progress after a second: a bar on stderr, or log lines."""
    from megatron.slipstream.plan.progress_bar import bar_on_stderr

    started_s = shown_s = time.monotonic()
    bar: Any = None
    try:
        for count, pack in enumerate(packs, 1):
            yield pack
            now_s = time.monotonic()
            if now_s - started_s < _QUIET_S:
                continue
            if sys.stderr.isatty():
                if bar is None:
                    bar = bar_on_stderr()
                    bar.add_task(what, total=total)
                    bar.start()
                bar.update(bar.task_ids[0], completed=count)
            elif now_s - shown_s > _LINE_EVERY_S:
                shown_s = now_s
                of_total = "" if total is None else f" of {total}"
                logger.info("%s: %d%s samples", what, count, of_total)
    finally:
        if bar is not None:
            bar.stop()
