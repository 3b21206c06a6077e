# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Runs tests in a tree that the patch series has changed, where the plugin cannot be imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tools.upstream.modules import TESTS

_WITHOUT_PLUGIN = """
import sys
sys.modules["megatron.slipstream"] = None
{first}
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""
# Megatron-core's fused functions, of which compiling takes half of the time, run as written.
_VARIABLES = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}


def run_tests(root: Path, *arguments: str, first: str = "") -> subprocess.CompletedProcess[str]:
    """Run pytest in a tree, without its own configuration.

    Args:
        root: The folder of the tree.
        arguments: Tests, relative to it, and options of pytest.
        first: Python code that runs before, in the same process.
    """
    return subprocess.run(
        [
            *(sys.executable, "-c", _WITHOUT_PLUGIN.format(first=first), "-q", "-W", "ignore"),
            *("-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(root)),
            *("--confcutdir", f"{TESTS}/offload_engine", *arguments),
        ],
        cwd=root,
        env={**os.environ, **_VARIABLES, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
