# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Runs commands as users do, without the time to start Python and to import torch.

They run in a child that is forked from the tests' process, with its own arguments, environment and
output. With a GPU they are started as from a shell, since CUDA does not survive a fork.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Optional

import new_process
import torch
from ranks import import_megatron, import_training, make_cheap

TAIL = 4000
"""Number of characters of a command's output that a timeout error shows."""

Done = subprocess.CompletedProcess[str]


def run_module(
    name: str,
    *arguments: str,
    folder: Optional[Path] = None,
    environment: Optional[Mapping[str, str]] = None,
    timeout_s: float = 200,
) -> Done:
    """Run ``python -m NAME ARGUMENTS...`` in a folder, with additional environment variables.

    Raises:
        AssertionError: It took too long.
    """
    call = partial(runpy.run_module, name, run_name="__main__", alter_sys=True)
    return _run(["-m", name], arguments, call, folder, environment, timeout_s)


def run_script(
    path: Path,
    *arguments: str,
    folder: Optional[Path] = None,
    environment: Optional[Mapping[str, str]] = None,
    timeout_s: float = 200,
) -> Done:
    """Run ``python PATH ARGUMENTS...`` like :func:`run_module`."""
    call = partial(runpy.run_path, str(path), run_name="__main__")
    return _run([str(path)], arguments, call, folder, environment, timeout_s)


def forget_megatron() -> None:
    """Let a forked process import megatron-core and Slipstream again."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        del sys.modules[name]


def _run(
    what: list[str],
    arguments: tuple[str, ...],
    call: Callable[[], Any],
    folder: Optional[Path],
    environment: Optional[Mapping[str, str]],
    timeout_s: float,
) -> Done:
    added = {"OMP_NUM_THREADS": "1", **(environment or {})}
    if torch.cuda.is_available():
        return _from_a_shell([*what, *arguments], folder, added, timeout_s)
    return _fork([what[-1], *arguments], call, folder, added, timeout_s)


def run_function(
    call: Callable[[], int],
    *,
    folder: Optional[Path] = None,
    environment: Optional[Mapping[str, str]] = None,
    timeout_s: float = 200,
) -> Done:
    """Run a function as a command; it returns the exit status. Not with a GPU.

    Raises:
        AssertionError: It took too long.
    """

    def command() -> None:
        sys.exit(call())

    return _fork(["function"], command, folder, environment or {}, timeout_s)


def _fork(
    argv: list[str],
    call: Callable[[], Any],
    folder: Optional[Path],
    added: Mapping[str, str],
    timeout_s: float,
) -> Done:
    (import_training if argv[0].endswith("pretrain_gpt.py") else import_megatron)()
    new_process.check_can_fork()
    with tempfile.TemporaryDirectory() as kept:
        paths = [Path(kept) / name for name in ("stdout", "stderr")]
        child = multiprocessing.get_context("fork").Process(
            target=_be_the_command, args=(argv, call, folder, added, paths)
        )
        child.start()
        child.join(timeout_s)
        if child.is_alive():
            child.kill()
            child.join()
            raise _too_slow(argv, timeout_s, *(path.read_text() for path in paths))
        stdout, stderr = (path.read_text() for path in paths)
    assert child.exitcode is not None
    return Done(argv, child.exitcode, stdout, stderr)


def _from_a_shell(
    words: list[str], folder: Optional[Path], added: Mapping[str, str], timeout_s: float
) -> Done:
    try:
        return subprocess.run(
            [sys.executable, *words],
            cwd=folder,
            env=new_process.environment(added),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        texts = [
            (output or b"").decode(errors="replace") for output in (error.output, error.stderr)
        ]
        raise _too_slow(words, timeout_s, *texts) from None


def _too_slow(words: list[str], timeout_s: float, *written: str) -> AssertionError:
    ends = "\n".join(text[-TAIL:] for text in written)
    return AssertionError(f"{' '.join(words)} did not end within {timeout_s} s:\n{ends}")


def _be_the_command(
    argv: list[str],
    call: Callable[[], Any],
    folder: Optional[Path],
    environment: Mapping[str, str],
    paths: list[Path],
) -> None:
    if folder is not None:
        os.chdir(folder)
    variables = new_process.environment(environment)
    os.environ.clear()
    os.environ.update(variables)
    sys.argv = argv
    # The output of the tests' process is pytest's; child processes inherit these descriptors.
    for number, path in enumerate(paths, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), number)
    sys.stdout, sys.stderr = (
        os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2)
    )
    new_process.begin()
    # A module of this name in sys.modules is another one.
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    make_cheap()
    try:
        call()
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            sys.stderr.write(f"{error.code}\n")
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip the interpreter's shutdown, which belongs to the parent process.
    os._exit(status)
