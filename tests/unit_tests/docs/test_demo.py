# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""What the demonstration shows while it trains: bars on a terminal, lines elsewhere."""

from __future__ import annotations

import argparse
import importlib.util
import io
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

PATH = Path(__file__).resolve().parents[3] / "examples" / "demo.py"
NUM_ITERATIONS = 80


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", PATH)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["demo"] = module  # its dataclass looks it up
    spec.loader.exec_module(module)
    return module


class Training:
    """A process that prints a line per iteration, and writes its record."""

    returncode = 0

    def __init__(self, command: list[str], **_: Any) -> None:
        lines = [
            f"INFO slipstream: iteration {number}/80: loss {9 - number / 80:.4f}, 1 ms\n"
            for number in range(1, NUM_ITERATIONS + 1)
        ]
        self.stdout = ["megatron's own line\n", *lines]
        Path(command[command.index("--run-record-path") + 1]).write_text("{}")

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def train(
    demo: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> str:
    monkeypatch.setattr(demo.subprocess, "Popen", Training)
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=is_terminal, width=100)
    runs = [demo.Run("dense", offload, folder) for offload in (False, True)]
    args = argparse.Namespace(jobs=1, iterations=NUM_ITERATIONS)
    demo._train_all(runs, folder / "data", args, False, console)
    return stream.getvalue()


def test_a_log_file_has_a_line_now_and_then(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = train(demo, tmp_path, monkeypatch, False).splitlines()
    off = [line for line in lines if line.startswith("dense, offloading off  ")]
    assert off[0].endswith("starting")
    assert off[1].endswith("iteration 10/80: loss 8.8750, 1 ms")
    assert off[-2].endswith("iteration 80/80: loss 8.0000, 1 ms")
    assert off[-1].endswith("ended after 0 s")
    assert len(off) == 2 + demo._Lines.NUM_LINES
    assert len(lines) == 2 * len(off)


def test_a_terminal_has_bars(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = train(demo, tmp_path, monkeypatch, True)
    assert "80/80" in shown
    assert "iteration 10/80" not in shown


def test_the_last_line_is_what_to_do_with_ones_own_model(
    demo: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("_use_gpu", "_tokenise", "_train_all", "_show_reports", "_show_summary"):
        monkeypatch.setattr(demo, name, lambda *_: None)
    monkeypatch.setattr(demo, "_draw", lambda *_: "")
    monkeypatch.setattr(demo, "_compare", lambda *_: {})
    monkeypatch.setattr(demo, "_succeeded", lambda _: True)
    assert demo.main(["--output-dir", str(tmp_path)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("Now your model: add --fine-grained-activation-offloading ")
    assert "--offload-modules core_attn attn_proj" in last


def test_an_interrupt_is_one_word(
    demo: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_use_gpu", interrupt)
    assert demo.main(["--output-dir", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "interrupted\n"
