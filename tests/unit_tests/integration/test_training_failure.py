# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A failing rank exits immediately where NCCL would make it wait, and raises otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from megatron.training import global_vars

from megatron.slipstream.integration import training


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
    for name in ("_set_single_process_environment", "log_to_stderr", "keep_warnings"):
        monkeypatch.setattr(training, name, lambda: None)
    monkeypatch.setattr(training.OffloadConfig, "of", lambda _: None)
    for name in ("parse_and_validate", "_bind_pretrain"):
        monkeypatch.setattr(training, name, lambda *_: None)
    monkeypatch.setattr(training, "run", _fail)
    return writer


def _connect(monkeypatch: pytest.MonkeyPatch, num_ranks: int, backend: str) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: num_ranks > 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: num_ranks)
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
