# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Make a series of commits on a branch of Megatron-LM from this repository's sources."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Optional

from tools.upstream.anchors import MovedError
from tools.upstream.edits import version_of
from tools.upstream.modules import ROOT
from tools.upstream.series import Made, git, make

MAX_EDITED_LINES = 500
"""Lines that a series may change in files of Megatron."""

_TESTS = "tests/functional_tests/test_patched_megatron.py"
_EPILOG = """\
examples:
  ./run upstream --megatron ../Megatron-LM                   commits on a new branch
  ./run upstream --megatron ../Megatron-LM --patches ./out   files for git am; the checkout stays
  ./run upstream --megatron ../Megatron-LM --test            test the series in a copy, on CPUs

DIR is a checkout of core_r0.18.0, core_r0.19.0 or main. Each edit in place is listed with its size.
"""


def main(arguments: Optional[Sequence[str]] = None) -> int:
    options = _parser().parse_args(arguments)
    root: Path = options.megatron.resolve()
    if options.test:
        pytest = (sys.executable, "-m", "pytest", "-v", "-rs", _TESTS, "--megatron", str(root))
        return subprocess.run(pytest, cwd=ROOT, check=False).returncode
    try:
        print(
            f"Megatron-LM {version_of(root)} at {git(root, 'rev-parse', '--short', 'HEAD').strip()}"
        )
        if options.patches is None:
            if git(root, "status", "--porcelain", "--untracked-files=no"):
                raise RuntimeError(f"{root} has changes; commit or stash them")
            git(root, "switch", "--quiet", "--create", options.branch)
            _show(make(root))
            print(f"on branch {options.branch} of {root}")
            return 0
        folder: Path = options.patches.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        with copy_of_head(root) as copy:
            _show(make(copy))
            base = git(root, "rev-parse", "HEAD").strip()
            git(copy, "format-patch", "--quiet", "--output-directory", str(folder), base)
        print(f"in {folder}, for git am")
    except (MovedError, RuntimeError, ValueError) as error:
        print(f"upstream: {error}", file=sys.stderr)
        return 1
    return 0


@contextmanager
def copy_of_head(root: Path) -> Iterator[Path]:
    """A work tree of what is checked out."""
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name, "megatron")
        git(root, "worktree", "add", "--quiet", "--detach", str(copy))
        try:
            yield copy
        finally:
            git(root, "worktree", "remove", "--force", str(copy))


def _show(series: Iterator[Made]) -> None:
    edited = 0
    for number, made in enumerate(series, 1):
        staying = f", {made.num_staying} test files stay here" if made.num_staying else ""
        print(f"{number}. {made.title}: {made.num_new_lines} new lines{staying}")
        for path, name, lines, why in made.edits:
            edited += lines
            print(f"   {lines:3} in {path}, {name}: {why}")
        if made.left_out:
            print(f"   left out: {made.left_out}")
    print(f"{edited} lines in files of Megatron")
    if edited > MAX_EDITED_LINES:
        raise RuntimeError(f"the series edits more than {MAX_EDITED_LINES} lines in place")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="./run upstream",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--megatron", type=Path, required=True, metavar="DIR", help="the checkout")
    parser.add_argument(
        "--patches", type=Path, metavar="OUT", help="write files for git am into this folder"
    )
    parser.add_argument(
        "--test",
        action="store_true",
        help="apply the series to a copy; run its tests and the built-in engine's there, and train "
        "the functional cases with and without the plugin",
    )
    parser.add_argument(
        "--branch", default="planned-offloading", help="name of the new branch (%(default)s)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
