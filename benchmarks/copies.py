# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Copies between host and device: the link's bandwidth, and an engine's use of it."""

from __future__ import annotations

import functools
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import torch
from megatron_models import use_gpu

from benchmarks.measure import wait_for_all
from megatron.slipstream.fine_grained_activation_offload.backend import Bytes
from megatron.slipstream.fine_grained_activation_offload.backends import make_backend
from megatron.slipstream.plan.trace import Bandwidth

BULK_BYTES = 1 << 20
"""Copies of at least this size count as activations; smaller ones are the model's own, such as a
dispatcher's token counts."""

BUFFER_BYTES = 256 << 20
NUM_COPIES = 20


@dataclass(frozen=True)
class Direction:
    """An iteration's copies in one direction."""

    bulk_bytes: int
    bulk_ms: float
    """The sum of their durations."""
    num_bulk: int
    num_small: int
    small_bytes: int

    @property
    def num_copies(self) -> int:
        """Number of copies of any size."""
        return self.num_bulk + self.num_small

    @property
    def gb_per_s(self) -> Optional[float]:
        """Rate while bulk copies run; None if there are none."""
        return self.bulk_bytes / self.bulk_ms / 1e6 if self.bulk_ms else None


RECORD, WAIT = "cudaEventRecord", "cudaStreamWaitEvent"
NUM_TIMED_CALLS = 200


@dataclass(frozen=True)
class Profile:
    """An iteration's copies and driver calls."""

    d2h: Direction
    h2d: Direction
    num_calls: Mapping[str, int]
    call_us: Mapping[str, float]
    """Total host time in each kind of call."""
    kernel_ms: float
    """Time during which at least one kernel runs."""

    @property
    def engine_calls(self) -> dict[str, int]:
        """Number of calls of each kind that offloading engines make.

        Copies are counted on the device: the profiler does not see the driver's own call.
        """
        num_copies = self.d2h.num_copies + self.h2d.num_copies
        calls = dict.fromkeys((RECORD, WAIT), 0)
        for name, number in self.num_calls.items():
            for kind in calls:
                calls[kind] += number if name.startswith(kind) else 0
        return {"copy": num_copies, **calls}

    def fields(self) -> dict[str, Any]:
        """Return the fields of a summary row."""
        row: dict[str, Any] = {}
        directions = {"d2h": self.d2h, "h2d": self.h2d}
        if not any(way.bulk_bytes or way.num_small for way in directions.values()):
            directions = {}  # the profiler saw no copies, or there were none
        for name, way in directions.items():
            row |= {
                f"{name}_bulk_bytes": way.bulk_bytes,
                f"{name}_bulk_ms": way.bulk_ms,
                f"{name}_gb_per_s": way.gb_per_s,
                f"{name}_num_small": way.num_small,
                f"{name}_small_bytes": way.small_bytes,
            }
        row["kernel_ms"] = self.kernel_ms
        row["num_driver_calls"] = dict(self.num_calls)
        row["driver_us_per_call"] = {
            name: us / self.num_calls[name] for name, us in self.call_us.items()
        }
        return row


def profile(run: Callable[[int], Any], iteration: int) -> Optional[Profile]:
    """Run one iteration under torch's profiler; return None without a GPU."""
    if not use_gpu():
        return None
    from torch.profiler import ProfilerActivity, profile as torch_profile

    with torch_profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run(iteration)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return profile_of(events)


def profile_of(events: Iterable[Mapping[str, Any]]) -> Profile:
    """Return the copies and calls of a profiler's trace: Chrome-format events, durations in us."""
    events = list(events)
    copies = [event for event in events if event.get("cat") == "gpu_memcpy"]
    num_calls: Counter[str] = Counter()
    call_us: Counter[str] = Counter()
    for event in events:
        if event.get("cat") in ("cuda_runtime", "cuda_driver"):
            num_calls[event["name"]] += 1
            call_us[event["name"]] += event["dur"]
    kernels = [(event["ts"], event["dur"]) for event in events if event.get("cat") == "kernel"]
    directions = _direction(copies, "DtoH"), _direction(copies, "HtoD")
    return Profile(*directions, num_calls, call_us, _covered(kernels) / 1e3)


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the time covered by spans, each a start and a length."""
    covered, end = 0.0, float("-inf")
    for start, length in sorted(spans):
        stop = max(end, start + length)
        covered += stop - max(end, start)
        end = stop
    return covered


def _direction(events: Iterable[Mapping[str, Any]], name: str) -> Direction:
    copies = [
        (int(event["args"]["bytes"]), float(event["dur"]))
        for event in events
        if name in event["name"]
    ]
    bulk = [copy for copy in copies if copy[0] >= BULK_BYTES]
    small = [copy for copy in copies if copy[0] < BULK_BYTES]
    return Direction(
        sum(nbytes for nbytes, _ in bulk),
        sum(us for _, us in bulk) / 1e3,
        len(bulk),
        len(small),
        sum(nbytes for nbytes, _ in small),
    )


@functools.cache
def call_costs_us() -> dict[str, float]:
    """Return the host time of one call of each kind, without any other work."""
    backend = make_backend("auto")
    stream = backend.new_stream()
    device = torch.device("cuda" if use_gpu() else "cpu")
    host = backend.allocate_host(BULK_BYTES)
    copy = (Bytes.of(host), Bytes(backend.allocate_device(BULK_BYTES, device), 0, BULK_BYTES))
    event = backend.record(stream)
    calls: dict[str, Callable[[], object]] = {
        "copy": lambda: backend.run_copies([copy], stream),
        RECORD: lambda: backend.record(stream),
        WAIT: lambda: backend.wait(stream, event),
    }
    costs = {}
    for kind, call in calls.items():
        call()  # the first one may take longer
        backend.wait_on_host(stream)
        begin_s = time.perf_counter()
        for _ in range(NUM_TIMED_CALLS):
            call()
        costs[kind] = 1e6 * (time.perf_counter() - begin_s) / NUM_TIMED_CALLS
        backend.wait_on_host(stream)
    backend.free_host(host)
    return costs


def measure_bandwidth() -> Optional[Bandwidth]:
    """Measure the rates of pinned copies, on all ranks at once; return None without a GPU."""
    if not use_gpu():
        return None
    wait_for_all()
    host = [torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    device = [torch.empty(BUFFER_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2)]
    out, back = (host[0], device[0]), (device[1], host[1])
    _rates([out, back])  # the first copies touch the memory
    (d2h,), (h2d,) = _rates([out]), _rates([back])
    d2h_both, h2d_both = _rates([out, back])
    return Bandwidth(d2h, h2d, d2h_both, h2d_both)


def _rates(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> list[float]:
    """Return the GB/s of copies into each pair's first tensor from its second, all at once."""
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in pairs]
    spans = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in pairs]
    for stream, (start, _) in zip(streams, spans, strict=True):
        start.record(stream)
    for _ in range(NUM_COPIES):
        for stream, (destination, source) in zip(streams, pairs, strict=True):
            with torch.cuda.stream(stream):
                destination.copy_(source, non_blocking=True)
    for stream, (_, stop) in zip(streams, spans, strict=True):
        stop.record(stream)
    torch.cuda.synchronize()
    return [NUM_COPIES * BUFFER_BYTES / start.elapsed_time(stop) / 1e6 for start, stop in spans]
