# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""All checks, and their results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from megatron.slipstream.doctor import command, gpus, memory, variables, versions
from megatron.slipstream.doctor.check import Topic
from megatron.slipstream.doctor.facts import Facts
from megatron.slipstream.rules import Finding, Severity

TOPICS: tuple[Topic, ...] = (
    versions.TOPIC,
    variables.TOPIC,
    gpus.TOPIC,
    memory.TOPIC,
    command.TOPIC,
)

SEVERITIES: tuple[Severity, ...] = ("ok", "note", "warning", "error")
"""Severities in ascending order."""


class Row(NamedTuple):
    """The result of one check."""

    topic: str
    label: str
    value: str
    findings: tuple[Finding, ...]

    @property
    def severity(self) -> Severity:
        """The severity of the worst finding."""
        return worst(self.findings)


def examine(facts: Facts) -> list[Row]:
    """Run every check."""
    return [
        Row(topic.title, check.label, *check.look(facts))
        for topic in TOPICS
        for check in topic.checks
    ]


def findings_of(rows: list[Row]) -> Iterator[Finding]:
    """Yield the findings of all rows."""
    for row in rows:
        yield from row.findings


def worst(findings: tuple[Finding, ...]) -> Severity:
    """Return the severity of the worst finding; 'ok' if there are none."""
    return max((f.severity for f in findings), key=SEVERITIES.index, default="ok")
