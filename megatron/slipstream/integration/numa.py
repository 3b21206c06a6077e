# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Running the process, and pinning its host memory, on the NUMA node of its GPU.

A copy between a GPU and the memory of another socket crosses the link between sockets, which all
GPUs of that side share. What is known is read from sysfs and decided by a pure function
(:func:`decide`); the kernel is asked through system calls, since libnuma may not be there.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

import torch

logger = logging.getLogger(__name__)

SYSFS = Path("/sys")
POLICY_DEFAULT = 0
POLICY_PREFERRED = 1
"""Not 'bind': where the node is full, memory of another node is slower but serves; bound memory
would end the process."""


class Binding(NamedTuple):
    """Where a process is to run and have its pinned memory."""

    node: int
    cpus: frozenset[int]


def bind_to_gpu(index: int, sysfs: Path = SYSFS) -> Optional[NodeMemory]:
    """Bind this process to the NUMA node of a GPU, unless there is a reason not to, and log it.

    Threads that exist already stay where they are; autograd's are made later.

    Args:
        index: Of the GPU, as torch counts.
        sysfs: Where the kernel's tree is found.

    Returns:
        What places memory on the node; None where the process was not bound.
    """
    global _bound
    cpus = frozenset(os.sched_getaffinity(0))
    if _bound is not None and cpus == _bound.cpus:
        return NodeMemory(_bound.node)
    policy = get_memory_policy()
    decision = decide(sysfs, gpu_pci_address(index), cpus, policy)
    before = f"CPUs {format_cpus(cpus)}, memory policy {policy}"
    if isinstance(decision, str):
        logger.info("NUMA: GPU %d: left at %s, because %s", index, before, decision)
        return None
    try:
        os.sched_setaffinity(0, decision.cpus)
    except OSError as error:
        logger.info("NUMA: GPU %d: left at %s, because of: %s", index, before, error)
        return None
    _bound = decision
    logger.info(
        "NUMA: GPU %d: from %s to CPUs %s, pinned memory on node %d",
        index,
        before,
        format_cpus(decision.cpus),
        decision.node,
    )
    return NodeMemory(decision.node)


_bound: Optional[Binding] = None
"""Our binding of this process, so that another ``install()`` does not take it for the user's."""


def decide(
    sysfs: Path, pci_address: Optional[str], cpus: frozenset[int], policy: Optional[int]
) -> Union[Binding, str]:
    """Where to bind the process, or in words why nowhere.

    Args:
        sysfs: Where the kernel's tree is found.
        pci_address: The GPU's, as sysfs writes it ('0000:1b:00.0'); None if unknown.
        cpus: Those that the process may run on now.
        policy: The process's memory policy; None if unknown.
    """
    nodes = cpus_of_nodes(sysfs)
    if len(nodes) < 2:
        return "the machine has one node"
    machine = frozenset().union(*nodes.values())
    if not machine <= cpus:
        return "the process is bound to CPUs already"
    if policy not in (POLICY_DEFAULT, None):
        return "a memory policy is set already"
    if pci_address is None:
        return "torch does not tell the GPU's PCI address"
    node = _read(sysfs / "bus/pci/devices" / pci_address / "numa_node")
    if node is None or int(node) not in nodes:
        return f"the node of {pci_address} is unknown"
    return Binding(int(node), nodes[int(node)])


def cpus_of_nodes(sysfs: Path) -> dict[int, frozenset[int]]:
    """The online CPUs of each NUMA node that has any."""
    found = {}
    for folder in sorted((sysfs / "devices/system/node").glob("node[0-9]*")):
        cpus = parse_cpus(_read(folder / "cpulist") or "")
        if cpus:
            found[int(folder.name.removeprefix("node"))] = cpus
    return found


def parse_cpus(text: str) -> frozenset[int]:
    """The numbers of a kernel list such as '0-3,8'."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def format_cpus(cpus: Iterable[int]) -> str:
    """Numbers as a kernel list."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def gpu_pci_address(index: int) -> Optional[str]:
    """A GPU's PCI address as sysfs writes it; None where this torch does not tell it."""
    properties: Any = torch.cuda.get_device_properties(index)
    try:
        domain, bus = properties.pci_domain_id, properties.pci_bus_id
        return f"{domain:04x}:{bus:02x}:{properties.pci_device_id:02x}.0"
    except AttributeError:
        return None


def _read(path: Path) -> Optional[str]:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return None


# System calls, by machine: mbind, get_mempolicy.

_SYSTEM_CALLS = {"x86_64": (237, 239), "aarch64": (235, 236)}


def get_memory_policy() -> Optional[int]:
    """This thread's memory policy, 0 if none is set; None where it cannot be queried."""
    if platform.machine() not in _SYSTEM_CALLS:
        return None
    mode = ctypes.c_int(-1)
    number = _SYSTEM_CALLS[platform.machine()][1]
    no = ctypes.c_void_p(None)
    result = _system_call(number, ctypes.byref(mode), no, ctypes.c_ulong(0), no, ctypes.c_ulong(0))
    return mode.value if result == 0 else None


class NodeMemory:
    """Places memory on one node; gives up, with one line in the log, where it may not."""

    def __init__(self, node: int) -> None:
        self._node = node
        self._gave_up = False

    def __call__(self, address: int, nbytes: int) -> None:
        """Prefer the node for the pages of ``[address, address + nbytes)``, untouched as yet."""
        if self._gave_up:
            return
        error = _prefer_node(address, nbytes, self._node)
        if error:
            self._gave_up = True
            logger.info(
                "NUMA: host memory cannot be placed on node %d (%s); it goes where the process "
                "first touches it",
                self._node,
                os.strerror(error),
            )


def _prefer_node(address: int, nbytes: int, node: int) -> int:
    """``mbind``. Returns 0 or the error's number."""
    if platform.machine() not in _SYSTEM_CALLS:
        return errno.ENOSYS
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (node // bits + 1))()
    mask[node // bits] = 1 << (node % bits)
    return _system_call(
        _SYSTEM_CALLS[platform.machine()][0],
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_int(POLICY_PREFERRED),
        mask,
        # The kernel counts one bit less than it is told.
        ctypes.c_ulong(len(mask) * bits + 1),
        ctypes.c_uint(0),
    )


def _system_call(number: int, *arguments: object) -> int:
    """Returns 0 or the error's number."""
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    return 0 if call(ctypes.c_long(number), *arguments) == 0 else ctypes.get_errno()
