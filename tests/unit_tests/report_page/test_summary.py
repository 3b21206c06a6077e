# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The top of the page has the figures of the report, of all ranks together and side by side."""

from __future__ import annotations

from dataclasses import replace

import pytest
from reported_runs import make_run

from megatron.slipstream.fine_grained_activation_offload.report import (
    ModuleCounters,
    RankReport,
    Report,
)
from megatron.slipstream.report_page.summary import (
    Card,
    cards,
    format_ms,
    name_ranks,
    rank_table,
)

GIB = 1 << 30


def rank(number: int = 0, **figures: object) -> RankReport:
    return replace(RankReport(number), **figures)  # type: ignore[arg-type]


def card(title: str, *ranks: RankReport) -> Card:
    (found,) = [item for item in cards(Report(list(ranks))) if item.title == title]
    return found


def test_the_memory_card_has_the_highest_rank_before_and_after() -> None:
    ranks = [
        rank(0, baseline_peak_bytes=60 * GIB, planned_peak_bytes=30 * GIB),
        rank(
            1,
            baseline_peak_bytes=50 * GIB,
            planned_peak_bytes=40 * GIB,
            step_peak_bytes=[41 * GIB],
            later_bytes=GIB,
        ),
    ]
    found = card("Device memory saved", *ranks)
    assert found.figure == "19.0 GiB (32%)"
    assert found.lines == [
        "peak 60.0 GiB → 41.0 GiB measured",
        "41.0 GiB planned",
        "with 1.0 GiB allocated since the plan",
        "highest of 2 ranks",
    ]


def test_what_was_measured_is_the_saving_not_what_was_planned() -> None:
    planned = rank(baseline_peak_bytes=60 * GIB, planned_peak_bytes=30 * GIB)
    assert card("Device memory saved", planned) == Card(
        "Device memory saved", "30.0 GiB (50%)", ["peak 60.0 GiB → 30.0 GiB planned"]
    )
    measured = replace(planned, step_peak_bytes=[GIB, 40 * GIB, GIB])
    found = card("Device memory saved", measured)
    assert found.figure == "20.0 GiB (33%)"
    assert found.lines == ["peak 60.0 GiB → 40.0 GiB measured", "30.0 GiB planned"]
    saved = rank_table(Report([measured]))[0].index("Saved")
    assert rank_table(Report([measured]))[1][0][1][saved].text == "33%"
    # What is new since the recorded iteration would be there without offloading, too.
    later = card("Device memory saved", replace(measured, later_bytes=10 * GIB))
    assert later.figure == "30.0 GiB (43%)"
    worse = card("Device memory saved", replace(measured, step_peak_bytes=[63 * GIB]))
    assert worse.figure == "-3.0 GiB (-5%)"


def test_without_readings_no_saving_is_claimed() -> None:
    modules = {"a": ModuleCounters(freed_bytes=GIB)}
    found = card("Device memory saved", rank(modules=modules))
    assert (found.figure, found.lines) == ("–", ["peaks were not measured", "1.0 GiB freed"])


def test_the_time_card_has_the_slowest_rank_and_its_waits() -> None:
    slow = {"a": ModuleCounters(stall_ms=3.0)}
    ranks = [
        rank(0, measured_ms=100.0, planned_ms=99.0),
        rank(1, measured_ms=150.0, planned_ms=120.0, modules=slow),
    ]
    found = card("Step time", *ranks)
    assert found.figure == "150.0 ms"
    assert found.lines == [
        "3.0 ms of stalls (2.0%)",
        "120.0 ms planned",
        "slowest of 2 ranks",
    ]
    assert card("Step time", ranks[0]).lines[0] == "no stalls"
    tried = rank(0, measured_ms=100.0, tried_percent=0.5)
    assert (
        card("Step time", tried).lines[-1] == "+0.50% compared with trial steps without offloading"
    )


@pytest.mark.parametrize(
    "figures, figure, line",
    [
        ({"iteration_ms": [10.0, 12.0, 99.0]}, "12.0 ms", "by the host's clock, copies not timed"),
        ({"planned_ms": 20.0}, "20.0 ms", "planned, not measured"),
        ({}, "–", "not timed"),
    ],
    ids=["host", "planned", "none"],
)
def test_a_run_that_was_not_timed_says_where_its_time_is_from(
    figures: dict[str, object], figure: str, line: str
) -> None:
    found = card("Step time", rank(**figures))
    assert (found.figure, found.lines) == (figure, [line])


def test_what_moved_and_what_is_pinned() -> None:
    modules = {"a": ModuleCounters(num_groups=4, num_groups_moved=3, d2h_bytes=2 * GIB)}
    ranks = [
        rank(0, modules=modules, host_allocated_bytes=GIB, host_memory_limit_bytes=9 * GIB),
        rank(1, host_allocated_bytes=2 * GIB, graph_host_bytes=GIB),
    ]
    moved = card("Moved", *ranks)
    assert moved.figure == "2.0 GiB"
    assert moved.lines[1:] == ["0 B on the rank with the least", "3 of 4 groups"]
    host = card("Host memory pinned", *ranks)
    assert (host.figure, host.lines) == ("4.0 GiB", ["at most 3.0 GiB on a rank"])
    assert card("Host memory pinned", ranks[0]).lines == ["limit 9.0 GiB per rank"]


def test_ranks_are_side_by_side_by_stage_with_what_they_are_sorted_by() -> None:
    ranks = [rank(number, pp_rank=number % 2, measured_ms=100.0 + number) for number in range(4)]
    ranks[3].measured_ms = 0.0
    ranks[0].warnings = {"w": 1}
    heads, rows = rank_table(Report(ranks))
    assert heads == ["Stage", "Step time", "Warnings"]
    assert rows == [
        (0, [("0", 0), ("100.0 ms", 100.0), ("1", 1)]),
        (2, [("0", 0), ("102.0 ms", 102.0), ("–", 0)]),
        (1, [("1", 1), ("101.0 ms", 101.0), ("–", 0)]),
        (3, [("1", 1), ("–", 0.0), ("–", 0)]),
    ]
    assert rank_table(Report([rank(0), rank(1)])) == ([], [(0, []), (1, [])])
    assert rank_table(Report([])) == ([], [])


@pytest.mark.parametrize(
    "ranks, text",
    [
        ([3], "rank 3"),
        ([0, 1], "ranks 0, 1"),
        ([0, 1, 2], "ranks 0 to 2"),
        ([0, 2, 5, 6, 7, 9], "ranks 0, 2, 5 to 7, 9"),
    ],
)
def test_ranks_are_named_in_short(ranks: list[int], text: str) -> None:
    assert name_ranks(ranks) == text


def test_long_times_are_seconds() -> None:
    assert [format_ms(ms) for ms in (0.04, 9999.9, 12_345)] == ["0.0 ms", "9999.9 ms", "12.3 s"]


def test_the_cards_of_a_run_are_those_of_its_plan() -> None:
    run = make_run()
    peaks = run.plan.peak_bytes()
    assert peaks is not None
    found = card("Device memory saved", run.rank)
    assert found.figure.endswith(f"({(peaks[0] - peaks[1]) / peaks[0]:.0%})")
