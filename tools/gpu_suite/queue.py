# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Runs jobs side by side on some GPUs until all are done or the time is over."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Optional

from tools.gpu_suite.jobs import NUM_WORKERS, OUTPUT, SHARES, Job, in_order, next_job
from tools.shared_gpus import VARIABLE, num_tests_per_gpu

ROOT = Path(__file__).resolve().parents[2]
RESULTS = "suite.jsonl"
"""A line for every job that has been started or left out, in the folder for results."""
POLL_S = 0.2
GRACE_S = 5.0
"""What a job gets to end by itself once the time is over."""


class State(Enum):
    """What came of a job."""

    PASSED = "passed"
    FAILED = "failed"
    CUT_OFF = "cut off"
    """Ended by us: the time was over."""
    NOT_STARTED = "not started"
    """It would have been cut off."""


@dataclass(frozen=True)
class Result:
    """What came of a job."""

    name: str
    state: State
    seconds: float = 0.0
    gpus: tuple[int, ...] = ()
    exit_status: Optional[int] = None

    def as_row(self) -> dict[str, object]:
        """For the file of results."""
        return {**asdict(self), "state": self.state.value}


@dataclass
class _Running:
    job: Job
    gpus: tuple[int, ...]
    process: subprocess.Popen[bytes]
    started_s: float


Tell = Callable[[str, Optional[Result]], None]
"""Called with the name of a job that starts, and with its result when it has ended."""


def run_jobs(
    jobs: Sequence[Job],
    gpus: Sequence[int],
    output: Path,
    seconds: float,
    tell: Tell = lambda name, result: None,
) -> list[Result]:
    """Run the jobs and return what came of each, in the order in which they ended.

    Args:
        jobs: What to run.
        gpus: Numbers of the GPUs to use, among those that are visible to this process.
        output: Each job gets a folder of its name in it, with ``log.txt``, in place of the one that
            it had; results are added to :data:`RESULTS`.
        seconds: When these are over, what still runs is ended.
        tell: Hears of starts and ends.

    Raises:
        ValueError: A job needs more GPUs than there are.
    """
    for job in jobs:
        if job.num_gpus > len(gpus):
            raise ValueError(f"{job.name} needs {job.num_gpus} GPUs, and there are {len(gpus)}")
    queue = _Queue(gpus, output, time.monotonic() + seconds, tell)
    try:
        return queue.run(in_order(jobs))
    finally:
        queue.stop()


class _Queue:
    def __init__(self, gpus: Sequence[int], output: Path, deadline_s: float, tell: Tell) -> None:
        self._gpus = tuple(gpus)
        self._output = output
        self._deadline_s = deadline_s
        self._tell = tell
        self._free = dict.fromkeys(gpus, SHARES)
        self._running: list[_Running] = []
        self._results: list[Result] = []

    def run(self, waiting: list[Job]) -> list[Result]:
        while True:
            left_s = self._deadline_s - time.monotonic()
            while following := next_job(waiting, self._free, left_s):
                waiting.remove(following[0])
                self._start(*following)
            if not self._running:
                break
            if left_s <= 0:
                self.stop()
                break
            time.sleep(POLL_S)
            for running in list(self._running):
                status = running.process.poll()
                if status is not None:
                    self._end(running, State.FAILED if status else State.PASSED, status)
        for job in waiting:
            self._keep(Result(job.name, State.NOT_STARTED))
        return self._results

    def stop(self) -> None:
        """End all that runs, with everything that it has started."""
        for running in self._running:
            _signal(running.process, signal.SIGTERM)
        deadline_s = time.monotonic() + GRACE_S
        for running in list(self._running):
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.process.wait(max(deadline_s - time.monotonic(), 0.0))
            _signal(running.process, signal.SIGKILL)
            running.process.wait()
            self._end(running, State.CUT_OFF, running.process.returncode)

    def _start(self, job: Job, gpus: tuple[int, ...]) -> None:
        for gpu in gpus:
            self._free[gpu] -= job.shares
        folder = self._output / job.name.replace(":", "_")
        # Benchmarks refuse to mix their rows with those of an earlier run.
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        num_cores = (os.cpu_count() or 1) * job.num_gpus * job.shares // (len(self._gpus) * SHARES)
        num_tests = num_tests_per_gpu() * job.shares // SHARES
        workers = max(min(num_cores, num_tests) // job.ranks_per_gpu, 1)
        values = {OUTPUT: str(folder), NUM_WORKERS: str(workers)}
        with (folder / "log.txt").open("wb") as log:
            process = subprocess.Popen(
                [_filled(word, values) for word in job.command],
                cwd=ROOT,
                env=environment(job, gpus),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._running.append(_Running(job, gpus, process, time.monotonic()))
        self._tell(job.name, None)

    def _end(self, running: _Running, state: State, status: int) -> None:
        # What a job leaves running would keep its GPU's memory.
        _signal(running.process, signal.SIGKILL)
        self._running.remove(running)
        for gpu in running.gpus:
            self._free[gpu] += running.job.shares
        seconds = round(time.monotonic() - running.started_s, 1)
        self._keep(Result(running.job.name, state, seconds, running.gpus, status))

    def _keep(self, result: Result) -> None:
        self._results.append(result)
        # At once, so that nothing is lost if this process is ended too.
        with (self._output / RESULTS).open("a") as stream:
            stream.write(json.dumps(result.as_row()) + "\n")
        self._tell(result.name, result)


def _filled(word: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        word = word.replace(name, value)
    return word


def environment(job: Job, gpus: Sequence[int]) -> dict[str, str]:
    """Of a job's process: its GPUs, and its release of megatron-core before any other."""
    release = [str(ROOT / ".releases" / job.release)] if job.release else []
    path = [*release, str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "CUDA_VISIBLE_DEVICES": ",".join(_as_cuda_counts(gpus)),
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "1",
        VARIABLE: str(job.ranks_per_gpu),
    }


def _as_cuda_counts(gpus: Sequence[int]) -> list[str]:
    """What is visible here is perhaps but a part of the machine, as a job scheduler gives it."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [visible.split(",")[gpu].strip() if visible else str(gpu) for gpu in gpus]


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """To the process and all that it has started: it leads a session of its own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
