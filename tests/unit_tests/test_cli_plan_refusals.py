# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""``slipstream plan`` refuses what it would ignore, and exits with what became of a goal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from reported_runs import make_trace

from megatron.slipstream.cli import main
from megatron.slipstream.plan.files import load_plan, save_trace

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "models"
DENSE = EXAMPLES / "llama3_8b.json"


def show(*arguments: str) -> int:
    return main(["plan", "--hf-config", str(DENSE), "--seq-length", "128", *arguments])


@pytest.mark.parametrize(
    "given, flag",
    [("--ep", "--expert-model-parallel-size"), ("--etp", "--expert-tensor-parallel-size")],
)
def test_experts_of_a_dense_model_are_not_divided(
    given: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert show(given, "2") == 2
    assert capsys.readouterr().err == (
        f"error: {flag}=2 is not supported with a model without experts because there are none to "
        f"divide; leave {flag} out\n"
    )
    assert show(given, "1") == 0


def test_a_negative_minimum_size_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert show("--min-offloaded-tensor-size", "-5") == 2
    assert capsys.readouterr().err == (
        "error: --min-offloaded-tensor-size=-5 is negative; set a number of elements (not bytes), "
        "0 to move every tensor\n"
    )
    assert show("--min-offloaded-tensor-size", "0") == 0


@pytest.mark.parametrize(
    "goal, status",
    [
        ([], 0),
        (["--target-memory", "500"], 0),
        (["--target-memory", "0.001"], 3),
        (["--max-overhead", "0"], 0),
    ],
)
def test_a_target_that_cannot_be_met_has_a_status_of_its_own(goal: list[str], status: int) -> None:
    assert show(*goal) == status
    assert show("--pp", "2", *goal) == status


@pytest.mark.parametrize("goal", [["--target-memory", "0.001"], ["--max-overhead", "1"]])
def test_a_goal_that_a_trace_cannot_decide_has_a_status_of_its_own(
    goal: list[str], tmp_path: Path
) -> None:
    trace, output = tmp_path / "trace.json", tmp_path / "plan.json"
    save_trace(replace(make_trace(), step_ms=(), bandwidth=None), trace)
    assert main(["plan", str(trace)]) == 0
    assert main(["plan", str(trace), *goal, "--output", str(output)]) == 4
    assert load_plan(output).notes
