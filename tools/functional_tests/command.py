# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The command: which cases, their trainings one after the other, a table of verdicts."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from tools.functional_tests.cases import CASES, ROOT, Case, find_cases
from tools.functional_tests.checks import (
    Results,
    Row,
    golden_rows,
    metrics_of,
    offloading_rows,
    resume_row,
)
from tools.functional_tests.golden import measured, read_golden, write_golden
from tools.functional_tests.launch import (
    CPU_ARGUMENTS,
    Result,
    Training,
    TrainingError,
    stop_all,
)
from tools.functional_tests.recipes import Job, job_for, load_jobs
from tools.shared_gpus import num_places

ENVIRONMENT = "dev"
"""The versions of constraints.txt. Golden values are of these."""

WIDTH = 120
"""Of tables in a file or a pipe, where nobody says how wide it is."""

DESCRIPTION = """\
Train the cases of tests/functional_tests/test_cases through pretrain_gpt.py and compare:

  - the metrics of each case with its golden values;
  - a case that offloads with itself without offloading: every loss, the last gradients and the
    weights bit by bit; and its activations' peak, which has to be lower;
  - a case that resumes from a checkpoint with the training that wrote it.
"""
EPILOG = """\
examples:
  ./run functional-tests --list                 what there is, and where it runs
  ./run functional-tests                        all that this machine can run
  ./run functional-tests gpt3_offload           one of them
  ./run functional-tests gpt3_offload --record  its metrics become its golden values

Logs, records and checkpoints stay in the output folder. The exit code is 0 if all passed, 1 if
something failed, 2 for a wrong command.
"""


@dataclass
class Outcome:
    """A case, and what came of it."""

    case: Case
    job: Job
    rows: list[Row] = field(default_factory=list)
    error: str = ""
    skipped: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return not self.error and all(row.passed for row in self.rows)


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the command."""
    options = _parser().parse_args(arguments)
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
    try:
        if options.list:
            _show_cases(find_cases(options.cases, options.cases_folder), console)
            return 0
        outcomes = _outcomes(options)
        _check_gpus(outcomes, options)
        _run(outcomes, options, console)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("stopped\n")
        return 130
    _show(outcomes, options, console)
    return 0 if all(outcome.passed for outcome in outcomes) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="./run functional-tests",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("cases", nargs="*", metavar="CASE", help="which; all that this platform has if not given")
    add("--list", action="store_true", help="list the cases, and end")
    add("--record", action="store_true", help="write golden values; nothing else may have failed")
    add(
        "--platform",
        choices=["cpu", "h200"],
        help="whose golden values (h200 if torch sees a GPU, else cpu); cpu uses no GPU",
    )
    add(
        "--output-dir",
        type=Path,
        default=ROOT / ".cache" / "functional_tests",
        metavar="DIR",
        help="where trainings write (.cache/functional_tests)",
    )
    add(
        "--timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds that a training may take (%(default)g)",
    )
    add("--cases-folder", type=Path, default=CASES, help=argparse.SUPPRESS)
    return parser


def _outcomes(options: argparse.Namespace) -> list[Outcome]:
    """What is to be run; sets the platform if it was left open."""
    if options.platform is None:
        options.platform = "h200" if num_places() else "cpu"
    cases = find_cases(options.cases, options.cases_folder)
    jobs = load_jobs()
    if not options.cases:
        here = {job.case for job in jobs if job.platform == options.platform}
        cases = [case for case in cases if case.name in here]
    for case in cases:
        metrics_of(case, options.platform)
    return [
        Outcome(case, job_for(jobs, case.name, options.platform, ENVIRONMENT)) for case in cases
    ]


def _device(platform: str) -> str:
    """The platform, and the GPU that there really is."""
    if platform == "cpu" or not num_places():
        return platform
    import torch

    return f"{platform} ({torch.cuda.get_device_name(0)})"


def _check_gpus(outcomes: Sequence[Outcome], options: argparse.Namespace) -> None:
    """Skip what needs more GPUs than there are, and refuse it if it was asked for by name."""
    if options.platform == "cpu":
        return
    num_gpus = num_places()
    for outcome in outcomes:
        if outcome.job.num_ranks > num_gpus:
            outcome.skipped = f"needs {outcome.job.num_ranks} GPU(s), there are {num_gpus}"
            if options.cases:
                raise ValueError(
                    f"{outcome.case.name} {outcome.skipped}; leave it out, or set --platform cpu "
                    "if it runs there (--list)"
                )


# Running


def _run(outcomes: Sequence[Outcome], options: argparse.Namespace, console: Console) -> None:
    columns = (
        TextColumn("{task.description:<48}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("iterations"),
        TimeElapsedColumn(),
    )
    todo = [outcome for outcome in outcomes if not outcome.skipped]
    with Progress(*columns, console=console, transient=True) as progress:
        for number, outcome in enumerate(todo, start=1):
            started = time.monotonic()
            try:
                results = _train(outcome, options, progress)
                outcome.rows = _verdicts(outcome, results, options)
            except TrainingError as error:
                outcome.error = str(error)
            outcome.seconds = time.monotonic() - started
            verdict = "passed" if outcome.passed else "FAILED"
            console.print(
                f"{number}/{len(todo)} {outcome.case.name}: {verdict}, {outcome.seconds:.0f} s",
                highlight=False,
            )


def _train(outcome: Outcome, options: argparse.Namespace, progress: Progress) -> Results:
    """All trainings of a case; those that do not need each other side by side on a CPU."""
    case = outcome.case

    def training(offloads: bool, run_number: int = 1) -> Training:
        kind = "offloading" if offloads else "without"
        return Training(
            case,
            offloads,
            options.platform,
            outcome.job.num_ranks,
            options.output_dir.resolve() / options.platform / case.name / kind,
            options.output_dir.resolve() / "data",
            run_number,
            options.timeout,
        )

    def run(one: Training) -> Result:
        task = progress.add_task(one.name, total=case.num_iterations)
        try:
            return one.run(lambda step: progress.update(task, completed=step))
        finally:
            progress.remove_task(task)

    first = [training(case.offloads)]
    if case.offloads:
        first.append(training(False))
    with ThreadPoolExecutor(_num_at_once(outcome.job.num_ranks, options.platform)) as pool:
        try:
            results = list(pool.map(run, first))
        except KeyboardInterrupt:
            stop_all()
            raise
    again = run(training(case.offloads, run_number=2)) if case.resumes else None
    return Results(results[0], results[1] if case.offloads else None, again)


def _num_at_once(num_ranks: int, platform: str) -> int:
    """Trainings that do not slow each other down."""
    if platform != "cpu":
        return 1
    return max(len(os.sched_getaffinity(0)) // num_ranks, 1)


def _verdicts(outcome: Outcome, results: Results, options: argparse.Namespace) -> list[Row]:
    case, platform = outcome.case, options.platform
    rows: list[Row] = []
    if results.without is not None:
        rows += offloading_rows(results.without, results.offloading)
    if results.again is not None:
        rows.append(resume_row(results.offloading, results.again))
    path = case.golden_path(ENVIRONMENT, platform)
    if options.record and all(row.passed for row in rows):
        _record(case, platform, results.offloading)
    golden = read_golden(path) if path.exists() else None
    return [*golden_rows(case, platform, golden, results.offloading), *rows]


def _record(case: Case, platform: str, result: Result) -> None:
    """Write golden values.

    Raises:
        TrainingError: There are none to write.
    """
    now = measured(result)
    metrics = {name: now[name] for name in metrics_of(case, platform)}
    for name, values in metrics.items():
        lacking = [step for step, value in values.items() if not math.isfinite(value)]
        if lacking:
            raise TrainingError(
                f"{case.name}: {name} of iteration {lacking[0]} is no number, so nothing was "
                "recorded; num-zeros needs --log-num-zeros-in-grad and --log-interval 1"
            )
    write_golden(case.golden_path(ENVIRONMENT, platform), metrics)


# Output


def _show_cases(cases: Iterable[Case], console: Console) -> None:
    jobs = load_jobs()
    table = Table(Column("case", no_wrap=True), "trains", "ranks", "platforms (* recorded)")
    for case in cases:
        of_case = [job for job in jobs if job.case == case.name and job.environment == ENVIRONMENT]
        platforms = [
            job.platform + "*" * case.golden_path(ENVIRONMENT, job.platform).exists()
            for job in of_case
        ]
        what = ["offloading", "without"] if case.offloads else ["as it is"]
        what += ["second half again"] if case.resumes else []
        ranks = ", ".join(sorted({str(job.num_ranks) for job in of_case}))
        table.add_row(case.name, ", ".join(what), ranks, " ".join(platforms))
    console.print(table)


def _show(outcomes: Sequence[Outcome], options: argparse.Namespace, console: Console) -> None:
    table = Table(Column("case", overflow="fold"), "metric", "golden", "now", "verdict")
    for outcome in outcomes:
        name = outcome.case.name
        if outcome.skipped:
            table.add_row(name, "", "", "", f"[yellow]skipped: {outcome.skipped}")
        if outcome.error:
            table.add_row(name, "", "", "", "[red]FAILED to train, see below")
        for row in outcome.rows:
            colour = "green" if row.passed else "red"
            verdict = f"[{colour}]{'' if row.passed else 'FAILED: '}{row.verdict}"
            table.add_row(name, row.what, row.golden, row.now, verdict)
            name = ""
        table.add_section()
    console.print(table)
    for outcome in outcomes:
        if outcome.error:
            console.print(outcome.error, style="red", markup=False, highlight=False, soft_wrap=True)
    if options.platform == "cpu":
        changes = [flag if to is None else f"{flag} {to}" for flag, to in CPU_ARGUMENTS.items()]
        console.print(
            f"Without a GPU cases train with {changes[0]}, and without {', '.join(changes[1:])}."
        )
    _show_summary(outcomes, options, console)


def _show_summary(
    outcomes: Sequence[Outcome], options: argparse.Namespace, console: Console
) -> None:
    from importlib.metadata import version

    run = [outcome for outcome in outcomes if not outcome.skipped]
    num_passed = sum(outcome.passed for outcome in run)
    recorded = " and recorded" if options.record else ""
    console.print(
        f"{num_passed} of {len(run)} cases passed{recorded} on {_device(options.platform)}, "
        f"{sum(outcome.seconds for outcome in run):.0f} s, torch {version('torch')}, megatron-core "
        f"{version('megatron-core')}; logs in {options.output_dir / options.platform}",
        highlight=False,
        soft_wrap=True,
    )
    if num_passed < len(run) and not options.record:
        console.print(
            "Golden values are of the versions in constraints.txt. If a change of theirs is "
            "wanted: --record, and say why in the commit.",
            highlight=False,
        )
