# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Run Megatron-LM's tests of its own offloading engine on Slipstream's engine instead.

They are read from a Megatron-LM checkout and stay unchanged: wherever they create a new engine with
``reset_instance()``, Slipstream's is installed instead. The installed megatron-core is used.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.shared_gpus import take_place  # noqa: E402

TESTS = "tests/unit_tests/pipeline_parallel/test_fine_grained_activation_offloading.py"

EPILOG = """\
examples:
  %(prog)s ../Megatron-LM                             all that one GPU can run
  %(prog)s ../Megatron-LM --engine builtin            the same tests with the built-in engine
  %(prog)s ../Megatron-LM -- -k cuda_graph -x         some of them; pytest gets what follows --
  SLIPSTREAM_RANKS_PER_GPU=4 torchrun --nproc-per-node 4 \\
      tools/run_builtin_tests.py ../Megatron-LM -- -k a2a    four ranks that share a GPU

FOLDER is a checkout of the branch of the installed release (core_r0.19.0), or holds from there
tests/__init__.py, tests/unit_tests/{__init__,test_utilities}.py, a2a_overlap/utils.py beside them
and pipeline_parallel/{__init__,test_fine_grained_activation_offloading}.py.

At the end there is a line per test: by how much it saw the device peak fall, what the engine said
that it would (offload_summary_bytes), and what the engine moved. The exit code is pytest's.
"""

_SAVED = re.compile(r"[Ss]aved[ =](-?[\d.]+) ?MiB")
_CLAIMED = re.compile(r"expected[ ~]*=? ?([\d.]+) ?MiB")


class Figures(NamedTuple):
    """Results of one test, in MiB; None for those that it did not reach."""

    saved_mib: Optional[float]
    claimed_mib: Optional[float]
    moved_mib: Optional[float]


class EngineInPlace:
    """A pytest plugin that puts an engine behind the seam for each test and collects its figures.

    Args:
        engine: ``slipstream``, or ``builtin`` to keep megatron-core's own.
        backend: Slipstream's backend.
    """

    def __init__(self, engine: str, backend: str) -> None:
        self._engine = engine
        self._backend = backend
        self._moved: dict[str, Optional[float]] = {}
        self.figures: dict[str, Figures] = {}
        """Figures by test."""

    @pytest.fixture(autouse=True)
    def engine_in_place(
        self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[None]:
        """Install the engine around each test; restore the environment variables afterwards."""
        from megatron.core.pipeline_parallel import fine_grained_activation_offload as builtin

        from megatron.slipstream.integration import install

        environment = dict(os.environ)
        if self._engine == "slipstream":
            monkeypatch.setattr(builtin.PipelineOffloadManager, "reset_instance", self._install)
        yield
        manager = install.installed()
        moved = manager.report.d2h_bytes / 2**20 if manager is not None else None
        self._moved[request.node.nodeid] = moved
        install.uninstall()
        builtin.PipelineOffloadManager.OFFLOAD_MGR = None
        os.environ.clear()
        os.environ.update(environment)
        gc.collect()

    def _install(self) -> None:
        """Replace the built-in ``reset_instance``: install a new engine without any state."""
        from megatron.slipstream.integration import install
        from megatron.slipstream.options.fields import OffloadConfig

        install.uninstall()
        install.install(OffloadConfig(offload_backend=self._backend))

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            text = report.capstdout + report.longreprtext
            saved, claimed = (_last(pattern, text) for pattern in (_SAVED, _CLAIMED))
            self.figures[report.nodeid] = Figures(saved, claimed, None)
        elif report.when == "teardown" and report.nodeid in self.figures:
            moved = self._moved.get(report.nodeid)
            self.figures[report.nodeid] = self.figures[report.nodeid]._replace(moved_mib=moved)

    @pytest.hookimpl
    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        outcomes = {
            report.nodeid: outcome
            for outcome in ("passed", "failed")
            for report in terminalreporter.stats.get(outcome, [])
            if report.when == "call"
        }
        terminalreporter.section(f"device peak with the {self._engine} engine, in MiB")
        for line in _table(self.figures, outcomes):
            terminalreporter.write_line(line)

    @pytest.hookimpl
    def pytest_sessionfinish(self) -> None:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _last(pattern: re.Pattern[str], text: str) -> Optional[float]:
    found = pattern.findall(text)
    return float(found[-1]) if found else None


def _table(figures: dict[str, Figures], outcomes: dict[str, str]) -> Iterator[str]:
    yield f"{'saved':>9} {'claimed':>9} {'moved':>9}  test"
    for nodeid, row in figures.items():
        cells = ("-" if value is None else f"{value:.1f}" for value in row)
        name = nodeid.rpartition("::")[2]
        yield " ".join(f"{cell:>9}" for cell in cells) + f"  {outcomes.get(nodeid, '-')} {name}"


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    cut = given.index("--") if "--" in given else len(given)
    options = _parser().parse_args(given[:cut])
    folder: Path = options.folder.resolve()
    tests = folder / TESTS
    if not tests.is_file():
        raise SystemExit(f"{tests} is not there; give a folder that holds {TESTS}")
    if "LOCAL_RANK" in os.environ and torch.cuda.is_available():
        take_place(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    if options.engine == "slipstream":
        # As pretrain_gpt.py does: without it Transformer Engine's saved tensors do not move.
        os.environ.setdefault("NVTE_CPU_OFFLOAD_V1", "1")
    # As their conftest.py does, which is not used: it downloads data that these tests do not need.
    os.environ.setdefault("NCCL_MAX_NCHANNELS", "1")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    plugin = EngineInPlace(options.engine, options.backend)
    # Appended to the path, the folder provides the tests; a megatron-core in it is not used.
    common = ["--noconftest", "--import-mode=append", "-p", "no:cacheprovider", "-W", "ignore"]
    where = ["-c", os.devnull, "--rootdir", str(folder), str(tests)]
    return int(pytest.main([*common, *where, *given[cut + 1 :]], plugins=[plugin]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a Megatron-LM checkout")
    parser.add_argument(
        "--engine",
        choices=("slipstream", "builtin"),
        default="slipstream",
        help="which engine the tests get (%(default)s)",
    )
    parser.add_argument(
        "--backend", default="cuda", help="Slipstream's backend (%(default)s); cpu without a GPU"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
