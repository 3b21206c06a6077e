# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Requirements, and what is found where one is not met: one type each for the whole package.

Functions named ``check_...`` give a list of :class:`Finding` and raise nothing for what they find.
:func:`require` turns their errors into one ``ValueError``; ``slipstream doctor`` shows them all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, Optional

from megatron.slipstream.launcher import rank

logger = logging.getLogger(__name__)

Severity = Literal["ok", "note", "warning", "error"]
"""An ``error`` would make training fail or give wrong results, a ``warning`` make it slow or fail
later; a ``note`` is to be known."""

Predicate = Callable[[Any], Any]


class Finding(NamedTuple):
    """One thing that was found."""

    severity: Severity
    message: str
    """The fault and its reason."""
    cure: str = ""
    """The cure; empty where none is needed."""
    rule: str = ""
    """Name of the :class:`Rule`."""

    @property
    def text(self) -> str:
        """Message and cure in one sentence."""
        return f"{self.message}; {self.cure}" if self.cure else self.message


def always(_: Any) -> bool:
    """For a rule that holds with any other options."""
    return True


def _never(_: Any) -> bool:
    return False


class Rule(NamedTuple):
    """One requirement: where ``when`` holds, ``requires`` must hold too.

    Without the two it is the text of something that code of its own looks for.
    """

    name: str
    """The option, or for what is not about one, a name that stays when the wording changes."""
    severity: Severity
    message: str
    """Like ``cure`` a format string, for a rule of options over the attributes of what is
    checked."""
    cure: str
    when: Predicate = always
    requires: Predicate = _never

    def found(self, **values: object) -> Finding:
        """The finding, with its values filled in."""
        return Finding(
            self.severity, self.message.format(**values), self.cure.format(**values), self.name
        )


def option_rule(option: str, when: Predicate, requires: Predicate, message: str, cure: str) -> Rule:
    """The rule about an option without which training would fail."""
    return Rule(option, "error", message, cure, when, requires)


def unsupported(
    where: str,
    when: Predicate,
    option: str,
    because: str,
    cure: str,
    accepts: Optional[Predicate] = None,
) -> Rule:
    """The rule that ``option`` is not supported ``where`` something else is given.

    Args:
        where: With or without it, in words: a format string.
        when: Whether that is so.
        option: Its name.
        because: The reason.
        cure: What to set.
        accepts: Of the object that is checked, whether the value is supported; None: only if it is
            off.
    """
    return option_rule(
        option,
        when,
        accepts or (lambda facts: not getattr(facts, option)),
        f"{option}={{{option}}} is not supported {where} because {because}",
        cure,
    )


def is_one_of(option: str, values: Collection[Any]) -> Predicate:
    """The requirement that ``option`` has one of these values."""
    return lambda facts: getattr(facts, option) in values


def facts_of(
    args: Any, rules: Iterable[Rule], others: Iterable[str], defaults: Mapping[str, Any]
) -> SimpleNamespace:
    """``args`` with a value for every option that ``rules`` read, also those a release lacks.

    Args:
        args: An object with options as attributes.
        rules: Their options are None where ``args`` has none.
        others: Further options that rules read; None where ``args`` has none.
        defaults: Values of missing options instead of None.
    """
    names = [*(rule.name for rule in rules), *others]
    return SimpleNamespace(**{**dict.fromkeys(names), **defaults, **vars(args)})


def check_rules(rules: Iterable[Rule], facts: Any) -> list[Finding]:
    """A finding for each rule that ``facts`` breaks."""
    return [
        rule.found(**vars(facts)) for rule in rules if rule.when(facts) and not rule.requires(facts)
    ]


def finding_of(error: ValueError, rule: str = "") -> Finding:
    """An error as a finding; its text names the cure after a semicolon."""
    message, _, cure = str(error).partition("; ")
    return Finding("error", message, cure, rule)


def check_by(step: Callable[[], object], rule: str = "") -> list[Finding]:
    """The ``ValueError`` of a function, if it raises one, as a finding."""
    try:
        step()
    except ValueError as error:
        return [finding_of(error, rule)]
    return []


def require(findings: Iterable[Finding]) -> None:
    """Log the warnings, on the first rank, and raise ``ValueError`` with the first error."""
    findings = list(findings)
    for finding in findings:
        if finding.severity == "warning" and rank() == 0:
            logger.warning("%s", finding.text)
    for finding in findings:
        if finding.severity == "error":
            raise ValueError(finding.text)
