# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""What the commands share that measure copies of one GPU beside something else."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Optional

import torch


def parser_of(module: str, description: Optional[str]) -> argparse.ArgumentParser:
    """A parser with ``--output`` for ``python -m benchmarks.MODULE``."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{module}", description=description)
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the rows here")
    return parser


def machine_row(command: str) -> dict[str, Any]:
    """The first row: where and how the others were made."""
    return {
        "kind": "machine",
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "command": command,
    }


def write_rows(rows: Callable[[], Iterable[dict[str, Any]]], output: Optional[Path]) -> int:
    """Print rows as they come, and write them.

    Args:
        rows: Makes them, once there is a GPU; a ``ValueError`` is the user's.
        output: JSON lines go here too, once all are there; None for nowhere.

    Returns:
        The exit code: 2 where there is no GPU, or for an error of the user's.
    """
    if not torch.cuda.is_available():
        sys.stderr.write("error: torch sees no GPU, and only a GPU has copy engines\n")
        return 2
    lines = []
    try:
        for row in rows():
            lines.append(json.dumps(row))
            sys.stdout.write(lines[-1] + "\n")
            sys.stdout.flush()
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    if output is not None:
        output.write_text("\n".join(lines) + "\n")
    return 0
