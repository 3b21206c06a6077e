# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Runs the commands of benchmarks/ as users do."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Optional
from unittest.mock import patch

import torch
from forked import Done, run_function, run_module

ROOT = Path(__file__).resolve().parents[2]


def benchmark(*arguments: str) -> Done:
    """Run ``python -m benchmarks.run``. Returns its result.

    Without a GPU its ranks are forked, since each would import torch and megatron-core again.

    Args:
        arguments: Arguments of the command.
    """
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    if torch.cuda.is_available():
        return run_module("benchmarks.run", *arguments, folder=ROOT, environment=hidden)
    command = partial(_fork_ranks, arguments)
    return run_function(command, folder=ROOT, environment=hidden)


def _fork_ranks(arguments: Sequence[str]) -> int:
    from benchmarks import run

    with patch.object(run, "subprocess", SimpleNamespace(Popen=_ForkedRank)):
        return run.main(arguments)


class _ForkedRank:
    """A rank that is forked from the command; otherwise as one of ``subprocess.Popen``."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        python, *module, _ = command[:4]
        assert python == sys.executable
        assert env["PYTHONPATH"].split(os.pathsep)[0] == str(ROOT)
        assert module == ["-m", "benchmarks.run"]
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=_be_rank, args=(command[3:], env))
        self._process.start()
        self.terminate, self.kill, self.wait = (
            self._process.terminate,
            self._process.kill,
            self._process.join,
        )

    def poll(self) -> Optional[int]:
        return self._process.exitcode


def _be_rank(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    from benchmarks import run

    os.environ.clear()
    os.environ.update(environment)
    raise SystemExit(run.main(arguments))
