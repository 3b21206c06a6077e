# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Renders a plan as text: one line per group, with a strip of where its bytes are over time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from megatron.slipstream.plan.actions import Bound, GroupPlan, Plan
from megatron.slipstream.plan.staying import COMMON
from megatron.slipstream.plan.trace import KINDS_OF_BACKWARD, GroupKey, StepKind

HERE = "  <-- here"
LEGEND = "# on the device   > copying out   . on the host   < copying back"

_COMMON = frozenset(kind.text for kind in COMMON)


def format_bytes(nbytes: float) -> str:
    """Format ``nbytes`` in the largest binary unit that keeps the value at 1 or more."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        # Not 1024: values that round up to 1024.0 belong to the next unit.
        if abs(nbytes) < 1023.95 or unit == "GiB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    raise AssertionError("unreachable")


class Unit(NamedTuple):
    """A unit for plotting sizes."""

    name: str
    nbytes: int


def unit_of(nbytes: float) -> Unit:
    """Return the unit for sizes up to ``nbytes``: GiB, unless they are below half of one."""
    for unit in (Unit("GiB", 1 << 30), Unit("MiB", 1 << 20)):
        if nbytes >= 0.5 * unit.nbytes:
            return unit
    return Unit("KiB", 1 << 10)


def render_plan(
    plan: Plan, width: int = 48, max_rows: int = 64, marked: GroupKey | None = None
) -> str:
    """Render a plan as a text grid.

    Args:
        plan: The plan.
        width: Columns of the time strip; each covers an equal share of the iteration's steps.
        max_rows: Maximum number of rows; the remaining groups are summarized in one line.
        marked: A group to highlight. Its row is shown regardless of ``max_rows``.

    Returns:
        The grid, without a trailing newline.
    """
    rows = [["group", "bytes", "D2H", "FREE", "H2D", "use", _phases(plan, width)]]
    shown = list(plan.groups[:max_rows])
    hidden = plan.groups[max_rows:]
    shown += [group for group in hidden if group.key == marked]
    hidden = tuple(group for group in hidden if group.key != marked)
    columns = [_columns(plan, column, width)[0] for column in range(width)]
    rows += [_row(plan, group, columns) for group in shown]
    lines = _align(rows)
    for row, group in enumerate(shown, start=1):
        if group.key == marked:
            lines[row] += HERE
    if hidden:
        lines.append(_rest(hidden))
    return "\n".join([*lines, LEGEND, summarize(plan)])


def summarize(plan: Plan) -> str:
    """Return the bytes moved, the bound and the notes as text without a trailing newline."""
    lines = [_summary(plan)]
    if plan.bound is not None:
        lines.append(_bound(plan.bound))
    return "\n".join([*lines, *_parts_that_stay(plan), *plan.notes])


def _parts_that_stay(plan: Plan) -> list[str]:
    """Say what stays of groups that move, by reason."""
    nbytes: dict[str, dict[int, int]] = {}
    kinds: Counter[str] = Counter()
    for group in plan.groups:
        # An invalid plan, rendered for its error, may name what is not in the trace.
        traced = plan.trace.group_by_key.get(group.key)
        if not group.moves or traced is None:
            continue
        for position, index in enumerate(traced.storages):
            if position in group.kept_storages:
                sizes = nbytes.setdefault(group.kept_storages[position], {})
                sizes[index] = plan.trace.storages[index].nbytes
        kinds.update(kind for kind in traced.stays if kind not in _COMMON)
    return [
        f"of groups that move, {format_bytes(sum(sizes.values()))} stay: {reason}"
        for reason, sizes in nbytes.items()
    ] + [
        f"{number} {'group that moves also saves' if number == 1 else 'groups that move also save'}"
        f" {kind}, which stay"
        for kind, number in kinds.items()
    ]


def _rest(groups: Sequence[GroupPlan]) -> str:
    """Summarize groups without a row: how many move, and why the others stay."""
    num_moving = sum(group.moves for group in groups)
    stay = "".join(f"; {reason}" for reason in why_groups_stay(groups))
    return f"... and {len(groups)} more groups, {num_moving} of which move{stay}"


def why_groups_stay(groups: Sequence[GroupPlan]) -> list[str]:
    """Return the number of groups that stay for each reason, most common first, as text."""
    reasons = Counter(group.reason for group in groups if not group.moves)
    # A group counts as moving even if all its storages stay because of their other holders.
    for group in groups:
        if group.moves and not group.moved_nbytes:
            reasons.update(set(group.kept_storages.values()))
    return [
        f"{number} {'stays' if number == 1 else 'stay'}: {reason}"
        for reason, number in reasons.most_common()
    ]


def _bound(bound: Bound) -> str:
    """Describe how far the plan may be from the optimum."""
    if bound.quantity == "peak_bytes":
        reached, lower = format_bytes(bound.reached), format_bytes(bound.lower)
        return f"predicted peak {reached}; no plan within the overhead can be below {lower}"
    reached, lower = f"{bound.reached:.3f} ms", f"{bound.lower:.3f} ms"
    return f"predicted wait for copies {reached}; no plan with that peak can wait less than {lower}"


def _summary(plan: Plan) -> str:
    num_moving = sum(group.moves for group in plan.groups)
    text = (
        f"{num_moving} of {len(plan.groups)} groups move, "
        f"{format_bytes(plan.moved_nbytes)} each way per iteration"
    )
    peaks = plan.peak_bytes()
    if peaks is not None:
        text += (
            f"; device peak {format_bytes(peaks[0])} -> {format_bytes(peaks[1])} "
            f"({format_bytes(peaks[0] - peaks[1])} less)"
        )
    return text


def _phases(plan: Plan, width: int) -> str:
    """Return the strip's heading: F if most steps of a column are forward, else B."""
    text = ""
    for column in range(width):
        first, last = _columns(plan, column, width)
        steps = plan.trace.steps[first:last]
        num_forward = sum(step.kind not in KINDS_OF_BACKWARD for step in steps)
        text += "F" if 2 * num_forward >= len(steps) else "B"
    return text


def _columns(plan: Plan, column: int, width: int) -> tuple[int, int]:
    num_steps = len(plan.trace.steps)
    first = column * num_steps // width
    return first, max(first + 1, (column + 1) * num_steps // width)


def _row(plan: Plan, group: GroupPlan, columns: Sequence[int]) -> list[str]:
    """Return a group's row; ``columns`` has the first step of each column of the strip."""
    label = f"{group.key}.{group.name}"
    if not group.moves:
        return [label, "-", "", "", "", "", f"stays: {group.reason}"]
    # An invalid plan, rendered for its error, may name groups that are not in the trace.
    start = plan.trace.step_index.get((StepKind.FORWARD_START, group.key), group.commit_step)
    strip = "".join([_mark(group, start, step) for step in columns])
    return [
        label,
        format_bytes(group.moved_nbytes),
        str(group.commit_step),
        str(group.free_step),
        str(group.h2d_step),
        str(group.use_step),
        strip,
    ]


def _mark(group: GroupPlan, start: int, step: int) -> str:
    """Return the character for a group at a step; its forward starts at step ``start``."""
    if step < start or step > group.use_step:
        return " "
    if step < group.commit_step or step == group.use_step:
        return "#"
    if step < group.free_step:
        return ">"
    return "." if step < group.h2d_step else "<"


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:-1], strict=True)]
        lines.append("  ".join([*cells, row[-1]]).rstrip())
    return lines
