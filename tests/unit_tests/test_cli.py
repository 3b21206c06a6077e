# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The ``slipstream`` command shows a report, and says what is wrong and how to mend it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron.slipstream.cli import main
from megatron.slipstream.fine_grained_activation_offload.report import (
    ModuleCounters,
    RankReport,
    Report,
)


def save_report(path: Path, *ranks: int) -> Path:
    modules = {"core_attn": ModuleCounters(num_groups=4, num_groups_moved=3, d2h_bytes=3 << 20)}
    Report([RankReport(rank, modules, plan=f"plan {rank}") for rank in ranks]).save(path)
    return path


def show(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def test_report_shows_what_a_file_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save_report(tmp_path / "run.json", 0)
    assert show("report", path) == 0
    shown = capsys.readouterr()
    assert shown.out == Report.from_json(path.read_text()).render() + "\n"
    assert shown.err == ""


def test_report_puts_the_ranks_of_several_files_in_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [save_report(tmp_path / f"run.rank{rank}.json", rank) for rank in (1, 0)]
    assert show("report", *files) == 0
    rows = [line.split() for line in capsys.readouterr().out.split("\n")]
    assert [row[0] for row in rows if row[1:2] == ["core_attn"]] == ["0", "1"]


def test_a_missing_file_says_how_to_write_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "none.json"
    assert show("report", path) == 2
    shown = capsys.readouterr()
    assert shown.err == (
        f"error: {path} does not exist; train with --offload-report-path {path} to write it\n"
    )
    assert shown.out == ""


@pytest.mark.parametrize(
    "content",
    [b"", b"not json", b'{"ranks": 3}', b'{"ranks": [{"modules": null}]}', b"\xff\xfe\x00"],
    ids=["empty", "text", "other-json", "no-modules", "binary"],
)
def test_a_corrupt_file_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(content)
    assert show("report", path) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"error: {path}: ")
    assert shown.out == ""


def test_a_bad_file_among_good_ones_shows_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = save_report(tmp_path / "run.json", 0)
    assert show("report", good, tmp_path / "none.json") == 2
    assert capsys.readouterr().out == ""


def test_a_folder_is_not_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert show("report", tmp_path) == 2
    assert str(tmp_path) in capsys.readouterr().err


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert "report" in shown
    assert "show what a training run moved" in shown


def test_help_of_report_tells_how_a_run_writes_the_file(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["report", "--help"])
    assert stopped.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "--offload-report-path FILE" in shown
    assert "per rank and module" in shown


@pytest.mark.parametrize(
    "arguments, message",
    [([], "COMMAND"), (["repport"], "invalid choice: 'repport'"), (["report"], "FILE")],
    ids=["no-command", "unknown-command", "no-file"],
)
def test_a_wrong_call_shows_the_usage(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    shown = capsys.readouterr().err
    assert shown.startswith("usage: slipstream")
    assert message in shown


def test_help_answers_without_importing_torch() -> None:
    # torch takes seconds to import.
    code = (
        "import sys\n"
        "from megatron.slipstream.cli import main\n"
        "try:\n"
        "    main(['--help'])\n"
        "finally:\n"
        "    assert 'torch' not in sys.modules\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=Path(__file__).resolve().parents[2],
    )
    assert result.returncode == 0, result.stderr
