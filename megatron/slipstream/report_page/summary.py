# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The top of the page: memory saved, time, and the figures of ranks side by side."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from megatron.slipstream.fine_grained_activation_offload.report import (
    RankReport,
    Report,
    format_ranges,
)
from megatron.slipstream.plan.render import format_bytes

DIFFERS_BY = 0.1
"""A rank is marked if it differs from the median by more than this fraction."""
NOT_KNOWN = "–"


class Card(NamedTuple):
    """One result: a large figure and a few words."""

    title: str
    figure: str
    lines: list[str]


class RankCell(NamedTuple):
    """A figure of one rank."""

    text: str
    remark: str
    """The difference from the other ranks, if any."""
    is_above: bool


class Peaks(NamedTuple):
    """The device peaks of a rank, with all memory that it has allocated by now."""

    without_bytes: int
    with_bytes: int
    is_measured: bool
    """Whether the peak with the plan was measured, rather than predicted with the plan."""

    @property
    def saved_bytes(self) -> int:
        """By how much offloading lowers the peak; negative if it does not."""
        return self.without_bytes - self.with_bytes


def peaks_of(rank: RankReport) -> Peaks:
    """Return a rank's peaks: the measured one with the plan if there is one, else the planned one.

    Memory allocated since the recorded iteration counts in both, so that they can be compared.
    """
    later = rank.later_bytes
    measured = rank.measured_peak_bytes
    planned = rank.planned_peak_bytes + later
    return Peaks(rank.baseline_peak_bytes + later, measured or planned, bool(measured))


def format_ms(ms: float) -> str:
    """Format a time in milliseconds, or in seconds from 10 s on."""
    return f"{ms / 1e3:.1f} s" if ms >= 10_000 else f"{ms:.1f} ms"


def cards(report: Report) -> list[Card]:
    """Return the results of all ranks together."""
    ranks = report.ranks
    return [_memory_card(ranks), _time_card(ranks), _moved_card(ranks), _host_card(ranks)]


def _memory_card(ranks: Sequence[RankReport]) -> Card:
    title = "Device memory saved"
    known = [rank for rank in ranks if rank.baseline_peak_bytes]
    if not known:
        freed = max((rank.freed_bytes for rank in ranks), default=0)
        return Card(title, NOT_KNOWN, ["peaks were not measured", f"{format_bytes(freed)} freed"])
    before = max(peaks_of(rank).without_bytes for rank in known)
    highest = max(known, key=lambda rank: peaks_of(rank).with_bytes)
    peaks = peaks_of(highest)._replace(without_bytes=before)
    kind = "measured" if peaks.is_measured else "planned"
    lines = [f"peak {format_bytes(before)} → {format_bytes(peaks.with_bytes)} {kind}"]
    if peaks.is_measured:
        planned = highest.planned_peak_bytes + highest.later_bytes
        lines.append(f"{format_bytes(planned)} planned")
    if highest.later_bytes:
        lines.append(f"with {format_bytes(highest.later_bytes)} allocated since the plan")
    if len(ranks) > 1:
        lines.append(f"highest of {len(ranks)} ranks")
    share = peaks.saved_bytes / before
    return Card(title, f"{format_bytes(peaks.saved_bytes)} ({share:.0%})", lines)


def _time_card(ranks: Sequence[RankReport]) -> Card:
    title = "Step time"
    timed = [rank for rank in ranks if rank.measured_ms]
    if timed:
        slowest = max(timed, key=lambda rank: rank.measured_ms)
        waited = slowest.total.stall_ms
        share = f"{waited / slowest.measured_ms:.1%}"
        lines = [f"{waited:.1f} ms of stalls ({share})" if waited else "no stalls"]
        if slowest.planned_ms:
            lines.append(f"{format_ms(slowest.planned_ms)} planned")
        if slowest.tried_percent is not None:
            lines.append(
                f"{slowest.tried_percent:+.2f}% compared with trial steps without offloading"
            )
        if len(timed) > 1:
            lines.append(f"slowest of {len(timed)} ranks")
        return Card(title, format_ms(slowest.measured_ms), lines)
    typical_ms = max(map(_typical_ms, ranks), default=0.0)
    if typical_ms:
        return Card(title, format_ms(typical_ms), ["by the host's clock, copies not timed"])
    slowest = max(ranks, key=lambda rank: rank.planned_ms, default=RankReport())
    if slowest.planned_ms:
        lines = [f"{slowest.total.stall_ms:.1f} ms of stalls"] * bool(slowest.total.stall_ms)
        return Card(title, format_ms(slowest.planned_ms), [*lines, "planned, not measured"])
    return Card(title, NOT_KNOWN, ["not timed"])


def _moved_card(ranks: Sequence[RankReport]) -> Card:
    totals = [rank.total for rank in ranks]
    moved = [total.d2h_bytes for total in totals]
    figure = format_bytes(max(moved, default=0))
    lines = ["each way in an iteration"]
    if moved and min(moved) != max(moved):
        lines.append(f"{format_bytes(min(moved))} on the rank with the least")
    num_groups = sum(total.num_groups for total in totals)
    num_moved = sum(total.num_groups_moved for total in totals)
    lines.append(f"{num_moved} of {num_groups} groups")
    return Card("Moved", figure, lines)


def _host_card(ranks: Sequence[RankReport]) -> Card:
    total = sum(rank.host_allocated_bytes + rank.graph_host_bytes for rank in ranks)
    lines = []
    if len(ranks) > 1:
        most = max(rank.host_allocated_bytes + rank.graph_host_bytes for rank in ranks)
        lines.append(f"at most {format_bytes(most)} on a rank")
    limits = {rank.host_memory_limit_bytes for rank in ranks}
    if len(limits) == 1 and None not in limits:
        (limit,) = limits
        lines.append(f"limit {format_bytes(limit or 0)} per rank")
    return Card("Host memory pinned", format_bytes(total), lines)


# Comparison of ranks.


class Stage(NamedTuple):
    """The ranks of a pipeline stage, each with its cells."""

    number: int
    rows: list[tuple[int, list[RankCell]]]


class _RankColumn(NamedTuple):
    title: str
    value: Callable[[RankReport], float]
    show: Callable[[float], str]
    is_by_stage: bool
    """Whether it varies by pipeline stage, so that only ranks of the same stage are compared."""


def _share_saved(rank: RankReport) -> float:
    peaks = peaks_of(rank)
    return peaks.saved_bytes / peaks.without_bytes if rank.baseline_peak_bytes else 0.0


def _typical_ms(rank: RankReport) -> float:
    return statistics.median(rank.iteration_ms) if rank.iteration_ms else 0.0


_COLUMNS = (
    _RankColumn("Peak without", lambda r: r.baseline_peak_bytes, format_bytes, True),
    _RankColumn("Peak planned", lambda r: r.planned_peak_bytes, format_bytes, True),
    _RankColumn("Peak measured", lambda r: r.measured_peak_bytes, format_bytes, True),
    _RankColumn("Saved", _share_saved, lambda share: f"{share:.0%}", True),
    _RankColumn("Moved", lambda r: r.d2h_bytes, format_bytes, True),
    _RankColumn("Step time", lambda r: r.measured_ms, format_ms, False),
    _RankColumn("Stalls", lambda r: r.total.stall_ms, lambda ms: f"{ms:.2f} ms", False),
    _RankColumn("Host time", _typical_ms, format_ms, False),
    _RankColumn("Late starts", lambda r: r.total.num_late, lambda num: f"{num:.0f}", False),
    _RankColumn("Host memory", lambda r: r.host_allocated_bytes, format_bytes, True),
    _RankColumn("Warnings", lambda r: len(r.warnings), lambda num: f"{num:.0f}", False),
)


def rank_table(report: Report) -> tuple[list[str], list[Stage]]:
    """Return column titles and a row per rank, by pipeline stage, without empty columns."""
    columns = [column for column in _COLUMNS if any(map(column.value, report.ranks))]
    medians = [statistics.median_low(map(column.value, report.ranks)) for column in columns]
    by_stage: dict[int, list[RankReport]] = {}
    for rank in sorted(report.ranks, key=lambda rank: rank.pp_rank):
        by_stage.setdefault(rank.pp_rank, []).append(rank)
    stages = []
    for number, ranks in by_stage.items():
        own = [
            statistics.median_low(map(column.value, ranks)) if column.is_by_stage else median
            for column, median in zip(columns, medians, strict=True)
        ]
        rows = [
            (rank.rank, list(map(_rank_cell, columns, [rank] * len(own), own))) for rank in ranks
        ]
        stages.append(Stage(number, rows))
    return [column.title for column in columns], stages


def _rank_cell(column: _RankColumn, rank: RankReport, median: float) -> RankCell:
    value, remark = column.value(rank), ""
    if abs(value - median) > DIFFERS_BY * abs(median):
        whose = " of the stage" if column.is_by_stage else ""
        remark = f"the median{whose} is {column.show(median)}"
    return RankCell(column.show(value) if value else NOT_KNOWN, remark, value > median)


def name_ranks(ranks: Sequence[int]) -> str:
    """Format ranks as text such as 'ranks 0, 2, 5 to 7'."""
    return f"rank{'s' if len(ranks) > 1 else ''} {format_ranges(ranks)}"
