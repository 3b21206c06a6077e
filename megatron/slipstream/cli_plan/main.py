# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The ``plan`` sub-command."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Optional

from megatron.slipstream.cli_plan.fits import finder_for, prepare_search, show_fits
from megatron.slipstream.cli_plan.models import (
    MAX_BYTES,
    check_sizes,
    configured_by,
    limit_bytes,
    speed_for,
)
from megatron.slipstream.cli_plan.options import TRAINING, UNTIMED, as_typed, refuse
from megatron.slipstream.estimate import file_errors, frontier, shape_tables
from megatron.slipstream.estimate.gpus import Speed
from megatron.slipstream.estimate.model_shapes import MAX_SIZE
from megatron.slipstream.estimate.synthetic import Workplan, synthetic_trace
from megatron.slipstream.estimate.training_command import is_command
from megatron.slipstream.estimate.training_setup import Configured
from megatron.slipstream.estimate.what_if import assumptions, at_length
from megatron.slipstream.plan.actions import Plan
from megatron.slipstream.plan.build import build_plan
from megatron.slipstream.plan.candidates import PolicyOptions
from megatron.slipstream.plan.check import check_plan
from megatron.slipstream.plan.files import load_trace, save_plan
from megatron.slipstream.plan.progress_bar import bar_on_stderr
from megatron.slipstream.plan.render import render_plan, summarize
from megatron.slipstream.plan.selection import why_not_followed
from megatron.slipstream.plan.timeline import perfetto_json
from megatron.slipstream.plan.trace import Trace
from megatron.slipstream.plan.walk import Simulation, simulate
from megatron.slipstream.plan.whole_files import write_whole

GRID_ROWS = 16
"""Grid rows for a model that has not run: enough to show two layers."""

DETAILS_HINT = "--details shows every group, and for a model the bytes of its layers"

TARGET_NOT_MET = 3
"""Exit status if no plan meets --target-memory; the shown plan has the lowest peak."""

GOAL_NOT_FOLLOWED = 4
"""Exit status if the trace lacks data that --target-memory or --max-overhead needs."""


def show_plan(options: argparse.Namespace) -> int:
    """Plan the trace or model that the options name, show the plan, and return the exit status."""
    _check_files(options)
    words = options.words[1:] if options.words[:1] == ["--"] else options.words
    is_trace = len(words) == 1 and not words[0].startswith("-") and not is_command(words[0])
    sources = {
        "a trace": is_trace,
        "flags after --": bool(words) and not is_trace,
        "--hf-config": options.hf_config is not None,
        "--args-file": options.args_file is not None,
    }
    given = [source for source, is_given in sources.items() if is_given]
    if len(given) != 1:
        found = " and ".join(given) or "nothing to plan"
        raise ValueError(
            f"{found} is given; name one of a trace, --hf-config, --args-file or flags after -- "
            "(slipstream plan --help has examples)"
        )
    if all(word.endswith(".json") for word in words[:2]) and len(words) > 1:
        raise ValueError(
            f"{len(words)} traces are given, but a plan is for one rank; name one of them"
        )
    if given[0] != "--hf-config":
        own = [name for name in TRAINING if name != "seq_length" or not is_trace]
        refuse(options, own, f"with {given[0]}", "that has its own")
    if is_trace:
        refuse(options, UNTIMED, f"with {given[0]}", "that has times and sizes of its own")
        return _show_trace(Path(words[0]), options)
    refuse(options, ["recorded_seq_length"], f"with {given[0]}", "nothing was recorded there")
    try:
        return _show_configured(words, options)
    except ValueError as error:
        if options.hf_config is None:
            raise
        raise ValueError(as_typed(str(error), options)) from error


@contextmanager
def _progress(what: str) -> Iterator[None]:
    """Show a bar on stderr for an operation of unknown length."""
    with bar_on_stderr() as progress:
        progress.add_task(what, total=None)
        yield


def _check_files(options: argparse.Namespace) -> None:
    paths = {"TRACE": Path(options.words[0])} if len(options.words) == 1 else {}
    for name, drawn in (("output", None), ("timeline", ".html"), ("frontier", ".png")):
        path = getattr(options, name)
        if path is None:
            continue
        paths[f"--{name}"] = path
        file_errors.require_writable(f"--{name}", path)
        if drawn and path.suffix not in (drawn, ".json"):
            raise ValueError(
                f"--{name}={path} is not supported because only {drawn} and .json are written; "
                f"name a {drawn} or a .json file"
            )
    file_errors.require_distinct(paths)


# A trace


def _show_trace(path: Path, options: argparse.Namespace) -> int:
    with (
        file_errors.reading("trace ", path, "--offload-trace-path"),
        _progress(f"reading {path.name}"),
    ):
        trace = load_trace(path)
    trace, notes = _at_length(trace, options)
    policy = _policy_options(options, PolicyOptions())
    with _progress("planning"):
        plan = build_plan(trace, policy)
        needs_times = options.timeline or options.frontier
        simulation = simulate(plan) if trace.step_ms or needs_times else None
    _show(plan, simulation, 64 if options.details else 0)
    sys.stdout.writelines(f"{note}\n" for note in notes)
    _write(plan, simulation, partial(frontier.sweep, trace, policy), options)
    return _status(plan)


def _at_length(trace: Trace, options: argparse.Namespace) -> tuple[Trace, list[str]]:
    """Return the trace at --seq-length, if that is set, and what this takes for granted."""
    recorded = trace.seq_length
    if options.recorded_seq_length is not None:
        flag = f"--recorded-seq-length={options.recorded_seq_length}"
        if recorded:
            raise ValueError(
                f"{flag} is not supported with this trace because that says {recorded}; leave it "
                "out"
            )
        if options.seq_length is None or options.recorded_seq_length < 1:
            raise ValueError(f"{flag} must be 1 or more, and with --seq-length; set that, too")
        recorded = options.recorded_seq_length
    if options.seq_length is None:
        return trace, []
    if not 0 < options.seq_length <= MAX_SIZE:
        raise ValueError(f"--seq-length={options.seq_length} must be 1 to {MAX_SIZE}")
    scaled = at_length(replace(trace, seq_length=recorded), options.seq_length)
    return scaled, assumptions(scaled, recorded)


def _status(plan: Plan) -> int:
    if why_not_followed(plan.trace, plan.options):
        return GOAL_NOT_FOLLOWED
    # A plan for a target has notes only if the target cannot be met.
    has_target = plan.options.target_memory_bytes is not None
    return TARGET_NOT_MET if has_target and plan.notes else 0


def _show(plan: Plan, simulation: Optional[Simulation], num_rows: int) -> None:
    with _progress("proving the plan safe"):
        facts = check_plan(plan)
    sys.stdout.write(f"{summarize(plan)}\n")
    if simulation is None:
        sys.stdout.write("The trace has no times, so the step time is not predicted.\n")
    else:
        sys.stdout.write(f"\nPredicted\n{simulation.render()}\n")
    sys.stdout.write(f"Proved safe at any speed of the copies: {facts.num_operations} operations\n")
    if num_rows:
        sys.stdout.write(f"\n{render_plan(plan, max_rows=num_rows)}\n")
    else:
        sys.stdout.write(f"{DETAILS_HINT}\n")


def _write(
    plan: Plan,
    simulation: Optional[Simulation],
    sweep: Callable[..., frontier.Frontier],
    options: argparse.Namespace,
) -> None:
    if options.output:
        with file_errors.writing("--output", options.output):
            save_plan(plan, options.output)
    if options.timeline and simulation is not None:
        if options.timeline.suffix == ".json":
            timeline = perfetto_json(plan, simulation)
        else:
            from megatron.slipstream.report_page.page import render_plan_page

            timeline = render_plan_page(plan, simulation).encode()
        with file_errors.writing("--timeline", options.timeline):
            write_whole(options.timeline, timeline)
    if options.frontier:
        is_drawn = options.frontier.suffix == ".png"
        if is_drawn:
            frontier.require_matplotlib()  # Fail before the sweep rather than after it.
        with bar_on_stderr() as progress:
            task = progress.add_task("planning for many targets", total=None)
            found = sweep(
                progress=lambda done, total: progress.update(task, completed=done, total=total)
            )
        sys.stdout.write(f"\nMemory against time\n{found.render()}\n")
        with file_errors.writing("--frontier", options.frontier):
            content = frontier.frontier_png(found) if is_drawn else found.to_json()
            write_whole(options.frontier, content)


def _policy_options(options: argparse.Namespace, training: PolicyOptions) -> PolicyOptions:
    """Return the policy with the options' goal, if they have one, in place of the training's."""
    memory, overhead = options.target_memory, options.max_overhead
    if memory is not None and overhead is not None:
        raise ValueError(
            f"--target-memory={memory} is not supported with --max-overhead={overhead} because "
            "each alone decides how much moves; give one of them"
        )
    if options.fraction is not None:
        if not 0 <= options.fraction <= 1:
            raise ValueError(f"--fraction={options.fraction} must be from 0 to 1")
        training = replace(training, activation_offload_fraction=options.fraction)
    if memory is None and overhead is None:
        return training
    if overhead is not None and not 0 <= overhead < math.inf:
        raise ValueError(f"--max-overhead={overhead} must be 0 percent or more")
    target = limit_bytes("--target-memory", memory)
    return replace(training, target_memory_bytes=target, max_overhead_percent=overhead)


# A configuration


def _show_configured(words: Sequence[str], options: argparse.Namespace) -> int:
    is_search = prepare_search(options)
    with _progress("reading the configuration"):
        configured = configured_by(words, options)
    if is_search:
        return show_fits(configured, options)
    speed = speed_for(configured, options)
    policy = _policy_options(options, configured.policy)
    ranks = _plan_ranks(configured, speed, policy, options)
    lines = [shape_tables.answer(ranks, configured.title)]
    lines += shape_tables.rank_table(ranks, speed.memory_gib, configured.num_ranks_of_host)
    lines += ["", *shape_tables.describe(configured, speed)]
    if options.details:
        lines += shape_tables.layer_tables(configured, speed)
    sys.stdout.writelines(f"{line}\n" for line in lines)
    shown = ranks[0]
    if shown.plan is None:
        sys.stdout.write(
            f"\nPipeline rank {shown.pp_rank} has no layer with one of --offload-modules; "
            "--details shows the modules that it has.\n"
        )
        return 0
    has_goal = policy.target_memory_bytes is not None or policy.max_overhead_percent is not None
    if options.details or has_goal or options.output or options.timeline:
        sys.stdout.write(f"\nPlan of pipeline rank {shown.pp_rank}\n")
        _show(shown.plan, shown.simulation, GRID_ROWS if options.details else 0)
    else:
        sys.stdout.write(f"{DETAILS_HINT}\n")
    budgets = partial(frontier.sweep_budgets, finder_for(configured, speed, options))
    _write(shown.plan, shown.simulation, budgets, options)
    if not (options.frontier or has_goal):
        sys.stdout.write(
            "--frontier FILE.png plots memory against time; --max-overhead 1 moves what hides; "
            "--longest-sequence finds what fits\n"
        )
    return max(_status(rank.plan) for rank in ranks if rank.plan is not None)


def _plan_ranks(
    configured: Configured, speed: Speed, policy: PolicyOptions, options: argparse.Namespace
) -> list[shape_tables.RankPlan]:
    pp = configured.shape.parallelism.pp
    if options.rank is not None and not 0 <= options.rank < pp:
        raise ValueError(f"--rank={options.rank} must be a pipeline rank, 0 to {pp - 1}")
    most_gib = MAX_BYTES >> 30
    if options.state_gib is not None and not 0 <= options.state_gib <= most_gib:
        raise ValueError(f"--state-gib={options.state_gib} must be 0 to {most_gib}")
    work = Workplan(
        configured.shape, speed, configured.modules, configured.num_micro_batches,
        configured.min_numel,
    )  # fmt: skip
    found = []
    ranks = range(pp) if options.rank is None else [options.rank]
    check_sizes(work, ranks, options)
    with bar_on_stderr() as progress:
        for rank in progress.track(ranks, description="planning pipeline ranks"):
            state = configured.state_bytes(rank)
            trace = synthetic_trace(work, rank, state)
            plan = build_plan(trace, policy) if trace.steps else None
            simulation = None if plan is None else simulate(plan)
            found.append(shape_tables.RankPlan(work, rank, state, plan, simulation))
    return found
