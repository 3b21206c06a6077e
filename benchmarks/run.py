# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Measures the cost and savings of offloading: ``python -m benchmarks.run --help``."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, Optional

from benchmarks.case import COMPARISONS, FIGURES, Case, Limits, way_labels
from benchmarks.cases import CASES, find_case, select_variants
from benchmarks.rows import RowWriter, finished, read_rows
from benchmarks.worker import EXIT_WAY_FAILED, Job, work
from megatron.slipstream.launcher import free_port
from tools.shared_gpus import VARIABLE, num_places, share_a_gpu

ROOT = Path(__file__).resolve().parents[1]
GRACE_S = 5
"""Time for the other ranks to fail by themselves after one has failed."""

DESCRIPTION = """\
Compare ways to run the iterations of a model, which take turns in one process on the same data, so
that drift of clocks cancels. What is compared depends on the case:

  engines        activation offloading off, by the engine built into megatron-core ('megatron') and
                 by ours ('slipstream')
  layer_graphs   CUDA graphs of layers, with and without offloading inside of them
  chunk_graphs   CUDA graphs of whole model chunks, those of layers, and none
"""

EPILOG = """\
examples:
  python -m benchmarks.run --list                    what there is to measure
  python -m benchmarks.run --case smoke              try it, without a GPU, in half a minute
  python -m benchmarks.run --case moe                one case, all its sets of modules
  python -m benchmarks.run --case moe --modules core_attn+attn_proj --modules all
  python -m benchmarks.run --case dense --engine-option offload_release_lag=2 --name lag2
  python -m benchmarks.run --case graphs_dense --engines graph,graph+offload
  python -m benchmarks.table benchmarks/results/engines.jsonl     the table from rows again

what is written, to DIR/NAME.*:
  .jsonl            a row per measured iteration, a summary row per way and set of modules, and
                    a row about the machine; what fails leaves a row with its error
  .md               the table, which explains its columns

how long it takes: a way is done when the standard error of its median step is below 0.2% of it,
but not before --min-iterations, nor after --max-iterations or --seconds-per-variant. A plan that is
not settled after --max-planning or --planning-seconds is not timed, and its row says so. Where an
iteration takes a second, --min-iterations 3 --max-iterations 3 --memory-iterations 1 --figures
memory is little enough.
"""


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the command; return 0, or 2 for a user error."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(arguments)
    try:
        cases = [find_case(name) for name in options.case]
        if options.list:
            sys.stdout.write(_list_cases(cases or list(CASES)))
            return 0
        if options.worker:
            _work(_job(options, find_case(options.worker), options.run_id, arguments[:-4]))
        return _run(options, cases, arguments)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--list", action="store_true", help="list the cases and their sets of modules, and end")
    add("--case", action="append", default=[], metavar="NAME", help="measure this case; repeatable")
    about = (
        "measure this set of offload_modules, not the case's own ('all': its last one); repeatable"
    )
    add("--modules", action="append", default=[], metavar="A+B", help=about)
    about = "ways of --list beside the first, which is always measured (default: all)"
    add("--engines", default="", metavar="E,F", help=about)
    about = "an option of OffloadConfig for every Slipstream engine; repeatable"
    add("--engine-option", action="append", default=[], metavar="NAME=VALUE", help=about)
    _add_limits(parser)
    folder = ROOT / "benchmarks/results"
    add("--output", type=Path, default=folder, metavar="DIR", help="(default: benchmarks/results)")
    add("--name", default="engines", help="name of the files (default: %(default)s)")
    add("--append", action="store_true", help="add to the rows that are there already")
    add("--worker", metavar="CASE", help=argparse.SUPPRESS)
    add("--run-id", default="", help=argparse.SUPPRESS)
    return parser


def _add_limits(parser: argparse.ArgumentParser) -> None:
    """Add options that make a run shorter."""
    add, usual = parser.add_argument, dataclasses.asdict(Limits())
    for name, field, text in (
        ("--min-iterations", "min_iterations", "timed iterations of each way, at least"),
        ("--max-iterations", "max_iterations", "the same, at most"),
        ("--warmups", "num_warmups", "iterations of each way before those"),
        ("--max-planning", "max_planning", "iterations in which Slipstream plans, at most"),
        ("--memory-iterations", "num_memory_iterations", "of each way alone, for its peak"),
        ("--planning-seconds", "planning_seconds", "time for planning, of each Slipstream engine"),
        ("--seconds-per-variant", "seconds", "time for the iterations of a set of modules in turn"),
    ):
        default = usual[field]
        help_, kind = f"{text} (default: %(default)s)", type(default)
        metavar = "S" if kind is float else "N"
        add(name, type=kind, default=default, dest=field, metavar=metavar, help=help_)
    about = "what to measure beside step times (default: %(default)s)"
    add("--figures", default=",".join(FIGURES), metavar="A,B", help=about)


def _limits(options: argparse.Namespace) -> Limits:
    if options.min_iterations < 2 or options.max_iterations < options.min_iterations:
        raise ValueError(
            f"--min-iterations {options.min_iterations} --max-iterations {options.max_iterations} "
            "leave nothing to take a median of; set at least 2, and the most no less than the least"
        )
    for name in ("num_warmups", "max_planning", "num_memory_iterations"):
        if getattr(options, name) < 1:
            option = f"--{name.removeprefix('num_').replace('_', '-')}"
            raise ValueError(f"{option} {getattr(options, name)} is too few; set at least 1")
    figures = tuple(filter(None, options.figures.split(",")))
    for figure in figures:
        if figure not in FIGURES:
            raise ValueError(f"--figures {figure} is not one; Figures: {', '.join(FIGURES)}")
    fields = {field.name: getattr(options, field.name) for field in dataclasses.fields(Limits)}
    return Limits(**{**fields, "figures": figures})


def _engines(options: argparse.Namespace, case: Case) -> tuple[str, ...]:
    names = tuple(filter(None, options.engines.split(",")))
    known = COMPARISONS[case.comparison]
    for name in names:
        if name.partition(":")[0] not in known:
            raise ValueError(
                f"--engines {name} is not an engine of --case {case.name}; set some of: "
                f"{', '.join(known)}"
            )
    return names


def engine_options(texts: Sequence[str]) -> dict[str, Any]:
    """Parse ``NAME=VALUE`` texts, each value as a Python literal or else a string."""
    options = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--engine-option {text} is not NAME=VALUE")
        try:
            options[name] = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            options[name] = value
    return options


def _list_cases(cases: Sequence[Case]) -> str:
    lines = []
    for case in cases:
        needs = f"{case.num_ranks} GPU(s)" if case.needs_gpu else f"{case.num_ranks} process(es)"
        lines.append(f"{case.name} ({needs}): {case.about}")
        for variant in case.variants:
            lines.append(f"    {variant.name}  [{', '.join(way_labels(case, variant, ()))}]")
    return "\n".join(lines) + "\n"


def _job(options: argparse.Namespace, case: Case, run: str, arguments: Sequence[str]) -> Job:
    return Job(
        case,
        select_variants(case, options.modules),
        _engines(options, case),
        engine_options(options.engine_option),
        _limits(options),
        options.output / f"{options.name}.jsonl",
        run,
        tuple(arguments),
    )


def _work(job: Job) -> NoReturn:
    """Run as one rank, then end the process."""
    status = 1
    try:
        status = work(job)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip the interpreter's shutdown, in which NCCL threads may wait for ranks that have exited.
    os._exit(status)


def _run(options: argparse.Namespace, cases: Sequence[Case], arguments: Sequence[str]) -> int:
    from benchmarks.table import write_results

    if not cases:
        raise ValueError("nothing to measure; name a --case (--list shows them)")
    run = time.strftime("%Y-%m-%dT%H:%M:%S")
    jobs = [_job(options, case, run, arguments) for case in cases]
    _check_devices(cases, jobs[0].limits.figures)
    rows = jobs[0].rows
    if rows.exists() and not options.append:
        raise ValueError(f"{rows} exists; give another --name, or --append to add to it")
    rows.parent.mkdir(parents=True, exist_ok=True)
    rows.touch()
    for job in jobs:
        sys.stderr.write(f"{job.case.name}: {job.case.about}\n")
        _run_case(job)
    for path in write_results(rows):
        sys.stdout.write(f"{path}\n")
    return 0


def _check_devices(cases: Sequence[Case], figures: Sequence[str]) -> None:
    num_gpus = num_places()
    for case in cases:
        if share_a_gpu(case.num_ranks) and set(figures) - {"memory"}:
            raise ValueError(
                f"--figures {','.join(figures)} is not supported with --case {case.name} because "
                f"some of its {case.num_ranks} ranks share a GPU ({VARIABLE}), so that times say "
                "nothing; set --figures memory"
            )
        num_needed = case.num_ranks if case.needs_gpu or num_gpus else 0
        if num_needed > num_gpus:
            others = ", ".join(case.name for case in CASES if not case.needs_gpu)
            raise ValueError(
                f"--case {case.name} needs {num_needed} GPU(s), there are {num_gpus}; without a "
                f"GPU there are: {others}"
            )


def _run_case(job: Job) -> None:
    """Measure a case; restart it without what failed, as long as that makes progress."""
    while True:
        before = finished(read_rows(job.rows), job.run, job.case.name)
        status = _run_ranks(job)
        if status == 0:
            return
        done = finished(read_rows(job.rows), job.run, job.case.name)
        if status != EXIT_WAY_FAILED or done == before:
            fields = {"case": job.case.name, "variant": "-", "engine": "-", "rank": 0}
            error = f"the process ended with status {status}; see its messages"
            writer = RowWriter(job.rows, job.run)
            writer.write("summary", **fields, num_ranks=job.case.num_ranks, error=error)
            return


def _run_ranks(job: Job) -> int:
    """Start the ranks of a case and wait for them; return 0 or a failed rank's exit status."""
    port = free_port()
    ranks = [_start_rank(job, rank, port) for rank in range(job.case.num_ranks)]
    try:
        while True:
            codes = [rank.poll() for rank in ranks]
            failed = [code for code in codes if code]
            if failed:
                _wait(ranks)
                # A failed way is the root cause; other ranks fail because they lost their peer.
                codes = [rank.poll() for rank in ranks]
                return EXIT_WAY_FAILED if EXIT_WAY_FAILED in codes else failed[0]
            if all(code == 0 for code in codes):
                return 0
            time.sleep(0.2)
    finally:
        for rank in ranks:
            rank.terminate()
        _wait(ranks)
        for rank in ranks:
            rank.kill()
            rank.wait()


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    deadline_s = time.monotonic() + GRACE_S
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline_s:
        time.sleep(0.1)


def _start_rank(job: Job, rank: int, port: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.run", *job.arguments]
    command += ["--worker", job.case.name, "--run-id", job.run]
    return subprocess.Popen(command, env=rank_environment(rank, job.case.num_ranks, port))


def rank_environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """Return the environment variables of a rank's process."""
    # Make this package importable from any folder; the output path stays relative to this one.
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {
        # Transformer Engine reads this on import; without it, its saved tensors do not move.
        "NVTE_CPU_OFFLOAD_V1": "1",
        **os.environ,
        "PYTHONPATH": path,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


if __name__ == "__main__":
    sys.exit(main())
