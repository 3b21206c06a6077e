# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Runs the commands of benchmarks/ as users do."""

from __future__ import annotations

from pathlib import Path

from forked import Done, run_module

ROOT = Path(__file__).resolve().parents[2]


def benchmark(module: str, *arguments: str, sees_gpu: bool = False) -> Done:
    """Run ``python -m benchmarks.MODULE``. Returns its result."""
    hidden = {} if sees_gpu else {"CUDA_VISIBLE_DEVICES": ""}
    return run_module(f"benchmarks.{module}", *arguments, folder=ROOT, environment=hidden)
