# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Commands do not affect the tests' process, and behave as from a shell."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from forked import run_module, run_script

SCRIPT = """
import json, os, subprocess, sys
print(json.dumps([sys.argv[1:], os.getcwd(), os.environ["GIVEN"], __name__]))
sys.stderr.write("an error\\n")
sys.stdout.flush()
subprocess.run(["echo", "of a child"])
if sys.argv[1] == "raises":
    raise RuntimeError("what went wrong")
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize("status", [0, 3])
def test_a_script_has_arguments_folder_variables_and_output_of_its_own(
    script: Path, status: int, capfd: pytest.CaptureFixture[str]
) -> None:
    before = sys.argv, Path.cwd(), os.environ.get("GIVEN")
    done = run_script(
        script, str(status), "b c", folder=script.parent, environment={"GIVEN": "this"}
    )
    assert done.returncode == status
    seen = f'[["{status}", "b c"], "{script.parent}", "this", "__main__"]'
    assert done.stdout == f"{seen}\nof a child\n"
    assert done.stderr == "an error\n"
    assert (sys.argv, Path.cwd(), os.environ.get("GIVEN")) == before
    assert "an error" not in capfd.readouterr().err


def test_what_it_raises_is_its_error(script: Path) -> None:
    done = run_script(script, "raises", environment={"GIVEN": ""})
    assert done.returncode == 1
    assert done.stderr.endswith("RuntimeError: what went wrong\n")


def test_a_module_is_run_as_one(tmp_path: Path) -> None:
    done = run_module("json.tool", "nofile.json", folder=tmp_path)
    assert done.returncode != 0
    assert "nofile.json" in done.stderr


def test_what_takes_too_long_is_ended(tmp_path: Path) -> None:
    path = tmp_path / "slow.py"
    path.write_text("import time; time.sleep(60)")
    with pytest.raises(AssertionError, match=r"slow.py did not end within 0.5 s"):
        run_script(path, timeout_s=0.5)
