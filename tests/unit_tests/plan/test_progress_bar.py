# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The bar of the command: on terminals only."""

from __future__ import annotations

import io
import sys

import pytest

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
