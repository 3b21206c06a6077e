# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Types for requirements and for findings about them, for the whole package.

Functions named ``check_...`` return a list of :class:`Finding` instead of raising.
:func:`require` turns their errors into one ``ValueError``; ``slipstream doctor`` shows them all.
"""

from __future__ import annotations

import difflib
import logging
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Literal, NamedTuple, Union

from megatron.slipstream.launcher import rank
from megatron.slipstream.options.facts import Facts

logger = logging.getLogger(__name__)

_said: set[str] = set()

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

    @property
    def text(self) -> str:
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
        return Finding(
            self.severity, self.message.format(**values), self.cure.format(**values), self.name
        )


def option_rule(option: str, when: Predicate, requires: Predicate, message: str, cure: str) -> Rule:
    """Return the rule for an option without which training would fail."""
    return Rule(option, "error", message, cure, when, requires)


def value_rule(
    option: str, holds: Callable[[Any], Any], fault: str, cure: str, when: Predicate = always
) -> Rule:
    """Return the rule about one option's value alone: 'option=value' and the fault."""
    message = f"{option}={{{option}!r}} {fault}"
    return option_rule(option, when, lambda facts: holds(getattr(facts, option)), message, cure)


Accepted = Union[Predicate, Collection[Any], None]
"""Whether an option's value is supported, or the values that are; None: only if it is off."""


class Condition(NamedTuple):
    """A condition that some options are not supported under. A call returns one's rule."""

    where: str
    """The condition in words, such as 'with x=1': a format string."""
    when: Predicate

    def __call__(
        self, option: str, because: str, cure: str = "leave it out", accepts: Accepted = None
    ) -> Rule:
        if accepts is None:
            requires: Predicate = lambda facts: not getattr(facts, option)  # noqa: E731
        else:
            requires = accepts if callable(accepts) else is_one_of(option, accepts)
        message = f"{option}={{{option}}} is not supported {self.where} because {because}"
        return option_rule(option, self.when, requires, message, cure)

    def rows(self, table: str, **accepts: Predicate) -> tuple[Rule, ...]:
        """Return the rules of a table in text, in its order, with the values that each accepts.

        A row is 'option: because; cure' and goes on in indented lines. It may name several options,
        and 'option in a, b' the values that are supported.
        """
        rules = []
        for row in rows_of(table):
            named, _, text = row.partition(": ")
            options, _, values = named.partition(" in ")
            because, _, cure = text.partition("; ")
            for option in options.split():
                accepted = accepts.get(option, values.split(", ") if values else None)
                rules.append(self(option, because, cure or "leave it out", accepted))
        return tuple(rules)


def rows_of(table: str) -> list[str]:
    """Return the rows of a table in text, each in one line; a row goes on in indented lines."""
    rows = re.split(r"\n(?! )", textwrap.dedent(table).strip())
    return [" ".join(row.split()) for row in rows]


def is_one_of(option: str, values: Collection[Any]) -> Predicate:
    """Return a predicate for whether ``option`` has one of these values, or of their names."""
    names = {*map(str, values)}
    return lambda facts: str(getattr(facts, option)) in names


def check_rules(rules: Iterable[Rule], options: Any, **more: Any) -> list[Finding]:
    """Return a finding for each rule that facts, or what they are made of, violate."""
    facts = Facts.of(options, **more)
    return [
        Finding(rule.severity, facts.fill(rule.message), facts.fill(rule.cure), rule.name)
        for rule in rules
        if rule.when(facts) and not rule.requires(facts)
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


# Names


def as_flag(option: str) -> str:
    """Return the flag of an option."""
    return "--" + option.replace("_", "-")


def given_flags(arguments: Sequence[str]) -> set[str]:
    """Return the flags of a command line, without values, and its other words."""
    return {argument.split("=")[0] for argument in arguments}


def nearest_name(word: object, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return "did you mean ...? " with the name that a word resembles; empty if there is none."""
    near = difflib.get_close_matches(str(word), list(known), n=1, cutoff=cutoff)
    return f"did you mean {near[0]!r}? " if near else ""


def nearest_flags(unknown: Iterable[str], known: Iterable[str]) -> str:
    """Return the end of an error about unknown flags; empty if none resembles a known one."""
    known = sorted(known)
    # Long flags end like others: --num-layers is none of --recompute-num-layers.
    found = [difflib.get_close_matches(flag, known, n=1, cutoff=0.75) for flag in unknown]
    near = " or ".join(match for matches in found for match in matches)
    return f"; did you mean {near}?" if near else ""
