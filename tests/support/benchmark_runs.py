# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The commands of benchmarks/ as their users start them, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def benchmark(
    module: str, *arguments: str, sees_gpu: bool = False
) -> subprocess.CompletedProcess[str]:
    """What came of ``python -m benchmarks.MODULE``."""
    hidden = {} if sees_gpu else {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **hidden},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
