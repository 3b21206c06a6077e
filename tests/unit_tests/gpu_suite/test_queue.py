# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Jobs run side by side, on GPUs of their own or with others, and none outlives its time."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

from tools.gpu_suite import queue
from tools.gpu_suite.command import main
from tools.gpu_suite.jobs import NUM_WORKERS, OUTPUT, SHARES, Job
from tools.gpu_suite.queue import RESULTS, Result, State, run_jobs


@pytest.fixture(autouse=True)
def _memory_for_twelve_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "num_tests_per_gpu", lambda: 12)


NOTES = """
import json, os, sys, time
begun = time.monotonic()
open(f"{sys.argv[1]}/begun", "w").close()
time.sleep(float(sys.argv[2]))
# On a busy machine the other job may begin much later.
while sys.argv[5] and not os.path.exists(f"{sys.argv[1]}/../{sys.argv[5]}/begun"):
    time.sleep(0.01)
note = {"gpus": os.environ["CUDA_VISIBLE_DEVICES"], "begun": begun, "ended": time.monotonic()}
open(f"{sys.argv[1]}/note.json", "w").write(json.dumps(note))
print("workers", sys.argv[3])
sys.exit(int(sys.argv[4]))
"""


def job(
    name: str,
    num_gpus: int,
    naps_s: float = 0.3,
    status: int = 0,
    seconds: int = 1,
    shares: int = SHARES,
    awaits: str = "",
) -> Job:
    words = (sys.executable, "-c", NOTES, OUTPUT, str(naps_s), NUM_WORKERS, str(status), awaits)
    return Job(name, num_gpus, seconds, words, shares=shares)


def notes(output: Path, *names: str) -> list[dict[str, float]]:
    return [json.loads((output / name / "note.json").read_text()) for name in names]


def states(results: list[Result]) -> dict[str, State]:
    return {result.name: result.state for result in results}


def test_jobs_that_need_a_gpu_to_themselves_have_it(tmp_path: Path) -> None:
    jobs = [job("a", 1), job("b", 1), job("c", 1), job("pair", 2)]
    results = run_jobs(jobs, [0, 1], tmp_path, 60)
    assert set(states(results).values()) == {State.PASSED}
    a, b, c, pair = notes(tmp_path, "a", "b", "c", "pair")
    assert pair["gpus"] == "0,1"
    assert {a["gpus"], b["gpus"]} == {"0", "1"}
    # Side by side, and what needs both before and not beside them.
    assert max(a["begun"], b["begun"]) < min(a["ended"], b["ended"])
    for one in (a, b, c):
        assert pair["ended"] <= one["begun"]
    for first, second in ((a, c), (b, c)):
        if first["gpus"] == second["gpus"]:
            assert first["ended"] <= second["begun"]


def test_jobs_that_may_share_a_gpu_do_and_others_wait(tmp_path: Path) -> None:
    half = SHARES // 2
    pairs = (("a", "b"), ("b", "a"))
    sharing = [job(name, 1, 0.0, seconds=30, shares=half, awaits=other) for name, other in pairs]
    results = run_jobs([job("alone", 1, 0.0), *sharing], [0], tmp_path, 60)
    assert set(states(results).values()) == {State.PASSED}
    a, b, alone = notes(tmp_path, "a", "b", "alone")
    assert max(a["begun"], b["begun"]) < min(a["ended"], b["ended"])
    assert alone["begun"] >= max(a["ended"], b["ended"])


def test_a_failure_is_told_and_does_not_hide_the_rest(tmp_path: Path) -> None:
    told: list[tuple[str, bool]] = []
    results = run_jobs(
        [job("bad", 1, 0.0, status=3), job("good", 1, 0.0)],
        [0],
        tmp_path,
        60,
        lambda name, result: told.append((name, result is not None)),
    )
    assert states(results) == {"bad": State.FAILED, "good": State.PASSED}
    assert told == [("bad", False), ("bad", True), ("good", False), ("good", True)]
    rows = [json.loads(line) for line in (tmp_path / RESULTS).read_text().splitlines()]
    assert [(row["name"], row["state"], row["exit_status"]) for row in rows] == [
        ("bad", "failed", 3),
        ("good", "passed", 0),
    ]


def test_when_the_time_is_over_what_runs_is_ended_with_its_children(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys; child = subprocess.Popen(['sleep', '60']); "
        "open(sys.argv[1] + '/child', 'w').write(str(child.pid)); child.wait()"
    )
    slow = Job("slow", 1, 1, (sys.executable, "-c", script, OUTPUT))
    begun_s = time.monotonic()
    results = run_jobs([slow, job("late", 1, seconds=30)], [0], tmp_path, 2.0)
    assert time.monotonic() - begun_s < 20
    assert states(results) == {"slow": State.CUT_OFF, "late": State.NOT_STARTED}
    child = int((tmp_path / "slow" / "child").read_text())
    with pytest.raises(ProcessLookupError):
        _wait_for_end(child)


def _wait_for_end(pid: int) -> None:
    for _ in range(50):
        os.kill(pid, 0)
        # A child whose parent is gone may stay as a zombie where no process collects it.
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            raise ProcessLookupError
        time.sleep(0.1)


@pytest.mark.parametrize(
    "num_cores, num_tests, expected",
    [
        (12, 12, [6, 12, 3]),
        (32, 12, [12, 12, 6]),
        (1, 12, [1, 1, 1]),
        (32, 4, [4, 4, 2]),
        (32, 1, [1, 1, 1]),
    ],
)
def test_a_job_has_its_share_of_the_cores_and_of_the_memory(
    num_cores: int,
    num_tests: int,
    expected: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: num_cores)
    monkeypatch.setattr(queue, "num_tests_per_gpu", lambda: num_tests)
    half = job("half", 1, 0.0, shares=SHARES // 2)
    run_jobs([job("one", 1, 0.0), job("pair", 2, 0.0), half], [0, 1], tmp_path, 60)
    logs = [(tmp_path / name / "log.txt").read_text() for name in ("one", "pair", "half")]
    assert logs == [f"workers {number}\n" for number in expected]


def test_ranks_that_share_a_gpu_count_as_one_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 32)
    script = "import os; print('{workers}', os.environ['SLIPSTREAM_RANKS_PER_GPU'])"
    command = (sys.executable, "-c", script)
    test = Job("tests", 4, 1, command, shares=2).on_fewer_gpus(4)
    run_jobs([test, Job("bench", 1, 1, command)], [0], tmp_path, 60)
    logs = [(tmp_path / name / "log.txt").read_text() for name in ("tests", "bench")]
    assert logs == ["2 4\n", "12 1\n"]


def test_gpus_are_those_that_are_visible_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, GPU-7")
    run_jobs([job("pair", 2, 0.0)], [0, 1], tmp_path, 60)
    run_jobs([job("one", 1, 0.0)], [1], tmp_path, 60)
    assert [note["gpus"] for note in notes(tmp_path, "pair", "one")] == ["5,GPU-7", "GPU-7"]


def test_a_release_comes_before_the_environment(tmp_path: Path) -> None:
    script = "import sys; print(*sys.path, sep='\\n')"
    older = Job("older", 1, 1, (sys.executable, "-c", script), release="0.0.1")
    run_jobs([older], [0], tmp_path, 60)
    path = (tmp_path / "older" / "log.txt").read_text().splitlines()
    assert path[1].endswith(os.path.join(".releases", "0.0.1"))


def test_nothing_of_an_earlier_run_is_left_in_a_jobs_folder(tmp_path: Path) -> None:
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "rows.jsonl").write_text("old\n")
    run_jobs([job("again", 1, 0.0)], [0], tmp_path, 60)
    assert sorted(path.name for path in (tmp_path / "again").iterdir()) == [
        *("begun", "log.txt", "note.json")
    ]


def test_more_gpus_than_there_are_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pair needs 2 GPUs, and there are 1"):
        run_jobs([job("pair", 2)], [0], tmp_path, 60)


# --- the command ----------------------------------------------------------------------------------


def test_without_gpus_it_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there are GPUs")
    assert main(["tests"]) == 2
    assert capsys.readouterr().err == "error: torch sees no GPU\n"


def test_a_number_of_ranks_that_is_none_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["--list", "--ranks-per-gpu", "0"]) == 2
    monkeypatch.setenv("SLIPSTREAM_RANKS_PER_GPU", "some")
    assert main(["--list"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == "error: --ranks-per-gpu 0 leaves no rank a GPU; set 1 or more"
    assert second.startswith("error: SLIPSTREAM_RANKS_PER_GPU=some is not a number of ranks")


def test_an_unknown_job_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "graph-bank"]) == 2
    assert "no job is called graph-bank; near: graph-bank:" in capsys.readouterr().err


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    jobs = [job("good", 1, 0.0), job("bad", 1, 0.0, status=1), job("four", 4)]
    monkeypatch.setattr("tools.gpu_suite.command.select", lambda patterns: jobs)


@pytest.mark.usefixtures("two_gpus")
def test_what_passed_before_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--output", str(tmp_path / "first")]) == 1
    shown = capsys.readouterr()
    assert "left out: four needs 4 GPUs, there are 2" in shown.out
    assert "good: passed after" in shown.err
    assert "bad: failed after" in shown.err
    again = ["--continue", str(tmp_path / "first"), "--output", str(tmp_path / "second")]
    assert main(again) == 1
    rows = [json.loads(line) for line in (tmp_path / "second" / RESULTS).read_text().splitlines()]
    assert [row["name"] for row in rows] == ["bad"]


def test_more_arguments_go_to_the_jobs_that_they_are_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    tells = (sys.executable, "-c", "import sys; print(sys.argv[1:])")
    jobs = [Job(name, 1, 1, tells) for name in ("tests", "bench:a:b", "other")]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("tools.gpu_suite.command.select", lambda patterns: jobs)
    more = ["--tests", "-k 'two words'", "--bench", "--max-iterations 3"]
    assert main([*more, "--output", str(tmp_path)]) == 0
    logs = [(tmp_path / name / "log.txt").read_text() for name in ("tests", "bench_a_b", "other")]
    assert logs == ["['-k', 'two words']\n", "['--max-iterations', '3']\n", "[]\n"]
