# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Collects all facts about the machine that the doctor uses."""

from __future__ import annotations

import contextlib
import csv
import importlib
import io
import os
import re
import resource
import subprocess
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Optional

from megatron.slipstream import preflight
from megatron.slipstream.doctor import command, memory, variables
from megatron.slipstream.doctor.facts import (
    BuildLock,
    Facts,
    Gpu,
    Host,
    Link,
    Native,
    PatchTarget,
    Ranks,
    Torch,
)
from megatron.slipstream.estimate.training_command import Words, split_command
from megatron.slipstream.preflight import read_lines

VARIABLES = (
    *variables.READ,
    *("LOCAL_WORLD_SIZE", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES"),
    *memory.RANKS_PER_HOST_OF_LAUNCHERS,
)

NVIDIA_SMI_S = 30
"""Timeout of nvidia-smi in seconds: with persistence mode off, it loads the driver first."""

_QUERIES = (
    *("index", "name", "pci.bus_id", "driver_version", "memory.total"),
    *("pcie.link.gen.current", "pcie.link.gen.max"),
    *("pcie.link.width.current", "pcie.link.width.max"),
)
"""Fields of the nvidia-smi query; the last four are the fields of :class:`Link`."""

Progress = Callable[[str], None]
"""A callback for a description of the next step."""


@dataclass(frozen=True)
class Request:
    """The user's options."""

    ranks_per_host: Optional[int] = None
    measures: bool = True
    """Whether to measure the bandwidth of copies."""
    words: Sequence[str] = ()
    """Words of a training command, as ``split_command`` takes them."""


def collect(request: Request, progress: Progress = lambda _: None, root: Path = Path("/")) -> Facts:
    """Collect the facts about the machine.

    Args:
        request: The user's options.
        progress: Called before every step.
        root: Folder that contains /proc, /sys and /dev.
    """
    words = split_command(list(request.words))
    progress("versions")
    # Read before parsing the flags, which imports modules and sets variables.
    environment = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    process = preflight.collect()
    torch, torch_facts, error = _torch()
    unseen: dict[str, str] = {}
    progress("GPUs")
    driver, gpus = _gpus(torch if torch_facts is not None and torch_facts.sees_gpus else None, root)
    cpus_of_node, cpus = cpus_of_nodes(root), frozenset(os.sched_getaffinity(0))
    gpus = tuple(gpu._replace(node=gpu_node(root, gpu.pci_address)) for gpu in gpus)
    beside = [cpus if gpu.node is None else cpus & cpus_of_node[gpu.node] for gpu in gpus]
    gpus = _measured(torch_facts, gpus, beside, request, progress, unseen)
    ranks = _ranks(request, words, environment, len(gpus))
    facts = Facts(
        process=process,
        environment=environment,
        ranks=ranks,
        host=_host(root),
        torch=torch_facts,
        torch_error=error,
        driver=driver,
        build_locks=build_locks(extensions_folder(os.environ), time.time()),
        gpus=gpus,
        cpus_of_node=cpus_of_node,
        cpus=cpus,
        unseen=unseen,
    )
    if _can_import(facts):
        progress("patches")
        facts = replace(facts, patches=_patches(), native=_native())
    return _with_command(facts, words, progress)


def _can_import(facts: Facts) -> bool:
    """Return whether megatron-core is likely to import, without importing it."""
    is_there = facts.torch is not None and facts.process.megatron_core is not None
    return is_there and facts.process.te_import_error is None


def _patches() -> tuple[PatchTarget, ...]:
    """Return the targets of all needed patches. Imports megatron-core."""
    from megatron.slipstream.patches import table

    found = []
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        for patch, features in table.rows():
            problem = None
            try:
                if not patch.is_needed():
                    continue
                patch.check()
            except RuntimeError as error:
                problem = str(error)
            names = tuple(feature.value for feature in features)
            found.append(PatchTarget(patch.target, names, problem))
    return tuple(found)


def _with_command(facts: Facts, words: Words, progress: Progress) -> Facts:
    """Check the command; done last because parsing flags without a GPU replaces parts of torch."""
    if not words.flags:
        return facts
    if not _can_import(facts):
        why = "torch and megatron-core must be importable"
        return replace(facts, unseen={**facts.unseen, "command": why})
    progress("flags")
    return replace(facts, command=command.check_command(words))


# Torch and GPUs


def extensions_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder where torch compiles extensions on first use."""
    # Unlike Path.home(), this is no error for a user without a home directory.
    caches = environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(environment.get("TORCH_EXTENSIONS_DIR") or Path(caches) / "torch_extensions")


def _native() -> Native:
    # Imported here because it needs torch, unlike other checks.
    from megatron.slipstream.fine_grained_activation_offload.native import build

    problem = build.problem()
    if problem is not None:
        return Native(is_compiled=False, problem=problem.cause, cure=problem.cure)
    return Native(build.is_compiled())


def build_locks(folder: Path, now_s: float) -> tuple[BuildLock, ...]:
    """Return the build locks of extensions in the folder or its per-version subfolders."""
    found = []
    for path in sorted([*folder.glob("*/lock"), *folder.glob("*/*/lock")]):
        with contextlib.suppress(OSError):  # It may have just been removed.
            found.append(BuildLock(str(path), now_s - path.stat().st_mtime))
    return tuple(found)


def _torch() -> tuple[Optional[ModuleType], Optional[Torch], Optional[str]]:
    """Return the module, its facts, and the error if it is installed but does not import."""
    try:
        module = importlib.import_module("torch")
        facts = Torch(module.version.cuda, module.version.hip, module.cuda.is_available())
    # A broken torch can fail in many ways; report any of them.
    except Exception as error:
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == "torch"
        return None, None, None if is_missing else f"{type(error).__name__}: {error}"
    return module, facts, None


def _gpus(torch: Any, root: Path) -> tuple[Optional[str], tuple[Gpu, ...]]:
    """Return the driver's version and the GPUs: those visible to torch, else all."""
    rows = query_nvidia_smi()
    driver = rows[0]["driver_version"] if rows else driver_version(root)
    if torch is None:
        return driver, tuple(map(gpu_of, rows))
    gpus = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        gpus.append(Gpu(index, facts.name, facts.total_memory, _pci_address(facts)))
    return driver, tuple(gpus)


def _pci_address(properties: Any) -> Optional[str]:
    """Return the PCI address in sysfs format; None if this torch does not report it."""
    try:
        domain, bus = properties.pci_domain_id, properties.pci_bus_id
        return f"{domain:04x}:{bus:02x}:{properties.pci_device_id:02x}.0"
    except AttributeError:
        return None


def query_nvidia_smi() -> list[dict[str, str]]:
    """Return a row for each GPU, keyed by ``_QUERIES``; empty if nvidia-smi fails."""
    try:
        output = subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(_QUERIES)}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=NVIDIA_SMI_S,
            check=False,  # If a GPU is lost, it fails but lists the others.
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_nvidia_smi(output)


def parse_nvidia_smi(output: str) -> list[dict[str, str]]:
    """Parse nvidia-smi's output into rows keyed by ``_QUERIES``."""
    rows = csv.reader(output.splitlines(), skipinitialspace=True)
    return [dict(zip(_QUERIES, row, strict=True)) for row in rows if len(row) == len(_QUERIES)]


def gpu_of(row: Mapping[str, str]) -> Gpu:
    """Convert a row of nvidia-smi to a GPU."""
    memory = _number(row["memory.total"])
    return Gpu(
        number=int(row["index"]),
        name=row["name"],
        memory_bytes=None if memory is None else memory << 20,
        pci_address=_sysfs_address(row["pci.bus_id"]),
    )


def link_of(row: Mapping[str, str]) -> Optional[Link]:
    """Return the link in a row of nvidia-smi; None if unknown."""
    numbers = [_number(row[name]) for name in _QUERIES[-4:]]
    return None if None in numbers else Link(*(number or 0 for number in numbers))


def _number(text: str) -> Optional[int]:
    """Parse a number from nvidia-smi, which prints '[N/A]' for unknown values."""
    return int(text) if text.isdigit() else None


def _sysfs_address(bus_id: str) -> str:
    """Convert nvidia-smi's '00000000:1B:00.0' to sysfs's '0000:1b:00.0'."""
    return bus_id.lower()[-len("0000:00:00.0") :]


def driver_version(root: Path) -> Optional[str]:
    """Return the version of the NVIDIA driver, if it is loaded."""
    for line in read_lines(root / "proc/driver/nvidia/version")[:1]:
        found = re.search(r"\s(\d+\.[\d.]+)\s", line)
        return found[1] if found else None
    return None


def _measured(
    torch: Optional[Torch],
    gpus: tuple[Gpu, ...],
    beside: Sequence[frozenset[int]],
    request: Request,
    progress: Progress,
    unseen: dict[str, str],
) -> tuple[Gpu, ...]:
    """Return the GPUs with their copy bandwidth, and with their links, read right afterwards.

    An idle GPU may lower its link's generation. ``beside`` has the CPUs of each GPU's node.
    """
    if not request.measures:
        unseen["bandwidth"] = "--no-bandwidth was given"
    elif torch is None or not torch.sees_gpus:
        unseen["bandwidth"] = "torch does not see the GPU"
    else:
        from megatron.slipstream.doctor.bandwidth import measure

        gpus = tuple(measure(gpu, cpus, progress) for gpu, cpus in zip(gpus, beside, strict=True))
    if not gpus:
        return gpus
    links = {_sysfs_address(row["pci.bus_id"]): link_of(row) for row in query_nvidia_smi()}
    return tuple(gpu._replace(link=links.get(gpu.pci_address or "")) for gpu in gpus)


# NUMA


def cpus_of_nodes(root: Path) -> dict[int, frozenset[int]]:
    """Return the online CPUs of each NUMA node that has any."""
    found = {}
    for folder in sorted((root / "sys/devices/system/node").glob("node[0-9]*")):
        cpus = parse_numbers(*read_lines(folder / "cpulist")[:1])
        if cpus:
            found[int(folder.name.removeprefix("node"))] = cpus
    return found


def parse_numbers(text: str = "") -> frozenset[int]:
    """Parse a kernel list of numbers such as '0-3,8'."""
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


def gpu_node(root: Path, pci_address: Optional[str]) -> Optional[int]:
    """Return the NUMA node of a PCI device; None if the kernel does not report it."""
    if pci_address is None:
        return None
    lines = read_lines(root / "sys/bus/pci/devices" / pci_address / "numa_node")
    return int(lines[0]) if lines and lines[0].isdigit() else None


# Host memory


def _host(root: Path) -> Host:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Host(
        total_bytes=total_bytes(root),
        groups=tuple(preflight.control_groups(root)),
        memlock_bytes=None if limit == resource.RLIM_INFINITY else limit,
        shm_bytes=_size_of(root / "dev/shm"),
        has_rdma=any((root / "sys/class/infiniband").glob("*")),
    )


def total_bytes(root: Path) -> Optional[int]:
    """Return the total host memory."""
    for line in read_lines(root / "proc/meminfo"):
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return None


def _size_of(folder: Path) -> Optional[int]:
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize


def _ranks(request: Request, words: Words, environment: Mapping[str, str], num_gpus: int) -> Ranks:
    if request.ranks_per_host is not None:
        return Ranks(request.ranks_per_host, "--ranks-per-host")
    if words.ranks_per_host is not None:
        return Ranks(words.ranks_per_host, "--nproc-per-node of the command")
    for name in ("LOCAL_WORLD_SIZE", *memory.RANKS_PER_HOST_OF_LAUNCHERS):
        if environment.get(name, "").isdigit():
            return Ranks(max(1, int(environment[name])), name)
    if num_gpus:
        return Ranks(num_gpus, "one for each GPU; --ranks-per-host N changes it")
    return Ranks(1, "--ranks-per-host N changes it")
