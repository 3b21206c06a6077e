# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""``slipstream plan --longest-sequence`` and ``--largest-micro-batch``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Optional

from megatron.slipstream.cli_plan.models import limit_bytes, speed_for
from megatron.slipstream.cli_plan.options import AIMS, SEARCH, flag_of, refuse
from megatron.slipstream.estimate import ways
from megatron.slipstream.estimate.gpus import Speed
from megatron.slipstream.estimate.model_state import host_state_bytes
from megatron.slipstream.estimate.shape_tables import table
from megatron.slipstream.estimate.training_setup import Configured
from megatron.slipstream.plan.assignments import Limits
from megatron.slipstream.plan.progress_bar import bar_on_stderr
from megatron.slipstream.plan.render import format_bytes

NOTHING_FITS = 3
"""Exit status if no size fits with any way."""

DEFAULT_MARGIN_SHARE = 0.02
"""Share of the device memory for the CUDA context and fragmentation: an H100 whose driver shows
80 GiB ran what needs 77.7 (benchmarks)."""

_TITLES = {"off": "off", "selective": "selective recomputation", "full": "full recomputation",
           "built-in": "built-in engine", "budget": "memory budget"}  # fmt: skip
_WALLS = {"state": "state", "layers": "layers' saved bytes", "backward": "backward of one layer",
          "logits": "logits and loss", ways.HOST: "host memory", "": "none"}  # fmt: skip


Fits = Mapping[str, ways.Fit]
"""The largest size with each way."""


def prepare_search(options: argparse.Namespace) -> bool:
    """Return whether to search the largest size that fits; ``ValueError`` if options disagree."""
    asked = [name for name in SEARCH[:2] if getattr(options, name)]
    if not asked:
        limits = [name for name in SEARCH[2:] if name != "host_memory" or not options.frontier]
        where = "without --longest-sequence or --largest-micro-batch"
        refuse(options, limits, where, "it limits their search only", "set one of them, or ")
        return False
    why = "that compares ways instead of planning one"
    refuse(options, AIMS, f"with {flag_of(asked[0], options)}", why)
    if options.longest_sequence and options.hf_config is not None and options.seq_length is None:
        tp, cp = options.tensor_model_parallel_size, options.context_parallel_size
        options.seq_length = ways.STEP_TOKENS * (cp or 1) * (tp or 1)
    return True


def show_fits(configured: Configured, options: argparse.Namespace) -> int:
    """Search the largest size for each way, show the answer, and return the exit status."""
    speed = speed_for(configured, options)
    is_default = options.hf_config is not None and options.num_micro_batches is None
    if is_default and configured.shape.parallelism.pp == 1:
        configured = replace(configured, num_micro_batches=1)
    finder = finder_for(configured, speed, options)
    with bar_on_stderr() as progress:
        searched = progress.track(ways.WAYS, description="searching")
        fits = {way: finder.fit(way) for way in searched}
    sys.stdout.writelines(f"{line}\n" for line in _lines(fits, finder, options))
    return 0 if any(fit.size for fit in fits.values()) else NOTHING_FITS


def finder_for(configured: Configured, speed: Speed, options: argparse.Namespace) -> ways.Finder:
    """Return the search for what fits into the memory that the options name."""
    memory = speed.memory_gib
    margin = memory * DEFAULT_MARGIN_SHARE if options.margin is None else options.margin
    limit_bytes("--memory", memory)
    host = limit_bytes("--host-memory", options.host_memory)
    if not 0 <= margin < memory:
        raise ValueError(f"--margin={margin} must be from 0 to less than the memory's {memory:g}")
    par = configured.shape.parallelism
    if host is not None:
        optimizer = max(host_state_bytes(configured.shape, rank) for rank in range(par.pp))
        if 0 < host <= optimizer:
            raise ValueError(
                f"--host-memory={options.host_memory} is not supported with optimizer_cpu_offload "
                f"because its state takes {format_bytes(optimizer)} there; set more, or leave it "
                "out"
            )
        host -= optimizer
    searched, step = "micro_batch_size", 1
    if not options.largest_micro_batch:
        searched = "seq_length"
        step = ways.STEP_TOKENS * par.cp * (par.tp if par.sequence_parallel else 1)
    limits = Limits(int((memory - margin) * 2**30), host)
    return ways.Finder(configured, speed, limits, searched, step)


def _lines(fits: Fits, finder: ways.Finder, options: argparse.Namespace) -> Iterator[str]:
    unit = "sequences" if options.largest_micro_batch else "tokens"
    budget = fits[ways.BUDGET]
    common = fits[ways.FULL].size or budget.size
    if options.longest_sequence and "seq_length" in options.typed:
        common = options.seq_length
    yield _sentence(fits, unit, finder)
    yield ""
    yield from _table(fits, common, unit, finder)
    if budget.found is not None:
        flags = " ".join(["--activation-memory-budget auto", *budget.found.tiles.flags])
        yield f"For the last row, train with {flags}"
    yield _assumptions(finder)
    if not options.details:
        yield "--details shows what each way does and what fills the device"
        return
    for way, fit in fits.items():
        text = fit.found.describe() if fit.found else "does not fit"
        yield f"\n{_TITLES[way]}, {fit.size:,} {unit}: {text}"
        yield from _details(fit)


def _sentence(fits: Fits, unit: str, finder: ways.Finder) -> str:
    budget = fits[ways.BUDGET]
    name, count = finder.speed.name, finder.configured.shape.parallelism.num_gpus
    gpus = f"one {name} GPU" if count == 1 else f"{count} {name} GPUs"
    start = f"{finder.configured.title} on {gpus}"
    if budget.found is None:
        beyond = "" if budget.beyond is None else (
            f": {finder.step} would take {format_bytes(budget.beyond.parts.total)} of "
            f"{format_bytes(finder.limits.device_bytes)}, of which state "
            f"{format_bytes(budget.beyond.parts.state)}"
        )  # fmt: skip
        return f"{start}: no size fits{beyond}; divide the model further (--pp, --tp, --dp)"
    others = ", ".join(
        f"{_TITLES[way]} {fit.size:,}{' at most' * (way == ways.BUILT_IN)}"
        for way, fit in fits.items()
        if way != ways.BUDGET
    )
    return f"{start}: {budget.size:,} {unit} with a memory budget; {others}"


def _table(fits: Fits, common: int, unit: str, finder: ways.Finder) -> Iterator[str]:
    at = f"step at {common:,}" if common else "step"
    rows = [["way", unit, "step", "tokens/s", "device", "host", at, "tokens/s", "wall"]]
    for way, fit in fits.items():
        there = finder.at(way, common) if common else None
        rows.append([_TITLES[way], f"{fit.size:,}", *_cells(fit.found), *_cells(there)[:2],
                     _WALLS[fit.wall]])  # fmt: skip
    return table(rows, left=(0, -1))


def _cells(found: Optional[ways.Iteration]) -> list[str]:
    """Return the step time, tokens/s, and the device and host memory, or dashes."""
    if found is None:
        return ["-"] * 4
    times = [f"{found.step_ms / 1e3:.3g} s", f"{found.tokens_per_s:,.0f}"]
    return [*times, format_bytes(found.usage.parts.total), format_bytes(found.usage.host_bytes)]


def _assumptions(finder: ways.Finder) -> str:
    limits, count = finder.limits, finder.configured.num_micro_batches
    host = "not limited (--host-memory)"
    if limits.host_bytes is not None:
        host = format_bytes(limits.host_bytes)
    device = f"{format_bytes(limits.device_bytes)} ({finder.speed.memory_gib:g} GiB"
    return (
        f"Device memory {device} less a margin for context and fragmentation, --margin), "
        f"host memory of a rank {host}. Steps of {count} micro-batch{'es' if count > 1 else ''}; "
        "tokens/s per GPU. Memory is what is allocated: the built-in engine reserves more, so its "
        "size is an upper limit."
    )


def _details(fit: ways.Fit) -> Iterator[str]:
    peak = fit.found.usage if fit.found else None
    for what, usage in (("peak", peak), ("next size", fit.beyond)):
        if usage is not None:
            sizes = usage.parts._asdict().items()
            parts = [f"{name} {format_bytes(size)}" for name, size in sizes if size]
            yield f"  {what}: {', '.join(parts)}; host {format_bytes(usage.host_bytes)}"
