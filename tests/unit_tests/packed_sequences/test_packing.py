# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Properties of packs of any documents: none lost, no pack too full, and known order."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings, strategies as st

from megatron.slipstream.packed_sequences.packing import (
    Pack,
    PackLimits,
    Piece,
    attention_work,
    balanced,
    greedy,
    split,
)

# The same cases in every run; no deadline, because the machine may be busy.
any_stream = settings(max_examples=150, deadline=None)


@st.composite
def all_limits(draw: st.DrawFn) -> PackLimits:
    alignment = draw(st.sampled_from([1, 1, 4]))
    max_tokens = alignment * draw(st.integers(1, 100))
    return PackLimits(max_tokens, draw(st.integers(1, 12)), alignment)


# Mostly short documents, some much longer than any pack.
lengths_of_documents = st.lists(
    st.one_of(st.integers(0, 30), st.integers(0, 120), st.integers(0, 1000)), max_size=120
)
batch_sizes = st.integers(1, 9)
numbers_of_ranks = st.integers(1, 4)
look_aheads = st.integers(1, 10)


def stream_of(lengths: Iterable[int], limits: PackLimits) -> list[Piece]:
    return [
        piece
        for document, length in enumerate(lengths)
        for piece in split(document, length, limits.max_tokens)
    ]


def tokens_of(pieces: Iterable[Piece]) -> Counter[tuple[int, int]]:
    return Counter(
        (piece.document, token)
        for piece in pieces
        for token in range(piece.offset, piece.offset + piece.length)
    )


def batches(packs: Iterable[Pack], size: int) -> list[list[Pack]]:
    stream = iter(packs)
    return list(iter(lambda: list(itertools.islice(stream, size)), []))


def check_limits(packs: Iterable[Pack], limits: PackLimits) -> None:
    for pack in packs:
        assert 0 < len(pack) <= limits.max_sequences
        assert sum(limits.footprint(piece.length) for piece in pack) <= limits.max_tokens


# --- pieces ---------------------------------------------------------------------------------------


@any_stream
@given(length=st.integers(0, 1000), max_tokens=st.integers(1, 100))
def test_a_document_is_cut_into_pieces_that_fill_a_pack_and_the_rest(
    length: int, max_tokens: int
) -> None:
    pieces = split(3, length, max_tokens)
    assert tokens_of(pieces) == Counter((3, token) for token in range(length))
    assert all(piece.length == max_tokens for piece in pieces[:-1])
    assert all(0 < piece.length <= max_tokens for piece in pieces)


# --- both packers ---------------------------------------------------------------------------------


@any_stream
@given(lengths_of_documents, all_limits(), look_aheads, batch_sizes, numbers_of_ranks)
def test_every_token_is_in_one_pack_and_packs_keep_their_limits(
    lengths: list[int], limits: PackLimits, look_ahead: int, batch_size: int, num_ranks: int
) -> None:
    stream = stream_of(lengths, limits)
    every_token = Counter((n, token) for n, size in enumerate(lengths) for token in range(size))
    for packs in (
        list(greedy(stream, limits, look_ahead)),
        list(balanced(stream, limits, batch_size, num_ranks, look_ahead)),
    ):
        assert tokens_of(itertools.chain(*packs)) == every_token
        check_limits(packs, limits)


# --- greedy ---------------------------------------------------------------------------------------


@any_stream
@given(lengths_of_documents, all_limits(), look_aheads)
def test_greedy_packs_the_oldest_piece_first_and_none_from_beyond_its_look_ahead(
    lengths: list[int], limits: PackLimits, look_ahead: int
) -> None:
    left = stream_of(lengths, limits)
    for pack in greedy(list(left), limits, look_ahead):
        assert pack[0] == left[0]
        assert pack == sorted(pack)  # pieces are numbered in the order of the stream
        for piece in pack:
            assert left.index(piece) < look_ahead
            left.remove(piece)


@any_stream
@given(lengths_of_documents, all_limits(), look_aheads)
def test_greedy_closes_a_pack_only_when_none_of_the_next_pieces_fits(
    lengths: list[int], limits: PackLimits, look_ahead: int
) -> None:
    left = stream_of(lengths, limits)
    for pack in greedy(list(left), limits, look_ahead):
        left = [piece for piece in left if piece not in pack]
        room = limits.max_tokens - sum(limits.footprint(piece.length) for piece in pack)
        if len(pack) < limits.max_sequences:
            assert all(limits.footprint(piece.length) > room for piece in left[:look_ahead])


def test_greedy_takes_no_more_of_an_endless_stream_than_it_looks_at() -> None:
    taken = itertools.count()
    stream = (Piece(next(taken), 0, 10) for _ in itertools.repeat(None))
    packs = greedy(stream, PackLimits(40, 9), look_ahead=5)
    assert [[piece.document for piece in next(packs)] for _ in range(2)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]
    assert next(taken) == 8 + 5


# --- balanced -------------------------------------------------------------------------------------


@any_stream
@given(lengths_of_documents, all_limits(), look_aheads, batch_sizes, numbers_of_ranks)
def test_a_balanced_batch_holds_what_greedy_puts_in_and_never_costs_more(
    lengths: list[int], limits: PackLimits, look_ahead: int, batch_size: int, num_ranks: int
) -> None:
    stream = stream_of(lengths, limits)
    plain = batches(greedy(stream, limits, look_ahead), batch_size)
    level = batches(balanced(stream, limits, batch_size, num_ranks, look_ahead), batch_size)
    assert len(level) == len(plain)
    for before, after in zip(plain, level, strict=True):
        assert len(after) == len(before)
        assert sorted(itertools.chain(*after)) == sorted(itertools.chain(*before))
        # The factor by which it may be worse than greedy is 1.
        assert max(map(attention_work, after)) <= max(map(attention_work, before))


@any_stream
@given(lengths_of_documents, all_limits(), batch_sizes, numbers_of_ranks)
def test_ranks_side_by_side_get_packs_of_neighbouring_cost(
    lengths: list[int], limits: PackLimits, batch_size: int, num_ranks: int
) -> None:
    for batch in batches(
        balanced(stream_of(lengths, limits), limits, batch_size, num_ranks), batch_size
    ):
        turns = [
            [attention_work(pack) for pack in turn] for turn in itertools.batched(batch, num_ranks)
        ]
        for turn, later in itertools.pairwise(turns):
            assert min(turn) >= max(later)


def imbalance(costs: Sequence[int]) -> float:
    return max(costs) / (sum(costs) / len(costs))


@pytest.mark.parametrize("max_sequences", [40, 4096])
def test_balanced_packs_of_common_documents_cost_nearly_the_same(max_sequences: int) -> None:
    pick = random.Random(0)
    limits = PackLimits(8192, max_sequences)
    stream = stream_of((pick.randrange(1, 2048) for _ in range(3000)), limits)
    worst = [0.0, 0.0]
    for which, packs in enumerate((greedy(stream, limits), balanced(stream, limits, 64, 4))):
        for batch in batches(packs, 64)[:-1]:
            worst[which] = max(worst[which], imbalance([attention_work(pack) for pack in batch]))
    assert worst[0] > 1.25
    assert worst[1] < 1.06


def test_what_no_pack_can_level_the_ranks_share() -> None:
    # Every twentieth document fills a whole pack, and costs several times the mean.
    pick = random.Random(1)
    limits = PackLimits(4096, 512)
    lengths = [4096 if pick.random() < 0.05 else pick.randrange(20, 300) for _ in range(6000)]
    stream = stream_of(lengths, limits)
    plain, level = (
        [
            imbalance([sum(map(attention_work, batch[rank::4])) for rank in range(4)])
            for batch in batches(packs, 64)[:-1]
        ]
        for packs in (greedy(stream, limits), balanced(stream, limits, 64, 4))
    )
    assert max(plain) > 1.25
    assert max(level) < 1.1


@pytest.mark.parametrize(
    "lengths, limits, batch_size, costs",
    [
        # Longest first, and the rest where it fits, gives 5 3 2 and 4 3 2: cost 38 and 29.
        ([3, 2, 4, 3, 5, 2], PackLimits(10, 9), 2, [34, 33]),
        # A pack that is too full for the next piece may be the cheapest for one after it.
        ([1, 7, 4, 6, 3, 4, 6, 2], PackLimits(10, 3), 3, [49, 46, 36, 36]),
        # A pack with room for the last piece has as many pieces as it may.
        ([3, 5, 2, 6, 1, 1, 3, 1], PackLimits(11, 4), 2, [47, 39]),
    ],
)
def test_packs_that_are_nearly_full_are_balanced(
    lengths: list[int], limits: PackLimits, batch_size: int, costs: list[int]
) -> None:
    packs = list(balanced(stream_of(lengths, limits), limits, batch_size))
    assert [attention_work(pack) for pack in packs] == costs
    check_limits(packs, limits)


@any_stream
@given(st.lists(st.integers(1, 12), max_size=40), st.integers(2, 9), st.integers(2, 3))
def test_balancing_packs_that_are_nearly_full_keeps_their_limits(
    lengths: list[int], max_sequences: int, batch_size: int
) -> None:
    limits = PackLimits(12, max_sequences)
    stream = stream_of(lengths, limits)
    packs = list(balanced(stream, limits, batch_size))
    assert sorted(itertools.chain(*packs)) == stream
    check_limits(packs, limits)


def test_packs_are_the_same_on_every_machine() -> None:
    limits = PackLimits(32, 4)
    stream = stream_of([9, 30, 4, 7, 50, 3, 3, 12, 21], limits)
    assert [[tuple(piece) for piece in pack] for pack in balanced(stream, limits, 4, 2)] == GOLDEN


GOLDEN = [
    [(4, 0, 32)],
    [(1, 0, 30)],
    [(0, 0, 9), (3, 0, 7), (2, 0, 4), (5, 0, 3)],
    [(4, 32, 18), (6, 0, 3)],
    [(8, 0, 21)],
    [(7, 0, 12)],
]


# --- refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, option",
    [((0, 1), "seq_length"), ((10, 0), "thd_max_packed_sequences"), ((10, 1, 4), "seq_length")],
)
def test_limits_that_hold_nothing_are_refused(arguments: tuple[int, ...], option: str) -> None:
    with pytest.raises(ValueError, match=f"^{option}.*; set"):
        PackLimits(*arguments)
