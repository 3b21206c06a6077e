# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Cases and recipes are read and compared like those of Megatron-LM's scripts."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import shlex
from pathlib import Path
from typing import Any

import pytest
from forked import run_script
from functional_cases import (
    BYTES_METRICS,
    CASES,
    EXACT_METRICS,
    OFFLOADING_FLAGS,
    RECIPES,
    Result,
    arguments_of,
    command_line,
    compare,
    first_difference,
    load_jobs,
    read_golden,
)

from megatron.slipstream.options.fields import OffloadConfig


def test_without_offloading_a_case_is_otherwise_the_same() -> None:
    own = {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(OffloadConfig)}
    assert own < OFFLOADING_FLAGS
    for job in load_jobs():
        plain, offloading = arguments_of(job, offloads=False), arguments_of(job)
        assert plain == {f: v for f, v in offloading.items() if f not in OFFLOADING_FLAGS}
        assert "--fine-grained-activation-offloading" in offloading


# --- the cases and recipes of this repository -----------------------------------------------------


def test_every_case_is_in_a_recipe_of_its_model_and_every_recipe_has_its_case() -> None:
    jobs = load_jobs()
    folders = {path.parent for path in CASES.glob("*/*/model_config.yaml")}
    assert {job.folder for job in jobs} == folders
    assert {job.platform for job in jobs} == {path.parent.name for path in RECIPES.glob("*/*.yaml")}


def test_a_recipe_starts_its_case_only() -> None:
    ids = [f"{job.case}-{job.platform}" for job in load_jobs()]
    for job in load_jobs():
        run, command, option, name = shlex.split(job.script)
        assert (run, command, option) == ("./run", "functional-tests", "-k")
        assert [one for one in ids if name in one] == [f"{job.case}-{job.platform}"]


def test_every_case_is_deterministic_and_has_its_golden_values() -> None:
    for job in load_jobs():
        assert job.config.ENV_VARS["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == "0"
        golden = read_golden(job.golden_path)
        assert set(golden) == {*EXACT_METRICS, *(BYTES_METRICS if job.platform == "cpu" else ())}


_PARSE = """
import argparse, json, pathlib, sys
from megatron.slipstream.integration.cpu import cpu_only
cpu_only.install_training_shims()
from megatron.training.arguments import add_megatron_arguments
from megatron.slipstream.integration.entry.arguments import add_arguments
parser = argparse.ArgumentParser(allow_abbrev=False)
add_megatron_arguments(parser)
add_arguments(parser)
for words in json.loads(pathlib.Path(sys.argv[1]).read_text()):
    parser.parse_args(words)
"""


def test_the_training_script_knows_every_flag_of_every_case(tmp_path: Path) -> None:
    """All cases, including those for a GPU, which CI does not run."""
    script, lines = tmp_path / "parse.py", tmp_path / "words.json"
    script.write_text(_PARSE)
    lines.write_text(json.dumps([command_line(arguments_of(job), {}) for job in load_jobs()]))
    result = run_script(script, str(lines))
    assert result.returncode == 0, result.stderr[-1000:]


# --- golden values --------------------------------------------------------------------------------

NUM_ITERATIONS = 4


def result_of(
    peak: int = 100, moved: int = 0, num_ranks: int = 2, first: int = 1, pool: int = 0
) -> Result:
    """Records of a training whose values encode rank and iteration."""
    steps = range(first, NUM_ITERATIONS + 1)
    records: list[dict[str, Any]] = [
        {
            "iterations": [
                {
                    "loss": 5.0 - step / 8 if rank == num_ranks - 1 else None,
                    "activation_peak_bytes": peak + rank - pool,
                    "graph_pool_bytes": pool,
                    "bytes_offloaded": moved,
                }
                for step in steps
            ],
            "gradients_sha256": f"g{rank}",
            "weights_sha256": f"w{rank}",
        }
        for rank in range(num_ranks)
    ]
    return Result(records, dict.fromkeys(steps, 2.0), NUM_ITERATIONS)


def steps(*values: float) -> dict[int, float]:
    return dict(enumerate(values, start=1))


GOLDEN = steps(4.0, 3.0, 2.0)


@pytest.mark.parametrize("now", [steps(4.0, 3.00001, 2.0), steps(4.0, 3.0), steps(math.nan)])
def test_an_exact_metric_has_to_be_the_same(now: dict[int, float]) -> None:
    assert compare(GOLDEN, now, exact=True)
    assert not compare(GOLDEN, dict(GOLDEN), exact=True)


def test_other_values_may_differ_by_five_percent_and_one_of_them_by_more() -> None:
    assert not compare(GOLDEN, steps(4.19, 2.86, 2.0), exact=False)
    assert not compare(GOLDEN, steps(4.0, 9.0, 2.0), exact=False)
    assert compare(GOLDEN, steps(9.0, 9.0, 2.0), exact=False) == [1, 2]
    assert compare(GOLDEN, steps(4.0), exact=False) == [2, 3]
    assert compare(steps(4.0), steps(4.3), exact=False)


# --- against the training without offloading ------------------------------------------------------


@pytest.mark.parametrize(
    "rank, where, value, told",
    [
        (1, ("iterations", 2, "loss"), 4.625 + 2**-40, "loss differs in iteration 3"),
        (0, ("gradients_sha256",), "x", "gradients of rank 0"),
        (1, ("weights_sha256",), "x", "weights of rank 1"),
        (1, ("weights_sha256",), None, "weights of rank 1"),
    ],
)
def test_any_bit_of_difference_is_one(
    rank: int, where: tuple[Any, ...], value: object, told: str
) -> None:
    assert first_difference(result_of(), result_of(peak=50, moved=8)) is None
    changed = copy.deepcopy(result_of(peak=50, moved=8))
    inner: Any = changed.records[rank]
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = value
    assert told in (first_difference(result_of(), changed) or "")


def test_a_resumed_training_is_compared_where_both_have_been() -> None:
    again = result_of(first=3)
    assert list(again.by_iteration("loss")) == [3, 4]
    assert first_difference(result_of(), again) is None
    again.records[-1]["iterations"][0]["loss"] = 1.0
    assert "iteration 3" in (first_difference(result_of(), again) or "")
