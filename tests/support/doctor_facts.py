# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Facts of machines for the doctor's tests: a healthy one, and changes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron.slipstream.doctor.facts import Gpu, MachineFacts
from megatron.slipstream.options import preflight
from megatron.slipstream.patches.releases import TESTED_RELEASES
from megatron.slipstream.plan.trace import Bandwidth

GIB = 1 << 30

PROCESS = preflight.ProcessFacts(
    python="3.12.4",
    torch="2.11.0+cu130",
    megatron_core=TESTED_RELEASES[-1],
    transformer_engine="2.20.2",
    te_import_error=None,
    te_offload_v1=True,
    te_offload_v1_environment="1",
    available_memory_bytes=1000 * GIB,
)


def write(root: Path, files: dict[str, object]) -> Path:
    """Write a system's files, given by path, below ``root``."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


def gpu(number: int) -> Gpu:
    """A GPU of the kind used in benchmarks/."""
    return Gpu(number, "NVIDIA H200", 140 * GIB, bandwidth=Bandwidth(55.4, 55.6, 50.8, 50.8))


HEALTHY = MachineFacts(
    process=PROCESS,
    environment={"LOCAL_WORLD_SIZE": "2", "TORCH_EXTENSIONS_DIR": "/not/there"},
    torch_cuda="13.0",
    driver="580.65.06",
    patches={"megatron.core.f": None},
    gpus=(gpu(0), gpu(1)),
)
"""Two H200."""


def facts(process: dict[str, Any] | None = None, **changes: Any) -> MachineFacts:
    """The healthy machine with other facts; ``process`` changes its process."""
    return replace(HEALTHY, process=replace(PROCESS, **(process or {})), **changes)


def environment(machine: MachineFacts = HEALTHY, **variables: str) -> MachineFacts:
    """A machine with additional variables."""
    return replace(machine, environment={**machine.environment, **variables})


def first_gpu(**changes: Any) -> MachineFacts:
    """The healthy machine with another first GPU."""
    return replace(HEALTHY, gpus=(gpu(0)._replace(**changes), HEALTHY.gpus[1]))


def training(machine: MachineFacts = HEALTHY, **options: Any) -> MachineFacts:
    """A machine with the flags of a training that offloads and has these options too."""
    from megatron.slipstream.integration.entry.checks import Checked

    args = {
        "fine_grained_activation_offloading": True,
        "cuda_graph_impl": "none",
        "cuda_graph_granularity": "layer",
        "offload_host_memory_limit_bytes": None,
    }
    return replace(machine, command=Checked(SimpleNamespace(**args | options), 2))
