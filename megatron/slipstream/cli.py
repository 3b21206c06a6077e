# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The ``slipstream`` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Optional


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
    return parser


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


if __name__ == "__main__":
    sys.exit(main())
