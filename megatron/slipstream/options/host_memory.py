# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Host memory that this process may use: the machine's and its control groups'."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Optional

from megatron.slipstream.launcher import num_local_ranks

HOST_MEMORY_SHARE = 0.8
"""Share of available memory to pin by default: data loaders and checkpoints need the rest."""


def default_host_memory_limit_bytes(root: Path = Path("/")) -> Optional[int]:
    """Return this process's share of the node's available memory, in bytes; None if unknown.

    Raises ``ValueError`` if the launcher's number of processes on this node is invalid.
    """
    available = available_memory_bytes(root)
    if available is None:
        return None
    return host_memory_share_bytes(available, num_local_ranks())


def host_memory_share_bytes(available_bytes: int, num_processes: int) -> int:
    """Return the bytes that each of a node's processes may pin by default."""
    return int(available_bytes * HOST_MEMORY_SHARE) // max(1, num_processes)


def available_memory_bytes(root: Path = Path("/")) -> Optional[int]:
    """Return the host memory that this process can still allocate, in bytes; None if unknown.

    It is the minimum of the kernel's estimate for the machine and the remainder of each control
    group's limit (a container's). File caches that a group can drop do not count as used, as in the
    kernel's estimate. ``root`` contains /proc and /sys.
    """
    found = [*_left_in_control_groups(root)]
    for line in read_lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) * 1024)
    return max(0, min(found)) if found else None


_CONTROLLERS = {
    2: ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file "),
    1: (
        *("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        "total_inactive_file ",
    ),
}
"""Of each version of control groups: mount point, files of limit and usage, droppable caches."""


def _left_in_control_groups(root: Path) -> Iterator[int]:
    """Yield what is left of this process's memory limits in bytes, with caches to drop."""
    for line in read_lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        place, *files = _CONTROLLERS[1 if controllers else 2]
        mount = root / place
        # Limits of all parent groups apply too. Inside a container the path may exist only on the
        # host; then the mount point is the container's own group.
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):
            left_bytes = _left_in(folder, *files)
            if left_bytes is not None:
                yield left_bytes
            if folder == mount:
                break


def _left_in(folder: Path, of_limit: str, of_usage: str, droppable: str) -> Optional[int]:
    limit, used = read_lines(folder / of_limit), read_lines(folder / of_usage)
    if not limit or not used or limit[0] == "max":
        return None
    lines = (line for line in read_lines(folder / "memory.stat") if line.startswith(droppable))
    return int(limit[0]) - int(used[0]) + sum(int(line.split()[1]) for line in lines)


def read_lines(path: Path) -> list[str]:
    """Return the lines of a file; none if it cannot be read."""
    try:
        # Names of control groups may have any encoding.
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
