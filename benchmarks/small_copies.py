# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""How long a small copy to the host takes while a large one is under way.

``python -m benchmarks.small_copies [--output FILE.jsonl]`` on a machine with a GPU, in half a
minute. docs/design/overhead.md tells what follows from it.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Optional

import torch

from benchmarks.link_commands import machine_row, parser_of, write_rows
from megatron.slipstream.patches.d2h_by_kernel import D2HByKernel

MIB = 1 << 20
BULK_BYTES = 256 * MIB
PIECES_MIB = (256, 64, 16, 4, 1)
NUM_REPEATS = 30
HEAD_START_S = 0.0005
"""How long the large copy is under way when the small one is issued: it takes 4.6 ms in all."""


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the command. Returns 0, or 2 where there is no GPU."""
    options = parser_of("small_copies", __doc__).parse_args(arguments)
    return write_rows(_rows, options.output)


def _rows() -> Iterator[dict[str, Any]]:
    yield machine_row("python -m benchmarks.small_copies")
    bulk = _Bulk()
    for piece_mib in PIECES_MIB:
        yield {
            "kind": "bandwidth",
            "piece_mib": piece_mib,
            "d2h_gb_per_s": bulk.rate(lambda mib=piece_mib: bulk.to_host(mib)),
            "h2d_gb_per_s": bulk.rate(lambda mib=piece_mib: bulk.to_device(mib)),
        }
    low, high = torch.cuda.Stream.priority_range()
    copy = _by_copy_engine
    ways = {
        "copy, lowest priority": (copy, torch.cuda.Stream(priority=low)),
        "copy, highest priority": (copy, torch.cuda.Stream(priority=high)),
        "kernel": (D2HByKernel(copy), torch.cuda.Stream()),
    }
    for direction, piece_mib in [("none", 0), *(("d2h", p) for p in PIECES_MIB), ("h2d", 256)]:
        for name, (move, stream) in ways.items():
            times_us = [
                _small_copy_us(bulk, direction, piece_mib, move, stream) for _ in range(NUM_REPEATS)
            ]
            yield {
                "kind": "small copy",
                "bulk": direction,
                "piece_mib": piece_mib,
                "by": name,
                "median_us": statistics.median(times_us),
                "times_us": times_us,
            }


class _Bulk:
    """Large copies on a stream of their own, cut into pieces."""

    def __init__(self) -> None:
        self._device = torch.randint(0, 255, (BULK_BYTES,), dtype=torch.uint8, device="cuda")
        self._host = torch.empty(BULK_BYTES, dtype=torch.uint8, pin_memory=True)
        self._stream = torch.cuda.Stream()

    def to_host(self, piece_mib: int) -> None:
        self._copy(self._host, self._device, piece_mib * MIB)

    def to_device(self, piece_mib: int) -> None:
        self._copy(self._device, self._host, piece_mib * MIB)

    def rate(self, copy: Callable[[], None]) -> float:
        """The median rate of a few, in 1e9 bytes per second."""
        rates = []
        for _ in range(5):
            torch.cuda.synchronize()
            start_s = time.perf_counter()
            copy()
            torch.cuda.synchronize()
            rates.append(BULK_BYTES / (time.perf_counter() - start_s) / 1e9)
        return statistics.median(rates)

    def _copy(self, destination: torch.Tensor, source: torch.Tensor, piece: int) -> None:
        with torch.cuda.stream(self._stream):
            for start in range(0, BULK_BYTES, piece):
                part = slice(start, start + piece)
                destination[part].copy_(source[part], non_blocking=True)


def _by_copy_engine(tensor: torch.Tensor, **_: Any) -> torch.Tensor:
    return tensor.to("cpu", non_blocking=True)


def _small_copy_us(
    bulk: _Bulk, direction: str, piece_mib: int, move: Callable[..., Any], stream: Any
) -> float:
    """From the issue of a copy of 128 bytes until the host has them, in microseconds."""
    counts = torch.arange(16, device="cuda")
    torch.cuda.synchronize()
    if direction == "d2h":
        bulk.to_host(piece_mib)
    elif direction == "h2d":
        bulk.to_device(piece_mib)
    begin_s = time.perf_counter()
    while time.perf_counter() - begin_s < HEAD_START_S:
        pass
    start_s = time.perf_counter()
    with torch.cuda.stream(stream):
        moved = move(counts)
        stream.synchronize()
    elapsed_us = 1e6 * (time.perf_counter() - start_s)
    assert moved.tolist() == list(range(16))
    return elapsed_us


if __name__ == "__main__":
    sys.exit(main())
