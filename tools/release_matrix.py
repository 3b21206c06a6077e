# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Run the tests that touch megatron-core with each supported release of it, and write a table."""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"

EPILOG = """\
examples:
  ./run python tools/release_matrix.py                  all supported releases: some minutes
  ./run python tools/release_matrix.py 0.18.2           one of them; the others keep their rows
  ./run python tools/release_matrix.py -- -k equality   some tests, to try it; writes nothing

writes benchmarks/results/NAME.jsonl, a row per release, and NAME.md, the table of them. Each
release is run by `./run test-release`, which installs it beside the environment. The exit code is
1 if a test failed with any of them.
"""

Row = Mapping[str, Any]

_FACTS = """
import json, platform
from importlib.metadata import version
import torch
from megatron.slipstream.patches import releases
print(json.dumps({
    "python": platform.python_version(),
    "torch": version("torch"),
    "gpus": torch.cuda.device_count(),
    "releases": releases.TESTED_RELEASES,
}))
"""
_PERCENT = re.compile(r"\[ *(\d+)%\]")


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    cut = given.index("--") if "--" in given else len(given)
    options = _parser().parse_args(given[:cut])
    of_pytest = given[cut + 1 :]
    console = Console()
    facts = _facts()
    releases = options.releases or facts.pop("releases")
    facts.pop("releases", None)
    facts["commit"] = _commit()
    path = options.output / f"{options.name}.jsonl"
    rows = {row["megatron-core"]: row for row in _read(path)}
    with _progress(console) as progress:
        for release in releases:
            task = progress.add_task(f"megatron-core {release}", total=100)
            rows[release] = {
                "megatron-core": release,
                **facts,
                **_test(
                    release, of_pytest, lambda done, t=task: progress.update(t, completed=done)
                ),
            }
            progress.update(task, completed=100)
    if not of_pytest:
        _write(path, rows, options)
        console.print(f"{path}\n{path.with_suffix('.md')}", soft_wrap=True)
    console.print("\n".join(table([rows[release] for release in sorted(rows)])), soft_wrap=True)
    return 1 if any(rows[release]["failed"] for release in releases) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="./run python tools/release_matrix.py",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "releases", nargs="*", metavar="RELEASE", help="such as 0.18.2; all if none"
    )
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="DIR", help="where rows go")
    parser.add_argument("--name", default="releases", help="of the files (%(default)s)")
    return parser


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    return Progress(*columns, TimeElapsedColumn(), console=console)


def _facts() -> dict[str, Any]:
    """Of the environment that the tests run in, which `./run` chooses."""
    text = _output([str(ROOT / "run"), "python", "-W", "ignore", "-c", _FACTS])
    facts: dict[str, Any] = json.loads(text.splitlines()[-1])
    return facts


def _commit() -> str:
    """What was tested; '+' if there was more than the commit."""
    commit = _output(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]).strip()
    changes = _output(
        ["git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no"]
    ).strip()
    return commit + "+" * bool(changes)


def _output(command: Sequence[str]) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def _test(release: str, of_pytest: Sequence[str], on_percent: Any) -> dict[str, Any]:
    """Run the tests with a release, and count what came of them."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [str(ROOT / "run"), "test-release", release, f"--junitxml={report}", *of_pytest]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"COLUMNS": "80"},
        )
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            match = _PERCENT.search(line)
            if match:
                on_percent(int(match[1]))
        process.wait()
        if not report.exists():
            raise SystemExit(f"{' '.join(command)} came to no end:\n{''.join(lines[-20:])}")
        return count(report.read_text())


def count(report: str) -> dict[str, Any]:
    """What a JUnit report of pytest says: numbers, names of what failed, reasons of what was not
    run."""
    cases = list(ElementTree.fromstring(report).iter("testcase"))
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = Counter(_reason(mark) for case in cases for mark in case.iter("skipped"))
    return {
        "passed": len(cases) - len(failed) - skipped.total(),
        "failed": failed,
        "skipped": dict(sorted(skipped.items())),
    }


def _reason(mark: ElementTree.Element) -> str:
    """Of a test that was not run; of a whole file, the last of three things in Python."""
    message = mark.get("message", "")
    if message != "collection skipped":
        return message
    return str(ast.literal_eval(mark.text or "('',)")[-1]).removeprefix("Skipped: ")


def _read(path: Path) -> list[Row]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def _write(path: Path, rows: Mapping[str, Row], options: argparse.Namespace) -> None:
    newest_last = [rows[release] for release in sorted(rows)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in newest_last))
    path.with_suffix(".md").write_text("\n".join(page(newest_last)) + "\n")


def page(rows: Sequence[Row]) -> list[str]:
    """The Markdown file."""
    lines = [
        "# Releases of megatron-core",
        "",
        "Each row is a run of all tests that touch megatron-core (`./run test-release`, the marker "
        "`releases`), whole trainings among them: with offloading, losses and gradients have to be "
        "bitwise those without. Written by `./run python tools/release_matrix.py`.",
        "",
        *table(rows),
    ]
    not_run: dict[tuple[str, int], list[str]] = {}
    for row in rows:
        for reason, number in row["skipped"].items():
            not_run.setdefault((reason, number), []).append(row["megatron-core"])
    if not_run:
        lines += ["", "Not run, by reason:", ""]
    for (reason, number), releases in sorted(not_run.items()):
        lines.append(f"- {reason}: {number} with {', '.join(releases)}")
    failed = [(row["megatron-core"], name) for row in rows for name in row["failed"]]
    if failed:
        lines += ["", "Failed:", "", *(f"- {release}: `{name}`" for release, name in failed)]
    return lines


def table(rows: Sequence[Row]) -> list[str]:
    """One line per release."""
    lines = [
        "| megatron-core | Python | torch | GPUs | passed | not run | failed | commit |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        cells = [row["megatron-core"], row["python"], row["torch"], row["gpus"], row["passed"]]
        cells += [sum(row["skipped"].values()), len(row["failed"]), row["commit"]]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
