# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A training shows its own progress; megatron's output goes to a file that it names."""

from __future__ import annotations

import logging
import re
import sys
import warnings
from pathlib import Path

import pytest
import torch
from forked import run_script

from megatron.slipstream.integration.entry import training
from megatron.slipstream.integration.entry.output import DEFAULT_PATH, MegatronOutput

ROOT = Path(__file__).resolve().parents[3]
NAMED = ["--megatron-output-path", "out.log"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def library() -> logging.Logger:
    """A logger without a handler: pytest adds its own to loggers that exist before a test."""
    logger = logging.Logger("a.library")  # noqa: LOG001
    logger.propagate = False
    return logger


def say(text: str) -> None:
    print(text)
    library().warning("warned: %s", text)


def test_text_goes_to_the_file_from_the_start(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with MegatronOutput(["--lr", "1"], rank=0) as output:
        say("early")
        output.keep()
        say("late")
        warnings.warn("of Python", stacklevel=1)
    print("after")
    shown = capsys.readouterr()
    assert shown.out == "after\n"
    assert "early" not in shown.err
    lines = (folder / DEFAULT_PATH).read_text().splitlines()
    assert lines[0].endswith(" --lr 1")
    for text in ("early", "WARNING:a.library:warned: early", "late"):
        assert text in lines
    assert any("UserWarning: of Python" in line for line in lines)


def test_a_handler_that_was_made_meanwhile_writes_to_stdout_afterwards(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with MegatronOutput([], rank=0) as output:
        output.keep()
        handler = logging.StreamHandler(sys.stdout)
    handler.emit(logging.makeLogRecord({"msg": "later"}))
    assert capsys.readouterr().out == "later\n"
    assert "later" not in (folder / DEFAULT_PATH).read_text()


def test_equal_warnings_are_written_once(folder: Path) -> None:
    with MegatronOutput([], rank=0) as output:
        output.keep()
        for _ in range(160):
            library().warning("the same")
            print("a line")
    text = (folder / DEFAULT_PATH).read_text()
    assert re.findall("^.*the same$", text, re.MULTILINE) == ["WARNING:a.library:the same"]
    assert text.count("a line") == 160


def test_each_rank_has_its_file_and_a_second_run_adds_to_it(folder: Path) -> None:
    for text in ("first", "second"):
        with MegatronOutput(NAMED, rank=2) as output:
            output.keep()
            print(text)
    lines = (folder / "out.rank2.log").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == ["first", "second"]


def test_a_dash_shows_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (["--megatron-output-path", "-"], ["--megatron-output-path=-"]):
        with MegatronOutput(flags, rank=0) as output:
            output.keep()
            print("said")
        assert capsys.readouterr().out == "said\n"
    assert list(folder.iterdir()) == []


def test_what_is_refused_leaves_no_file_and_shows_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with MegatronOutput([], rank=0):
        say("while flags are parsed")
    assert list(folder.iterdir()) == []
    assert capsys.readouterr() == ("", "")


def test_an_error_shows_what_was_held_back_or_where_it_is(
    folder: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def fail(keeps: bool) -> None:
        with MegatronOutput([], rank=0) as output:
            print("said")
            if keeps:
                output.keep()
            raise KeyError

    with pytest.raises(KeyError):
        fail(keeps=False)
    assert capsys.readouterr().out == "said\n"
    package = logging.getLogger("megatron.slipstream")
    package.addHandler(caplog.handler)
    try:
        with pytest.raises(KeyError):
            fail(keeps=True)
    finally:
        package.removeHandler(caplog.handler)
    assert f"megatron's own output before the error is in {DEFAULT_PATH}" in caplog.messages


def test_a_file_that_cannot_be_opened_is_refused_if_it_was_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "file").write_text("")
    flags = ["--megatron-output-path", "file/out.log"]
    message = "--megatron-output-path=file/out.log is not in a folder"
    with pytest.raises(ValueError, match=message), MegatronOutput(flags, rank=0) as output:
        output.keep()
    (folder / DEFAULT_PATH).mkdir()
    with MegatronOutput([], rank=0) as output:
        print("said")
        output.keep()
        print("and shown")
    assert capsys.readouterr().out == "said\nand shown\n"


def test_a_disk_that_is_full_does_not_end_the_training(caplog: pytest.LogCaptureFixture) -> None:
    package = logging.getLogger("megatron.slipstream")
    package.addHandler(caplog.handler)
    try:
        with MegatronOutput(["--megatron-output-path", "/dev/full"], rank=0) as output:
            print("early")
            output.keep()
            for _ in range(3):
                print("late", flush=True)
                library().warning("the same")
    finally:
        package.removeHandler(caplog.handler)
    # A record may come by both handlers.
    records = {id(r): r for r in caplog.records if r.levelname == "WARNING"}
    (warning,) = [record.getMessage() for record in records.values()]
    assert (
        "--megatron-output-path=/dev/full cannot be written: no space left on device; free space"
        in warning
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="the flags are those of a CPU training")
def test_a_training_of_twenty_iterations_shows_little(folder: Path) -> None:
    flags = """
        --mock-data --tokenizer-type NullTokenizer --vocab-size 64 --num-layers 3 --hidden-size 32
        --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 --micro-batch-size 1
        --global-batch-size 2 --lr 1e-3 --train-iters 20 --eval-iters 1 --eval-interval 20
        --log-interval 1 --fine-grained-activation-offloading --offload-modules core_attn
        --min-offloaded-tensor-size 1 --offload-report-path report.json
    """.split()
    # What is said while packages are imported is tested in test_cases.
    done = run_script(ROOT / "pretrain_gpt.py", *flags, folder=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) < 70, done.stderr
    progress = [line for line in lines if "iteration " in line]
    assert len(progress) == 20
    figures = [
        re.search(r"(\d+)/20: loss (\d\.\d{4}), \d+ ms, offloaded (.*)$", line) for line in progress
    ]
    moved = {found[3] for found in figures[1:] if found is not None}
    assert len(moved) == 1, "what one iteration moves does not grow"
    said = (folder / DEFAULT_PATH).read_text()
    assert "end of arguments" in said
    assert said.count("CPU RNG state changed within GPU RNG context") <= 2
    first = re.search(r"iteration +1/.*lm loss: (\S+)", said)
    assert first is not None
    assert figures[0] is not None
    assert f"{float(first[1]):.4f}" == figures[0][2]


def test_help_has_the_switch(capsys: pytest.CaptureFixture[str]) -> None:
    assert training.main(["--help"]) == 0
    assert "--megatron-output-path" in capsys.readouterr().out
