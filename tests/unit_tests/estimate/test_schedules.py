# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Pipeline schedules have the passes in flight and the bubbles that the papers give."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from megatron.slipstream.estimate.schedules import (
    Pass,
    idle_ms,
    most_in_flight,
    rank_schedule,
)

some = settings(max_examples=40, deadline=None)


@some
@given(st.integers(1, 6), st.integers(1, 12), st.data())
def test_each_rank_keeps_as_many_in_flight_as_ranks_follow_it(
    pp: int, count: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, pp - 1))
    assert most_in_flight(rank_schedule(pp, rank, count)) == min(pp - rank, count)


@some
@given(st.integers(2, 4), st.integers(1, 3), st.integers(2, 3), st.integers(0, 2))
def test_interleaving_keeps_more_in_flight(pp: int, rounds: int, vp: int, more: int) -> None:
    group = pp + more
    count = rounds * group
    for rank in range(pp):
        expected = (pp - rank - 1) * 2 + (vp - 1) * group + 1
        schedule = rank_schedule(pp, rank, count, vp, group)
        assert most_in_flight(schedule) == min(expected, count * vp)


@some
@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 5), st.integers(1, 9))
def test_the_bubble_is_a_pass_each_way_for_every_other_rank(
    pp: int, count: int, forward: int, backward: int
) -> None:
    schedules = [rank_schedule(pp, rank, count) for rank in range(pp)]
    waits = idle_ms(schedules, lambda _, item: forward if item.direction == "F" else backward)
    assert sum(waits[0]) == pytest.approx((pp - 1) * (forward + backward))
    assert sum(waits[-1]) == pytest.approx((pp - 1) * forward)


def test_interleaving_makes_the_bubble_smaller() -> None:
    def waits(vp: int | None) -> float:
        schedules = [rank_schedule(4, rank, 8, vp) for rank in range(4)]
        return sum(idle_ms(schedules, lambda *_: 1.0 / (vp or 1))[0])

    assert waits(2) < waits(None)


def test_a_slow_rank_keeps_the_others_waiting() -> None:
    schedules = [rank_schedule(2, rank, 4) for rank in range(2)]
    waits = idle_ms(schedules, lambda rank, _: 3.0 if rank else 1.0)
    assert sum(waits[0]) > sum(waits[1]) == 1.0


def test_a_circle_of_waits_is_found() -> None:
    with pytest.raises(ValueError, match="ranks deadlock"):
        idle_ms([[Pass("B", 0), Pass("F", 0)], [Pass("F", 0), Pass("B", 0)]], lambda *_: 1.0)


@pytest.mark.parametrize("count, group", [(2, None), (5, None), (4, 2), (9, 6)])
def test_counts_that_run_the_pipeline_dry_are_refused(count: int, group: int | None) -> None:
    with pytest.raises(ValueError, match=f"num_microbatches={count} is not supported"):
        rank_schedule(4, 0, count, 2, group)
