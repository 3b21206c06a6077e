# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The comparison of attach() with other ways: what it measures without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import attached
from benchmarks.rows import read_rows

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="counts what is measured without a GPU"
)


@pytest.mark.parametrize("checkpointing", ["none", "non-reentrant", "reentrant"])
def test_tiny_run(
    checkpointing: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # Long times would wrap the words that are looked for.
    output = tmp_path / "rows.jsonl"
    arguments = f"--size tiny --warmup 2 --iterations 4 --checkpointing {checkpointing}".split()
    assert attached.main([*arguments, "--output", str(output)]) == 0
    rows = read_rows(output)
    assert [row["kind"] for row in rows].count("machine") == 1
    summaries = {row["way"]: row for row in rows if row["kind"] == "summary"}
    assert set(summaries) == set(attached.WAYS)
    measured = [way for way, row in summaries.items() if "error" not in row]
    assert measured == ["plain", "attach", "save_on_cpu"]
    assert all(summaries[way]["is_same"] for way in measured)
    assert all(row["num_iterations"] == 4 for row in summaries.values() if "error" not in row)
    assert sum(row["kind"] == "iteration" for row in rows) == 3 * 4
    moving = summaries["attach"]
    assert moving["d2h_bytes"] > 0
    if checkpointing == "none":
        saved_bytes = moving["plain_activation_peak_bytes"] - moving["activation_peak_bytes"]
        assert 0.5 * moving["d2h_bytes"] < saved_bytes <= moving["d2h_bytes"]
    table = capsys.readouterr().out
    assert table.count("needs a GPU") == 2
    assert "NO" not in table


@pytest.mark.parametrize(
    "arguments, error",
    [
        ("--size 1b", "--size 1b needs a GPU, torch sees none; give --size tiny"),
        ("--patterns foo", "matches no sub-module of Decoder"),
        ("--config lag=2", "--config lag=2 is not NAME=VALUE with a name of OffloadConfig"),
        ("--config offload_release_lag=-1", "offload_release_lag=-1 is negative"),
    ],
)
def test_what_a_user_gets_wrong_is_one_line(
    arguments: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert attached.main(["--warmup", "1", *arguments.split()]) == 2
    said = capsys.readouterr().err
    assert error in said
    assert said.count("\n") == 1


def test_a_result_that_differs_shows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def changed(name: str, options: object, plain: torch.nn.Module, device: object) -> attached.Way:
        return attached.Way(
            name, plain, lambda: torch.autograd.graph.saved_tensors_hooks(_off, _on)
        )

    def _off(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach() * (1 if tensor.dtype.is_floating_point else 1)

    def _on(tensor: torch.Tensor) -> torch.Tensor:
        return tensor * 1.001 if tensor.dtype.is_floating_point else tensor

    monkeypatch.setattr(attached, "_way", changed)
    assert attached.main("--way save_on_cpu --warmup 1 --iterations 2".split()) == 0
    assert "NO" in capsys.readouterr().out
