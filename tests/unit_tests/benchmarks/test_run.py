# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The command: what it measures without a GPU, and how it reports what it cannot measure."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Optional

import pytest
import torch
from benchmark_runs import benchmark

from benchmarks import run
from benchmarks.case import Limits, Variant, base_label, way_labels
from benchmarks.cases import CASES, find_case, select_variants
from benchmarks.measure import MemoryFigures, Step
from benchmarks.rows import Row, RowWriter, read_rows
from benchmarks.variant import VariantRun, _Figures
from benchmarks.ways import Way
from benchmarks.worker import EXIT_WAY_FAILED
from megatron.slipstream.fine_grained_activation_offload.lifecycle import Lifecycle
from tools.shared_gpus import VARIABLE


def summaries(rows: list[Row]) -> dict[tuple[str, int], Row]:
    found = [row for row in rows if row["kind"] == "summary"]
    return {(row["engine"], row["rank"]): row for row in found}


def test_smoke_writes_rows_and_table(tmp_path: Path) -> None:
    result = benchmark(
        *f"--case smoke --modules all --name smoke --max-iterations 10 --output {tmp_path}".split(),
    )
    assert result.returncode == 0, result.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"smoke.jsonl", "smoke.md"}
    rows = read_rows(tmp_path / "smoke.jsonl")
    (machine,) = [row for row in rows if row["kind"] == "machine"]
    assert machine["device"] == "CPU"
    assert machine["command"].startswith("python -m benchmarks.run --case smoke")
    iterations = [row for row in rows if row["kind"] == "iteration"]
    assert len(iterations) == 3 * 10
    found = summaries(rows)
    assert "no GPU" in found["megatron", 0]["error"]
    ours = found["slipstream", 0]
    assert ours["error"] is None
    assert ours["notes"] == []
    assert ours["loss_difference"] == 0
    assert ours["saved_bytes"] > 0
    assert ours["moved_bytes"] > 0
    assert ours["host_us_per_group"] > 0
    assert {"autograd in C++", "__enter__", "end_on"} <= ours["host_us_per_call"].keys()
    assert found["slipstream:lag2", 0]["options"] == {"offload_release_lag": 2}
    assert found["off", 0]["overhead_percent"] == 0
    # Without a terminal, a line for each variant.
    assert "smoke all: 10 iterations, off" in result.stderr


def test_ranks_of_a_pipeline_are_started_and_one_bad_option_does_not_end_the_run(
    tmp_path: Path,
) -> None:
    result = benchmark(
        *"--case smoke_pp2 --engines slipstream --engine-option offload_release_lags=2".split(),
        *f"--max-iterations 10 --output {tmp_path}".split(),
    )
    assert result.returncode == 0, result.stderr
    found = summaries(read_rows(tmp_path / "engines.jsonl"))
    assert "did you mean offload_release_lag?" in found["slipstream", 0]["error"]
    assert found["off", 0]["step_ms"] == found["off", 1]["step_ms"]


def failing_job(path: Path, statuses: list[int], failing: list[str]) -> tuple[run.Job, Callable]:
    """A job whose ranks end with ``statuses``, the first ones after a failure of an engine."""
    path.touch()
    job = run.Job(find_case("smoke"), (), (), {}, Limits(), path, "run", ())

    def run_ranks(job: run.Job) -> int:
        if failing:
            common = {"case": "smoke", "variant": "core_attn", "rank": 0, "num_ranks": 1}
            engine = failing.pop(0)
            RowWriter(path, "run").write("summary", **common, engine=engine, error="it fails")
        return statuses.pop(0)

    return job, run_ranks


def test_a_case_is_started_again_without_the_engine_that_ended_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    statuses = [EXIT_WAY_FAILED, EXIT_WAY_FAILED, 0]
    job, ranks = failing_job(tmp_path / "rows.jsonl", statuses, ["megatron", "slipstream"])
    monkeypatch.setattr(run, "_run_ranks", ranks)
    run._run_case(job)
    assert statuses == []
    assert [row["engine"] for row in read_rows(job.rows)] == ["megatron", "slipstream"]


@pytest.mark.parametrize("status", [EXIT_WAY_FAILED, -9])
def test_a_case_that_dies_without_saying_why_is_not_started_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    statuses = [status, 0]
    job, ranks = failing_job(tmp_path / "rows.jsonl", statuses, [])
    monkeypatch.setattr(run, "_run_ranks", ranks)
    run._run_case(job)
    assert statuses == [0]
    (row,) = read_rows(job.rows)
    assert f"status {status}" in row["error"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--case smok", "did you mean 'smoke'?"),
        ("", "nothing to measure"),
        ("--case smoke --modules core_atn", "did you mean 'core_attn'?"),
        ("--case smoke --engines megatorn", "megatorn is not an engine of --case smoke; set some"),
        ("--case smoke --engine-option lag", "is not NAME=VALUE"),
        ("--case smoke --min-iterations 50 --max-iterations 20", "nothing to take a median of"),
        ("--case smoke --warmups 0", "--warmups 0 is too few"),
        ("--case smoke --figures memory,hosts", "--figures hosts is not one"),
    ],
)
def test_errors_of_the_users_name_the_cure(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run.main([*arguments.split(), "--output", str(tmp_path / "new")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_results_are_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "engines.jsonl").write_text("")
    assert run.main(["--case", "smoke", "--output", str(tmp_path)]) == 2
    assert "--append" in capsys.readouterr().err


def test_list_shows_every_case_with_its_engines(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--list"]) == 0
    text = capsys.readouterr().out
    assert all(f"{case.name} (" in text for case in CASES)
    assert "[off, megatron, slipstream, slipstream:auto]" in text


def test_every_case_can_be_selected_and_its_modules_exist() -> None:
    for case in CASES:
        assert find_case(case.name) is case
        names = [variant.name for variant in case.variants]
        assert select_variants(case, names) == case.variants
        for variant in case.variants:
            assert "attn_proj" not in variant.modules or "core_attn" in variant.modules


def test_modules_beyond_the_cases_own_are_measured_too() -> None:
    (variant,) = select_variants(find_case("dense"), ["core_attn,qkv_linear"])
    assert variant.modules == ("core_attn", "qkv_linear")


def test_engines_are_chosen_by_name_or_by_tuning() -> None:
    case = find_case("dense")
    variant = case.variants[-1]
    assert way_labels(case, variant, ["slipstream:auto"]) == ("off", "slipstream:auto")
    assert way_labels(case, variant, ["slipstream"]) == ("off", "slipstream", "slipstream:auto")
    assert way_labels(case, variant, ["off"]) == ("off",)
    every = ("off", "megatron", "slipstream", "slipstream:auto")
    assert way_labels(case, variant, ()) == every


def test_the_planned_variant_is_measured_with_auto_only() -> None:
    case = find_case("moe_ep4_pp2_vpp2")
    *single, planned = case.variants
    every = ("off", "megatron", "slipstream")
    assert [way_labels(case, variant, every) for variant in single] == [every] * 4
    assert way_labels(case, planned, every) == ("off", "megatron", "slipstream:auto")


@pytest.mark.parametrize(
    "name, num_ranks", [("moe_ep4_pp2_vpp2", 8), ("smoke_ep2_pp2_vpp2", 4), ("moe_ep2", 2)]
)
def test_data_parallel_ranks_are_counted_and_experts_divide_them(name: str, num_ranks: int) -> None:
    case = find_case(name)
    assert case.num_ranks == num_ranks
    assert case.model.dp % case.model.ep == 0
    assert case.num_micro_batches % case.model.pp == 0


def test_a_way_is_compared_with_what_it_adds_to() -> None:
    measured = ("eager", "eager+offload", "graph", "graph+offload", "graph+offload+delayed")
    bases = [base_label(label, measured) for label in measured]
    assert bases == ["eager", "eager", "eager", "graph", "graph"]
    assert base_label("graph+offload", ("eager", "graph+offload")) == "eager"


def options_of(*arguments: str) -> object:
    return run._parser().parse_args(["--case", "smoke_pp2", *arguments])


def test_a_short_run_is_made_of_options_that_every_rank_gets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = "--warmups 1 --min-iterations 3 --max-iterations 4 --memory-iterations 1 "
    given += "--max-planning 12 --planning-seconds 7 --figures memory,host "
    given += f"--output {tmp_path}"
    options = options_of(*given.split())
    arguments = ["--case", "smoke_pp2", *given.split()]
    job = run._job(options, find_case("smoke_pp2"), "run", arguments)
    assert job.limits == Limits(
        min_iterations=3,
        max_iterations=4,
        seconds=30.0,
        num_warmups=1,
        max_planning=12,
        planning_seconds=7.0,
        num_memory_iterations=1,
        figures=("memory", "host"),
    )
    started: list[list[str]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, env: started.append(command))
    run._start_rank(job, rank=1, port=1)
    (command,) = started
    of_rank: list[run.Job] = []
    monkeypatch.setattr(run, "_work", of_rank.append)
    monkeypatch.setattr(run, "_run", lambda *_: 0)
    assert run.main(command[3:]) == 0
    assert of_rank == [job]


class Planning(SimpleNamespace):
    """A way of ours that is settled after some iterations."""

    is_ours, num_eager_iterations = True, 0

    def __init__(self, settles_after: int) -> None:
        super().__init__(steps=0, is_closed=False)
        self.settles_after = settles_after

    @property
    def manager(self) -> SimpleNamespace:
        return SimpleNamespace(is_settled=self.steps >= self.settles_after)

    def run(self, iteration: int) -> list[torch.Tensor]:
        self.steps += 1
        return []

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize(
    ("limits", "settles_after", "share_a_gpu", "expected", "message"),
    [
        (Limits(max_planning=5), 3, False, 3, None),
        (Limits(max_planning=5), 5, False, 5, None),
        (Limits(max_planning=5), 9, False, 5, "set --max-planning higher"),
        (Limits(planning_seconds=0.02), 49, False, 1, "set --planning-seconds higher"),
        (Limits(max_planning=5), 9, True, 5, None),
    ],
)
def test_an_engine_that_does_not_settle_within_the_limits_is_not_timed(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    limits: Limits,
    settles_after: int,
    share_a_gpu: bool,
    expected: int,
    message: Optional[str],
) -> None:
    clock_s = iter(0.015 * number for number in range(200))
    monkeypatch.setattr("benchmarks.variant.time.perf_counter", lambda: next(clock_s))
    monkeypatch.setattr("benchmarks.variant.timed_step", lambda step, number: step(number) or True)
    path = tmp_path / "rows.jsonl"
    path.touch()
    measured = VariantRun(
        *(find_case("smoke"), Constants(), Variant(("-",)), ("off", "slipstream"), {}),
        *(RowWriter(path, "run"), None),
    )
    measured._share_a_gpu = share_a_gpu
    way = Planning(settles_after)
    measured._ways = {"slipstream": way}  # type: ignore[dict-item]
    measured._plan("slipstream", way, limits)  # type: ignore[arg-type]
    assert way.steps == expected
    assert list(measured._ways) == ([] if message else ["slipstream"])
    assert way.is_closed == bool(message)
    errors = [row["error"] for row in read_rows(path)]
    assert len(errors) == bool(message)
    assert all(str(message) in error and "not settled after" in error for error in errors)


def test_rows_of_an_engine_that_plans_again_while_it_is_timed_say_so(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    ways = {"off": Constant("off", 1.0), "slipstream": Constant("slipstream", 1.0)}
    measured = VariantRun(
        find_case("smoke"),
        Constants(),
        Variant(("-",)),
        tuple(ways),
        {},
        RowWriter(path, "r"),
        None,
    )
    measured._ways = dict(ways)
    ways["slipstream"].is_ours, ways["slipstream"].manager = True, SimpleNamespace(is_settled=False)
    measured._time_rounds(Limits(min_iterations=2, max_iterations=2))
    assert measured._step_fields("off")["error"] is None
    assert "planned again while it was timed" in measured._step_fields("slipstream")["error"]


def test_the_command_does_not_time_a_plan_that_is_not_settled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Its ranks are forked.
    monkeypatch.setattr(Lifecycle, "is_settled", False)
    result = benchmark(
        *"--case smoke --modules core_attn+attn_proj --engines slipstream --figures memory".split(),
        *f"--max-planning 3 --max-iterations 10 --output {tmp_path}".split(),
    )
    assert result.returncode == 0, result.stderr
    rows = read_rows(tmp_path / "engines.jsonl")
    found = summaries(rows)
    assert "set --max-planning higher" in found["slipstream", 0]["error"]
    assert "step_ms" not in found["slipstream", 0]
    assert found["off", 0]["step_ms"] > 0
    assert {row["engine"] for row in rows if row["kind"] == "iteration"} == {"off"}


# Ranks that share a GPU.


@pytest.mark.parametrize("figures", ["memory,copies", None])
def test_ranks_that_share_a_gpu_are_measured_for_memory_only(
    figures: Optional[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv(VARIABLE, "8")
    arguments = ["--case", "moe_ep4_pp2_vpp2_short", "--output", str(tmp_path / "out")]
    arguments += ["--figures", figures] if figures else []
    assert run.main(arguments) == 2
    error = capsys.readouterr().err
    assert f"some of its 8 ranks share a GPU ({VARIABLE})" in error
    assert "set --figures memory" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("share_a_gpu", [False, True])
def test_no_time_is_told_of_ranks_that_share_a_gpu(share_a_gpu: bool, tmp_path: Path) -> None:
    measured = VariantRun.__new__(VariantRun)
    measured._share_a_gpu, measured._replanned = share_a_gpu, set()
    measured._case, measured._first, measured._needed = find_case("smoke_pp2"), "off", {}
    measured._variant = Variant(("core_attn",))
    measured._options, measured._rank = {"off": {}}, 0
    measured._writer = RowWriter(tmp_path / "rows.jsonl", "run")
    measured._steps = {"off": [Step(1.0, 0, ()), Step(3.0, 0, ())]}
    memory = MemoryFigures(resident_bytes=10, peak_bytes=30)
    measured._figures = {"off": _Figures(memory=memory)}
    measured._ways = {"off": Way()}
    measured._write_summary("off")
    (row,) = read_rows(tmp_path / "rows.jsonl")
    assert row["act_bytes"] == 20
    told = [name in row for name in ("step_ms", "host_ms", "overhead_percent")]
    assert told == [not share_a_gpu] * 3


# A comparison of any kind.


class Constant(Way):
    """A variant that runs nothing and has given losses."""

    def __init__(self, label: str, loss: float) -> None:
        self.label, self.loss, self.is_closed = label, loss, False

    def run(self, iteration: int) -> list[torch.Tensor]:
        return [torch.tensor(self.loss)]

    def close(self) -> None:
        self.is_closed = True


class Constants:
    """Variants with losses by label; a variant without losses fails to build."""

    def __init__(self, **losses: float) -> None:
        self._losses, self.ways = losses, []

    def build(self, variant: Variant, label: str, options: object) -> Constant:
        self.ways.append(Constant(label, self._losses[label]))
        return self.ways[-1]


def measure(comparison: Constants, labels: tuple[str, ...], path: Path) -> dict[str, Row]:
    path.touch()
    measured = VariantRun(
        find_case("smoke"), comparison, Variant(("-",)), labels, {}, RowWriter(path, "run"), None
    )
    measured.measure(Limits(min_iterations=2, max_iterations=2, figures=()))
    return {row["engine"]: row for row in read_rows(path) if row["kind"] == "summary"}


def test_losses_that_differ_from_the_first_ways_are_an_error(tmp_path: Path) -> None:
    comparison = Constants(a=2.0, b=2.01, c=2.03)
    rows = measure(comparison, ("a", "b", "c"), tmp_path / "rows.jsonl")
    assert [rows[label]["error"] for label in "ab"] == [None, None]
    assert rows["c"]["error"] == "losses differ from those of a by 0.015"
    assert all(way.is_closed for way in comparison.ways)


def test_a_way_that_cannot_be_built_leaves_its_row_and_the_others_are_measured(
    tmp_path: Path,
) -> None:
    rows = measure(Constants(a=2.0, c=2.0), ("a", "b", "c"), tmp_path / "rows.jsonl")
    assert rows["b"]["error"].startswith("KeyError: 'b'")
    assert [rows[label]["num_iterations"] for label in "ac"] == [2, 2]


class Holding(Constant):
    """Holds memory between iterations."""

    def __init__(self, label: str, held_bytes: int) -> None:
        super().__init__(label, 1.0)
        self.held_bytes = held_bytes

    def fields(self) -> dict[str, object]:
        return {"held_bytes": self.held_bytes, "notes": ["two slots"]}


def test_what_graphs_hold_counts_against_what_they_save(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    labels = ("eager", "graph", "graph+offload")
    measured = VariantRun(
        find_case("smoke"), Constants(), Variant(("-",)), labels, {}, RowWriter(path, "run"), None
    )
    ways = [Holding("eager", 10), Holding("graph", 50), Holding("graph+offload", 30)]
    measured._ways = {way.label: way for way in ways}
    measured._steps = {label: [Step(1.0, 0, (1.0,))] for label in labels}
    peaks = {"eager": 100, "graph": 40, "graph+offload": 20}
    measured._figures = {
        label: _Figures(memory=MemoryFigures(0, peak)) for label, peak in peaks.items()
    }
    for label in labels:
        measured._write_summary(label)
    rows = {row["engine"]: row for row in read_rows(path)}
    assert [rows[label]["saved_bytes"] for label in labels] == [0, 20, 40]
    assert rows["graph"]["notes"] == ["two slots"]
