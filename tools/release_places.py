# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Every place outside the code that names supported releases of megatron-core, or the oldest torch.

Both are in ``patches/releases.py``; ``generate_docs.py`` rewrites these places. Tests hold what
needs a decision: the lines of .ci/run and the columns of the compatibility page.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron.slipstream.patches import releases


class Place(NamedTuple):
    """Text of a file that names releases."""

    file: str
    text: str
    """With fields of :func:`names`, once in the file or more often."""


_GUIDE = "docs/user-guide"
PLACES = (
    Place("pyproject.toml", '    "megatron-core{supported}",'),
    Place("pyproject.toml", '    "torch>={torch}",'),
    Place("constraints.txt", "\nmegatron-core=={newest}\n"),
    Place("README.md", "on the released wheels {all}. Models need"),
    Place("CONTRIBUTING.md", "./run test-release {oldest}   "),
    Place("CONTRIBUTING.md", "git clone --branch core_r{newest_minor}.0 https"),
    Place("run", "release X, such as {oldest}\n"),
    Place("CONTRIBUTING.md", "./run test-versions {torch}  # the oldest\n"),
    Place("run", "with torch V, such as {torch};"),
    Place("run", "a version of torch, such as {torch}, not"),
    Place("run", "a release of megatron-core, such as {oldest}, not"),
    Place("tools/run_builtin_tests.py", "the installed release (core_r{newest_minor}.0), or"),
    Place(f"{_GUIDE}/getting-started.md", "It accepts megatron-core{supported} and"),
    Place(f"{_GUIDE}/getting-started.md", " and torch {torch} or newer;"),
    Place(f"{_GUIDE}/doctor.md", "ok       megatron-core          {newest}\n"),
    Place(f"{_GUIDE}/cuda-graphs.md", "transformer_engine` | megatron-core {minors} |"),
    Place(f"{_GUIDE}/frameworks/README.md", "Tested with megatron-core {all}. Not run"),
)


def names(tested: Sequence[str], torch: str = releases.OLDEST_TORCH) -> dict[str, str]:
    """Return what the places say of tested releases, of which the oldest comes first."""
    minors = [release.rpartition(".")[0] for release in tested]
    return {
        "oldest": tested[0],
        "newest": tested[-1],
        "newest_minor": minors[-1],
        "minors": ", ".join(minors),
        "all": " and ".join(", ".join(tested).rsplit(", ", 1)),
        "torch": torch,
        "supported": releases.supported(tested),
    }


def rewritten(
    root: Path,
    tested: Sequence[str] = releases.TESTED_RELEASES,
    torch: str = releases.OLDEST_TORCH,
) -> Iterator[Place]:
    """Yield each file as it should be.

    Raises:
        ValueError: A place is not in its file.
    """
    texts: dict[str, str] = {}
    for file, template in PLACES:
        text = texts.get(file) or (root / file).read_text(encoding="utf-8")
        texts[file], found = _filled(text, template, names(tested, torch))
        if not found:
            raise ValueError(f"{file} has no {template!r}; change tools/release_places.py with it")
    yield from (Place(*item) for item in texts.items())


def _filled(text: str, template: str, fields: Mapping[str, str]) -> tuple[str, int]:
    """Return the text with the fields filled in at each place, and the number of places."""
    parts = re.split(r"\{\w+\}", template)
    return re.subn(
        r"[\w.,<>= ]+?".join(map(re.escape, parts)), lambda _: template.format(**fields), text
    )
