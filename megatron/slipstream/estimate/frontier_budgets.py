# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Memory versus time of a model that has not run, for budgets of memory and the usual ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Optional

from megatron.slipstream.estimate.fit import Finder, Row
from megatron.slipstream.estimate.frontier import (
    NUM_POINTS,
    Frontier,
    FrontierPoint,
    Marker,
    bytes_to_type,
    mark_pareto,
)
from megatron.slipstream.estimate.ways import BUDGET, OFF, WAYS


def sweep_budgets(
    finder: Finder,
    num_points: int = NUM_POINTS,
    progress: Optional[Callable[[int, int], None]] = None,
) -> Frontier:
    """Choose what is kept, offloaded, recomputed and tiled for a range of budgets.

    Args:
        finder: The model at the size to plan, and host memory; its device limit does not apply.
        num_points: Budgets, from the least that the model can take to what it takes as it is; 2
            or more.
        progress: Called before each budget and at the end with the number of finished ones and the
            total.

    Returns:
        The budgets that any choice keeps to, and a marker for each way that is compared.
    """
    size: int = getattr(finder.configured.shape, finder.searched)
    model = finder.model(size)
    rows = {way: Row.of(model.fixed(way)) for way in WAYS if way != BUDGET}
    off = rows[OFF]
    low = model.least().usage.parts.total
    high, state = off.usage.parts.total, off.usage.parts.state
    report = progress or (lambda done, total: None)
    points: list[FrontierPoint] = []
    for place in range(num_points):
        report(place, num_points)
        # Closer together where memory is short, since time changes most there.
        share = (place / (num_points - 1)) ** 2
        budget = bytes_to_type(low + (high - low) * share - state)
        limited = replace(finder, limits=replace(finder.limits, device_bytes=state + budget))
        row = limited.at(BUDGET, size)
        if row is not None:
            points.append(_point(budget, row, off.step_ms))
    report(num_points, num_points)
    markers = tuple(_markers(rows, off.step_ms))
    return Frontier(mark_pareto(points), off.step_ms, True, markers)


def _point(value: int, row: Row, compute_ms: float) -> FrontierPoint:
    return FrontierPoint(
        option="activation_memory_budget",
        value=value,
        peak_bytes=row.usage.parts.total,
        total_ms=row.step_ms,
        overhead_percent=_percent(row, compute_ms),
        moved_nbytes=row.usage.moved_bytes,
        peak_host_bytes=row.usage.host_bytes,
        text=row.label,
    )


def _markers(rows: dict[str, Row], compute_ms: float) -> Iterator[Marker]:
    for way, row in rows.items():
        yield Marker(way, row.usage.parts.total, row.step_ms, _percent(row, compute_ms))


def _percent(row: Row, compute_ms: float) -> float:
    return 100 * (row.step_ms / compute_ms - 1)
