# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Measuring one variant of a case: every engine on the same model, in turn."""

from __future__ import annotations

import contextlib
import gc
import io
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Optional

import torch
from garbage import without_garbage_collection

from benchmarks.cases import Limits, Variant
from benchmarks.copies import Copies, Direction, profile_copies
from benchmarks.engines import (
    BaseModel,
    Engine,
    build_offloading_chunks,
    make_engine,
    release_host_memory,
)
from benchmarks.figures import loss_difference, overhead_percent, spread_of
from benchmarks.marks import HostTimes, MarkName, measure_host_times, measure_step_ms
from benchmarks.measure import MemoryFigures, Step, maximum_of_ranks, measure_memory, timed_step
from benchmarks.rank_memory import drop_fields
from benchmarks.rows import RowWriter
from benchmarks.ways import in_turn
from megatron.slipstream.plan.actions import Plan
from megatron.slipstream.plan.lower_bounds import physical_bound_ms
from megatron.slipstream.plan.trace import Bandwidth
from tools.shared_gpus import share_a_gpu

RELATIVE_ERROR = 0.002
"""An engine has been timed well enough when the median's standard error is this share of it."""

LOSS_TOLERANCE = 0.01
"""Engines are timed with kernels that add in any order, so losses are only close. That they are
equal bit by bit, where kernels allow it, is for tests to show."""


TIMES = frozenset(
    {
        *("step_ms", "step_ms_interquartile", "step_ms_standard_error"),
        *("overhead_percent", "overhead_percent_standard_error"),
        *("stall_ms", "planned_ms", "followed_ms", "tried"),
    }
)
"""Of a summary: what says nothing where ranks share a GPU."""


class EngineFailed(Exception):
    """An engine failed in a way that this process cannot go on after. Its row is written."""


Timing = tuple[list[MarkName], tuple[float, ...]]


@dataclass
class _Figures:
    """What was found out about one engine beside its steps."""

    memory: Optional[MemoryFigures] = None
    host: Optional[HostTimes] = None
    copies: Optional[Copies] = None
    notes: list[str] = field(default_factory=list)
    """What could not be found out, and why."""


class VariantRun:
    """The engines of one variant on this rank.

    Args:
        base: The model without offloading, and the data.
        variant: What moves.
        labels: The engines, 'off' first.
        options: Options of ``OffloadConfig`` for every Slipstream engine.
        writer: Where rows go.
        bandwidth: What copies reach; None if unknown.
    """

    def __init__(
        self,
        base: BaseModel,
        variant: Variant,
        labels: Sequence[str],
        options: Mapping[str, Any],
        writer: RowWriter,
        bandwidth: Optional[Bandwidth],
    ) -> None:
        self._base = base
        self._variant = variant
        self._options = {
            label: {**options, **variant.tunings.get(label.partition(":")[2], {})}
            if label.startswith("slipstream")
            else {}
            for label in labels
        }
        self._writer = writer
        self._bandwidth = bandwidth
        self._rank = torch.distributed.get_rank()
        self._share_a_gpu = share_a_gpu(base.case.num_ranks)
        self._engines: dict[str, Engine] = {}
        self._steps: dict[str, list[Step]] = {}
        self._figures: dict[str, _Figures] = {}

    def measure(self, limits: Limits, on_round: Callable[[int, str], None]) -> None:
        """Measure all of it and write its rows. A collective.

        Args:
            limits: How many iterations.
            on_round: Called after each round of all engines with the number of rounds that are done
                and the figures so far.

        Raises:
            EngineFailed: See there.
        """
        self._start(limits)
        self._time_rounds(limits, on_round)
        timing = self._measure_each(limits)
        for label in list(self._engines):
            self._attempt(label, self._write_summary, label, timing)
        # Not where EngineFailed is raised: the device may be lost, and the process ends.
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()
        release_host_memory()

    def _start(self, limits: Limits) -> None:
        """Build everything and bring it to its steady state."""
        chunks = None
        if len(self._options) > 1:
            chunks = self._build(list(self._options)[1:], build_offloading_chunks, self._variant)
        for label, options in self._options.items():
            if label == "off" or chunks is not None:
                made = self._build([label], make_engine, label, chunks, options)
                if made is not None:
                    self._engines[label] = made
        for label, engine in list(self._engines.items()):
            self._plan(label, engine, limits)
        for iteration in range(limits.num_warmups):
            for label, engine in list(self._engines.items()):
                # megatron-core's engine prints a table after its first iteration.
                with contextlib.redirect_stdout(io.StringIO()):
                    self._attempt(label, timed_step, engine.run, iteration)

    def _plan(self, label: str, engine: Engine, limits: Limits) -> None:
        """Run iterations until the plan is settled on every rank, or it takes too long."""
        begin_s = time.perf_counter()
        for iteration in range(limits.max_planning):
            is_settled = not engine.is_ours or engine.manager.is_settled
            elapsed_s = maximum_of_ranks(time.perf_counter() - begin_s)
            if elapsed_s > limits.planning_seconds or maximum_of_ranks(not is_settled) == 0:
                return
            if self._attempt(label, timed_step, engine.run, iteration) is None:
                return

    def _build(self, labels: Sequence[str], make: Callable[..., Any], *arguments: Any) -> Any:
        """What ``make`` returns if it succeeds on every rank; else None, and rows for ``labels``.

        Nothing has been sent yet, so ranks can agree to go on without.
        """
        made, error = None, None
        try:
            made = make(self._base, *arguments)
        except Exception as raised:
            error = raised
            for label in labels:
                self._write_error(label, raised)
        if maximum_of_ranks(error is not None) == 0:
            return made
        if isinstance(made, Engine):
            made.close()
        return None

    def _time_rounds(self, limits: Limits, on_round: Callable[[int, str], None]) -> None:
        begin_s = time.perf_counter()
        self._steps = {label: [] for label in self._engines}
        with without_garbage_collection():
            for round_ in range(limits.max_iterations):
                self._time_round(round_)
                on_round(round_ + 1, self._progress())
                elapsed_s = maximum_of_ranks(time.perf_counter() - begin_s)
                is_enough = elapsed_s > limits.seconds or self._is_precise()
                if round_ + 1 >= limits.min_iterations and is_enough:
                    break

    def _time_round(self, round_: int) -> None:
        for label in in_turn(list(self._engines), round_):
            gc.collect()
            step = self._attempt(label, timed_step, self._engines[label].run, round_)
            if step is None:
                continue
            self._steps[label].append(step)
            if self._rank == 0 and not self._share_a_gpu:
                self._writer.write(
                    "iteration",
                    **self._identity(label),
                    iteration=round_,
                    ms=step.ms,
                    num_device_allocs=step.num_device_allocs,
                )

    def _is_precise(self) -> bool:
        spreads = [spread_of([step.ms for step in self._steps[label]]) for label in self._engines]
        return all(spread.relative_error <= RELATIVE_ERROR for spread in spreads)

    def _progress(self) -> str:
        texts = []
        for label in self._engines:
            if label == "off":
                texts.append(f"off {spread_of(self._ms(label)).median:.1f} ms")
            else:
                overhead = overhead_percent(self._ms(label), self._ms("off"))
                texts.append(f"{label} {overhead.median:+.1f}%")
        return ", ".join(texts)

    def _ms(self, label: str) -> list[float]:
        return [step.ms for step in self._steps[label]]

    def _measure_each(self, limits: Limits) -> Optional[Timing]:
        """Memory, host time and copies, engine by engine, and the compute time between marks."""
        self._figures = {label: _Figures() for label in self._engines}
        if "memory" in limits.figures:
            number = limits.num_memory_iterations
            for label, engine in list(self._engines.items()):
                manager = engine.manager if engine.is_ours else None
                self._figures[label].memory = self._attempt(
                    label, measure_memory, engine.run, manager, number
                )
        timing = None
        for label, engine in list(self._engines.items()):
            if "compute" in limits.figures and label != "off" and timing is None:
                timing = self._try(label, "compute time", measure_step_ms, engine)
        for label, engine in list(self._engines.items()):
            if label == "off":
                continue
            figures = self._figures[label]
            if "host" in limits.figures:
                figures.host = self._try(label, "host time", measure_host_times, engine)
            if "copies" in limits.figures:
                figures.copies = self._try(label, "copies", profile_copies, engine.run, 0)
        return timing

    def _write_summary(self, label: str, timing: Optional[Timing]) -> None:
        figures, engine = self._figures[label], self._engines[label]
        row = self._step_fields(label)
        memory, base = figures.memory, self._figures["off"].memory
        if memory is not None and base is not None:
            row |= asdict(memory)
            row["act_bytes"] = memory.act_bytes
            row["saved_bytes"] = base.act_bytes - memory.act_bytes
        if figures.host is not None:
            row["host_us_per_group"] = figures.host.us_per_group
            row["host_us_per_call"] = figures.host.us_per_call
            row["num_calls"] = dict(figures.host.calls)
        if figures.copies is not None:
            row |= _direction_fields("d2h", figures.copies.d2h)
            row |= _direction_fields("h2d", figures.copies.h2d)
        if engine.is_ours:
            row |= report_fields(engine.manager)
            if engine.manager.plan is not None:
                row |= drop_fields(engine.manager.plan)
                names = (self._base.case.name, self._variant.name, label, self._rank)
                self._writer.save_trace(engine.manager.plan.trace, *names)
            row |= self._bound_fields(engine.manager, timing)
        elif engine.manager is not None:
            row["claimed_bytes"] = engine.manager.offload_summary_total_bytes
        row["copied_per_saved"] = self._copied_per_saved(row)
        row["notes"] = figures.notes
        if self._share_a_gpu:
            row = {name: value for name, value in row.items() if name not in TIMES}
        self._writer.write("summary", **self._identity(label), **row)

    def _step_fields(self, label: str) -> dict[str, Any]:
        spread = spread_of(self._ms(label))
        overhead = overhead_percent(self._ms(label), self._ms("off"))
        difference = self._loss_difference(label)
        differs = difference is not None and not difference <= LOSS_TOLERANCE
        return {
            "error": f"losses differ from engine off's by {difference:.2g}" if differs else None,
            "num_iterations": len(self._steps[label]),
            "step_ms": spread.median,
            "step_ms_interquartile": spread.interquartile,
            "step_ms_standard_error": spread.standard_error,
            "overhead_percent": overhead.median,
            "overhead_percent_standard_error": overhead.standard_error,
            "loss_difference": difference,
        }

    def _copied_per_saved(self, row: Mapping[str, Any]) -> Optional[float]:
        """Bytes copied out for each byte by which the peak is lower.

        Per micro-batch, since without pipeline stages one is in flight; None with them, where the
        number in flight at the peak is not known here.
        """
        copied = row.get("d2h_bulk_bytes", row.get("moved_bytes"))
        saved = row.get("saved_bytes", 0)
        if self._base.case.model.pp > 1 or not copied or saved <= 0:
            return None
        return float(copied / self._base.case.num_micro_batches / saved)

    def _bound_fields(self, manager: Any, timing: Optional[Timing]) -> dict[str, float]:
        # The public name first; the other is the engine's own.
        plan = manager.plan
        if timing is None or self._bandwidth is None or plan is None:
            return {}
        return bound_fields(plan, timing, self._bandwidth, spread_of(self._ms("off")).median)

    def _loss_difference(self, label: str) -> Optional[float]:
        """The largest relative difference of a loss to that of 'off'; None on ranks without."""
        ours, base = (
            [loss for step in self._steps[name] for loss in step.losses] for name in (label, "off")
        )
        return loss_difference(ours, base)

    def _identity(self, label: str) -> dict[str, Any]:
        return {
            "case": self._base.case.name,
            "variant": self._variant.name,
            "engine": label,
            "options": self._options[label],
            "rank": self._rank,
            "num_ranks": self._base.case.num_ranks,
            "num_micro_batches": self._base.case.num_micro_batches,
        }

    def _attempt(self, label: str, action: Callable[..., Any], *arguments: Any) -> Any:
        """What ``action`` returns; None, and the engine is out, if it raises."""
        try:
            return action(*arguments)
        except EngineFailed:
            raise
        except Exception as error:
            self._fail(label, error)
            return None

    def _try(self, label: str, what: str, action: Callable[..., Any], *arguments: Any) -> Any:
        """What ``action`` returns; None and a note if it raises, since other figures stand.

        Where ranks wait for each other or the device is lost, it is the engine's end all the same.
        """
        try:
            return action(*arguments)
        except Exception as error:
            if self._base.case.num_ranks > 1 or _is_fatal(error):
                self._fail(label, error)
            self._figures[label].notes.append(f"no {what}: {describe(error)}")
            return None

    def _fail(self, label: str, error: Exception) -> None:
        """Write the engine's row and go on without it, if that can be."""
        self._write_error(label, error)
        # Without its baseline nothing can be said; other ranks wait for this one in a collective.
        if label == "off" or self._base.case.num_ranks > 1 or _is_fatal(error):
            raise EngineFailed(label) from error
        engine = self._engines.pop(label, None)
        if engine is not None:
            engine.close()

    def _write_error(self, label: str, error: Exception) -> None:
        self._writer.write("summary", **self._identity(label), error=describe(error))


def describe(error: BaseException) -> str:
    """An error in one line, with where it was raised: many an engine's assertion says nothing."""
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
    """What our engine says of its last iteration."""
    manager.finish_report()
    total = manager.report.total
    return {
        "moved_bytes": total.d2h_bytes,
        "freed_bytes": total.freed_bytes,
        "copied_per_freed": total.d2h_bytes / total.freed_bytes if total.freed_bytes else None,
        "stall_ms": total.stall_ms,
        "num_late": total.num_late,
        "num_groups": total.num_groups,
        "num_groups_moved": total.num_groups_moved,
        "is_settled": manager.is_settled,
        "host_memory_bytes": manager.report.host_allocated_bytes,
        "planned_saved_bytes": (
            manager.report.baseline_peak_bytes - manager.report.planned_peak_bytes
        ),
        # From the first mark to the end, by the plan and in an iteration that followed it.
        "planned_ms": manager.report.planned_ms,
        "followed_ms": manager.report.measured_ms,
        "tried": [asdict(trial) for trial in manager.report.tried],
        "plan_notes": list(manager.plan.notes) if manager.plan is not None else [],
    }


def bound_fields(
    plan: Plan, timing: Timing, bandwidth: Bandwidth, off_ms: float
) -> dict[str, float]:
    """The physical bound of the plan's peak, from times measured here with nothing moved.

    Empty if the plan is not one of the marks that were timed. ``off_ms`` is the step with the
    engine off, which the overhead is a share of.
    """
    marks, mark_ms = timing
    if [(step.kind, step.name) for step in plan.trace.steps] != marks:
        return {}
    timed = replace(plan, trace=replace(plan.trace, step_ms=mark_ms, bandwidth=bandwidth))
    bound_ms, compute_ms = physical_bound_ms(timed), sum(mark_ms)
    return {
        "bound_ms": bound_ms,
        "compute_ms": compute_ms,
        "bound_overhead_percent": 100 * (bound_ms - compute_ms) / off_ms,
    }


def _direction_fields(name: str, direction: Direction) -> dict[str, Any]:
    return {
        f"{name}_bulk_bytes": direction.bulk_bytes,
        f"{name}_bulk_ms": direction.bulk_ms,
        f"{name}_gb_per_s": direction.gb_per_s,
        f"{name}_num_small": direction.num_small,
        f"{name}_small_bytes": direction.small_bytes,
    }
