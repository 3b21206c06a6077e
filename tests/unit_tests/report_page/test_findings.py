# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Faults of a run are found, with a cure; a run without faults has no finding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from reported_runs import make_run, with_waits

from megatron.slipstream.fine_grained_activation_offload.report import (
    ModuleCounters,
    RankReport,
    Report,
)
from megatron.slipstream.plan.candidates import PolicyOptions
from megatron.slipstream.report_page.findings import CHECKS, RunFinding, findings, next_step

GIB = 1 << 30


def found(rank: RankReport) -> list[RunFinding]:
    return findings(Report([rank]))


def good_rank() -> RankReport:
    return make_run().rank


def test_nothing_is_found_in_a_good_run() -> None:
    assert good_rank().d2h_bytes > 0
    assert found(good_rank()) == []


MODULE = ModuleCounters(num_groups=4, num_groups_moved=4, d2h_bytes=100, freed_bytes=100)
WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "warning": ({"warnings": {"rank 0: it is late; do this": 1}}, "it is late; do this", ""),
    "note": ({"notes": ["offload_x is not followed"]}, "offload_x is not followed", ""),
    "late": (
        {"modules": {"core_attn": replace(MODULE, num_late=2)}, "late_groups": {"0.3": 2}},
        "Copies back started only when backward needed them",
        "2 in the last iteration (core_attn: 2; groups 0.3)",
    ),
    "waits": (
        {"measured_ms": 100.0, "planned_ms": 100.0, "modules": {"a": replace(MODULE, stall_ms=2)}},
        "Compute waits for copies",
        "2.0 of 100.0 ms (2.0%): a 2.0 ms",
    ),
    "slower": (
        {"measured_ms": 110.0, "planned_ms": 100.0},
        "The iteration takes longer than planned",
        "110.0 ms, 100.0 ms planned",
    ),
    "peak": (
        {"planned_peak_bytes": 10 * GIB, "step_peak_bytes": [GIB, 11 * GIB]},
        "The device peak is higher than planned",
        "11.0 GiB, 10.0 GiB planned",
    ),
    "target": (
        {
            "options": PolicyOptions(target_memory_bytes=9 * GIB),
            "planned_peak_bytes": 10 * GIB,
            "step_peak_bytes": [10 * GIB],
        },
        "The target for the device peak is missed",
        "10.0 GiB, the target is 9.0 GiB",
    ),
    "host limit": (
        {"num_kept_for_host_memory": 3, "host_memory_limit_bytes": GIB},
        "Groups stay on the device because host memory is short",
        "3 groups, the limit is 1.0 GiB",
    ),
    "host growth": (
        {"host_growth_bytes": GIB},
        "Host memory still grows",
        "1.0 GiB new in iteration 20",
    ),
    "plans": (
        {"num_plans": 10},
        "Iterations differ, so plans are rebuilt repeatedly",
        "10 plans in 20 iterations",
    ),
    "nothing moves": ({"modules": {"a": ModuleCounters(num_groups=4)}}, "Nothing moves", ""),
    "nothing has to move": (
        {
            "modules": {"a": ModuleCounters(num_groups=4)},
            "options": PolicyOptions(target_memory_bytes=9 * GIB),
            "planned_peak_bytes": 8 * GIB,
            "step_peak_bytes": [8 * GIB],
        },
        "Nothing needs to move",
        "8.0 GiB, the target is 9.0 GiB",
    ),
    "waste": (
        {"host_waste_bytes": GIB, "host_high_water_bytes": 2 * GIB},
        "Host memory is fragmented",
        "1.0 GiB was unusable at the peak in use (50% of it)",
    ),
    "unfreed": (
        {"modules": {"core_attn": replace(MODULE, freed_bytes=90)}},
        "Copies that freed no device memory",
        "core_attn: 10 B of 100 B",
    ),
    "untimed": ({"measured_ms": 0.0, "planned_ms": 0.0}, "Nothing was timed", ""),
}


@pytest.mark.parametrize("changes, title, detail", WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_found_alone_with_its_figures(
    changes: dict[str, Any], title: str, detail: str
) -> None:
    ((finding, details),) = found(replace(good_rank(), **changes))
    assert finding.message == title
    assert details == (((0,), detail),)
    # A warning's own text has the cure.
    assert bool(finding.cure) == (title[0].isupper())


ALMOST: dict[str, dict[str, Any]] = {
    "waits": {
        "measured_ms": 100.0,
        "planned_ms": 100.0,
        "modules": {"a": replace(MODULE, stall_ms=1)},
    },
    "slower": {"measured_ms": 105.0, "planned_ms": 100.0},
    "peak": {"planned_peak_bytes": 100, "step_peak_bytes": [102]},
    "peak with the optimizer's state": {
        "planned_peak_bytes": 100,
        "step_peak_bytes": [150],
        "later_bytes": 50,
    },
    "target": {
        "options": PolicyOptions(target_memory_bytes=100),
        "planned_peak_bytes": 100,
        "step_peak_bytes": [100],
    },
    "the engine has warned of the limit": {
        "num_kept_for_host_memory": 3,
        "warnings": {"offload_host_memory_limit_bytes=3 (3 B) is less than ...": 1},
    },
    "host growth of a cold run": {"host_growth_bytes": GIB, "num_iterations": 3},
    "plans": {"num_plans": 8},
    "plans of a long run": {"num_plans": 30, "num_iterations": 200},
    "graphs move": {"modules": {}, "graphs": {"a": MODULE}},
    "waste": {"host_waste_bytes": GIB, "host_high_water_bytes": 4 * GIB},
    "unfreed": {"modules": {"core_attn": replace(MODULE, freed_bytes=95)}},
}


@pytest.mark.parametrize("changes", ALMOST.values(), ids=ALMOST)
def test_what_is_not_quite_wrong_is_not_found(changes: dict[str, Any]) -> None:
    warned = len(changes.get("warnings", ()))
    assert len(found(replace(good_rank(), **changes))) == warned


def test_every_check_is_tried_here() -> None:
    for check in CHECKS:
        ranks = [replace(good_rank(), **changes) for changes, _, _ in WRONG.values()]
        assert any(list(check(rank)) for rank in ranks), check.__name__


def test_a_note_that_was_warned_of_is_told_once() -> None:
    rank = replace(good_rank(), notes=["it is so"], warnings={"rank 0: it is so": 2})
    (finding,) = found(rank)
    assert finding.details == (((0,), "2 times"),)


def test_the_same_on_several_ranks_is_one_finding_with_the_ranks_that_agree() -> None:
    ranks = [replace(good_rank(), rank=number) for number in range(4)]
    for rank, measured_ms in zip(ranks, (110.0, 0.0, 110.0, 120.0), strict=True):
        rank.measured_ms, rank.planned_ms = measured_ms, 100.0 if measured_ms else 0.0
    slow, untimed = findings(Report(ranks))
    assert slow.details == (
        ((0, 2), "110.0 ms, 100.0 ms planned"),
        ((3,), "120.0 ms, 100.0 ms planned"),
    )
    assert (slow.finding.severity, untimed.finding.severity) == ("warning", "note")
    assert untimed.details == (((1,), ""),)


def test_many_late_groups_are_not_all_named() -> None:
    late = {f"0.{place}": 20 - place for place in range(9)}
    modules = {"core_attn": replace(MODULE, num_late=9)}
    (finding,) = found(replace(good_rank(), modules=modules, late_groups=late))
    ((_, detail),) = finding.details
    assert "groups 0.0, 0.1, 0.2, 0.3, 0.4, 0.5 and 3 more" in detail


def test_waits_are_named_by_module_the_longest_first() -> None:
    run = make_run()
    steps = run.plan.trace.steps
    places = {step.name: place for place, step in enumerate(steps)}
    run = with_waits(run, {places["core_attn"]: 1.0, places["moe_act"]: 2.0})
    rank = replace(run.rank, planned_ms=run.rank.measured_ms)
    (finding,) = found(rank)
    assert "moe_act 2.0 ms, core_attn 1.0 ms" in finding.details[0][1]


def test_a_run_that_never_began_has_nothing_wrong() -> None:
    assert found(RankReport()) == []
    assert findings(Report([])) == []


# The next step.


def test_the_next_step_is_the_cure_of_the_first_problem() -> None:
    rank = replace(good_rank(), num_plans=10, host_waste_bytes=GIB, host_high_water_bytes=2 * GIB)
    (problem, _), (note, _) = found(rank)
    assert (problem.severity, note.severity) == ("warning", "note")
    assert next_step(Report([rank])) == f"{problem.message}. {problem.cure}"
    # A warning's own text has the cure.
    assert next_step(Report([replace(rank, warnings={"set this": 1})])) == "set this"


@pytest.mark.parametrize(
    "changes, step",
    [
        (
            {"baseline_peak_bytes": 3 * GIB, "planned_peak_bytes": GIB},
            "every rank has at least 2.0 GiB",
        ),
        (
            {"baseline_peak_bytes": GIB, "planned_peak_bytes": GIB},
            "the device peak of a rank does not",
        ),
        (
            {"baseline_peak_bytes": 0, "planned_peak_bytes": 0},
            "device memory was not measured; peak_drop is counted from saved tensors. Train",
        ),
        (
            {"baseline_peak_bytes": 0, "modules": {"a": replace(MODULE, peak_drop_bytes=GIB)}},
            "device memory was not measured; peak_drop is counted",
        ),
        ({"num_iterations": 0}, "train for 5 iterations or more"),
    ],
)
def test_a_run_without_problems_has_a_next_step(changes: dict[str, Any], step: str) -> None:
    other = replace(good_rank(), rank=1, baseline_peak_bytes=9 * GIB, planned_peak_bytes=GIB)
    if "num_iterations" in changes:
        other.num_iterations = 0
    ranks = [
        replace(good_rank(), step_peak_bytes=[], **changes),
        replace(other, step_peak_bytes=[]),
    ]
    assert next_step(Report(ranks)).startswith(step)


def test_the_next_step_is_of_the_figures_that_are_shown() -> None:
    peaks = {"baseline_peak_bytes": 900 * GIB, "planned_peak_bytes": 500 * GIB}
    (planned, measured) = (
        replace(good_rank(), step_peak_bytes=peak, later_bytes=0, **peaks)
        for peak in ([], [505 * GIB])
    )
    assert "at least 400.0 GiB of freed" in next_step(Report([planned]))
    assert "at least 395.0 GiB of freed" in next_step(Report([planned, measured]))
    modules = {"a": replace(MODULE, peak_drop_bytes=2 * GIB)}
    counted = replace(good_rank(), modules=modules, baseline_peak_bytes=0, planned_peak_bytes=0)
    assert "peak_drop (2.0 GiB or more) is counted" in next_step(Report([counted]))


def test_the_numa_node_is_shown_where_the_cure_says() -> None:
    (finding, _), *_ = found(replace(good_rank(), measured_ms=200.0, planned_ms=100.0))
    assert finding.message == "The iteration takes longer than planned"
    assert "slipstream doctor" in finding.cure


def test_a_report_of_no_rank_has_a_next_step() -> None:
    assert next_step(Report([])).startswith("train for 5 iterations")
