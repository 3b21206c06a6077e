# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""One training of a case, started as Megatron-LM's scripts start theirs, and what it left."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from megatron.slipstream.integration.free_port import free_port
from tools.functional_tests.cases import ROOT, Arguments, Case, command_line, without_offloading
from tools.shared_gpus import ranks_per_gpu

SCRIPT = "pretrain_gpt.py"
TAIL_LINES, WIDTH = 15, 240
"""Of a training's log, what an error shows."""

CPU_ARGUMENTS: Mapping[str, Optional[str]] = {
    "--transformer-impl": "local",
    "--bf16": None,
    "--attention-backend": None,
    "--moe-permute-fusion": None,
}
"""Flags that need a GPU, and what they are without one; None leaves them out."""

_CPU_VARIABLES = {
    "CUDA_VISIBLE_DEVICES": "",
    # The same sums, in the same order, on every kind of CPU.
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "OMP_NUM_THREADS": "1",
}
_OF_A_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
_ITERATION = re.compile(r" iteration +(\d+)/ *\d+ \|")
_ERROR = re.compile(r"\bERROR\b|Error:|\berror:")
_NUM_ZEROS = re.compile(r"\| num zeros: ([\d.]+) \|")


_running: set[subprocess.Popen[str]] = set()
"""Trainings in other threads, for :func:`stop_all`."""


class TrainingError(Exception):
    """A training that did not come to its end; the text has the end of its log."""


@dataclass(frozen=True)
class Training:
    """A training to run."""

    case: Case
    offloads: bool
    platform: str
    num_ranks: int
    folder: Path
    """Where it writes; emptied before."""
    data_folder: Path
    run_number: int = 1
    timeout_s: float = 600.0

    @property
    def name(self) -> str:
        """For people."""
        again = ", second half again" if self.run_number == 2 else ""
        return f"{self.case.name}, {'offloading' if self.offloads else 'without'}{again}"

    @property
    def _record(self) -> Path:
        return self.folder / f"record{self.run_number}.json"

    @property
    def _log(self) -> Path:
        return self.folder / f"log{self.run_number}.txt"

    @property
    def _checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def _variables(self) -> dict[str, str]:
        """What a model_config.yaml may refer to, beside the environment."""
        return {
            "OUTPUT_PATH": str(self.folder),
            "TENSORBOARD_PATH": str(self.folder / "tensorboard"),
            "CHECKPOINT_SAVE_PATH": str(self._checkpoints),
            "CHECKPOINT_LOAD_PATH": str(self._checkpoints),
            "DATA_PATH": str(self.data_folder),
            "DATA_CACHE_PATH": str(self.data_folder / "cache"),
        }

    def environment(self) -> dict[str, str]:
        """Of the processes."""
        inherited = {name: text for name, text in os.environ.items() if name not in _OF_A_LAUNCHER}
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {**inherited, **self._variables(), **self.case.config.ENV_VARS}
        if self.platform == "cpu":
            environment.update(_CPU_VARIABLES)
        # A case's own commands find the Python that trains.
        commands = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        return {**environment, "PYTHONPATH": path, "PATH": commands}

    def arguments(self) -> Arguments:
        """Flags of the training script, by this platform."""
        arguments = dict(self.case.arguments(self.run_number))
        if not self.offloads:
            arguments = dict(without_offloading(arguments))
        if self.platform != "cpu":
            return arguments
        for flag, instead in CPU_ARGUMENTS.items():
            if arguments.pop(flag, None) is not None and instead is not None:
                arguments[flag] = instead
        if self.offloads:
            # The backend under which a missing wait is a wrong number.
            arguments["--offload-backend"] = "cpu-lazy"
        return arguments

    def _script(self) -> list[str]:
        shares_gpus = self.platform != "cpu" and ranks_per_gpu() > 1
        return ["-m", "tools.shared_gpus", SCRIPT] if shares_gpus else [SCRIPT]

    def command(self) -> list[str]:
        """The launcher, the script and its flags, within the case's own commands."""
        port = free_port()
        last = self.num_ranks - 1
        shown = "0:3" if last == 0 else f"0:3,{last}:3"
        launcher = [sys.executable, "-m", "torch.distributed.run"]
        launcher += ["--nproc_per_node", str(self.num_ranks), "--nnodes", "1", "--node_rank", "0"]
        launcher += ["--master_addr", "localhost", "--master_port", str(port)]
        launcher += ["--log-dir", str(self.folder / "logs"), "--tee", shown, "--redirects", "3"]
        flags = command_line(self.arguments(), {**os.environ, **self._variables()})
        flags += ["--run-record-path", str(self._record), "--progress", "off"]
        config = self.case.config
        script = f"set -euo pipefail\n{config.BEFORE_SCRIPT or ''}\n"
        script += '"$@" && status=0 || status=$?\n'
        script += f"{config.AFTER_SCRIPT or ''}\nexit $status\n"
        return ["bash", "-c", script, "bash", *launcher, *self._script(), *flags]

    def run(self, on_iteration: Callable[[int], None] = lambda _: None) -> Result:
        """Train to the end.

        Args:
            on_iteration: Called with the number of each iteration that has ended.

        Raises:
            TrainingError: It failed or took too long.
        """
        if self.run_number == 1:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
        else:
            self._forget_second_half()
        self.data_folder.mkdir(parents=True, exist_ok=True)
        num_zeros: dict[int, float] = {}
        process = subprocess.Popen(
            self.command(),
            cwd=ROOT,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        _running.add(process)
        is_late = threading.Event()

        def give_up() -> None:
            is_late.set()
            _end(process)

        watchdog = threading.Timer(self.timeout_s, give_up)
        watchdog.start()
        try:
            assert process.stdout is not None
            with self._log.open("w") as log:
                for line in process.stdout:
                    log.write(line)
                    match = _ITERATION.search(line)
                    if match:
                        zeros = _NUM_ZEROS.search(line)
                        num_zeros[int(match[1])] = float(zeros[1]) if zeros else float("nan")
                        on_iteration(int(match[1]))
            status = process.wait()
        finally:
            watchdog.cancel()
            _running.discard(process)
            if process.poll() is None:
                _end(process)
                process.wait()
        if is_late.is_set():
            raise TrainingError(self._failure(f"took more than {self.timeout_s:g} s (--timeout)"))
        if status != 0:
            raise TrainingError(self._failure(f"ended with status {status}"))
        return Result(self._records(), num_zeros, self.case.num_iterations)

    def _forget_second_half(self) -> None:
        """Make the checkpoint from half-way the newest."""
        last = self.case.num_iterations
        shutil.rmtree(self._checkpoints / f"iter_{last:07d}")
        (self._checkpoints / "latest_checkpointed_iteration.txt").write_text(f"{last // 2}\n")

    def _records(self) -> list[dict[str, Any]]:
        others = [
            self._record.with_suffix(f".rank{rank}.json") for rank in range(1, self.num_ranks)
        ]
        try:
            return [json.loads(path.read_text()) for path in (self._record, *others)]
        except OSError as error:
            raise TrainingError(self._failure(f"left no {error.filename}")) from error

    def _failure(self, what: str) -> str:
        lines = [line[:WIDTH] for line in self._log.read_text().splitlines()]
        # What the launcher adds says only that a rank has failed.
        of_ranks = [line for line in lines if line.startswith("[default")] or lines
        errors = [line for line in of_ranks if _ERROR.search(line)]
        tail = [*errors[:3], "...", *of_ranks[-TAIL_LINES:]]
        head = f"{self.name}: {what}; all of its log: {self._log}"
        return "\n    ".join([head, *tail])


def stop_all() -> None:
    """End every training that runs; they are sessions of their own, which Ctrl-C does not reach."""
    for process in list(_running):
        _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """The shell, the launcher and its ranks, which are a process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)


@dataclass(frozen=True)
class Result:
    """What a training left."""

    records: list[dict[str, Any]]
    """What ``--run-record-path`` wrote, by rank."""
    num_zeros: Mapping[int, float]
    """By iteration: gradients that are exactly zero."""
    num_iterations: int

    @property
    def first_iteration(self) -> int:
        """1, or the first after the checkpoint."""
        return self.num_iterations - len(self.records[0]["iterations"]) + 1

    def by_iteration(self, field: str) -> dict[int, list[Any]]:
        """A field of the records by iteration, a value for each rank."""
        columns = zip(*(record["iterations"] for record in self.records), strict=True)
        numbered = enumerate(columns, start=self.first_iteration)
        return {step: [rank[field] for rank in ranks] for step, ranks in numbered}

    def losses(self) -> dict[int, float]:
        """By iteration, as the last rank has computed them."""
        return {step: ranks[-1] for step, ranks in self.by_iteration("loss").items()}
