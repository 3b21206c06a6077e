# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Tests of planned offloading need no GPU; those that are marked ``gpu`` are skipped without one.

    pytest --confcutdir tests/unit_tests/pipeline_parallel/offload_engine \
        tests/unit_tests/pipeline_parallel/offload_engine
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# Tests import their helpers by name.
sys.path.insert(0, str(Path(__file__).parents[1] / "offload_support"))
# Tests fork, and a child hangs in its first parallel loop if its parent has run one.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers."""
    for marker in ("gpu", "gpus2", "gpus4", "exclusive", "releases"):
        config.addinivalue_line("markers", marker)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need a GPU where there is none."""
    import torch

    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        elif item.get_closest_marker("gpus2") or item.get_closest_marker("gpus4"):
            item.add_marker(pytest.mark.skip(reason="needs several GPUs"))


@pytest.fixture
def record_row() -> Callable[..., None]:
    """``record_row(theme, **fields)`` prints a result, which ``pytest -s`` shows."""
    return lambda theme, **fields: print(theme, fields)
