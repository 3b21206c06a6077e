# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The table of releases says what the tests with each of them came to."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from tools import release_matrix

REPORT = """\
<testsuites><testsuite>
  <testcase classname="tests.a" name="one"/>
  <testcase classname="tests.a" name="two"/>
  <testcase classname="tests.a" name="three"><skipped message="no HybridModel"/></testcase>
  <testcase classname="tests.a" name="four"><skipped message="no HybridModel"/></testcase>
  <testcase classname="" name="tests.b">
    <skipped message="collection skipped">('/t/b.py', 7, "Skipped: needs 'a GPU'")</skipped>
  </testcase>
  {more}
</testsuite></testsuites>
"""
FAILED = '<testcase classname="tests.a" name="five"><failure message="x"/></testcase>'

FAKE_RUN = """#!/bin/sh
# Stands for ./run: knows its versions, and leaves a report of the release's tests.
case "$1" in
  python)
    echo "a warning"
    echo '{{"python": "3.12.1", "torch": "2.11.0", "gpus": 0, "releases": ["0.17.1", "0.19.2"]}}' ;;
  test-release)
    echo ".....  [ 50%]"
    case "$*" in *broken*) exit 4 ;; esac
    cp "{folder}/report-$2.xml" "${{3#--junitxml=}}" ;;
esac
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a fake ``./run`` whose tests pass with both releases."""
    run = tmp_path / "run"
    run.write_text(FAKE_RUN.format(folder=tmp_path))
    run.chmod(run.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(release_matrix, "ROOT", tmp_path)
    monkeypatch.setattr(release_matrix, "_commit", lambda: "abc1234")
    for release in ("0.17.1", "0.19.2"):
        (tmp_path / f"report-{release}.xml").write_text(REPORT.format(more=""))
    return tmp_path


def run(folder: Path, *arguments: str) -> int:
    return release_matrix.main(["--output", str(folder / "out"), *arguments])


def test_every_supported_release_has_its_row(folder: Path) -> None:
    assert run(folder) == 0
    rows = [json.loads(line) for line in (folder / "out" / "releases.jsonl").open()]
    assert [row["megatron-core"] for row in rows] == ["0.17.1", "0.19.2"]
    first = rows[0]
    assert (first["python"], first["torch"], first["commit"]) == ("3.12.1", "2.11.0", "abc1234")
    assert (first["passed"], first["failed"]) == (2, [])
    assert first["skipped"] == {"needs 'a GPU'": 1, "no HybridModel": 2}
    page = (folder / "out" / "releases.md").read_text()
    assert "| 0.17.1 | 3.12.1 | 2.11.0 | 0 | 2 | 3 | 0 | abc1234 |" in page
    assert "- no HybridModel: 2 with 0.17.1, 0.19.2" in page


def test_a_failed_test_fails_the_command_and_is_named(folder: Path) -> None:
    (folder / "report-0.19.2.xml").write_text(REPORT.format(more=FAILED))
    assert run(folder) == 1
    page = (folder / "out" / "releases.md").read_text()
    assert "| 0.19.2 | 3.12.1 | 2.11.0 | 0 | 2 | 3 | 1 | abc1234 |" in page
    assert "- 0.19.2: `tests.a::five`" in page


def test_one_release_again_leaves_the_others_rows(folder: Path) -> None:
    run(folder)
    (folder / "report-0.17.1.xml").write_text(REPORT.format(more=FAILED))
    assert run(folder, "0.17.1") == 1
    rows = [json.loads(line) for line in (folder / "out" / "releases.jsonl").open()]
    assert [len(row["failed"]) for row in rows] == [1, 0]


def test_only_some_tests_leave_no_table(folder: Path) -> None:
    assert run(folder, "0.17.1", "--", "-k", "one") == 0
    assert not (folder / "out").exists()


def test_tests_that_come_to_no_end_are_no_row(folder: Path) -> None:
    with pytest.raises(SystemExit, match=r"came to no end(.|\n)*50%"):
        run(folder, "0.17.1", "--", "broken")
    assert not (folder / "out").exists()
