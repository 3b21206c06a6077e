# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Facts about the machine that checks share, so that tests can construct them."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Optional, Union

from megatron.slipstream.estimate.training_command import Words, split_command
from megatron.slipstream.options import preflight
from megatron.slipstream.options.host_memory import read_lines
from megatron.slipstream.plan.trace import Bandwidth

if TYPE_CHECKING:
    from megatron.slipstream.integration.entry.checks import Checked


class Gpu(NamedTuple):
    """A GPU, numbered by torch."""

    number: int
    name: str
    memory_bytes: int
    cpus: frozenset[int] = frozenset()
    """Those of its NUMA node; none if the kernel does not report them."""
    bandwidth: Union[Bandwidth, str, None] = None
    """Of copies, or the error of the measurement; None if they are not measured."""


@dataclass(frozen=True)
class MachineFacts:
    """The machine and this process."""

    process: preflight.ProcessFacts
    environment: Mapping[str, str]
    ranks_per_host: Optional[int] = None
    words: Words = Words(())
    torch_cuda: Optional[str] = None
    """Version of the CUDA runtime that torch is built with."""
    torch_error: Optional[str] = None
    """The error if torch is installed but does not import."""
    driver: Optional[str] = None
    gpus: tuple[Gpu, ...] = ()
    patches: Mapping[str, Optional[str]] = field(default_factory=dict)
    """What Slipstream replaces in the installed packages, and why that is not possible."""
    command: Optional[Checked] = None
    """The flags of the training, with findings."""

    @property
    def has_torch(self) -> bool:
        return self.process.torch is not None and self.torch_error is None

    @property
    def has_megatron(self) -> bool:
        """Whether megatron-core is likely to import."""
        is_broken = self.process.te_import_error is not None
        return self.has_torch and self.process.megatron_core is not None and not is_broken

    @property
    def args(self) -> Any:
        """The training's arguments; None without, or if they cannot be parsed."""
        return self.command and self.command.args

    @property
    def offloads(self) -> bool:
        return bool(self.args and self.args.fine_grained_activation_offloading)

    @property
    def graphs(self) -> Optional[str]:
        """``cuda_graph_impl``, or 'chunk' for whole chunks; None if no training was given."""
        if self.args is None:
            return self.command and "none"
        is_chunk = self.args.cuda_graph_granularity == "chunk"
        return "chunk" if is_chunk else self.args.cuda_graph_impl or "none"


def collect(
    ranks_per_host: Optional[int] = None,
    measures: bool = True,
    words: Sequence[str] = (),
    root: Path = Path("/"),
) -> MachineFacts:
    """Collect the facts; arguments are those of the command, ``root`` contains /proc and /sys."""
    command = split_command(list(words))
    environment = dict(os.environ)  # Before imports, which set variables.
    process = preflight.collect()
    torch, error = _torch()
    gpus = _gpus_of_torch(torch, root) if torch is not None and torch.cuda.is_available() else []
    if measures and gpus:
        from megatron.slipstream.doctor.bandwidth import measure  # imports torch

        gpus = [gpu._replace(bandwidth=measure(gpu.number, gpu.cpus)) for gpu in gpus]
    facts = MachineFacts(
        *(process, environment, ranks_per_host, command),
        torch_cuda=torch and torch.version.cuda,
        torch_error=error,
        driver=driver_version(root),
        gpus=tuple(gpus),
    )
    if not facts.has_megatron:
        return facts
    facts = replace(facts, patches=_patches())
    if not command.flags:
        return facts
    # Last: without a GPU, parsing flags replaces parts of torch.
    from megatron.slipstream.integration.entry.checks import check_flags

    num_processes = command.ranks_per_host and command.ranks_per_host * command.num_hosts
    return replace(facts, command=check_flags(command.flags, num_processes))


def _torch() -> tuple[Any, Optional[str]]:
    """Return the module, and the error if it is installed but does not import."""
    try:
        return importlib.import_module("torch"), None
    # A broken torch can fail in many ways; report any of them.
    except Exception as error:
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == "torch"
        return None, None if is_missing else f"{type(error).__name__}: {error}"


def _patches() -> dict[str, Optional[str]]:
    """Return the targets of all needed patches, with their problem. Imports megatron-core."""
    from megatron.slipstream.patches import table

    found: dict[str, Optional[str]] = {}
    with warnings.catch_warnings(action="ignore"), contextlib.redirect_stderr(io.StringIO()):
        for patch, _ in table.rows():
            try:
                if patch.is_needed():
                    patch.check()
                    found[patch.target] = None
            except RuntimeError as error:
                found[patch.target] = str(error)
    return found


# GPUs and NUMA nodes


def _gpus_of_torch(torch: Any, root: Path) -> list[Gpu]:
    gpus = []
    for number in range(torch.cuda.device_count()):
        of = torch.cuda.get_device_properties(number)
        address = "unknown"
        if hasattr(of, "pci_bus_id"):  # Not every torch has it.
            address = f"{of.pci_domain_id:04x}:{of.pci_bus_id:02x}:{of.pci_device_id:02x}.0"
        gpus.append(Gpu(number, of.name, of.total_memory, local_cpus(root, address)))
    return gpus


def driver_version(root: Path) -> Optional[str]:
    """Return the version of the NVIDIA driver, if it is loaded."""
    lines = read_lines(root / "proc/driver/nvidia/version")
    found = re.search(r"\s(\d+\.[\d.]+)\s", lines[0]) if lines else None
    return found and found[1]


def local_cpus(root: Path, pci_address: str) -> frozenset[int]:
    """Return the CPUs on the NUMA node of a PCI device; none if the kernel does not report them."""
    lines = read_lines(root / "sys/bus/pci/devices" / pci_address / "local_cpulist")
    cpus: set[int] = set()
    for part in filter(None, "".join(lines).split(",")):  # such as '0-3,8'
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)
