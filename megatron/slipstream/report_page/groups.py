# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The table of groups: their bytes, when they are copied, and which copies are late."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple, Optional

from megatron.slipstream.fine_grained_activation_offload.report import RankReport
from megatron.slipstream.plan.actions import ActionKind, GroupPlan, Plan
from megatron.slipstream.plan.render import format_bytes
from megatron.slipstream.plan.trace import GroupKey
from megatron.slipstream.report_page.iteration import Iteration, waits_by_group
from megatron.slipstream.report_page.summary import Cell


class Column(NamedTuple):
    """A column of the table."""

    title: str
    is_number: bool
    help: str


class GroupTable(NamedTuple):
    """A rank's groups, in start order."""

    columns: list[Column]
    rows: list[list[Cell]]


def group_table(iteration: Iteration, rank: RankReport) -> GroupTable:
    """Return the iteration's groups, one per row, without empty columns."""
    plan = iteration.plan
    places = _places(plan)
    has_chunks = any(group.vp_stage for group in plan.trace.groups)
    late_out, late_back = _late(iteration)
    waited = waits_by_group(iteration.measured)
    copy_starts = {
        (bar.cause.kind, bar.cause.key): bar.start_ms
        for lane in iteration.lanes
        for bar in lane.bars
    }
    columns = _columns(iteration.unit)
    rows = []
    for group in plan.groups:
        key = group.key
        layer, micro_batch, chunk = places[key]
        nbytes = group.moved_nbytes if group.moves else plan.trace.group_nbytes(key)
        waits_ms = [waits.get(key, 0.0) for waits in (late_out, late_back, waited)]
        num_late = rank.late_groups.get(str(key), 0)
        rows.append(
            [
                Cell(str(key), key.chunk_pass * 1e6 + key.group),
                Cell(group.name),
                Cell(str(layer)),
                Cell(str(micro_batch)),
                Cell(str(chunk) if has_chunks else ""),
                Cell(format_bytes(nbytes), nbytes),
                *_times(iteration, group, copy_starts),
                *(Cell(f"{ms:.3f}" if ms else "") for ms in waits_ms),
                Cell(str(num_late) if num_late else ""),
                Cell(_decision(group)),
            ]
        )
    filled = [place for place in range(len(columns)) if any(row[place].text for row in rows)]
    return GroupTable(
        columns=[columns[place] for place in filled],
        rows=[[row[place] for place in filled] for row in rows],
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


def _times(
    iteration: Iteration, group: GroupPlan, copy_starts: Mapping[tuple[Any, GroupKey], float]
) -> list[Cell]:
    times: list[Optional[float]] = [None] * 4
    if group.moves:
        times = [
            copy_starts.get((ActionKind.D2H, group.key)),
            iteration.step_starts[group.free_step],
            copy_starts.get((ActionKind.H2D, group.key)),
            iteration.step_starts[group.use_step],
        ]
    digits = 2 if iteration.unit == "ms" else 0
    return [Cell("" if time is None else f"{time:.{digits}f}") for time in times]


def _places(plan: Plan) -> dict[GroupKey, tuple[int, int, int]]:
    """Return the layer, micro-batch and chunk of each group, counted as the engine does."""
    num_passes: Counter[int] = Counter()
    num_layers: Counter[tuple[int, str]] = Counter()
    micro_batch: dict[int, int] = {}
    places = {}
    for group in sorted(plan.trace.groups, key=lambda group: group.key):
        chunk_pass, chunk = group.key.chunk_pass, group.vp_stage
        if chunk_pass not in micro_batch:
            micro_batch[chunk_pass] = num_passes[chunk]
            num_passes[chunk] += 1
        places[group.key] = num_layers[chunk_pass, group.name], micro_batch[chunk_pass], chunk
        num_layers[chunk_pass, group.name] += 1
    return places


def _late(iteration: Iteration) -> tuple[dict[GroupKey, float], dict[GroupKey, float]]:
    """Return how long compute is predicted to wait for each group's offload and reload."""
    out: dict[GroupKey, float] = defaultdict(float)
    back: dict[GroupKey, float] = defaultdict(float)
    for stall in iteration.simulation.stalls if iteration.is_predicted else ():
        late = out if stall.cause.kind is ActionKind.FREE else back
        late[stall.cause.key] += stall.ms
    return out, back


def _decision(group: GroupPlan) -> str:
    if not group.moves:
        return f"stays: {group.reason}"
    if not group.kept_storages:
        return "moves"
    reasons = "; ".join(sorted(set(group.kept_storages.values())))
    num_kept = len(group.kept_storages)
    stay = "1 storage stays" if num_kept == 1 else f"{num_kept} storages stay"
    return f"moves, but {stay}: {reasons}"
