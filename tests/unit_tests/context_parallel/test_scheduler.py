# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Properties of schedules of any documents, and their distance from the optimum."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Optional
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp
from shared_documents import share_of

from megatron.slipstream.context_parallel import scheduler
from megatron.slipstream.context_parallel.limits import Cost, CostModel, RankLimits
from megatron.slipstream.context_parallel.scheduler import (
    MicroBatch,
    batches,
    total_cost,
)
from megatron.slipstream.packed_sequences.packing import Piece, attention_work

# The same cases in every run; no deadline, because the machine may be busy.
any_documents = settings(max_examples=150, deadline=None)

LAYER = CostModel.of_layer(num_weights=12 * 512**2, attention_width=512)
ATTENTION = CostModel(linear=1, attention=1)
"""Costs dominated by attention, so that load balancing matters most."""


@st.composite
def all_limits(draw: st.DrawFn) -> RankLimits:
    num_ranks = draw(st.sampled_from([1, 2, 4, 6, 8]))
    sizes = RankLimits(num_ranks, 2, 1).sizes
    small, large = sorted([draw(st.sampled_from(sizes)), draw(st.sampled_from(sizes))])
    tokens_per_rank = 2 * draw(st.integers(1, 32))
    return RankLimits(num_ranks, tokens_per_rank, draw(st.integers(1, 12)), small, large)


# Fractions of the largest group's capacity: mostly short, some as long as possible.
parts = st.lists(
    st.one_of(st.floats(0.001, 0.1), st.floats(0.001, 1.0), st.just(1.0)), min_size=1, max_size=60
)


def pieces_of(lengths: Iterable[int]) -> list[Piece]:
    return [Piece(document, 0, length) for document, length in enumerate(lengths)]


def documents_of(parts_of_largest: Iterable[float], limits: RankLimits) -> list[Piece]:
    most = limits.largest * limits.tokens_per_rank
    return pieces_of(max(1, int(part * most)) for part in parts_of_largest)


def all_pieces(micro_batches: Iterable[MicroBatch]) -> list[Piece]:
    return [piece for groups in micro_batches for group in groups for piece in group.pack]


def check_micro_batches(micro_batches: Iterable[MicroBatch], limits: RankLimits) -> None:
    for groups in micro_batches:
        first = 0
        for size, pack in groups:
            assert size in limits.sizes
            assert first % size == 0  # so these ranks are one of the process groups of their size
            held = limits.of(size)
            assert len(pack) <= held.max_sequences
            assert sum(held.footprint(piece.length) for piece in pack) <= held.max_tokens
            first += size
        assert first == limits.num_ranks


def schedule(
    pieces: Sequence[Piece],
    limits: RankLimits,
    model: CostModel,
    num_micro_batches: Optional[int] = None,
) -> list[MicroBatch]:
    """The batch that holds all pieces, of as few micro-batches as possible or of this number."""
    for count in itertools.count(1) if num_micro_batches is None else [num_micro_batches]:
        batch = next(batches(pieces, limits, model, count, len(pieces) + 1))
        if len(all_pieces(batch)) == len(pieces):
            return batch
    raise AssertionError(f"{num_micro_batches} micro-batches have too little room")


def lower_bound(
    model: CostModel, pieces: Iterable[Piece], limits: RankLimits, num_micro_batches: int
) -> int:
    """No schedule costs less: all ranks have equal attention, in groups of the smallest size."""
    fixed = num_micro_batches * model.per_rank(limits)(limits.sizes[0], 0)
    attention = model.attention * attention_work(pieces) * limits.largest
    return fixed + -(-attention // limits.num_ranks)


# --- every schedule -------------------------------------------------------------------------------


@any_documents
@given(parts, all_limits(), st.sampled_from([LAYER, ATTENTION]))
def test_every_document_is_in_one_group_and_groups_keep_their_limits(
    parts_of_largest: list[float], limits: RankLimits, model: CostModel
) -> None:
    pieces = documents_of(parts_of_largest, limits)
    micro_batches = schedule(pieces, limits, model)
    assert Counter(all_pieces(micro_batches)) == Counter(pieces)
    check_micro_batches(micro_batches, limits)


@any_documents
@given(parts, all_limits())
def test_ranks_of_a_group_agree_on_size_and_documents_and_share_them_out(
    parts_of_largest: list[float], limits: RankLimits
) -> None:
    for groups in schedule(documents_of(parts_of_largest, limits), limits, LAYER):
        shares = [share_of(groups, rank) for rank in range(limits.num_ranks)]
        for number, share in enumerate(shares):
            first = number - share.rank
            group = shares[first : first + share.size]
            assert [other.rank for other in group] == list(range(share.size))
            assert all((other.size, other.pack) == (share.size, share.pack) for other in group)
        with pytest.raises(IndexError):
            share_of(groups, limits.num_ranks)


@any_documents
@example(
    [1 / 16] * 11 + [3 / 32, 1.0],
    RankLimits(6, 12, max_sequences=1, max_size=2),
    CostModel(1, 1, 0),
    1,
)
@given(parts, all_limits(), st.sampled_from([LAYER, ATTENTION]), st.integers(1, 4))
def test_load_balancing_never_costs_more_than_groups_as_small_as_possible(
    parts_of_largest: list[float], limits: RankLimits, model: CostModel, more: int
) -> None:
    pieces = documents_of(parts_of_largest, limits)
    count = len(schedule(pieces, limits, model)) + more
    cost = model.per_rank(limits)
    # With room to spare, groups may be larger, and some pieces wait for the next batch.
    balanced = next(batches(pieces, limits, model, count, len(pieces) + 1))
    with mock.patch.object(scheduler, "LoadBalancing", _NoLoadBalancing):
        unbalanced = next(batches(pieces, limits, model, count, len(pieces) + 1))
    held = all_pieces(balanced)
    assert Counter(held) == Counter(all_pieces(unbalanced))
    needed = {limits.smallest_for(piece.length) for piece in pieces}
    assert {group.size for groups in unbalanced for group in groups if group.pack} <= needed
    as_collected = _most_level(unbalanced, cost)
    assert lower_bound(model, held, limits, count) <= total_cost(balanced, cost) <= as_collected


class _NoLoadBalancing:
    """Replaces :class:`LoadBalancing`; does not change the collected groups."""

    def __init__(self, groups: list[Any], *_: Any) -> None:
        self._groups = groups

    def run(self) -> list[Any]:
        return self._groups


def _most_level(micro_batches: Sequence[MicroBatch], cost: Cost) -> int:
    """Cost of the same groups if the most expensive ones run concurrently."""
    by_cost = sorted(
        (
            (cost(size, attention_work(pack)), size)
            for groups in micro_batches
            for size, pack in groups
        ),
        reverse=True,
    )
    num_ranks = sum(group.size for group in micro_batches[0])
    rooms = [num_ranks] * len(micro_batches)
    total = 0
    for work, size in by_cost:
        index = next(i for i, room in enumerate(rooms) if room >= size)
        total += work if rooms[index] == num_ranks else 0
        rooms[index] -= size
    return total


def test_a_document_gets_as_many_ranks_as_it_needs() -> None:
    limits = RankLimits(num_ranks=4, tokens_per_rank=100, max_sequences=8)
    (groups,) = schedule(pieces_of([200, 90, 80]), limits, CostModel(1, attention=1, exchange=200))
    assert [(group.size, [piece.length for piece in group.pack]) for group in groups] == [
        (2, [200]),
        (1, [90]),
        (1, [80]),
    ]


def test_a_document_that_would_cost_its_ranks_too_much_gets_more() -> None:
    # It fits into one rank's buffer, and fills it so that no other document adds to its cost.
    limits = RankLimits(num_ranks=4, tokens_per_rank=104, max_sequences=100)
    pieces = pieces_of([100, *[8] * 39])
    (groups,) = schedule(pieces, limits, ATTENTION)
    (of_the_long,) = (group for group in groups if pieces[0] in group.pack)
    assert of_the_long.size == 4
    # But not where communication costs more than that.
    (groups,) = schedule(pieces, limits, CostModel(linear=1, attention=1, exchange=100))
    (of_the_long,) = (group for group in groups if pieces[0] in group.pack)
    assert of_the_long.size == 1


def test_schedules_are_the_same_on_every_machine() -> None:
    limits = RankLimits(num_ranks=4, tokens_per_rank=16, max_sequences=4)
    stream = pieces_of([9, 30, 4, 7, 50, 3, 3, 12, 21, 16, 16])
    assert [
        [[(size, [piece.length for piece in pack]) for size, pack in groups] for groups in batch]
        for batch in batches(stream, limits, ATTENTION, 2)
    ] == [
        [[(4, [50])], [(2, [30]), (1, [9, 4, 3]), (1, [7, 3])]],
        [[(4, [21, 16])], [(2, [16]), (2, [12])]],
    ]


def test_ranks_take_turns_with_the_expensive_documents() -> None:
    limits = RankLimits(num_ranks=4, tokens_per_rank=16, max_sequences=1, max_size=2)
    micro_batches = schedule(pieces_of([32, 32, 9, 9, 9, 9]), limits, ATTENTION, 2)
    work = [0] * 4
    for groups in micro_batches:
        for rank in range(4):
            share = share_of(groups, rank)
            work[rank] += attention_work(share.pack) // share.size
    assert work == [32**2 // 2 + 9**2] * 4


# --- a stream of batches --------------------------------------------------------------------------


@any_documents
@given(parts, all_limits(), st.integers(1, 4), st.integers(1, 10))
def test_batches_hold_every_document_once_and_the_oldest_is_never_put_off(
    parts_of_largest: list[float], limits: RankLimits, num_micro_batches: int, look_ahead: int
) -> None:
    pieces = documents_of(parts_of_largest, limits)
    left = list(pieces)
    for batch in batches(list(pieces), limits, LAYER, num_micro_batches, look_ahead):
        assert len(batch) == num_micro_batches
        check_micro_batches(batch, limits)
        taken = all_pieces(batch)
        assert left[0] in taken
        # And no piece overtakes more pieces than may wait.
        last = max(left.index(piece) for piece in taken)
        assert last + 1 - len(taken) < look_ahead
        left = [piece for piece in left if piece not in taken]
    assert left == []


def test_a_batch_takes_no_more_of_an_endless_stream_than_it_looks_at() -> None:
    taken = itertools.count()
    limits = RankLimits(num_ranks=2, tokens_per_rank=20, max_sequences=2)
    stream = (Piece(next(taken), 0, 10) for _ in itertools.repeat(None))
    first = next(batches(stream, limits, LAYER, 2, look_ahead=5))
    assert sorted(piece.document for piece in all_pieces(first)) == list(range(8))
    assert next(taken) <= 8 + 5


def test_larger_groups_are_taken_where_the_smallest_would_stay_empty() -> None:
    # Each document fills seven tenths of the smallest group that holds it.
    limits = RankLimits(num_ranks=16, tokens_per_rank=256, max_sequences=64)
    stream = pieces_of([720] * 100)
    batch = next(batches(stream, limits, LAYER, num_micro_batches=4))
    num_tokens = sum(piece.length for piece in all_pieces(batch))
    assert num_tokens > 0.85 * 4 * 16 * 256


# --- distance from the optimum --------------------------------------------------------------------


def corpus(num_ranks: int, tokens_per_rank: int, seed: int) -> list[int]:
    """Lengths of documents: half are short, and a few fill every rank."""
    pick = random.Random(seed)
    most = num_ranks * tokens_per_rank
    return [max(1, min(most, int(pick.lognormvariate(6.5, 1.6)))) for _ in range(20_000)]


@pytest.mark.parametrize("num_ranks, tokens_per_rank, most", [(8, 8192, 1.06), (16, 4096, 1.12)])
def test_costs_are_near_their_lower_bound_and_buffers_are_full(
    num_ranks: int, tokens_per_rank: int, most: float
) -> None:
    limits = RankLimits(num_ranks, tokens_per_rank, tokens_per_rank // 16)
    # A layer as wide as those of models of 8 billion weights.
    model = CostModel.of_layer(num_weights=218_000_000, attention_width=4096)
    cost = model.per_rank(limits)
    stream = pieces_of(corpus(num_ranks, tokens_per_rank, seed=3))
    for batch in itertools.islice(batches(stream, limits, model, 4), 4):
        pieces = all_pieces(batch)
        assert total_cost(batch, cost) <= most * lower_bound(model, pieces, limits, 4)
        num_tokens = sum(piece.length for piece in pieces)
        assert num_tokens > 0.99 * 4 * num_ranks * tokens_per_rank


def best_cost(
    pieces: Sequence[Piece], limits: RankLimits, model: CostModel, num_micro_batches: int
) -> float:
    """The minimal cost of any schedule, by integer programming; infinite if there is none.

    For each micro-batch and each possible group of ranks: whether it is a group, and which
    pieces it has.
    """
    blocks = [(size, first) for size in limits.sizes for first in range(0, limits.num_ranks, size)]
    places = list(itertools.product(range(num_micro_batches), blocks))
    num_pieces, num_places = len(pieces), len(places)
    num_variables = num_places * (1 + num_pieces) + num_micro_batches
    cost = model.per_rank(limits)
    rows: list[tuple[dict[int, float], float, float]] = []

    def holds(piece: int, place: int) -> int:
        return num_places * (1 + piece) + place

    def highest(micro_batch: int) -> int:
        return num_places * (1 + num_pieces) + micro_batch

    for micro_batch, rank in itertools.product(range(num_micro_batches), range(limits.num_ranks)):
        mine = {
            index: 1.0
            for index, (where, (size, first)) in enumerate(places)
            if where == micro_batch and first <= rank < first + size
        }
        rows.append((mine, 1, 1))
    for piece in range(num_pieces):
        rows.append(({holds(piece, place): 1.0 for place in range(num_places)}, 1, 1))
    scale = cost(1, 0) if 1 in limits.sizes else cost(limits.sizes[0], 0)
    for index, (micro_batch, (size, _)) in enumerate(places):
        held = limits.of(size)
        tokens = {holds(n, index): held.footprint(p.length) for n, p in enumerate(pieces)}
        rows.append((tokens | {index: -held.max_tokens}, -np.inf, 0))
        counts = {holds(n, index): 1.0 for n in range(num_pieces)}
        rows.append((counts | {index: -held.max_sequences}, -np.inf, 0))
        empty = cost(size, 0)
        work = {
            holds(n, index): (cost(size, p.length**2) - empty) / scale for n, p in enumerate(pieces)
        }
        rows.append((work | {index: empty / scale, highest(micro_batch): -1.0}, -np.inf, 0))
    matrix = np.zeros((len(rows), num_variables))
    for number, (entries, _, _) in enumerate(rows):
        for column, value in entries.items():
            matrix[number, column] = value
    result = milp(
        c=np.r_[np.zeros(num_variables - num_micro_batches), np.ones(num_micro_batches)],
        constraints=LinearConstraint(matrix, [r[1] for r in rows], [r[2] for r in rows]),
        integrality=np.r_[np.ones(num_variables - num_micro_batches), np.zeros(num_micro_batches)],
        bounds=Bounds(
            0, np.r_[np.ones(num_variables - num_micro_batches), np.full(num_micro_batches, np.inf)]
        ),
    )
    return float("inf") if result.x is None else float(result.fun) * scale


@pytest.mark.parametrize(
    "num_ranks, tokens_per_rank, model, lengths",
    [
        (4, 64, ATTENTION, [6, 29, 33, 96, 10, 25, 9]),
        (4, 32, ATTENTION, [29, 74, 4, 128, 36, 8]),
        (2, 64, LAYER, [46, 30, 10, 9, 23, 128]),
        (4, 32, CostModel(linear=20, attention=1, exchange=1), [9, 47, 51, 67]),
        (2, 32, CostModel(linear=20, attention=1, exchange=1), [12, 21, 30, 28, 4, 6]),
    ],
)
def test_small_batches_cost_little_more_than_the_best_schedule(
    num_ranks: int, tokens_per_rank: int, model: CostModel, lengths: list[int]
) -> None:
    limits = RankLimits(num_ranks, tokens_per_rank, max_sequences=4)
    pieces = pieces_of(lengths)
    micro_batches = schedule(pieces, limits, model)
    best = best_cost(pieces, limits, model, len(micro_batches))
    assert best <= 1.000001 * total_cost(micro_batches, model.per_rank(limits)) <= 1.15 * best
