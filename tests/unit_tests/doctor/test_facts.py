# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Facts of the system are parsed correctly, and optional parts may be missing."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from doctor_facts import GIB, write

from megatron.slipstream.doctor import bandwidth, facts as reading
from megatron.slipstream.doctor.facts import Gpu, collect
from megatron.slipstream.integration.entry import checks
from megatron.slipstream.options import preflight
from megatron.slipstream.plan.trace import Bandwidth


def test_the_cpus_beside_a_gpu(tmp_path: Path) -> None:
    devices = "sys/bus/pci/devices"
    cpus = {"0000:3d:00.0": "0-3,8", "0000:3e:00.0": ""}
    root = write(tmp_path, {f"{devices}/{name}/local_cpulist": of for name, of in cpus.items()})
    found = [reading.local_cpus(root, address) for address in (*cpus, "0000:3f:00.0")]
    assert found == [{0, 1, 2, 3, 8}, set(), set()]


@pytest.mark.parametrize(
    "line, version",
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23 2025", "570.86.15"),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build",
            "580.65.06",
        ),
        ("of another form", None),
    ],
)
def test_the_drivers_version(tmp_path: Path, line: str, version: str | None) -> None:
    assert reading.driver_version(tmp_path) is None
    write(tmp_path, {"proc/driver/nvidia/version": f"{line}\nGCC version: gcc 12.3.0 (x)"})
    assert reading.driver_version(tmp_path) == version


def test_gpus_are_those_that_torch_sees_each_measured_from_its_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pci = {"pci_domain_id": 0, "pci_bus_id": 0x3D, "pci_device_id": 0}
    devices = [
        SimpleNamespace(name="NVIDIA A100", total_memory=80 * GIB, **pci),
        SimpleNamespace(name="without address", total_memory=GIB),
    ]
    torch: Any = SimpleNamespace(
        cuda=SimpleNamespace(
            is_available=lambda: True,
            device_count=lambda: 2,
            get_device_properties=devices.__getitem__,
        ),
        version=SimpleNamespace(cuda="13.0"),
    )
    (cpu, *_) = os.sched_getaffinity(0)
    write(
        tmp_path,
        {
            "sys/bus/pci/devices/0000:3d:00.0/local_cpulist": cpu,
        },
    )
    rates = Bandwidth(1.0, 2.0, 3.0, 4.0)
    beside = []

    def measure(number: int, cpus: frozenset[int]) -> Bandwidth:
        assert number == len(beside)
        beside.append(cpus)
        return rates

    monkeypatch.setattr(bandwidth, "measure", measure)
    monkeypatch.setattr(reading, "_torch", lambda: (torch, None))
    found = collect(root=tmp_path)
    assert found.gpus == (
        Gpu(0, "NVIDIA A100", 80 * GIB, frozenset({cpu}), rates),
        Gpu(1, "without address", GIB, frozenset(), rates),
    )
    assert beside == [frozenset({cpu}), frozenset()]
    assert [gpu.bandwidth for gpu in collect(measures=False, root=tmp_path).gpus] == [None, None]


def test_targets_of_patches_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.transformer.moe import token_dispatcher

    found = collect(measures=False)
    assert found.has_torch
    assert found.command is None
    assert len(found.patches) > 10
    assert not any(found.patches.values())
    monkeypatch.delattr(token_dispatcher, "maybe_move_tensor_to_cpu")
    (moved,) = filter(None, collect(measures=False).patches.values())
    assert "maybe_move_tensor_to_cpu does not exist" in moved


@pytest.mark.parametrize(
    "words, num_processes",
    [
        ("torchrun --nproc-per-node 6 train.py --lr 1", 6),
        ("torchrun --nproc-per-node 4 --nnodes 2 train.py --lr 1", 8),
        ("--lr 1", None),
    ],
)
def test_flags_are_checked_for_the_processes_of_the_command(
    monkeypatch: pytest.MonkeyPatch, words: str, num_processes: int | None
) -> None:
    given: list[Any] = []
    checked = checks.Checked(None)
    monkeypatch.setattr(checks, "check_flags", lambda *values: given.append(values) or checked)
    assert collect(measures=False, words=words.split()).command is checked
    assert given == [(("--lr", "1"), num_processes)]


def test_flags_are_not_parsed_by_what_does_not_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_transformer_engine_switch", lambda: (None, "no lib"))
    found = collect(measures=False, words=["--lr", "1"])
    assert found.command is None
    assert found.words.flags == ("--lr", "1")
    assert found.patches == {}
