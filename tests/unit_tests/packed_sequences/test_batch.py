# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A micro-batch of packed sequences has static shapes, and its padding is marked."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from megatron.slipstream.packed_sequences.batch import (
    OFFSET_KEYS,
    SEQUENCE_KEYS,
    context_parallel_positions,
    for_context_parallel_rank,
    packed_sample,
    static_layout,
)
from megatron.slipstream.packed_sequences.packing import PackLimits

any_pack = settings(max_examples=100, deadline=None)

LIMITS = PackLimits(max_tokens=16, max_sequences=4)


def texts_of(*lengths: int) -> list[np.ndarray]:
    """Documents with these numbers of readable tokens; all tokens are distinct."""
    begin, texts = 100, []
    for length in lengths:
        texts.append(np.arange(begin, begin + length + 1, dtype=np.uint16))
        begin += 100
    return texts


@st.composite
def packs(draw: st.DrawFn) -> tuple[list[int], PackLimits]:
    alignment = draw(st.sampled_from([1, 4]))
    limits = PackLimits(alignment * draw(st.integers(1, 20)), draw(st.integers(1, 6)), alignment)
    room, lengths = limits.max_tokens, []
    while room and len(lengths) < limits.max_sequences and draw(st.booleans()):
        lengths.append(draw(st.integers(1, room)))
        room -= limits.footprint(lengths[-1])
    return lengths, limits


# --- static ---------------------------------------------------------------------------------------


@any_pack
@given(packs())
def test_shapes_and_types_do_not_depend_on_the_documents(
    pack: tuple[list[int], PackLimits],
) -> None:
    lengths, limits = pack
    sample = packed_sample(texts_of(*lengths), limits)
    layout = static_layout(limits)
    assert set(sample) == set(layout)
    for key, (shape, dtype) in layout.items():
        assert (1, *sample[key].shape) == shape, key
        assert sample[key].dtype is dtype, key
        assert sample[key].is_contiguous()


@any_pack
@given(packs())
def test_offsets_say_where_every_sequence_is_and_cover_the_buffer(
    pack: tuple[list[int], PackLimits],
) -> None:
    lengths, limits = pack
    texts = texts_of(*lengths)
    sample = packed_sample(texts, limits)
    actual, padded = sample["cu_seqlens"], sample["cu_seqlens_padded"]
    assert actual.data_ptr() != padded.data_ptr()
    rest = limits.max_sequences - len(lengths)
    assert actual.diff().tolist() == lengths + [0] * rest
    assert padded[0] == 0
    assert padded[-1] == limits.max_tokens
    assert bool((padded.diff() >= actual.diff()).all())
    in_documents = torch.zeros(limits.max_tokens, dtype=torch.bool)
    for text, begin, length in zip(texts, padded.tolist(), lengths, strict=False):
        here = slice(begin, begin + length)
        in_documents[here] = True
        assert sample["tokens"][here].tolist() == text[:-1].tolist()
        assert sample["labels"][here].tolist() == text[1:].tolist()
        assert sample["position_ids"][here].tolist() == list(range(length))
    assert torch.equal(sample["padding_mask"], ~in_documents)
    assert torch.equal(sample["loss_mask"], in_documents.float())
    for key in ("tokens", "labels", "position_ids"):
        assert not sample[key][~in_documents].any()


def test_the_rest_of_the_buffer_is_a_sequence_of_no_tokens() -> None:
    sample = packed_sample(texts_of(5, 4), LIMITS)
    assert sample["cu_seqlens"].tolist() == [0, 5, 9, 9, 9]
    assert sample["cu_seqlens_padded"].tolist() == [0, 5, 9, 16, 16]


def test_without_a_place_for_one_more_sequence_the_last_is_followed_by_padding() -> None:
    sample = packed_sample(texts_of(5, 4, 3, 2), LIMITS)
    assert sample["cu_seqlens"].tolist() == [0, 5, 9, 12, 14]
    assert sample["cu_seqlens_padded"].tolist() == [0, 5, 9, 12, 16]


def test_a_full_pack_has_no_padding() -> None:
    sample = packed_sample(texts_of(10, 6), LIMITS)
    assert (
        sample["cu_seqlens"].tolist() == sample["cu_seqlens_padded"].tolist() == [0, 10, *[16] * 3]
    )
    assert not sample["padding_mask"].any()


def test_a_micro_batch_without_documents_is_all_padding() -> None:
    sample = packed_sample([], LIMITS)
    assert sample["cu_seqlens"].tolist() == [0] * 5
    assert sample["cu_seqlens_padded"].tolist() == [0, 16, 16, 16, 16]
    assert sample["padding_mask"].all()
    assert not sample["loss_mask"].any()


def test_labels_after_the_masked_token_do_not_count_but_are_no_padding() -> None:
    sample = packed_sample(texts_of(5, 4), LIMITS, masked_token=102)
    assert sample["loss_mask"].tolist() == [1, 1, 0, 1, 1, *[1] * 4, *[0] * 7]
    assert sample["padding_mask"].tolist() == [False] * 9 + [True] * 7
    # Padding is token 0, which may be the masked one.
    assert packed_sample(texts_of(5), LIMITS, masked_token=0)["loss_mask"].sum() == 5


@pytest.mark.parametrize("lengths", [(10, 7), (1, 1, 1, 1, 1)])
def test_more_than_the_limits_allow_is_refused(lengths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="exceed a pack's limits .*; pack with the same limits"):
        packed_sample(texts_of(*lengths), LIMITS)


# --- context parallelism --------------------------------------------------------------------------


@any_pack
@given(packs(), st.sampled_from([1, 2]))
def test_ranks_divide_every_sequence_into_equal_work(
    pack: tuple[list[int], PackLimits], context_parallel_size: int
) -> None:
    lengths, unaligned = pack
    num_parts = 2 * context_parallel_size
    limits = PackLimits(4 * unaligned.max_tokens, unaligned.max_sequences, 4)
    padded = packed_sample(texts_of(*lengths), limits)["cu_seqlens_padded"]
    owned = [
        context_parallel_positions(padded, context_parallel_size, rank).tolist()
        for rank in range(context_parallel_size)
    ]
    assert sorted(sum(owned, [])) == list(range(limits.max_tokens))
    for begin, end in zip(padded[:-1].tolist(), padded[1:].tolist(), strict=True):
        part = (end - begin) // num_parts
        for rank in range(context_parallel_size):
            mine = [position - begin for position in owned[rank] if begin <= position < end]
            first = range(rank * part, (rank + 1) * part)
            last = range((num_parts - 1 - rank) * part, (num_parts - rank) * part)
            assert mine == [*first, *last]


def test_a_rank_gets_its_tokens_and_all_offsets() -> None:
    limits = PackLimits(16, 4, alignment=4)
    whole = {
        key: tensor.unsqueeze(0) for key, tensor in packed_sample(texts_of(8, 3), limits).items()
    }
    parts = [for_context_parallel_rank(whole, 2, rank) for rank in range(2)]
    assert parts[0]["tokens"].tolist() == [[100, 101, 106, 107, 200, 0, 0, 0]]
    assert parts[1]["tokens"].tolist() == [[102, 103, 104, 105, 201, 202, 0, 0]]
    layout = static_layout(limits, context_parallel_size=2)
    for part in parts:
        for key in OFFSET_KEYS:
            assert torch.equal(part[key], whole[key])
        for key in SEQUENCE_KEYS:
            assert tuple(part[key].shape) == layout[key][0]
    assert set(for_context_parallel_rank(whole, 1, 0)) == set(whole)


def test_sequences_that_ranks_cannot_divide_are_refused() -> None:
    padded = packed_sample(texts_of(5, 4), LIMITS)["cu_seqlens_padded"]
    with pytest.raises(ValueError, match="^context_parallel_size=2 .*; set an alignment of 4"):
        context_parallel_positions(padded, 2, 0)
