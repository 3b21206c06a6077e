# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The order in which variants are interleaved."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from benchmarks.ways import in_turn

WAYS = ("off", "megatron", "slipstream", "slipstream:auto")


def test_every_way_has_its_turn_in_every_round() -> None:
    assert all(sorted(in_turn(WAYS, number)) == sorted(WAYS) for number in range(100))


def test_ranks_have_one_order() -> None:
    assert all(in_turn(WAYS, number) == in_turn(WAYS, number) for number in range(100))


def test_no_way_mostly_follows_the_same_other_one() -> None:
    turns = [way for number in range(200) for way in in_turn(WAYS, number)]
    followers = Counter(pairwise(turns))
    for before in WAYS:
        total = sum(followers[before, way] for way in WAYS)
        assert max(followers[before, way] for way in WAYS) < 0.5 * total
