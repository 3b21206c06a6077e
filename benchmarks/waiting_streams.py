# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""What large copies reach while other streams wait.

``python -m benchmarks.waiting_streams [--output FILE.jsonl]`` on a machine with a GPU, in half a
minute. A stream that waits for a copy, others that wait for that one: so it is in a model of
experts, whose matrix products go into several streams at once while what they need is not there
yet. docs/design/overhead.md tells what follows from it.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Optional

import torch

from benchmarks.link_commands import machine_row, parser_of, write_rows

MIB = 1 << 20
PIECE_BYTES = 256 * MIB
NUM_PIECES = 4
NUM_REPEATS = 15
NUMS_WAITING = (0, 1, 2, 3, 4, 5, 6, 8, 12, 16)
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
"""How many hardware queues the driver spreads streams over, 8 by default."""


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the command. Returns 0, or 2 where there is no GPU."""
    options = parser_of("waiting_streams", __doc__).parse_args(arguments)
    return write_rows(_rows, options.output)


def _rows() -> Iterator[dict[str, Any]]:
    connections = os.environ.get(CONNECTIONS)
    prefix = "" if connections is None else f"{CONNECTIONS}={connections} "
    yield machine_row(f"{prefix}python -m benchmarks.waiting_streams")
    copies = _Copies()
    rates: dict[tuple[str, int], list[float]] = {
        (way, num_waiting): [] for way in ("d2h", "h2d") for num_waiting in NUMS_WAITING
    }
    for way in ("d2h", "h2d"):
        copies.gb_per_s(way, max(NUMS_WAITING))  # The first of each makes what the driver needs.
    # In turn, so that whatever drifts meets all of them.
    for _ in range(NUM_REPEATS):
        for (way, num_waiting), found in rates.items():
            found.append(copies.gb_per_s(way, num_waiting))
    for (way, num_waiting), found in rates.items():
        yield {
            "kind": "bandwidth",
            "direction": way,
            "num_waiting": num_waiting,
            "median_gb_per_s": statistics.median(found),
            "gb_per_s": found,
        }


class _Copies:
    """Large copies on a stream of their own, and streams that wait for them."""

    def __init__(self) -> None:
        self._device = torch.zeros(PIECE_BYTES, dtype=torch.uint8, device="cuda")
        self._host = torch.zeros(PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
        self._stream = torch.cuda.Stream()
        self._waiting = [torch.cuda.Stream() for _ in range(max(NUMS_WAITING))]
        self._work = [torch.zeros(1, device="cuda") for _ in self._waiting]

    def gb_per_s(self, way: str, num_waiting: int) -> float:
        """What copies one way (``d2h``, ``h2d``) reach, in 1e9 bytes per second."""
        target, source = self._host, self._device
        if way == "h2d":
            target, source = source, target
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            start.record()
            for _ in range(NUM_PIECES):
                target.copy_(source, non_blocking=True)
            stop.record()
        # The first one waits for the copies, the others wait for what the first does then.
        awaited = stop
        for number in range(num_waiting):
            with torch.cuda.stream(self._waiting[number]):
                torch.cuda.current_stream().wait_event(awaited)
                self._work[number].add_(1)
                if number == 0:
                    awaited = torch.cuda.Event()
                    awaited.record()
        torch.cuda.synchronize()
        return NUM_PIECES * PIECE_BYTES / start.elapsed_time(stop) / 1e6


if __name__ == "__main__":
    sys.exit(main())
