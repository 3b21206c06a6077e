# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""By how much each rank's peak drops, and by how much it could. Needs no torch.

What could drop is what a plan moves, in unique bytes: of the storages that leave, the most that are
saved at once and not just being used. The group whose backward runs is on the device in any case.
(PR 1752 of megatron-core reckons alike: of 10 and 6 layers in flight, 9 and 5.)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Optional

from benchmarks.rows import Row
from megatron.slipstream.plan.actions import Plan
from megatron.slipstream.plan.build import build_plan
from megatron.slipstream.plan.candidates import PolicyOptions
from megatron.slipstream.plan.trace import StepKind

OURS = "slipstream"


def theoretical_drop_bytes(plan: Plan) -> int:
    """The most bytes of what the plan moves that are saved, and not being used, at one step."""
    # A pass's backward begins with the use of its newest group: no time lies between for that to
    # come back in.
    kinds = (step.kind for step in plan.trace.steps)
    counts = [0, *itertools.accumulate(kind is not StepKind.BACKWARD_START for kind in kinds)]
    change = [0] * (counts[-1] + 1)
    for storage in plan.storages:
        # It cannot be gone as long as something else than the groups keeps it.
        lingers_until = plan.trace.storages[storage.index].lingers_until
        start = counts[max(storage.d2h_step + 1, lingers_until)]
        use = counts[storage.use_step]
        if start < use:
            change[start] += storage.nbytes
            change[use] -= storage.nbytes
    return max(itertools.accumulate(change), default=0)


def drop_fields(plan: Plan) -> dict[str, int]:
    """Of a summary row: what could drop by the plan, and if all that is marked and can move did."""
    # Without times, so that nothing is kept for being dear.
    trace = replace(plan.trace, step_ms=(), bandwidth=None)
    everything = build_plan(trace, PolicyOptions())
    return {
        "theoretical_drop_bytes": theoretical_drop_bytes(plan),
        "movable_drop_bytes": theoretical_drop_bytes(everything),
    }


def drop_rows(summaries: Iterable[Row]) -> list[dict[str, Any]]:
    """A row for each variant, engine of ours and rank, with the other engines' figures beside it.

    Args:
        summaries: Of one case. Those without a peak are passed over.
    """
    measured = [row for row in summaries if row.get("peak_bytes") is not None]
    by_place = {(row["variant"], row["engine"], row["rank"]): row for row in measured}
    rows = []
    for row in measured:
        base = by_place.get((row["variant"], "off", row["rank"]))
        if row["engine"].partition(":")[0] != OURS or base is None:
            continue
        others = by_place.get((row["variant"], "megatron", row["rank"]))
        theoretical, movable = row.get("theoretical_drop_bytes"), row.get("movable_drop_bytes")
        ours, builtin = _drop(base, row), _drop(base, others)
        rows.append(
            {
                **{name: row[name] for name in ("variant", "engine", "rank")},
                "off_peak_bytes": base["peak_bytes"],
                "peak_bytes": row["peak_bytes"],
                "drop_bytes": ours,
                "theoretical_drop_bytes": theoretical,
                "drop_percent": _percent(ours, theoretical),
                "builtin_peak_bytes": None if others is None else others["peak_bytes"],
                "builtin_drop_bytes": builtin,
                "movable_drop_bytes": movable,
                "builtin_drop_percent": _percent(builtin, movable),
            }
        )
    return rows


def _drop(base: Row, row: Optional[Mapping[str, Any]]) -> Optional[int]:
    return None if row is None else base["peak_bytes"] - row["peak_bytes"]


def _percent(part: Optional[int], whole: Optional[int]) -> Optional[float]:
    return None if part is None or not whole else 100 * part / whole
