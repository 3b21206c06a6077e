# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A simulated iteration as a Perfetto trace, and a frontier as a picture: nothing is lost."""

from __future__ import annotations

import builtins
import dataclasses
import json
import struct
from collections import Counter
from typing import Any

import pytest
from make_trace import Model, one_f_one_b, trace_of

from megatron.slipstream.estimate.frontier import frontier_png, sweep
from megatron.slipstream.plan.actions import Plan
from megatron.slipstream.plan.build import build_plan
from megatron.slipstream.plan.candidates import PolicyOptions
from megatron.slipstream.plan.edges import Queue
from megatron.slipstream.plan.timeline import device_memory, perfetto_json
from megatron.slipstream.plan.trace import Bandwidth, MemoryReading, Trace
from megatron.slipstream.plan.walk import simulate

MB = 10**6
MODEL = Model(4, ("core_attn", "moe_act"), nbytes={f"own {i}": MB for i in range(8)})


def measured(trace: Trace, ms: float = 1.0) -> Trace:
    """With times and bandwidth at which some copies are late."""
    bandwidth = Bandwidth(0.7, 0.7, 0.4, 0.4)
    return dataclasses.replace(trace, step_ms=(ms,) * len(trace.steps), bandwidth=bandwidth)


def with_readings(trace: Trace) -> Trace:
    """A device whose memory grows by 100 MB per step, measured while 1 MB was offloaded."""
    memory = (MemoryReading(99 * MB + i, 100 * MB + i, MB) for i in range(len(trace.steps)))
    return dataclasses.replace(trace, memory=tuple(memory))


def late_plan() -> Plan:
    """A plan made without times, so its copies may be late."""
    plan = build_plan(trace_of(one_f_one_b(2, 0, 3), MODEL), PolicyOptions())
    return dataclasses.replace(plan, trace=measured(plan.trace))


PLAN = late_plan()


def events(plan: Plan) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(perfetto_json(plan, simulate(plan)))["traceEvents"]
    return found


def test_there_is_a_track_for_each_queue() -> None:
    names = {e["tid"]: e["args"]["name"] for e in events(PLAN) if e["name"] == "thread_name"}
    assert names == {0: "compute", 1: "D2H", 2: "H2D"}


def test_slices_are_the_spans_and_the_stalls() -> None:
    simulation = simulate(PLAN)
    assert simulation.stalls
    slices = [event for event in events(PLAN) if event["ph"] == "X"]
    assert Counter((e["tid"], e["name"], e["ts"]) for e in slices) == Counter(
        [(int(span.queue), span.action, span.start_ms * 1e3) for span in simulation.spans]
        + [(0, f"stall at {stall.cause}", stall.start_ms * 1e3) for stall in simulation.stalls]
    )


def test_slices_of_a_track_do_not_overlap_and_fill_compute() -> None:
    for queue in Queue:
        slices = [e for e in events(PLAN) if e["ph"] == "X" and e["tid"] == queue]
        slices.sort(key=lambda event: event["ts"])
        for event, following in zip(slices, slices[1:], strict=False):
            end = event["ts"] + event["dur"]
            assert end <= following["ts"] + 1e-6
            # Compute either computes or stalls.
            assert queue is not Queue.COMPUTE or end == pytest.approx(following["ts"])


def test_copies_say_how_many_bytes_they_move() -> None:
    copies = [e for e in events(PLAN) if e["ph"] == "X" and e["tid"] != Queue.COMPUTE]
    assert sum(event["args"]["bytes"] for event in copies) == 2 * PLAN.moved_nbytes
    for event in copies:
        assert event["args"]["gb_per_s"] == pytest.approx(
            event["args"]["bytes"] / event["dur"] / 1e3, abs=1e-3
        )
        assert event["name"].endswith((":D2H", ":H2D"))


def test_counters_are_the_memory_at_each_step() -> None:
    simulation = simulate(PLAN)
    counters = [event for event in events(PLAN) if event["ph"] == "C"]
    device = [e["args"]["bytes"] for e in counters if e["name"] == "device bytes"]
    host = [e["args"]["bytes"] for e in counters if e["name"] == "host bytes"]
    assert device == [entry.device_bytes for entry in simulation.memory]
    assert host == [entry.host_bytes for entry in simulation.memory]


def test_device_memory_is_what_was_measured_if_anything_was() -> None:
    plan = build_plan(with_readings(PLAN.trace), PolicyOptions())
    memory = device_memory(plan)
    assert memory.is_measured
    assert not device_memory(PLAN).is_measured
    # Bytes that were offloaded during the measurement are added.
    assert memory.without_plan[:2] == (101 * MB, 101 * MB + 1)
    assert (max(memory.without_plan), max(memory.with_plan)) == plan.peak_bytes()


# --- pictures -------------------------------------------------------------------------------------


def png_size(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", png[16:24])
    return width, height


@pytest.mark.parametrize("trace", [PLAN.trace, with_readings(PLAN.trace)])
def test_a_frontier_has_a_picture(trace: Trace) -> None:
    pytest.importorskip("matplotlib")
    assert png_size(frontier_png(sweep(trace, PolicyOptions(), num_points=3)))[0] > 800


def test_a_frontier_without_overhead_has_a_picture() -> None:
    pytest.importorskip("matplotlib")
    fast = dataclasses.replace(PLAN.trace, bandwidth=Bandwidth(*[1e6] * 4))
    assert png_size(frontier_png(sweep(fast, PolicyOptions(), num_points=3)))[0] > 800


def test_without_matplotlib_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match="pip install matplotlib, or write a"):
        frontier_png(sweep(PLAN.trace, PolicyOptions(), num_points=2))
