# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Start by an environment variable; the wheel's file is tested in ``test_packaging.py``.

Packages are imported again in forked processes: in a new one, torch takes seconds.
"""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys

import pytest
from forked import forget_megatron, run_function

from megatron.slipstream.integration.frameworks import start

LINE = "import megatron.slipstream.integration.frameworks.start\n"


def import_as_a_framework() -> int:
    """Import all of megatron-core and Slipstream again, a model after the line that starts."""
    forget_megatron()
    exec(LINE)
    importlib.import_module("megatron.core.models.gpt.gpt_model")
    from megatron.slipstream.integration import install
    from megatron.slipstream.patches import model_calls

    assert inspect.getsource(sys.modules["megatron.core"])
    print(install.installed() is None, model_calls.before_first_call is not None)
    return 0


@pytest.mark.releases
def test_megatron_core_is_ready_for_a_model_that_offloads() -> None:
    result = run_function(import_as_a_framework, environment={"SLIPSTREAM_START": "1"})
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.splitlines()[-1] == "True True"


def import_again() -> int:
    """Import megatron-core's package, whose modules are there."""
    for name in ("megatron.core", "megatron.slipstream.integration.frameworks.on_import"):
        sys.modules.pop(name, None)
    start.start("1")
    importlib.import_module("megatron.core")
    return 0


@pytest.mark.parametrize("path, status", [("/none.yaml", 1), ("", 0)])
def test_settings_that_cannot_be_used_end_the_import_of_megatron_core(
    path: str, status: int
) -> None:
    result = run_function(import_again, environment={"SLIPSTREAM_CONFIG": path})
    assert result.returncode == status, result.stderr
    assert not path or path in result.stderr.splitlines()[-1]


def test_a_process_without_megatron_core_is_not_slowed_down() -> None:
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"{LINE}import sys; print('torch' in sys.modules)"],
        env=os.environ | {"SLIPSTREAM_START": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.stdout == "False\n", result.stderr


def test_a_value_that_is_not_known_is_an_error() -> None:
    with pytest.raises(ValueError, match="SLIPSTREAM_START=yes is neither 1 nor 0; set 1"):
        start.start("yes")
