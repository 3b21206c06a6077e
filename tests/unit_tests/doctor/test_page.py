# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The doctor's page shows the checks that there are."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from megatron.slipstream.doctor.checks import SEVERITIES, TOPICS

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "user-guide" / "doctor.md"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "tools")
    import doctor_page

    return doctor_page


def test_the_page_has_what_the_tables_say(tool: ModuleType) -> None:
    assert tool.doctor_page() == PAGE.read_text(encoding="utf-8"), "run tools/generate_docs.py"


def test_a_changed_text_makes_the_page_another(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = TOPICS[-1]
    (check,) = topic.checks
    changed = check.problems[-1]._replace(cure="do nothing")
    check = check._replace(problems=(*check.problems[:-1], changed))
    monkeypatch.setattr(tool, "TOPICS", (*TOPICS[:-1], topic._replace(checks=(check,))))
    assert "| do nothing |" in tool.doctor_page()


def test_a_page_without_a_place_for_it_is_an_error(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tool, "PAGE", tmp_path / "doctor.md")
    (tmp_path / "doctor.md").write_text("# Doctor\n")
    with pytest.raises(ValueError, match="to write between"):
        tool.doctor_page()


def test_the_example_has_every_check_in_its_order() -> None:
    example = PAGE.read_text(encoding="utf-8").split("example -->")[1].splitlines()
    marked = [line for line in example if line.split(" ")[0] in SEVERITIES]
    # A finding's line has no label.
    shown = [line[9:32].strip() for line in marked if line[9] != " "]
    assert shown == [check.label for topic in TOPICS for check in topic.checks]
    assert [line for line in example if line in {topic.title for topic in TOPICS}] == [
        topic.title for topic in TOPICS
    ]
