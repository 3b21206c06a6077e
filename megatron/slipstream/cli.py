# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The ``slipstream`` command."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from megatron.slipstream.config import AUTO_OVERHEAD_PERCENT, parse_percent

if TYPE_CHECKING:
    from megatron.slipstream.plan.build import Plan
    from megatron.slipstream.plan.policy import PolicyOptions
    from megatron.slipstream.plan.simulate import Simulation
    from megatron.slipstream.plan.trace import Trace


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the command. Returns the exit status: 0, or 2 for an error of the user's."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="slipstream", description="Activation offloading for Megatron-Core."
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    report = commands.add_parser(
        "report",
        help="show what a training run moved",
        description="Show the report of a training run: per rank and module the bytes copied out "
        "and back, the device memory given up, the stalls, and the plan as a grid.",
        epilog="A run writes the file if started with --offload-report-path FILE.",
    )
    report.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="report of one or more ranks, as written by --offload-report-path",
    )
    report.set_defaults(run=_show_report)
    _add_plan(commands)
    return parser


_PLAN_EPILOG = """\
Examples:

  What would move, when, and what it would cost:
    slipstream plan trace.json

  The fastest plan under 60 GiB; keep it, and see where it stalls:
    slipstream plan trace.json --target-memory 60 --output plan.json --timeline plan.png

  The most memory that 1 percent of the step time buys:
    slipstream plan trace.json --max-overhead 1

  All that can be had, as a picture of memory against time:
    slipstream plan trace.json --frontier frontier.png

A timeline as .json opens in https://ui.perfetto.dev. A frontier as .json holds every plan of the
sweep. Times are simulated from those in the trace: a real step stalls at least as long.
"""


def _add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    plan = commands.add_parser(
        "plan",
        help="plan a recorded iteration, and predict its step time and memory",
        description="Plan the iteration of a trace file and show, as a grid, what moves when. "
        "Predict its step time, stalls and memory peaks. Needs no GPU.",
        epilog=_PLAN_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    plan.add_argument("trace", type=Path, metavar="TRACE.json", help="trace of one rank")
    what = plan.add_argument_group("what to aim for")
    what.add_argument(
        "--target-memory",
        type=float,
        metavar="GIB",
        help="move as little as brings the device peak down to this many GiB",
    )
    what.add_argument(
        "--max-overhead",
        type=parse_percent,
        metavar="PERCENT",
        help="move no more than makes the step this much longer than its computation ('auto' is "
        f"{AUTO_OVERHEAD_PERCENT:g})",
    )
    what.add_argument(
        "--fraction",
        type=float,
        metavar="F",
        help="move this share of each pass's groups, 0 to 1; the latest ones stay",
    )
    _add_plan_files(plan.add_argument_group("what to write"))
    plan.set_defaults(run=_show_plan)


def _add_plan_files(files: argparse._ArgumentGroup) -> None:
    files.add_argument("--output", type=Path, metavar="PLAN.json", help="the plan, with its trace")
    files.add_argument(
        "--timeline",
        type=Path,
        metavar="FILE.{png,json}",
        help="compute, copies, stalls and memory over time: a picture, or a trace for Perfetto",
    )
    files.add_argument(
        "--frontier",
        type=Path,
        metavar="FILE.{png,json}",
        help="plan for many targets, and draw or write device peak against overhead",
    )


def _show_report(options: argparse.Namespace) -> None:
    # Imported here so that `slipstream --help` answers at once.
    from megatron.slipstream.fine_grained_activation_offload.report import Report

    reports = []
    for path in options.files:
        try:
            reports.append(Report.from_json(path.read_text()))
        except FileNotFoundError:
            raise ValueError(
                f"{path} does not exist; train with --offload-report-path {path} to write it"
            ) from None
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    sys.stdout.write(Report.merge(reports).render() + "\n")


def _show_plan(options: argparse.Namespace) -> None:
    # None of these imports torch: a trace can be planned where it is not installed.
    from megatron.slipstream.plan.build import build_plan
    from megatron.slipstream.plan.check import check_plan
    from megatron.slipstream.plan.files import load_trace, save_plan, write_whole
    from megatron.slipstream.plan.render import render_plan
    from megatron.slipstream.plan.simulate import simulate

    _check_suffixes(options)
    try:
        trace = load_trace(options.trace)
    except FileNotFoundError:
        raise ValueError(
            f"{options.trace} does not exist; train with --offload-trace-path {options.trace} to "
            "write it"
        ) from None
    policy = _policy_options(options)
    plan = build_plan(trace, policy)
    facts = check_plan(plan)
    sys.stdout.write(render_plan(plan) + "\n")
    sys.stdout.write(f"Proved safe at any speed of the copies: {facts.num_operations} operations\n")
    if options.output:
        save_plan(plan, options.output)
    if not trace.step_ms and not options.timeline and not options.frontier:
        sys.stdout.write("The trace has no times, so the step time is not predicted.\n")
        return
    simulation = simulate(plan)
    sys.stdout.write(f"\nPredicted\n{simulation.render()}\n")
    if options.timeline:
        write_whole(options.timeline, _timeline(plan, simulation, options.timeline.suffix))
    if options.frontier:
        write_whole(options.frontier, _frontier(trace, policy, options.frontier.suffix))


def _check_suffixes(options: argparse.Namespace) -> None:
    """Before minutes are spent on what cannot be written."""
    for name in ("timeline", "frontier"):
        path = getattr(options, name)
        if path and path.suffix not in (".png", ".json"):
            raise ValueError(f"--{name}={path} is not supported; name a .png or a .json file")


def _policy_options(options: argparse.Namespace) -> PolicyOptions:
    from megatron.slipstream.plan.policy import PolicyOptions

    given: dict[str, Any] = {}
    if options.fraction is not None:
        if not 0 <= options.fraction <= 1:
            raise ValueError(f"--fraction={options.fraction} is no share; give one from 0 to 1")
        given["activation_offload_fraction"] = options.fraction
    if options.target_memory is not None:
        if not 0 < options.target_memory < math.inf:
            raise ValueError(f"--target-memory={options.target_memory} must be above 0 GiB")
        given["target_memory_bytes"] = int(options.target_memory * 2**30)
    if options.max_overhead is not None:
        if not 0 <= options.max_overhead < math.inf:
            raise ValueError(f"--max-overhead={options.max_overhead} must be 0 percent or more")
        given["max_overhead_percent"] = options.max_overhead
    return PolicyOptions(**given)


def _timeline(plan: Plan, simulation: Simulation, suffix: str) -> bytes:
    from megatron.slipstream.plan.pictures import timeline_png
    from megatron.slipstream.plan.timeline import perfetto_json

    return (timeline_png if suffix == ".png" else perfetto_json)(plan, simulation)


def _frontier(trace: Trace, policy: PolicyOptions, suffix: str) -> bytes:
    """Sweep behind a progress bar, show the table, and give the file's content."""
    from rich.console import Console
    from rich.progress import Progress

    from megatron.slipstream.plan.frontier import sweep
    from megatron.slipstream.plan.pictures import frontier_png, require_matplotlib

    if suffix == ".png":
        require_matplotlib()  # Not to find out after the sweep.
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("planning for many targets", total=None)
        frontier = sweep(
            trace,
            policy,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    sys.stdout.write(f"\nMemory against time\n{frontier.render()}\n")
    return frontier_png(frontier) if suffix == ".png" else frontier.to_json()


if __name__ == "__main__":
    sys.exit(main())
