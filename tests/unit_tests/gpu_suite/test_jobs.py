# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Jobs of the GPU suite, and their order."""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from forked import run_module

from benchmarks.cases import CASES, select_variants
from tools.gpu_suite.jobs import JOBS, RELEASES, SHARES, Job, in_order, next_job, select

ROOT = Path(__file__).resolve().parents[3]


def job(name: str, num_gpus: int, seconds: int = 10, shares: int = SHARES) -> Job:
    return Job(name, num_gpus, seconds, ("true",), shares=shares)


def test_names_are_those_of_one_job_each() -> None:
    names = [job.name for job in JOBS]
    assert len(set(names)) == len(names)


def test_patterns_choose_jobs() -> None:
    assert [job.name for job in select(["bench:moe_long:*"])] == [
        "bench:moe_long:core_attn+expert_fc1",
        "bench:moe_long:moe_act",
        "bench:moe_long:all",
    ]
    assert select([]) == list(JOBS)


def test_a_pattern_without_a_job_names_those_that_are_near() -> None:
    with pytest.raises(ValueError, match="no job is called attach; near: attached"):
        select(["tests", "attach"])


def test_every_set_of_modules_of_every_case_is_measured() -> None:
    benches = [job for job in JOBS if job.name.startswith("bench:")]
    on_gpus = [case for case in CASES if case.needs_gpu]
    assert len(benches) == sum(len(case.variants) for case in on_gpus)
    for bench in benches:
        words = list(bench.command)
        case = next(c for c in on_gpus if c.name == words[words.index("--case") + 1])
        assert len(select_variants(case, [words[words.index("--modules") + 1]])) == 1
        assert bench.num_gpus == case.num_ranks


def test_ranks_share_gpus_in_what_measures_nothing() -> None:
    test = job("tests", num_gpus=4, seconds=10, shares=2).on_fewer_gpus(2)
    assert (test.num_gpus, test.shares, test.ranks_per_gpu) == (2, 4, 2)
    assert job("tests", num_gpus=2, shares=5).on_fewer_gpus(8).num_gpus == 1
    measuring, single = job("bench", num_gpus=2), job("tests", num_gpus=1, shares=4)
    assert measuring.on_fewer_gpus(2) == measuring
    assert single.on_fewer_gpus(4) == single


def test_every_functional_case_with_golden_values_of_a_gpu_is_run() -> None:
    cases = ROOT / "tests" / "functional_tests" / "test_cases"
    recorded = {path.parent.name for path in cases.rglob("golden_values_*_h200.json")}
    assert "gpt3_cuda_graph_offload" in recorded
    jobs = [job for job in JOBS if job.name.startswith("functional:")]
    assert recorded <= {job.command[3] for job in jobs}
    with_pipelines = {job.command[3]: job.num_gpus for job in jobs}
    assert with_pipelines["gpt3_pp2_offload"] == 2


def test_every_gpu_test_is_in_one_job_of_each_release(tmp_path: Path) -> None:
    marks_path = tmp_path / "marks.json"
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text()]
    done = run_module(
        "pytest",
        *("-q", "--collect-only", "-p", "lists_marks"),
        *map(str, files),
        folder=ROOT,
        environment={
            "LISTS_MARKS_PATH": str(marks_path),
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
    )
    assert done.returncode == 0, done.stdout
    marks = {
        test: set(names)
        for test, names in json.loads(marks_path.read_text()).items()
        if {"gpu", "gpus2", "gpus4"} & set(names)
    }
    for release in RELEASES:
        jobs = [job for job in JOBS if job.release == release and job.name.startswith("tests")]
        chosen: list[str] = []
        for job in jobs:
            wanted = job.command[job.command.index("-m", 2) + 1]
            tests = [test for test, names in marks.items() if _fits(wanted, names)]
            assert tests, f"{job.name} has nothing to run"
            chosen += tests
        expected = [test for test, names in marks.items() if not release or "releases" in names]
        assert sorted(chosen) == sorted(expected)


def _fits(wanted: str, marks: set[str]) -> bool:
    """``pytest -m`` takes a Python expression; marks that are not there are False."""
    return bool(eval(wanted, {}, defaultdict(bool, dict.fromkeys(marks, True))))


def test_what_measures_has_its_gpus_to_itself_and_nothing_else_has() -> None:
    tests = ("tests", "tests-two-gpus", "tests-four-gpus", "functional")
    for one in JOBS:
        assert (one.shares < SHARES) == (one.name.partition(":")[0] in tests), one.name


def test_those_that_share_come_first_then_those_that_need_most_gpus_then_the_longest() -> None:
    alone = [job("short", 1, 5), job("long", 1, 50), job("pair", 2)]
    sharing = [job("sharing pair", 2, 5, 2), job("sharing", 1, 50, 2)]
    names = [job.name for job in in_order([*alone, *sharing])]
    assert names == ["sharing", "sharing pair", "pair", "long", "short"]


def test_smaller_jobs_do_not_keep_a_larger_one_waiting() -> None:
    pair, one = job("pair", 2), job("one", 1)
    assert next_job([pair, one], {0: SHARES, 1: 0}, seconds_left=100) is None
    assert next_job([pair, one], {0: SHARES, 1: SHARES}, seconds_left=100) == (pair, (0, 1))
    assert next_job([one], {0: 0, 1: SHARES}, seconds_left=100) == (one, (1,))


def test_what_shares_goes_where_most_is_left_and_what_does_not_where_nothing_runs() -> None:
    small, alone = job("small", 1, shares=4), job("alone", 1)
    assert next_job([small], {0: 4, 1: 8}, seconds_left=100) == (small, (1,))
    assert next_job([small], {0: 3, 1: 3}, seconds_left=100) is None
    assert next_job([alone], {0: 4, 1: 11}, seconds_left=100) is None


def test_what_would_be_cut_off_gives_way_to_what_would_not() -> None:
    long, short = job("long", 2, 50), job("short", 1, 5)
    free = {0: SHARES, 1: SHARES}
    assert next_job([long, short], {0: SHARES, 1: 0}, seconds_left=20) == (short, (0,))
    assert next_job([long, short], free, seconds_left=4) is None
