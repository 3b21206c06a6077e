# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Builds a rank's report on request from figures that other parts of the engine keep."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Optional

from megatron.slipstream.fine_grained_activation_offload.activation_store import ActivationStore
from megatron.slipstream.fine_grained_activation_offload.counted_modules import (
    CountedModules,
    ReplayedPass,
    Replays,
    sum_of,
)
from megatron.slipstream.fine_grained_activation_offload.graph_capture import GraphCaptures
from megatron.slipstream.fine_grained_activation_offload.lifecycle import Lifecycle
from megatron.slipstream.fine_grained_activation_offload.report import ModuleCounters, RankReport
from megatron.slipstream.fine_grained_activation_offload.warning_log import keep_warnings
from megatron.slipstream.plan.render import render_plan

MAX_ITERATIONS_SHOWN = 500
"""Maximum number of recent iterations whose times are in the report."""


class ReportBuilder:
    """Fills in the report of a rank, to which other parts write as well.

    ``replayed`` has the passes replayed by graphs of whole chunks, by chunk name.
    """

    def __init__(
        self,
        report: RankReport,
        store: ActivationStore,
        lifecycle: Lifecycle,
        graphs: GraphCaptures,
        replayed: Mapping[str, ReplayedPass],
    ) -> None:
        self._report = report
        self._store = store
        self._lifecycle = lifecycle
        self._graphs = graphs
        self._replayed = replayed
        self.counted: Optional[CountedModules] = None
        """Counters of the last complete iteration; None before the first."""
        self._replays: list[Replays] = []
        """Those of the last complete iteration."""
        self._in_graphs: Optional[dict[str, ModuleCounters]] = None
        """Their sum; None until it is needed."""
        self._iteration_ms: deque[float] = deque(maxlen=MAX_ITERATIONS_SHOWN)
        self._ended_at: Optional[float] = None
        """Host time at the end of the last iteration."""
        keep_warnings()

    def note_iteration(self, counted: Optional[CountedModules]) -> None:
        """Record the end of an iteration; without counters those of the iteration before stay."""
        self.counted = counted or self.counted
        report, allocated = self._report, self._store.host_pool.allocated_bytes
        report.num_iterations += 1
        replayed = (*self._graphs.of_layers.values(), *self._replayed.values())
        replays = [graph.take_replays() for graph in replayed]
        if replays != self._replays:
            self._replays, self._in_graphs = replays, None
        report.host_growth_bytes = max(0, allocated - report.host_allocated_bytes)
        report.host_allocated_bytes = allocated
        now = time.perf_counter()
        if self._ended_at is not None:
            self._iteration_ms.append(1e3 * (now - self._ended_at))
        self._ended_at = now

    def build(self) -> RankReport:
        report, pool, plan = self._report, self._store.host_pool, self._lifecycle.last_plan
        if self.counted is not None:
            report.modules = self.counted.by_name()
            report.late_groups = {str(key): n for key, n in self.counted.late_groups.items()}
        if self._in_graphs is None:
            self._in_graphs = sum_of(self._replays)
        report.graphs = self._in_graphs
        report.iteration_ms = [round(ms, 1) for ms in self._iteration_ms]
        report.host_high_water_bytes = pool.high_water_bytes
        report.host_waste_bytes = pool.waste_bytes
        report.host_memory_limit_bytes = pool.limit_bytes
        report.num_host_allocations = pool.num_slabs
        replayed_bytes = sum(each.host_bytes for each in self._replayed.values())
        report.graph_host_bytes = self._graphs.host_bytes + replayed_bytes
        if plan is not None:
            report.num_kept_for_host_memory = plan.num_kept_for_host_memory
        return report

    def finish(self, wanted_modules: Sequence[str]) -> None:
        """Add the times of iterations that the device has finished."""
        self._lifecycle.read_clocks()
        report, last = self.build(), self._lifecycle.last
        times = last.latest_times if last is not None else None
        drops = self._lifecycle.peak_drop.by_module
        for name, counters in report.modules.items():
            counters.peak_drop_bytes = drops.get(name, 0)
            counters.stall_ms = times.stall_ms_by_module.get(name, 0.0) if times else 0.0
        if last is not None:
            self._lifecycle.planner.report_plan(last)
        if self._replayed:
            plans = (f"{name}:\n{render_plan(each.plan)}" for name, each in self._replayed.items())
            report.plan = "\n".join(plans)
        met = {*(last.plan.trace.names if last is not None else ()), *report.graphs}
        report.absent_modules = [name for name in wanted_modules if name not in met]
        report.warnings = keep_warnings()
