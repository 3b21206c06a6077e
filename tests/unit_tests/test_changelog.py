# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The changelog keeps its format, and covers the package's version."""

from __future__ import annotations

import re
from pathlib import Path

from packaging.version import Version

from megatron.slipstream import __version__

CHANGELOG = Path(__file__).resolve().parents[2] / "CHANGELOG.md"
HEADING = re.compile(r"## \[(?P<version>[^]]+)\](?: - (?P<date>\d{4}-\d\d-\d\d))?")
KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security", "Known limits"}


def sections() -> list[tuple[str, str | None, str]]:
    """Version, date and text of each section, in order."""
    _, *parts = re.split(r"^(?=## )", CHANGELOG.read_text(), flags=re.MULTILINE)
    matches = [(HEADING.fullmatch(part.splitlines()[0]), part) for part in parts]
    assert all(match for match, _ in matches)
    return [(match["version"], match["date"], part) for match, part in matches if match]


def test_sections_are_versions_newest_first_with_dates() -> None:
    found = sections()
    released = [(Version(version), date) for version, date, _ in found if version != "Unreleased"]
    assert [version for version, *_ in found].index("Unreleased") == 0
    assert released == sorted(released, reverse=True)
    assert all(date for _, date in released)


def test_the_newest_section_is_of_the_version_that_the_package_has() -> None:
    (_, _, unreleased), *released = sections()
    if released and Version(released[0][0]) == Version(__version__):
        return
    # Then that version is the next release, and the section lists its changes.
    assert all(Version(version) < Version(__version__) for version, *_ in released)
    assert f"this will be {__version__}" in unreleased
    assert "- " in unreleased


def test_changes_are_of_the_kinds_that_readers_look_for() -> None:
    for version, _, text in sections():
        kinds = re.findall(r"^### (.+)$", text, flags=re.MULTILINE)
        assert kinds, version
        assert set(kinds) <= KINDS
