# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""One rank of one case: started by ``benchmarks.run``, which reads its exit status and its rows."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import logging
import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

from benchmarks.case import Case, Limits, Variant, short_name, way_labels
from benchmarks.rows import RowWriter, finished, read_rows
from tools.shared_gpus import VARIABLE, share_a_gpu

if TYPE_CHECKING:
    from benchmarks.ways import Comparison
    from megatron.slipstream.plan.trace import Bandwidth

EXIT_WAY_FAILED = 3
"""A way failed and ended the process; its row is written, so the rest can still be measured."""

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
    """The task of a worker."""

    case: Case
    variants: tuple[Variant, ...]
    engines: tuple[str, ...]
    options: Mapping[str, Any]
    """Options of ``OffloadConfig`` for every Slipstream engine."""
    limits: Limits
    rows: Path
    run: str
    arguments: tuple[str, ...]
    """Arguments of the command."""


def work(job: Job) -> int:
    """Measure what ``job`` asks for and its run lacks; return the exit status."""
    # megatron-core warns about each missing optional package and each GPTModel.
    warnings.simplefilter("ignore")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    # Imported here, once the environment is set up.
    from megatron_models import initialize

    from benchmarks.measure import release_host_memory, wait_for_all
    from benchmarks.variant import VariantRun, WayFailed

    case = job.case
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    writer = RowWriter(job.rows, job.run)
    done = finished(read_rows(job.rows), job.run, case.name)
    initialize(case.model, rank, num_ranks, int(os.environ["MASTER_PORT"]))
    bandwidth = None if share_a_gpu(num_ranks) else _bandwidth()
    release_host_memory()
    if rank == 0:
        writer.write(
            "machine",
            **machine_facts(),
            command=" ".join(["python -m benchmarks.run", *job.arguments]),
            case=case.name,
            bandwidth=bandwidth._asdict() if bandwidth else None,
        )
    module = importlib.import_module(f"benchmarks.{case.comparison}")
    comparison: Comparison = module.Comparison(case)
    try:
        for variant in job.variants:
            labels = way_labels(case, variant, job.engines)
            first = labels[0]
            labels = tuple(label for label in labels if (variant.name, label) not in done)
            if first not in labels:
                continue
            result = VariantRun(
                case, comparison, variant, labels, job.options, writer, bandwidth
            ).measure(job.limits)
            if rank == 0:
                sys.stderr.write(f"{case.name} {short_name(variant.name)}: {result}\n")
    except WayFailed as error:
        sys.stderr.write(f"{case.name}: rank {rank}: {error} failed\n")
        return EXIT_WAY_FAILED
    wait_for_all()  # a rank that exits early breaks the others' rendezvous
    return 0


def _bandwidth() -> Optional[Bandwidth]:
    """Measure the rates of pinned copies, on all ranks at once; return None without a GPU."""
    import torch

    from benchmarks.measure import wait_for_all
    from megatron.slipstream.doctor.bandwidth import measure_bandwidth
    from megatron.slipstream.fine_grained_activation_offload.cuda_backend import CudaBackend

    if not torch.cuda.is_available():
        return None
    wait_for_all()
    return measure_bandwidth(CudaBackend())


def machine_facts() -> dict[str, Any]:
    """Return the environment of the measurements: hardware, driver, versions, settings."""
    import torch

    from megatron.slipstream.doctor.facts import driver_version

    versions = {}
    for name in VERSIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    versions["torch"] = torch.__version__
    has_gpu = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if has_gpu else "CPU",
        "num_devices": torch.cuda.device_count(),
        "driver": driver_version(Path("/")),
        "num_cpus": len(os.sched_getaffinity(0)),
        "versions": versions,
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
    }
