# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The table of what calls cost with warm and with cold caches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import cold_calls


def test_each_call_is_timed_with_warm_and_with_cold_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cold_calls, "EVICTED_BYTES", 1 << 20)
    output = tmp_path / "rows.jsonl"
    assert cold_calls.main(["--iterations", "3", "--output", str(output)]) == 0
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    for is_cold in (False, True):
        us = {row["call"]: row["us"] for row in rows if row["is_cold"] is is_cold}
        assert {"start", "enter", "leave", "end", "reset", "Tensor.detach"} <= us.keys()
        assert all(0 < value < 1e6 for value in us.values())
    assert capsys.readouterr().out.count("\n| ") == len(rows) // 2 + 1
