# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Commands do not affect the tests' process, and behave as from a shell; so do forked ranks."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import logging
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import new_process
import numpy
import pytest
import torch
from forked import run_function, run_module, run_script
from ranks import import_megatron, run_ranks

from megatron.slipstream.fine_grained_activation_offload import warning_log

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


# What a fork inherits


class Inherited(NamedTuple):
    """Changes of this process that a forked one must not have."""

    spoil: Callable[[pytest.MonkeyPatch], None]
    read: Callable[[], Any]
    of_a_new_process: Any
    """What ``read`` returns there; None: what it returns before the change."""


def _spoil_start_times(patch: pytest.MonkeyPatch) -> None:
    from megatron.training import training

    patch.setattr(training, "_TRAIN_START_TIME", time.time() - 3600)
    patch.setattr(training, "_LEGACY_TRAIN_START_TIME", time.time() - 3600)


def _stale_start_times() -> list[str]:
    """Times of day, noted by modules of megatron, that lie more than ten seconds back."""
    now = time.time()
    return [
        f"{name}.{attribute}"
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == "megatron"
        for attribute, value in vars(module).items()
        if isinstance(value, float) and 10 < now - value < new_process.A_MONTH_S
    ]


def _spoil_random_numbers(patch: pytest.MonkeyPatch) -> None:
    for draw in (random.random, numpy.random.rand, lambda: torch.rand(1)):
        draw()


def _draw() -> list[float]:
    return [random.random(), float(numpy.random.rand()), torch.rand(1, device="cpu").item()]


def _spoil_logging(patch: pytest.MonkeyPatch) -> None:
    root, package = logging.getLogger(), logging.getLogger("megatron.slipstream")
    patch.setattr(root, "handlers", [*root.handlers, logging.NullHandler()])
    patch.setattr(package, "handlers", [logging.NullHandler()])
    patch.setattr(package, "filters", [logging.Filter("none")])
    patch.setattr(package, "propagate", False)
    patch.setattr(root.manager, "disable", logging.ERROR)
    patch.setattr(package, "level", logging.ERROR)
    patch.setattr(root, "level", logging.ERROR)


def _read_logging() -> list[Any]:
    root, package = logging.getLogger(), logging.getLogger("megatron.slipstream")
    return [
        [len(logger.handlers), len(logger.filters), logger.propagate, logger.level]
        for logger in (root, package)
    ] + [root.manager.disable]


def _spoil_messages(patch: pytest.MonkeyPatch) -> None:
    from megatron.slipstream.integration.attach import forward

    patch.setitem(warning_log._LOG.counts, "of an earlier test", 1)
    patch.setattr(forward, "_has_warned_of_one_graph", True)


def _read_messages() -> list[Any]:
    from megatron.slipstream.integration.attach import forward

    return [warning_log.keep_warnings(), forward._has_warned_of_one_graph]


def _read_warnings() -> list[str]:
    """What is shown of a warning that is on by default, and of one that is not."""
    shown: list[str] = []

    class Stream:
        def write(self, text: str) -> None:
            shown.append(text.rpartition(": ")[2].split("\n")[0])

        def flush(self) -> None:
            pass

    before, sys.stderr = sys.stderr, Stream()  # type: ignore[assignment]
    try:
        warnings.warn("a user's", UserWarning, stacklevel=1)
        warnings.warn("a developer's", DeprecationWarning, stacklevel=1)
    except Warning:
        shown.append("raised")
    finally:
        sys.stderr = before
    return shown


def _spoil_signals(patch: pytest.MonkeyPatch) -> None:
    for number in (signal.SIGALRM, signal.SIGINT, signal.SIGUSR1):  # SIGTERM ends ranks
        before = signal.signal(number, signal.SIG_IGN)
        UNDO.append(lambda number=number, before=before: signal.signal(number, before))
    before_mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    UNDO.append(lambda: signal.pthread_sigmask(signal.SIG_SETMASK, before_mask))


def _read_signals() -> list[Any]:
    numbers = signal.SIGALRM, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2
    return [
        *(signal.getsignal(number) == signal.SIG_DFL for number in numbers),
        signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        list(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        signal.getitimer(signal.ITIMER_REAL),
    ]


def _spoil_hooks(patch: pytest.MonkeyPatch) -> None:
    for owner, name in HOOKS:
        patch.setattr(owner, name, print)


HOOKS = [(sys, "excepthook"), (sys, "unraisablehook"), (threading, "excepthook")]


def _read_hooks() -> list[bool]:
    is_own = [getattr(owner, name) is getattr(owner, f"__{name}__") for owner, name in HOOKS]
    return [*is_own, sys.gettrace() is None, sys.getprofile() is None]


def _spoil_garbage_collector(patch: pytest.MonkeyPatch) -> None:
    before = gc.isenabled(), gc.get_threshold()
    gc.disable()
    gc.set_threshold(1, 2, 3)
    patch.setattr(gc, "callbacks", gc.callbacks)
    gc.callbacks.append(_callback)
    UNDO.append(lambda: gc.callbacks.remove(_callback))
    UNDO.append(lambda: gc.set_threshold(*before[1]))
    UNDO.append(gc.enable if before[0] else gc.disable)


def _callback(*_: Any) -> None:
    pass


def _spoil_torch(patch: pytest.MonkeyPatch) -> None:
    UNDO.append(new_process.RESETS["torch's settings"])
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("medium")
    torch.autograd.set_detect_anomaly(True)
    torch.set_autocast_enabled("cpu", True)


def _read_torch() -> list[Any]:
    new = torch.ones(1, requires_grad=True)
    return [
        *(str(new.dtype), str(new.device), (new * 2).requires_grad),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.is_anomaly_enabled(),
        torch.is_autocast_enabled("cpu"),
    ]


UNDO: list[Callable[[], object]] = []
INHERITED = {
    "start times": Inherited(_spoil_start_times, _stale_start_times, []),
    "random numbers": Inherited(_spoil_random_numbers, _draw, None),
    "logging": Inherited(
        _spoil_logging, _read_logging, [[0, 0, True, logging.WARNING], [0, 0, True, 0], 0]
    ),
    "messages shown once": Inherited(_spoil_messages, _read_messages, [{}, False]),
    "warnings": Inherited(
        lambda patch: warnings.simplefilter("error"), _read_warnings, ["a user's"]
    ),
    "signals": Inherited(
        _spoil_signals, _read_signals, [True, True, True, True, True, [], (0.0, 0.0)]
    ),
    "hooks of errors": Inherited(_spoil_hooks, _read_hooks, [True] * 5),
    "garbage collector": Inherited(
        _spoil_garbage_collector,
        lambda: [gc.isenabled(), gc.get_threshold(), _callback in gc.callbacks],
        [True, (700, 10, 10), False],
    ),
    "torch's settings": Inherited(
        _spoil_torch, _read_torch, ["torch.float32", "cpu", True, False, "highest", False, False]
    ),
}


@pytest.fixture
def spoiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:

    import_megatron()
    with warnings.catch_warnings(record=True):
        try:
            for row in INHERITED.values():
                row.spoil(monkeypatch)
            yield
        finally:
            for undo in reversed(UNDO):
                undo()
            UNDO.clear()


def _read_all(*_: Any) -> str:
    return json.dumps({name: row.read() for name, row in INHERITED.items()})


def _read_in_a_command() -> str:
    def call() -> int:
        print(_read_all())
        return 0

    done = run_function(call)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def _read_in_a_rank() -> str:
    return run_ranks(1, _read_all)[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this process is not forked with a GPU")
@pytest.mark.parametrize("read_in", [_read_in_a_command, _read_in_a_rank])
def test_a_forked_process_inherits_nothing_of_earlier_tests(
    read_in: Callable[[], str], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert INHERITED.keys() == new_process.RESETS.keys()
    at_first = json.loads(read_in())
    request.getfixturevalue("spoiled")
    found = json.loads(read_in())
    monkeypatch.setattr(new_process, "RESETS", {})
    inherited = json.loads(read_in())
    for name, row in INHERITED.items():
        expected = row.of_a_new_process
        expected = at_first[name] if expected is None else json.loads(json.dumps(expected))
        assert found[name] == expected, name
        assert inherited[name] != expected, f"the change of {name} has no effect"


def _module(name: str, **attributes: Any) -> Callable[[pytest.MonkeyPatch], None]:
    def change(patch: pytest.MonkeyPatch) -> None:
        module = importlib.import_module(name)
        for attribute, value in attributes.items():
            patch.setattr(module, attribute, value)

    return change


CANNOT_BE_UNDONE = {
    "a process group": _module("torch.distributed", is_initialized=lambda: True),
    "megatron-core's groups": _module("megatron.core.parallel_state", _DATA_PARALLEL_GROUP=1),
    "megatron's arguments": _module("megatron.training.global_vars", _GLOBAL_ARGS=1),
    "megatron's number of micro-batches": _module(
        "megatron.core.num_microbatches_calculator", _GLOBAL_NUM_MICROBATCHES_CALCULATOR=1
    ),
    "patches": _module("megatron.slipstream.patches.patching", _applied={1: 1}),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this process is not forked with a GPU")
@pytest.mark.parametrize("name", [*CANNOT_BE_UNDONE, "hooks of saved tensors"])
def test_a_process_that_would_pass_on_more_is_not_forked(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_process.check_can_fork()
    assert {*CANNOT_BE_UNDONE, "hooks of saved tensors"} == new_process.CANNOT_BE_UNDONE.keys()
    with contextlib.ExitStack() as stack:
        if name in CANNOT_BE_UNDONE:
            CANNOT_BE_UNDONE[name](monkeypatch)
        else:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(id, id))
        for fork in (partial(run_function, lambda: 0), partial(run_ranks, 1, print)):
            with pytest.raises(AssertionError, match=f"would inherit {name} from this one"):
                fork()
    monkeypatch.undo()


def test_a_patch_that_a_test_leaves() -> None:
    from megatron.slipstream.patches import patching, table

    table.apply(table.Feature.PADDED_ROUTING)
    assert patching.active() != []


def test_is_undone_before_the_next() -> None:
    from megatron.slipstream.patches import patching

    assert patching.active() == []
