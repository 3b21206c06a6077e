# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""From documents to micro-batches: which ranks compute which documents, and in how large groups.

[Note: Groups of different sizes side by side]

A micro-batch divides all data- and context-parallel ranks into groups of consecutive ranks. Each
group has a size of its own, a power of two, and one pack of documents that its ranks divide among
them. So while four ranks share a long document, the others each have short ones, and a long
document costs no short one any exchange. One size for all ranks would be simpler, but then a single
long document puts every other document of the micro-batch into groups as large as its own.

That needs no barrier. A rank runs its micro-batches in their order, and in each of them it waits
for its own group only; so the group of the earliest unfinished micro-batch has no one to wait for.
All ranks have the same number of micro-batches and buffers of the same size, so megatron's own
schedules run them, with any number of pipeline stages: a stage's ranks are grouped as those of the
stage before. (megatron-core 0.19's hybrid context parallelism also mixes sizes, but its ranks have
different numbers of micro-batches of different sizes. So it needs a schedule of its own with
barriers, and no pipeline.)

A schedule is made in three steps, with integers only, so every rank and every machine gets the same
one. Pieces are collected into groups of the smallest sizes that hold them, or of larger ones if
those would stay too empty. Then costs are balanced: expensive groups exchange pieces with cheap
ones, or become twice as large. At last the groups are dealt to micro-batches such that those side
by side cost about the same.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Optional

from megatron.slipstream.context_parallel.limits import Cost, CostModel, RankLimits
from megatron.slipstream.context_parallel.load_balancing import LoadBalancing, OpenGroup
from megatron.slipstream.packed_sequences.packing import (
    LOOK_AHEAD,
    Pack,
    PackLimits,
    Piece,
    attention_work,
)

_ONE_FREE_OF = 256
"""One token of so many stays free where there is a choice. A larger group needs a little more room
for the same pieces, and without any none could become larger."""

_WELL_FILLED = 32
"""A batch that has no more than one free token of so many is not tried with larger groups."""


class Group(NamedTuple):
    """Consecutive ranks of one micro-batch, and the pieces that they divide among them."""

    size: int
    """How many ranks: the context-parallel size of this micro-batch to them."""
    pack: Pack
    """The pieces in the order of the buffer; none is a buffer of padding."""


MicroBatch = tuple[Group, ...]
"""The groups in the order of their ranks. Their sizes add up to the number of ranks."""


class Share(NamedTuple):
    """One rank's part of a micro-batch."""

    size: int
    """Ranks of its group."""
    rank: int
    """Its own place among them, from 0."""
    pack: Pack
    """The pieces of the group, of which it computes its part."""


def share_of(micro_batch: MicroBatch, rank: int) -> Share:
    """The part of a micro-batch of a rank, counted among all data- and context-parallel ranks."""
    first = 0
    for size, pack in micro_batch:
        if rank < first + size:
            return Share(size, rank - first, pack)
        first += size
    raise IndexError(f"there are {first} ranks and none is number {rank}")


def schedule(
    pieces: Iterable[Piece],
    limits: RankLimits,
    cost_model: CostModel,
    num_micro_batches: Optional[int] = None,
) -> list[MicroBatch]:
    """Micro-batches that hold each of the pieces once.

    Args:
        pieces: Those of one global batch, none longer than the largest group holds.
        limits: Of each micro-batch.
        cost_model: By which groups are balanced.
        num_micro_batches: How many; None is the smallest number for which all find room.

    Raises:
        ValueError: They find no room in so many.
    """
    longest_first = sorted(pieces, key=lambda piece: -piece.length)
    # Each piece in a micro-batch of its own has room for certain.
    counts = range(_fewest(longest_first, limits), max(1, len(longest_first)) + 1)
    if num_micro_batches is not None:
        counts = range(num_micro_batches, num_micro_batches + 1)
    for count in counts:
        stream = _Stream(longest_first)
        look_ahead = len(longest_first) + 1
        for floor in limits.sizes:
            collected = _collect(stream, limits, count, look_ahead, free=0, floor=floor)
            if len(collected.taken) == len(longest_first):
                return _finished(collected.groups, limits, cost_model, count)
    raise ValueError(
        f"num_micro_batches={num_micro_batches} of {limits.num_ranks} ranks with "
        f"{limits.tokens_per_rank} tokens each have no room for these {len(longest_first)} "
        "sequences; set more, or a larger thd_max_tokens or thd_max_packed_sequences"
    )


def batches(
    pieces: Iterable[Piece],
    limits: RankLimits,
    cost_model: CostModel,
    num_micro_batches: int,
    look_ahead: int = LOOK_AHEAD,
) -> Iterator[list[MicroBatch]]:
    """Yield the micro-batches of one global batch after the other.

    Each takes the oldest pieces of the stream that are left and find room. What finds none waits at
    the head of the stream, so the oldest piece is always in the next batch.

    Args:
        pieces: The stream, none longer than the largest group holds. It may be endless.
        limits: Of each micro-batch.
        cost_model: By which groups are balanced.
        num_micro_batches: Of every batch.
        look_ahead: A batch is complete when so many pieces have found no room.
    """
    stream = _Stream(pieces)
    room = limits.num_ranks * limits.tokens_per_rank * num_micro_batches
    cost = cost_model.per_rank(limits)
    while True:
        best: Optional[_Collected] = None
        for floor in limits.sizes:
            found = _collect(
                stream, limits, num_micro_batches, look_ahead, room // _ONE_FREE_OF, floor
            )
            if not found.taken:
                return
            if best is None or _costs_less(found, best, cost):
                best = found
            if found.num_tokens >= room - room // _WELL_FILLED:
                break
        assert best is not None
        stream.remove(best.taken)
        yield _finished(best.groups, limits, cost_model, num_micro_batches)


def total_cost(micro_batches: Sequence[MicroBatch], cost: Cost) -> int:
    """The sum of what each micro-batch costs its most expensive ranks.

    With experts divided among the ranks, or with pipeline stages, that is what a batch takes;
    otherwise cheap ranks run ahead, and it takes less.
    """
    return sum(
        max(cost(size, attention_work(pack)) for size, pack in groups) for groups in micro_batches
    )


# Collecting


def _fewest(pieces: Sequence[Piece], limits: RankLimits) -> int:
    """Fewer micro-batches have no room for the pieces, or for their tokens."""
    num_tokens = sum(piece.length for piece in pieces)
    num_groups = limits.num_ranks // limits.sizes[0]
    by_tokens = -(-num_tokens // (limits.num_ranks * limits.tokens_per_rank))
    by_number = -(-len(pieces) // (num_groups * limits.max_sequences))
    return max(1, by_tokens, by_number)


def _costs_less(one: _Collected, other: _Collected, cost: Cost) -> bool:
    """Per token that it trains on."""
    return one.total_cost(cost) * other.num_tokens < other.total_cost(cost) * one.num_tokens


class _Stream:
    """Pieces that may be looked at before they are taken."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._rest = iter(pieces)
        self._seen: list[Piece] = []

    def __iter__(self) -> Iterator[tuple[int, Piece]]:
        """From the oldest that is left, with their numbers."""
        for number in itertools.count():
            if number == len(self._seen):
                piece = next(self._rest, None)
                if piece is None:
                    return
                self._seen.append(piece)
            yield number, self._seen[number]

    def remove(self, numbers: set[int]) -> None:
        """Take some; the others get new numbers."""
        self._seen = [piece for number, piece in enumerate(self._seen) if number not in numbers]


class _Collected(NamedTuple):
    groups: list[OpenGroup]
    taken: set[int]
    """Numbers in the stream."""
    num_tokens: int
    num_free: int
    """Buffers of padding that are left."""

    def total_cost(self, cost: Cost) -> int:
        """Of all ranks together, the padding included."""
        busy = sum(group.size * cost(group.size, group.work) for group in self.groups)
        return busy + self.num_free * cost(1, 0)


def _collect(
    stream: _Stream,
    limits: RankLimits,
    num_micro_batches: int,
    look_ahead: int,
    free: int,
    floor: int,
) -> _Collected:
    """Groups of the smallest sizes that hold the next pieces; each piece goes where it fits best.

    Args:
        stream: It stays as it is.
        limits: Of each micro-batch.
        num_micro_batches: How many there are.
        look_ahead: Return as soon as so many pieces found no room.
        free: Return as soon as no more tokens than this are left.
        floor: No group is smaller. Larger ones leave less room for which nothing is small enough.
    """
    of_size = {size: limits.of(size) for size in limits.sizes if size >= floor}
    open_by_room: dict[int, list[tuple[int, int]]] = {size: [] for size in of_size}
    groups: list[OpenGroup] = []
    taken: set[int] = set()
    num_waiting = num_tokens = 0
    num_free = num_micro_batches * limits.num_ranks
    enough = num_free * limits.tokens_per_rank - free
    for number, piece in stream:
        smallest = max(floor, limits.smallest_for(piece.length))
        found = _best_fit(open_by_room, of_size, smallest, piece.length)
        if found is not None:
            index = open_by_room[found[0]].pop(found[1])[1]
        elif smallest <= num_free:
            num_free -= smallest
            index = len(groups)
            groups.append(OpenGroup(smallest, of_size[smallest]))
        else:
            num_waiting += 1
            if num_waiting == look_ahead:
                break
            continue
        group = groups[index]
        group.add(piece)
        taken.add(number)
        num_tokens += piece.length
        if not group.is_full:
            bisect.insort(open_by_room[group.size], (group.room, index))
        if num_tokens >= enough:
            break
    return _Collected(groups, taken, num_tokens, num_free)


def _best_fit(
    open_by_room: dict[int, list[tuple[int, int]]],
    of_size: dict[int, PackLimits],
    smallest: int,
    length: int,
) -> Optional[tuple[int, int]]:
    """Size and place in its list of the group that a piece leaves the least room in."""
    best: Optional[tuple[int, int, int]] = None
    for size, by_room in open_by_room.items():
        if size < smallest:
            continue
        footprint = of_size[size].footprint(length)
        place = bisect.bisect_left(by_room, (footprint, 0))
        if place < len(by_room):
            here = (by_room[place][0] - footprint, size, place)
            best = here if best is None else min(best, here)
    return None if best is None else best[1:]


def _finished(
    groups: list[OpenGroup], limits: RankLimits, cost_model: CostModel, num_micro_batches: int
) -> list[MicroBatch]:
    """The groups balanced and dealt to micro-batches, with empty ones where ranks are left."""
    cost = cost_model.per_rank(limits)
    smallest = limits.sizes[0]
    num_left = num_micro_batches * limits.num_ranks - sum(group.size for group in groups)
    groups += [OpenGroup(smallest, limits.of(smallest)) for _ in range(num_left // smallest)]
    as_collected = _dealt(groups, limits, cost, num_micro_batches)
    balanced = _dealt(LoadBalancing(groups, limits, cost).run(), limits, cost, num_micro_batches)
    return min(balanced, as_collected, key=lambda batch: total_cost(batch, cost))


# Dealing


def _dealt(
    groups: Iterable[OpenGroup], limits: RankLimits, cost: Cost, num_micro_batches: int
) -> list[MicroBatch]:
    """The groups in micro-batches, the most expensive first.

    Each goes to the first micro-batch with as many ranks left. That always ends with all of them
    full, because sizes divide one another.
    """
    by_cost = sorted(groups, key=lambda group: (-cost(group.size, group.work), -group.size))
    num_left = [limits.num_ranks] * num_micro_batches
    chosen: list[list[OpenGroup]] = [[] for _ in num_left]
    first = 0
    for group in by_cost:
        index = next(i for i in range(first, num_micro_batches) if num_left[i] >= group.size)
        chosen[index].append(group)
        num_left[index] -= group.size
        while first < num_micro_batches and not num_left[first]:
            first += 1
    totals = [0] * limits.num_ranks
    return [_placed(side_by_side, cost, totals) for side_by_side in chosen]


def _placed(groups: Iterable[OpenGroup], cost: Cost, totals: list[int]) -> MicroBatch:
    """The groups on ranks, the larger first, each where there is the least work so far.

    Args:
        groups: Of one micro-batch, together as large as there are ranks.
        cost: Of a micro-batch.
        totals: The work of each rank so far; this micro-batch is added.
    """
    placed: dict[int, Group] = {}
    # First ranks of runs of free ranks, all as long as the largest group that is left.
    free, length = [0], len(totals)
    for group in sorted(groups, key=lambda group: (-group.size, -cost(group.size, group.work))):
        if group.size < length:
            free = [begin for run in free for begin in range(run, run + length, group.size)]
            length = group.size
        begin = min(free, key=lambda begin: (max(totals[begin : begin + length]), begin))
        free.remove(begin)
        placed[begin] = Group(group.size, list(group.pieces))
        work = max(totals[begin : begin + length]) + cost(group.size, group.work)
        totals[begin : begin + length] = [work] * length
    return tuple(placed[begin] for begin in sorted(placed))
