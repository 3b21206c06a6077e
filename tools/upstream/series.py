# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Makes the commits of the series in a checkout of Megatron-LM."""

from __future__ import annotations

import ast
import difflib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron.slipstream.patches.releases import is_within
from tools.upstream import modules
from tools.upstream.commits import COMMITS, Commit
from tools.upstream.edits import edits_for, version_of
from tools.upstream.modules import SUPPORT, TESTS, Landed
from tools.upstream.shipped_tests import helpers_of, shipped

_FORMAT = """\
line-length = 100
target-version = "py312"
[lint]
select = ["F401", "I001"]
[lint.isort]
known-first-party = ["megatron"]
[format]
quote-style = "preserve"
skip-magic-trailing-comma = true
"""
"""What black -S -C and isort do there."""
TEST_PLACES = {
    "test_packed_sequences.py": "tests/unit_tests/data",
    "test_dynamic_context_parallel.py": "tests/unit_tests/data",
    "test_sync_free_experts.py": "tests/unit_tests/transformer/moe",
    "test_rope_autotune.py": "tests/unit_tests/fusions",
    "test_padded_routing.py": "tests/unit_tests/transformer/moe",
    "test_host_syncs.py": "tests/unit_tests/transformer/moe",
}
"""Folders of new tests that are not beside the engine's."""
_AUTHOR = ("The Slipstream authors", "slipstream@localhost")


class Made(NamedTuple):
    """A commit that was made."""

    title: str
    edits: list[tuple[str, str, int, str]]
    """File, name, changed lines and reason of each edit in place."""
    num_new_lines: int
    num_staying: int
    """Test files that cannot run there: they need what stays here."""
    left_out: str = ""
    """Why it is no commit on this branch."""


def make(root: Path, commits: Sequence[Commit] = COMMITS) -> Iterator[Made]:
    """Make commits in a checkout, on what it has checked out.

    Args:
        root: The checkout, without changes.
        commits: The commits.

    Raises:
        MovedError: A place that is edited has moved. Commits before it exist.
        ValueError: A module names something that does not exist there.
    """
    version = version_of(root)
    landed: set[str] = set()
    made: set[str] = set()
    for commit in commits:
        since, lack = commit.since
        if not is_within(version, since, ""):
            yield Made(commit.title, [], 0, 0, f"{version} lacks {lack}")
            continue
        landed |= set(commit.modules)
        made.add(commit.name)
        names = frozenset(made)
        files = [modules.landed(module, names) for module in commit.modules]
        files += [file for name in commit.new for file in _new_files(name, names)]
        files += [
            file
            for name in commit.new
            if name.startswith("test_")
            for file in helpers_of(modules.NEW_TEXT / name, frozenset(landed))
        ]
        files += [modules.landed(module, names) for module in commit.helpers]
        num_staying = 0
        for pattern in commit.tests:
            tests, left = shipped(pattern, frozenset(landed))
            files += tests
            num_staying += len(left)
        files = _formatted(files)
        edits = []
        for edit in [*edits_for(root, commit.rows), *commit.edits(root)]:
            before = (root / edit.path).read_text()
            edit.apply(root)
            after = (root / edit.path).read_text()
            edits.append((edit.path, edit.name, changed_lines(before, after), edit.why))
        for file in files:
            path = root / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(file.text)
        for file in files:
            _check_imports(root, file)
        _copy_native(root, commit)
        git(root, "add", "--all")
        message = f"{commit.title}\n\n{commit.text}"
        git(root, "commit", "--quiet", "--no-verify", "--message", message)
        num_new = sum(file.text.count("\n") for file in files)
        shown = [edit for edit in edits if edit[2]]
        yield Made(commit.title, shown, num_new, num_staying)


def _check_imports(root: Path, file: Landed) -> None:
    """Check that the modules of Megatron exist that a file imports, in this commit already."""
    for node in ast.walk(ast.parse(file.text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron."):
            path = root / str(node.module).replace(".", "/")
            if not path.is_dir() and not path.with_suffix(".py").is_file():
                raise ValueError(
                    f"{file.path}:{node.lineno} imports {node.module}, which does not exist"
                )


def _new_files(name: str, made: frozenset[str]) -> list[Landed]:
    """Return the files that a file of ``new`` becomes after some commits."""
    text = modules.rewritten(modules.as_of((modules.NEW_TEXT / name).read_text(), made))
    if name == "conftest.py":
        return [Landed(f"{TESTS}/offload_{room}/{name}", text) for room in ("plan", "engine")]
    if name == "offloaded_models.py":
        return [Landed(f"{SUPPORT}/{name}", text)]
    if name.startswith("test_"):
        return [Landed(f"{TEST_PLACES.get(name, f'{TESTS}/offload_engine')}/{name}", text)]
    place = modules.NEW_MODULES.get(name, f"{modules.ENGINE}.{name.removesuffix('.py')}")
    return [Landed(f"{place.replace('.', '/')}.py", text)]


def _copy_native(root: Path, commit: Commit) -> None:
    """Copy the C++ part, which the engine compiles on first use, or does without."""
    name = "fine_grained_activation_offload.native"
    if name not in commit.modules:
        return
    target = root / modules.landed(name, frozenset()).path
    for path in sorted(modules.source_of(name).parent.iterdir()):
        if path.suffix in (".h", ".cpp"):
            text = path.read_text()
            text = text.replace(
                modules.HEAD.replace("#", "//"), modules.HEAD_THERE.replace("#", "//")
            )
            (target.parent / path.name).write_text(text)


def changed_lines(before: str, after: str) -> int:
    """Return the number of lines that an edit adds or changes."""
    old, new = before.splitlines(), after.splitlines()
    for _ in range(2):  # Lines that are equal at the start, then at the end.
        num_equal = len(os.path.commonprefix([old, new]))
        old, new = old[num_equal:][::-1], new[num_equal:][::-1]
    codes = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    return sum(max(i2 - i1, j2 - j1) for code, i1, i2, j1, j2 in codes if code != "equal")


def _formatted(files: Sequence[Landed]) -> list[Landed]:
    """Return files without unused imports, in the format of Megatron's tools."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "ruff.toml").write_text(_FORMAT)
        for file in files:
            path = folder / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(file.text)
        ruff = (sys.executable, "-m", "ruff")
        for command in (("check", "--fix", "--quiet"), ("format", "--quiet")):
            subprocess.run([*ruff, *command, "--no-cache", name], check=True, cwd=folder)
        done = [Landed(file.path, (folder / file.path).read_text()) for file in files]
    for file in done:
        modules.check(file.path, file.text)
    return done


def git(root: Path, *arguments: str) -> str:
    """Run git in a checkout; return its output.

    Raises:
        RuntimeError: It fails.
    """
    name, mail = _AUTHOR
    environment = {**os.environ}
    for role in ("AUTHOR", "COMMITTER"):
        environment.setdefault(f"GIT_{role}_NAME", name)
        environment.setdefault(f"GIT_{role}_EMAIL", mail)
    done = subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, env=environment
    )
    if done.returncode:
        raise RuntimeError(f"git {' '.join(arguments[:2])} in {root}: {done.stderr.strip()}")
    return done.stdout
