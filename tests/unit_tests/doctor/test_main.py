# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""``slipstream doctor`` from the command line: what is shown, written and returned."""

from __future__ import annotations

import io
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from doctor_facts import HEALTHY, facts, first_gpu

from megatron.slipstream.cli import main
from megatron.slipstream.doctor import facts as reading
from megatron.slipstream.doctor.checks import CHECKS, examine
from megatron.slipstream.doctor.facts import MachineFacts
from megatron.slipstream.doctor.main import WIDTH, render
from megatron.slipstream.estimate.training_command import Words

ROOT = Path(__file__).resolve().parents[3]
SICK = replace(facts({"torch": "2.7.1"}), gpus=first_gpu(bandwidth="busy").gpus)
"""A machine with an error and a warning."""


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replaces the doctor's facts, and notes what is asked for."""
    given: list[Any] = [HEALTHY]

    def collect(*request: Any) -> MachineFacts:
        given.append(request)
        return given[0]

    monkeypatch.setattr(reading, "collect", collect)
    return given


def test_without_errors_the_exit_status_is_0(
    machine: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor"]) == 0
    shown = capsys.readouterr()
    for check in CHECKS:
        assert check.topic in shown.out
        assert f"ok       {check.label}" in shown.out
    assert shown.out.endswith("Found: nothing\n")
    assert machine[1] == (None, True, [])
    assert shown.err == ""


def test_warnings_are_no_errors(machine: list[Any]) -> None:
    machine[0] = first_gpu(bandwidth="busy")
    assert main(["doctor"]) == 0


def test_with_an_error_the_exit_status_is_1(
    machine: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    machine[0] = replace(SICK, words=Words(("--lr",)))
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "error    torch" in shown
    assert "torch 2.7.1 is not supported because Slipstream needs torch>=2.10" in shown
    assert "-> pip install 'torch>=2.10'" in shown
    assert "\nFound: 1 error, 1 warning, " in shown, "from bad to good"


def test_a_wrong_call_is_2(machine: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--ranks-per-host", "0"]) == 2
    assert capsys.readouterr().err == (
        "error: --ranks-per-host=0 must be positive; give 1 or more\n"
    )
    with pytest.raises(SystemExit) as stopped:
        main(["doctor", "--no-bandwith"])
    assert stopped.value.code == 2
    assert len(machine) == 1


def test_options_and_the_command_reach_the_one_who_reads_the_machine(machine: list[Any]) -> None:
    options = ["--no-bandwidth", "--ranks-per-host", "4"]
    assert main(["doctor", *options, "--", "torchrun", "t.py", "--lr", "1", "--json", "x"]) == 0
    words = ["torchrun", "t.py", "--lr", "1", "--json", "x"]
    assert machine[1] == (4, False, words)


def test_lines_are_as_wide_as_a_page_and_have_no_blanks_behind() -> None:
    stream = io.StringIO()
    render(examine(SICK), stream)
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert [line for line in lines if line != line.rstrip()] == []


def run_doctor(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, "doctor", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
    )


WITHOUT_TORCH = """
import importlib.metadata, sys
from importlib.abc import MetaPathFinder
class NoTorch(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
sys.meta_path.insert(0, NoTorch())
version = importlib.metadata.version
def version_without_torch(name):
    if name == "torch":
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)
importlib.metadata.version = version_without_torch
from megatron.slipstream.cli import main
sys.exit(main())
"""


def test_without_torch_it_looks_at_what_it_can_and_says_what_it_cannot() -> None:
    result = run_doctor(WITHOUT_TORCH, "--", "--lr", "1")
    assert result.returncode == 1, result.stderr
    shown = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "torch is not installed, but training needs it" in shown
    assert {"note Run-time patches unknown", "note Flags unknown"} <= set(shown)
    assert any(line.startswith("ok May be pinned") for line in shown)
    assert "Traceback" not in result.stderr
