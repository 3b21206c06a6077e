# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Which of our unit tests run in a patched tree, and what they need there."""

from __future__ import annotations

from pathlib import Path

from tools.upstream import modules
from tools.upstream.modules import PACKAGE, ROOT, SUPPORT, TEST_MODULES, TESTS, Landed

_TESTS = ROOT / "tests" / "unit_tests"
_SUPPORT = ROOT / "tests" / "support"
_FOLDERS = {
    "plan": f"{TESTS}/offload_plan",
    "fine_grained_activation_offload": f"{TESTS}/offload_engine",
    "graphs": f"{TESTS}/offload_engine",
    "integration": f"{TESTS}/offload_engine",
}
_NOT_THERE = ("hypothesis", "rich", "tools", "benchmarks")
"""Packages that Megatron's environment lacks."""
STAYING = {
    "test_edges.py": "reads the sources of this package by their paths",
    "test_native_names.py": "reads the sources of this package by their paths",
    "test_report.py": "reads and writes files of our tools",
}
"""Tests by file name that stay here, and why."""


def shipped(pattern: str, landed: frozenset[str]) -> tuple[list[Landed], list[str]]:
    """Return those of some tests that run there, with their helpers, and why others do not.

    Args:
        pattern: Of files in a folder of ``tests/unit_tests``.
        landed: The modules of this package that are there.
    """
    files: dict[str, Landed] = {}
    left = []
    folder = _FOLDERS[pattern.split("/")[0]]
    for path in sorted(_TESTS.glob(pattern)):
        needed: dict[str, Landed] = {}
        text = modules.rewritten(path.read_text())
        why = STAYING.get(path.name) or _collect(path, landed, needed) or _foreign(text)
        if why:
            left.append(f"{path.name}: {why}")
            continue
        files |= needed
        files[path.name] = Landed(f"{folder}/{path.name}", text)
    files["__init__"] = Landed(f"{folder}/__init__.py", "")
    return list(files.values()), left


def helpers_of(path: Path, landed: frozenset[str]) -> list[Landed]:
    """Return the helpers that a file of ``new`` needs there.

    Raises:
        ValueError: One of them needs what is not there.
    """
    needed: dict[str, Landed] = {}
    why = _collect(path, landed, needed)
    if why:
        raise ValueError(f"{path.name} {why}")
    return list(needed.values())


def _collect(
    path: Path, landed: frozenset[str], needed: dict[str, Landed], module: str = ""
) -> str:
    """Add the helpers that a file needs; return why it cannot run there, or nothing."""
    for name in modules.imports_of(path.read_text(), module):
        if name.split(".")[0] in _NOT_THERE:
            return f"needs {name.split('.')[0]}"
        if name.startswith(f"{PACKAGE}."):
            why = _module(name.removeprefix(f"{PACKAGE}."), landed, needed)
        else:
            helper = _SUPPORT / f"{name.split('.')[0]}.py"
            why = _helper(helper, landed, needed) if helper.is_file() else ""
        if why:
            return why
    return ""


def _module(name: str, landed: frozenset[str], needed: dict[str, Landed]) -> str:
    parts = name.split(".")
    for length in (len(parts), len(parts) - 1):
        module = ".".join(parts[:length])
        if module in landed:
            return ""
        if module in TEST_MODULES:
            return _helper(modules.source_of(module), landed, needed, module)
        if length and modules.source_of(module).is_file():
            return f"needs {module}"
    return f"needs {name}"


def _helper(path: Path, landed: frozenset[str], needed: dict[str, Landed], module: str = "") -> str:
    key = module or path.name
    if key in needed:
        return ""
    text = modules.rewritten(path.read_text(), module)
    target = f"{SUPPORT}/{TEST_MODULES.get(module, path.stem)}.py"
    needed[key] = Landed(target, text)
    return _collect(path, landed, needed, module) or _foreign(text)


def _foreign(text: str) -> str:
    """Return why a text, beside its imports, cannot be there, or nothing."""
    for line in text.splitlines():
        words = line.split()
        if PACKAGE in line and words[0] not in ("from", "import"):
            return f"names {next(word for word in words if PACKAGE in word)}"
    return ""
