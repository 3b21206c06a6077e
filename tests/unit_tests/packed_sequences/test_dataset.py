# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Packed samples of a corpus: every token once per epoch, and the same samples every time."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Literal, Optional

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from megatron.slipstream.packed_sequences import dataset
from megatron.slipstream.packed_sequences.dataset import (
    PackedDocuments,
    PackIndex,
    PackingPlan,
    document_stream,
)
from megatron.slipstream.packed_sequences.packing import PackLimits

any_corpus = settings(max_examples=60, deadline=None)

LIMITS = PackLimits(max_tokens=32, max_sequences=5)
GREEDY = PackingPlan(LIMITS, "greedy", seed=3)
BALANCED = PackingPlan(LIMITS, "balanced", packs_per_batch=4, num_ranks=2, seed=3)
PLANS = {"greedy": GREEDY, "balanced": BALANCED}

corpora = st.lists(st.integers(0, 90), min_size=1, max_size=40).filter(lambda c: max(c) > 1)


class Corpus:
    """Documents in memory. A token encodes its document and its index there."""

    def __init__(self, lengths: list[int]) -> None:
        self.sequence_lengths = np.array(lengths, dtype=np.int32)

    def get(self, idx: int, offset: int = 0, length: Optional[int] = None) -> np.ndarray:
        document = 1000 * (idx + 1) + np.arange(self.sequence_lengths[idx])
        return document[offset:] if length is None else document[offset : offset + length]


def index_of(lengths: list[int], plan: PackingPlan, num_samples: Optional[int] = None) -> PackIndex:
    return PackIndex.build(
        np.array(lengths, dtype=np.int32),
        np.arange(len(lengths), dtype=np.int32),
        plan,
        num_samples,
    )


def samples_of(index: PackIndex) -> list[list[tuple[int, int, int]]]:
    return [[tuple(piece) for piece in index[number]] for number in range(len(index))]


# --- contents of an epoch -------------------------------------------------------------------------


@any_corpus
@given(lengths=corpora, packing=st.sampled_from(list(PLANS)))
def test_an_epoch_reads_every_token_but_the_last_of_each_document_once(
    lengths: list[int], packing: str
) -> None:
    corpus = Corpus(lengths)
    samples = PackedDocuments(corpus, index_of(lengths, PLANS[packing]), LIMITS)
    read: Counter[tuple[int, int]] = Counter()
    for number in range(len(samples)):
        sample = samples[number]
        counts = sample["loss_mask"].bool()
        read.update(
            zip(sample["tokens"][counts].tolist(), sample["labels"][counts].tolist(), strict=True)
        )
    first = [1000 * (document + 1) for document in range(len(lengths))]
    assert read == Counter(
        (begin + token, begin + token + 1)
        for begin, length in zip(first, lengths, strict=True)
        for token in range(length - 1)
    )


def test_only_documents_of_the_split_are_packed() -> None:
    lengths = np.array([9, 8, 7, 6], dtype=np.int32)
    index = PackIndex.build(lengths, np.array([1, 3], dtype=np.int32), GREEDY)
    assert sorted(row[0] for sample in samples_of(index) for row in sample) == [1, 3]


def test_epochs_are_shuffled_each_in_its_own_way() -> None:
    lengths, documents = np.full(50, 5, dtype=np.int32), np.arange(50, dtype=np.int32)
    stream = document_stream(lengths, documents, GREEDY, num_epochs=None)
    epochs = [[piece.document for piece in itertools.islice(stream, 50)] for _ in range(3)]
    assert all(sorted(epoch) == documents.tolist() for epoch in epochs)
    assert len({tuple(epoch) for epoch in [*epochs, documents.tolist()]}) == 4
    other_seed = dataclasses.replace(GREEDY, seed=4)
    another = [piece.document for piece in document_stream(lengths, documents, other_seed, 1)]
    assert another != epochs[0]


def test_a_large_corpus_is_shuffled_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, documents = np.full(100, 5, dtype=np.int32), np.arange(100, dtype=np.int32)
    whole = list(document_stream(lengths, documents, GREEDY, 2))
    monkeypatch.setattr(dataset, "_AT_A_TIME", 7)
    assert list(document_stream(lengths, documents, GREEDY, 2)) == whole


# --- the same samples -----------------------------------------------------------------------------


@any_corpus
@given(
    lengths=corpora,
    packing=st.sampled_from(list(PLANS)),
    few=st.integers(1, 20),
    more=st.integers(0, 20),
)
def test_the_first_samples_do_not_depend_on_how_many_are_asked_for(
    lengths: list[int], packing: str, few: int, more: int
) -> None:
    first = samples_of(index_of(lengths, PLANS[packing], few))
    assert len(first) == few
    assert samples_of(index_of(lengths, PLANS[packing], few + more))[:few] == first


def test_samples_are_the_same_on_every_machine() -> None:
    found = samples_of(index_of([9, 40, 4, 7, 3], BALANCED, 4))
    assert found == GOLDEN


GOLDEN = [
    [(1, 0, 32)],
    [(1, 0, 32)],
    [(0, 0, 8), (1, 32, 7), (3, 0, 6), (2, 0, 3), (4, 0, 2)],
    [(0, 0, 8), (1, 32, 7), (3, 0, 6), (2, 0, 3), (4, 0, 2)],
]


def test_a_saved_index_reads_back(tmp_path: Path) -> None:
    index = index_of([9, 40, 4, 7], GREEDY, 5)
    assert PackIndex.load(tmp_path / "new", "x") is None
    index.save(tmp_path / "new", "x", GREEDY)
    found = PackIndex.load(tmp_path / "new", "x")
    assert found is not None
    assert samples_of(found) == samples_of(index)
    assert isinstance(found.pieces, np.memmap)
    assert found.pieces.dtype == np.int32
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "x-description.json",
        "x-ends.npy",
        "x-pieces.npy",
    ]


def test_half_an_index_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = index_of([9, 40], GREEDY, 5)
    index.save(tmp_path, "x", GREEDY)
    (tmp_path / "x-ends.npy").unlink()
    assert PackIndex.load(tmp_path, "x") is None
    index.save(tmp_path, "x", GREEDY)
    assert PackIndex.load(tmp_path, "x") is not None
    monkeypatch.setattr(dataset, "_FORMAT", 2)
    assert PackIndex.load(tmp_path, "x") is None


# --- figures and refusals -------------------------------------------------------------------------


def test_filling_and_full_samples_are_counted() -> None:
    index = index_of([17, 17, 17, 17], PackingPlan(PackLimits(32, 2)))
    assert index.filling(PackLimits(32, 2)) == 1.0
    assert index.part_with(2) == 1.0
    assert index_of([17] * 3, PackingPlan(PackLimits(32, 2))).part_with(2) == 0.5


def test_a_sample_that_fills_up_a_batch_has_no_documents() -> None:
    samples = PackedDocuments(Corpus([9]), index_of([9], GREEDY), LIMITS)
    assert samples[None]["padding_mask"].all()


def test_a_corpus_without_anything_to_read_is_refused() -> None:
    with pytest.raises(ValueError, match="none of the 3 documents .*; set data_path"):
        index_of([0, 1, 1], GREEDY, 10)


def test_an_unknown_packing_is_refused() -> None:
    packing: Any = "tight"
    with pytest.raises(ValueError, match="^sequence_packing='tight' .*; set 'greedy' or 'bal"):
        PackingPlan(LIMITS, packing)


# --- progress -------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["terminal", "log"])
def test_progress_is_shown_of_what_takes_long(
    where: Literal["terminal", "log"],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: where == "terminal")
    index_of([20] * 10, GREEDY, 8)
    assert not capsys.readouterr().err + caplog.text

    clock = itertools.count(0, 6)
    monkeypatch.setattr(dataset.time, "monotonic", lambda: float(next(clock)))
    index_of([20] * 10, GREEDY, 8)
    shown = capsys.readouterr().err
    if where == "terminal":
        assert "packing documents" in shown
    else:
        assert "packing documents: 2 of 8 samples" in caplog.text
        assert not shown
