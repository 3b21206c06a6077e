# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""``slipstream plan`` refuses options that its plan would not follow."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.slipstream.cli import main

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
