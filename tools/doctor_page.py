# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""docs/user-guide/doctor.md: the part with versions and findings, from the doctor's tables."""

from __future__ import annotations

from collections.abc import Iterator

from docs_parts import ROOT, as_text, generated_from, message_with_gaps, table

from megatron.slipstream.doctor import versions
from megatron.slipstream.doctor.check import Topic
from megatron.slipstream.doctor.checks import TOPICS

PAGE = ROOT / "docs" / "user-guide" / "doctor.md"
BEGIN = generated_from("megatron/slipstream/doctor and preflight.py")
END = "<!-- End of what is generated. -->"

IN_WORDS = {versions.MISSING, versions.UNSUPPORTED, versions.UNTESTED}
"""Problems of many things, which say nothing without them; the topics' texts tell of these."""


def doctor_page() -> str:
    """Give the whole text of docs/user-guide/doctor.md; what is written by hand stays."""
    text = PAGE.read_text(encoding="utf-8")
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{PAGE} has no lines {BEGIN!r} and {END!r} to write between")
    lines = []
    for topic in TOPICS:
        lines += ["", f"### {topic.title}", "", topic.about, ""]
        if topic is versions.TOPIC:
            lines += [*versions_table(), ""]
        lines += table(("check", "mark", "finding", "cure"), _rows(topic))
    return head + BEGIN + "\n" + "\n".join(lines) + "\n\n" + END + tail


def versions_table() -> list[str]:
    """What Slipstream supports and what it was tested with."""
    rows = (
        (package.name, package.supported or "any", ", ".join(package.tested), package.about)
        for package in versions.MATRIX.values()
    )
    return table(("", "supported", "tested", ""), rows)


def _rows(topic: Topic) -> Iterator[tuple[str, ...]]:
    for check in topic.checks:
        label = as_text(check.label)
        for problem in check.problems:
            if problem not in IN_WORDS:
                texts = (message_with_gaps(text) for text in (problem.message, problem.cure))
                yield (label, problem.severity, *map(as_text, texts))
                label = ""
        if not check.problems:
            yield (label, "", "shown only", "")
