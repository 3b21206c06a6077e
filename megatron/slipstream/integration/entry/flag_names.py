# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The names of the training script's flags, read from source files in milliseconds.

Parsing needs torch and megatron-core, whose imports take seconds; a misspelt flag needs neither.
"""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

_OWN_SOURCES = (
    "options/fields.py",
    "integration/entry/arguments.py",
    "integration/seam/compat.py",  # Flags of later releases, which the parser refuses with a fix.
)
_MEGATRON_SOURCES = (
    "training/arguments.py",
    "training/config/*.py",
    "training/*config*.py",
    "core/**/*config*.py",
    "core/fault_injector.py",
)
_FLAG = re.compile(r"""["'](--[a-z][\w-]*)["']""")
_FIELD = re.compile(r"""^    ["']?([a-z]\w*)["']?: (bool = True)?""", re.MULTILINE)
"""Megatron's parser creates flags from dataclass fields; negated flags if the default is True."""


def given_flags(arguments: Sequence[str]) -> set[str]:
    """Return the flags of a command line, without values, and its other words."""
    return {argument.split("=")[0] for argument in arguments}


def refuse_misspelt_flags(arguments: Sequence[str]) -> None:
    """Refuse unknown flags that resemble one of megatron's or Slipstream's.

    The parser refuses other unknown flags, and all of them if megatron's sources are not found.

    Raises:
        ValueError: A flag is misspelt.
    """
    given = [word.partition("=")[0] for word in arguments if len(word) > 3 and word[:2] == "--"]
    known = known_flags()
    # argparse itself creates the negation of some boolean flags.
    unknown = [flag for flag in given if not {flag, "--" + flag.removeprefix("--no-")} & known]
    if unknown and (hint := did_you_mean(unknown, known)):
        raise ValueError(f"unrecognized arguments: {' '.join(unknown)}{hint}")


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


def known_flags() -> set[str]:
    """Return every flag of the training script, and a few names that are not flags."""
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in _sources()]
    flags = {flag for text in texts for flag in _FLAG.findall(text)}
    for name, is_true in (field for text in texts for field in _FIELD.findall(text)):
        prefixes = ("--no-", "--disable-") if is_true else ("--",)
        flags |= {prefix + name.replace("_", "-") for prefix in prefixes}
    return flags


def _sources() -> Iterator[Path]:
    package = Path(__file__).parents[2]
    yield from (package / name for name in _OWN_SOURCES)
    spec = importlib.util.find_spec("megatron")
    for folder in map(Path, spec.submodule_search_locations or ()) if spec else ():
        # The first folder with megatron-core wins, as in an import.
        if (folder / _MEGATRON_SOURCES[0]).is_file():
            for pattern in _MEGATRON_SOURCES:
                yield from folder.glob(pattern)
            return
