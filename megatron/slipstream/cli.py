# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The ``slipstream`` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Optional

from megatron.slipstream.cli_plan.main import add_plan
from megatron.slipstream.doctor.main import add_doctor
from megatron.slipstream.report_page.main import add_report


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the command.

    Returns:
        The exit status: what the sub-command returns, 0 if that is nothing, or 2 for an error of
        the user's.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        return options.run(options) or 0
    except (OSError, ValueError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="slipstream", description="Activation offloading for Megatron-Core."
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    add_report(commands)
    add_plan(commands)
    add_doctor(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
