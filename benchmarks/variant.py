# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Measures one variant of a case: every way to run it, in turn."""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any, Optional

import torch
from garbage import without_garbage_collection

from benchmarks.case import Case, Limits, Variant, base_label
from benchmarks.copies import profile
from benchmarks.figures import Spread, loss_difference, overhead_percent, spread_of
from benchmarks.marks import HostTimes, measure_host_times
from benchmarks.measure import (
    MemoryFigures,
    Step,
    maximum_of_ranks,
    measure_memory,
    release_host_memory,
    timed_step,
)
from benchmarks.rows import RowWriter
from benchmarks.ways import Comparison, Way, in_turn
from megatron.slipstream.plan.actions import Plan
from megatron.slipstream.plan.lower_bounds import physical_bound_ms
from megatron.slipstream.plan.trace import Bandwidth
from tools.shared_gpus import share_a_gpu

RELATIVE_ERROR = 0.002
"""A way is timed precisely enough when the median's standard error is this fraction of it."""

LOSS_TOLERANCE = 0.01
"""Ways are timed with kernels that add in any order, so losses are only close. Tests check that
they are bitwise equal where kernels allow it."""


TIMES = frozenset(
    {
        *("step_ms", "step_ms_interquartile", "step_ms_standard_error", "host_ms"),
        *("overhead_percent", "overhead_percent_standard_error"),
        *("stall_ms", "planned_ms", "followed_ms", "tried"),
    }
)
"""Fields of a summary that are meaningless if ranks share a GPU."""


class WayFailed(Exception):
    """A way failed and this process cannot continue. Its row is written."""


@dataclass
class _Figures:
    """Measurements of one way in addition to its steps."""

    memory: Optional[MemoryFigures] = None
    host: Optional[HostTimes] = None
    profile: Optional[dict[str, Any]] = None
    notes: list[str] = field(default_factory=list)
    """Measurements that failed, and why."""


class VariantRun:
    """The ways of one variant on this rank.

    Args:
        case: The case.
        comparison: Builds the ways.
        variant: The modules to offload.
        labels: The ways, beginning with the one that the others are compared with.
        options: Options of ``OffloadConfig`` for every Slipstream engine.
        writer: Where rows go.
        bandwidth: Bandwidth of copies; None if unknown.
    """

    def __init__(
        self,
        case: Case,
        comparison: Comparison,
        variant: Variant,
        labels: Sequence[str],
        options: Mapping[str, Any],
        writer: RowWriter,
        bandwidth: Optional[Bandwidth],
    ) -> None:
        self._case, self._comparison = case, comparison
        self._variant = variant
        self._options: dict[str, Mapping[str, Any]] = {
            label: {}
            if label in ("off", "megatron")
            else {**options, **variant.tunings.get(label.partition(":")[2], {})}
            for label in labels
        }
        self._writer = writer
        self._bandwidth = bandwidth
        self._rank = int(os.environ.get("RANK", "0"))
        self._share_a_gpu = share_a_gpu(case.num_ranks)
        self._first = labels[0]
        self._ways: dict[str, Way] = {}
        self._steps: dict[str, list[Step]] = {}
        self._figures: dict[str, _Figures] = {}
        self._replanned: set[str] = set()
        """Ways whose engine planned again while they were timed."""
        self._needed: dict[str, int] = {}
        """Device memory of each way, excluding weights and gradients."""

    def measure(self, limits: Limits) -> str:
        """Measure all ways and write their rows. A collective.

        Returns:
            The number of timed iterations, and the time of each way.

        Raises:
            WayFailed: See there.
        """
        self._start(limits)
        result = self._time_rounds(limits)
        self._measure_each(limits)
        for label in list(self._ways):
            self._attempt(label, self._write_summary, label)
        # Not if WayFailed is raised: the device may be lost, and the process ends.
        for way in self._ways.values():
            way.close()
        self._ways.clear()
        release_host_memory()
        return result

    def _start(self, limits: Limits) -> None:
        """Build all ways and run them to their steady state."""
        for label, options in self._options.items():
            way = self._build(label, options)
            if way is None:
                continue
            self._ways[label] = way
            if way.num_eager_iterations:
                self._capture(label, way, limits)
            else:
                self._plan(label, way, limits)
        for iteration in range(limits.num_warmups):
            for label, way in list(self._ways.items()):
                self._attempt(label, self._quiet_step, way, iteration)

    def _build(self, label: str, options: Mapping[str, Any]) -> Optional[Way]:
        """Return the way if it is built on every rank; else None, and write a row.

        Nothing has been sent yet, so ranks can agree to continue without it.
        """
        made, error = None, None
        try:
            made = self._comparison.build(self._variant, label, options)
        except Exception as raised:
            error = raised
            self._write_error(label, raised)
        if maximum_of_ranks(error is not None) == 0:
            return made
        if made is not None:
            made.close()
        return None

    @staticmethod
    def _quiet_step(way: Way, iteration: int) -> Step:
        # megatron-core's engine prints a table after its first iteration.
        with contextlib.redirect_stdout(io.StringIO()):
            return timed_step(way.run, iteration)

    def _capture(self, label: str, way: Way, limits: Limits) -> None:
        """Run iterations without graphs, capture, and run warm-up iterations with graphs."""
        for iteration in range(way.num_eager_iterations + limits.num_warmups):
            if iteration == way.num_eager_iterations:
                self._attempt(label, way.capture)
            if self._attempt(label, self._quiet_step, way, iteration) is None:
                return
        self._attempt(label, way.on_ready)

    def _plan(self, label: str, way: Way, limits: Limits) -> None:
        """Run iterations until the plan is settled on every rank.

        While the engine measures plans, it runs some iterations differently, so their times are not
        those of a plan. If the limits end it before, the way is left out, with a row that says so;
        unless no times are written.
        """
        begin_s = time.perf_counter()
        for iteration in itertools.count():
            is_settled = not way.is_ours or way.manager.is_settled
            if maximum_of_ranks(not is_settled) == 0:
                return
            elapsed_s = maximum_of_ranks(time.perf_counter() - begin_s)
            is_late = elapsed_s > limits.planning_seconds
            if is_late or iteration == limits.max_planning:
                break
            if self._attempt(label, timed_step, way.run, iteration) is None:
                return
        if self._share_a_gpu:
            return
        option, limit = "--max-planning", f"{limits.max_planning}"
        if is_late:
            option, limit = "--planning-seconds", f"{limits.planning_seconds:g}"
        message = (
            f"{option}={limit} is not supported with this way because its plan is not settled "
            f"after it, and times of plans on trial are not its own; set {option} higher"
        )
        self._write_error(label, ValueError(message))
        self._ways.pop(label).close()

    def _time_rounds(self, limits: Limits) -> str:
        begin_s = time.perf_counter()
        self._steps = {label: [] for label in self._ways}
        with without_garbage_collection():
            for round_ in range(limits.max_iterations):
                self._time_round(round_)
                elapsed_s = maximum_of_ranks(time.perf_counter() - begin_s)
                is_enough = elapsed_s > limits.seconds or self._is_precise()
                if round_ + 1 >= limits.min_iterations and is_enough:
                    break
        for label, way in self._ways.items():
            if way.is_ours and not way.num_eager_iterations and not way.manager.is_settled:
                self._replanned.add(label)
        return f"{round_ + 1} iterations, {self._progress()}"

    def _time_round(self, round_: int) -> None:
        for label in in_turn(list(self._ways), round_):
            gc.collect()
            step = self._attempt(label, timed_step, self._ways[label].run, round_)
            if step is None:
                continue
            self._steps[label].append(step)
            if self._rank == 0 and not self._share_a_gpu:
                fields = {name: value for name, value in asdict(step).items() if name != "losses"}
                self._writer.write("iteration", **self._identity(label), iteration=round_, **fields)

    def _is_precise(self) -> bool:
        spreads = [spread_of([step.ms for step in self._steps[label]]) for label in self._ways]
        return all(spread.relative_error <= RELATIVE_ERROR for spread in spreads)

    def _progress(self) -> str:
        texts = [f"{self._first} {spread_of(self._ms(self._first)).median:.1f} ms"]
        others = [label for label in self._ways if label != self._first]
        texts += [f"{label} {self._overhead(label).median:+.1f}%" for label in others]
        return ", ".join(texts)

    def _ms(self, label: str) -> list[float]:
        return [step.ms for step in self._steps[label]]

    def _overhead(self, label: str) -> Spread:
        return overhead_percent(self._ms(label), self._ms(base_label(label, self._ways)))

    def _measure_each(self, limits: Limits) -> None:
        """Measure memory, host time and copies, one way at a time."""
        self._figures = {label: _Figures() for label in self._ways}
        number = limits.num_memory_iterations
        for label, way in list(self._ways.items()):
            figures, manager = self._figures[label], way.manager if way.is_ours else None
            if "memory" in limits.figures and way.has_memory:
                figures.memory = self._attempt(label, measure_memory, way.run, manager, number)
        for label, way in list(self._ways.items()):
            figures = self._figures[label]
            if "host" in limits.figures and way.has_marks and way.manager is not None:
                figures.host = self._try(label, "host time", measure_host_times, way)
            if "copies" in limits.figures:
                figures.profile = self._try(label, "copies", profile, way.run, 0)

    def _write_summary(self, label: str) -> None:
        figures, way = self._figures[label], self._ways[label]
        row = self._step_fields(label)
        if figures.memory is not None:
            row |= asdict(figures.memory)
            row["act_bytes"] = figures.memory.act_bytes
        if figures.host is not None:
            row["host_us_per_group"] = figures.host.us_per_group
            row["driver_us_per_group"] = figures.host.driver_us_per_group
            row["host_us_per_call"] = figures.host.us_per_call
        if figures.profile is not None:
            row |= figures.profile
        if way.is_ours:
            row |= report_fields(way.manager)
        if way.is_ours and way.has_marks and way.manager.plan is not None:
            row["planned_away_bytes"] = max(way.manager.plan.absent_bytes, default=0)
            if self._bandwidth is not None:
                off_ms = spread_of(self._ms(self._first)).median
                row |= bound_fields(way.manager.plan, self._bandwidth, off_ms)
        fields = way.fields()
        row |= {**fields, "notes": [*figures.notes, *fields.get("notes", ())]}
        self._needed[label] = row.get("act_bytes", 0) + row.get("held_bytes", 0)
        base = base_label(label, self._ways)
        if figures.memory is not None and self._figures[base].memory is not None:
            row["saved_bytes"] = self._needed[base] - self._needed[label]
        row["copied_per_saved"] = self._copied_per_saved(row)
        if self._share_a_gpu:
            row = {name: value for name, value in row.items() if name not in TIMES}
        self._writer.write("summary", **self._identity(label), **row)

    def _step_fields(self, label: str) -> dict[str, Any]:
        spread, overhead = spread_of(self._ms(label)), self._overhead(label)
        difference = self._loss_difference(label)
        error = None
        if label in self._replanned:
            error = "the engine planned again while it was timed; its plan is not that of all steps"
        if difference is not None and not difference <= LOSS_TOLERANCE:
            error = f"losses differ from those of {self._first} by {difference:.2g}"
        return {
            "error": error,
            "num_iterations": len(self._steps[label]),
            "step_ms": spread.median,
            "step_ms_interquartile": spread.interquartile,
            "step_ms_standard_error": spread.standard_error,
            "host_ms": median(step.host_ms for step in self._steps[label]),
            "base": base_label(label, self._ways),
            "overhead_percent": overhead.median,
            "overhead_percent_standard_error": overhead.standard_error,
            "loss_difference": difference,
        }

    def _copied_per_saved(self, row: Mapping[str, Any]) -> Optional[float]:
        """Return the bytes offloaded per byte by which the peak is lower.

        Per micro-batch, since without pipeline stages one is in flight; None with them, as the
        number in flight at the peak is not known here.
        """
        copied = row.get("d2h_bulk_bytes", row.get("moved_bytes"))
        saved = row.get("saved_bytes", 0)
        if self._case.model.pp > 1 or not copied or saved <= 0:
            return None
        return float(copied / self._case.num_micro_batches / saved)

    def _loss_difference(self, label: str) -> Optional[float]:
        """Return the largest relative difference of a loss to the first way's; None without any."""
        ours, base = (
            [loss for step in self._steps[name] for loss in step.losses]
            for name in (label, self._first)
        )
        return loss_difference(ours, base)

    def _identity(self, label: str) -> dict[str, Any]:
        return {
            "case": self._case.name,
            "variant": self._variant.name,
            "engine": label,
            "options": self._options[label],
            "rank": self._rank,
            "num_ranks": self._case.num_ranks,
            "num_micro_batches": self._case.num_micro_batches,
        }

    def _attempt(self, label: str, action: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of ``action``; if it raises, drop the way and return None."""
        try:
            return action(*arguments)
        except WayFailed:
            raise
        except Exception as error:
            self._fail(label, error)
            return None

    def _try(self, label: str, what: str, action: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of ``action``; if it raises, add a note, as other figures stay valid.

        If ranks wait for each other or the device is lost, the way fails nevertheless.
        """
        try:
            return action(*arguments)
        except Exception as error:
            if self._case.num_ranks > 1 or _is_fatal(error):
                self._fail(label, error)
            self._figures[label].notes.append(f"no {what}: {describe(error)}")
            return None

    def _fail(self, label: str, error: Exception) -> None:
        """Write the way's row and continue without it, if possible."""
        self._write_error(label, error)
        way = self._ways.pop(label, None)
        is_fatal = _is_fatal(error) or (way is not None and way.ends_process)
        # Without the first way there is no baseline; other ranks wait for this one in a collective.
        if label == self._first or self._case.num_ranks > 1 or is_fatal:
            raise WayFailed(label) from error
        if way is not None:
            way.close()

    def _write_error(self, label: str, error: Exception) -> None:
        self._writer.write("summary", **self._identity(label), error=describe(error))


def describe(error: BaseException) -> str:
    """Describe an error in one line with its location: many assertions have no message."""
    frames = traceback.extract_tb(error.__traceback__)
    where = ""
    if frames and not isinstance(error, ValueError):
        path = "/".join(frames[-1].filename.split("/")[-2:])
        where = f" ({path}:{frames[-1].lineno}, in {frames[-1].name})"
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text}{where}"


def _is_fatal(error: BaseException) -> bool:
    """Whether the device is lost to this process."""
    return isinstance(error, getattr(torch, "AcceleratorError", ())) or "CUDA error" in str(error)


def report_fields(manager: Any) -> dict[str, Any]:
    """Return figures of Slipstream's report of its last iteration."""
    manager.finish_report()
    report = manager.report
    total = report.total
    names = ("stall_ms", "num_late", "num_groups", "num_groups_moved", "freed_bytes")
    return {
        "moved_bytes": total.d2h_bytes,
        **{name: getattr(total, name) for name in names},
        "is_settled": manager.is_settled,
        "host_memory_bytes": report.host_allocated_bytes,
        "planned_saved_bytes": report.baseline_peak_bytes - report.planned_peak_bytes,
        "planned_peak_bytes": report.planned_peak_bytes,
        "budget_bytes": report.budget_bytes,
        "recomputed_bytes": sum(layer.recomputed_bytes for layer in report.layers),
        "settings": dict(Counter(layer.setting for layer in report.layers)),
        "tiles": report.tiles,
        # From the first mark to the end, as planned and in an iteration that followed the plan.
        "planned_ms": report.planned_ms,
        "followed_ms": report.measured_ms,
        "tried": [asdict(trial) for trial in report.tried],
        "plan_notes": list(manager.plan.notes) if manager.plan is not None else [],
    }


def bound_fields(plan: Plan, bandwidth: Bandwidth, off_ms: float) -> dict[str, float]:
    """Return the least that the plan's peak costs any engine, at the rates of the link.

    Compute times are those that the engine measured; empty if it measured none.

    Args:
        plan: The engine's plan.
        bandwidth: Bandwidth of copies.
        off_ms: Step time with the engine off, the base of the overhead.
    """
    if not plan.trace.step_ms:
        return {}
    timed = replace(plan, trace=replace(plan.trace, bandwidth=bandwidth))
    bound_ms, compute_ms = physical_bound_ms(timed), sum(plan.trace.step_ms)
    return {
        "bound_ms": bound_ms,
        "compute_ms": compute_ms,
        "bound_overhead_percent": 100 * (bound_ms - compute_ms) / off_ms,
    }
