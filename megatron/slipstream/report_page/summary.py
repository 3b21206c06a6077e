# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The top of the page: memory saved, time, and the figures of ranks side by side."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple, Optional

from megatron.slipstream.fine_grained_activation_offload.report import (
    RankReport,
    Report,
    format_ranges,
)
from megatron.slipstream.plan.render import format_bytes

NOT_KNOWN = "–"


class Card(NamedTuple):
    """One result: a large figure and a few words."""

    title: str
    figure: str
    lines: list[str]


class Cell(NamedTuple):
    """A cell of a table: its text, and its sort key if different."""

    text: str
    order: Optional[float] = None


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


# Ranks side by side.


class _RankColumn(NamedTuple):
    title: str
    value: Callable[[RankReport], float]
    show: Callable[[float], str]


def _share_saved(rank: RankReport) -> float:
    peaks = peaks_of(rank)
    return peaks.saved_bytes / peaks.without_bytes if rank.baseline_peak_bytes else 0.0


def _typical_ms(rank: RankReport) -> float:
    return statistics.median(rank.iteration_ms) if rank.iteration_ms else 0.0


_COLUMNS = (
    _RankColumn("Stage", lambda r: r.pp_rank, lambda number: f"{number:.0f}"),
    _RankColumn("Peak without", lambda r: r.baseline_peak_bytes, format_bytes),
    _RankColumn("Peak planned", lambda r: r.planned_peak_bytes, format_bytes),
    _RankColumn("Peak measured", lambda r: r.measured_peak_bytes, format_bytes),
    _RankColumn("Saved", _share_saved, lambda share: f"{share:.0%}"),
    _RankColumn("Moved", lambda r: r.d2h_bytes, format_bytes),
    _RankColumn("Step time", lambda r: r.measured_ms, format_ms),
    _RankColumn("Stalls", lambda r: r.total.stall_ms, lambda ms: f"{ms:.2f} ms"),
    _RankColumn("Host time", _typical_ms, format_ms),
    _RankColumn("Late starts", lambda r: r.total.num_late, lambda num: f"{num:.0f}"),
    _RankColumn("Host memory", lambda r: r.host_allocated_bytes, format_bytes),
    _RankColumn("Warnings", lambda r: len(r.warnings), lambda num: f"{num:.0f}"),
)


def rank_table(report: Report) -> tuple[list[str], list[tuple[int, list[Cell]]]]:
    """Return titles of columns and a row per rank, by stage; without columns of nothing but 0."""
    ranks = sorted(report.ranks, key=lambda rank: (rank.pp_rank, rank.rank))
    columns = [column for column in _COLUMNS if any(map(column.value, ranks))]
    rows = [(rank.rank, [_rank_cell(column, rank) for column in columns]) for rank in ranks]
    return [column.title for column in columns], rows


def _rank_cell(column: _RankColumn, rank: RankReport) -> Cell:
    value = column.value(rank)
    is_known = value or column.title == "Stage"
    return Cell(column.show(value) if is_known else NOT_KNOWN, value)


def name_ranks(ranks: Sequence[int]) -> str:
    """Format ranks as text such as 'ranks 0, 2, 5 to 7'."""
    return f"rank{'s' if len(ranks) > 1 else ''} {format_ranges(ranks)}"
