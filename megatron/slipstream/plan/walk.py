# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Simulates the cost of a plan: its operations on three queues, timed without a GPU.

Compute between steps takes the time recorded in the trace. Copies run at the trace's bandwidth, at
the lower rates of :class:`Bandwidth` while both directions are busy. Everything else (marks,
events, launches) takes no time, and copies do not slow down compute, so a simulated stall is a
lower bound on the real one.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Optional

from megatron.slipstream.plan.actions import Action, Plan
from megatron.slipstream.plan.edges import EDGES, EdgeRule, OpKind, Queue
from megatron.slipstream.plan.model import BYTES_PER_MS_AT_1_GB_PER_S
from megatron.slipstream.plan.operations import Operation, derive_schedule, device_bytes
from megatron.slipstream.plan.render import format_bytes
from megatron.slipstream.plan.safety import PlanError, SafetyProperty
from megatron.slipstream.plan.trace import Bandwidth, Step, Trace


class _Queue:
    """One copy direction: copies run one after another, at a rate that may change."""

    def __init__(self, alone_gb_per_s: float, both_gb_per_s: float) -> None:
        self.alone = alone_gb_per_s * BYTES_PER_MS_AT_1_GB_PER_S
        self.both = both_gb_per_s * BYTES_PER_MS_AT_1_GB_PER_S
        """Rate while the other direction is busy too."""
        self.waiting: deque[tuple[int, float, list[int]]] = deque()
        """Number and size of each copy, and the copies of the other queue that it waits for."""
        self.running = -1
        """Number of the running copy; -1 for none."""
        self.end_ms = math.inf
        """Time at which it ends at the current rate."""
        self._left_bytes = 0.0
        self._since_ms = 0.0
        self._rate = 0.0

    def start_next(self, ends_ms: dict[int, float], starts_ms: dict[int, float], ms: float) -> None:
        """Start the next copy, with no rate yet, if the copies that it waits for have ended."""
        number, nbytes, waits_for = self.waiting[0]
        while waits_for:
            if waits_for[-1] not in ends_ms:
                return
            waits_for.pop()
        self.waiting.popleft()
        starts_ms[number] = ms
        self.running, self.end_ms = number, math.inf
        self._left_bytes, self._since_ms, self._rate = nbytes, ms, 0.0

    def set_rate(self, rate: float, ms: float) -> None:
        """Set the rate of the running copy from ``ms`` on, in bytes per millisecond."""
        # If unchanged, do not recompute the end time, to avoid rounding it again.
        if rate == self._rate:
            return
        if ms > self._since_ms:  # 0 ms at an infinite rate would give NaN bytes.
            done_bytes = (ms - self._since_ms) * self._rate
            self._left_bytes = max(0.0, self._left_bytes - done_bytes)
        self._since_ms, self._rate = ms, rate
        self.end_ms = ms + self._left_bytes / rate


class CopyQueues:
    """The d2h and h2d queues, simulated up to a given time. Each copy has a unique number.

    Args:
        bandwidth: Copy bandwidth. Rates change only after all events at the same time, so that
            back-to-back copies do not change the other direction's rate.
    """

    def __init__(self, bandwidth: Bandwidth) -> None:
        self.starts_ms: dict[int, float] = {}
        """The start time of each copy that has started."""
        self.ends_ms: dict[int, float] = {}
        """The end time of each copy that has ended."""
        self._now_ms = 0.0
        self.next_ms = math.inf
        """The earliest time at which the next copy ends."""
        self._out = _Queue(bandwidth.d2h_gb_per_s, bandwidth.d2h_both_gb_per_s)
        self._in = _Queue(bandwidth.h2d_gb_per_s, bandwidth.h2d_both_gb_per_s)

    def add(
        self, number: int, nbytes: float, waits_for: Sequence[int], is_out: bool, ms: float
    ) -> None:
        """Add a copy at the time that the queues have reached.

        Args:
            number: Number of the copy.
            nbytes: Size of the copy.
            waits_for: The copies of the other direction that must end before it starts.
            is_out: Whether it copies to the host.
            ms: The current time.
        """
        (self._out if is_out else self._in).waiting.append((number, nbytes, list(waits_for)))
        self._now_ms = self.next_ms = ms

    def run_to(self, ms: float) -> None:
        """Advance to time ``ms``. Copies added later must not start before it."""
        while self._find_next_end() <= ms:
            self._end_next()

    def run_until(self, number: int) -> float:
        """Advance until the given copy has ended, and return its end time."""
        while number not in self.ends_ms:
            if self._find_next_end() == math.inf:
                raise AssertionError(f"copy {number} never ends")
            self._end_next()
        return self.ends_ms[number]

    def run_to_end(self) -> None:
        """Advance until all copies have ended."""
        while self._find_next_end() < math.inf:
            self._end_next()

    def _find_next_end(self) -> float:
        """Start the copies that can start now, and return when the next copy ends."""
        out, back, now_ms = self._out, self._in, self._now_ms
        if out.running < 0 and out.waiting:
            out.start_next(self.ends_ms, self.starts_ms, now_ms)
        if back.running < 0 and back.waiting:
            back.start_next(self.ends_ms, self.starts_ms, now_ms)
        if out.running >= 0:
            out.set_rate(out.alone if back.running < 0 else out.both, now_ms)
        if back.running >= 0:
            back.set_rate(back.alone if out.running < 0 else back.both, now_ms)
        self.next_ms = out.end_ms if out.end_ms <= back.end_ms else back.end_ms
        return self.next_ms

    def _end_next(self) -> None:
        now_ms = self._now_ms = self.next_ms
        for queue in (self._out, self._in):
            if queue.end_ms <= now_ms:  # It has no end while nothing runs.
                self.ends_ms[queue.running] = queue.end_ms
                queue.running, queue.end_ms = -1, math.inf


class Span(NamedTuple):
    """One operation that takes time: the computation after a step, or a copy."""

    queue: Queue
    cause: Action | Step
    start_ms: float
    end_ms: float
    nbytes: int
    """Bytes that it copies; 0 for computation."""

    @property
    def action(self) -> str:
        """Its name in logs, figures and errors."""
        return str(self.cause)


class SimulatedStall(NamedTuple):
    """A stall of compute on a copy that had not ended."""

    cause: Action | Step
    """The FREE of a group (its D2H copy is late) or its use (its H2D copy is late)."""
    start_ms: float
    ms: float


class MemoryAt(NamedTuple):
    """Memory from one time until that of the next entry."""

    ms: float
    """When compute reached the step."""
    device_bytes: int
    """Saved storages on the device, including those that stay there."""
    host_bytes: int
    """Peak host memory in use since the previous step, in whole buffers."""


class Clock:
    """Times operations in issue order, so that a caller can base later ones on the times so far.

    Compute runs issued operations one after another, and stalls if an operation waits for a copy. A
    copy starts no earlier than compute reaches the point of its issue (edges E1 and E4).

    Args:
        trace: The iteration.
        bandwidth: Copy bandwidth.
    """

    def __init__(self, trace: Trace, bandwidth: Bandwidth) -> None:
        self.now_ms = 0.0
        """When compute finishes the operations issued so far."""
        self.stalls: list[SimulatedStall] = []
        self.stall_ms = 0.0
        """Their sum."""
        self.copies = CopyQueues(bandwidth)
        self._storages = trace.storages

    def compute(self, ms: float) -> None:
        """Run the model's computation for ``ms`` milliseconds."""
        self.now_ms += ms
        if self.copies.next_ms <= self.now_ms:
            self.copies.run_to(self.now_ms)

    def run(self, number: int, operation: Operation, copies: Sequence[int]) -> None:
        """Time an operation other than the model's computation.

        Args:
            number: Its index among the operations.
            operation: The operation.
            copies: The indices of the earlier copies that it waits for.
        """
        queue = operation.kind.queue
        if queue is Queue.COMPUTE:
            self.stall(operation.cause, copies)
        else:
            nbytes = sum(self._storages[storage].nbytes for storage in operation.storages)
            self.copy(number, nbytes, copies, queue is Queue.D2H)

    def copy(self, number: int, nbytes: int, waits_for: Sequence[int], is_out: bool) -> None:
        """Issue a copy: see :meth:`CopyQueues.add`."""
        self.copies.add(number, nbytes, waits_for, is_out, self.now_ms)

    def stall(self, cause: Action | Step, copies: Sequence[int]) -> None:
        """Make compute wait for copies; ``cause`` is what needs them."""
        until_ms = self.now_ms
        for copy in copies:
            end_ms = self.copies.run_until(copy)
            if end_ms > until_ms:
                until_ms = end_ms
        if until_ms > self.now_ms:
            stall = SimulatedStall(cause, self.now_ms, until_ms - self.now_ms)
            self.stalls.append(stall)
            self.stall_ms += stall.ms
            self.now_ms = until_ms


@dataclass(frozen=True)
class Simulation:
    """One simulated iteration of a plan. All times are in milliseconds."""

    total_ms: float
    """Time until the last queue has finished."""
    compute_ms: float
    """Time of the computation alone."""
    stalls: tuple[SimulatedStall, ...]
    """All stalls of compute, in order."""
    d2h_busy_ms: float
    h2d_busy_ms: float
    memory: tuple[MemoryAt, ...]
    """One entry per step."""
    spans: tuple[Span, ...]
    """The computation after each step and every copy, in issue order. Spans of one queue do not
    overlap."""
    peak_bytes: Optional[tuple[int, int]]
    """The device peak without and with the plan, of all allocated memory; None if the trace has no
    memory readings."""

    @cached_property
    def stall_ms(self) -> float:
        """Total time that compute stalled."""
        return sum(stall.ms for stall in self.stalls)

    @property
    def overhead_percent(self) -> float:
        """Time that the plan adds to the iteration, in percent of compute time."""
        if self.compute_ms > 0:
            # Sums of long iterations differ in their last digits.
            added_ms = max(0.0, self.total_ms - self.compute_ms)
            return 100.0 * added_ms / self.compute_ms
        return math.inf if self.total_ms > 0 else 0.0

    @property
    def stall_ms_by_module(self) -> dict[str, float]:
        """Time that compute stalled on the groups of each module name, longest first."""
        by_module: dict[str, float] = defaultdict(float)
        for stall in self.stalls:
            by_module[stall.cause.name] += stall.ms
        return dict(sorted(by_module.items(), key=lambda item: -item[1]))

    @property
    def step_time_text(self) -> str:
        """Breakdown of the step time."""
        parts = [f"{self.compute_ms:.1f} ms compute", f"{self.stall_ms:.1f} ms stalls"]
        rest = f"{max(0.0, self.total_ms - self.compute_ms - self.stall_ms):.1f}"
        if float(rest):
            parts.append(f"{rest} ms on the host")
        return f"{' + '.join(parts)} ({self.overhead_percent:.1f}%)"

    def render(self) -> str:
        """Return the prediction as lines of text without a trailing newline."""
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
            "host memory": f"{format_bytes(self.peak_host_bytes)} of this rank in use at most",
            "copies busy": f"D2H {self.d2h_busy_ms:.1f} ms, H2D {self.h2d_busy_ms:.1f} ms",
        }
        width = max(map(len, rows))
        return "\n".join(f"{name.ljust(width)}  {text}" for name, text in rows.items())

    @property
    def peak_device_bytes(self) -> int:
        """Peak bytes of saved storages on the device."""
        return max((entry.device_bytes for entry in self.memory), default=0)

    @property
    def peak_host_bytes(self) -> int:
        """Peak host bytes in use."""
        return max((entry.host_bytes for entry in self.memory), default=0)


def simulate(plan: Plan, edges: Sequence[EdgeRule] = EDGES) -> Simulation:
    """Simulate a plan with the times and bandwidth of its trace.

    The run time is linear: 0.25 s for 100 layers of 2 groups and 16 micro-batches, most of it spent
    on deriving the operations.

    Args:
        plan: A plan that ``check_plan`` accepts.
        edges: The edge table. A copy always waits for the point of its issue.

    Raises:
        ValueError: The trace has no times or no bandwidth, or invalid ones.
        PlanError: The plan cannot be followed, or its queues deadlock.
    """
    trace = plan.trace
    clock = Clock(trace, _check_measured(trace))
    schedule = derive_schedule(plan)
    operations, step_ms = schedule.operations, _step_ms(plan)
    starts_ms: list[float] = []
    for number, waits in enumerate(schedule.waits(operations, edges)):
        operation = operations[number]
        if any(signal >= number for signal in waits):
            detail = f"the queues deadlock at {operation.cause} ({operation.kind.name})"
            raise PlanError(SafetyProperty.NO_CYCLE, operation.cause, plan, detail)
        if operation.kind is OpKind.COMPUTE:
            starts_ms.append(clock.now_ms)
            clock.compute(step_ms[operation.step])
        else:
            clock.run(number, operation, [at for at in waits if operations[at].kind.is_copy])
    clock.copies.run_to_end()
    spans = tuple(_spans(trace, operations, starts_ms, step_ms, clock.copies))
    on_device = device_bytes(trace, schedule.storages)
    return Simulation(
        total_ms=max([clock.now_ms, *clock.copies.ends_ms.values()]),
        compute_ms=sum(trace.step_ms),
        stalls=tuple(clock.stalls),
        d2h_busy_ms=_busy_ms(spans, Queue.D2H),
        h2d_busy_ms=_busy_ms(spans, Queue.H2D),
        memory=tuple(map(MemoryAt, starts_ms, on_device, schedule.host_bytes)),
        spans=spans,
        peak_bytes=plan.peak_bytes(),
    )


def _check_measured(trace: Trace) -> Bandwidth:
    """Return the bandwidth of the trace, after validating it and the times."""
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


def _step_ms(plan: Plan) -> list[float]:
    """Return compute time after each step, with the cost of moving groups besides copies."""
    trace = plan.trace
    step_ms = list(trace.step_ms)
    moving = [group for group in plan.groups if group.moves]
    cost_ms = trace.moving_cost_ms(len(moving), plan.moved_nbytes)
    if cost_ms:
        for group in moving:
            for step in (group.commit_step, group.use_step):
                step_ms[step] += cost_ms / len(moving) / 2
    return step_ms


def _spans(
    trace: Trace,
    operations: Sequence[Operation],
    starts_ms: Sequence[float],
    step_ms: Sequence[float],
    copies: CopyQueues,
) -> Iterator[Span]:
    for number, (kind, step, cause, storages) in enumerate(operations):
        if kind is OpKind.COMPUTE:
            start_ms = starts_ms[step]
            yield Span(Queue.COMPUTE, cause, start_ms, start_ms + step_ms[step], 0)
        elif kind.queue is not Queue.COMPUTE:
            nbytes = sum(trace.storages[storage].nbytes for storage in storages)
            yield Span(kind.queue, cause, copies.starts_ms[number], copies.ends_ms[number], nbytes)


def _busy_ms(spans: Sequence[Span], queue: Queue) -> float:
    return sum(span.end_ms - span.start_ms for span in spans if span.queue is queue)
