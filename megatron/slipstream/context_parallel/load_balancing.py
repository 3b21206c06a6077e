# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Balances the cost of groups: makes the most expensive ones cheaper."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable
from typing import Optional

from megatron.slipstream.context_parallel.limits import Cost, RankLimits
from megatron.slipstream.packed_sequences.packing import (
    Pack,
    PackLimits,
    Piece,
    _Bin,
    _give,
)

_CANDIDATES = 8
"""Number of pieces, and of other groups, that are tried for a group that is too expensive."""

_NEARLY = 128
"""Groups whose cost exceeds the mean by less than 1/128 are not changed."""


class OpenGroup(_Bin):
    """A group under construction: a pack, and its number of ranks."""

    def __init__(self, size: int, limits: PackLimits) -> None:
        super().__init__(limits)
        self.size = size


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
        """Give a piece to one of the cheapest groups."""
        heavy = self.groups[key]
        longest = sorted(heavy.pieces, key=lambda piece: -piece.length)[:_CANDIDATES]
        for place, (_, other) in enumerate(self.order[:_CANDIDATES]):
            light = self.groups[other]
            if any(self._give(heavy, light, piece, highest) for piece in longest):
                del self.order[place]
                self._put_back(key)
                self._put_back(other)
                return True
        return False

    def _give(self, heavy: OpenGroup, light: OpenGroup, piece: Piece, highest: int) -> bool:
        """Move a piece if both then cost less than ``highest``."""
        return _give(heavy, light, piece, lambda work: self.cost(light.size, work) < highest)

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
        for _ in range(_CANDIDATES):
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
