# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Facts of machines for the doctor's tests: a healthy one, and changes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.slipstream import preflight
from megatron.slipstream.doctor.facts import (
    Facts,
    Gpu,
    Host,
    Link,
    Native,
    PatchTarget,
    Ranks,
    Torch,
)
from megatron.slipstream.plan.trace import Bandwidth

GIB = 1 << 30

PROCESS = preflight.Facts(
    python="3.12.4",
    torch="2.11.0+cu130",
    megatron_core="0.19.2",
    transformer_engine="2.20.2",
    te_import_error=None,
    te_offload_v1=True,
    te_offload_v1_environment="1",
    available_memory_bytes=1000 * GIB,
    affinity_tools=True,
)


def write(root: Path, files: dict[str, object]) -> Path:
    """Write a system's files, given by path, below ``root``."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


def gpu(number: int, node: int) -> Gpu:
    """A GPU of the kind used in benchmarks/, on a machine with two nodes."""
    return Gpu(
        number,
        "NVIDIA H200",
        memory_bytes=140 * GIB,
        pci_address=f"0000:{number + 16:02x}:00.0",
        node=node,
        link=Link(5, 5, 16, 16),
        bandwidth=Bandwidth(55.4, 55.6, 50.8, 50.8),
    )


HEALTHY = Facts(
    process=PROCESS,
    environment={"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "LOCAL_WORLD_SIZE": "2"},
    ranks=Ranks(2, "LOCAL_WORLD_SIZE"),
    host=Host(
        total_bytes=1024 * GIB, groups=(), memlock_bytes=None, shm_bytes=512 * GIB, has_rdma=True
    ),
    torch=Torch(cuda="13.0", hip=None, sees_gpus=True),
    driver="580.65.06",
    native=Native(is_compiled=True),
    patches=(PatchTarget("megatron.core.f", ("`install()`",)),),
    gpus=(gpu(0, 0), gpu(1, 1)),
    cpus_of_node={0: frozenset(range(8)), 1: frozenset(range(8, 16))},
    cpus=frozenset(range(16)),
)
"""Two H200, one on each node."""


def facts(process: dict[str, Any] | None = None, **changes: Any) -> Facts:
    """The healthy machine with other facts; ``process`` changes its :class:`preflight.Facts`."""
    return replace(HEALTHY, process=replace(PROCESS, **(process or {})), **changes)


def environment(machine: Facts = HEALTHY, **variables: str) -> Facts:
    """A machine with additional variables."""
    return replace(machine, environment={**machine.environment, **variables})


def host(**changes: Any) -> Facts:
    """The healthy machine with another host memory."""
    return replace(HEALTHY, host=HEALTHY.host._replace(**changes))


def first_gpu(**changes: Any) -> Facts:
    """The healthy machine with another first GPU."""
    return replace(HEALTHY, gpus=(gpu(0, 0)._replace(**changes), HEALTHY.gpus[1]))
