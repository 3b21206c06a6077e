# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""What the commands share that compare ways to run the kernels of one model."""

from __future__ import annotations

import argparse
import gc
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from garbage import without_garbage_collection
from rich.console import Console
from rich.progress import Progress


def parser_of(
    module: str, cases: Mapping[str, str], description: str, epilog: str
) -> argparse.ArgumentParser:
    """A parser without arguments, whose help lists the cases.

    Args:
        module: Of the command, as in ``python -m benchmarks.MODULE``.
        cases: What each of them is, by name.
        description: What the command does.
        epilog: What follows the cases.
    """
    width = 1 + max(map(len, cases))
    lines = "".join(f"  {name:{width}s} {what}\n" for name, what in cases.items())
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{module}",
        description=description,
        epilog=f"cases:\n{lines}\n{epilog}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def in_turn[Way](ways: Sequence[Way], round_number: int) -> list[Way]:
    """The ways in the order of a round: a random one, the same on all ranks.

    What a way leaves behind (heat, caches) must not always meet the same other one.
    """
    return random.Random(round_number).sample(ways, len(ways))


def take_turns[Way](
    ways: Sequence[Way], num_rounds: int, step: Callable[[Way, int], Any], console: Console
) -> None:
    """Call ``step(way, number of the round)`` for every way in every round.

    Args:
        ways: See :func:`in_turn`.
        num_rounds: How many.
        step: Times a step of a way; Python's garbage collector keeps out of it.
        console: Where progress is shown.
    """
    with Progress(console=console, transient=True) as progress, without_garbage_collection():
        for number in progress.track(range(num_rounds), description="measuring"):
            for way in in_turn(ways, number):
                step(way, number)
            gc.collect()
