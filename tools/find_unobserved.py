# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Find functions that no test observes: replace each body by a trivial one and run its tests.

A body is replaced by a return of the trivial value of its annotation: None, 0, an empty container;
for a bool once False and once True; a generator ends at once. All tests are collected once, in one
process. Each change is made in a fork of that process, by replacing the function's code, so it
costs only the time that its tests take until one of them fails.

First all tests run on the unchanged code, to find which of them execute which function. A change is
run against those, first the fast ones that execute little else, then the rest of their files, since
a fixture or a cache may hide which test depends on a function. If all pass, the change survives.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple, Optional

import hypothesis
import pytest
from rich.progress import track

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.trivial_bodies import Change, changes_of  # noqa: E402

PACKAGE = Path("megatron/slipstream")
SOURCES = [
    *("plan", "estimate", "fine_grained_activation_offload", "chunk_graphs"),
    "integration/graphs/graph_layers.py",
]
TESTS = [
    "tests/unit_tests/plan",
    "tests/unit_tests/estimate",
    "tests/unit_tests/fine_grained_activation_offload",
    "tests/unit_tests/chunk_graphs",
    "tests/unit_tests/integration/test_graph_layers.py",
]
NUM_FIRST = 20
"""Number of tests to run first, ordered by duration times the number of functions that they
execute; the others run file by file, so that they share fixtures."""
EXTRA_SECONDS = 15
"""A test that exceeds five times its duration by this much hangs, so it notices the change."""

_EPILOG = """\
examples:
  ./run python tools/find_unobserved.py                           # planner, engine and graphs
  ./run python tools/find_unobserved.py plan --tests tests/unit_tests/plan  # one room
  ./run python tools/find_unobserved.py --only _Search.           # functions by their name
  ./run python tools/find_unobserved.py --again                   # after new tests: only survivors

A function that survives needs a test that fails without it, or is not needed. The results file has
one JSON line for each change. Its `outcome` is

  noticed    a test failed; `by` names it
  survived   all tests passed; `left_out` of those that execute it did not fit into --max-seconds
  not run    no test executes the function in the tests' own process
  skipped    `why` says it: a special method, an abstract one, a body that is trivial already

What is in the file is not examined again as long as the function's source is the same, so an
interrupted run continues where it stopped.
"""


def main(argv: Optional[Sequence[str]] = None) -> int:
    args = _parser().parse_args(argv)
    os.chdir(ROOT)
    changes = [
        change
        for source in args.sources
        for path in _python_files(PACKAGE / source)
        for change in changes_of(path)
        if args.only in change.name
    ]
    results = Results(args.results)
    examined = ("noticed", "skipped") if args.again else None
    todo = [change for change in changes if not results.has(change, examined)]
    status = 0
    if todo:
        # Shrinking takes long, and any failure is enough.
        phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
        hypothesis.settings.register_profile("once", phases=phases, database=None)
        hypothesis.settings.load_profile("once")
        examiner = _Examiner(todo, results, args.max_seconds)
        options = [
            "-q",
            "-s",
            "-p",
            "no:xdist",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:warnings",
            "-m",
            args.markers,
        ]
        options += ["-o", "addopts=--strict-markers --import-mode=importlib"]
        status = pytest.main([*options, *args.tests], plugins=[examiner])
    results.show(changes)
    return int(status)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "sources",
        nargs="*",
        default=SOURCES,
        metavar="SOURCE",
        help=f"file or folder of {PACKAGE} (default: {' '.join(SOURCES)})",
    )
    parser.add_argument(
        "--tests",
        nargs="+",
        default=TESTS,
        metavar="TEST",
        help="files or folders of tests (default: those of the default sources)",
    )
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="functions whose name contains this"
    )
    parser.add_argument(
        "--markers",
        default="not gpu and not gpus2 and not gpus4",
        help="pytest's -m (default: %(default)s)",
    )
    parser.add_argument(
        "--max-seconds",
        type=float,
        default=120.0,
        help="duration of the tests that a change faces; slower ones are left out (%(default)s)",
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=ROOT / "build/unobserved.jsonl",
        help="JSON lines, appended to (default: build/unobserved.jsonl)",
    )
    parser.add_argument(
        "--again", action="store_true", help="examine again what survived or was not run"
    )
    return parser


def _python_files(path: Path) -> list[Path]:
    if not path.exists():
        raise SystemExit(f"error: there is no {path}; name a file or folder of {PACKAGE}")
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


class Results:
    """The outcomes so far, one JSON line each.

    Args:
        path: The file, which need not exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: dict[str, dict[str, Any]] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            row = json.loads(line)
            self._rows[row["key"]] = row
        path.parent.mkdir(parents=True, exist_ok=True)

    def has(self, change: Change, outcomes: Optional[Sequence[str]] = None) -> bool:
        """Return whether a change has an outcome, or one of these if given."""
        row = self._rows.get(change.key)
        return row is not None and (outcomes is None or row["outcome"] in outcomes)

    def add(self, change: Change, outcome: str, **fields: object) -> None:
        """Record an outcome."""
        row = {"key": change.key, "name": change.name, "body": change.body, "outcome": outcome}
        row |= fields
        self._rows[change.key] = row
        with self._path.open("a") as stream:
            stream.write(json.dumps(row) + "\n")

    def show(self, changes: Sequence[Change]) -> None:
        """Print the changes that no test observes, and the number of each outcome."""
        rows = [self._rows[change.key] for change in changes if change.key in self._rows]
        for row in rows:
            if row["outcome"] in ("survived", "not run"):
                print(f"{row['outcome']:8}  {row['name']}  {row['body']}")
        counts = Counter(row["outcome"] for row in rows)
        print(", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))


class _Seen(NamedTuple):
    """Result of a test of the unchanged code."""

    seconds: float
    passed: bool
    functions: Collection[tuple[str, int]]
    """Path and first line of each function that it executed."""


class _Examiner:
    """Replaces pytest's loop over the tests."""

    def __init__(self, todo: Sequence[Change], results: Results, max_seconds: float) -> None:
        self._todo, self._results, self._max_seconds = todo, results, max_seconds
        self._outcomes: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._outcomes.append(report.outcome)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed or not session.items:
            return False  # pytest's own loop reports the problem
        paths = {str(change.path.resolve()) for change in self._todo}
        functions: dict[tuple[str, int], list[FunctionType]] = {}
        for item in gc.get_objects():
            if isinstance(item, FunctionType) and item.__code__.co_filename in paths:
                functions.setdefault(_key_of(item.__code__), []).append(item)
        codes = [items[0].__code__ for items in functions.values()]
        print(f"{len(session.items)} tests run as they are")
        rows = _in_fork(lambda: self._observe(session.items, codes))
        seen = [_Seen(s, passed, set(map(tuple, keys))) for s, passed, keys in rows]
        broken = [
            item.nodeid for item, of in zip(session.items, seen, strict=True) if not of.passed
        ]
        print(f"{sum(of.seconds for of in seen):.0f} s; failed or skipped: {broken}")
        good = [(item, of) for item, of in zip(session.items, seen, strict=True) if of.passed]
        for change in track(self._todo, "Changes", auto_refresh=False):
            self._examine(change, functions.get(change.code_key, []), good)
        return True

    def _examine(
        self,
        change: Change,
        functions: Sequence[FunctionType],
        tests: Sequence[tuple[pytest.Item, _Seen]],
    ) -> None:
        if change.why_not:
            self._results.add(change, "skipped", why=change.why_not)
            return
        users = sorted(
            (of.seconds * len(of.functions), place)
            for place, (_, of) in enumerate(tests)
            if change.code_key in of.functions
        )
        if not users:
            self._results.add(change, "not run")
            return
        order = [place for _, place in users]
        order[NUM_FIRST:] = sorted(order[NUM_FIRST:])
        files = {tests[place][0].path for place in order}
        of_files = (place for place, (item, _) in enumerate(tests) if item.path in files)
        order = list(dict.fromkeys([*order, *of_files]))
        chosen, left_s, limits_s = [], self._max_seconds, {}
        for place in order:
            item, seconds = tests[place][0], tests[place][1].seconds
            if seconds <= left_s:
                chosen.append(item)
                limits_s[item] = EXTRA_SECONDS + 5 * seconds
                left_s -= seconds
        left_out = sum(tests[place][0] not in limits_s for _, place in users)
        begin = time.monotonic()
        code = change.new_code()

        def run() -> Optional[str]:
            for function in functions:
                function.__code__ = code
            for item, limit_s in limits_s.items():
                item.add_marker(pytest.mark.timeout(limit_s))
            return next((test for test in self._run(chosen) if self._has_failed), None)

        by = _in_fork(run, sum(limits_s.values()))
        fields = {"seconds": round(time.monotonic() - begin, 1), "tests": len(chosen)}
        if by is not None:
            self._results.add(change, "noticed", by=by, **fields)
        else:
            self._results.add(change, "survived", left_out=left_out, **fields)

    @property
    def _has_failed(self) -> bool:
        return "failed" in self._outcomes

    def _run(self, items: Sequence[pytest.Item]) -> Iterator[str]:
        """Run tests; yield the name of each after it has run."""
        for item, following in zip(items, [*items[1:], None], strict=True):
            self._outcomes.clear()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            yield item.nodeid

    def _observe(self, items: Sequence[pytest.Item], codes: Sequence[CodeType]) -> list[_Seen]:
        """Return each test's duration, result, and which of the functions it executes."""
        monitoring, tool = sys.monitoring, sys.monitoring.PROFILER_ID
        executed: set[tuple[str, int]] = set()

        def note(code: CodeType, _: int) -> Any:
            executed.add(_key_of(code))
            return monitoring.DISABLE

        monitoring.use_tool_id(tool, "find_unobserved")
        monitoring.register_callback(tool, monitoring.events.PY_START, note)
        for code in codes:
            monitoring.set_local_events(tool, code, monitoring.events.PY_START)
        found, begin = [], time.monotonic()
        for _ in track(self._run(items), "Tests", total=len(items), auto_refresh=False):
            passed = self._outcomes == ["passed"] * 3
            found.append(_Seen(time.monotonic() - begin, passed, sorted(executed)))
            executed.clear()
            monitoring.restart_events()
            begin = time.monotonic()
        return found


def _key_of(code: CodeType) -> tuple[str, int]:
    return code.co_filename, code.co_firstlineno


def _in_fork(call: Callable[[], Any], limit_s: Optional[float] = None) -> Any:
    """Return the result of a call in a forked process; if it ended early, how it ended."""
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        os.close(receiver)
        if limit_s is not None:  # otherwise it shows its progress
            nowhere = os.open(os.devnull, os.O_RDWR)
            for number in range(3):
                os.dup2(nowhere, number)
        with os.fdopen(sender, "w") as stream:
            json.dump(call(), stream)
        os._exit(0)
    os.close(sender)
    written = b""
    deadline = None if limit_s is None else time.monotonic() + limit_s
    with os.fdopen(receiver, "rb", buffering=0) as stream:
        while True:
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([stream], [], [], left_s)[0]:
                break
            part = stream.read(1 << 16)
            if not part:
                break
            written += part
    os.killpg(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if written:
        return json.loads(written)
    if limit_s is None:
        raise SystemExit("error: the tests ended their process")
    return "too slow" if status == signal.SIGKILL and deadline < time.monotonic() else "crash"


if __name__ == "__main__":
    raise SystemExit(main())
