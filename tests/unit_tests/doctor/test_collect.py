# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Facts of the system are parsed correctly, and optional parts may be missing."""

from __future__ import annotations

import os
import pwd
import resource
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from doctor_facts import GIB, gpu, write

from megatron.slipstream import preflight
from megatron.slipstream.doctor import collect as reading
from megatron.slipstream.doctor.collect import Request, collect
from megatron.slipstream.doctor.facts import BuildLock, Facts, Gpu, Link, Ranks, Torch
from megatron.slipstream.estimate.training_command import Words, split_command

QUIET = Request(measures=False)
ALL = frozenset(range(8))


# Extensions


@pytest.mark.parametrize("variable", ["XDG_CACHE_HOME", "TORCH_EXTENSIONS_DIR"])
def test_locks_of_extensions_are_found_where_torch_puts_them(
    variable: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from torch.utils.cpp_extension import _get_build_directory

    for name in ("XDG_CACHE_HOME", "TORCH_EXTENSIONS_DIR"):
        monkeypatch.delenv(name, raising=False)
    assert reading.extensions_folder(os.environ) == Path.home() / ".cache" / "torch_extensions"
    monkeypatch.setenv(variable, str(tmp_path))
    folder = reading.extensions_folder(os.environ)
    assert reading.build_locks(folder, 1700.0) == ()
    lock = Path(_get_build_directory("an_extension", False)) / "lock"
    lock.touch()
    os.utime(lock, (1000, 1000))
    assert reading.build_locks(folder, 1700.0) == (BuildLock(str(lock), 700.0),)


def test_a_user_without_a_home_has_no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: int) -> None:
        raise KeyError("uid not found")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME", "TORCH_EXTENSIONS_DIR"):
        monkeypatch.delenv(name, raising=False)
    assert reading.build_locks(reading.extensions_folder(os.environ), 1700.0) == ()


# NUMA


def test_nodes_with_their_cpus_and_gpus(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "sys/devices/system/node/node0/cpulist": "0-3,8",
            "sys/devices/system/node/node1/cpulist": "4-7",
            "sys/devices/system/node/node2/cpulist": "",  # memory only
            "sys/bus/pci/devices/0000:3d:00.0/numa_node": "1",
            "sys/bus/pci/devices/0000:3e:00.0/numa_node": "-1",
        },
    )
    nodes = reading.cpus_of_nodes(root)
    assert nodes == {0: frozenset({0, 1, 2, 3, 8}), 1: frozenset(range(4, 8))}
    addresses = ("0000:3d:00.0", "0000:3e:00.0", "0000:3f:00.0", None)
    assert [reading.gpu_node(root, address) for address in addresses] == [1, None, None, None]


# Host memory

MEMINFO = {"proc/meminfo": f"MemTotal: {64 << 20} kB\nMemAvailable: {60 << 20} kB"}
V2 = {
    "proc/self/cgroup": "0::/",
    "sys/fs/cgroup/memory.max": 16 * GIB,
    "sys/fs/cgroup/memory.current": 6 * GIB,
}
V1 = {
    "proc/self/cgroup": "4:cpuset,memory:/job",
    "sys/fs/cgroup/memory/job/memory.limit_in_bytes": 16 * GIB,
    "sys/fs/cgroup/memory/job/memory.usage_in_bytes": 6 * GIB,
}


@pytest.mark.parametrize("files, version", [(V2, 2), (V1, 1)], ids=["v2", "v1"])
def test_the_limit_of_a_container(tmp_path: Path, files: dict[str, object], version: int) -> None:
    found = reading._host(write(tmp_path, {**MEMINFO, **files}))
    assert found.groups == (preflight.ControlGroup(version, 16 * GIB, 10 * GIB),)
    assert found.total_bytes == 64 * GIB


def test_a_system_that_tells_nothing(tmp_path: Path) -> None:
    found = reading._host(tmp_path)
    assert (found.total_bytes, found.groups, found.shm_bytes) == (None, (), None)
    assert not found.has_rdma
    assert reading.cpus_of_nodes(tmp_path) == {}
    assert reading.driver_version(tmp_path) is None


def test_rdma_adapters_are_seen(tmp_path: Path) -> None:
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    assert reading._host(tmp_path).has_rdma


@pytest.mark.parametrize("limit, seen", [(1 << 23, 1 << 23), (resource.RLIM_INFINITY, None)])
def test_the_limit_of_locked_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, seen: int | None
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert reading._host(tmp_path).memlock_bytes == seen


@pytest.mark.parametrize(
    "options, variables, num_gpus, ranks",
    [
        ((3, 2), {"LOCAL_WORLD_SIZE": "8"}, 4, (3, "--ranks-per-host")),
        ((None, 2), {"LOCAL_WORLD_SIZE": "8"}, 4, (2, "--nproc-per-node of the command")),
        (
            (None, None),
            {"LOCAL_WORLD_SIZE": "8", "SLURM_NTASKS_PER_NODE": "4"},
            4,
            (8, "LOCAL_WORLD_SIZE"),
        ),
        ((None, None), {"SLURM_NTASKS_PER_NODE": "4"}, 8, (4, "SLURM_NTASKS_PER_NODE")),
        ((None, None), {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 8, (2, "OMPI_COMM_WORLD_LOCAL_SIZE")),
        ((None, None), {"LOCAL_WORLD_SIZE": "many"}, 8, (8, "one for each GPU")),
        ((None, None), {}, 0, (1, "--ranks-per-host N changes it")),
    ],
)
def test_how_many_ranks_share_the_memory(
    options: tuple[int | None, int | None],
    variables: dict[str, str],
    num_gpus: int,
    ranks: tuple[int, str],
) -> None:
    given, launcher = options
    words = Words((), launcher)
    found = reading._ranks(Request(given), words, variables, num_gpus)
    assert found.number == ranks[0]
    assert found.source.startswith(ranks[1])


# NVIDIA's driver

H200 = "0, NVIDIA H200, 00000000:1B:00.0, 580.65.06, 143771, 5, 5, 16, 16"
IDLE = "1, NVIDIA A100, 00000000:3D:00.0, 580.65.06, 81920, 1, 4, 8, 16"
UNKNOWN = "2, NVIDIA GH200, 00000009:01:00.0, 580.65.06, [N/A], [N/A], 5, 1, 16"


def test_rows_of_nvidia_smi() -> None:
    rows = reading.parse_nvidia_smi(f"{H200}\n{IDLE}\n{UNKNOWN}\nNo devices were found\n")
    assert [row["driver_version"] for row in rows] == ["580.65.06"] * 3
    assert list(map(reading.gpu_of, rows)) == [
        Gpu(0, "NVIDIA H200", 143771 << 20, "0000:1b:00.0"),
        Gpu(1, "NVIDIA A100", 81920 << 20, "0000:3d:00.0"),
        Gpu(2, "NVIDIA GH200", None, "0009:01:00.0"),
    ]
    links = [Link(5, 5, 16, 16), Link(1, 4, 8, 16), None]
    assert list(map(reading.link_of, rows)) == links


def nvidia_smi(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_nvidia_smi_is_asked_for_what_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi(tmp_path, f'echo "$@" >{tmp_path}/asked; echo "{H200}"', monkeypatch)
    (row,) = reading.query_nvidia_smi()
    query, form = (tmp_path / "asked").read_text().split()
    assert query == "--query-gpu=" + ",".join(row)
    assert form == "--format=csv,noheader,nounits"


@pytest.mark.parametrize("script", ["echo no driver; exit 9", f"sleep 2; echo '{H200}'"])
def test_an_nvidia_smi_that_does_not_answer_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    nvidia_smi(tmp_path, script, monkeypatch)
    monkeypatch.setattr(reading, "NVIDIA_SMI_S", 0.2)
    assert reading.query_nvidia_smi() == []


def test_an_nvidia_smi_that_fails_for_one_gpu_tells_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi(tmp_path, f"echo '{H200}'; echo Unable to determine the device; exit 9", monkeypatch)
    assert [row["index"] for row in reading.query_nvidia_smi()] == ["0"]


@pytest.mark.parametrize(
    "line, version",
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23 2025", "570.86.15"),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build",
            "580.65.06",
        ),
    ],
)
def test_the_drivers_version_without_nvidia_smi(tmp_path: Path, line: str, version: str) -> None:
    write(tmp_path, {"proc/driver/nvidia/version": f"{line}\nGCC version: gcc 12.3.0 (x)"})
    assert reading.driver_version(tmp_path) == version


def test_gpus_are_those_that_torch_sees_with_their_links_by_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi(tmp_path, f'echo "{H200}"; echo "{IDLE}"', monkeypatch)
    pci = {"pci_domain_id": 0, "pci_bus_id": 0x3D, "pci_device_id": 0}
    seen = SimpleNamespace(name="NVIDIA A100", total_memory=80 * GIB, **pci)
    torch: Any = SimpleNamespace(
        cuda=SimpleNamespace(device_count=lambda: 1, get_device_properties=lambda _: seen)
    )
    driver, gpus = reading._gpus(torch, tmp_path)
    assert driver == "580.65.06"
    assert gpus == (Gpu(0, "NVIDIA A100", 80 * GIB, "0000:3d:00.0"),)
    unseen: dict[str, str] = {}
    facts = Torch("13.0", None, True)
    (linked,) = reading._measured(facts, gpus, [ALL], QUIET, lambda _: None, unseen)
    assert linked.link == Link(1, 4, 8, 16)
    assert unseen == {"bandwidth": "--no-bandwidth was given"}


def test_gpus_that_torch_does_not_see_are_all_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi(tmp_path, f'echo "{H200}"; echo "{IDLE}"', monkeypatch)
    _, gpus = reading._gpus(None, tmp_path)
    assert [g.name for g in gpus] == ["NVIDIA H200", "NVIDIA A100"]


def test_copies_are_measured_before_links_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.slipstream.doctor import bandwidth

    order: list[str] = []
    monkeypatch.setattr(bandwidth, "measure", lambda g, *_: order.append("copies") or g)
    monkeypatch.setattr(reading, "query_nvidia_smi", lambda: order.append("links") or [])
    unseen: dict[str, str] = {}
    request = Request(measures=True)
    facts = Torch("13.0", None, True)
    reading._measured(facts, (gpu(0, 0),), [ALL], request, lambda _: None, unseen)
    assert order == ["copies", "links"]


# The whole


@pytest.fixture(scope="module")
def here() -> Facts:
    return collect(QUIET)


def test_this_machine_can_be_read(here: Facts) -> None:
    assert here.cpus == os.sched_getaffinity(0)
    assert here.host.total_bytes is not None
    assert here.host.shm_bytes == os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize
    assert here.torch is not None
    assert here.command is None


def test_only_variables_that_checks_ask_for_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "1")
    monkeypatch.setenv("A_SECRET", "1")
    found = collect(QUIET).environment
    assert found["NCCL_GRAPH_REGISTER"] == "1"
    assert found.keys() <= set(reading.VARIABLES)


def test_ranks_come_from_the_launcher_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_with_command", lambda facts, *_: facts)
    words = ("torchrun", "--nproc-per-node", "6", "train.py", "--lr", "1")
    assert collect(Request(measures=False, words=words)).ranks == Ranks(
        6, "--nproc-per-node of the command"
    )


def test_progress_names_what_is_looked_at() -> None:
    steps: list[str] = []
    collect(QUIET, steps.append)
    assert steps == ["versions", "GPUs", "patches"]


def test_targets_of_patches_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.transformer.moe import token_dispatcher

    found = {target.name: target for target in collect(QUIET).patches}
    assert len(found) > 10
    assert not any(target.problem for target in found.values())
    monkeypatch.delattr(token_dispatcher, "maybe_move_tensor_to_cpu")
    (moved,) = [target for target in collect(QUIET).patches if target.problem]
    assert moved.features == ("`install()` on a GPU",)
    assert "maybe_move_tensor_to_cpu does not exist" in str(moved.problem)


def test_flags_are_not_parsed_by_what_does_not_import(here: Facts) -> None:
    words = split_command(["--lr", "1"])
    broken = replace(here.process, te_import_error="OSError: no lib")
    steps: list[str] = []
    machine = replace(here, process=broken)
    assert not reading._can_import(machine)
    found = reading._with_command(machine, words, steps.append)
    assert "must be importable" in found.unseen["command"]
    assert found.command is None
    assert steps == []
