# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Assigns documents to micro-batches and to groups of ranks.

[Note: Groups of different sizes side by side]

A micro-batch divides all data- and context-parallel ranks into groups of consecutive ranks. Each
group has its own size, a power of two, and one pack of documents that its ranks divide among them.
So while four ranks share a long document, each other rank has short ones, which need no exchange.
One size for all ranks would be simpler, but then a single long document would put every other
document of the micro-batch into groups as large as its own.

This needs no barrier. A rank runs its micro-batches in order, and in each of them it waits only for
its own group; so the group of the earliest unfinished micro-batch never waits. All ranks have the
same number of micro-batches and buffers of the same size, so megatron's own schedules run them with
any number of pipeline stages: the ranks of all stages are grouped in the same way. (megatron-core
0.19's hybrid context parallelism also mixes sizes, but its ranks have different numbers of
micro-batches of different sizes. So it needs its own schedule with barriers, and supports no
pipeline.)

A schedule is computed in three steps, with integers only, so that every rank and every machine gets
the same one. First, pieces are collected into groups of the smallest sizes that hold them, or of
larger ones if those would stay too empty. Then costs are balanced: expensive groups exchange pieces
with cheap ones, or double in size. Finally, groups are assigned to micro-batches so that concurrent
groups cost about the same.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Optional

from megatron.slipstream.context_parallel.limits import Cost, CostModel, RankLimits
from megatron.slipstream.packed_sequences.packing import (
    CANDIDATES,
    LOOK_AHEAD,
    Bin,
    Pack,
    PackLimits,
    Piece,
    attention_work,
    exchange,
)

_ONE_FREE_OF = 256
"""1 of 256 tokens stays free where possible. A larger group needs slightly more room for the same
pieces, so without free tokens no group could grow."""

_NEARLY = 128
"""Groups whose cost exceeds the mean by less than 1/128 are not changed."""

_WELL_FILLED = 32
"""A batch with at most 1 of 32 tokens free is not retried with larger groups."""


class Group(NamedTuple):
    """Consecutive ranks of one micro-batch, and the pieces that they divide among them."""

    size: int
    pack: Pack
    """The pieces in the order of the buffer; an empty pack is a buffer of padding."""


MicroBatch = tuple[Group, ...]
"""The groups in the order of their ranks. Their sizes add up to the number of ranks."""


class Share(NamedTuple):
    """One rank's part of a micro-batch."""

    size: int
    """Number of ranks of its group."""
    rank: int
    """Its index among them, from 0."""
    pack: Pack
    """The pieces of the group; the rank computes its part of each."""


def batches(
    pieces: Iterable[Piece],
    limits: RankLimits,
    cost_model: CostModel,
    num_micro_batches: int,
    look_ahead: int = LOOK_AHEAD,
) -> Iterator[list[MicroBatch]]:
    """Yield the micro-batches of one global batch after another.

    Each takes the oldest remaining pieces of the stream that fit. Pieces that do not fit wait at
    the head of the stream, so the oldest piece is always in the next batch; a batch is complete
    when ``look_ahead`` pieces did not fit. The stream may be endless, and no piece may be longer
    than the largest group holds.
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
    """Return the sum of each micro-batch's cost for its most expensive ranks.

    With expert parallelism or pipeline stages, this is the time of a batch; otherwise cheap ranks
    run ahead, and it takes less.
    """
    return sum(
        max(cost(size, attention_work(pack)) for size, pack in groups) for groups in micro_batches
    )


# Collecting


def _costs_less(one: _Collected, other: _Collected, cost: Cost) -> bool:
    return one.total_cost(cost) * other.num_tokens < other.total_cost(cost) * one.num_tokens


class OpenGroup(Bin):
    """A group under construction: a pack, and its number of ranks."""

    def __init__(self, size: int, limits: PackLimits) -> None:
        super().__init__(limits)
        self.size = size


class _Stream:
    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._rest = iter(pieces)
        self._seen: list[Piece] = []

    def __iter__(self) -> Iterator[tuple[int, Piece]]:
        """Iterate from the oldest remaining piece, with numbers."""
        for number in itertools.count():
            if number == len(self._seen):
                piece = next(self._rest, None)
                if piece is None:
                    return
                self._seen.append(piece)
            yield number, self._seen[number]

    def remove(self, numbers: set[int]) -> None:
        """Remove pieces; the others get new numbers."""
        self._seen = [piece for number, piece in enumerate(self._seen) if number not in numbers]


class _Collected(NamedTuple):
    groups: list[OpenGroup]
    taken: set[int]
    """Numbers of its pieces in the stream."""
    num_tokens: int
    num_free: int
    """Number of unused buffers, which hold padding."""

    def total_cost(self, cost: Cost) -> int:
        """Return the cost of all ranks together, padding included."""
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
    """Collect the next pieces into groups of the smallest sizes that hold them, by best fit.

    The stream is not changed. It ends as soon as ``look_ahead`` pieces did not fit, or at most
    ``free`` tokens are free. ``floor`` is the smallest group size: larger groups leave less room
    that no piece fits into.
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
    """Return the group that a piece leaves the least room in, as its size and its index there."""
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
    """Balance the groups and assign them to micro-batches; empty groups fill unused ranks."""
    cost = cost_model.per_rank(limits)
    smallest = limits.sizes[0]
    num_left = num_micro_batches * limits.num_ranks - sum(group.size for group in groups)
    groups += [OpenGroup(smallest, limits.of(smallest)) for _ in range(num_left // smallest)]
    as_collected = _dealt(groups, limits, cost, num_micro_batches)
    balanced = _dealt(LoadBalancing(groups, limits, cost).run(), limits, cost, num_micro_batches)
    return min(balanced, as_collected, key=lambda batch: total_cost(batch, cost))


# Balancing their cost


class LoadBalancing:
    """Makes the most expensive groups cheaper, as long as that is possible.

    Every change replaces groups by others that all cost less than the most expensive of them did.
    """

    def __init__(self, groups: Iterable[OpenGroup], limits: RankLimits, cost: Cost) -> None:
        self.limits = limits
        self.cost = cost
        self.groups: dict[int, OpenGroup] = dict(enumerate(groups))
        self.order = sorted((self._cost_of(group), key) for key, group in self.groups.items())
        """The costs and keys of the groups that may still change."""

    def run(self) -> list[OpenGroup]:
        """Balance until no change helps or the gain is too small; return the groups."""
        num_ranks = sum(group.size for group in self.groups.values())
        total = sum(cost * self.groups[key].size for cost, key in self.order)
        enough = total // num_ranks
        enough += enough // _NEARLY
        for _ in range(4 * len(self.groups)):
            if len(self.order) < 2 or self.order[-1][0] <= enough:
                break
            highest, key = self.order.pop()
            # A group that cannot be made cheaper is done: all others cost less, and stay below it.
            if self._exchange(key, highest) or self._widen(key, highest):
                continue
        return list(self.groups.values())

    def _cost_of(self, group: OpenGroup) -> int:
        return self.cost(group.size, group.work)

    def _put_back(self, key: int) -> None:
        bisect.insort(self.order, (self._cost_of(self.groups[key]), key))

    def _exchange(self, key: int, highest: int) -> bool:
        """Give a piece to one of the cheapest groups, if both then cost less than ``highest``."""
        heavy = self.groups[key]
        for place, (_, other) in enumerate(self.order[:CANDIDATES]):
            light = self.groups[other]

            def may_have(work: int, size: int = light.size) -> bool:
                return self.cost(size, work) < highest

            if exchange(heavy, light, may_have):
                del self.order[place]
                self._put_back(key)
                self._put_back(other)
                return True
        return False

    def _widen(self, key: int, highest: int) -> bool:
        """Double the group, taking over the ranks and pieces of the cheapest others."""
        heavy = self.groups[key]
        size = 2 * heavy.size
        partners = self._partners(heavy.size)
        if size > self.limits.largest or not partners:
            return False
        wide = OpenGroup(size, self.limits.of(size))
        merged = [heavy, *(self.groups[other] for other in partners)]
        for piece in itertools.chain.from_iterable(group.pieces for group in merged):
            wide.add(piece)
        moved = self._outside(wide, {key, *partners}, highest)
        if moved is None or self._cost_of(wide) >= highest:
            return False
        self.order = [entry for entry in self.order if entry[1] not in {*partners, *moved}]
        for other in (key, *partners):
            del self.groups[other]
        for other, pieces in moved.items():
            for piece in pieces:
                self.groups[other].add(piece)
            self._put_back(other)
        self.groups[key] = wide
        self._put_back(key)
        return True

    def _partners(self, size: int) -> list[int]:
        """Return the cheapest group of ``size`` ranks, or the cheapest with as many in total."""
        same = next((key for _, key in self.order if self.groups[key].size == size), None)
        if same is not None:
            return [same]
        missing, chosen = size, []
        for _, key in self.order:
            if self.groups[key].size <= missing:
                chosen.append(key)
                missing -= self.groups[key].size
                if not missing:
                    return chosen
        return []

    def _outside(
        self, wide: OpenGroup, merged: set[int], highest: int
    ) -> Optional[dict[int, Pack]]:
        """Return the groups that take the pieces ``wide`` has no room for; None if they cannot.

        Removes the pieces from ``wide``; the other groups are not changed.
        """
        taken: dict[int, Pack] = {}
        shortest_first = iter(sorted(wide.pieces, key=lambda piece: piece.length))
        for _ in range(CANDIDATES):
            if wide.room >= 0 and len(wide.pieces) <= wide.limits.max_sequences:
                return taken
            piece = next(shortest_first)
            wide.remove(piece)
            others = (key for _, key in self.order if key not in merged and key not in taken)
            key = next((key for key in others if self._takes(key, piece, highest)), None)
            if key is None:
                return None
            taken[key] = [piece]
        return None

    def _takes(self, key: int, piece: Piece, highest: int) -> bool:
        group = self.groups[key]
        return (
            not group.is_full
            and group.room >= group.limits.footprint(piece.length)
            and self.cost(group.size, group.work + piece.length**2) < highest
        )


# Assigning groups to micro-batches and ranks


def _dealt(
    groups: Iterable[OpenGroup], limits: RankLimits, cost: Cost, num_micro_batches: int
) -> list[MicroBatch]:
    """Assign the groups to micro-batches, the most expensive first.

    Each is assigned to the first micro-batch with enough free ranks. This always fills all ranks,
    because sizes divide one another.
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
    """Assign groups to ranks, larger groups first, each to the ranks with the least work so far."""
    placed: dict[int, Group] = {}
    # First ranks of runs of free ranks, each as long as the largest remaining group.
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
