# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Copies between host and device: the link's bandwidth, and an engine's use of it."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Optional

import torch
from megatron_models import use_gpu

from benchmarks.measure import wait_for_all
from megatron.slipstream.plan.trace import Bandwidth

BULK_BYTES = 1 << 20
"""Copies of at least this size count as activations; smaller ones are the model's own, such as a
dispatcher's token counts."""

BUFFER_BYTES = 256 << 20
NUM_COPIES = 20


def profile(run: Callable[[int], Any], iteration: int) -> Optional[dict[str, Any]]:
    """Return :func:`profile_fields` of one iteration under torch's profiler; None without a GPU."""
    if not use_gpu():
        return None
    from torch.profiler import ProfilerActivity, profile as torch_profile

    with torch_profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run(iteration)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return profile_fields(json.loads(path.read_text())["traceEvents"])


def profile_fields(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the fields of a summary row: an iteration's copies, if any, and time of its kernels.

    Args:
        events: A trace in Chrome's format, durations in us.
    """
    events = list(events)
    kernels = [(event["ts"], event["dur"]) for event in events if event.get("cat") == "kernel"]
    row: dict[str, Any] = {"kernel_ms": _covered(kernels) / 1e3}
    copies = [
        event
        for event in events
        if event.get("cat") == "gpu_memcpy" and re.search("DtoH|HtoD", event["name"])
    ]
    for name, kind in (("d2h", "DtoH"), ("h2d", "HtoD")):
        sizes = [(int(c["args"]["bytes"]), float(c["dur"])) for c in copies if kind in c["name"]]
        bulk = [copy for copy in sizes if copy[0] >= BULK_BYTES]
        small = [nbytes for nbytes, _ in sizes if nbytes < BULK_BYTES]
        bulk_bytes, bulk_ms = sum(nbytes for nbytes, _ in bulk), sum(us for _, us in bulk) / 1e3
        if copies:
            row |= {
                f"{name}_bulk_bytes": bulk_bytes,
                f"{name}_bulk_ms": bulk_ms,
                f"{name}_gb_per_s": bulk_bytes / bulk_ms / 1e6 if bulk_ms else None,
                f"{name}_num_small": len(small),
                f"{name}_small_bytes": sum(small),
            }
    return row


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the time covered by spans, each a start and a length."""
    covered, end = 0.0, float("-inf")
    for start, length in sorted(spans):
        stop = max(end, start + length)
        covered += stop - max(end, start)
        end = stop
    return covered


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
