# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""One rank of one case: started by ``benchmarks.run``, which reads its exit status and its rows."""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Optional

from benchmarks.cases import Case, Limits, Variant, engine_labels, short_name
from benchmarks.rows import RowWriter, finished, read_rows
from tools.shared_gpus import VARIABLE, share_a_gpu

EXIT_ENGINE_FAILED = 3
"""An engine failed and took the process with it; its row is written, so the rest can go on."""

VERSIONS = ("torch", "transformer-engine", "megatron-core", "megatron-slipstream")
ENVIRONMENT = (
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_DEVICE_MAX_COPY_CONNECTIONS",
    "NVTE_CPU_OFFLOAD_V1",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
    VARIABLE,
)


class Job(NamedTuple):
    """What a worker is to do."""

    case: Case
    variants: tuple[Variant, ...]
    engines: tuple[str, ...]
    options: Mapping[str, Any]
    """Options of ``OffloadConfig`` for every Slipstream engine."""
    limits: Limits
    rows: Path
    run: str
    command: str
    traces: Optional[Path] = None
    """Where the traces that our engine planned from go; None to keep none."""


def work(job: Job) -> int:
    """Measure what ``job`` asks for and its run does not have yet. Returns the exit status."""
    # megatron-core warns of each optional package that is not there, and of each GPTModel.
    warnings.simplefilter("ignore")
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    # Imported here, after the environment is as it must be.
    import torch
    from megatron_models import initialize, use_gpu

    from benchmarks.copies import measure_bandwidth
    from benchmarks.engines import BaseModel, release_host_memory
    from benchmarks.measure import wait_for_all
    from benchmarks.variant import EngineFailed, VariantRun

    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    writer = RowWriter(job.rows, job.run, job.traces)
    done = finished(read_rows(job.rows), job.run, job.case.name)
    initialize(job.case.model, rank, num_ranks, int(os.environ["MASTER_PORT"]))
    if use_gpu():
        from megatron.slipstream.integration import numa

        # As installing the engine does; before the first measurement, so that all have it alike.
        numa.bind_to_gpu(torch.cuda.current_device())
    bandwidth = None if share_a_gpu(num_ranks) else measure_bandwidth()
    release_host_memory()
    if rank == 0:
        writer.write(
            "machine",
            **machine_facts(),
            command=job.command,
            case=job.case.name,
            bandwidth=bandwidth._asdict() if bandwidth else None,
        )
    base = BaseModel(job.case)
    try:
        with progress_bar(job, is_shown=rank == 0) as show:
            for variant in job.variants:
                labels = engine_labels(variant, job.engines)
                labels = tuple(label for label in labels if (variant.name, label) not in done)
                if "off" in labels:
                    measured = VariantRun(base, variant, labels, job.options, writer, bandwidth)
                    measured.measure(job.limits, show(variant))
    except EngineFailed as error:
        sys.stderr.write(f"{job.case.name}: rank {rank}: engine {error} failed\n")
        return EXIT_ENGINE_FAILED
    wait_for_all()  # the first rank to go takes away what the others meet at
    return 0


def machine_facts() -> dict[str, Any]:
    """What the figures depend on: hardware, driver, versions, settings."""
    import torch

    versions = {}
    for name in VERSIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    versions["torch"] = torch.__version__
    has_gpu = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if has_gpu else "CPU",
        "num_devices": torch.cuda.device_count(),
        "driver": _driver_version() if has_gpu else None,
        "num_cpus": len(os.sched_getaffinity(0)),
        "versions": versions,
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
    }


def _driver_version() -> Optional[str]:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    # 'NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  ...'
    return next((word for word in text.split() if word[0].isdigit() and "." in word), None)


Show = Callable[[Variant], Callable[[int, str], None]]


@contextlib.contextmanager
def progress_bar(job: Job, is_shown: bool) -> Iterator[Show]:
    """Progress on stderr: a bar over variants and iterations on a terminal, else a line a variant.

    Yields what gives each variant its callback; see ``VariantRun.measure``.
    """
    if not is_shown:
        yield lambda variant: lambda num_rounds, text: None
    elif sys.stderr.isatty():
        with _terminal_bar(job) as show:
            yield show
    else:
        with _lines(job.case.name) as show:
            yield show


@contextlib.contextmanager
def _terminal_bar(job: Job) -> Iterator[Show]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[text]}", style="dim"),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        variants = progress.add_task(job.case.name, total=len(job.variants), text="variants")
        task = progress.add_task("", total=job.limits.max_iterations, text="")

        def show(variant: Variant) -> Callable[[int, str], None]:
            progress.update(variants, completed=job.variants.index(variant))
            progress.reset(task, description=short_name(variant.name), text="warming up")

            def on_round(num_rounds: int, text: str) -> None:
                progress.update(task, completed=num_rounds, text=text)

            return on_round

        yield show
        progress.update(variants, completed=len(job.variants))


@contextlib.contextmanager
def _lines(case: str) -> Iterator[Show]:
    """A line for each variant once the next begins, or the case ends."""
    last: list[str] = []

    def flush() -> None:
        for line in last:
            sys.stderr.write(line + "\n")
        last.clear()

    def show(variant: Variant) -> Callable[[int, str], None]:
        flush()

        def on_round(num_rounds: int, text: str) -> None:
            last[:] = [f"{case} {short_name(variant.name)}: {num_rounds} iterations, {text}"]

        return on_round

    try:
        yield show
    finally:
        flush()
