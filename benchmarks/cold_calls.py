# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Host time of the engine's calls with warm and with cold caches.

    python -m benchmarks.cold_calls --output FILE.jsonl

Between two calls of the engine the model makes thousands of others, after which the processor's
caches hold neither the engine's code nor its data. Here 48 MiB are written before each call
instead. A method in Python and a call of torch are timed likewise: the least that calls cost. All
groups stay. Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Optional

import torch

from megatron.slipstream.fine_grained_activation_offload.backends import make_backend
from megatron.slipstream.fine_grained_activation_offload.manager import PipelineOffloadManager
from megatron.slipstream.plan.candidates import PolicyOptions

EVICTED_BYTES = 48 << 20
NUM_LAYERS, WIDTH = 8, 64
NUM_UNTIMED = 40
"""Iterations before the timed ones: the plan is then made."""
TOO_LARGE = 1 << 30
"""Elements of the least tensor that moves: all groups stay, so that no time is that of copies."""


class Timer:
    """Times calls, by name."""

    def __init__(self) -> None:
        self.is_cold = False
        self.us: defaultdict[str, list[float]] = defaultdict(list)
        self._evicting = torch.zeros(EVICTED_BYTES, dtype=torch.uint8)

    def __call__(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call and time ``function``."""
        if self.is_cold:
            self._evicting.add_(1)
        start_s = time.perf_counter()
        result = function(*arguments)
        self.us[name].append(1e6 * (time.perf_counter() - start_s))
        return result


def _iteration(
    manager: PipelineOffloadManager, layers: Sequence[torch.nn.Module], timer: Timer
) -> None:
    timer("begin a pass", manager.init_model_chunk_offload_handler, 0, None, None, TOO_LARGE)
    x = torch.randn(WIDTH, WIDTH, requires_grad=True)
    for layer in layers:
        x = x * 1.0
        timer("start", manager.start_on, x, "core_attn")
        timer("enter", manager.__enter__)
        x = layer(x).relu()
        timer("leave", manager.__exit__)
        x = timer("end", manager.end_on, x, "core_attn")
    x.sum().backward()
    timer("reset", manager.reset)


class _Python:
    def method(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def _references(timer: Timer) -> None:
    tensor = torch.randn(WIDTH, WIDTH, requires_grad=True) * 1.0
    timer("a method in Python", _Python().method, tensor)
    timer("Tensor.detach", tensor.detach)


def measure(num_iterations: int) -> list[dict[str, Any]]:
    """A row for each call, with warm and with cold caches: the median and the quartiles.

    Args:
        num_iterations: Timed iterations with either.
    """
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)]
    options = (PolicyOptions(), 0, 0, True)
    manager = PipelineOffloadManager(make_backend("cpu"), *options)
    timer = Timer()

    def run(number: int) -> None:
        timer.us.clear()
        for _ in range(number):
            _iteration(manager, layers, timer)
            _references(timer)

    run(NUM_UNTIMED)
    rows: list[dict[str, Any]] = []
    for timer.is_cold in (False, True):
        run(num_iterations)
        for name, us in timer.us.items():
            first, median, third = statistics.quantiles(us, n=4)
            quartiles = {"first_us": first, "third_us": third}
            rows.append({"call": name, "is_cold": timer.is_cold, "us": median, **quartiles})
    manager.close()
    return rows


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Print the table, and write the rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cold_calls", description=__doc__)
    parser.add_argument(
        "--iterations", type=int, default=100, metavar="N", help="timed (default: %(default)s)"
    )
    parser.add_argument("--output", type=Path, metavar="FILE.jsonl", help="write the rows here")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = measure(options.iterations)
    warm, cold = (
        {row["call"]: row for row in rows if row["is_cold"] is it} for it in (False, True)
    )
    sys.stdout.write("| call | us, warm | us, cold |\n| --- | --- | --- |\n")
    for name in warm:
        us = (
            f"{row['us']:.1f} [{row['first_us']:.1f}..{row['third_us']:.1f}]"
            for row in (warm[name], cold[name])
        )
        sys.stdout.write(f"| {name} | {' | '.join(us)} |\n")
    if options.output is not None:
        options.output.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
