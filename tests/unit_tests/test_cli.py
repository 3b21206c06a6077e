# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The ``slipstream`` command shows reports and plans, and its errors say what to do."""

from __future__ import annotations

import errno
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from make_trace import Model, one_f_one_b, trace_of

from megatron.slipstream import __version__
from megatron.slipstream.cli import main
from megatron.slipstream.estimate.frontier import sweep
from megatron.slipstream.fine_grained_activation_offload.report import (
    ModuleCounters,
    RankReport,
    Report,
)
from megatron.slipstream.plan.build import build_plan
from megatron.slipstream.plan.candidates import PolicyOptions
from megatron.slipstream.plan.files import load_plan, load_trace, save_trace
from megatron.slipstream.plan.operations import device_bytes
from megatron.slipstream.plan.render import render_plan, summarize
from megatron.slipstream.plan.trace import Bandwidth, MemoryReading
from megatron.slipstream.plan.walk import simulate
from megatron.slipstream.report_page.findings import next_step

ROOT = Path(__file__).resolve().parents[2]


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
    report = Report.from_json(path.read_text())
    assert shown.out == f"{report.render()}\n\nNext step: {next_step(report)}\n"
    assert shown.err == ""


def test_report_puts_the_ranks_of_several_files_in_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [save_report(tmp_path / f"run.rank{rank}.json", rank) for rank in (1, 0)]
    assert show("report", *files) == 0
    rows = [line.split() for line in capsys.readouterr().out.split("\n")]
    assert [row[0] for row in rows if row[1:2] == ["core_attn"]] == ["0", "1"]


FILES = {
    "report": ("--offload-report-path", "report"),
    "plan": ("--offload-trace-path", "trace"),
}
"""The option that writes what a command shows, and what that is."""


@pytest.mark.parametrize("command", FILES)
@pytest.mark.parametrize(
    "content, error",
    [
        (None, "{path} does not exist; train with {option} {path} to write it\n"),
        ("folder", "{what} {path} is a folder; give a file that {option} wrote\n"),
        (b"", "{path} is not a whole slipstream-{what}: "),
        (b"{", "{path} is not a whole slipstream-{what}: "),
        (b"not json", "{path} is not a whole slipstream-{what}: "),
        (b'{"ranks": 3}', "{path} is not a whole slipstream-{what}: "),
        (b'{"ranks": [{"modules": null}]}', "{path} is not a whole slipstream-{what}: "),
        (b"\xff\xfe\x00", "{path} is not a whole slipstream-{what}: "),
    ],
)
def test_a_file_that_cannot_be_shown_is_named(
    command: str,
    content: bytes | str | None,
    error: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "run.json"
    if content == "folder":
        path.mkdir()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    assert show(command, path) == 2
    shown = capsys.readouterr()
    option, what = FILES[command]
    assert shown.err.startswith("error: " + error.format(path=path, option=option, what=what))
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def test_a_bad_file_among_good_ones_shows_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = save_report(tmp_path / "run.json", 0)
    assert show("report", good, tmp_path / "none.json") == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "command, texts",
    [
        ([], ["show the bytes that a training run moved", "plan a recorded iteration"]),
        (
            ["report"],
            [
                "--offload-report-path FILE",
                "per rank and module",
                "slipstream report report*.json --trace trace*.json --html report.html",
            ],
        ),
        (
            ["plan"],
            [
                "slipstream plan --hf-config config.json --longest-sequence --gpu h100",
                "slipstream plan trace.json --target-memory 60 --timeline plan.html",
            ],
        ),
        (
            ["doctor"],
            [
                "slipstream doctor -- torchrun --nproc-per-node 8 pretrain_gpt.py",
                "Exit status: 0 without errors, 1 with errors, 2 for invalid options",
                "--no-bandwidth",
            ],
        ),
    ],
    ids=str,
)
def test_help_teaches_by_examples(
    command: list[str], texts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*command, "--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert [text for text in texts if text not in " ".join(shown.split())] == []
    if command == ["plan"]:
        assert len(re.findall(r"^    slipstream plan ", shown, re.MULTILINE)) == 2


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


# --- plan -----------------------------------------------------------------------------------------


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    model = Model(4, ("core_attn", "moe_act"), nbytes={f"own {i}": 1 << 20 for i in range(8)})
    trace = trace_of(one_f_one_b(2, 0, 3), model)
    num_steps = len(trace.steps)
    trace = replace(
        trace,
        step_ms=(1.0,) * num_steps,
        bandwidth=Bandwidth(50.0, 50.0, 40.0, 40.0),
        memory=tuple(MemoryReading(b, b, 0) for b in device_bytes(trace, ())),
    )
    save_trace(trace, tmp_path / "trace.json")
    return tmp_path / "trace.json"


def test_plan_shows_the_grid_and_what_it_would_cost(
    trace_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = build_plan(load_trace(trace_file), PolicyOptions())
    assert show("plan", trace_file) == 0
    assert render_plan(plan) not in capsys.readouterr().out
    assert show("plan", trace_file, "--details") == 0
    shown = capsys.readouterr()
    assert shown.out.startswith(f"{summarize(plan)}\n")
    assert render_plan(plan) in shown.out
    assert simulate(plan).render() in shown.out
    assert "Proved safe" in shown.out
    assert shown.err == ""


def test_plan_takes_a_fraction_and_writes_the_plan(trace_file: Path) -> None:
    output = trace_file.with_name("plan.json")
    assert show("plan", trace_file, "--fraction", "0.5", "--output", output) == 0
    options = PolicyOptions(activation_offload_fraction=0.5)
    assert load_plan(output) == build_plan(load_trace(trace_file), options)


def test_plan_takes_targets_in_gib_and_percent(trace_file: Path) -> None:
    output = trace_file.with_name("plan.json")
    assert show("plan", trace_file, "--target-memory", 0.5, "--output", output) == 0
    assert load_plan(output).options.target_memory_bytes == 1 << 29
    assert show("plan", trace_file, "--max-overhead", 1.5, "--output", output) == 0
    assert load_plan(output).options.max_overhead_percent == 1.5
    assert show("plan", trace_file, "--max-overhead", "auto", "--output", output) == 0
    assert load_plan(output).options.max_overhead_percent == 1.0


def test_plan_says_if_a_target_is_missed(
    trace_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert show("plan", trace_file, "--target-memory", 1e-9) == 3
    assert "cannot be met: the lowest peak" in capsys.readouterr().out


@pytest.mark.parametrize(
    "option, suffix, start",
    [
        ("--timeline", ".json", b"{"),
        ("--timeline", ".html", b"<!doctype html>"),
        ("--frontier", ".json", b"{"),
        ("--frontier", ".png", b"\x89PNG"),
    ],
)
def test_plan_writes_pictures(trace_file: Path, option: str, suffix: str, start: bytes) -> None:
    if suffix == ".png":
        pytest.importorskip("matplotlib")
    path = trace_file.with_name("picture" + suffix)
    assert show("plan", trace_file, option, path) == 0
    assert path.read_bytes().startswith(start)


def test_plan_shows_the_frontier_as_a_table(
    trace_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = trace_file.with_name("frontier.json")
    assert show("plan", trace_file, "--frontier", path) == 0
    frontier = sweep(load_trace(trace_file), PolicyOptions())
    shown = capsys.readouterr()
    assert frontier.render() in shown.out
    assert path.read_bytes() == frontier.to_json()
    assert shown.err == ""


def test_an_option_of_the_frontier_is_one_that_makes_its_plan(trace_file: Path) -> None:
    output = trace_file.with_name("plan.json")
    frontier = sweep(load_trace(trace_file), PolicyOptions(), num_points=6)
    for point in frontier.points:
        assert show("plan", trace_file, *point.flag.split(), "--output", output) == 0
        plan = load_plan(output)
        assert (plan.moved_nbytes, simulate(plan).total_ms) == (point.moved_nbytes, point.total_ms)


def test_plan_of_a_trace_without_times_is_shown_all_the_same(
    trace_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_trace(replace(load_trace(trace_file), step_ms=(), bandwidth=None), trace_file)
    assert show("plan", trace_file) == 0
    assert "has no times, so the step time is not predicted" in capsys.readouterr().out
    assert show("plan", trace_file, "--timeline", trace_file.with_name("t.json")) == 2
    assert "step_ms has 0 entries" in capsys.readouterr().err
    assert not trace_file.with_name("t.json").exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--fraction", "1.5"], "--fraction=1.5 must be from 0 to 1"),
        (["--target-memory", "0"], "--target-memory=0.0 must be above 0 GiB"),
        (["--target-memory", "nan"], "--target-memory=nan must be above 0 GiB"),
        (["--max-overhead", "-1"], "--max-overhead=-1.0 must be 0 percent or more"),
        (["--timeline", "t.gif"], "--timeline=t.gif is not supported because only .html and .json"),
        (
            ["--frontier", "f"],
            "--frontier=f is not supported because only .png and .json are written",
        ),
        (["--output", "."], "--output=. is a folder; name a file in a folder that can be written"),
        (["--timeline", "/"], "--timeline=/ is a folder; name a file"),
        (
            ["--output", f"{__file__}/x.json"],
            f"--output={__file__}/x.json is not in a folder: a part of its path is a file; name",
        ),
        (["--frontier", f"{__file__}/x/y.png"], f"--frontier={__file__}/x/y.png is not in a"),
    ],
)
def test_plan_refuses_what_makes_no_sense(
    trace_file: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert show("plan", trace_file, *arguments) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"error: {message}")
    assert shown.out == ""


def test_a_write_that_fails_in_the_end_names_its_option(
    trace_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(self: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_bytes", fail)
    for option in ("--output", "--timeline", "--frontier"):
        path = trace_file.with_name("file.json")
        assert show("plan", trace_file, option, path) == 2
        assert capsys.readouterr().err == (
            f"error: {option}={path} cannot be written: no space left on device; free space there, "
            "or name a file on another disk\n"
        )


def run_without_torch(*arguments: object) -> None:
    code = (
        "import sys\n"
        "from megatron.slipstream.cli import main\n"
        "try:\n"
        "    status = main(sys.argv[1:])\n"
        "finally:\n"
        "    assert 'torch' not in sys.modules\n"
        "sys.exit(status)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stderr


def test_a_plan_is_made_and_drawn_without_importing_torch(trace_file: Path) -> None:
    pytest.importorskip("matplotlib")
    out = trace_file.with_name
    files = ["--output", out("p.json"), "--timeline", out("t.html"), "--frontier", out("f.png")]
    run_without_torch("plan", trace_file, *files)


def test_the_example_of_the_planning_page_works(tmp_path: Path) -> None:
    trace = ROOT / "examples" / "traces" / "dense_8b_pp4_rank0.json"
    assert str(trace.relative_to(ROOT)) in (ROOT / "docs/user-guide/planning.md").read_text()
    assert show("plan", trace, "--output", tmp_path / "plan.json") == 0
    load_plan(tmp_path / "plan.json")


@pytest.mark.parametrize("command", ["plan", "report", "doctor"])
def test_an_unknown_option_shows_how_its_command_is_used(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([command, "file.json", "--sheep"])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"usage: slipstream {command}")
    assert "unrecognized arguments: --sheep" in error
    assert ("put the flags of a training after '--'" in error) == (command == "doctor")


@pytest.mark.parametrize(
    "arguments, meant",
    [
        (["report", "file.json", "--hml=page.html"], "--html"),
        (["plan", "--targt-memory", "3"], "--target-memory"),
        (["doctor", "--no-bandwith"], "--no-bandwidth"),
    ],
    ids=lambda value: value[0],
)
def test_the_nearest_option_is_named(
    arguments: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert f"; did you mean {meant}?" in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    trace = ROOT / "examples" / "traces" / "dense_8b_pp4_rank0.json"
    command = [sys.executable, "-u", "-m", "megatron.slipstream.cli", "plan", str(trace)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.wait(60) == 0
        assert process.stderr.read() == ""


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"slipstream {__version__}\n"


def test_an_interrupt_is_one_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("megatron.slipstream.cli_plan.main._check_files", interrupt)
    assert main(["plan", "trace.json"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
