# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The table of groups: their bytes, when they are copied, and which copies are late."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple, Optional

from megatron.slipstream.fine_grained_activation_offload.report import RankReport
from megatron.slipstream.plan.actions import ActionKind, GroupPlan, Plan
from megatron.slipstream.plan.render import format_bytes
from megatron.slipstream.plan.trace import GroupKey
from megatron.slipstream.report_page.iteration import Iteration, waits_by_group


class Column(NamedTuple):
    """A column of the table."""

    title: str
    is_number: bool
    help: str


class Cell(NamedTuple):
    """A cell's text, and its sort key if different."""

    text: str
    order: Optional[float] = None


class GroupTable(NamedTuple):
    """A rank's groups, in start order."""

    columns: list[Column]
    rows: list[list[Cell]]
    states: list[str]
    """For each row, 'moves' or 'stays'."""
    waits: list[bool]
    """For each row, whether compute waits for its copies (predicted or measured) or one starts
    late."""


EMPTY = Cell("")


def group_table(iteration: Iteration, rank: RankReport) -> GroupTable:
    """Return the iteration's groups, one per row, without empty columns."""
    groups = iteration.plan.groups
    figures = _Figures(iteration, rank)
    rows = [figures.row(group) for group in groups]
    columns = _columns(iteration.unit)
    filled = [place for place in range(len(columns)) if any(row[place].text for row in rows)]
    return GroupTable(
        columns=[columns[place] for place in filled],
        rows=[[row[place] for place in filled] for row in rows],
        states=["moves" if group.moves else "stays" for group in groups],
        waits=[any(figures.lateness(group.key)) for group in groups],
    )


def _columns(unit: str) -> list[Column]:
    at = "ms from the first mark" if unit == "ms" else "marks from the first"
    return [
        Column("Group", True, "pass.group, as in plans, logs and profiles"),
        Column("Module", False, "as in offload_modules"),
        Column("Layer", True, "index in the model chunk"),
        Column("Micro-batch", True, "index in the iteration"),
        Column("Chunk", True, "virtual pipeline stage"),
        Column("Bytes", True, "bytes that it moves, or would move, and is the first to save"),
        Column("Offload", True, f"start of its copy to the host, in {at}"),
        Column("Freed", True, f"time when its device memory may be reused, in {at}"),
        Column("Reload", True, f"start of its copy back, in {at}"),
        Column("Needed", True, f"time when backward needs it, in {at}"),
        Column("Offload late", True, "how long compute waits for its copy out, predicted (ms)"),
        Column("Reload late", True, "how long compute waits for its copy back, predicted (ms)"),
        Column("Stalled", True, "how long compute waited at its marks, measured (ms)"),
        Column("Late starts", True, "copies back that started only when backward needed them"),
        Column("Decision", False, "moves or stays, with the reason"),
    ]


class _Figures:
    """Builds the row of each group."""

    def __init__(self, iteration: Iteration, rank: RankReport) -> None:
        self._trace = iteration.plan.trace
        self._unit = iteration.unit
        self._places = _places(iteration.plan)
        self._has_chunks = any(group.vp_stage for group in self._trace.groups)
        self._step_starts = iteration.step_starts
        self._copy_starts = {
            (bar.kind, bar.cause.key): bar.start for lane in iteration.lanes for bar in lane.bars
        }
        self._late_out, self._late_back = _late(iteration)
        self._waited = waits_by_group(iteration.measured)
        self._num_late = rank.late_groups

    def lateness(self, key: GroupKey) -> tuple[float, float, float, int]:
        """Return predicted waits for the offload and reload, measured wait (ms), late starts."""
        return (
            self._late_out.get(key, 0.0),
            self._late_back.get(key, 0.0),
            self._waited.get(key, 0.0),
            self._num_late.get(str(key), 0),
        )

    def row(self, group: GroupPlan) -> list[Cell]:
        """Return the cells of a group, in column order."""
        key = group.key
        layer, micro_batch, chunk = self._places[key]
        nbytes = group.moved_nbytes if group.moves else self._trace.group_nbytes(key)
        *waits_ms, num_late = self.lateness(key)
        return [
            Cell(str(key), key.chunk_pass * 1e6 + key.group),
            Cell(group.name),
            Cell(str(layer)),
            Cell(str(micro_batch)),
            Cell(str(chunk)) if self._has_chunks else EMPTY,
            Cell(format_bytes(nbytes), nbytes),
            *(self._times(group) if group.moves else [EMPTY] * 4),
            *(Cell(f"{ms:.3f}") if ms else EMPTY for ms in waits_ms),
            Cell(str(num_late)) if num_late else EMPTY,
            _decision(group),
        ]

    def _times(self, group: GroupPlan) -> list[Cell]:
        times = [
            self._copy_starts.get((ActionKind.D2H.value, group.key)),
            self._step_starts[group.free_step],
            self._copy_starts.get((ActionKind.H2D.value, group.key)),
            self._step_starts[group.use_step],
        ]
        digits = 2 if self._unit == "ms" else 0
        return [EMPTY if time is None else Cell(f"{time:.{digits}f}") for time in times]


def _places(plan: Plan) -> dict[GroupKey, tuple[int, int, int]]:
    """Return the layer, micro-batch and chunk of each group, counted as the engine does."""
    pass_stage: dict[int, int] = {}
    for group in sorted(plan.trace.groups, key=lambda group: group.key):
        pass_stage.setdefault(group.key.chunk_pass, group.vp_stage)
    num_passes: dict[int, int] = defaultdict(int)
    micro_batch = {}
    for chunk_pass, stage in sorted(pass_stage.items()):
        micro_batch[chunk_pass] = num_passes[stage]
        num_passes[stage] += 1
    num_layers: dict[tuple[int, str], int] = defaultdict(int)
    places = {}
    for group in sorted(plan.trace.groups, key=lambda group: group.key):
        chunk_pass = group.key.chunk_pass
        layer = num_layers[chunk_pass, group.name]
        num_layers[chunk_pass, group.name] += 1
        places[group.key] = layer, micro_batch[chunk_pass], group.vp_stage
    return places


def _late(iteration: Iteration) -> tuple[dict[GroupKey, float], dict[GroupKey, float]]:
    """Return how long compute is predicted to wait for each group's offload and reload."""
    out: dict[GroupKey, float] = defaultdict(float)
    back: dict[GroupKey, float] = defaultdict(float)
    if iteration.is_predicted:
        for stall in iteration.simulation.stalls:
            late = out if stall.cause.kind is ActionKind.FREE else back
            late[stall.cause.key] += stall.ms
    return dict(out), dict(back)


def _decision(group: GroupPlan) -> Cell:
    text = "moves"
    if not group.moves:
        text = f"stays: {group.reason}"
    elif group.kept_storages:
        reasons = "; ".join(sorted(set(group.kept_storages.values())))
        num_kept = len(group.kept_storages)
        stay = "1 storage stays" if num_kept == 1 else f"{num_kept} storages stay"
        text = f"moves, but {stay}: {reasons}"
    return Cell(text)
