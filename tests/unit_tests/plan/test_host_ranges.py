# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Free host memory: no byte is used twice or lost, and each has the copies to wait for."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from megatron.slipstream.plan.host_layout import FreeRanges, Span


class PerByte:
    """A reference model, byte by byte: the user of each byte, and the event of its last copy."""

    def __init__(self) -> None:
        self.slabs: list[list[object]] = []
        self.in_use: list[list[bool]] = []

    def add_slab(self, nbytes: int) -> None:
        self.slabs.append([None] * nbytes)
        self.in_use.append([False] * nbytes)

    def take(self, span: Span) -> set[object]:
        assert not any(self.in_use[span.slab][span.start : span.stop])
        self.in_use[span.slab][span.start : span.stop] = [True] * (span.stop - span.start)
        return set(self.slabs[span.slab][span.start : span.stop]) - {None}

    def put(self, span: Span, event: object) -> None:
        nbytes = span.stop - span.start
        self.in_use[span.slab][span.start : span.stop] = [False] * nbytes
        self.slabs[span.slab][span.start : span.stop] = [event] * nbytes

    def free_ranges(self) -> list[tuple[int, int, int]]:
        """The longest free runs, in order."""
        found = []
        for slab, in_use in enumerate(self.in_use):
            start = None
            for place, taken in enumerate([*in_use, True]):
                if not taken and start is None:
                    start = place
                elif taken and start is not None:
                    found.append((slab, start, place))
                    start = None
        return found


@pytest.mark.parametrize("seed", range(60))
def test_any_order_of_taking_and_putting_back(seed: int) -> None:
    # Not drawn by hypothesis: its lists are too short to fragment the memory.
    rng = random.Random(seed)
    free, model = FreeRanges(), PerByte()
    slabs = [rng.randint(20, 80) for _ in range(rng.randint(1, 3))]
    largest = rng.choice([4, 12, 40])
    for number, nbytes in enumerate(slabs):
        assert free.add_slab(nbytes) == number
        model.add_slab(nbytes)
    out: list[Span] = []
    events = itertools.count()
    num_events: Counter[int] = Counter()
    for _ in range(120):
        nbytes = rng.randint(1, largest)
        before = {(slab, start): stop - start for slab, start, stop in model.free_ranges()}
        fitting = [length for length in before.values() if length >= nbytes]
        span = free.take(nbytes)
        assert (span is None) == (not fitting)
        if span is not None:
            assert span.stop - span.start == nbytes
            assert before[span.slab, span.start] == min(fitting)
            # Exactly the copies of these bytes: none missing, none of neighbouring bytes.
            assert set(span.events) == model.take(span)
            assert len(set(span.events)) == len(span.events)
            num_events[len(span.events)] += 1
            out.append(span)
        while out and (span is None or rng.random() < 0.4):
            back = out.pop(rng.randrange(len(out)))
            event = next(events)
            free.put(back.slab, back.start, back.stop, (event,))
            model.put(back, event)
            if rng.random() < 0.3:
                break
        # Adjacent free memory is one range.
        assert free.ranges() == model.free_ranges()
    assert max(num_events) > 1
    for back in out:
        free.put(back.slab, back.start, back.stop, ())
    assert free.ranges() == [(slab, 0, nbytes) for slab, nbytes in enumerate(slabs)]


def test_of_equal_ranges_the_one_that_is_free_for_longest_is_taken() -> None:
    free = FreeRanges()
    free.add_slab(60)
    spans = [free.take(10) for _ in range(6)]
    for place in (3, 1, 5):
        span = spans[place]
        assert span is not None
        free.put(span.slab, span.start, span.stop, (place,))
    taken = [free.take(10) for _ in range(3)]
    assert [span.events for span in taken if span is not None] == [(3,), (1,), (5,)]


def test_memory_that_was_cut_off_keeps_its_age() -> None:
    free = FreeRanges()
    free.add_slab(28)
    first, _, second, _ = (free.take(nbytes) for nbytes in (15, 5, 3, 5))
    assert first is not None
    assert second is not None
    free.put(first.slab, first.start, first.stop, ("older",))
    free.put(second.slab, second.start, second.stop, ("newer",))
    free.take(12)  # of the older range: three bytes are left, as many as the newer one has
    taken = [free.take(3) for _ in range(2)]
    assert [span.events for span in taken if span is not None] == [("older",), ("newer",)]


def test_a_range_never_goes_from_one_slab_into_another() -> None:
    free = FreeRanges()
    free.add_slab(10)
    free.add_slab(10)
    assert free.take(11) is None


def test_memory_that_was_freed_without_a_copy_has_nothing_to_wait_for() -> None:
    free = FreeRanges()
    free.add_slab(10)
    span = free.take(10)
    assert span is not None
    free.put(span.slab, span.start, span.stop, ())
    again = free.take(10)
    assert again is not None
    assert again.events == ()
