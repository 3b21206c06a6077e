# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""What copies alone cost a step: with no engine, and large copies under way from end to end.

``python -m benchmarks.background_copies --case moe [--output FILE.jsonl]`` on a machine with a GPU,
in about half a minute. No engine that uses the link can do better than that for the time that it
copies; docs/design/overhead.md tells what follows from it.
"""

from __future__ import annotations

import gc
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Optional

import torch

from benchmarks.cases import find_case
from benchmarks.engines import BaseModel
from benchmarks.figures import overhead_percent, spread_of
from benchmarks.link_commands import machine_row, parser_of, write_rows
from benchmarks.measure import without_garbage_collection
from benchmarks.models import initialize
from megatron.slipstream.patches import table
from megatron.slipstream.patches.table import Feature

PIECE_BYTES = 256 << 20
MIN_GB_PER_S = 60
"""More than the link reaches, so that the copies outlast the step."""
NUM_WARMUPS = 4
DIRECTIONS: dict[str, tuple[str, ...]] = {
    "none": (),
    "d2h": ("d2h",),
    "h2d": ("h2d",),
    "both": ("d2h", "h2d"),
}


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the command. Returns 0, or 2 where there is no GPU or no such case."""
    parser = parser_of("background_copies", __doc__)
    parser.add_argument("--case", default="moe", metavar="NAME", help="default: %(default)s")
    parser.add_argument("--iterations", type=int, default=20, metavar="N", help="of each direction")
    options = parser.parse_args(arguments)
    return write_rows(lambda: _rows(options.case, options.iterations), options.output)


def _rows(case_name: str, num_iterations: int) -> Iterator[dict[str, Any]]:
    case = find_case(case_name)
    initialize(case.model)
    # Token counts go by a kernel, as with our engine: they are not to queue behind the copies.
    table.apply(Feature.ENGINE_ON_GPU)
    base = BaseModel(case)
    yield machine_row(f"python -m benchmarks.background_copies --case {case.name}")
    background = _Background()

    def step_ms(iteration: int, direction: str, copies_ms: float) -> float:
        gc.collect()
        torch.cuda.synchronize()
        start = torch.cuda.Event(enable_timing=True)
        stop = torch.cuda.Event(enable_timing=True)
        for way in DIRECTIONS[direction]:
            background.start(way, copies_ms)
        start.record()
        base.run(base.chunks, iteration)
        stop.record()
        stop.synchronize()
        outlasted = background.is_busy(DIRECTIONS[direction])
        torch.cuda.synchronize()
        if not outlasted:
            raise RuntimeError("the copies ended before the step did: their cost is not measured")
        return start.elapsed_time(stop)

    with without_garbage_collection():
        for iteration in range(NUM_WARMUPS):
            alone_ms = step_ms(iteration, "none", 0.0)
        measured: dict[str, list[float]] = {direction: [] for direction in DIRECTIONS}
        for iteration in range(num_iterations):
            for direction, times in measured.items():
                times.append(step_ms(iteration, direction, 1.5 * alone_ms))
    for direction, times in measured.items():
        overhead = overhead_percent(times, measured["none"])
        yield {
            "kind": "step",
            "case": base.case.name,
            "background": direction,
            "median_ms": statistics.median(times),
            "interquartile_ms": spread_of(times).interquartile,
            "overhead_percent": overhead.median,
            "overhead_percent_standard_error": overhead.standard_error,
            "times_ms": times,
        }


class _Background:
    """Copies one after the other on a stream for each direction."""

    def __init__(self) -> None:
        self._streams = {way: torch.cuda.Stream() for way in ("d2h", "h2d")}
        self._copies: dict[str, Callable[[], object]] = {}
        for way in self._streams:
            device = torch.zeros(PIECE_BYTES, dtype=torch.uint8, device="cuda")
            host = torch.zeros(PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
            target, source = (host, device) if way == "d2h" else (device, host)
            self._copies[way] = lambda target=target, source=source: target.copy_(
                source, non_blocking=True
            )

    def start(self, way: str, duration_ms: float) -> None:
        """Put copies for at least ``duration_ms`` into the stream."""
        with torch.cuda.stream(self._streams[way]):
            for _ in range(int(duration_ms * MIN_GB_PER_S * 1e6 / PIECE_BYTES) + 1):
                self._copies[way]()

    def is_busy(self, ways: Sequence[str]) -> bool:
        """Whether copies of each of the directions are still under way."""
        return not any(self._streams[way].query() for way in ways)


if __name__ == "__main__":
    sys.exit(main())
