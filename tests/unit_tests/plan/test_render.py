# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A drawn plan shows the plan's steps."""

from __future__ import annotations

import dataclasses

import pytest
from make_trace import Model, one_f_one_b, one_pass, trace_of

from megatron.slipstream.plan.actions import Bound, GroupPlan, Plan
from megatron.slipstream.plan.build import build_plan
from megatron.slipstream.plan.candidates import BACKWARD_FOLLOWS, NO_TIME, PolicyOptions
from megatron.slipstream.plan.render import LEGEND, format_bytes, render_plan
from megatron.slipstream.plan.trace import MemoryReading, StepKind, Trace

FOUR_LAYERS = one_pass(Model(num_layers=4))

GOLDEN = """\
group           bytes  D2H  FREE  H2D  use  FFFFFFFFBBBB
0.0.core_attn  1000 B    1     5    9   11  #>>>>....<<#
0.1.core_attn  1000 B    3     7    8   10    #>>>>.<<#
0.2.core_attn       -                       stays: backward needs it before it could have left
0.3.core_attn       -                       stays: its backward follows before another layer \
hides the copies
# on the device   > copying out   . on the host   < copying back
2 of 4 groups move, 2.0 KiB each way per iteration"""


def strips(plan: Plan, width: int) -> dict[str, str]:
    """The time strips of the groups that move, by the group's label."""
    head, *rows = render_plan(plan, width, max_rows=10_000).split("\n")
    start = head.rindex(" ") + 1
    moving = {f"{group.key}.{group.name}" for group in plan.groups if group.moves}
    by_label = {row.split(" ", 1)[0]: row[start:].ljust(width) for row in rows}
    return {label: by_label[label] for label in moving}


def heading(plan: Plan, width: int) -> str:
    """The heading of the time strips."""
    return render_plan(plan, width).split("\n")[0].split()[-1]


def residence(plan: Plan, group: GroupPlan, step: int) -> str:
    """The legend's sign for the place of a group's bytes, from the plan's step numbers alone."""
    start = plan.trace.step_index[StepKind.FORWARD_START, group.key]
    bounds = [start, group.commit_step, group.free_step, group.h2d_step, group.use_step]
    return " #>.<#"[sum(bound <= step for bound in bounds)] if step <= group.use_step else " "


def test_a_small_plan_is_drawn_like_this() -> None:
    plan = build_plan(FOUR_LAYERS, PolicyOptions(release_lag=2, prefetch_depth=2))
    assert render_plan(plan, width=12) == GOLDEN


@pytest.mark.parametrize("lag, depth", [(0, 0), (1, 1), (3, 2)])
def test_with_a_column_per_step_the_strip_shows_every_residence(lag: int, depth: int) -> None:
    trace = trace_of(one_f_one_b(4, 1, 4), Model(modules=("qkv_linear", "core_attn")))
    plan = build_plan(trace, PolicyOptions(release_lag=lag, prefetch_depth=depth))
    steps = range(len(trace.steps))
    expected = {
        f"{group.key}.{group.name}": "".join(residence(plan, group, step) for step in steps)
        for group in plan.groups
        if group.moves
    }
    assert expected
    assert strips(plan, len(trace.steps)) == expected


def test_a_column_of_several_steps_shows_its_first() -> None:
    plan = build_plan(FOUR_LAYERS, PolicyOptions())
    fine, coarse = strips(plan, 12), strips(plan, 4)
    assert coarse == {label: strip[::3] for label, strip in fine.items()}


def test_the_heading_shows_where_a_column_is_mostly_forward() -> None:
    # Steps 0 to 7 are forward, 8 to 11 backward.
    plan = build_plan(FOUR_LAYERS, PolicyOptions())
    assert [heading(plan, width) for width in (3, 12, 24)] == [
        "FFB",
        "FFFFFFFFBBBB",
        "F" * 16 + "B" * 8,
    ]


def test_the_heading_of_an_evenly_mixed_column_is_forward() -> None:
    # Of 9 steps, the fourth of five columns has steps 5, forward, and 6, backward.
    plan = build_plan(one_pass(Model(num_layers=3)), PolicyOptions())
    assert heading(plan, 5) == "FFFFB"


def test_rows_beyond_the_limit_are_summed_up() -> None:
    plan = build_plan(one_pass(Model(num_layers=7)), PolicyOptions())
    lines = render_plan(plan, max_rows=2).split("\n")
    # Of groups 2 to 6, the last layer stays.
    assert [line.split()[0] for line in lines[1:3]] == ["0.0.core_attn", "0.1.core_attn"]
    rest = f"... and 5 more groups, 4 of which move; 1 stays: {BACKWARD_FOLLOWS}"
    assert lines[3:5] == [rest, LEGEND]
    # The sum is of all groups, shown or not.
    assert lines[5].startswith("6 of 7 groups move, 5.9 KiB each way")


@pytest.mark.parametrize("max_rows", [1, 4, 10])
def test_a_marked_group_is_pointed_at_whatever_the_limit(max_rows: int) -> None:
    plan = build_plan(one_pass(Model(num_layers=7)), PolicyOptions())
    lines = render_plan(plan, max_rows=max_rows, marked=plan.groups[3].key).split("\n")
    assert [line.split()[0] for line in lines if line.endswith("  <-- here")] == ["0.3.core_attn"]
    num_shown = max(max_rows, 1) + (max_rows <= 3)
    if max_rows < 7:
        assert f"... and {7 - num_shown} more groups" in "\n".join(lines)


def test_all_rows_are_shown_up_to_the_limit() -> None:
    plan = build_plan(FOUR_LAYERS, PolicyOptions())
    assert "more groups" not in render_plan(plan, max_rows=4)


def test_a_group_that_stays_shows_its_reason() -> None:
    plan = build_plan(FOUR_LAYERS, PolicyOptions(release_lag=2))
    (row,) = (line for line in render_plan(plan).split("\n") if line.startswith("0.2."))
    assert row.endswith("stays: " + NO_TIME)


def test_the_summary_shows_the_peaks_where_memory_was_read() -> None:
    mib = 1 << 20
    model = Model(num_layers=4, saves={0: ("x",)}, nbytes={"x": 100 * mib})
    memory = tuple(MemoryReading(0, peak * mib, 0) for peak in [0, 0, 0, 0, 0, 0, 0, 300] + [0] * 4)
    trace = dataclasses.replace(one_pass(model), memory=memory)
    last = render_plan(build_plan(trace, PolicyOptions())).split("\n")[-1]
    assert "device peak 300.0 MiB -> 200.0 MiB (100.0 MiB less)" in last


@pytest.mark.parametrize(
    "bound, text",
    [
        (
            Bound("peak_bytes", lower=3 << 29, reached=2 << 30),
            "predicted peak 2.0 GiB; no plan within the overhead can be below 1.5 GiB",
        ),
        (
            Bound("stall_ms", lower=0.25, reached=1.5),
            "predicted wait for copies 1.500 ms; no plan with that peak can wait less than "
            "0.250 ms",
        ),
    ],
)
def test_how_far_the_best_plan_may_be_is_shown(bound: Bound, text: str) -> None:
    plan = dataclasses.replace(build_plan(FOUR_LAYERS, PolicyOptions()), bound=bound)
    assert render_plan(plan).split("\n")[-1] == text


def test_an_empty_plan_can_be_drawn() -> None:
    lines = render_plan(build_plan(Trace((), (), ()), PolicyOptions())).split("\n")
    assert lines[-1] == "0 of 0 groups move, 0 B each way per iteration"


@pytest.mark.parametrize(
    "nbytes, text",
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1 << 20, "1.0 MiB"),
        (5 * (1 << 29), "2.5 GiB"),
        # There is no larger unit, so that memory is always compared in GiB.
        (1 << 42, "4096.0 GiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_bytes_are_written_in_the_largest_unit_that_fits(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text
