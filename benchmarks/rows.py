# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The rows of a results file, as JSON lines.

Kinds of row, all with ``run``, the time at which the run was started:

- ``machine``: the hardware and software, and the bandwidth of copies.
- ``iteration``: one measured iteration of one way, ``ms`` (of the slowest rank).
- ``summary``: the figures of one way (``engine``), variant and rank; or ``error``, why there are
  none.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Optional

Row = Mapping[str, Any]


class RowWriter:
    """Appends rows to a file that several processes write.

    Args:
        path: The file; None keeps no rows.
        run: Names the run in every row.
    """

    def __init__(self, path: Optional[Path], run: str) -> None:
        self._path = path
        self._run = run

    def write(self, kind: str, **fields: Any) -> None:
        """Append a row in one write call, so that rows of several processes do not mix."""
        if self._path is None:
            return
        line = json.dumps(_finite({"kind": kind, "run": self._run, **fields})) + "\n"
        with self._path.open("a") as stream:
            stream.write(line)


def _finite(value: Any) -> Any:
    """Replace non-finite values by None, since JSON has none."""
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file.

    Raises:
        ValueError: A line is not a row; the message names it.
    """
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            row = json.loads(line)
            row["kind"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}:{number}: not a row of results: {error}") from error
        rows.append(row)
    return rows


def finished(rows: Iterable[Row], run: str, case: str) -> set[tuple[str, str]]:
    """Return variant and engine of each summary, good or not, that ``run`` has of ``case``."""
    return {
        (row["variant"], row["engine"])
        for row in rows
        if row["kind"] == "summary" and row["run"] == run and row["case"] == case
    }
