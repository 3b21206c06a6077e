# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Types that define checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from megatron.slipstream.doctor.facts import Facts
from megatron.slipstream.rules import Finding, Rule

NOT_CHECKED = Rule("not-looked-at", "note", "not checked: {why}", "{cure}")
"""A finding that any check may return."""


class Seen(NamedTuple):
    """The result of a check."""

    value: str
    """Text shown next to the check's label; one line per item."""
    findings: tuple[Finding, ...] = ()


class Check(NamedTuple):
    """One check of the machine."""

    label: str
    prevents: str
    """The training failure that it predicts; shown on the doctor's page."""
    look: Callable[[Facts], Seen]
    rules: tuple[Rule, ...]
    """Its possible findings, in addition to :data:`NOT_CHECKED`."""


class Topic(NamedTuple):
    """A group of checks shown together."""

    title: str
    checks: tuple[Check, ...]


def not_checked(why: str, cure: str = "") -> Seen:
    """Return the result of a check that could not run."""
    return Seen("unknown", (NOT_CHECKED.found(why=why, cure=cure),))
