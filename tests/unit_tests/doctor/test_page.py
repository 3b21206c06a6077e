# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The doctor's page lists every check, and its example shows every check."""

from __future__ import annotations

import re
from pathlib import Path

from megatron.slipstream.doctor.checks import SEVERITIES, TOPICS

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "user-guide" / "doctor.md"


def test_the_page_lists_every_check_with_the_failure_that_it_prevents() -> None:
    rows = re.findall(r"^\| (.+) \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.M)
    checks = [(check.label, check.prevents) for topic in TOPICS for check in topic.checks]
    start = rows.index(checks[0])
    assert rows[start : start + len(checks)] == checks


def test_the_example_has_every_check_in_its_order() -> None:
    example = PAGE.read_text(encoding="utf-8").split("example -->")[1].splitlines()
    marked = [line for line in example if line.split(" ")[0] in SEVERITIES]
    # A finding's line has no label.
    shown = [line[9:32].strip() for line in marked if line[9] != " "]
    assert shown == [check.label for topic in TOPICS for check in topic.checks]
    assert [line for line in example if line in {topic.title for topic in TOPICS}] == [
        topic.title for topic in TOPICS
    ]
