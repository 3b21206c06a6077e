# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The life of a plan: an iteration is recorded and planned, others are measured, then all settles.

:class:`Phase` says how far the plan of an iteration has come. Iterations that follow a plan are
measured, device memory once and times a few times, and the plan is made again from that; with an
overhead limit it is then compared with iterations without the engine. Each rank uses its own
measurements only.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Any, Optional

from megatron.slipstream.fine_grained_activation_offload.activation_store import ActivationStore
from megatron.slipstream.fine_grained_activation_offload.backend import Event
from megatron.slipstream.fine_grained_activation_offload.cost_trial import CostTrial, trace_after
from megatron.slipstream.fine_grained_activation_offload.iteration import Iteration
from megatron.slipstream.fine_grained_activation_offload.plan_cache import (
    IterationProbe,
    Phase,
    PlanEntry,
    TrialIteration,
)
from megatron.slipstream.fine_grained_activation_offload.plan_executor import PlanExecutor
from megatron.slipstream.fine_grained_activation_offload.planner import Planner
from megatron.slipstream.fine_grained_activation_offload.recorder import MemoryReader, Recorder
from megatron.slipstream.fine_grained_activation_offload.report import (
    MAX_TRIED_SHOWN,
    RankReport,
    TriedPlan,
)
from megatron.slipstream.fine_grained_activation_offload.step_clock import (
    MAX_ROUNDS,
    StepClock,
    Times,
)
from megatron.slipstream.plan.actions import Plan
from megatron.slipstream.plan.candidates import PolicyOptions
from megatron.slipstream.plan.host_layout import slab_bytes_for
from megatron.slipstream.plan.operations import derive_schedule
from megatron.slipstream.plan.peak import PeakDrop
from megatron.slipstream.plan.render import format_bytes
from megatron.slipstream.plan.settings import Assignment
from megatron.slipstream.plan.trace import StepsKey

logger = logging.getLogger(__name__)

MAX_SHARE_OF_DEVICE = 0.9
"""Largest fraction of the obtainable device memory that an iteration without the engine may need;
above it, no such iteration is run."""

MIN_UNUSED_SHARE = 0.2
"""Minimum unused fraction of host memory to trim, since re-pinning the rest takes a while."""
MAX_TRIMS = 3
"""Maximum number of trims, to bound the time spent re-pinning if plans never settle."""
NUM_ALIKE = 3
"""Number of consecutive iterations that must use exactly the planned host memory before it is
trimmed. If sizes vary, the need of the next iteration is unknown, and the pool is not trimmed."""


class Lifecycle:
    """Decides which plan an iteration follows, and what is measured of it.

    Args:
        store: Holds the storages that plans move.
        recorder: Records iterations without a plan.
        report: The report of the rank.
        options: How groups are chosen and timed.
    """

    def __init__(
        self,
        store: ActivationStore,
        recorder: Recorder,
        report: RankReport,
        options: PolicyOptions,
    ) -> None:
        self._store = store
        self._recorder = recorder
        self._report = report
        self.planner = Planner(store, report, options)
        self.plans = self.planner.plans
        self.executor = PlanExecutor(store, recorder, self.planner)
        self.last: Optional[PlanEntry] = None
        """The plan of the last iteration: the one it followed, or the one made from it."""
        self.next: Optional[PlanEntry] = None
        """The plan with which the next iteration starts; None to record it."""
        self.tries_plans = True
        """Whether the overhead of a plan is also measured, or only predicted."""
        self._clocks: list[tuple[PlanEntry, Plan, StepClock]] = []
        """Timed iterations that the device has not finished yet."""
        self._trials: list[tuple[TrialIteration, Event, bool]] = []
        """The same for trials, each with its end event and whether the plan was followed."""
        self._captured_clock: Optional[StepClock] = None
        """Times a captured pass; None to take no times."""
        self._num_trims = 0
        self._num_alike = 0
        self._num_plans_seen = self._num_plans_trimmed = -1
        """Number of plans made when host memory was last looked at, and when it was last trimmed or
        found to be needed."""

    @property
    def phase(self) -> Phase:
        """The phase of the coming iteration."""
        return Phase.RECORD if self.next is None else self.next.phase

    @property
    def is_settled(self) -> bool:
        """Whether all measurements for plans are done, and the last plan is final."""
        last = self.last
        if last is None or last not in self.plans:
            return False
        return last.phase.is_last or not self._store.backend.takes_time

    @property
    def last_plan(self) -> Optional[Plan]:
        """The plan of :attr:`last`."""
        return None if self.last is None else self.last.plan

    @property
    def peak_drop(self) -> PeakDrop:
        """The reduction of the device peak by the last plan; nothing before the first one.

        See [Note: Freed is not saved] in ``plan.peak``.
        """
        return PeakDrop(0, 0, {}) if self.last is None else self.planner.peak_drop(self.last.plan)

    def read_times(self) -> None:
        """Update the plan from timed iterations that the device has finished.

        Call between iterations.
        """
        self.read_clocks()
        if self.last is not None:
            self.next = self.plans.after(self.last)

    # What other parts change.

    def change_options(self, options: PolicyOptions) -> bool:
        """Switch to these options, dropping all plans. Return whether they differ from before."""
        if options == self.planner.options:
            return False
        self._start_over(options)
        return True

    def _start_over(self, options: PolicyOptions, but_of: Container[Assignment] = ()) -> None:
        """Drop all plans but those of some assignments; the next iteration is recorded."""
        self.planner.options = options
        self._report.tried = []
        self.plans.clear(but_of)
        self.last = self.next = None

    def change_target(
        self, target_memory_bytes: Optional[int], but_of: Container[Assignment] = ()
    ) -> None:
        """Limit the device peak, drop plans, and record the next iteration.

        Call between iterations.

        Args:
            target_memory_bytes: The limit; None to move all that may.
            but_of: Assignments whose plans are kept, if they are within the limit.
        """
        within = {
            plan.trace.assignment
            for plan in self.plans.plans()
            if plan.trace.assignment in but_of and _is_within(plan, target_memory_bytes)
        }
        options = replace(self.planner.options, target_memory_bytes=target_memory_bytes)
        self._start_over(options, but_of=within)

    def lower_target(self, target_memory_bytes: int) -> None:
        """Lower the target, and plan again from the traces. Call between iterations."""
        before = self.planner.options.target_memory_bytes
        if before is None or target_memory_bytes >= before:
            return
        self.planner.options = replace(
            self.planner.options, target_memory_bytes=target_memory_bytes
        )
        for plan in self.plans.plans():
            self.planner.make(plan.trace)

    def change_assignment(self, assignment: Assignment) -> None:
        """Follow only plans of this assignment, from the next pass on."""
        self.read_clocks()
        self.plans.assignment = assignment
        self._recorder.forget_storages()
        self.last = self.next = self.plans.newest()
        if self.next is not None:
            self.planner.report_plan(self.next)

    def follow_captured(self, plan: Plan, clock: Optional[StepClock]) -> None:
        """Follow the plan of another engine in the coming pass, which must match it.

        Args:
            plan: The plan.
            clock: Times the pass; None for no timing.
        """
        self.last = self.next = PlanEntry(plan, plan.trace.steps_key)
        self.executor.is_bound = True
        self._captured_clock = clock

    def plan_for_replays(self, times: Sequence[Times]) -> None:
        """Replan from replays of graphs in which a pass follows the last plan.

        Args:
            times: Times of each replay.
        """
        entry = self.next = self.last
        if entry is not None and entry in self.plans and times:
            # Earlier measurements were taken under other conditions and are not comparable.
            entry.times, entry.earlier, entry.num_rounds = [*times], (), 0
            self._improve(entry, "replays")

    # An iteration.

    def enter_iteration(self, now: Iteration, are_marks_in_graphs: bool) -> None:
        """At an iteration's first model chunk, decide whether the iteration is part of a trial."""
        entry = self.next
        if are_marks_in_graphs or self.executor.is_bound or entry is None:
            return
        if self.phase in (Phase.DECLINED, Phase.TRIAL):
            # Every second iteration of a trial runs with the engine, the same ones on every rank.
            is_left_out = self.phase is Phase.DECLINED or self._report.num_iterations % 2 == 1
            now.trial = TrialIteration(entry, entry.plan, is_left_out, self._time())

    def begin(self, now: Iteration) -> None:
        """Begin an iteration at its first mark."""
        gradients = self._store.backend.gradients
        if self._report.num_iterations == 1 and gradients is not None:
            self.planner.resident_gradient_bytes = gradients.count()
        self._store.recover()
        now.entry = entry = self.next
        if entry is None:
            self._recorder.reads_memory = True
            self._recorder.watch_gradients()
        elif self.executor.is_bound:
            clock = self._captured_clock
            now.probe = None if clock is None else IterationProbe(clock, None)
        else:
            pool = self._store.host_pool
            layout = entry.layout_in(pool)
            now.has_layout = layout is not None and pool.follow(layout)
            now.probe = self._probe(entry)
            if now.probe is None and not self._recorder.reads_memory:
                now.native = self._begin_in_cpp(now, entry)
        if now.probe is not None and now.probe.clock is not None:
            self._store.copy_streams.timings = now.probe.clock.timings

    def _begin_in_cpp(self, now: Iteration, entry: PlanEntry) -> Optional[Any]:
        """Return the iteration in C++, with all that it has to know; None if Python performs it."""
        if entry.steps is None:
            entry.steps = self._store.compile_steps(entry.plan)
            if entry.steps is None:
                return None
        layout = entry.layout if now.has_layout else None
        return entry.steps.begin(now.passes, now.chunk, layout, self.plans.is_only(entry))

    def _probe(self, entry: PlanEntry) -> Optional[IterationProbe]:
        backend = self._store.backend
        if entry.phase is Phase.TIMED and backend.takes_time:
            return IterationProbe(StepClock(backend), None)
        if entry.phase is Phase.MEMORY_READ:
            return IterationProbe(None, MemoryReader(backend))
        return None

    def finish(self, now: Iteration, pp_rank: int) -> None:
        """End an iteration with marks: find or make its plan, and choose the next one."""
        self._follow_host_limit(now)
        if now.native is not None:
            now.native.skip_left_out()
        entry = now.entry
        was_followed = entry is not None and len(entry.plan.trace.steps) == now.num_steps
        if now.trial is not None:
            self._end_trial(now.trial, was_followed and entry is now.trial.entry)
        if entry is not None and not was_followed:
            self._recorder.steps.extend(entry.plan.trace.steps[: now.num_steps])
            entry = None
        elif entry is not None and entry is self.next:  # from its first step
            self._note_followed(entry, now.probe)
        if entry is None and not now.is_incomplete:
            # It departed from its plan, or ended early: another plan may still match it.
            steps = StepsKey(tuple(self._recorder.steps), self.plans.assignment)
            entry = self.plans.find(steps) or self._plan_recorded(now, pp_rank)
        self.read_clocks()
        if entry is None:
            self.next = None
        elif not (
            entry is self.last is self.next and self.plans.is_repeated(entry, now.num_entered)
        ):
            self.plans.note_order(entry, now.num_entered)
            self.last, self.next = entry, self.plans.after(entry)
        self._report.is_left_out = False

    def finish_without_marks(self, now: Iteration) -> bool:
        """End an iteration that bypassed the engine, or that graphs replayed.

        Returns:
            Whether it was part of a trial that goes on, so that the report keeps the figures of the
            iteration before.
        """
        self._report.is_left_out = False
        if now.trial is not None:
            self._end_trial(now.trial, was_followed=False)
            self.read_clocks()
            # Without marks, the number of micro-batches identifies the iteration.
            self.last = self.plans.find_like(now.trial.entry, now.num_entered)
            self.next = None if self.last is None else self.plans.after(self.last)
            self._report.is_left_out = self.last is not None and self.last.phase is Phase.TRIAL
        return self._report.is_left_out

    def _follow_host_limit(self, now: Iteration) -> None:
        """Take over a new limit of the pool. Drop all plans unless they are the same under it.

        A failed allocation lowers the limit; another engine of the process takes or returns a part.
        """
        options = self.planner.options
        pool = self._store.host_pool
        if pool.limit_bytes == options.host_memory_limit_bytes:
            return
        options = replace(options, host_memory_limit_bytes=pool.limit_bytes)
        if not pool.was_refused and self._plans_are_the_same_under(pool.limit_bytes):
            self.planner.options = options
        else:
            self.change_options(options)
            self.executor.leave_plan(now, now.num_steps)

    def _plans_are_the_same_under(self, limit_bytes: Optional[int]) -> bool:
        """Return whether all plans fit within the limit, and none lacked host memory."""
        return all(
            (limit_bytes is None or plan.peak_host_bytes <= limit_bytes)
            and not plan.num_kept_for_host_memory
            for plan in self.plans.plans()
        )

    def _plan_recorded(self, now: Iteration, pp_rank: int) -> PlanEntry:
        trace = self._recorder.finish(pp_rank, now.groups)
        entry = self.planner.make(replace(trace, assignment=self.plans.assignment))
        if entry.is_of_budget and trace.memory:
            entry.phase = Phase.TIMED
        return entry

    def _note_followed(self, entry: PlanEntry, probe: Optional[IterationProbe]) -> None:
        """Record that an iteration followed its plan from its first to its last step."""
        entry.note_followed()
        if probe is None:
            return
        probe.begin_step()
        if probe.clock is not None:
            self._clocks.append((entry, entry.plan, probe.clock))
        if probe.memory is not None:
            entry.memory = probe.memory.readings(entry.plan.absent_bytes)

    # Measurements.

    def read_clocks(self) -> None:
        """Read the times of finished iterations, and rebuild plans that have enough of them."""
        if self._trials:
            self._read_trials()
        if not self._clocks:
            return
        later, self._clocks = self._clocks, []
        for entry, plan, clock in later:
            times = clock.read()
            if times is None:
                self._clocks.append((entry, plan, clock))
            elif entry.plan is plan and entry in self.plans:
                entry.times.append(times)
                if entry.has_enough_times and not self._improve(entry):
                    self.planner.tell_times(entry)
                    self._enter_trial(entry)

    def _improve(self, entry: PlanEntry, what: str = "iterations") -> bool:
        """Rebuild the plan from measured times if it is off. Return whether it was rebuilt."""
        if entry.num_rounds >= MAX_ROUNDS or entry.is_as_predicted:
            return False
        return self.planner.improve(entry, what, is_predicted=not self.tries_plans)

    def _time(self) -> Event:
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

    def _end_trial(self, trial: TrialIteration, was_followed: bool) -> None:
        self._trials.append((trial, self._time(), was_followed))

    def _read_trials(self) -> None:
        later, self._trials = self._trials, []
        for place, (iteration, stop, was_followed) in enumerate(later):
            ms = self._store.backend.elapsed_ms(iteration.start, stop)
            if ms is None:
                self._trials = later[place:]
                return
            entry = iteration.entry
            if entry.plan is not iteration.plan or entry not in self.plans or not entry.trial:
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
        plan = entry.plan
        entry.phase, entry.trial = Phase.SETTLED, None
        tried = (entry.num_moving, len(plan.groups), plan.moved_nbytes)
        self._report.tried.append(TriedPlan(*tried, round(percent, 2), round(error, 2)))
        del self._report.tried[:-MAX_TRIED_SHOWN]
        log = logger.info if self._report.rank == 0 else logger.debug
        log(
            "tried out: with %d of %d groups moving, an iteration takes %.2f%% (± %.2f) longer "
            "than the %.1f ms without the engine",
            entry.num_moving,
            len(plan.groups),
            percent,
            error,
            statistics.median(trial.off_ms),
        )
        if is_affordable:
            entry.tried = trial.overhead
            self.planner.report_plan(entry)
            return
        num_trials = entry.num_trials
        again = self.planner.make(trace_after(plan, trial, num_trials))
        again.num_rounds, again.num_trials = MAX_ROUNDS, num_trials

    # Host memory.

    def trim_host_memory(self) -> None:
        """After an iteration, free host memory that settled plans do not need.

        Iterations without a plan move every group that may move, and the pool grows by slabs of
        many buffers. A plan may need a tenth of that, or nothing. Its need is known to the byte, so
        one slab of that size replaces all others.
        """
        num_plans, pool = self._report.num_plans, self._store.host_pool
        if self._num_plans_trimmed == num_plans:
            return
        peak_in_use, last = pool.take_peak_in_use(), self.last
        if self._num_plans_seen != num_plans:
            self._num_plans_seen, self._num_alike = num_plans, 0
            if self._num_trims == MAX_TRIMS:
                self._num_plans_trimmed = num_plans
        elif last is not None:
            is_alike = peak_in_use == last.plan.peak_host_bytes
            self._num_alike = self._num_alike + 1 if is_alike else 0
            if self._num_alike >= NUM_ALIKE and self.is_settled and not pool.in_use_bytes:
                self._num_plans_trimmed = num_plans
                self._trim()

    def _trim(self) -> None:
        held = self._store.host_pool.allocated_bytes
        requests = [derive_schedule(plan).host_requests() for plan in self.plans.plans()]
        needed = slab_bytes_for(requests)
        if held - needed < max(MIN_UNUSED_SHARE * held, self._store.backend.host_slab_bytes):
            return
        self._num_trims += 1
        self._store.trim_host_memory(needed)
        logger.info(
            "rank %d: the plans need %s of host memory; the rest of the %s held is freed",
            self._report.rank,
            format_bytes(needed),
            format_bytes(held),
        )


def _is_within(plan: Plan, limit_bytes: Optional[int]) -> bool:
    """Return whether there is a limit, and the device peak with the plan is known to be within."""
    peaks = plan.peak_bytes()
    return limit_bytes is not None and peaks is not None and peaks[1] <= limit_bytes
