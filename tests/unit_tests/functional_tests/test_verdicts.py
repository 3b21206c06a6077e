# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Comparison with golden values, and with the run without offloading."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest

from tools.functional_tests.cases import Case, ModelConfig
from tools.functional_tests.checks import (
    first_difference,
    golden_rows,
    metrics_of,
    offloading_rows,
    resume_row,
)
from tools.functional_tests.golden import compare, measured, read_golden, write_golden
from tools.functional_tests.launch import Result

NUM_ITERATIONS = 4


def result_of(
    peak: int = 100, moved: int = 0, num_ranks: int = 2, first: int = 1, pool: int = 0
) -> Result:
    """Of a training in which a rank's figures tell which rank and iteration they are of."""
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


def case_of(metrics: tuple[str, ...] = ("lm loss", "num-zeros"), **variables: str) -> Case:
    arguments = {"--train-iters": "4", "--fine-grained-activation-offloading": "true"}
    config = ModelConfig(
        MODEL_ARGS=arguments, ENV_VARS=variables, TEST_TYPE="regular", METRICS=metrics
    )
    return Case("gpt", "a_case", config, Path())


# --- golden values --------------------------------------------------------------------------------


def test_metrics_are_of_the_right_ranks_and_have_five_decimals() -> None:
    result = result_of(peak=100, moved=7)
    result.records[-1]["iterations"][0]["loss"] = 4.123456789
    metrics = measured(result)
    assert metrics["lm loss"][1] == 4.12346
    assert metrics["lm loss"][4] == 4.5
    assert metrics["num-zeros"] == {1: 2.0, 2: 2.0, 3: 2.0, 4: 2.0}
    assert metrics["activation-peak-bytes"][2] == 101
    assert metrics["offloaded-bytes"][3] == 14


def test_a_file_of_golden_values_is_in_megatrons_format(tmp_path: Path) -> None:
    path = tmp_path / "golden_values_dev_cpu.json"
    write_golden(path, {"lm loss": {1: 4.5, 2: 4.25}})
    assert json.loads(path.read_text()) == {
        "lm loss": {
            "start_step": 1,
            "end_step": 2,
            "step_interval": 1,
            "values": {"1": 4.5, "2": 4.25},
        }
    }
    assert read_golden(path) == {"lm loss": {1: 4.5, 2: 4.25}}


def test_a_file_that_is_not_in_the_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "golden.json"
    path.write_text('{"lm loss": [1, 2]}')
    with pytest.raises(ValueError, match="golden.json.*--record"):
        read_golden(path)


def _steps(*values: float) -> dict[int, float]:
    return dict(enumerate(values, start=1))


GOLDEN = _steps(4.0, 3.0, 2.0)


@pytest.mark.parametrize("now", [_steps(4.0, 3.00001, 2.0), _steps(4.0, 3.0), _steps(math.nan)])
def test_a_deterministic_loss_has_to_be_the_same(now: dict[int, float]) -> None:
    assert compare("lm loss", GOLDEN, now, is_deterministic=True)
    assert not compare("lm loss", GOLDEN, dict(GOLDEN), is_deterministic=True)


def test_other_values_may_differ_by_five_percent_and_one_of_them_by_more() -> None:
    for metric, deterministic in (("lm loss", False), ("offloaded-bytes", True)):
        assert not compare(metric, GOLDEN, _steps(4.19, 2.86, 2.0), deterministic)
        assert not compare(metric, GOLDEN, _steps(4.0, 9.0, 2.0), deterministic)
        assert len(compare(metric, GOLDEN, _steps(9.0, 9.0, 2.0), deterministic)) == 2
        assert len(compare(metric, GOLDEN, _steps(4.0), deterministic)) == 2
        assert compare(metric, _steps(4.0), _steps(4.3), deterministic)


def test_the_first_step_that_differs_is_told() -> None:
    golden = measured(result_of(moved=1))
    golden["lm loss"] = {**golden["lm loss"], 3: 9.0, 4: 9.0}
    loss, zeros, *_ = golden_rows(case_of(), "cpu", golden, result_of(moved=1))
    assert (loss.passed, loss.golden, loss.now) == (False, "9", "4.625")
    assert "2 of 4 steps, first in 3" in loss.verdict
    assert zeros.passed


def test_a_metric_without_a_golden_value_does_not_pass() -> None:
    golden = measured(result_of(moved=1))
    del golden["num-zeros"]
    verdicts = [row.passed for row in golden_rows(case_of(), "cpu", golden, result_of(moved=1))]
    assert verdicts == [True, False, True, True]
    assert not any(row.passed for row in golden_rows(case_of(), "cpu", None, result_of(moved=1)))


def test_only_without_a_gpu_bytes_have_golden_values() -> None:
    assert metrics_of(case_of(), "h200") == ("lm loss", "num-zeros")
    assert len(metrics_of(case_of(), "cpu")) == 4


def test_with_nondeterministic_kernels_a_loss_may_differ() -> None:
    golden = {"lm loss": {1: 4.9, 2: 4.8, 3: 4.6, 4: 4.5}}
    for allowed, passed in (("0", False), ("1", True)):
        case = case_of(("lm loss",), NVTE_ALLOW_NONDETERMINISTIC_ALGO=allowed)
        (row,) = golden_rows(case, "h200", golden, result_of())
        assert row.passed == passed


def test_a_metric_that_is_not_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="METRICS: 'iteration-time' is not measured"):
        metrics_of(case_of(("iteration-time",)), "cpu")


# --- against the training without offloading ------------------------------------------------------


def test_equal_trainings_of_which_one_moves_pass() -> None:
    same, peak = offloading_rows(result_of(peak=100), result_of(peak=50, moved=8))
    assert same.passed
    assert peak.passed
    assert "50% less, 16 B moved" in peak.verdict


@pytest.mark.parametrize(
    "rank, where, value, told",
    [
        (1, ("iterations", 2, "loss"), 4.625 + 2**-40, "loss differs in iteration 3"),
        (0, ("gradients_sha256",), "x", "gradients of rank 0"),
        (1, ("weights_sha256",), "x", "weights of rank 1"),
        (1, ("weights_sha256",), None, "weights of rank 1"),
    ],
)
def test_any_bit_of_difference_fails(
    rank: int, where: tuple[Any, ...], value: object, told: str
) -> None:
    changed = copy.deepcopy(result_of(peak=50, moved=8))
    inner: Any = changed.records[rank]
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = value
    same, _ = offloading_rows(result_of(), changed)
    assert not same.passed
    assert told in same.verdict


def test_digests_that_both_lack_are_no_equality() -> None:
    left, right = result_of(), result_of()
    for result in (left, right):
        del result.records[0]["gradients_sha256"]
    assert first_difference(left, right) is not None


@pytest.mark.parametrize("peak, moved", [(100, 8), (101, 8), (50, 0)])
def test_offloading_that_does_nothing_fails(peak: int, moved: int) -> None:
    _, row = offloading_rows(result_of(peak=100), result_of(peak=peak, moved=moved))
    assert not row.passed


def test_what_graphs_keep_is_no_saving() -> None:
    without = result_of(peak=100)
    _, row = offloading_rows(without, result_of(peak=100, moved=8, pool=60))
    assert not row.passed
    _, row = offloading_rows(without, result_of(peak=90, moved=8, pool=60))
    assert row.passed


def test_a_resumed_training_is_compared_where_both_have_been() -> None:
    again = result_of(first=3)
    assert again.first_iteration == 3
    row = resume_row(result_of(), again)
    assert row.passed
    assert "3 to 4" in row.what
    again.records[-1]["iterations"][0]["loss"] = 1.0
    assert "iteration 3" in resume_row(result_of(), again).verdict
