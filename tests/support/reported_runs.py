# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Runs whose reports have all possible content, for tests of the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple, Optional

from make_trace import Model, one_f_one_b, timed, trace_of, with_saved_bytes_as_memory

from megatron.slipstream.fine_grained_activation_offload.report import (
    ModuleCounters,
    RankReport,
    Report,
)
from megatron.slipstream.plan.actions import Plan
from megatron.slipstream.plan.build import build_plan
from megatron.slipstream.plan.candidates import PolicyOptions
from megatron.slipstream.plan.render import render_plan
from megatron.slipstream.plan.timeline import device_memory
from megatron.slipstream.plan.trace import Trace
from megatron.slipstream.plan.walk import simulate

MODULES = ("core_attn", "moe_act")


class Run(NamedTuple):
    """One rank's report, and the plan that it followed."""

    rank: RankReport
    plan: Plan

    @property
    def report(self) -> Report:
        """The report of this rank alone."""
        return Report([self.rank])


@cache
def make_trace(
    num_layers: int = 3,
    num_micro_batches: int = 2,
    modules: Sequence[str] = MODULES,
    is_timed: bool = True,
    nbytes: int = 1 << 20,
) -> Trace:
    """Two micro-batches in flight, an output layer; copies take as long as computation."""
    sizes = {f"own {i}": nbytes + 1024 * i for i in range(num_layers * len(modules))}
    model = Model(num_layers, tuple(modules), nbytes=sizes, has_output=True)
    trace = trace_of(one_f_one_b(2, 0, num_micro_batches), model)
    if is_timed:
        trace = timed(trace, 1.0, nbytes / 1e6)
    return with_saved_bytes_as_memory(trace, 4 * nbytes)


@cache
def _planned(trace: Trace, options: PolicyOptions) -> tuple[Plan, float]:
    """The plan and its predicted time of an iteration (0 without times). This is the slow part."""
    plan = build_plan(trace, options)
    return plan, simulate(plan).total_ms if trace.bandwidth else 0.0


def make_run(
    trace: Optional[Trace] = None,
    rank: int = 0,
    options: Optional[PolicyOptions] = None,
    slowness: float = 1.0,
    is_measured: bool = True,
) -> Run:
    """A run that followed the trace's plan, ``slowness`` times slower than predicted."""
    trace = trace or make_trace()
    plan, planned_ms = _planned(trace, options or PolicyOptions())
    modules: dict[str, ModuleCounters] = {}
    for group in plan.groups:
        counters = modules.setdefault(group.name, ModuleCounters())
        counters.num_groups += 1
        counters.num_groups_moved += group.moves
        counters.d2h_bytes += group.moved_nbytes
        counters.h2d_bytes += group.moved_nbytes
        counters.freed_bytes += group.moved_nbytes
    peaks = plan.peak_bytes() or (0, 0)
    report = RankReport(
        rank=rank,
        modules=modules,
        plan=render_plan(plan),
        baseline_peak_bytes=peaks[0],
        planned_peak_bytes=peaks[1],
        host_allocated_bytes=9 << 20,
        host_high_water_bytes=8 << 20,
        num_iterations=20,
        num_plans=2,
        options=plan.options,
        notes=list(plan.notes),
        iteration_ms=[50.0, 40.0, 41.0],
        settings={"num_layers": 3, "offload_modules": list(trace_modules(trace))},
        environment={"torch": "2.11.0", "host": f"node{rank}"},
    )
    if is_measured and trace.step_ms:
        report.planned_ms = planned_ms
        report.step_ms = [slowness * ms for ms in trace.step_ms]
        report.step_stall_ms = [0.0] * len(trace.steps)
        report.measured_ms = sum(report.step_ms)
    if is_measured:
        report.step_peak_bytes = list(device_memory(plan).with_plan)
    return Run(report, plan)


def with_waits(run: Run, waits_ms: dict[int, float]) -> Run:
    """The same run, but compute waited for copies at some steps."""
    stalls = [waits_ms.get(step, 0.0) for step in range(len(run.plan.trace.steps))]
    modules = {name: replace(item) for name, item in run.rank.modules.items()}
    for step, ms in waits_ms.items():
        mark = run.plan.trace.steps[step]
        # At the output layer's marks, compute waits for groups too.
        modules[mark.name if mark.is_of_group else run.plan.groups[0].name].stall_ms += ms
    rank = replace(
        run.rank,
        step_stall_ms=stalls,
        modules=modules,
        measured_ms=sum(run.rank.step_ms) + sum(stalls),
    )
    return Run(rank, run.plan)


def trace_modules(trace: Trace) -> dict[str, None]:
    """The names of a trace's groups."""
    return dict.fromkeys(group.name for group in trace.groups)
