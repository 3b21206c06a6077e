# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Commands that measure one GPU's copies: their rows, and how they end where they can't."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import background_copies, small_copies, waiting_streams
from benchmarks.link_commands import parser_of, write_rows

COMMANDS = [background_copies.main, small_copies.main, waiting_streams.main]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("main", COMMANDS)
def test_without_a_gpu_there_is_an_error(
    main: Callable[[list[str]], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "rows.jsonl"
    assert main(["--output", str(output)]) == 2
    assert capsys.readouterr().err.startswith("error: torch sees no GPU")
    assert not output.exists()


def test_rows_are_printed_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    rows = [{"kind": "machine"}, {"kind": "bandwidth", "gb_per_s": 55.0}]
    options = parser_of("small_copies", "What it does.").parse_args(
        ["--output", str(tmp_path / "rows.jsonl")]
    )
    assert write_rows(lambda: rows, options.output) == 0
    printed = capsys.readouterr().out
    assert printed == options.output.read_text()
    assert [json.loads(line) for line in printed.splitlines()] == rows


def test_an_unknown_case_is_an_error_of_the_user(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert background_copies.main(["--case", "none of them"]) == 2
    assert "none of them" in capsys.readouterr().err


def test_rows_that_end_in_an_error_are_not_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def rows() -> Iterator[dict[str, Any]]:
        yield {"kind": "machine"}
        raise ValueError("too few")

    assert write_rows(rows, tmp_path / "rows.jsonl") == 2
    assert capsys.readouterr().err == "error: too few\n"
    assert not (tmp_path / "rows.jsonl").exists()
