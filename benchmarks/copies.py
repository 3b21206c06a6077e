# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""An engine's copies between host and device, as the profiler sees them."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Optional

import torch
from megatron_models import use_gpu

BULK_BYTES = 1 << 20
"""Copies of at least this size count as activations; smaller ones are the model's own, such as a
dispatcher's token counts."""


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
