# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""No test module of the default run is skipped because a package is missing."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INSTALLED_BY_RUN = ("dev", "demo", "docs")
# tests/frameworks has environments of its own: `./run test-frameworks`.
MODULES = sorted(
    path
    for folder in ("unit_tests", "functional_tests")
    for path in (ROOT / "tests" / folder).rglob("test_*.py")
)


def needed(source: str) -> list[str]:
    """Packages without which a module is skipped as a whole."""
    found = []
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            continue
        for node in ast.walk(statement):
            match node:
                case ast.Call(
                    func=ast.Attribute(attr="importorskip" | "find_spec"),
                    args=[ast.Constant(value=str(name)), *_],
                ):
                    found.append(name.partition(".")[0])
                case ast.keyword(arg="allow_module_level"):
                    found.append("unknown")
    return found


def installed() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = list(project["dependencies"])
    for extra in INSTALLED_BY_RUN:
        lines += project["optional-dependencies"][extra]
    return {re.split(r"[^\w.-]", line)[0].lower() for line in lines}


def is_installed(name: str) -> bool:
    if Path(sys.prefix) == ROOT / ".venv" and importlib.util.find_spec(name) is None:
        return False
    return name in installed()


@pytest.mark.parametrize(
    "line, names",
    [
        ("api = pytest.importorskip('playwright.sync_api', reason='')", ["playwright"]),
        ("pytestmark = pytest.mark.skipif(util.find_spec('jax') is None)", ["jax"]),
        ("if True:\n    pytest.skip('', allow_module_level=True)", ["unknown"]),
        ("def test() -> None:\n    pytest.importorskip('jax')", []),
    ],
)
def test_such_modules_are_found(line: str, names: list[str]) -> None:
    assert needed(line) == names
    assert not any(map(is_installed, names))


def test_what_modules_need_as_a_whole_is_installed() -> None:
    wanted = {path.name: needed(path.read_text()) for path in MODULES}
    assert len(wanted) > 200
    assert wanted["test_attach_transformers.py"] == ["transformers"]
    missing = [
        f"{name} needs {package}"
        for name, packages in wanted.items()
        for package in packages
        if not is_installed(package)
    ]
    assert missing == []
