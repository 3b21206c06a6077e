# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The tables of the engine's host time on a CPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import host_calls


def test_calls_are_timed_with_both_caches_and_in_models_of_each_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host_calls, "EVICTED_BYTES", 1 << 20)
    output = tmp_path / "rows.jsonl"
    arguments = ["--iterations", "3", "--sizes", "2x1", "3x6", "--output", str(output)]
    assert host_calls.main(arguments) == 0
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    caches = [row for row in rows if row["table"] == "caches"]
    for is_cold in (False, True):
        us = {row["call"]: row["us"] for row in caches if row["is_cold"] is is_cold}
        assert {"start", "enter", "leave", "end", "reset", "Tensor.detach"} <= us.keys()
        assert all(0 < value < 1e6 for value in us.values())
    growth = {
        (row["groups"], row["num_layers"]): row["us_per_group"]
        for row in rows
        if row["table"] == "growth"
    }
    assert growth.keys() == {(kind, layers) for kind in host_calls.KINDS for layers in (2, 3)}
    assert growth["stay", 3] < growth["1 moves", 3] < growth["3 move", 3]
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert len(lines) == 2 + len(caches) // 2 + 2 + 2


def test_rows_measured_before_an_interruption_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object) -> Iterator[host_calls.Row]:
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(host_calls, "EVICTED_BYTES", 1 << 20)
    monkeypatch.setattr(host_calls, "measure_growth", interrupted)
    output = tmp_path / "rows.jsonl"
    with pytest.raises(KeyboardInterrupt):
        host_calls.main(["--iterations", "3", "--output", str(output)])
    assert len(output.read_text().splitlines()) == 16


def test_groups_move_as_said() -> None:
    for kind, (num_storages, _) in host_calls.KINDS.items():
        model, timer = host_calls.Model(3, kind, "cpu"), host_calls.Timer()
        for _ in range(3):
            model.iteration(2, timer)
        assert model.engine.plan is not None
        groups = model.engine.plan.trace.groups
        assert [len(group.storages) for group in groups] == [
            0 if kind == "stay" else num_storages
        ] * 6
        model.close()
