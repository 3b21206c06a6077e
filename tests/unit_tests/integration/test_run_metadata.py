# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A report has the options and versions of its run, converted for JSON."""

from __future__ import annotations

import dataclasses
import enum
import json
from argparse import Namespace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from reported_runs import make_run

from megatron.slipstream.fine_grained_activation_offload.report import Report
from megatron.slipstream.fine_grained_activation_offload.run_metadata import (
    MODEL_SETTINGS,
    environment,
    settings,
)
from megatron.slipstream.integration import install
from megatron.slipstream.integration.record.monitor import Monitor
from megatron.slipstream.integration.record.run_files import RunFiles
from megatron.slipstream.options.fields import OffloadConfig
from megatron.slipstream.report_page.page import render_page


class Kind(enum.Enum):
    """Some enumeration among megatron's options."""

    ONE = 1


def test_options_of_model_and_engine_are_told_if_they_are_set() -> None:
    args = Namespace(num_layers=4, fp8=None, cuda_graph_impl=Kind.ONE, offload_modules=["a", "b"])
    told = settings(args, OffloadConfig(offload_release_lag=3))
    assert told["num_layers"] == 4
    assert told["offload_modules"] == ["a", "b"]
    assert told["cuda_graph_impl"] == "Kind.ONE"
    assert told["offload_release_lag"] == 3
    assert "fp8" not in told
    assert "offload_trace_path" not in told
    assert json.loads(json.dumps(told)) == told


def test_every_option_of_the_engine_is_told() -> None:
    names = {field.name for field in dataclasses.fields(OffloadConfig)}
    values = SimpleNamespace(**dict.fromkeys((*names, *MODEL_SETTINGS), 1))
    assert settings(values).keys() == {*names, *MODEL_SETTINGS}


def test_versions_are_those_of_what_is_installed() -> None:
    found = environment()
    assert found["torch"] == metadata.version("torch")
    assert found["megatron-core"] == metadata.version("megatron-core")
    assert "transformer-engine" not in found or found["transformer-engine"]
    assert all(isinstance(value, str) for value in found.values())


def test_an_installed_engines_report_has_both() -> None:
    manager = install.install(OffloadConfig(offload_prefetch_depth=2))
    (rank,) = install.report().ranks
    assert rank.settings["offload_prefetch_depth"] == 2
    assert rank.environment == environment()
    assert rank is manager.report
    assert Report.from_json(Report([rank]).to_json()).ranks == [rank]


class Engine:
    """Parsed arguments as in the training entry."""

    def __init__(self, rank: int) -> None:
        self._run = make_run(rank=rank)

    def report(self) -> Report:
        return self._run.report

    def gather_report(self) -> Report:
        return Report([make_run(rank=0).rank, make_run(rank=1).rank])

    def plans(self) -> dict[int, Any]:
        return {self._run.rank.rank: self._run.plan}

    def save_trace(self, path: str) -> None:
        raise AssertionError("no trace is asked for")


@pytest.mark.parametrize("name", ["report.json", "report.html"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_run_writes_its_report_as_what_its_name_says(
    tmp_path: Path, rank: int, name: str
) -> None:
    config = OffloadConfig(offload_report_path=str(tmp_path / name))
    engine = Engine(rank)
    monitor = Monitor(num_iterations=1, iteration=lambda: 1, shows=False, record=False)
    RunFiles(config, rank, engine).write(monitor)
    both = engine.gather_report()
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    if name == "report.json":
        (only,) = written
        assert only == ("report.json" if rank == 0 else "report.rank1.json")
        assert Report.from_json(written[only]) == make_run(rank=rank).report
    elif rank == 0:
        assert written == {"report.html": render_page(both, {0: make_run(rank=0).plan})}
    else:
        assert written == {}, "the first rank's page has all ranks"
