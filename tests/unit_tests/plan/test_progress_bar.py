# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The bar of the command: on terminals only."""

from __future__ import annotations

import io
import re
import runpy
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress

from megatron.slipstream.plan.progress_bar import bar_on_stderr


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def drawn(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    with bar_on_stderr() as progress:
        for _ in progress.track(range(3), description="counting sheep"):
            pass
    return stream.getvalue()


def test_a_terminal_shows_the_bar_and_takes_it_away(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = drawn(monkeypatch, Terminal())
    assert "counting sheep" in shown
    # The line is erased in the end.
    assert shown.endswith("\x1b[2K")


def test_without_a_terminal_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    assert drawn(monkeypatch, io.StringIO()) == ""


def _of_demo() -> Progress:
    path = Path(__file__).resolve().parents[3] / "examples" / "demo.py"
    return runpy.run_path(str(path))["_Bars"]([], 80, Console(file=sys.stderr))._progress


FIGURES = "loss 5.9012, 1234 ms, offloaded 12.3 MiB"
BARS = {"command": bar_on_stderr, "demo": _of_demo}


@pytest.mark.parametrize("width", [47, 60, 80, 200])
@pytest.mark.parametrize("bar", BARS)
def test_counts_and_times_are_whole_in_a_narrow_terminal(
    bar: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("COLUMNS", str(width))
    progress = BARS[bar]()
    for task in progress.task_ids:
        progress.remove_task(task)
    progress.add_task("dense, offloading on", total=80, completed=40, figures=FIGURES)
    progress.console.print(progress.get_renderable())
    (line,) = re.sub(r"\x1b\[[\d;]*m", "", stream.getvalue()).splitlines()
    assert "dense, offloading on" in line
    assert len(re.findall(r"[\d-]:[\d-]{2}:[\d-]{2}", line)) == (2 if bar == "command" else 1)
    assert ("50%" if bar == "command" else "40/80") in line
    assert "━━" in line
    if bar != "command" and width == 200:
        assert FIGURES in line
