# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The ``doctor`` sub-command."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from megatron.slipstream.doctor.checks import Row

_EPILOG = """\
Examples:
  slipstream doctor
  slipstream doctor -- torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 32 ...
  srun --ntasks-per-node 8 slipstream doctor --no-bandwidth   # as a rank

Marks: ok, note (information), warning (slow, or fails later), error (fails, or computes wrong).
Exit status: 0 without errors, 1 with errors, 2 for invalid options.
"""


def add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "doctor",
        help="check this machine for causes of failing or slow training, and show cures",
        description="Check what makes a training fail here, and show a cure for every problem.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    about = "flags of a training, or the whole command with torchrun, to check by all rules"
    add("words", nargs="*", metavar="-- COMMAND", help=about)
    about = "do not measure copies (a few seconds, 256 MiB of each GPU and of host memory)"
    add("--no-bandwidth", action="store_true", help=about)
    about = "processes on this host (default: the launcher's number, or one for each GPU)"
    add("--ranks-per-host", type=int, metavar="N", help=about)
    hint = "; put the flags of a training after '--'"
    parser.set_defaults(run=run, hint_for_unknown=hint)


def run(options: argparse.Namespace) -> int:
    """Examine the machine, show the findings, and return the exit status."""
    # Imported here to keep `slipstream --help` fast.
    from megatron.slipstream.doctor.checks import examine
    from megatron.slipstream.doctor.facts import collect

    number = options.ranks_per_host
    if number is not None and number < 1:
        raise ValueError(f"--ranks-per-host={number} must be positive; give 1 or more")
    rows = examine(collect(number, not options.no_bandwidth, options.words))
    render(rows, sys.stdout)
    return int(any(row.severity == "error" for row in rows))


WIDTH = 100


def render(rows: list[Row], stream: TextIO) -> None:
    """Write the rows by topic, and the number of findings."""
    for topic, of_topic in groupby(rows, key=lambda row: row.check.topic):
        lines = [line for row in of_topic for line in _lines(row)]
        stream.write("\n".join([topic, *lines]) + "\n\n")
    numbers = Counter(finding.severity for row in rows for finding in row.findings)
    counted = [
        f"{numbers[severity]} {severity}{'s' if numbers[severity] > 1 else ''}"
        for severity in ("error", "warning", "note")
        if numbers[severity]
    ]
    stream.write(f"Found: {', '.join(counted) or 'nothing'}\n")


def _lines(row: Row) -> Iterator[str]:
    cells: list[tuple[str, str, str]] = [(row.severity, row.check.label, row.value)]
    for finding in row.findings:
        cells.append((finding.severity * (len(row.findings) > 1), "", finding.message))
        cells += [("", "", f"-> {finding.cure}")] * bool(finding.cure)
    for mark, label, text in cells:
        for paragraph in text.split("\n"):
            for part in textwrap.wrap(paragraph, WIDTH - 32, break_on_hyphens=False) or [""]:
                yield f"{mark:<9}{label:<23}{part}".rstrip()
                mark = label = ""
