# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""``slipstream report --html`` combines reports and traces, and refuses those that do not match."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest
from reported_runs import make_run, make_trace

from megatron.slipstream.cli import main
from megatron.slipstream.fine_grained_activation_offload.report import RankReport, Report
from megatron.slipstream.plan.build import build_plan
from megatron.slipstream.plan.candidates import PolicyOptions
from megatron.slipstream.plan.files import save_trace
from megatron.slipstream.report_page.page import render_page

ROOT = Path(__file__).resolve().parents[3]
TRACES = {0: make_trace(), 1: make_trace(num_layers=4)}
OPTIONS = PolicyOptions(activation_offload_fraction=0.5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Reports and traces of two ranks, as a run writes them."""
    for rank, trace in TRACES.items():
        suffix = f".rank{rank}" if rank else ""
        make_run(trace, rank, OPTIONS).report.save(tmp_path / f"report{suffix}.json")
        save_trace(trace, tmp_path / f"trace{suffix}.json")
    return tmp_path


def run(*arguments: object) -> int:
    return main(["report", *map(str, arguments)])


def page_of(*ranks: int, drawn: tuple[int, ...]) -> str:
    report = Report([make_run(TRACES[rank], rank, OPTIONS).rank for rank in ranks])
    return render_page(report, {rank: build_plan(TRACES[rank], OPTIONS) for rank in drawn})


def test_traces_belong_to_the_reports_in_the_same_places(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = folder / "page.html"
    # Not in the order of ranks: the order of the arguments counts.
    reports = [folder / "report.rank1.json", folder / "report.json"]
    traces = [folder / "trace.rank1.json", folder / "trace.json"]
    assert run(*reports, "--trace", *traces, "--html", page) == 0
    assert page.read_text() == page_of(0, 1, drawn=(0, 1))
    assert "another plan" not in page.read_text()
    shown = capsys.readouterr()
    assert shown.out == f"{page}: {page.stat().st_size / 1e6:.1f} MB, 2 ranks\n"
    assert shown.err == ""


def test_the_page_of_one_rank_is_counted_as_one(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder / "report.json", "--html", folder / "page.html") == 0
    assert capsys.readouterr().out.endswith(" MB, 1 rank\n")


def test_ranks_without_a_trace_have_no_timeline(folder: Path) -> None:
    page = folder / "page.html"
    reports = [folder / "report.json", folder / "report.rank1.json"]
    assert run(*reports, "--trace", folder / "trace.json", "--html", page) == 0
    assert page.read_text() == page_of(0, 1, drawn=(0,))
    assert run(*reports, "--html", page) == 0
    assert page.read_text() == page_of(0, 1, drawn=())


def test_a_trace_of_another_rank_is_seen(folder: Path) -> None:
    page = folder / "page.html"
    trace = folder / "trace.rank1.json"
    assert run(folder / "report.json", "--trace", trace, "--html", page) == 0
    assert "The charts of rank 0 show another plan" in page.read_text()


def test_a_report_without_options_is_planned_with_the_defaults(folder: Path) -> None:
    page = folder / "page.html"
    old = RankReport(0, plan="")
    Report([old]).save(folder / "old.json")
    assert run(folder / "old.json", "--trace", folder / "trace.json", "--html", page) == 0
    plan = build_plan(TRACES[0], PolicyOptions())
    assert page.read_text() == render_page(Report([old]), {0: plan})


WRONG = {
    "no page": (["--trace", "trace.json"], "--trace is not supported without --html"),
    "not a page's name": (
        ["--html", "report.json"],
        "--html=report.json is not the name of a page",
    ),
    "too many traces": (
        ["--trace", "trace.json", "trace.rank1.json", "--html", "page.html"],
        "--trace has 2 files for 1 reports",
    ),
    "missing trace": (
        ["--trace", "none.json", "--html", "page.html"],
        "none.json does not exist; train with --offload-trace-path none.json to write it",
    ),
    "folder for a trace": (
        ["--trace", ".", "--html", "page.html"],
        "--trace=. is a folder; give a file that --offload-trace-path wrote",
    ),
    "folder for the page": (
        ["--html", "folder.html"],
        "--html=folder.html is a folder; name a file in a folder that can be written",
    ),
    "page in a file": (
        ["--html", "report.json/page.html"],
        "--html=report.json/page.html is not in a folder: a part of its path is a file; name",
    ),
    "no trace": (
        ["--trace", "report.json", "--html", "page.html"],
        "report.json holds a 'slipstream-report', not a slipstream-trace; give a file",
    ),
}


@pytest.mark.parametrize("arguments, message", WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_refused_with_its_cure(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(folder)
    Path("folder.html").mkdir()
    before = Path("report.json").read_text()
    assert run("report.json", *arguments) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"error: {message}")
    assert shown.err.count("\n") == 1
    assert shown.out == ""
    assert not Path("page.html").exists()
    assert Path("report.json").read_text() == before


def test_a_rank_that_is_given_twice_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, again = folder / "report.json", folder / "again.json"
    again.write_bytes(first.read_bytes())
    for second in (first, again):
        assert run(folder / "report.rank1.json", first, second) == 2
        shown = capsys.readouterr()
        assert shown.err == (
            f"error: {second} has rank 0, and so has {first}; give one report per rank\n"
        )
        assert shown.out == ""


def test_a_page_that_cannot_be_written_in_the_end_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(self: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_bytes", fail)
    page = folder / "page.html"
    assert run(folder / "report.json", "--html", page) == 2
    error = f"error: --html={page} cannot be written: no space left on device; free space"
    assert capsys.readouterr().err.startswith(error)


def test_a_trace_does_not_say_which_of_several_ranks_it_is_of(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Report([RankReport(0), RankReport(1)]).save(folder / "both.json")
    trace, page = folder / "trace.json", folder / "page.html"
    assert run(folder / "both.json", "--trace", trace, "--html", page) == 2
    assert "belongs to a report of 2 ranks" in capsys.readouterr().err


def test_a_page_needs_neither_torch_nor_megatron(folder: Path) -> None:
    code = (
        "import sys\n"
        "from megatron.slipstream.cli import main\n"
        "status = main(sys.argv[1:])\n"
        "sys.exit(status or ('torch' in sys.modules) or ('megatron.core' in sys.modules))"
    )
    files = ["report.json", "--trace", "trace.json", "--html", "page.html"]
    command = [sys.executable, "-c", code, "report", *files]
    environment = {"PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=folder, env=environment, check=True, timeout=60)
