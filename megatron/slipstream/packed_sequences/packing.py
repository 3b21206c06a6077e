# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Packs a stream of documents: decides which documents share a micro-batch's buffer.

A pack becomes one micro-batch of packed sequences. Both packers take documents in the order of the
stream, and both use integers only, so every rank and every machine gets the same packs.

`greedy` fills one pack after the other. `balanced` then moves documents between the packs of one
global batch until their attention costs about the same: ranks of a data-parallel group wait for the
slowest, and the cost of a document's attention is quadratic in its length.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

LOOK_AHEAD = 64
"""Number of pieces from which a pack's next piece is chosen. A higher number fills packs better and
changes the stream's order more."""

_PARTS_FOR_COST = (1.0, 0.9, 0.75, 0.5)
"""Fractions of a batch's pieces, the longest ones, that are placed by cost; the others fill the
remaining room. The first fraction with which all pieces fit is used."""

CANDIDATES = 8
"""Number of a pack's longest pieces, and of the cheapest packs, that an exchange tries."""


class Piece(NamedTuple):
    """Consecutive tokens of one document that share a pack's attention."""

    document: int
    offset: int
    """Index of its first token in the document."""
    length: int
    """Number of tokens that the model reads; the token after them is the last label."""


Pack = list[Piece]


@dataclass(frozen=True)
class PackLimits:
    """Limits of a pack.

    Args:
        max_tokens: Size of the buffer in tokens, of all context-parallel ranks together: megatron's
            ``seq_length``.
        max_sequences: Maximum number of pieces.
        alignment: Each piece takes a multiple of this number of tokens in the buffer. Context
            parallelism needs twice its size, because it divides every piece into that many equal
            parts.

    Raises:
        ValueError: No piece would fit, or pieces could not fill the buffer.
    """

    max_tokens: int
    max_sequences: int
    alignment: int = 1

    def __post_init__(self) -> None:
        if self.max_sequences < 1:
            raise ValueError(
                f"thd_max_packed_sequences={self.max_sequences} leaves no room for a document; "
                "set 1 or more"
            )
        if self.alignment < 1 or self.max_tokens < 1 or self.max_tokens % self.alignment:
            raise ValueError(
                f"seq_length={self.max_tokens} is not supported because each packed sequence takes "
                f"a multiple of {self.alignment} tokens; set a multiple of {self.alignment}"
            )

    def footprint(self, length: int) -> int:
        """Return the tokens of the buffer that a piece of ``length`` tokens takes."""
        return -(-length // self.alignment) * self.alignment


def split(document: int, length: int, max_tokens: int) -> list[Piece]:
    """Cut a document into full pieces and a rest: equal pieces would leave packs half empty."""
    return [
        Piece(document, offset, min(max_tokens, length - offset))
        for offset in range(0, length, max_tokens)
    ]


def attention_work(pack: Iterable[Piece]) -> int:
    """Return the cost of attention in a pack: the sum of the squares of its pieces' lengths."""
    return sum(piece.length**2 for piece in pack)


def greedy(
    pieces: Iterable[Piece], limits: PackLimits, look_ahead: int = LOOK_AHEAD
) -> Iterator[Pack]:
    """Yield packs in the order of the stream, each filled as far as the next pieces allow.

    A pack begins with the oldest remaining piece. Then it repeatedly takes the oldest of the next
    ``look_ahead`` pieces that still fits (1 keeps the order of the stream exactly). So a piece
    overtakes at most ``look_ahead - 1`` others, and is taken at the latest when it is the oldest.
    The stream may be endless, and no piece may be longer than ``limits.max_tokens``.
    """
    stream = iter(pieces)
    ahead = deque(itertools.islice(stream, look_ahead))
    while ahead:
        pack: Pack = []
        room = limits.max_tokens
        place = 0
        # Room only shrinks, so a piece that did not fit never will: one pass is enough.
        while place < len(ahead) and len(pack) < limits.max_sequences and room > 0:
            size = limits.footprint(ahead[place].length)
            if size > room:
                place += 1
                continue
            pack.append(ahead[place])
            del ahead[place]
            room -= size
            ahead.extend(itertools.islice(stream, 1))
        yield pack


def balanced(
    pieces: Iterable[Piece],
    limits: PackLimits,
    packs_per_batch: int,
    num_ranks: int = 1,
    look_ahead: int = LOOK_AHEAD,
) -> Iterator[Pack]:
    """Yield packs whose attention costs about the same within a global batch.

    Every ``packs_per_batch`` consecutive packs, for all ``num_ranks`` data-parallel ranks in turn,
    hold the pieces that :func:`greedy` puts into as many, so no piece is delayed by more than a
    batch. Their most expensive pack never costs more than greedy's; a single piece that costs more
    than the mean cannot be balanced. The order of the packs balances the remaining differences:
    concurrent ranks get packs of nearly the same cost, and about the same cost in total.
    """
    packs = greedy(pieces, limits, look_ahead)
    while batch := list(itertools.islice(packs, packs_per_batch)):
        yield from _deal(_level(batch, limits), num_ranks)


def _deal(batch: Iterable[Pack], num_ranks: int) -> Iterator[Pack]:
    """Deal packs by descending cost, in turns: the most expensive to the rank with the least."""
    totals = [0] * num_ranks
    by_cost = iter(sorted(batch, key=attention_work, reverse=True))
    while turn := list(itertools.islice(by_cost, num_ranks)):
        # Both sorts are stable, so the result is deterministic.
        ranks = sorted(range(len(turn)), key=lambda rank: totals[rank])
        dealt = dict(zip(ranks, turn, strict=True))
        for rank in range(len(turn)):
            totals[rank] += attention_work(dealt[rank])
            yield dealt[rank]


# Balancing one batch


class Bin:
    """A pack under construction."""

    def __init__(self, limits: PackLimits, pieces: Iterable[Piece] = ()) -> None:
        self.limits = limits
        self.pieces: Pack = []
        self.room = limits.max_tokens
        self.work = 0
        for piece in pieces:
            self.add(piece)

    def add(self, piece: Piece) -> None:
        self.pieces.append(piece)
        self.room -= self.limits.footprint(piece.length)
        self.work += piece.length**2

    @property
    def is_full(self) -> bool:
        return len(self.pieces) == self.limits.max_sequences

    def remove(self, piece: Piece) -> None:
        self.pieces.remove(piece)
        self.room += self.limits.footprint(piece.length)
        self.work -= piece.length**2


def _level(batch: Sequence[Pack], limits: PackLimits) -> list[Pack]:
    """Repack ``batch`` into as many packs; the most expensive one costs at most as much."""
    bins = [Bin(limits, pack) for pack in batch]
    pieces = sorted(itertools.chain(*batch), key=lambda piece: -piece.length)
    for part in _PARTS_FOR_COST:
        spread = _spread(pieces, len(batch), limits, int(len(pieces) * part))
        if spread is not None:
            bins = min(spread, bins, key=lambda some: max(item.work for item in some))
            break
    for _ in range(4 * len(bins)):
        heavy = max(bins, key=lambda item: item.work)
        cheapest = sorted(bins, key=lambda item: item.work)[:CANDIDATES]
        if not any(_exchange(heavy, light) for light in cheapest if light is not heavy):
            break
    return [item.pieces for item in bins]


def _spread(
    pieces: Sequence[Piece], num_bins: int, limits: PackLimits, num_for_cost: int
) -> Optional[list[Bin]]:
    """Place each of the pieces, sorted longest first, in a pack; None if one does not fit.

    The first ``num_for_cost`` are placed in the cheapest pack with room (longest processing time
    first, Graham 1969), the others where they leave the least room (best fit decreasing).
    """
    bins = [Bin(limits) for _ in range(num_bins)]
    by_cost = [(0, index) for index in range(num_bins)]  # a heap
    # Packs without room for the current piece, by room: later pieces are shorter and may fit.
    waiting: list[tuple[int, int]] = []
    for piece in pieces[:num_for_cost]:
        size = limits.footprint(piece.length)
        while waiting and -waiting[0][0] >= size:
            _, index = heapq.heappop(waiting)
            heapq.heappush(by_cost, (bins[index].work, index))
        while by_cost and bins[by_cost[0][1]].room < size:
            _, index = heapq.heappop(by_cost)
            heapq.heappush(waiting, (-bins[index].room, index))
        if not by_cost:
            return None
        index = heapq.heappop(by_cost)[1]
        bins[index].add(piece)
        if not bins[index].is_full:
            heapq.heappush(by_cost, (bins[index].work, index))
    by_room = sorted((item.room, index) for index, item in enumerate(bins) if not item.is_full)
    for piece in pieces[num_for_cost:]:
        place = bisect.bisect_left(by_room, (limits.footprint(piece.length), 0))
        if place == len(by_room):
            return None
        index = by_room.pop(place)[1]
        bins[index].add(piece)
        if not bins[index].is_full:
            bisect.insort(by_room, (bins[index].room, index))
    return bins


def _exchange(heavy: Bin, light: Bin) -> bool:
    """Move a piece from ``heavy`` to ``light`` if both then cost less than ``heavy`` did."""
    return exchange(heavy, light, lambda work: work < heavy.work)


def exchange(heavy: Bin, light: Bin, may_have: Callable[[int], bool]) -> bool:
    """Move one of the longest pieces of ``heavy`` to ``light``; see :func:`_give`."""
    longest = sorted(heavy.pieces, key=lambda item: -item.length)[:CANDIDATES]
    return any(_give(heavy, light, piece, may_have) for piece in longest)


def _give(heavy: Bin, light: Bin, piece: Piece, may_have: Callable[[int], bool]) -> bool:
    """Move a piece if ``heavy`` gets cheaper and ``may_have`` accepts the new work of ``light``.

    If there is no room for it, ``heavy`` takes the shortest pieces in return, which cost the least
    per token.
    """
    back = _shortest_for(light, piece)
    if back is None:
        return False
    gain = piece.length**2 - attention_work(back)
    if gain <= 0 or not may_have(light.work + gain):
        return False
    room = heavy.room + heavy.limits.footprint(piece.length)
    room -= sum(heavy.limits.footprint(item.length) for item in back)
    if room < 0 or len(heavy.pieces) - 1 + len(back) > heavy.limits.max_sequences:
        return False
    heavy.remove(piece)
    for item in back:
        light.remove(item)
        heavy.add(item)
    light.add(piece)
    return True


def _shortest_for(light: Bin, piece: Piece) -> Optional[Pack]:
    """Return the shortest pieces of ``light`` to remove for ``piece`` to fit; None if it can't."""
    limits = light.limits
    missing = limits.footprint(piece.length) - light.room
    too_many = len(light.pieces) + 1 - limits.max_sequences
    back: Pack = []
    for item in sorted(light.pieces, key=lambda item: item.length):
        if missing <= 0 and len(back) >= too_many:
            return back
        back.append(item)
        missing -= limits.footprint(item.length)
    return back if missing <= 0 and len(back) >= too_many else None


_TOKENS_PER_SEQUENCE = 64
"""Tokens per sequence behind the default number: documents of this length fill a buffer."""


def pack_limits(args: Any) -> PackLimits:
    """Return the limits of a micro-batch, over all context-parallel ranks together.

    Raises ``ValueError`` without a ``seq_length``, and as :class:`PackLimits`.
    """
    if args.seq_length is None:
        raise ValueError(
            "seq_length=None is not supported with sequence_packing because it is the size of the "
            "buffer that documents are packed into; set the number of tokens"
        )
    context_parallel_size = args.context_parallel_size
    max_sequences = args.thd_max_packed_sequences
    if max_sequences is None:
        max_sequences = -(-args.seq_length // _TOKENS_PER_SEQUENCE)
    return PackLimits(
        max_tokens=args.seq_length,
        max_sequences=max_sequences,
        alignment=2 * context_parallel_size if context_parallel_size > 1 else 1,
    )
