# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The ``doctor`` sub-command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_EPILOG = """\
Examples:

  Check this machine:
    slipstream doctor

  Also check the flags of a training (no model is built):
    slipstream doctor -- --num-layers 32 ... --fine-grained-activation-offloading
    slipstream doctor -- torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 32 ...

  Check as a rank, with the launcher's environment and bindings:
    srun --ntasks-per-node 8 slipstream doctor --json doctor.json --no-bandwidth

Marks: ok, note (information), warning (slow, or fails later), error (fails, or computes wrong).
Exit status: 0 without errors, 1 with errors, 2 for invalid options.
"""


def add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "doctor",
        help="check this machine for causes of failing or slow training, and show cures",
        description="Check versions, environment variables, GPUs and their links, NUMA, host "
        "memory and the flags of a training, and show a cure for every problem. Works without a "
        "GPU too.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="-- COMMAND",
        help="flags of a training, or the whole command with torchrun and script, to check with "
        "megatron's parser and all rules",
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write findings and facts as JSON to this file; '-' writes them in place of the table",
    )
    parser.add_argument(
        "--no-bandwidth",
        action="store_true",
        help="do not measure copies (which takes a few seconds, 256 MiB of each GPU and of host "
        "memory)",
    )
    parser.add_argument(
        "--ranks-per-host",
        type=int,
        metavar="N",
        help="processes of the training on this host, which share its memory (default: the "
        "launcher's number, or one for each GPU)",
    )
    hint = "; put the flags of a training after '--'"
    parser.set_defaults(run=run, hint_for_unknown=hint)


def run(options: argparse.Namespace) -> int:
    """Examine the machine, show the findings, and return the exit status."""
    # Imported here to keep `slipstream --help` fast.
    from megatron.slipstream.doctor.checks import examine, findings_of
    from megatron.slipstream.doctor.collect import Request, collect
    from megatron.slipstream.doctor.show import render, to_json
    from megatron.slipstream.estimate.file_errors import require_writable, writing
    from megatron.slipstream.plan.whole_files import write_whole

    if options.ranks_per_host is not None and options.ranks_per_host < 1:
        raise ValueError(
            f"--ranks-per-host={options.ranks_per_host} must be positive; give 1 or more"
        )
    path = None if options.json in (None, "-") else Path(options.json)
    if path is not None:
        require_writable("--json", path)
    request = Request(options.ranks_per_host, not options.no_bandwidth, options.words)
    with _progress() as progress:
        facts = collect(request, progress)
    rows = examine(facts)
    if options.json == "-":
        sys.stdout.write(to_json(facts, rows))
    else:
        render(rows, sys.stdout)
        if path is not None:
            with writing("--json", path):
                write_whole(path, to_json(facts, rows).encode())
    return int(any(finding.severity == "error" for finding in findings_of(rows)))


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Show a bar on stderr that names the current step."""
    from megatron.slipstream.plan.progress_bar import bar_on_stderr

    with bar_on_stderr() as progress:
        task = progress.add_task("", total=None)
        yield lambda what: progress.update(task, description=f"checking {what}")
