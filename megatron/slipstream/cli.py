# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The ``slipstream`` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Optional

from megatron.slipstream.cli_plan.options import add_plan
from megatron.slipstream.doctor.main import add_doctor
from megatron.slipstream.launcher import INTERRUPTED
from megatron.slipstream.options.rules import nearest_flags
from megatron.slipstream.report_page.main import add_report
from megatron.slipstream.version import __version__


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the command; return its exit status: 2 for a user error, 130 after Ctrl-C."""
    options, unknown = _parser().parse_known_args(arguments)
    if unknown:
        # Reported by the sub-command's parser, whose usage helps; argparse would show the parent's.
        known = [flag for action in options.parser._actions for flag in action.option_strings]
        flags = [word.partition("=")[0] for word in unknown if word[:2] == "--"]
        hint = nearest_flags(flags, known) + getattr(options, "hint_for_unknown", "")
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    try:
        status = options.run(options) or 0
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader closed the pipe, as 'head' does; avoid Python's error at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return INTERRUPTED
    except (OSError, ValueError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="slipstream", description="Activation offloading for Megatron-Core."
    )
    parser.add_argument("--version", action="version", version=f"slipstream {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    add_report(commands)
    add_plan(commands, _plan)
    add_doctor(commands)
    for command in commands.choices.values():
        command.set_defaults(parser=command)
    return parser


def _plan(options: argparse.Namespace) -> int:
    # Imported when it runs, so that the other commands start without it.
    from megatron.slipstream.cli_plan.main import show_plan

    return show_plan(options)


if __name__ == "__main__":
    sys.exit(main())
