# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A run's report beside its counters: plan, measurements, lateness, warnings."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from timed_backend import TimedBackend
from toy_model import SCHEDULES, make_chunks, run_schedule

from megatron.slipstream.fine_grained_activation_offload import report_builder
from megatron.slipstream.fine_grained_activation_offload.cpu_backends import CpuBackend
from megatron.slipstream.fine_grained_activation_offload.engine import OffloadEngine
from megatron.slipstream.fine_grained_activation_offload.step_clock import NUM_TIMED, NUM_WARMUPS
from megatron.slipstream.fine_grained_activation_offload.warning_log import (
    MAX_WARNINGS,
    WarningLog,
    keep_warnings,
)
from megatron.slipstream.integration.seam.manager import PipelineOffloadManager
from megatron.slipstream.plan.build import build_plan
from megatron.slipstream.plan.candidates import PolicyOptions
from megatron.slipstream.plan.render import render_plan
from megatron.slipstream.plan.timeline import device_memory

ROOT = Path(__file__).resolve().parents[3]


def train(manager: PipelineOffloadManager, *schedules: str) -> None:
    chunks = make_chunks(1)
    for schedule in schedules:
        run_schedule(chunks, SCHEDULES[schedule], manager)
    manager.finish_report()


# Plan and measurements.


def test_the_reports_options_make_its_plan_from_its_trace() -> None:
    options = PolicyOptions(release_lag=2, prefetch_depth=0)
    manager = PipelineOffloadManager(OffloadEngine(CpuBackend(), options))
    train(manager, *["accumulation"] * 2)
    assert manager.plan is not None
    report = manager.report
    assert report.options is not None
    assert (report.options.release_lag, report.options.prefetch_depth) == (2, 0)
    assert render_plan(build_plan(manager.plan.trace, report.options)) == report.plan


def test_the_report_is_of_the_plan_that_the_trace_is_of_not_of_the_newest() -> None:
    manager = PipelineOffloadManager(OffloadEngine(CpuBackend()))
    train(manager, "accumulation", "1F1B first of two", "accumulation", "accumulation")
    assert manager.plan is not None
    assert manager.report.num_plans == 2
    assert manager.report.plan == render_plan(manager.plan)


def test_notes_of_the_plan_are_in_the_report() -> None:
    manager = PipelineOffloadManager(
        OffloadEngine(CpuBackend(), PolicyOptions(max_overhead_percent=1.0))
    )
    train(manager, "accumulation")
    assert manager.plan is not None
    assert manager.report.notes == list(manager.plan.notes) != []


class SmallSlabs(TimedBackend):
    """Its slabs are too small to measure the link in; its device memory can be read."""

    host_slab_bytes = CpuBackend.host_slab_bytes

    def memory(self) -> tuple[int, int]:
        return 1_000_000_000, 1_000_001_000

    def reset_peak_memory(self) -> None:
        pass


OVERHEAD = PolicyOptions(max_overhead_percent=1)


def notes_shown(
    backend: CpuBackend,
    num_iterations: int,
    caplog: pytest.LogCaptureFixture,
    options: PolicyOptions = OVERHEAD,
) -> list[str]:
    """The places where a run reports that it ignores an option because it has no times."""
    caplog.set_level(logging.INFO)
    manager = PipelineOffloadManager(OffloadEngine(backend, options))
    train(manager, *["accumulation"] * num_iterations)
    report = manager.report
    texts = {"log": caplog.text, "plan": report.plan, "notes": "".join(report.notes)}
    return [place for place, text in texts.items() if "there are no times" in text]


def test_that_an_option_wants_times_is_told_where_none_will_come(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert notes_shown(CpuBackend(), 1, caplog) == ["log", "plan", "notes"]


def test_that_an_option_wants_times_is_not_told_before_they_come(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert notes_shown(TimedBackend(), 1, caplog) == []


def test_that_an_option_wants_times_is_reported_if_the_link_cannot_be_measured(
    caplog: pytest.LogCaptureFixture,
) -> None:
    num_until_told = 1 + NUM_WARMUPS + NUM_TIMED
    assert notes_shown(SmallSlabs(), num_until_told - 1, caplog) == []
    assert notes_shown(SmallSlabs(), num_until_told + 1, caplog) == ["plan", "notes"]


def test_that_a_budget_wants_times_is_not_told_if_it_is_met_with_nothing_moved(
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = PolicyOptions(target_memory_bytes=10**10, target_option="a budget")
    assert notes_shown(SmallSlabs(), 2 + NUM_WARMUPS + NUM_TIMED, caplog, options) == []


def test_times_of_steps_are_those_of_the_iteration_that_was_timed() -> None:
    manager = PipelineOffloadManager(OffloadEngine(TimedBackend()))
    train(manager, *["accumulation"] * (1 + NUM_WARMUPS))
    assert manager.report.step_ms == [], "nothing was timed yet"
    train(manager, *["accumulation"] * 2)
    report = manager.report
    assert manager.plan is not None
    assert len(report.step_ms) == len(report.step_stall_ms) == len(manager.plan.trace.steps)
    total_ms = sum(report.step_ms) + sum(report.step_stall_ms)
    assert total_ms == pytest.approx(report.measured_ms, rel=1e-3)
    assert sum(report.step_stall_ms) > 0


def test_a_plan_that_was_made_again_has_no_times_of_the_one_before() -> None:
    manager = PipelineOffloadManager(OffloadEngine(TimedBackend()))
    train(manager, *["accumulation"] * (1 + NUM_WARMUPS + NUM_TIMED))
    assert manager.plan is not None
    assert manager.plan.trace.step_ms, "it was made from times"
    assert manager.report.step_ms == []
    assert manager.report.planned_ms > 0


class Meter(CpuBackend):
    """Device memory that grows by what the test says."""

    more_bytes = 0

    def memory(self) -> tuple[int, int]:
        return 1000 + self.more_bytes, 2000 + self.more_bytes

    def reset_peak_memory(self) -> None:
        pass


def test_memory_of_steps_is_read_once_and_what_came_later_is_told() -> None:
    backend = Meter()
    manager = PipelineOffloadManager(OffloadEngine(backend))
    train(manager, "accumulation")
    assert manager.report.step_peak_bytes == []
    backend.more_bytes = 5_000_000
    train(manager, *["accumulation"] * NUM_WARMUPS)
    report = manager.report
    assert manager.plan is not None
    assert report.step_peak_bytes == [5_002_000] * len(manager.plan.trace.steps)
    assert report.measured_peak_bytes == 5_002_000
    predicted = device_memory(manager.plan).with_plan
    assert report.later_bytes == 5_002_000 - max(predicted) > 0


# Lateness.


def test_late_copies_are_told_by_the_group_that_saved_first() -> None:
    manager = PipelineOffloadManager(OffloadEngine(CpuBackend(), PolicyOptions(prefetch_depth=0)))
    train(manager, "accumulation")  # Decided group by group, and nothing is fetched ahead.
    late = manager.report.late_groups
    assert sum(late.values()) == manager.report.total.num_late > 0
    assert manager.plan is not None
    assert late.keys() <= {str(group.key) for group in manager.plan.groups}
    train(manager, "accumulation")
    assert manager.report.late_groups == {}
    assert manager.report.total.num_late == 0


# Iterations.


def test_the_time_between_the_last_iterations_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([1.0, 1.5, 3.0, 3.25, 4.0])
    monkeypatch.setattr(report_builder.time, "perf_counter", lambda: next(now))
    monkeypatch.setattr(report_builder, "MAX_ITERATIONS_SHOWN", 3)
    manager = PipelineOffloadManager(OffloadEngine(CpuBackend()))
    train(manager, *["accumulation"] * 3)
    assert manager.report.iteration_ms == [500.0, 1500.0]
    train(manager, *["accumulation"] * 2)
    assert manager.report.iteration_ms == [1500.0, 250.0, 750.0]


# Warnings.


@pytest.fixture
def log() -> Iterator[tuple[WarningLog, logging.Logger]]:
    """A log on a logger of its own, without other handlers."""
    logger = logging.getLogger("slipstream_test_of_warnings")
    logger.propagate = False
    log = WarningLog()
    logger.addHandler(log)
    yield log, logger
    logger.handlers.clear()


def test_warnings_and_errors_are_kept_with_how_often_they_came(
    log: tuple[WarningLog, logging.Logger],
) -> None:
    kept, logger = log
    logger.setLevel(logging.DEBUG)
    logger.info("all is well")
    for number in (1, 2, 1):
        logger.warning("number %d", number)
    logger.error("it fails")
    assert kept.counts == {"number 1": 2, "number 2": 1, "it fails": 1}


def test_no_more_than_so_many_different_warnings_are_kept(
    log: tuple[WarningLog, logging.Logger],
) -> None:
    kept, logger = log
    for number in [*range(MAX_WARNINGS + 5), 3]:
        logger.warning("number %d", number)
    assert len(kept.counts) == MAX_WARNINGS
    assert kept.counts["number 3"] == 2


def test_a_warning_without_other_handlers_goes_to_stderr_as_before(
    log: tuple[WarningLog, logging.Logger], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []
    last_resort = logging.Handler()
    last_resort.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    monkeypatch.setattr(logging, "lastResort", last_resort)
    kept, logger = log
    monkeypatch.setattr(logger, "handlers", [kept])  # pytest listens to every logger.
    child = logger.getChild("part")
    child.warning("heard")
    assert heard == ["heard"]
    logger.addHandler(logging.NullHandler())
    child.warning("not shown twice")
    assert heard == ["heard"]


def test_a_managers_report_has_the_warnings_of_the_process() -> None:
    manager = PipelineOffloadManager(OffloadEngine(CpuBackend()))
    text = "what the test warns of; do nothing"
    before = keep_warnings().get(text, 0)
    logging.getLogger("megatron.slipstream.some.part").warning(text)
    manager.finish_report()
    assert manager.report.warnings[text] == before + 1
    PipelineOffloadManager(OffloadEngine(CpuBackend()))
    handlers = logging.getLogger("megatron.slipstream").handlers
    assert sum(isinstance(handler, WarningLog) for handler in handlers) == 1


def test_keeping_warnings_does_not_hide_them_from_a_plain_process() -> None:
    package = "megatron.slipstream.fine_grained_activation_offload"
    code = (
        "import logging\n"
        f"from {package}.warning_log import keep_warnings\n"
        "keep_warnings()\n"
        "logging.getLogger('megatron.slipstream.plan').warning('heard')\n"
        "logging.basicConfig(format='%(levelname)s %(message)s')\n"
        "logging.getLogger('megatron.slipstream.plan').warning('heard again')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert result.stderr == "heard\nWARNING heard again\n"
