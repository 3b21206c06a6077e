# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Makes plans from traces and measured times, proves them, and says what they do not honor."""

from __future__ import annotations

import logging
import statistics
from dataclasses import replace
from typing import Optional

from megatron.slipstream.fine_grained_activation_offload.activation_store import ActivationStore
from megatron.slipstream.fine_grained_activation_offload.copy_rates import (
    are_slow,
    measure_link,
    rates_beside_compute,
    slowdown_ms_per_gb,
)
from megatron.slipstream.fine_grained_activation_offload.host_pool import ProcessLimit
from megatron.slipstream.fine_grained_activation_offload.plan_cache import (
    Phase,
    PlanCache,
    PlanEntry,
)
from megatron.slipstream.fine_grained_activation_offload.report import RankReport
from megatron.slipstream.fine_grained_activation_offload.step_clock import (
    ms_per_group,
    typical_step_ms,
)
from megatron.slipstream.plan.actions import Plan
from megatron.slipstream.plan.build import build_plan
from megatron.slipstream.plan.candidates import PolicyOptions
from megatron.slipstream.plan.check import check_plan
from megatron.slipstream.plan.pace import pace
from megatron.slipstream.plan.peak import PeakDrop, peak_drop
from megatron.slipstream.plan.render import format_bytes, render_plan, summarize, why_groups_stay
from megatron.slipstream.plan.timeline import device_memory
from megatron.slipstream.plan.trace import Bandwidth, Trace
from megatron.slipstream.plan.walk import simulate

logger = logging.getLogger(__name__)

_DIGITS = 4
"""Decimal places of milliseconds in a report, finer than the resolution of events."""


class Planner:
    """Builds, proves and improves plans, whose figures ``report`` receives."""

    def __init__(self, store: ActivationStore, report: RankReport, options: PolicyOptions) -> None:
        self.plans = PlanCache()
        """The plans made so far."""
        self.options = options
        """The options of the current plans."""
        self.resident_gradient_bytes: Optional[int] = None
        """Bytes of gradients at the start of the second iteration. None before then: the current
        gradients are assumed to persist."""
        self.pass_ms: Optional[float] = None
        """What a pass through a model chunk computes on average, forward and backward, by times of
        its layers in iterations that hardly wait; None if unknown."""
        self._store = store
        self._report = report
        self._bandwidth: Optional[Bandwidth] = None
        self._told: set[str] = set()
        """Plan notes already logged."""
        self._has_moved = False
        """Whether any plan so far moves a group."""

    def make(self, trace: Trace) -> PlanEntry:
        """Build a plan and prove it safe; it replaces the plan for the same steps."""
        plan = build_plan(trace, self.options)
        if not trace.step_ms and self._store.backend.takes_time:
            plan = replace(plan, notes=())  # The plan from times may honor these options.
        self._tell(plan)
        check_plan(plan)
        entry = self.plans.put(plan)
        if trace.step_ms and trace.bandwidth is not None:
            entry.planned_ms = simulate(plan).total_ms
            if plan.options.max_overhead_percent is not None and not entry.num_moving:
                entry.phase = Phase.DECLINED
        report = self._report
        report.num_plans += 1
        self.report_plan(entry)
        if report.rank == 0 and report.num_plans == 1:
            logger.info("plan: %s", summarize(plan))
        logger.debug("plan:\n%s", report.plan)
        return entry

    def improve(self, entry: PlanEntry, what: str, is_predicted: bool) -> bool:
        """Make a plan again from its measured times; return whether bandwidth can be measured.

        ``what`` was timed, for the log. The overhead of moved bytes ``is_predicted`` if nothing
        measures it.
        """
        measured = self.measure_bandwidth()
        if measured is None:
            entry.plan = build_plan(entry.plan.trace, entry.plan.options)  # Its notes, too.
            return False
        num_moved, all_times = entry.num_moving, entry.times
        total_ms = statistics.median(times.total_ms for times in all_times)
        slower = self._pace(entry)
        own_ms = slower * statistics.median(times.own_ms for times in all_times)
        runs = (*entry.earlier, (num_moved, own_ms))
        host_ms = ms_per_group(runs)
        # Exclude the cost of the groups that move now from the time of an iteration.
        share = max(0.0, 1.0 - host_ms * num_moved / own_ms)
        bandwidth = rates_beside_compute(measured, [times.copies for times in all_times])
        if are_slow(bandwidth, measured):
            self._tell_of_slow_copies(measured, bandwidth)
        trace = replace(
            entry.plan.trace,
            step_ms=tuple(ms * slower * share for ms in typical_step_ms(all_times)),
            bandwidth=bandwidth,
            memory=entry.memory or entry.plan.trace.memory,
            ms_per_moved_group=host_ms,
        )
        if entry.plan.options.max_overhead_percent is not None and is_predicted:
            trace = replace(trace, ms_per_moved_gb=slowdown_ms_per_gb(bandwidth))
        num_rounds = entry.num_rounds + 1
        improved = self.make(trace)
        improved.num_rounds, improved.earlier = num_rounds, runs
        if self._report.rank == 0:
            logger.info(
                "planned again from the times of %d %s: %d of %d groups move, %.1f ms from the "
                "first mark to the end (%.1f were measured, %.1f of them waits for copies; "
                "computation is taken to be %.1f%% slower without waits)",
                len(all_times),
                what,
                improved.num_moving,
                len(improved.plan.groups),
                improved.planned_ms,
                total_ms,
                statistics.median(times.waited_ms for times in all_times),
                100 * (slower - 1),
            )
        return True

    def _pace(self, entry: PlanEntry) -> float:
        """Return by how much slower a plan's computation is than where all moved by count.

        See [Note: A device that waits is faster] in ``plan.pace``. 1 for a plan made from times,
        and if nothing tells.
        """
        if self.pass_ms is None or entry.planned_ms or not entry.num_passes:
            return 1.0
        own_ms = statistics.median(times.own_ms for times in entry.times)
        waited_ms = statistics.median(times.waited_ms for times in entry.times)
        return pace(own_ms, waited_ms, self.pass_ms * entry.num_passes)

    def measure_bandwidth(self) -> Optional[Bandwidth]:
        """Return the bandwidth of copies, measured at the first call between iterations."""
        if self._bandwidth is None:
            self._bandwidth = measure_link(self._store)
        return self._bandwidth

    def peak_drop(self, plan: Plan) -> PeakDrop:
        resident_bytes = self.resident_gradient_bytes
        gradients = self._store.backend.gradients
        if resident_bytes is None and gradients is not None:
            resident_bytes = gradients.count()
        return peak_drop(plan, resident_bytes or 0)

    def report_plan(self, entry: PlanEntry) -> None:
        report, plan = self._report, entry.plan
        report.plan, report.options, report.notes = render_plan(plan), plan.options, [*plan.notes]
        drop = self.peak_drop(plan)
        is_read = bool(plan.trace.memory)
        report.baseline_peak_bytes = drop.without_bytes if is_read else 0
        report.planned_peak_bytes = drop.planned_bytes if is_read else 0
        report.planned_ms = entry.planned_ms
        times = entry.latest_times
        report.measured_ms = times.total_ms if times else 0.0
        report.step_ms = [round(ms, _DIGITS) for ms in times.step_ms] if times else []
        report.step_stall_ms = [round(ms, _DIGITS) for ms in times.stall_ms] if times else []
        report.tried_percent, report.tried_standard_error = entry.tried or (None, 0.0)
        report.step_peak_bytes = [reading.peak_bytes for reading in entry.memory]
        pairs = zip(report.step_peak_bytes, device_memory(plan).with_plan, strict=False)
        report.later_bytes = max(0, min((now - then for now, then in pairs), default=0))

    def tell_times(self, entry: PlanEntry) -> None:
        """Log how long an iteration takes that follows its plan, and what was predicted."""
        if self._report.rank == 0 and entry.planned_ms:
            logger.info(
                "iterations that follow the plan take %.1f ms from the first mark to the end, of "
                "which %.1f are waits for copies; %.1f ms were predicted",
                statistics.median(times.total_ms for times in entry.times),
                statistics.median(times.waited_ms for times in entry.times),
                entry.planned_ms,
            )

    # What is logged, once each.

    def _tell_of_slow_copies(self, measured: Bandwidth, beside_compute: Bandwidth) -> None:
        cure = self._store.backend.cure_of_slow_copies
        if cure is not None and self._report.rank == 0 and "slow" not in self._told:
            self._told.add("slow")
            logger.warning(
                "copies reach %.1f GB/s to the host and %.1f GB/s back beside computation, where "
                "the link carries %.1f and %.1f; %s",
                beside_compute.d2h_gb_per_s,
                beside_compute.h2d_gb_per_s,
                measured.d2h_gb_per_s,
                measured.h2d_gb_per_s,
                cure,
            )

    def _tell(self, plan: Plan) -> None:
        """Log, once each, the options that could not be honored and why nothing moves."""
        self._has_moved |= plan.moved_nbytes > 0
        # Later plans may be for unusual iterations, unless they are built from times, which some
        # options need.
        is_judged = not self._has_moved or (plan.trace.step_ms and not plan.notes)
        # Memory refused by the system has already been reported.
        is_explained = self._store.host_pool.was_refused or "nothing" in self._told
        if not plan.moved_nbytes and is_judged and not is_explained:
            self._told.add("nothing")
            self._tell_that_nothing_moves(plan)
        for note in plan.notes:
            if note not in self._told:
                self._told.add(note)
                logger.warning("rank %d: %s", self._report.rank, note)
        limit_bytes = plan.options.host_memory_limit_bytes
        if plan.num_kept_for_host_memory == 0 or limit_bytes is None or "limit" in self._told:
            return
        self._told.add("limit")
        pool = self._store.host_pool
        # Memory refused by the system has already been reported.
        logger.log(
            logging.INFO if pool.was_refused else logging.WARNING,
            "%s is less than the %s of host memory that rank %d needs to move all it should, so %d "
            "of %d groups stay on the device; raise the limit, give the job more host memory, or "
            "choose fewer modules",
            (pool.process_limit or ProcessLimit(limit_bytes)).describe(limit_bytes),
            format_bytes(plan.needed_host_bytes),
            self._report.rank,
            plan.num_kept_for_host_memory,
            len(plan.groups),
        )

    def _tell_that_nothing_moves(self, plan: Plan) -> None:
        target_bytes, peaks = plan.options.target_memory_bytes, plan.peak_bytes()
        if target_bytes is not None and peaks is not None and peaks[1] <= target_bytes:
            # With a budget, that is what was asked for.
            is_own = plan.options.target_option == PolicyOptions.target_option
            logger.log(
                logging.WARNING if is_own else logging.INFO,
                "rank %d: nothing moves, since the target for the device peak is met without "
                "offloading: the peak is %s, %s allows %s; lower the target to move more",
                self._report.rank,
                format_bytes(peaks[1]),
                plan.options.target_option,
                format_bytes(target_bytes),
            )
            return
        reasons = "; ".join(why_groups_stay(plan.groups))
        names_option = any("_" in word for word in reasons.split())
        logger.warning(
            "rank %d: nothing moves. Of %d groups %s. Choose other modules%s",
            self._report.rank,
            len(plan.groups),
            reasons,
            ", or set the option named to another value" if names_option else "",
        )
