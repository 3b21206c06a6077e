# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""What a plan costs: its operations on three queues, timed without a GPU.

Compute takes the trace's time from each step to the next. Copies run at the trace's bandwidth, at
the lower rates of :class:`Bandwidth` while both directions are busy. Everything else (marks,
events, launches) takes no time, and copies do not slow compute down, so a simulated stall is a
lower bound of a real one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Optional

from megatron.slipstream.plan.actions import Action, Plan
from megatron.slipstream.plan.copy_queues import Direction, share_link
from megatron.slipstream.plan.operations import (
    EDGES,
    EdgeRule,
    Operation,
    OpKind,
    Queue,
    derive_schedule,
    device_bytes,
)
from megatron.slipstream.plan.render import format_bytes
from megatron.slipstream.plan.safety import PlanError, SafetyProperty
from megatron.slipstream.plan.trace import Bandwidth, Step, Trace


class Span(NamedTuple):
    """One operation that takes time: the computation behind a step, or a copy."""

    queue: Queue
    cause: Action | Step
    start_ms: float
    end_ms: float
    nbytes: int
    """Bytes that it copies; 0 for computation."""

    @property
    def action(self) -> str:
        """Its name in logs, pictures and errors."""
        return str(self.cause)


class SimulatedStall(NamedTuple):
    """Compute stood still because a copy had not ended."""

    cause: Action | Step
    """Where: the FREE of a group (its copy out is late) or its use (its copy back is late)."""
    start_ms: float
    ms: float


class MemoryAt(NamedTuple):
    """Memory from one time to the next entry's."""

    ms: float
    """When compute reached the step."""
    device_bytes: int
    """Saved storages on the device, those that stay included."""
    host_bytes: int
    """The most host memory that was in use at once since the step before, in whole buffers."""


@dataclass(frozen=True)
class Simulation:
    """One iteration as a plan would run it. All times are in milliseconds."""

    total_ms: float
    """Until the last queue has ended."""
    compute_ms: float
    """What the computation takes by itself."""
    stalls: tuple[SimulatedStall, ...]
    """Every wait of compute that took time, in order."""
    d2h_busy_ms: float
    h2d_busy_ms: float
    memory: tuple[MemoryAt, ...]
    """One entry per step."""
    spans: tuple[Span, ...]
    """The computation behind each step and every copy, in the order in which the host issues them.
    Those of one queue do not overlap."""
    peak_bytes: Optional[tuple[int, int]]
    """The device peak without and with the plan, of everything that the allocator held; None if
    the trace has no memory readings."""

    @cached_property
    def stall_ms(self) -> float:
        """How long compute stood still."""
        return sum(stall.ms for stall in self.stalls)

    @property
    def overhead_percent(self) -> float:
        """What the plan adds to the iteration, in percent of the computation by itself."""
        if self.compute_ms > 0:
            return 100.0 * (self.total_ms - self.compute_ms) / self.compute_ms
        return math.inf if self.total_ms > 0 else 0.0

    @property
    def stall_ms_by_module(self) -> dict[str, float]:
        """How long compute stood still for the groups of each module name, the longest first."""
        by_module: dict[str, float] = defaultdict(float)
        for stall in self.stalls:
            by_module[stall.cause.name] += stall.ms
        return dict(sorted(by_module.items(), key=lambda item: -item[1]))

    @property
    def step_time_text(self) -> str:
        """What the step time consists of."""
        parts = [f"{self.compute_ms:.1f} ms compute", f"{self.stall_ms:.1f} ms stalls"]
        rest = f"{self.total_ms - self.compute_ms - self.stall_ms:.1f}"
        if float(rest):
            parts.append(f"{rest} ms on the host")
        return f"{' + '.join(parts)} ({self.overhead_percent:.1f}%)"

    def render(self) -> str:
        """What is predicted, as lines of text without a trailing newline."""
        stalls = [f"{name} {ms:.1f} ms" for name, ms in self.stall_ms_by_module.items()]
        if self.peak_bytes is None:
            peak = f"{format_bytes(self.peak_device_bytes)} of saved storages"
        else:
            without, planned = self.peak_bytes
            peak = (
                f"{format_bytes(planned)}, without the plan {format_bytes(without)} "
                f"({format_bytes(without - planned)} less)"
            )
        rows = {
            "step time": f"{self.total_ms:.1f} ms = {self.step_time_text}",
            "stalls by module": ", ".join(stalls) or "none",
            "device peak": peak,
            "host memory": f"{format_bytes(self.peak_host_bytes)} in use at most",
            "copies busy": f"D2H {self.d2h_busy_ms:.1f} ms, H2D {self.h2d_busy_ms:.1f} ms",
        }
        width = max(map(len, rows))
        return "\n".join(f"{name.ljust(width)}  {text}" for name, text in rows.items())

    @property
    def peak_device_bytes(self) -> int:
        """The most bytes of saved storages on the device at once."""
        return max((entry.device_bytes for entry in self.memory), default=0)

    @property
    def peak_host_bytes(self) -> int:
        """The most host bytes in use at once."""
        return max((entry.host_bytes for entry in self.memory), default=0)


def simulate(plan: Plan, edges: Sequence[EdgeRule] = EDGES) -> Simulation:
    """Run a plan in simulated time, with the times and the bandwidth of its trace.

    The cost is linear: a quarter of a second for 100 layers of 2 groups in 16 micro-batches, most
    of which is to derive the operations.

    Args:
        plan: A plan that ``check_plan`` accepts.
        edges: The edge table; see ``check_plan``.

    Raises:
        ValueError: The trace has no times or no bandwidth, or they make no sense.
        PlanError: The plan cannot be followed, or its queues wait for each other in a circle.
    """
    trace = plan.trace
    bandwidth = _check_measured(trace)
    schedule = derive_schedule(plan)
    operations = schedule.operations
    work = _work(plan, operations)
    clock = _Clock(plan, operations, schedule.waits(operations, edges), work, bandwidth)
    clock.run()
    spans = tuple(_spans(operations, clock, work))
    starts = [span.start_ms for span in spans if span.queue is Queue.COMPUTE]
    on_device = device_bytes(trace, schedule.storages)
    return Simulation(
        total_ms=max(clock.ends, default=0.0),
        compute_ms=sum(trace.step_ms),
        stalls=tuple(clock.stalls),
        d2h_busy_ms=_busy_ms(spans, Queue.D2H),
        h2d_busy_ms=_busy_ms(spans, Queue.H2D),
        memory=tuple(map(MemoryAt, starts, on_device, schedule.host_bytes)),
        spans=spans,
        peak_bytes=plan.peak_bytes(),
    )


def _check_measured(trace: Trace) -> Bandwidth:
    """What the trace says of bandwidth, once that and its times are found to make sense."""
    cure = "record the trace on a GPU, or set {0} with dataclasses.replace(trace, {0}=...)"
    if len(trace.step_ms) != len(trace.steps):
        raise ValueError(
            f"the trace's step_ms has {len(trace.step_ms)} entries for {len(trace.steps)} steps, "
            f"so nothing can be timed; {cure.format('step_ms')}"
        )
    if not all(0 <= ms < math.inf for ms in trace.step_ms):
        bad = next(ms for ms in trace.step_ms if not 0 <= ms < math.inf)
        raise ValueError(f"the trace's step_ms has an entry {bad}; durations are 0 or more")
    if trace.bandwidth is None:
        raise ValueError(
            "the trace's bandwidth is None, so no copy can be timed; " + cure.format("bandwidth")
        )
    for name, gb_per_s in trace.bandwidth._asdict().items():
        if not gb_per_s > 0:
            raise ValueError(
                f"the trace's bandwidth.{name}={gb_per_s} must be above 0; "
                + cure.format("bandwidth")
            )
    return trace.bandwidth


def _work(plan: Plan, operations: Sequence[Operation]) -> list[float]:
    """What each operation has to do: milliseconds of computation, or bytes of a copy."""
    trace = plan.trace
    step_ms = list(trace.step_ms)
    moving = [group for group in plan.groups if group.moves]
    cost_ms = trace.moving_cost_ms(len(moving), plan.moved_nbytes)
    if cost_ms:
        for group in moving:
            for step in (group.commit_step, group.use_step):
                step_ms[step] += cost_ms / len(moving) / 2
    work: list[float] = [0.0] * len(operations)
    for index, (kind, step, _, storages) in enumerate(operations):
        if kind is OpKind.COMPUTE:
            work[index] = step_ms[step]
        elif kind is OpKind.COPY_OUT or kind is OpKind.COPY_IN:
            work[index] = sum([trace.storages[storage].nbytes for storage in storages])
    return work


def _spans(operations: Sequence[Operation], clock: _Clock, work: Sequence[float]) -> Iterator[Span]:
    timed = zip(operations, clock.starts, clock.ends, work, strict=True)
    for (kind, _, cause, _), start, end, amount in timed:
        if kind is OpKind.COMPUTE:
            yield Span(Queue.COMPUTE, cause, start, end, 0)
        elif kind is OpKind.COPY_OUT:
            yield Span(Queue.D2H, cause, start, end, int(amount))
        elif kind is OpKind.COPY_IN:
            yield Span(Queue.H2D, cause, start, end, int(amount))


def _busy_ms(spans: Sequence[Span], queue: Queue) -> float:
    return sum(span.end_ms - span.start_ms for span in spans if span.queue is queue)


class _CopyQueue(Direction):
    """One copy queue."""

    def __init__(self, alone_gb_per_s: float, both_gb_per_s: float) -> None:
        super().__init__(alone_gb_per_s, both_gb_per_s)
        self.pending: list[int] = []
        """The copies that have not started, the next one last."""


class _Clock:
    """Runs each queue's operations in order, each once those that it waits for have ended.

    The compute queue runs as far ahead as it can without knowing when copies end; what it has
    started by then tells when copies may start. Time goes from one start or end of a copy to the
    next. Rates are set after all that happens at one time, so that a copy that follows another at
    once leaves the other direction's rate as it is.
    """

    def __init__(
        self,
        plan: Plan,
        operations: Sequence[Operation],
        waits: Sequence[Sequence[int]],
        work: Sequence[float],
        bandwidth: Bandwidth,
    ) -> None:
        self._plan = plan
        self._operations = operations
        self._waits = waits
        self._work = work
        self._d2h = _CopyQueue(bandwidth.d2h_gb_per_s, bandwidth.d2h_both_gb_per_s)
        self._h2d = _CopyQueue(bandwidth.h2d_gb_per_s, bandwidth.h2d_both_gb_per_s)
        self._compute: list[int] = []
        """The operations of the compute queue that have not started, the next one last."""
        self._free_from = 0.0
        """When the compute queue ends what it has started."""
        self.starts = [0.0] * len(operations)
        self.ends = [math.inf] * len(operations)
        """Infinite until it is known when an operation ends."""
        self.stalls: list[SimulatedStall] = []
        pending = {OpKind.COPY_OUT: self._d2h.pending, OpKind.COPY_IN: self._h2d.pending}
        for index in range(len(operations) - 1, -1, -1):
            pending.get(operations[index].kind, self._compute).append(index)

    def run(self) -> None:
        """Run all operations.

        Raises:
            PlanError: Those at the heads of the queues wait for each other.
        """
        queues = (self._d2h, self._h2d)
        now = 0.0
        self._run_compute()
        while (now := min(self._next_event(item, now) for item in queues)) < math.inf:
            ended = [item for item in queues if item.end_ms <= now]
            for item in ended:
                self.ends[item.running] = now
                item.stop()
            if ended:
                self._run_compute()
            for item in queues:
                if item.running < 0 and self._next_event(item, now) <= now:
                    index = item.pending.pop()
                    self.starts[index] = now
                    item.start(index, self._work[index], now)
            share_link(self._d2h, self._h2d, now)
        self._check_all_have_run()

    def _next_event(self, queue: _CopyQueue, now: float) -> float:
        """When the running copy ends or, if none runs, the next one may start."""
        if queue.running >= 0:
            return queue.end_ms
        if not queue.pending:
            return math.inf
        for signal in self._waits[queue.pending[-1]]:
            now = max(now, self.ends[signal])
        return now

    def _run_compute(self) -> None:
        """Run the compute queue until it waits for a copy of which the end is not known."""
        pending, free_from = self._compute, self._free_from
        while pending:
            index = pending[-1]
            start = free_from
            for signal in self._waits[index]:
                start = max(start, self.ends[signal])
            if start > free_from:
                if start == math.inf:
                    break
                cause = self._operations[index].cause
                self.stalls.append(SimulatedStall(cause, free_from, start - free_from))
            pending.pop()
            self.starts[index] = start
            self.ends[index] = free_from = start + self._work[index]
        self._free_from = free_from

    def _check_all_have_run(self) -> None:
        queues = (self._compute, self._d2h.pending, self._h2d.pending)
        heads = [self._operations[pending[-1]] for pending in queues if pending]
        if heads:
            detail = ", ".join(f"{op.cause} ({op.kind.name})" for op in heads)
            detail = f"the queues stand still at {detail}"
            raise PlanError(SafetyProperty.NO_CYCLE, heads[0].cause, self._plan, detail)
