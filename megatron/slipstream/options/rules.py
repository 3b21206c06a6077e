# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Types for requirements and for findings about them, for the whole package.

Functions named ``check_...`` return a list of :class:`Finding` instead of raising.
:func:`require` turns their errors into one ``ValueError``; ``slipstream doctor`` shows them all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, Optional

from megatron.slipstream.launcher import rank

logger = logging.getLogger(__name__)

_said: set[str] = set()
"""Warnings of this process."""

Severity = Literal["ok", "note", "warning", "error"]
"""An ``error`` would make training fail or give wrong results, a ``warning`` make it slow or fail
later; a ``note`` is information."""

Predicate = Callable[[Any], Any]


class Finding(NamedTuple):
    """A finding of a check."""

    severity: Severity
    message: str
    """The fault and its reason."""
    cure: str = ""
    """The cure; empty if none is needed."""
    rule: str = ""
    """Name of the :class:`Rule`."""

    @property
    def text(self) -> str:
        """Message and cure in one sentence."""
        return f"{self.message}; {self.cure}" if self.cure else self.message


def always(_: Any) -> bool:
    """Return True, for a rule that does not depend on other options."""
    return True


def _never(_: Any) -> bool:
    return False


class Rule(NamedTuple):
    """One requirement: if ``when`` holds, ``requires`` must hold too.

    Without both, it is only the text of a check that other code makes.
    """

    name: str
    """The option; for other rules a name that is stable when the wording changes."""
    severity: Severity
    message: str
    """Like ``cure``, a format string; for option rules, over the checked object's attributes."""
    cure: str
    when: Predicate = always
    requires: Predicate = _never

    def found(self, **values: object) -> Finding:
        """Return the finding, with its values filled in."""
        return Finding(
            self.severity, self.message.format(**values), self.cure.format(**values), self.name
        )


def option_rule(option: str, when: Predicate, requires: Predicate, message: str, cure: str) -> Rule:
    """Return the rule for an option without which training would fail."""
    return Rule(option, "error", message, cure, when, requires)


def unsupported(
    where: str,
    when: Predicate,
    option: str,
    because: str,
    cure: str,
    accepts: Optional[Predicate] = None,
) -> Rule:
    """Return the rule that ``option`` is not supported under a condition.

    Args:
        where: The condition in words, such as 'with x=1': a format string.
        when: Whether the condition holds.
        option: The option's name.
        because: The reason.
        cure: What to set.
        accepts: Whether the checked object's value is supported; None: only if it is off.
    """
    return option_rule(
        option,
        when,
        accepts or (lambda facts: not getattr(facts, option)),
        f"{option}={{{option}}} is not supported {where} because {because}",
        cure,
    )


def is_one_of(option: str, values: Collection[Any]) -> Predicate:
    """Return a predicate for whether ``option`` has one of these values."""
    return lambda facts: getattr(facts, option) in values


def facts_of(
    args: Any, rules: Iterable[Rule], others: Iterable[str], defaults: Mapping[str, Any]
) -> SimpleNamespace:
    """Return ``args`` with all options that ``rules`` read, even those that a release lacks.

    Args:
        args: An object with options as attributes.
        rules: Their options are None where ``args`` has none.
        others: Further options that rules read; None where ``args`` has none.
        defaults: Values of missing options instead of None.
    """
    names = [*(rule.name for rule in rules), *others]
    return SimpleNamespace(**{**dict.fromkeys(names), **defaults, **vars(args)})


def check_rules(rules: Iterable[Rule], facts: Any) -> list[Finding]:
    """Return a finding for each rule that ``facts`` violates."""
    return [
        rule.found(**vars(facts)) for rule in rules if rule.when(facts) and not rule.requires(facts)
    ]


def finding_of(error: ValueError, rule: str = "") -> Finding:
    """Convert an error to a finding; its text names the cure after a semicolon."""
    message, _, cure = str(error).partition("; ")
    return Finding("error", message, cure, rule)


def check_by(step: Callable[[], object], rule: str = "") -> list[Finding]:
    """Call a function; return its ``ValueError``, if it raises one, as a finding."""
    try:
        step()
    except ValueError as error:
        return [finding_of(error, rule)]
    return []


def require(findings: Iterable[Finding]) -> None:
    """Log the warnings, on the first rank, and raise ``ValueError`` with the first error."""
    findings = list(findings)
    _warn(finding for finding in findings if finding.severity == "warning")
    for finding in findings:
        if finding.severity == "error":
            raise ValueError(finding.text)


def warn_once(findings: Iterable[Finding]) -> None:
    """Log findings, on the first rank, that this process has not logged yet."""
    _warn(finding for finding in findings if finding.text not in _said)


def _warn(findings: Iterable[Finding]) -> None:
    for finding in findings:
        _said.add(finding.text)
        if rank() == 0:
            logger.warning("%s", finding.text)
