# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Formats the doctor's findings as a table and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping
from itertools import groupby
from typing import IO, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron.slipstream import __version__
from megatron.slipstream.doctor.checks import SEVERITIES, Row, findings_of
from megatron.slipstream.doctor.facts import Facts

SCHEMA = "slipstream-doctor"
VERSION = 2

WIDTH = 100
"""Maximum width in columns, and the width if the output is not a terminal."""

_STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "bold red"}


def render(rows: list[Row], stream: IO[str]) -> None:
    """Write the table, in colour only to a terminal."""
    console = Console(file=stream, highlight=False)
    console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    with console.capture() as drawn:
        for title, of_topic in groupby(rows, key=lambda row: row.topic):
            console.print(Text(title, style="bold"))
            console.print(_table(list(of_topic)))
            console.print()
        console.print(Text(summary(rows)))
    # rich pads cells with blanks.
    stream.write("".join(line.rstrip() + "\n" for line in drawn.get().splitlines()))


def _table(rows: list[Row]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(width=max(map(len, SEVERITIES)))
    table.add_column(width=21)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(_mark(row.severity), Text(row.label), Text(row.value))
        for finding in row.findings:
            mark = _mark(finding.severity) if len(row.findings) > 1 else Text("")
            table.add_row(mark, Text(""), Text(finding.message, style="italic"))
            if finding.cure:
                table.add_row(Text(""), Text(""), Text(f"-> {finding.cure}"))
    return table


def _mark(severity: str) -> Text:
    return Text(severity, style=_STYLES[severity])


def summary(rows: list[Row]) -> str:
    """Summarize the number of findings of each severity."""
    numbers = Counter(finding.severity for finding in findings_of(rows))
    counted = [
        f"{numbers[severity]} {severity}{'s' if numbers[severity] > 1 else ''}"
        for severity in reversed(SEVERITIES)
        if numbers[severity]
    ]
    return "Found: " + (", ".join(counted) or "nothing")


def to_json(facts: Facts, rows: list[Row]) -> str:
    """Return all findings, and the facts that they are based on, as JSON."""
    checks = [
        {
            "topic": row.topic,
            "check": row.label,
            "severity": row.severity,
            "value": row.value,
            "findings": [finding._asdict() for finding in row.findings],
        }
        for row in rows
    ]
    whole = {
        "schema": SCHEMA,
        "version": VERSION,
        "slipstream": __version__,
        "checks": checks,
        "facts": _plain(facts),
    }
    return json.dumps(whole, indent=1) + "\n"


def _plain(value: Any) -> Any:
    """Convert a value to JSON-compatible types."""
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (frozenset, set)):
        return sorted(value)
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value
