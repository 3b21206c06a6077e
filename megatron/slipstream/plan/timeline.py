# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The timeline of a simulated iteration: the operations of each queue, stalls, and memory in use.

It is exported for Perfetto (https://ui.perfetto.dev) or chrome://tracing; ``report_page`` renders
the same as a web page. Names are the action strings of logs, NVTX ranges and errors, so that the
same text finds an action in the prediction and in a profile.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from megatron.slipstream.plan.actions import Plan
from megatron.slipstream.plan.edges import Queue
from megatron.slipstream.plan.walk import Simulation

QUEUE_NAMES = {Queue.COMPUTE: "compute", Queue.D2H: "D2H", Queue.H2D: "H2D"}
_PROCESS_ID = 0
_US_PER_MS = 1000.0


class DeviceMemory(NamedTuple):
    """Device memory from each step of a trace until the next, in bytes."""

    is_measured: bool
    """True for the allocator's peak between the steps; False if the trace has no memory readings,
    so that only saved storages count."""
    without_plan: tuple[int, ...]
    with_plan: tuple[int, ...]


def device_memory(plan: Plan) -> DeviceMemory:
    """Return device memory at each step, without and with a plan."""
    trace = plan.trace
    return DeviceMemory(bool(trace.memory), trace.present_bytes, plan.device_bytes)


def perfetto_json(plan: Plan, simulation: Simulation) -> bytes:
    """Export a simulated iteration in the Trace Event Format: a track per queue, then counters.

    Times are in microseconds, as the format requires. Each copy has its bytes and its bandwidth in
    GB/s as arguments; stalls are slices of the compute track.

    Args:
        plan: The plan.
        simulation: ``simulate(plan)``.
    """
    events = [*_metadata(), *_slices(simulation), *_stalls(simulation)]
    events += _counters(plan, simulation)
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}).encode()


def _metadata() -> Iterator[dict[str, Any]]:
    process = {"ph": "M", "pid": _PROCESS_ID}
    yield {**process, "name": "process_name", "args": {"name": "Slipstream plan, simulated"}}
    for queue, name in QUEUE_NAMES.items():
        thread = {**process, "tid": int(queue)}
        yield {**thread, "name": "thread_name", "args": {"name": name}}
        yield {**thread, "name": "thread_sort_index", "args": {"sort_index": int(queue)}}


def _slice(queue: Queue, start_ms: float, ms: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": _PROCESS_ID,
        "tid": int(queue),
        "ts": start_ms * _US_PER_MS,
        "dur": ms * _US_PER_MS,
    }


def _slices(simulation: Simulation) -> Iterator[dict[str, Any]]:
    for span in simulation.spans:
        ms = span.end_ms - span.start_ms
        args: dict[str, Any] = {"module": span.cause.name}
        if span.queue is not Queue.COMPUTE:
            args["bytes"] = span.nbytes
            if ms > 0:
                args["gb_per_s"] = round(span.nbytes / ms / 1e6, 3)
        event = _slice(span.queue, span.start_ms, ms)
        yield {**event, "name": span.action, "cat": span.cause.name, "args": args}


def _stalls(simulation: Simulation) -> Iterator[dict[str, Any]]:
    for stall in simulation.stalls:
        event = _slice(Queue.COMPUTE, stall.start_ms, stall.ms)
        # "terrible" is the format's name for red.
        yield {**event, "name": f"stall at {stall.cause}", "cat": "stall", "cname": "terrible"}


def _counters(plan: Plan, simulation: Simulation) -> Iterator[dict[str, Any]]:
    """Yield counter events; each value holds until the counter's next event."""
    on_device = device_memory(plan).with_plan
    for entry, nbytes in zip(simulation.memory, on_device, strict=True):
        event = {"ph": "C", "pid": _PROCESS_ID, "ts": entry.ms * _US_PER_MS}
        yield {**event, "name": "device bytes", "args": {"bytes": nbytes}}
        yield {**event, "name": "host bytes", "args": {"bytes": entry.host_bytes}}
