# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A failing rank exits immediately where NCCL would make it wait, and raises otherwise."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from megatron.training import checkpointing, global_vars

from megatron.slipstream import launcher
from megatron.slipstream.integration.entry import training
from megatron.slipstream.patches.training_loop import CheckpointRefusedError


class Ended(BaseException):
    """Replaces the exit of the process."""


class Writer:
    """Megatron's TensorBoard writer."""

    is_flushed = False

    def flush(self) -> None:
        self.is_flushed = True


def _fail(*_: Any) -> NoReturn:
    raise ZeroDivisionError("in the third micro-batch")


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Writer:
    def end(status: int) -> NoReturn:
        raise Ended(status)

    monkeypatch.chdir(tmp_path)
    writer = Writer()
    monkeypatch.setattr(global_vars, "get_tensorboard_writer", lambda: writer)
    monkeypatch.setattr(training.os, "_exit", end)
    for name in ("set_launcher_defaults", "log_to_stderr", "keep_warnings"):
        monkeypatch.setattr(training, name, lambda: None)
    monkeypatch.setattr(training.OffloadConfig, "of", lambda _: None)
    for name in ("use_one_device_queue", "parse_and_validate", "_bind_pretrain"):
        monkeypatch.setattr(training, name, lambda *_: None)
    monkeypatch.setattr(training, "run", _fail)
    return writer


def _connect(monkeypatch: pytest.MonkeyPatch, num_ranks: int, backend: str) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: num_ranks > 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: num_ranks)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: backend)


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_with_nccl_it_says_why_and_ends(
    backend: str,
    writer: Writer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _connect(monkeypatch, 2, backend)
    with pytest.raises(Ended, match="1"):
        training.main([])
    assert "ZeroDivisionError: in the third micro-batch" in capsys.readouterr().err
    assert writer.is_flushed


@pytest.mark.parametrize("num_ranks, backend", [(0, ""), (1, "nccl"), (2, "gloo")])
def test_elsewhere_it_raises(
    num_ranks: int, backend: str, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    _connect(monkeypatch, num_ranks, backend)
    with pytest.raises(ZeroDivisionError):
        training.main([])
    assert not writer.is_flushed


def test_a_checkpoint_that_one_rank_refuses_is_said_by_that_rank(
    writer: Writer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> NoReturn:
        raise CheckpointRefusedError("load=folder does not fit")

    monkeypatch.setattr(training, "run", refuse)
    monkeypatch.setattr(launcher.time, "sleep", lambda _: None)
    _connect(monkeypatch, 2, "nccl")
    with pytest.raises(Ended, match="2"):
        training.main([])
    assert capsys.readouterr().err == "error: load=folder does not fit\n"
    for name, value in (("LOCAL_RANK", "1"), ("RANK", "9"), ("WORLD_SIZE", "16")):
        monkeypatch.setenv(name, value)
    with pytest.raises(Ended, match="2"):
        training.main([])
    assert capsys.readouterr().err == "error: rank 9: load=folder does not fit\n"


def _interrupt(*_: Any) -> NoReturn:
    raise KeyboardInterrupt


ARGS = SimpleNamespace(curr_iteration=7, iteration=0, save=None)


@pytest.fixture
def interrupted(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> Writer:
    monkeypatch.setattr(training, "run", _interrupt)
    monkeypatch.setattr(training, "parse_and_validate", lambda _: ARGS)
    return writer


def test_an_interrupt_is_a_line_and_no_error(
    interrupted: Writer, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO)
    assert training.main([]) == 130
    assert {record.levelname for record in caplog.records} == {"INFO"}
    assert caplog.messages[-1] == (
        "interrupted after iteration 7; no checkpoint was saved, since --save is not set"
    )
    assert "Traceback" not in capsys.readouterr().err


def test_an_interrupted_rank_does_not_wait_for_nccl(
    interrupted: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    _connect(monkeypatch, 2, "nccl")
    with pytest.raises(Ended, match="130"):
        training.main([])
    assert interrupted.is_flushed


def test_an_interrupt_before_training_is_a_line(
    writer: Writer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(training, "parse_and_validate", _interrupt)
    assert training.main([]) == 130
    assert caplog.messages == ["interrupted before training"]


def test_the_last_checkpoint_is_named(
    interrupted: Writer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    args = SimpleNamespace(iteration=3, save=str(tmp_path))  # interrupted while data is built
    monkeypatch.setattr(training, "parse_and_validate", lambda _: args)
    assert training.main([]) == 130
    assert caplog.messages[-1] == (
        f"interrupted after iteration 3; no checkpoint was saved in {tmp_path} yet "
        "(--save-interval)"
    )
    Path(checkpointing.get_checkpoint_tracker_filename(str(tmp_path))).write_text("6\n")
    assert training.main([]) == 130
    assert caplog.messages[-1] == (
        f"interrupted after iteration 3; the last checkpoint in {tmp_path} is of iteration 6"
    )
