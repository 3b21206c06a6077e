# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""GPU tests are skipped with a reason, never silently passed, where GPUs are missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

MARKED = """
import pytest

def test_plain(): pass

@pytest.mark.gpu
def test_one(): pass

@pytest.mark.gpus2
def test_two(): pass

@pytest.mark.gpus4
def test_four(): pass
"""


def run_pytest(folder: Path, test_source: str, num_gpus: int, *options: str) -> str:
    """Run ``test_source`` under the project's conftest with a torch that sees ``num_gpus``."""
    (folder / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (folder / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    (folder / "tests").mkdir()
    (folder / "tests" / "test_marked.py").write_text(test_source)
    stub = folder / "stub" / "torch"
    stub.mkdir(parents=True)
    (stub / "__init__.py").write_text(
        "from types import SimpleNamespace\n\n"
        "from . import cuda\n\n"
        "xpu = mtia = SimpleNamespace(is_available=lambda: True)\n"
    )
    (stub / "cuda.py").write_text(
        f"def device_count(): return {num_gpus}\n"
        "def is_available(): return device_count() > 0\n"
        "def is_initialized(): return False\n"
    )
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-rs", "-p", "no:cacheprovider", *options],
        cwd=folder,
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join(
                map(str, (stub.parent, ROOT, ROOT / "tests" / "support"))
            ),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return result.stdout + result.stderr


@pytest.mark.parametrize("num_gpus, num_passed", [(0, 1), (3, 2), (4, 3)])
def test_a_marked_test_runs_only_with_enough_gpus(
    tmp_path: Path, num_gpus: int, num_passed: int
) -> None:
    output = run_pytest(tmp_path, MARKED, num_gpus)
    assert f"{num_passed} passed" in output, output
    assert "error" not in output, output
    if num_gpus < 4:
        assert f"needs 4 GPU(s), there are {num_gpus}" in output, output
    reason = "runs without a GPU; run it with -m 'not gpu and not gpus2 and not gpus4'"
    assert (reason in output) == (num_gpus > 0), output


def test_a_gpu_counts_as_often_as_ranks_may_share_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_RANKS_PER_GPU", "2")
    output = run_pytest(tmp_path, MARKED, num_gpus=1)
    assert "2 passed" in output, output


def test_a_test_without_a_marker_sees_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    source = (
        MARKED
        + """
def test_hidden():
    import os
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
"""
    )
    output = run_pytest(tmp_path, source, 4, "-m", "not (gpu or gpus2 or gpus4)")
    assert "2 passed" in output, output
