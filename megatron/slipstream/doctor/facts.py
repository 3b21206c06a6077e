# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Facts about the machine. Checks read nothing else, so tests can construct their input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Optional

from megatron.slipstream import preflight
from megatron.slipstream.plan.trace import Bandwidth
from megatron.slipstream.rules import Finding


class Torch(NamedTuple):
    """Facts about torch."""

    cuda: Optional[str]
    """Version of the CUDA runtime of the build; None without CUDA."""
    hip: Optional[str]
    sees_gpus: bool


class Link(NamedTuple):
    """A GPU's PCI Express link. An idle GPU may lower its generation."""

    generation: int
    max_generation: int
    width: int
    """Lanes."""
    max_width: int


class Gpu(NamedTuple):
    """A GPU, numbered by torch, or by nvidia-smi if torch sees none."""

    number: int
    name: str
    memory_bytes: Optional[int] = None
    pci_address: Optional[str] = None
    """PCI address in sysfs format."""
    node: Optional[int] = None
    """Its NUMA node."""
    link: Optional[Link] = None
    bandwidth: Optional[Bandwidth] = None
    bandwidth_error: Optional[str] = None
    """The error if its measurement failed."""


class Ranks(NamedTuple):
    """The number of training processes on this host."""

    number: int
    source: str
    """Where the number comes from."""


class Host(NamedTuple):
    """Host memory and its limits; None where unknown."""

    total_bytes: Optional[int]
    groups: tuple[preflight.ControlGroup, ...]
    memlock_bytes: Optional[int]
    """RLIMIT_MEMLOCK; None for no limit."""
    shm_bytes: Optional[int]
    """Size of /dev/shm."""
    has_rdma: bool
    """Whether there are RDMA adapters, such as InfiniBand."""


class Command(NamedTuple):
    """Facts about a training command's flags, and findings."""

    findings: tuple[Finding, ...]
    num_processes: int
    """Number of processes for which the flags were checked."""
    offloads: bool = False
    graphs: str = "none"
    """megatron-core's ``cuda_graph_impl``, or 'chunk' for graphs of whole chunks."""
    has_experts: bool = False
    is_deterministic: bool = False
    host_memory_limit_bytes: Optional[int] = None
    """``offload_host_memory_limit_bytes``."""


class PatchTarget(NamedTuple):
    """An attribute of another package that Slipstream replaces at run time."""

    name: str
    features: tuple[str, ...]
    """Features that need the patch."""
    problem: Optional[str] = None
    """Why it cannot be replaced."""


class BuildLock(NamedTuple):
    """The lock file of a torch extension during its build; other processes wait for it."""

    path: str
    age_s: float


class Native(NamedTuple):
    """The C++ extension that does the work for each group."""

    is_compiled: bool
    problem: Optional[str] = None
    """Why it cannot be compiled."""
    cure: Optional[str] = None


@dataclass(frozen=True)
class Facts:
    """The machine and this process. See :func:`~megatron.slipstream.doctor.collect.collect`."""

    process: preflight.Facts
    environment: Mapping[str, str]
    """The environment variables that checks read, if set."""
    ranks: Ranks
    host: Host
    torch: Optional[Torch] = None
    torch_error: Optional[str] = None
    """The error if torch is installed but does not import."""
    driver: Optional[str] = None
    """Version of the NVIDIA driver."""
    build_locks: tuple[BuildLock, ...] = ()
    native: Optional[Native] = None
    """The engine's C++ extension; None if torch does not import."""
    patches: tuple[PatchTarget, ...] = ()
    """Patches that the installed packages need; empty if the packages cannot be imported."""
    gpus: tuple[Gpu, ...] = ()
    cpus_of_node: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """The CPUs of each NUMA node that has any."""
    cpus: frozenset[int] = frozenset()
    """The CPUs that this process may run on."""
    command: Optional[Command] = None
    unseen: Mapping[str, str] = field(default_factory=dict)
    """Why 'bandwidth' or 'command' was not checked."""
