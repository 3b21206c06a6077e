# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Runs the frameworks' own code in tests, if it is installed, and without a GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping

import pytest

TIMEOUT_S = 250

WITHOUT_KERNELS = {
    "use_cpu_initialization": True,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
    "gradient_accumulation_fusion": False,
    "apply_rope_fusion": False,
}
"""Options of models without features for which a CPU has no kernels."""


def skip_without(*modules: str) -> None:
    """Skip the test, or the file that calls this on import, if a module is missing."""
    for name in modules:
        if importlib.util.find_spec(name) is None:
            reason = f"{name} is not installed; see ./run test-frameworks"
            pytest.skip(reason, allow_module_level=True)


def last_line(code: str, *arguments: str, environment: Mapping[str, str] = os.environ) -> str:
    """The last line that the code prints in a separate process.

    Raises:
        AssertionError: It failed; the message has the end of its stderr.
    """
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *arguments],
        env=dict(environment),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout.splitlines()[-1]
