# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The command: which jobs, on how many GPUs, for how long; a table of what came of them."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

from rich.console import Console
from rich.table import Table

from megatron.slipstream.plan.progress_bar import bar_on_stderr
from tools.gpu_suite.jobs import SHARES, Job, select
from tools.gpu_suite.queue import RESULTS, ROOT, Result, State, run_jobs
from tools.shared_gpus import ranks_per_gpu

DESCRIPTION = """\
Run the GPU tests, with every supported release of megatron-core, and the benchmarks, side by side:
tests share GPUs, unless they measure memory or time, and the longest come first; what measures has
its GPUs to itself and comes after them, what needs the most GPUs first.
"""
EPILOG = """\
examples:
  ./run gpu-suite --list                           what there is, and what it needs
  ./run gpu-suite 'tests*'                         all GPU tests
  ./run gpu-suite 'tests-*-gpus' --ranks-per-gpu 4 those that need several GPUs, on one
  ./run gpu-suite 'bench:moe_long:*' --seconds 500 one case, in no more than that
  ./run gpu-suite 'bench:*' --bench '--max-iterations 20 --planning-seconds 60'
  ./run gpu-suite 'tests*' --tests '-k "graphs and not FP8"'
  ./run gpu-suite --continue build/gpu_suite       what did not pass in a run before

Each job leaves its log and its rows in a folder of its name. To bring rows into the results that
are kept: python -m benchmarks.table benchmarks/results/NAME.jsonl --take OUTPUT/bench*/rows.jsonl.
Older releases of megatron-core are those that './run test-release' has installed; without them
their tests are left out.

The exit code is 0 if all passed, 1 if something did not, 2 for a wrong command.
"""


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the command."""
    options = _parser().parse_args(arguments)
    console = Console() if sys.stdout.isatty() else Console(width=120)
    try:
        number = _ranks_per_gpu(options.ranks_per_gpu)
        jobs = [
            job.with_more(options.bench, "bench:").with_more(options.tests, "tests")
            for job in (job.on_fewer_gpus(number) for job in select(options.jobs))
        ]
        if options.list:
            _show_jobs(jobs, console)
            return 0
        gpus = _gpus(options.gpus)
        jobs = _possible(_without_passed(jobs, options.after), len(gpus), console)
        results = _run(jobs, gpus, options)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("stopped\n")
        return 130
    _show_results(results, options.output, console)
    return 0 if all(result.state is State.PASSED for result in results) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="./run gpu-suite",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("jobs", nargs="*", metavar="JOB", help="which; * and ? stand for anything; all by default")
    add("--list", action="store_true", help="list the jobs, and end")
    add("--gpus", type=int, metavar="N", help="how many to use (all that torch sees)")
    add(
        "--ranks-per-gpu",
        type=int,
        metavar="N",
        help="let so many ranks share a GPU in tests and functional cases that need several, where "
        "there are fewer (1, or SLIPSTREAM_RANKS_PER_GPU); slower, and nothing that is measured",
    )
    add(
        "--seconds",
        type=float,
        default=3600.0,
        metavar="S",
        help="start nothing that would take longer, and end what does (%(default)s)",
    )
    add(
        "--bench",
        type=shlex.split,
        default=[],
        metavar="'ARGUMENTS'",
        help="more arguments for benchmarks.run, for those jobs that are called bench:",
    )
    add(
        "--tests",
        type=shlex.split,
        default=[],
        metavar="'ARGUMENTS'",
        help="more arguments for pytest, for those jobs that are called tests",
    )
    add(
        "--continue",
        dest="after",
        type=Path,
        metavar="DIR",
        help="leave out what passed in the run that wrote to this folder",
    )
    add(
        "--output",
        type=Path,
        default=ROOT / "build" / "gpu_suite",
        metavar="DIR",
        help="for logs and rows (default: build/gpu_suite)",
    )
    return parser


def _ranks_per_gpu(number: Optional[int]) -> int:
    if number is None:
        return ranks_per_gpu()
    if number < 1:
        raise ValueError(f"--ranks-per-gpu {number} leaves no rank a GPU; set 1 or more")
    return number


def _gpus(number: Optional[int]) -> range:
    import torch

    num_seen = torch.cuda.device_count()
    if not num_seen:
        raise ValueError("torch sees no GPU")
    if number is None:
        number = num_seen
    if not 1 <= number <= num_seen:
        raise ValueError(f"--gpus {number} is not possible; torch sees {num_seen}")
    return range(number)


def _without_passed(jobs: Sequence[Job], before: Optional[Path]) -> list[Job]:
    if before is None:
        return list(jobs)
    rows = [json.loads(line) for line in (before / RESULTS).read_text().splitlines()]
    passed = {row["name"] for row in rows if row["state"] == State.PASSED.value}
    return [job for job in jobs if job.name not in passed]


def _possible(jobs: Sequence[Job], num_gpus: int, console: Console) -> list[Job]:
    """What has its GPUs and its release here; says what has not."""
    possible = []
    for job in jobs:
        if job.num_gpus > num_gpus:
            console.print(f"left out: {job.name} needs {job.num_gpus} GPUs, there are {num_gpus}")
        elif job.release and not (ROOT / ".releases" / job.release).is_dir():
            console.print(
                f"left out: {job.name}; megatron-core {job.release} is not installed: "
                f"./run test-release {job.release} --collect-only installs it"
            )
        else:
            possible.append(job)
    if not possible:
        raise ValueError("nothing is left to run")
    return possible


def _run(jobs: Sequence[Job], gpus: Sequence[int], options: argparse.Namespace) -> list[Result]:
    options.output.mkdir(parents=True, exist_ok=True)
    with bar_on_stderr() as progress:
        task = progress.add_task("jobs", total=len(jobs))

        def tell(name: str, result: Optional[Result]) -> None:
            if result is None:
                progress.console.print(f"{name}: started")
                return
            progress.console.print(f"{name}: {result.state.value} after {result.seconds:.0f} s")
            progress.advance(task)

        return run_jobs(jobs, gpus, options.output, options.seconds, tell)


def _show_jobs(jobs: Sequence[Job], console: Console) -> None:
    table = Table("job", "GPUs", "of each", "about")
    for job in jobs:
        share = "" if job.shares == SHARES else f"{job.shares}/{SHARES}"
        table.add_row(job.name, str(job.num_gpus), share, f"{job.seconds} s")
    console.print(table)


def _show_results(results: Sequence[Result], output: Path, console: Console) -> None:
    table = Table("job", "GPUs", "time", "")
    for result in sorted(results, key=lambda result: result.state is not State.PASSED):
        gpus = ",".join(map(str, result.gpus))
        table.add_row(result.name, gpus, f"{result.seconds:.0f} s", result.state.value)
    console.print(table)
    console.print(f"logs and rows: {output}")
