# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Facts of the machine. Checks read nothing else, so tests make them by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Optional

from megatron.slipstream import preflight
from megatron.slipstream.plan.trace import Bandwidth
from megatron.slipstream.rules import Finding


class Torch(NamedTuple):
    """Facts of torch."""

    cuda: Optional[str]
    """The CUDA runtime that it was built for; None for a build without."""
    hip: Optional[str]
    sees_gpus: bool


class Link(NamedTuple):
    """A GPU's PCI Express link. An idle GPU may lower the generation."""

    generation: int
    max_generation: int
    width: int
    """Lanes."""
    max_width: int


class Gpu(NamedTuple):
    """A GPU as torch numbers it; as nvidia-smi does, where torch sees none."""

    number: int
    name: str
    memory_bytes: Optional[int] = None
    pci_address: Optional[str] = None
    """As sysfs writes it."""
    node: Optional[int] = None
    """The NUMA node that it is attached to."""
    link: Optional[Link] = None
    bandwidth: Optional[Bandwidth] = None
    bandwidth_error: Optional[str] = None
    """Why it could not be measured."""


class Ranks(NamedTuple):
    """How many processes of the training run on this host."""

    number: int
    source: str
    """Source of the value."""


class Host(NamedTuple):
    """Host memory and its limits. None where nothing tells."""

    total_bytes: Optional[int]
    groups: tuple[preflight.ControlGroup, ...]
    memlock_bytes: Optional[int]
    """RLIMIT_MEMLOCK; None for no limit."""
    shm_bytes: Optional[int]
    """Size of /dev/shm."""
    has_rdma: bool
    """Whether there are RDMA adapters, such as InfiniBand."""


class Command(NamedTuple):
    """Requirements of a training command's flags, and findings about them."""

    findings: tuple[Finding, ...]
    num_processes: int
    """That the flags were checked for."""
    offloads: bool = False
    graphs: str = "none"
    """megatron-core's ``cuda_graph_impl``, or 'chunk' for graphs of whole chunks."""
    is_deterministic: bool = False
    host_memory_limit_bytes: Optional[int] = None
    """``offload_host_memory_limit_bytes``."""


class PatchTarget(NamedTuple):
    """Something of another package that Slipstream replaces at run time."""

    name: str
    features: tuple[str, ...]
    """Features that need the patch."""
    problem: Optional[str] = None
    """Why it cannot be."""


class BuildLock(NamedTuple):
    """Marks an extension of torch as being compiled: who needs it too waits until this is gone."""

    path: str
    age_s: float


class Native(NamedTuple):
    """The C++ module that does the work of each group."""

    is_compiled: bool
    problem: Optional[str] = None
    """Why it cannot be compiled."""


@dataclass(frozen=True)
class Facts:
    """The machine and this process. See :func:`~megatron.slipstream.doctor.collect.collect`."""

    process: preflight.Facts
    environment: Mapping[str, str]
    """The variables that checks ask for and that are set."""
    ranks: Ranks
    host: Host
    torch: Optional[Torch] = None
    torch_error: Optional[str] = None
    """Why torch, though installed, does not import."""
    driver: Optional[str] = None
    """Version of NVIDIA's driver."""
    build_locks: tuple[BuildLock, ...] = ()
    native: Optional[Native] = None
    """The engine's C++ module; None where torch does not import."""
    patches: tuple[PatchTarget, ...] = ()
    """Those that the installed packages need; empty where they cannot be imported."""
    gpus: tuple[Gpu, ...] = ()
    cpus_of_node: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """The CPUs of each NUMA node that has any."""
    cpus: frozenset[int] = frozenset()
    """Those that this process may run on."""
    command: Optional[Command] = None
    unseen: Mapping[str, str] = field(default_factory=dict)
    """Of 'bandwidth' and 'command', those that were not looked at, and why."""
