# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Samples of a corpus: the ranks of a group together have each of its tokens once."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Optional

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from megatron.slipstream.context_parallel.documents import (
    FINGERPRINT_KEY,
    SIZE_KEY,
    GroupIndex,
    GroupPlan,
    SharedDocuments,
    group_plan,
    shared_sample,
)
from megatron.slipstream.context_parallel.limits import CostModel, RankLimits
from megatron.slipstream.context_parallel.scheduler import Share
from megatron.slipstream.packed_sequences.batch import (
    OFFSET_KEYS,
    for_context_parallel_rank,
    packed_sample,
    static_layout,
)

RANKS = RankLimits(num_ranks=4, tokens_per_rank=32, max_sequences=5)
MODEL = CostModel(linear=100, attention=1)
NUM_MICRO_BATCHES = 3


class Documents:
    """Documents of 1 to 150 tokens; all tokens of the corpus are distinct."""

    def __init__(self, num_documents: int = 60) -> None:
        pick = np.random.RandomState(4)
        lengths = pick.choice(
            [1, 2, 7, 20, 33, 60, 150], num_documents, p=[0.1, 0.2, 0.2, 0.2, 0.1, 0.1, 0.1]
        )
        self.sequence_lengths: NDArray[np.int32] = lengths.astype(np.int32)
        self.begins = 1 + np.concatenate([[0], np.cumsum(lengths)[:-1]])

    def get(self, idx: int, offset: int = 0, length: Optional[int] = None) -> NDArray[Any]:
        begin = self.begins[idx] + offset
        assert length is not None
        assert offset + length <= self.sequence_lengths[idx]
        return np.arange(begin, begin + length)


@pytest.fixture(scope="module")
def corpus() -> Documents:
    return Documents()


def plan_of(seed: int = 1) -> GroupPlan:
    return group_plan(RANKS, MODEL, NUM_MICRO_BATCHES, seed)


def index_of(corpus: Documents, num_slots: Optional[int], seed: int = 1) -> GroupIndex:
    every = np.arange(len(corpus.sequence_lengths))
    return GroupIndex.build(corpus.sequence_lengths, every, plan_of(seed), num_slots)


def samples_of_ranks(corpus: Documents, index: GroupIndex, context_parallel_size: int) -> Any:
    """The samples of each of the four ranks, as assigned by megatron's sampler."""
    data_parallel_size = RANKS.num_ranks // context_parallel_size
    result = []
    for rank in range(RANKS.num_ranks):
        data_rank, context_rank = divmod(rank, context_parallel_size)
        dataset = SharedDocuments(corpus, index, RANKS, None, context_parallel_size, context_rank)
        numbers = range(data_rank, len(dataset), data_parallel_size)
        result.append([dataset[number] for number in numbers])
    return result


@pytest.mark.parametrize("context_parallel_size", [1, 2])
def test_ranks_train_on_every_token_once(corpus: Documents, context_parallel_size: int) -> None:
    ranks = samples_of_ranks(corpus, index_of(corpus, None), context_parallel_size)
    pairs = [
        (int(token), int(label))
        for samples in ranks
        for sample in samples
        for token, label, counts in zip(
            sample["tokens"], sample["labels"], sample["loss_mask"], strict=True
        )
        if counts
    ]
    expected = [
        (int(begin) + token, int(begin) + token + 1)
        for begin, length in zip(corpus.begins, corpus.sequence_lengths, strict=True)
        for token in range(length - 1)
    ]
    assert sorted(pairs) == sorted(expected)


@pytest.mark.parametrize("context_parallel_size", [1, 2])
def test_ranks_of_a_group_have_one_micro_batch_between_them(
    corpus: Documents, context_parallel_size: int
) -> None:
    ranks = samples_of_ranks(corpus, index_of(corpus, None), context_parallel_size)
    sizes = set()
    for number in range(len(ranks[0])):
        micro_batch = [samples[number] for samples in ranks]
        rank = 0
        while rank < RANKS.num_ranks:
            size = int(micro_batch[rank][SIZE_KEY])
            sizes.add(size)
            group = micro_batch[rank : rank + size]
            for key in (SIZE_KEY, FINGERPRINT_KEY, *OFFSET_KEYS):
                assert all(torch.equal(sample[key], group[0][key]) for sample in group)
            assert int(group[0]["cu_seqlens_padded"][-1]) == size * RANKS.tokens_per_rank
            num_tokens = sum(int(sample["loss_mask"].sum()) for sample in group)
            assert num_tokens == int(group[0]["cu_seqlens"][-1])
            rank += size
        assert rank == RANKS.num_ranks
    assert sizes == {1, 2, 4}


def test_a_rank_has_its_part_of_every_sequence_and_positions_begin_again() -> None:
    limits = RANKS.of(2)
    texts = [np.arange(100, 109), np.arange(200, 203)]
    whole = {key: tensor.unsqueeze(0) for key, tensor in packed_sample(texts, limits).items()}
    for rank in range(2):
        sample = shared_sample(texts, Share(2, rank, []), limits)
        assert int(sample.pop(SIZE_KEY)) == 2
        del sample[FINGERPRINT_KEY]
        expected = for_context_parallel_rank(whole, 2, rank)
        assert sample.keys() == expected.keys()
        assert all(torch.equal(sample[key], expected[key][0]) for key in sample)
    assert sample["tokens"][:6].tolist() == [102, 103, 104, 105, 201, 0]
    assert sample["position_ids"][:5].tolist() == [2, 3, 4, 5, 1]


def test_other_documents_have_another_fingerprint() -> None:
    limits = RANKS.of(1)

    def fingerprint(*texts: list[int]) -> int:
        sample = shared_sample([np.array(text) for text in texts], Share(1, 0, []), limits)
        return int(sample[FINGERPRINT_KEY])

    assert fingerprint([1, 2, 3]) == fingerprint([1, 2, 3])
    assert len({fingerprint([1, 2, 3]), fingerprint([1, 4, 3]), fingerprint([1, 2], [2, 3])}) == 3


def test_shapes_do_not_depend_on_the_size(corpus: Documents) -> None:
    index = index_of(corpus, None)
    layout = static_layout(RANKS.of(1))
    dataset = SharedDocuments(corpus, index, RANKS)
    for number in [*range(len(dataset)), None]:
        sample = dataset[number]
        for key, of_type in ((SIZE_KEY, torch.int32), (FINGERPRINT_KEY, torch.int64)):
            one = sample.pop(key)
            assert one.dtype == of_type
            assert tuple(one.shape) == (1,)
        for key, (shape, dtype) in layout.items():
            assert (tuple(sample[key].shape), sample[key].dtype) == (shape[1:], dtype)
    assert int(dataset[None]["loss_mask"].sum()) == 0


def test_more_samples_begin_with_the_same_ones(corpus: Documents) -> None:
    few, many = index_of(corpus, 10), index_of(corpus, 100)
    assert len(few) == NUM_MICRO_BATCHES * RANKS.num_ranks
    assert len(many) == 108
    assert [few[slot] for slot in range(len(few))] == [many[slot] for slot in range(len(few))]
    other = index_of(corpus, 10, seed=2)
    assert [few[slot] for slot in range(12)] != [other[slot] for slot in range(12)]
    with pytest.raises(IndexError):
        few[len(few)]


def test_ranks_of_a_group_are_numbered_in_the_order_of_their_slots(corpus: Documents) -> None:
    index = index_of(corpus, None)
    slot = 0
    while slot < len(index):
        size = index[slot].size
        assert [index[slot + rank].rank for rank in range(size)] == list(range(size))
        slot += size


def test_an_index_is_read_as_it_was_written(corpus: Documents, tmp_path: Path) -> None:
    index = index_of(corpus, 50)
    assert GroupIndex.load(tmp_path, "train") is None
    index.save(tmp_path / "new", "train", plan_of())
    again = GroupIndex.load(tmp_path / "new", "train")
    assert [again[slot] for slot in range(len(index))] == [
        index[slot] for slot in range(len(index))
    ]
    assert not any(path.name.startswith(".") for path in (tmp_path / "new").iterdir())


def test_an_index_knows_how_full_it_is_and_which_sizes_it_has(corpus: Documents) -> None:
    index = index_of(corpus, None)
    num_tokens = int((corpus.sequence_lengths - 1).sum())
    assert index.filling(RANKS) == pytest.approx(num_tokens / (len(index) * 32))
    shares = [index[slot].size for slot in range(len(index))]
    for size in RANKS.sizes:
        assert index.part_with(size) == pytest.approx(shares.count(size) / len(shares))


def test_a_corpus_without_text_is_refused() -> None:
    lengths = np.array([1, 0, 1], dtype=np.int32)
    with pytest.raises(ValueError, match="^none of the 3 documents .*; set data_path"):
        GroupIndex.build(lengths, np.arange(3), plan_of(), 10)
