# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""What a plan costs: its operations on three queues, timed without a GPU.

Compute takes the given time from each step to the next; a copy takes its bytes over the bandwidth
of its direction. Everything else (marks, events, launches) takes no time, and copies do not slow
compute or each other down, so a simulated stall is a lower bound of a real one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron.slipstream.plan.build import Action, Plan
from megatron.slipstream.plan.operations import (
    EDGES,
    EdgeRule,
    Operation,
    OpKind,
    Queue,
    derive_schedule,
    device_bytes,
)
from megatron.slipstream.plan.rules import PlanError, Rule
from megatron.slipstream.plan.trace import Step

BYTES_PER_MS_AT_1_GB_PER_S = 1e6


class SimulatedStall(NamedTuple):
    """Compute stood still because a copy had not ended."""

    cause: Action | Step
    """Where: the FREE of a group (its copy out is late) or its use (its copy back is late)."""
    ms: float


class MemoryAt(NamedTuple):
    """Memory from one time to the next entry's."""

    ms: float
    """When compute reached the step."""
    device_bytes: int
    """Saved storages on the device, those that stay included."""
    host_bytes: int
    """The most host memory that was lent at once since the step before, in whole buffers."""


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

    @property
    def stall_ms(self) -> float:
        """How long compute stood still."""
        return sum(stall.ms for stall in self.stalls)

    @property
    def peak_device_bytes(self) -> int:
        """The most bytes of saved storages on the device at once."""
        return max((entry.device_bytes for entry in self.memory), default=0)

    @property
    def peak_host_bytes(self) -> int:
        """The most host bytes lent at once."""
        return max((entry.host_bytes for entry in self.memory), default=0)


def simulate(
    plan: Plan,
    step_ms: Sequence[float],
    d2h_gb_per_s: float,
    h2d_gb_per_s: float,
    edges: Sequence[EdgeRule] = EDGES,
) -> Simulation:
    """Run a plan in simulated time.

    Args:
        plan: A plan that ``check_plan`` accepts.
        step_ms: For each step of the trace, what compute takes from it to the next one, in
            milliseconds.
        d2h_gb_per_s: Bandwidth of copies out, in 1e9 bytes per second; ``math.inf`` is allowed.
        h2d_gb_per_s: Bandwidth of copies back, likewise.
        edges: The edge table; see ``check_plan``.

    Raises:
        ValueError: An argument does not fit.
        PlanError: The plan cannot be followed, or its queues wait for each other in a circle.
    """
    if len(step_ms) != len(plan.trace.steps):
        raise ValueError(
            f"step_ms has {len(step_ms)} entries, the trace {len(plan.trace.steps)} steps; "
            "give one for each"
        )
    if any(ms < 0 for ms in step_ms):
        raise ValueError("step_ms has a negative entry; give durations")
    if not (d2h_gb_per_s > 0 and h2d_gb_per_s > 0):
        raise ValueError(
            f"d2h_gb_per_s={d2h_gb_per_s}, h2d_gb_per_s={h2d_gb_per_s}: both must be above 0"
        )
    schedule = derive_schedule(plan)
    operations = schedule.operations
    rates = {
        OpKind.COPY_OUT: d2h_gb_per_s * BYTES_PER_MS_AT_1_GB_PER_S,
        OpKind.COPY_IN: h2d_gb_per_s * BYTES_PER_MS_AT_1_GB_PER_S,
    }
    durations = [
        step_ms[op.step]
        if op.kind is OpKind.COMPUTE
        else sum(plan.trace.storages[index].nbytes for index in op.storages) / rates[op.kind]
        if op.kind in rates
        else 0.0
        for op in operations
    ]
    clock = _Clock(plan, operations, schedule.waits(operations, edges), durations)
    clock.run()
    starts = [ms for ms, op in zip(clock.starts, operations, strict=True) if _is_step(op)]
    on_device = device_bytes(plan.trace, schedule.storages)
    return Simulation(
        total_ms=max(clock.free_from),
        compute_ms=sum(step_ms),
        stalls=tuple(clock.stalls),
        d2h_busy_ms=clock.busy[Queue.D2H],
        h2d_busy_ms=clock.busy[Queue.H2D],
        memory=tuple(map(MemoryAt, starts, on_device, schedule.host_bytes)),
    )


def _is_step(operation: Operation) -> bool:
    return operation.kind is OpKind.COMPUTE


class _Clock:
    """Runs each queue's operations in order, each once those that it waits for have ended."""

    def __init__(
        self,
        plan: Plan,
        operations: Sequence[Operation],
        waits: Sequence[Sequence[int]],
        durations: Sequence[float],
    ) -> None:
        self._plan = plan
        self._operations = operations
        self._waits = waits
        self._durations = durations
        self._pending: list[deque[int]] = [deque() for _ in Queue]
        for index, operation in enumerate(operations):
            self._pending[operation.kind.queue].append(index)
        self.starts = [0.0] * len(operations)
        self._ends: list[float | None] = [None] * len(operations)
        self.free_from = [0.0 for _ in Queue]
        """For each queue, when what it has run so far ends."""
        self.busy = [0.0 for _ in Queue]
        self.stalls: list[SimulatedStall] = []

    def run(self) -> None:
        """Run all operations.

        Raises:
            PlanError: Those at the heads of the queues wait for each other.
        """
        while any(self._pending):
            if not any(self._run_queue(queue) for queue in Queue):
                heads = [self._operations[pending[0]] for pending in self._pending if pending]
                detail = ", ".join(f"{op.cause} ({op.kind.name})" for op in heads)
                detail = f"the queues stand still at {detail}"
                raise PlanError(Rule.NO_CYCLE, heads[0].cause, self._plan, detail)

    def _run_queue(self, queue: Queue) -> bool:
        """Run one queue as far as it comes. Says whether it came any further."""
        pending = self._pending[queue]
        has_run = False
        while pending:
            index = pending[0]
            ready = self.free_from[queue]
            for signal in self._waits[index]:
                end = self._ends[signal]
                if end is None:
                    return has_run
                ready = max(ready, end)
            if queue is Queue.COMPUTE and ready > self.free_from[queue]:
                cause = self._operations[index].cause
                self.stalls.append(SimulatedStall(cause, ready - self.free_from[queue]))
            self.starts[index] = ready
            self._ends[index] = self.free_from[queue] = ready + self._durations[index]
            self.busy[queue] += self._durations[index]
            pending.popleft()
            has_run = True
        return has_run
