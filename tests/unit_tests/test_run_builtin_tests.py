# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""tools/run_builtin_tests.py, on a file that uses the interface like Megatron-LM's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked import Done, run_script

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "run_builtin_tests.py"
TESTS = Path("tests/unit_tests/pipeline_parallel/test_fine_grained_activation_offloading.py")

MINIATURE = """
import os

import pytest
from megatron.core.pipeline_parallel import fine_grained_activation_offload as builtin
from megatron.core.pipeline_parallel.fine_grained_activation_offload import (
    FineGrainedActivationOffloadingInterface as off_interface,
)
from tests.unit_tests.test_utilities import NAME

seen = []


def reset():
    off_interface.reset_instance()
    return builtin.PipelineOffloadManager.OFFLOAD_MGR


@pytest.mark.parametrize("number", [1, 2])
def test_which_engine(number):
    assert builtin.PipelineOffloadManager.OFFLOAD_MGR is None
    assert "MADE_BY_A_TEST" not in os.environ
    os.environ["MADE_BY_A_TEST"] = NAME
    manager, other = reset(), reset()
    assert manager is not other
    assert not any(manager is one for one in seen)
    seen.append(manager)
    off_interface.reset()
    assert type(other).__module__.startswith("EXPECTED")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Replaces a checkout of Megatron-LM."""
    path = tmp_path / TESTS
    path.parent.mkdir(parents=True)
    for package in (path.parent, path.parents[1], path.parents[2]):
        (package / "__init__.py").touch()
    path.parents[1].joinpath("test_utilities.py").write_text("NAME = 'theirs'\n")
    path.write_text(MINIATURE.replace("EXPECTED", "megatron.slipstream"))
    return tmp_path


def _run(folder: Path, *arguments: str) -> Done:
    return run_script(TOOL, str(folder), "--backend", "cpu", *arguments, folder=folder)


def test_each_reset_of_the_instance_installs_our_engine(folder: Path) -> None:
    result = _run(folder, "--", "-k", "which")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "2 passed" in result.stdout


def test_the_builtin_engine_is_left_in_its_place(folder: Path) -> None:
    tests = folder / TESTS
    text = MINIATURE.replace("EXPECTED", "test_fine_grained").replace(
        "seen = []",
        "class Stub:\n    def reset(self): pass\n\n\n"
        "builtin.PipelineOffloadManager.reset_instance = classmethod(\n"
        "    lambda cls: setattr(cls, 'OFFLOAD_MGR', Stub())\n)\nseen = []",
    )
    tests.write_text(text.replace('"test_fine_grained"', "__name__"))
    result = _run(folder, "--engine", "builtin", "--", "-k", "which")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "2 passed" in result.stdout


def test_a_folder_without_the_tests_is_refused(tmp_path: Path) -> None:
    result = _run(tmp_path)
    assert result.returncode == 1
    assert "is not there; give a folder that holds tests/unit_tests" in result.stderr
