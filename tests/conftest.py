# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Configuration of all tests: which of them run on this machine, and what they leave behind."""

from __future__ import annotations

import gc
import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
from compile_extensions import is_done
from garbage import freeze

from tools.shared_gpus import num_places, num_tests_per_gpu

# Its audit hook makes each `id` take 1 us, in forked processes too. torch imports it later.
with patch.object(sys, "addaudithook", lambda hook: None):
    import filelock  # noqa: F401

# Without these, two runs of the same model on a GPU differ, and Transformer Engine does not expose
# its saved tensors. It reads both when it is imported.
os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
os.environ.setdefault("NVTE_CPU_OFFLOAD_V1", "1")
# Some tests fork, and a child hangs in its first parallel loop if its parent has run one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Otherwise each rank starts a process that imports torch, to compile a few small functions.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

ROOT = Path(__file__).resolve().parents[1]
MANY_BYTES = 1 << 30
NUM_GPUS_OF_MARKER = {"gpu": 1, "gpus2": 2, "gpus4": 4}
MAX_ERROR_CHARS = 3000
"""Of an error, how much is kept in a row."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Do not look for garbage among what tests import, which stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(trylast=True)  # After tests are deselected.
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip every test that is marked for more GPUs than torch sees, and say so.

    Tests without such a marker run without GPUs, since models choose their layers and precisions by
    what is there. A process cannot change that, so beside GPU tests they are skipped.
    """
    needs = {
        item: max(
            (num for marker, num in NUM_GPUS_OF_MARKER.items() if item.get_closest_marker(marker)),
            default=0,
        )
        for item in items
    }
    # torch takes seconds to import, so it is not imported for runs without a GPU.
    if not any(needs.values()):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return
    num_there = num_places()
    for item, num_needed in needs.items():
        if num_needed > num_there:
            reason = f"needs {num_needed} GPU(s), there are {num_there}"
            item.add_marker(pytest.mark.skip(reason=reason))
        elif num_there and not num_needed:
            reason = "runs without a GPU; run it with -m 'not gpu and not gpus2 and not gpus4'"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module", autouse=True)
def _imports_are_frozen() -> None:
    """Freeze what has been imported, also by earlier files: the garbage collector skips it."""
    gc.collect()
    freeze()


@pytest.fixture(scope="module", autouse=True)
def _loggers_of_torch_propagate() -> None:
    """pytest adds a handler to each logger that does not, six times a test: torch has eighty."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] == "torch" and isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.fixture(scope="module", autouse=True)
def _absent_devices_get_no_seeds() -> None:
    """torch would keep a formatted stack with each seed for them, which takes 1 ms."""
    if "torch" in sys.modules and not num_places():
        from ranks import seed_no_absent_device  # imports torch

        seed_no_absent_device()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """``-n auto`` with GPU tests: as many processes as fit into a GPU's memory."""
    if "gpu" not in config.option.markexpr or not num_places():
        return None
    return min(os.cpu_count() or 1, num_tests_per_gpu())


def pytest_configure(config: pytest.Config) -> None:
    """Random tests draw the same each time; with ``--results-dir``, a row per test is written."""
    if importlib.util.find_spec("hypothesis") is not None:
        from hypothesis import settings

        settings.register_profile("fixed", derandomize=True)
        settings.load_profile("fixed")
    folder: Path | None = config.getoption("--results-dir")
    if folder is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_TestRows(folder / "tests.jsonl"))


def pytest_sessionstart(session: pytest.Session) -> None:
    """With several processes, compile at once what their tests need, while they collect."""
    config = session.config
    if not getattr(config.option, "numprocesses", None) or config.option.collectonly or is_done():
        return
    compiling = subprocess.Popen(
        [sys.executable, "tests/support/compile_extensions.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,  # A test that needs the module tells its error.
        start_new_session=True,
    )

    def end() -> None:
        if compiling.poll() is None:
            os.killpg(compiling.pid, signal.SIGINT)  # With its compiler; it removes its files.
        compiling.wait()

    config.add_cleanup(end)


class _TestRows:
    """Appends a row per test: name, outcome, seconds, the end of its error."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and not (report.when == "setup" and report.failed):
            return
        row = {"test": report.nodeid, "outcome": report.outcome, "s": round(report.duration, 1)}
        if report.failed:  # A run that is cut off shows no errors.
            row["error"] = report.longreprtext[-MAX_ERROR_CHARS:]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as stream:
            stream.write(json.dumps(row) + "\n")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the project's options."""
    parser.addoption(
        "--results-dir",
        type=Path,
        help="keep a row per test (tests.jsonl), and the rows that tests measure, in this folder, "
        "one JSON line each, for benchmarks/results",
    )
    parser.addoption(
        "--all-cases",
        action="store_true",
        help="run each case of tests/functional_tests/test_cases that this machine can run",
    )
    parser.addoption(
        "--record",
        action="store_true",
        help="what these cases measure becomes their golden values",
    )
    parser.addoption(
        "--megatron",
        type=Path,
        help="a checkout of Megatron-LM, to a copy of which the patch series is applied and tested",
    )
    parser.addoption(
        "--soak-iterations",
        type=int,
        default=100,
        help="length of tests of many steps on a GPU (%(default)s; 2000 is the full length)",
    )


@pytest.fixture(autouse=True)
def _device_memory_is_returned() -> Iterator[None]:
    """Processes that share a GPU empty the cache of torch's allocator after a test."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        if torch.cuda.memory_reserved() > MANY_BYTES:
            # A failed test leaves cycles of frames with all that it made. Graphs in cycles hold
            # their pools, which are not counted as allocated.
            gc.collect()
            torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def _nothing_is_left_to_forks() -> Iterator[None]:
    """A test must not leave what later forked tests would inherit; with GPUs none is forked."""
    before = _inherited_by_forks()
    yield
    left = _inherited_by_forks() - before
    assert not left, f"the test leaves {', '.join(sorted(left))}; call it in a child process"


def _inherited_by_forks() -> set[str]:
    if "torch.distributed" not in sys.modules or num_places():
        return set()
    from new_process import what_cannot_be_undone  # imports torch

    return set(what_cannot_be_undone())


@pytest.fixture(autouse=True)
def _engine_is_uninstalled(_nothing_is_left_to_forks: None) -> Iterator[None]:
    """Uninstall an engine and undo patches that a test leaves: they would change later tests."""
    yield
    install = sys.modules.get("megatron.slipstream.integration.install")
    if install is not None:
        install.uninstall()
    setup = sys.modules.get("megatron.slipstream.fine_grained_activation_offload.engine_setup")
    if setup is not None:
        # An attached model that a test left has a share of later tests' memory until it is
        # collected; their plans are then made again, for more memory.
        for pool in setup.host_limit.pools:
            setup.host_limit.leave(pool)
    patching = sys.modules.get("megatron.slipstream.patches.patching")
    if patching is not None:
        for user in {user for change in patching._applied.values() for user in change.users}:
            patching.undo(user)


@pytest.fixture(autouse=True)
def _attention_backend_is_open() -> Iterator[None]:
    """Remove megatron-core's variables for a model's attention backend.

    A later test's model may name another backend, which megatron-core refuses while they are set.
    """
    yield
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        os.environ.pop(name, None)


@pytest.fixture(autouse=True)
def _messages_as_they_were() -> Iterator[None]:
    """Remove handlers that show messages to users: they would hide messages from later tests."""
    package = logging.getLogger("megatron.slipstream")
    handlers, propagates, level = list(package.handlers), package.propagate, package.level
    yield
    package.handlers, package.propagate = handlers, propagates
    if package.level != level:  # To set one clears the cache of each logger.
        package.setLevel(level)


@pytest.fixture
def record_row(request: pytest.FixtureRequest) -> Callable[..., None]:
    """``record_row(theme, **fields)`` appends a row to ``<results-dir>/<theme>.jsonl``."""
    folder: Path | None = request.config.getoption("--results-dir")

    def record(theme: str, **fields: object) -> None:
        print(theme, fields)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / f"{theme}.jsonl").open("a") as stream:
                stream.write(json.dumps(fields) + "\n")

    return record
