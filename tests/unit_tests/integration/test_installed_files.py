# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Report and trace are written behind ``install()`` too, as in frameworks."""

from __future__ import annotations

import atexit
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_function
from model_case import ModelCase
from tiny_gpt import build_chunks, initialize, make_config, train

from megatron.slipstream.fine_grained_activation_offload.report import Report
from megatron.slipstream.integration import install
from megatron.slipstream.integration.record import run_files
from megatron.slipstream.options.fields import OffloadConfig
from megatron.slipstream.plan.files import load_trace

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="forks, on a CPU")

PATHS = {"offload_report_path": "report.json", "offload_trace_path": "trace.json"}


def config(**options: Any) -> OffloadConfig:
    return OffloadConfig(offload_backend="cpu", **{**PATHS, **options})


def train_once(num_iterations: int = 3) -> None:
    case = ModelCase("dense", num_layers=2)
    initialize(case)
    layers = make_config(case, ("core_attn",))
    train(case, layers, build_chunks(case, layers), (2,) * num_iterations)


def exit_python() -> None:
    for entry in weakref.finalize._registry.values():  # type: ignore[attr-defined]
        entry.atexit = False  # It would delete the temporary folders of the parent.
    atexit._run_exitfuncs()


def install_another() -> None:
    install.install(OffloadConfig(offload_backend="cpu"))


@pytest.mark.parametrize("end", [install.uninstall, exit_python, install_another])
def test_files_are_written_once_when_training_ends(end: Any, tmp_path: Path) -> None:
    def work() -> int:
        install.install(config())
        train_once()
        assert list(Path().iterdir()) == []
        end()
        assert Report.from_json(Path("report.json").read_text()).ranks[0].num_iterations == 3
        assert load_trace("trace.json").groups
        for path in Path().iterdir():
            path.unlink()
        install.uninstall()
        exit_python()
        assert list(Path().iterdir()) == []
        return 0

    done = run_function(work, folder=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_killed_run_leaves_the_files_of_an_earlier_iteration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_files.RunFiles.__init__, "__defaults__", (None, 2))

    def work() -> int:
        install.install(config())
        train_once(3)
        assert Report.from_json(Path("report.json").read_text()).ranks[0].num_iterations == 2
        return 0

    done = run_function(work, folder=tmp_path)
    assert done.returncode == 0, done.stderr


def test_without_names_nothing_is_written(tmp_path: Path) -> None:
    def work() -> int:
        install.install(config(offload_report_path=None, offload_trace_path=None))
        train_once(2)
        install.uninstall()
        assert list(Path().iterdir()) == []
        return 0

    done = run_function(work, folder=tmp_path)
    assert done.returncode == 0, done.stderr
