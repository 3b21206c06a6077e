# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Types of checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from megatron.slipstream.doctor.facts import Facts
from megatron.slipstream.rules import Finding, Rule

NOT_LOOKED_AT = Rule("not-looked-at", "note", "not checked: {why}", "{cure}")
"""Any check may find it."""


class Seen(NamedTuple):
    """The result of a check."""

    value: str
    """As shown beside the check's label; of several lines if it is about several things."""
    findings: tuple[Finding, ...] = ()


class Check(NamedTuple):
    """One thing to look at."""

    label: str
    prevents: str
    """The failure of training that it finds beforehand; on the doctor's page."""
    look: Callable[[Facts], Seen]
    rules: tuple[Rule, ...]
    """Its possible findings, beside :data:`NOT_LOOKED_AT`."""


class Topic(NamedTuple):
    """Checks that are shown together."""

    title: str
    checks: tuple[Check, ...]


def not_looked_at(why: str, cure: str = "") -> Seen:
    """There was nothing to look at, or no way to."""
    return Seen("unknown", (NOT_LOOKED_AT.found(why=why, cure=cure),))
