# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The weekly workflow runs what the page for contributors lists."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import yaml
from doc_pages import ROOT

JOBS = yaml.safe_load((ROOT / ".github" / "workflows" / "weekly.yml").read_text())["jobs"]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()


def listed() -> Iterator[str]:
    """The lines under "Each week", each with the Python that it uses."""
    block = PAGE.partition("### Each week\n")[2].partition("```bash\n")[2].partition("```")[0]
    for line in block.splitlines():
        command = line.partition("#")[0].strip()
        has_default = command.startswith("./run test-versions")
        yield f"PYTHON=python3.12 {command}" if has_default else command


def run_by(job: dict[str, Any]) -> Iterator[str]:
    matrix = dict(job.get("strategy", {}).get("matrix", {}))
    excluded = matrix.pop("exclude", [])
    for values in itertools.product(*matrix.values()):
        row = dict(zip(matrix, values, strict=True))
        if row in excluded:
            continue
        for step in job["steps"]:
            command = step.get("run", "")
            for name, value in row.items():
                command = command.replace(f"${{{{ matrix.{name} }}}}", value)
            if command:
                may_fail = job.get("continue-on-error") and command.startswith("./run")
                yield f"{command} || true" if may_fail else command


def test_it_runs_the_commands_of_the_page() -> None:
    assert sorted(listed()) == sorted(itertools.chain(*map(run_by, JOBS.values())))
