# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The ``report`` sub-command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.slipstream.estimate.file_errors import reading, require_writable, writing
from megatron.slipstream.report_page import PAGE_SUFFIXES

if TYPE_CHECKING:
    from megatron.slipstream.fine_grained_activation_offload.report import Report
    from megatron.slipstream.plan.actions import Plan

_EPILOG = """\
Examples:
  slipstream report report.json                                      as text
  slipstream report report.json --trace trace.json --html report.html
  slipstream report report*.json --trace trace*.json --html report.html   a page of all ranks

Train with --offload-report-path FILE and --offload-trace-path FILE to write these files. The page
is one file and needs no network.
"""


def add_report(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "report",
        help="show the bytes that a training run moved, its stalls and its memory",
        description="Show the report of a training run: per rank and module the bytes copied out "
        "and back, the device memory freed, the stalls, and the plan as a grid. Or write it as an "
        "HTML page.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    about = "report of one or more ranks, written by --offload-report-path"
    add("files", nargs="+", type=Path, metavar="FILE", help=about)
    about = "write a page: what was saved, what it cost, what is wrong, how ranks differ"
    add("--html", type=Path, metavar="FILE.html", help=about)
    about = (
        "their traces (--offload-trace-path), in the same order, for the page's charts and groups"
    )
    add("--trace", nargs="+", type=Path, default=(), metavar="TRACE.json", help=about)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Show the text, or write the page."""
    # Imported here to keep `slipstream --help` fast.
    from megatron.slipstream.fine_grained_activation_offload.report import Report
    from megatron.slipstream.report_page.findings import next_step

    _check(options)
    reports = []
    for path in options.files:
        with reading("report ", path, "--offload-report-path"):
            data = path.read_bytes()
        reports.append(Report.from_json(data, path))
    _refuse_repeated(options.files, reports)
    report = Report.merge(reports)
    if options.html is None:
        sys.stdout.write(f"{report.render()}\n\nNext step: {next_step(report)}\n")
    else:
        _write_page(options, reports, report)


def _check(options: argparse.Namespace) -> None:
    if options.html is None:
        if options.trace:
            raise ValueError(
                "--trace is not supported without --html because only the page has a timeline; "
                "add --html report.html"
            )
        return
    if options.html.suffix not in PAGE_SUFFIXES:
        raise ValueError(f"--html={options.html} is not the name of a page; name a .html file")
    require_writable("--html", options.html)
    if len(options.trace) > len(options.files):
        raise ValueError(
            f"--trace has {len(options.trace)} files for {len(options.files)} reports; give one "
            "per report, in the same order"
        )


def _refuse_repeated(paths: Sequence[Path], reports: Sequence[Report]) -> None:
    """Reject two reports of the same rank, which sums over ranks would count twice."""
    found: dict[int, Path] = {}
    for path, report in zip(paths, reports, strict=True):
        for rank in report.ranks:
            if rank.rank in found:
                raise ValueError(
                    f"{path} has rank {rank.rank}, and so has {found[rank.rank]}; give one report "
                    "per rank"
                )
            found[rank.rank] = path


def _write_page(options: argparse.Namespace, reports: Sequence[Report], report: Report) -> None:
    from megatron.slipstream.plan.progress_bar import bar_on_stderr
    from megatron.slipstream.report_page.page import save_page

    with bar_on_stderr() as progress:
        sources = zip(options.trace, reports, strict=False)
        plans = dict(
            _plan(*source)
            for source in progress.track(sources, total=len(options.trace), description="planning")
        )
    with writing("--html", options.html):
        save_page(options.html, report, plans)
    size = options.html.stat().st_size
    ranks = f"{len(report.ranks)} rank{'s' if len(report.ranks) != 1 else ''}"
    sys.stdout.write(f"{options.html}: {size / 1e6:.1f} MB, {ranks}\n")


def _plan(path: Path, report: Report) -> tuple[int, Plan]:
    """Return the rank of a report, and its plan, rebuilt from the rank's trace."""
    from megatron.slipstream.plan.build import build_plan
    from megatron.slipstream.plan.candidates import PolicyOptions
    from megatron.slipstream.plan.check import check_plan
    from megatron.slipstream.plan.files import load_trace

    if len(report.ranks) != 1:
        raise ValueError(
            f"{path} belongs to a report of {len(report.ranks)} ranks, but a trace is of one rank; "
            "give the reports of single ranks, as a run writes them"
        )
    (rank,) = report.ranks
    with reading("--trace=", path, "--offload-trace-path"):
        trace = load_trace(path)
    plan = build_plan(trace, rank.options or PolicyOptions())
    check_plan(plan)
    return rank.rank, plan
