# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The process goes to its GPU's NUMA node, unless there is one node, none known, or a binding."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron.slipstream.config import OffloadConfig
from megatron.slipstream.fine_grained_activation_offload.backend import Backend
from megatron.slipstream.fine_grained_activation_offload.cpu_backends import CpuBackend
from megatron.slipstream.fine_grained_activation_offload.cuda_backend import CudaBackend
from megatron.slipstream.integration import engine_setup, install, numa
from megatron.slipstream.integration.numa import Binding, bind_to_gpu, decide

GPU = "0000:1b:00.0"
TWO_NODES = {0: "0-3,8-11", 1: "4-7,12-15"}
ALL = frozenset(range(16))


def make_sysfs(root: Path, nodes: dict[int, str], gpu_node: int | None) -> Path:
    for node, cpus in nodes.items():
        folder = root / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpus}\n")
    (root / "devices/system/node").mkdir(parents=True, exist_ok=True)
    (root / "devices/system/node/online").write_text("0-1\n")
    if gpu_node is not None:
        (root / "bus/pci/devices" / GPU).mkdir(parents=True)
        (root / "bus/pci/devices" / GPU / "numa_node").write_text(f"{gpu_node}\n")
    return root


class Process:
    """Stands for the process's affinity."""

    def __init__(self, cpus: Iterable[int]) -> None:
        self.cpus = set(cpus)
        self.num_changes = 0
        self.error: OSError | None = None

    def get(self, _: int) -> set[int]:
        return self.cpus

    def set(self, _: int, cpus: Iterable[int]) -> None:
        if self.error is not None:
            raise self.error
        self.cpus = set(cpus)
        self.num_changes += 1


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    process = Process(ALL)
    monkeypatch.setattr(os, "sched_getaffinity", process.get)
    monkeypatch.setattr(os, "sched_setaffinity", process.set)
    monkeypatch.setattr(numa, "get_memory_policy", lambda: 0)
    monkeypatch.setattr(numa, "gpu_pci_address", lambda _: GPU)
    monkeypatch.setattr(numa, "_bound", None)
    return process


# What is decided.


@pytest.mark.parametrize("node, cpus", [(0, "0-3,8-11"), (1, "4-7,12-15")])
def test_with_two_nodes_the_process_gets_the_cpus_of_its_gpus_node(
    tmp_path: Path, node: int, cpus: str
) -> None:
    sysfs = make_sysfs(tmp_path, TWO_NODES, node)
    assert decide(sysfs, GPU, ALL, 0) == Binding(node, numa.parse_cpus(cpus))


def test_an_unknown_memory_policy_does_not_hinder(tmp_path: Path) -> None:
    assert isinstance(decide(make_sysfs(tmp_path, TWO_NODES, 1), GPU, ALL, None), Binding)


@pytest.mark.parametrize(
    "nodes, gpu_node, pci_address, cpus, policy, reason",
    [
        ({0: "0-15"}, 0, GPU, ALL, 0, "the machine has one node"),
        # Memory without CPUs, as a GPU's own may be, is no place to run at.
        ({0: "0-15", 1: ""}, 0, GPU, ALL, 0, "the machine has one node"),
        ({}, 0, GPU, ALL, 0, "the machine has one node"),
        (TWO_NODES, 1, GPU, ALL - {15}, 0, "the process is bound to CPUs already"),
        (TWO_NODES, 1, GPU, frozenset(range(4)), 0, "the process is bound to CPUs"),
        (TWO_NODES, 1, GPU, ALL, 2, "a memory policy is set already"),
        (TWO_NODES, 1, GPU, ALL, 3, "a memory policy is set already"),
        (TWO_NODES, -1, GPU, ALL, 0, f"the node of {GPU} is unknown"),
        (TWO_NODES, 2, GPU, ALL, 0, f"the node of {GPU} is unknown"),
        (TWO_NODES, None, GPU, ALL, 0, f"the node of {GPU} is unknown"),
        (TWO_NODES, 1, None, ALL, 0, "torch does not tell the GPU's PCI address"),
    ],
)
def test_otherwise_the_process_stays_where_it_is(
    tmp_path: Path,
    process: Process,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    nodes: dict[int, str],
    gpu_node: int | None,
    pci_address: str | None,
    cpus: frozenset[int],
    policy: int,
    reason: str,
) -> None:
    sysfs = make_sysfs(tmp_path, nodes, gpu_node)
    monkeypatch.setattr(numa, "get_memory_policy", lambda: policy)
    monkeypatch.setattr(numa, "gpu_pci_address", lambda _: pci_address)
    process.cpus = set(cpus)
    with caplog.at_level(logging.INFO):
        assert bind_to_gpu(0, sysfs) is None
    assert process.num_changes == 0
    (line,) = caplog.messages
    assert f"because {reason}" in line
    assert numa.format_cpus(cpus) in line


# What is done.


def test_binding_changes_the_affinity_and_logs_before_and_after(
    tmp_path: Path, process: Process, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        place = bind_to_gpu(3, make_sysfs(tmp_path, TWO_NODES, 1))
    assert process.cpus == {4, 5, 6, 7, 12, 13, 14, 15}
    assert place is not None
    (line,) = caplog.messages
    assert line == (
        "NUMA: GPU 3: from CPUs 0-15, memory policy 0 to CPUs 4-7,12-15, pinned memory on node 1"
    )


def test_installing_again_does_not_take_our_binding_for_the_users(
    tmp_path: Path, process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    sysfs = make_sysfs(tmp_path, TWO_NODES, 1)
    bind_to_gpu(0, sysfs)
    calls = note_calls(monkeypatch)
    place = bind_to_gpu(0, sysfs)
    assert place is not None
    place(4096, 8192)
    assert calls == [(4096, 8192, 1)]
    assert process.num_changes == 1


def test_a_process_that_may_not_be_moved_stays(
    tmp_path: Path, process: Process, caplog: pytest.LogCaptureFixture
) -> None:
    process.error = PermissionError(errno.EPERM, "Operation not permitted")
    with caplog.at_level(logging.INFO):
        assert bind_to_gpu(0, make_sysfs(tmp_path, TWO_NODES, 1)) is None
    assert "Operation not permitted" in caplog.text


def note_calls(monkeypatch: pytest.MonkeyPatch, error: int = 0) -> list[tuple[int, int, int]]:
    calls: list[tuple[int, int, int]] = []

    def prefer(address: int, nbytes: int, node: int) -> int:
        calls.append((address, nbytes, node))
        return error

    monkeypatch.setattr(numa, "_prefer_node", prefer)
    return calls


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS])
def test_memory_that_may_not_be_placed_is_said_once_and_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: int
) -> None:
    calls = note_calls(monkeypatch, error)
    place = numa.NodeMemory(1)
    with caplog.at_level(logging.INFO):
        place(4096, 4096)
        place(8192, 4096)
    assert len(calls) == 1
    (line,) = caplog.messages
    assert os.strerror(error) in line


@pytest.mark.skipif(os.uname().machine not in numa._SYSTEM_CALLS, reason="unknown system calls")
def test_the_kernel_is_asked_for_a_node_that_there_is_and_refuses_another() -> None:
    if numa.get_memory_policy() is None:
        pytest.skip("this system does not let a process ask for its memory policy")
    backend = CpuBackend()
    buffer = backend.allocate_host(1 << 20)
    assert numa._prefer_node(buffer.data_ptr(), buffer.numel(), 0) in (0, errno.EPERM)
    assert numa._prefer_node(buffer.data_ptr(), buffer.numel(), 1000) != 0
    assert numa._prefer_node(buffer.data_ptr() + 512, 4096, 0) != 0, "it begins on no page"


def test_an_unknown_kind_of_machine_has_no_system_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa.platform, "machine", lambda: "riscv64")
    assert numa.get_memory_policy() is None
    assert numa._prefer_node(0, 4096, 0) == errno.ENOSYS


# Facts.


@pytest.mark.parametrize(
    "text, cpus",
    [("0-3,8", {0, 1, 2, 3, 8}), ("5\n", {5}), ("", set()), ("0-1,3-4,6", {0, 1, 3, 4, 6})],
)
def test_lists_of_cpus_are_read_and_written(text: str, cpus: set[int]) -> None:
    assert numa.parse_cpus(text) == cpus
    assert numa.format_cpus(cpus) == text.strip()


def test_the_gpus_address_is_written_as_the_kernel_writes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    assert numa.gpu_pci_address(0) == GPU
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace())
    assert numa.gpu_pci_address(0) is None


# At installation.


class _NoGpu(CudaBackend):
    """The GPU's backend as far as installing needs it."""

    def new_stream(self) -> object:
        return object()

    def wait_on_host(self, stream: object) -> None:
        pass


@pytest.mark.parametrize(
    "backend, option, num_asked",
    [(_NoGpu, "auto", 1), (_NoGpu, "off", 0), (CpuBackend, "auto", 0)],
    ids=["cuda", "cuda, off", "cpu"],
)
def test_only_a_gpu_and_only_with_the_option_is_bound(
    monkeypatch: pytest.MonkeyPatch, backend: type[Backend], option: str, num_asked: int
) -> None:
    place = numa.NodeMemory(1)
    asked: list[int] = []

    def bind(index: int) -> numa.NodeMemory:
        asked.append(index)
        return place

    monkeypatch.setattr(engine_setup, "make_backend", lambda _: backend())
    monkeypatch.setattr(engine_setup.numa, "bind_to_gpu", bind)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setenv("LOCAL_RANK", "5")
    try:
        manager = install.install(OffloadConfig(offload_numa=option))  # type: ignore[arg-type]
        assert asked == [5] * num_asked
        if num_asked:
            assert manager.store.backend.place_host_memory is place  # type: ignore[attr-defined]
    finally:
        install.uninstall()


@pytest.mark.parametrize("limit_bytes", [None, 12345])
def test_the_limit_is_the_option_or_the_share_of_this_process(
    monkeypatch: pytest.MonkeyPatch, limit_bytes: int | None
) -> None:
    monkeypatch.setattr(engine_setup.preflight, "default_host_memory_limit_bytes", lambda: 777)
    config = OffloadConfig(offload_backend="cpu", offload_host_memory_limit_bytes=limit_bytes)
    try:
        manager = install.install(config)
        assert manager.store.host_pool.limit_bytes == (limit_bytes or 777)
    finally:
        install.uninstall()
