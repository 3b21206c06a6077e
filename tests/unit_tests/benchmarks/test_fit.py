# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The command that measures which sequence lengths fit."""

from __future__ import annotations

import io
import json
import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_function, run_module

from benchmarks import fit
from benchmarks.fit import NotMeasured, find_longest
from benchmarks.fit_process import Worker
from benchmarks.fit_ways import Setup
from benchmarks.rows import read_rows

ROOT = Path(__file__).resolve().parents[3]
DEVICE, RESIDENT = 1000, 100


def measured(bytes_of: Callable[[int], float]) -> tuple[Callable[[int], Any], list[int]]:
    """A model whose sequences need ``bytes_of(tokens)``, and the lengths that are tried."""
    tried: list[int] = []

    def measure(tokens: int) -> Any:
        tried.append(tokens)
        reserved = RESIDENT + bytes_of(tokens)
        if reserved > DEVICE:
            return {"error": "out of memory", "dies": True}
        return {
            "reserved_bytes": reserved,
            "resident_bytes": RESIDENT,
            "device_bytes": DEVICE,
        }

    return measure, tried


@pytest.mark.parametrize(
    ("bytes_of", "most"),
    [
        pytest.param(lambda tokens: 9.0 * tokens, 3, id="straight"),
        pytest.param(lambda tokens: 300 + 6.0 * tokens, 6, id="with a constant part"),
        pytest.param(lambda tokens: 0.1 * tokens**2, 8, id="curved"),
        pytest.param(lambda tokens: 0.0 if tokens < 72 else 1e9, 20, id="without a warning"),
    ],
)
@pytest.mark.parametrize("known", [(8,), (8, 64), (8, 200), ()])
def test_the_longest_is_found_in_few_tries(
    bytes_of: Callable[[int], float], most: int, known: tuple[int, ...]
) -> None:
    unit = 8
    longest = max(n for n in range(unit, 200, unit) if RESIDENT + bytes_of(n) <= DEVICE)
    measure, tried = measured(bytes_of)
    rows = {tokens: measure(tokens) for tokens in known}
    tried.clear()
    found, dies_at = find_longest(measure, rows, unit)
    assert found == longest
    assert found < dies_at <= found + unit
    assert len(set(tried)) == len(tried) <= most + 3


def test_nothing_is_called_the_longest_where_a_point_failed_otherwise() -> None:
    with pytest.raises(NotMeasured, match="8 tokens: no such option"):
        find_longest(lambda _: {"error": "no such option", "dies": False}, {}, 8)


def measured_by_its_process(
    setup: Setup, points: Sequence[dict[str, Any]], patch: pytest.MonkeyPatch
) -> list[dict[str, Any]]:
    """The fields of each point. The process is forked: a new one would import torch."""
    started: list[tuple[list[str], dict[str, str]]] = []
    patch.setattr(subprocess, "Popen", lambda command, env, **_: started.append((command, env)))
    Worker(setup, kill_seconds=100)._start()
    patch.undo()
    (((python, option, module, *arguments), environment),) = started
    assert (python, option) == (sys.executable, "-m")

    def work() -> int:
        sys.stdin = io.StringIO("".join(f"{json.dumps(point)}\n" for point in points))
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return 0

    done = run_function(work, folder=ROOT, environment=environment)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.skipif(torch.cuda.is_available(), reason="its device is imitated by a CPU")
def test_points_are_measured_until_one_dies_and_not_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "rows.jsonl"
    arguments = ("--tiny", "--ways", "slipstream,budgets", "--output", str(rows))
    refused = run_module("benchmarks.fit", *arguments, folder=ROOT)
    assert refused.returncode == 2
    assert "--ways budgets is not one" in refused.stderr
    setup = fit._setup(
        fit._parser().parse_args(["--device-gib", "0.001", "--engine-option", "offload_verify=1"]),
        fit.find_case("smoke"),
        "slipstream",
    )
    options = {"iterations": 2, "warmups": 1, "max_planning": 20, "seconds": 100}
    points = [{"tokens": tokens, **options} for tokens in (16, 64, 16)]
    good, bad = measured_by_its_process(setup, points, monkeypatch)
    assert good["is_settled"]
    assert good["moved_bytes"] > 0
    assert good["num_iterations"] == 2
    assert 0 < good["peak_bytes"] <= good["reserved_bytes"] <= good["device_bytes"]
    assert bad["dies"]
    assert "OutOfMemoryError" in bad["error"]
    written = [
        {"kind": "point", "tokens": tokens, "is_search": False, **setup.identity(), **row}
        for tokens, row in ((16, good), (64, bad))
    ]
    rows.write_text("".join(f"{json.dumps(row)}\n" for row in written))
    assert set(fit.points_of(read_rows(rows), setup)) == {16, 64}
    assert fit.table(read_rows(rows)).count("| dies |") == 1
    assert "not settled" not in fit.table(read_rows(rows))
    assert "ms, not settled |" in fit.table([{**written[0], "is_settled": False}]).replace(
        f"{good['step_ms']:,.1f}", "ms"
    )


@pytest.mark.parametrize(
    "code, expected",
    [
        ("print(input())", {"peak_bytes": 1}),
        ("import os; os.kill(os.getpid(), 9)", {"error": "ended with status -9", "dies": True}),
        ("import time; time.sleep(99)", {"error": "took longer than 1 s", "dies": False}),
    ],
    ids=["answers", "the kernel ended it", "too slow"],
)
def test_a_process_answers_or_its_end_is_the_answer(
    code: str, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", code], **pipes)
    monkeypatch.setattr(Worker, "_start", lambda _: process)
    is_slow = "took longer" in expected.get("error", "")
    worker = Worker(Setup("smoke", "off", (), ()), kill_seconds=1 if is_slow else 60)
    assert worker.measure({"peak_bytes": 1}) == expected
    worker.close()
    assert process.wait() is not None


def test_a_case_of_several_ranks_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--case", "smoke_pp2", "--output", str(tmp_path / "rows.jsonl")]
    assert fit.main(arguments) == 2
    assert "--case smoke_pp2 is not supported because it needs 2 ranks" in capsys.readouterr().err
