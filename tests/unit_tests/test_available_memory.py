# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The host memory that a process may pin by default, on machines and in containers of any kind."""

from __future__ import annotations

from pathlib import Path

import pytest
from doctor_facts import GIB, write

from megatron.slipstream.options.host_memory import (
    available_memory_bytes,
    default_host_memory_limit_bytes,
)

MACHINE = {
    "proc/meminfo": f"MemTotal: {200 << 20} kB\nMemAvailable:   {100 << 20} kB\nCached: 1 kB"
}


def group_v2(folder: str, limit: object, used: int, cache: int = 0) -> dict[str, object]:
    base = f"sys/fs/cgroup/{folder}".rstrip("/")
    return {
        f"{base}/memory.max": limit,
        f"{base}/memory.current": used,
        f"{base}/memory.stat": f"anon 1\ninactive_file {cache}\nactive_file 7",
    }


def group_v1(folder: str, limit: int, used: int, cache: int = 0) -> dict[str, object]:
    base = f"sys/fs/cgroup/memory/{folder}".rstrip("/")
    return {
        f"{base}/memory.limit_in_bytes": limit,
        f"{base}/memory.usage_in_bytes": used,
        f"{base}/memory.stat": f"inactive_file 3\ntotal_inactive_file {cache}",
    }


def test_without_control_groups_it_is_the_kernels_estimate(tmp_path: Path) -> None:
    assert available_memory_bytes(write(tmp_path, MACHINE)) == 100 * GIB


def test_nothing_known_is_none(tmp_path: Path) -> None:
    assert available_memory_bytes(tmp_path) is None
    assert default_host_memory_limit_bytes(tmp_path) is None


IN_V2 = {"proc/self/cgroup": "0::/jobs/one"}
IN_V1 = {"proc/self/cgroup": "9:name=systemd:/\n4:cpuset,memory:/jobs/one\n1:cpu:/jobs/one"}


@pytest.mark.parametrize(
    "files",
    [
        IN_V2 | group_v2("jobs/one", 50 * GIB, 30 * GIB, cache=10 * GIB),
        # A limit of the parent group applies too.
        IN_V2 | group_v2("jobs/one", "max", 30 * GIB) | group_v2("jobs", 40 * GIB, 10 * GIB),
        # In a container the mount point is its own group, under any name on the host.
        IN_V2 | group_v2("", 31 * GIB, 1 * GIB),
        IN_V1 | group_v1("jobs/one", 50 * GIB, 30 * GIB, cache=10 * GIB),
        IN_V1 | group_v1("jobs/one", (1 << 63) - 4096, 5) | group_v1("", 32 * GIB, 2 * GIB),
    ],
    ids=["v2", "v2 above", "v2 in a container", "v1", "v1 above"],
)
def test_a_lower_limit_of_the_control_group_holds(tmp_path: Path, files: dict[str, object]) -> None:
    assert available_memory_bytes(write(tmp_path, MACHINE | files)) == 30 * GIB


@pytest.mark.parametrize(
    "files",
    [
        IN_V2 | group_v2("jobs/one", 500 * GIB, 30 * GIB),
        IN_V2 | group_v2("jobs/one", "max", 30 * GIB),
        IN_V1 | group_v1("jobs/one", (1 << 63) - 4096, 30 * GIB),
        {"proc/self/cgroup": "4:cpuset:/jobs/one"} | group_v1("jobs/one", 1 * GIB, 0),
        {"proc/self/cgroup": "0::/other"} | group_v2("jobs/one", 1 * GIB, 0),
    ],
    ids=["v2 above", "v2 none", "v1 none", "another controller", "another group"],
)
def test_other_limits_do_not_matter(tmp_path: Path, files: dict[str, object]) -> None:
    assert available_memory_bytes(write(tmp_path, MACHINE | files)) == 100 * GIB


def test_a_group_may_have_a_name_in_any_language(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/jobs/größte"} | group_v2("jobs/größte", 2 * GIB, 1 * GIB)
    assert available_memory_bytes(write(tmp_path, MACHINE | files)) == 1 * GIB


def test_a_group_beyond_its_limit_has_none_left(tmp_path: Path) -> None:
    files = IN_V2 | group_v2("jobs/one", 1 * GIB, 2 * GIB)
    assert available_memory_bytes(write(tmp_path, MACHINE | files)) == 0


@pytest.mark.parametrize("value, share", [(None, 80), ("1", 80), ("8", 10)])
def test_the_default_limit_is_four_fifths_shared_by_the_nodes_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str | None, share: int
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if value is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", value)
    assert default_host_memory_limit_bytes(write(tmp_path, MACHINE)) == share * GIB


def test_no_process_at_all_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "0")
    with pytest.raises(ValueError, match="LOCAL_WORLD_SIZE='0' is not supported"):
        default_host_memory_limit_bytes(write(tmp_path, MACHINE))


def test_this_machine_has_some() -> None:
    assert (available_memory_bytes() or 0) > 0
