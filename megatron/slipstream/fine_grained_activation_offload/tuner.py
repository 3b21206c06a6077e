# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Makes plans, measures iterations that follow them, and rebuilds them from the measurements.

A plan is made from the trace of an iteration. Iterations that follow it are then measured: device
memory once, times a few times. :class:`Phase` is the state of these measurements. Each rank uses
its own measurements only.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Optional

from megatron.slipstream.fine_grained_activation_offload.activation_store import ActivationStore
from megatron.slipstream.fine_grained_activation_offload.backend import Event
from megatron.slipstream.fine_grained_activation_offload.copy_rates import (
    are_slow,
    measure_link,
    rates_beside_compute,
    slowdown_ms_per_gb,
)
from megatron.slipstream.fine_grained_activation_offload.cost_trial import (
    CostTrial,
    trace_after,
)
from megatron.slipstream.fine_grained_activation_offload.host_pool import ProcessLimit
from megatron.slipstream.fine_grained_activation_offload.plan_cache import PlanCache
from megatron.slipstream.fine_grained_activation_offload.plan_entry import (
    IterationProbe,
    Phase,
    PlanEntry,
)
from megatron.slipstream.fine_grained_activation_offload.recorder import MemoryReader
from megatron.slipstream.fine_grained_activation_offload.report import (
    MAX_TRIED_SHOWN,
    RankReport,
    TriedPlan,
)
from megatron.slipstream.fine_grained_activation_offload.step_clock import (
    MAX_ROUNDS,
    NUM_TIMED,
    StepClock,
    Times,
    ms_per_group,
    typical_step_ms,
)
from megatron.slipstream.plan.actions import Plan
from megatron.slipstream.plan.build import build_plan
from megatron.slipstream.plan.candidates import PolicyOptions
from megatron.slipstream.plan.check import PlanFacts, check_plan
from megatron.slipstream.plan.peak import PeakDrop, peak_drop
from megatron.slipstream.plan.render import (
    format_bytes,
    render_plan,
    summarize,
    why_groups_stay,
)
from megatron.slipstream.plan.timeline import device_memory
from megatron.slipstream.plan.trace import Bandwidth, Trace
from megatron.slipstream.plan.walk import simulate

logger = logging.getLogger(__name__)

MAX_SHARE_OF_DEVICE = 0.9
"""Largest fraction of the obtainable device memory that an iteration without the engine may need;
above it, no such iteration is run."""

_DIGITS = 4
"""Decimal places of milliseconds in a report, finer than the resolution of events."""


@dataclass(frozen=True)
class TrialIteration:
    """One iteration of a trial, or of a plan that offloads nothing."""

    plan: Plan
    is_left_out: bool
    """Whether it runs without the engine."""
    start: Event


class Tuner:
    """Builds, proves and improves plans.

    Args:
        store: Holds the storages that plans move.
        cache: Keeps the plans.
        report: Receives the figures of the newest plan.
        options: How groups are chosen and timed.
    """

    def __init__(
        self,
        store: ActivationStore,
        cache: PlanCache,
        report: RankReport,
        options: PolicyOptions,
    ) -> None:
        self.options = options
        """The options of the current plans."""
        self.facts: Optional[PlanFacts] = None
        """The proven facts of the newest plan."""
        self.tries_plans = True
        """Whether the overhead of a plan is also measured, or only predicted."""
        self._store = store
        self._report = report
        self._cache = cache
        self._read_later: list[tuple[Plan, StepClock]] = []
        """Timed iterations that the device has not finished yet."""
        self._trials_to_read: list[tuple[TrialIteration, Event, bool]] = []
        """The same for trials, each with its end event and whether the plan was followed."""
        self._bandwidth: Optional[Bandwidth] = None
        self._told: set[str] = set()
        """Plan notes already logged."""
        self._has_moved = False
        """Whether any plan so far moves a group."""
        self.resident_gradient_bytes: Optional[int] = None
        """Bytes of gradients at the start of the second iteration. None before then: the current
        gradients are assumed to persist."""

    def change_options(self, options: PolicyOptions) -> bool:
        """Switch to these options. Returns whether they differ from the current ones."""
        if options == self.options:
            return False
        self.options = options
        self._cache.clear()
        self._report.tried = []
        return True

    def make(self, trace: Trace) -> PlanEntry:
        """Build a plan and prove it safe; it replaces the plan for the same steps."""
        plan = build_plan(trace, self.options)
        self._tell(plan)
        self.facts = check_plan(plan)
        entry = PlanEntry(plan)
        self._cache.put(entry)
        if trace.step_ms and trace.bandwidth is not None:
            entry.planned_ms = simulate(plan).total_ms
            if plan.options.max_overhead_percent is not None and not entry.num_moving:
                entry.phase = Phase.DECLINED
        report = self._report
        report.num_plans += 1
        self.report_plan(plan)
        if report.rank == 0 and report.num_plans == 1:
            logger.info("plan: %s", summarize(plan))
        logger.debug("plan:\n%s", report.plan)
        return entry

    def is_settled(self, plan: Optional[Plan]) -> bool:
        """Return whether this plan is final."""
        entry = self._cache.entry_of(plan)
        return entry is not None and (entry.phase.is_last or not self._store.backend.takes_time)

    def times_of(self, plan: Optional[Plan]) -> Optional[Times]:
        """Return the times of the last timed iteration that followed this plan, or None."""
        entry = self._cache.entry_of(plan)
        return entry.times[-1] if entry is not None and entry.times else None

    # Trials.

    def is_tried(self, plan: Plan) -> bool:
        """Return whether a trial of the plan is running."""
        entry = self._cache.entry_of(plan)
        return entry is not None and entry.phase is Phase.TRIAL

    def begin_trial(self, plan: Optional[Plan], number: int) -> Optional[TrialIteration]:
        """Begin an iteration that is expected to follow ``plan``.

        Args:
            plan: The plan.
            number: Number of the iteration. In trials every second iteration runs with the engine,
                the same ones on every rank.

        Returns:
            The argument for :meth:`end_trial`; None if the iteration is not part of a trial.
        """
        entry = self._cache.entry_of(plan)
        if entry is None or entry.phase not in (Phase.DECLINED, Phase.TRIAL):
            return None
        is_left_out = entry.phase is Phase.DECLINED or number % 2 == 1
        return TrialIteration(entry.plan, is_left_out, self._now())

    def end_trial(self, trial: TrialIteration, was_followed: bool) -> None:
        """End the iteration; ``was_followed`` says whether it followed its plan."""
        self._trials_to_read.append((trial, self._now(), was_followed))

    def _now(self) -> Event:
        backend = self._store.backend
        return backend.timed_event(backend.current_stream())

    def _enter_trial(self, entry: PlanEntry) -> None:
        """Start measuring the overhead of a plan that has an overhead limit, if possible."""
        entry.phase = Phase.SETTLED
        max_percent = entry.plan.options.max_overhead_percent
        if not self.tries_plans or max_percent is None:
            return
        if not entry.planned_ms or not entry.num_moving:
            return
        peaks, obtainable = entry.plan.peak_bytes(), self._store.backend.obtainable_bytes()
        if obtainable is not None and (
            peaks is None or peaks[0] > MAX_SHARE_OF_DEVICE * obtainable
        ):
            logger.info(
                "rank %d: the cost of offloading is not measured, since iterations without it %s",
                self._report.rank,
                "have not been seen to fit in device memory"
                if peaks is None
                else "might not fit in device memory",
            )
            return
        entry.phase, entry.trial = Phase.TRIAL, CostTrial(max_percent)
        entry.num_trials += 1

    def _read_trials(self) -> None:
        later, self._trials_to_read = self._trials_to_read, []
        for place, (iteration, stop, was_followed) in enumerate(later):
            ms = self._store.backend.elapsed_ms(iteration.start, stop)
            if ms is None:
                self._trials_to_read = later[place:]
                return
            entry = self._cache.entry_of(iteration.plan)
            if entry is None or entry.trial is None:
                continue
            if iteration.is_left_out:
                entry.trial.note_without(ms)
                continue
            entry.trial.note_with(ms if was_followed else None)
            is_affordable = entry.trial.is_affordable
            if is_affordable is not None:
                self._leave_trial(entry, entry.trial, is_affordable)

    def _leave_trial(self, entry: PlanEntry, trial: CostTrial, is_affordable: bool) -> None:
        percent, error = trial.overhead
        entry.phase, entry.trial = Phase.SETTLED, None
        self._report.tried.append(
            TriedPlan(
                entry.num_moving,
                len(entry.plan.groups),
                entry.plan.moved_nbytes,
                round(percent, 2),
                round(error, 2),
            )
        )
        del self._report.tried[:-MAX_TRIED_SHOWN]
        log = logger.info if self._report.rank == 0 else logger.debug
        log(
            "tried out: with %d of %d groups moving, an iteration takes %.2f%% (± %.2f) longer "
            "than the %.1f ms without the engine",
            entry.num_moving,
            len(entry.plan.groups),
            percent,
            error,
            statistics.median(trial.off_ms),
        )
        if is_affordable:
            entry.tried = trial.overhead
            self.report_plan(entry.plan)
            return
        again = self.make(trace_after(entry.plan, trial, entry.num_trials))
        again.num_rounds, again.num_trials = MAX_ROUNDS, entry.num_trials

    # Following a plan.

    def probe(self, plan: Plan) -> Optional[IterationProbe]:
        """Return the probe for an iteration about to follow ``plan``; None if not measured."""
        entry = self._cache.entry_of(plan)
        if entry is None:
            return None
        if entry.phase is Phase.TIMED and self._store.backend.takes_time:
            return IterationProbe(StepClock(self._store.backend), None)
        if entry.phase is Phase.MEMORY_READ:
            return IterationProbe(None, MemoryReader(self._store.backend))
        return None

    def note_followed(self, plan: Plan, probe: Optional[IterationProbe]) -> None:
        """Record that an iteration followed ``plan`` from its first to its last step."""
        entry = self._cache.entry_of(plan)
        if entry is None:
            return
        entry.note_followed()
        if probe is None:
            return
        probe.begin_step()
        if probe.clock is not None:
            self._read_later.append((plan, probe.clock))
        if probe.memory is not None:
            entry.memory = probe.memory.readings(plan.absent_bytes)

    def report_plan(self, plan: Plan) -> None:
        """Write a plan and its measurements into the report."""
        entry = self._cache.entry_of(plan)
        if entry is None:
            return
        report = self._report
        report.plan, report.options, report.notes = render_plan(plan), plan.options, [*plan.notes]
        drop = self.peak_drop(plan)
        is_read = bool(plan.trace.memory)
        report.baseline_peak_bytes = drop.without_bytes if is_read else 0
        report.planned_peak_bytes = drop.planned_bytes if is_read else 0
        report.planned_ms = entry.planned_ms
        times = self.times_of(plan)
        report.measured_ms = times.total_ms if times else 0.0
        report.step_ms = [round(ms, _DIGITS) for ms in times.step_ms] if times else []
        report.step_stall_ms = [round(ms, _DIGITS) for ms in times.stall_ms] if times else []
        report.tried_percent, report.tried_standard_error = entry.tried or (None, 0.0)
        report.step_peak_bytes = [reading.peak_bytes for reading in entry.memory]
        pairs = zip(report.step_peak_bytes, device_memory(plan).with_plan, strict=False)
        report.later_bytes = max(0, min((now - then for now, then in pairs), default=0))

    def peak_drop(self, plan: Plan) -> PeakDrop:
        """Return how much a plan lowers the device peak."""
        resident_bytes = self.resident_gradient_bytes
        gradients = self._store.backend.gradients
        if resident_bytes is None and gradients is not None:
            resident_bytes = gradients.count()
        return peak_drop(plan, resident_bytes or 0)

    def read_clocks(self) -> None:
        """Read the times of finished iterations, and rebuild plans that have enough of them."""
        if self._trials_to_read:
            self._read_trials()
        if not self._read_later:
            return
        later, self._read_later = self._read_later, []
        for plan, clock in later:
            times = clock.read()
            entry = self._cache.entry_of(plan)
            if times is None:
                self._read_later.append((plan, clock))
            elif entry is not None:
                entry.times.append(times)
                if len(entry.times) == NUM_TIMED and not self._improve(entry):
                    self._enter_trial(entry)

    def improve(self, plan: Plan, times: Sequence[Times]) -> Plan:
        """Rebuild a plan from the times of iterations in which another engine followed it.

        Returns:
            The plan for the same steps, possibly unchanged.
        """
        entry = self._cache.entry_of(plan)
        if entry is None or not times:
            return plan
        # Earlier measurements were taken under other conditions and are not comparable.
        entry.times, entry.earlier, entry.num_rounds = [*times], (), 0
        self._improve(entry, "replays")
        return self._cache.find(plan.trace.steps_key) or plan

    def measure_bandwidth(self) -> Optional[Bandwidth]:
        """Return the bandwidth of copies, measured at the first call; None if it cannot be."""
        if self._bandwidth is None:
            self._bandwidth = measure_link(self._store)
        return self._bandwidth

    def _improve(self, entry: PlanEntry, what: str = "iterations") -> bool:
        """Rebuild the plan from measured times if it is off. Returns whether it was rebuilt."""
        if entry.num_rounds >= MAX_ROUNDS or entry.is_as_predicted:
            return False
        if self.measure_bandwidth() is None or self._bandwidth is None:
            return False
        num_moved = entry.num_moving
        own_ms = statistics.median(times.own_ms for times in entry.times)
        runs = (*entry.earlier, (num_moved, own_ms))
        host_ms = ms_per_group(runs)
        # Exclude the cost of the groups that move now from the time of an iteration.
        share = max(0.0, 1.0 - host_ms * num_moved / own_ms)
        bandwidth = rates_beside_compute(self._bandwidth, [times.copies for times in entry.times])
        if are_slow(bandwidth, self._bandwidth):
            self._tell_of_slow_copies(self._bandwidth, bandwidth)
        trace = replace(
            entry.plan.trace,
            step_ms=tuple(ms * share for ms in typical_step_ms(entry.times)),
            bandwidth=bandwidth,
            memory=entry.memory or entry.plan.trace.memory,
            ms_per_moved_group=host_ms,
        )
        if entry.plan.options.max_overhead_percent is not None and not self.tries_plans:
            trace = replace(trace, ms_per_moved_gb=slowdown_ms_per_gb(bandwidth))
        improved = self.make(trace)
        improved.num_rounds, improved.earlier = entry.num_rounds + 1, runs
        report = self._report
        if report.rank == 0:
            logger.info(
                "planned again from the times of %d %s: %d of %d groups move, %.1f ms from the "
                "first mark to the end (%.1f were measured)",
                len(entry.times),
                what,
                improved.num_moving,
                len(improved.plan.groups),
                report.planned_ms,
                statistics.median(times.total_ms for times in entry.times),
            )
        return True

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
        # Later plans may be for unusual iterations, unless they are built from times.
        is_judged = not self._has_moved or (plan.trace.step_ms and not plan.notes)
        # Memory refused by the system has already been reported.
        is_explained = self._store.host_pool.was_refused or "nothing" in self._told
        if not plan.moved_nbytes and is_judged and not is_explained:
            self._told.add("nothing")
            self._tell_that_nothing_moves(plan)
        for note in plan.notes:
            if note not in self._told and (plan.trace.step_ms or not self._will_be_timed):
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

    @property
    def _will_be_timed(self) -> bool:
        """Whether iterations will still be timed, which some options need."""
        return self._store.backend.takes_time
