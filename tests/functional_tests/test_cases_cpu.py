# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""One of the cases in ``test_cases``, through the runner that ``./run functional-tests`` starts.

The others take minutes: ``./run functional-tests``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_case_meets_its_golden_values_and_is_the_same_without_offloading(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.functional_tests", "gpt3_offload"]
    result = subprocess.run(
        [*command, "--platform", "cpu", "--output-dir", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "160"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "losses, gradients, weights" in result.stdout
    assert "bit-equal" in result.stdout
    assert "1 of 1 cases passed on cpu" in result.stdout
