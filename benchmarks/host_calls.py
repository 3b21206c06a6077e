# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Measure the host time of the C++ engine alone: with cold caches, and in larger models.

    python -m benchmarks.host_calls --output FILE.jsonl
    python -m benchmarks.host_calls --device cuda --sizes 8x2 8x16 100x2 --output FILE.jsonl

Caches: between two calls of the engine the model makes thousands of others, after which the
processor's caches hold neither the engine's code nor its data. Here 48 MiB are written before each
call instead. A Python method and a torch call are timed likewise, as the minimum cost of a call.
All groups stay on the device.

Growth: the engine's host time per group, including calls from autograd, for several numbers of
layers and micro-batches. On a GPU the part in the driver and the allocator is shown too; without
one, Python makes the copies.
"""

from __future__ import annotations

import argparse
import logging
import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, Optional

import torch

from benchmarks.rows import RowWriter
from megatron.slipstream.fine_grained_activation_offload import tuner
from megatron.slipstream.fine_grained_activation_offload.backends import make_backend
from megatron.slipstream.fine_grained_activation_offload.manager import PipelineOffloadManager
from megatron.slipstream.fine_grained_activation_offload.native import native_module
from megatron.slipstream.plan.candidates import PolicyOptions
from megatron.slipstream.plan.progress_bar import bar_on_stderr

EVICTED_BYTES = 48 << 20
WIDTH = 32
NUM_LAYERS = 8
TOO_LARGE = 1 << 30
"""Minimum number of elements of a tensor to offload, so that all groups stay."""
KINDS = {"stay": (1, TOO_LARGE), "1 moves": (1, 1), "3 move": (3, 1)}
"""Number of storages of a group, and minimum number of elements of a tensor to offload."""
NUM_IN_FLIGHT = 4
"""Micro-batches between forward and backward."""
GROWTH = [(layers, batches) for layers in (8, 32, 100) for batches in (2, 8, 16)]
NUM_UNTIMED = 40
"""Iterations after which the plan is final."""

Row = dict[str, Any]


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


class Model:
    """Layers of one group each, and their engine.

    Args:
        num_layers: Number of layers.
        kind: Kind of each group, from :data:`KINDS`.
        device: ``"cpu"`` or ``"cuda"``.
    """

    def __init__(self, num_layers: int, kind: str, device: str) -> None:
        self._num_layers = num_layers
        self._num_storages, self._min_numel = KINDS[kind]
        self._device = device
        self.engine = PipelineOffloadManager(make_backend(device), PolicyOptions(), 0, 0, True)

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()

    def _forward(self, timer: Timer) -> torch.Tensor:
        engine = self.engine
        begin = engine.init_model_chunk_offload_handler
        timer("begin a pass", begin, 0, None, None, self._min_numel)
        x = torch.randn(WIDTH, WIDTH, device=self._device, requires_grad=True)
        for _ in range(self._num_layers):
            x = x * 1.0
            timer("start", engine.start_on, x, "core_attn")
            timer("enter", engine.__enter__)
            for _ in range(self._num_storages):
                x = x.sin()  # Saves its input.
            timer("leave", engine.__exit__)
            x = timer("end", engine.end_on, x, "core_attn")
        return x.sum()

    def iteration(self, num_micro_batches: int, timer: Timer) -> None:
        """Run an iteration of a pipeline stage."""
        losses: list[torch.Tensor] = []
        for _ in range(num_micro_batches):
            losses.append(self._forward(timer))
            if len(losses) == NUM_IN_FLIGHT:
                losses.pop(0).backward()
        for loss in losses:
            loss.backward()
        timer("reset", self.engine.reset)


class _Python:
    def method(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def _references(timer: Timer) -> None:
    tensor = torch.randn(WIDTH, WIDTH, requires_grad=True) * 1.0
    timer("a method in Python", _Python().method, tensor)
    timer("Tensor.detach", tensor.detach)


def measure_caches(num_iterations: int) -> Iterator[Row]:
    """Yield a row for each call with warm and with cold caches: the median and the quartiles.

    Args:
        num_iterations: Timed iterations with each.
    """
    model, timer = Model(NUM_LAYERS, "stay", "cpu"), Timer()

    def run(number: int) -> None:
        timer.us.clear()
        for _ in range(number):
            model.iteration(1, timer)
            _references(timer)

    run(NUM_UNTIMED)
    for timer.is_cold in (False, True):
        run(num_iterations)
        for name, us in timer.us.items():
            first, median, third = statistics.quantiles(us, n=4)
            row = {"table": "caches", "call": name, "is_cold": timer.is_cold, "us": median}
            yield {**row, "first_us": first, "third_us": third}
    model.close()


@contextmanager
def _times_in_cpp() -> Iterator[Callable[[], tuple[float, float]]]:
    """Yield a function that returns the engine's times in us since it was last called: in calls
    from autograd, and in the driver and the allocator.

    Raises:
        RuntimeError: The C++ engine is not available.
    """
    module = native_module()
    if module is None:
        raise RuntimeError("the engine's C++ cannot be compiled here; install a compiler")
    module.HostTime.is_taken = True
    try:
        yield lambda: tuple(1e-3 * ns for ns in module.HostTime.take())
    finally:
        module.HostTime.is_taken = False


def measure_growth(
    num_iterations: int, sizes: Sequence[tuple[int, int]], device: str
) -> Iterator[Row]:
    """Yield a row for each kind of group and each size.

    Args:
        num_iterations: Timed iterations of each.
        sizes: Numbers of layers and of micro-batches.
        device: ``"cpu"`` or ``"cuda"``.
    """
    for num_layers, num_micro_batches in sizes:
        for kind in KINDS:
            model, timer = Model(num_layers, kind, device), Timer()
            us, driver_us = [], []
            with _times_in_cpp() as take_times:
                for number in range(NUM_UNTIMED + num_iterations):
                    timer.us.clear()
                    take_times()
                    model.iteration(num_micro_batches, timer)
                    of_autograd, of_driver = take_times()
                    if number >= NUM_UNTIMED:
                        us.append(sum(map(sum, timer.us.values())) + of_autograd)
                        driver_us.append(of_driver)
            model.close()
            num_groups = num_layers * num_micro_batches
            yield {
                "table": "growth",
                "device": device,
                "groups": kind,
                "num_layers": num_layers,
                "num_micro_batches": num_micro_batches,
                "us_per_group": statistics.median(us) / num_groups,
                "driver_us_per_group": statistics.median(driver_us) / num_groups,
            }


def render(rows: Sequence[Row]) -> str:
    """Return both tables as Markdown."""
    caches = [row for row in rows if row["table"] == "caches"]
    growth = [row for row in rows if row["table"] == "growth"]
    calls = dict.fromkeys(row["call"] for row in caches)
    lines = ["| call | us, warm caches | us, cold caches |", "| --- | --- | --- |"]
    for call in calls:
        us = [
            f"{row['us']:.1f} [{row['first_us']:.1f}..{row['third_us']:.1f}]"
            for row in caches
            if row["call"] == call
        ]
        lines.append(f"| {call} | {' | '.join(us)} |")
    kinds = dict.fromkeys(row["groups"] for row in growth)
    heads = " | ".join(f"us a group, {kind}" for kind in kinds)
    lines += ["", f"| layers | micro-batches | {heads} |", "| --- | --- |" + " --- |" * len(kinds)]
    sizes = dict.fromkeys((row["num_layers"], row["num_micro_batches"]) for row in growth)
    for size in sizes:
        us = [
            f"{row['us_per_group']:.1f}"
            + (f" (driver {row['driver_us_per_group']:.1f})" if row["driver_us_per_group"] else "")
            for row in growth
            if (row["num_layers"], row["num_micro_batches"]) == size
        ]
        lines.append(f"| {size[0]} | {size[1]} | {' | '.join(us)} |")
    return "\n".join(lines) + "\n"


def _size(text: str) -> tuple[int, int]:
    """Parse a size such as ``"100x16"``: 100 layers and 16 micro-batches.

    Raises:
        argparse.ArgumentTypeError: The text is not two positive integers.
    """
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not LAYERSxBATCHES; give one such as 8x2")
    return int(found[1]), int(found[2])


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Print the tables, and write each row as soon as it is measured."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.host_calls",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--iterations", type=int, default=30, metavar="N", help="timed (default: %(default)s)"
    )
    parser.add_argument(
        "--device", default="cpu", choices=("cpu", "cuda"), help="of growth (default: %(default)s)"
    )
    parser.add_argument(
        "--sizes",
        type=_size,
        nargs="+",
        default=GROWTH,
        metavar="LAYERSxBATCHES",
        help="of growth: numbers of layers and of micro-batches, such as 100x16; on a GPU with a "
        "slow host all take 10 minutes (default: 8, 32 and 100 layers by 2, 8 and 16)",
    )
    parser.add_argument("--output", type=Path, metavar="FILE.jsonl", help="write the rows here")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.output is not None:
        options.output.unlink(missing_ok=True)  # The writer appends.
    writer = RowWriter(options.output, time.strftime("%Y-%m-%dT%H:%M:%S"))
    rows: list[Row] = []
    with ExitStack() as stack:
        # Suppress the warning that nothing moves: intended for the groups that stay.
        stack.callback(tuner.logger.setLevel, tuner.logger.level)
        tuner.logger.setLevel(logging.ERROR)
        bar = stack.enter_context(bar_on_stderr())
        task = bar.add_task("host calls", total=len(options.sizes) * len(KINDS))
        for row in chain(
            measure_caches(options.iterations),
            measure_growth(options.iterations, options.sizes, options.device),
        ):
            rows.append(row)
            bar.advance(task, row["table"] == "growth")
            writer.write("host_calls", **row)
    sys.stdout.write(render(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
