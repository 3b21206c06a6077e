# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The names of flags on a command line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


def given_flags(arguments: Sequence[str]) -> set[str]:
    """Return the flags of a command line, without values, and its other words."""
    return {argument.split("=")[0] for argument in arguments}


def did_you_mean(unknown: Iterable[str], known: Iterable[str]) -> str:
    """Return the end of an error about unknown flags; empty if none resembles a known one."""
    known = sorted(known)
    # Long flags end like others: --num-layers is none of --recompute-num-layers.
    near = [
        match
        for flag in unknown
        for match in difflib.get_close_matches(flag, known, n=1, cutoff=0.75)
    ]
    return f"; did you mean {' or '.join(near)}?" if near else ""
