# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Ranks share GPUs only if they are told to."""

from __future__ import annotations

import importlib.machinery
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tools import shared_gpus
from tools.shared_gpus import (
    VARIABLE,
    num_places,
    num_tests_per_gpu,
    ranks_per_gpu,
    take_place,
)

ROOT = Path(__file__).resolve().parents[2]
NCCL = ("NCCL_HOSTID", "NCCL_IB_DISABLE", "NCCL_SOCKET_IFNAME")


@pytest.fixture(autouse=True)
def _two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv(VARIABLE, raising=False)
    for name in NCCL:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_each_gpu_counts_as_often_as_ranks_may_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (ranks_per_gpu(), num_places()) == (1, 2)
    monkeypatch.setenv(VARIABLE, "4")
    assert (ranks_per_gpu(), num_places()) == (4, 8)


@pytest.mark.parametrize(
    "gib, expected", [([80], 4), ([140], 8), ([140, 80], 4), ([8], 1), ([], 1)], ids=str
)
def test_as_many_tests_share_a_gpu_as_the_memory_of_the_smallest_is_enough_for(
    gib: list[int], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An H100 of "80 GB" has 79.2 GiB.
    gpus = [SimpleNamespace(total_memory=(size << 30) - (800 << 20)) for size in gib]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_properties", gpus.__getitem__)
    assert num_tests_per_gpu() == expected


@pytest.mark.parametrize("text", ["0", "-1", "two", ""])
def test_what_is_no_number_of_ranks_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(ValueError, match=f"{VARIABLE}={text} is not a number of ranks; set 1"):
        ranks_per_gpu()


def test_ranks_that_have_a_gpu_each_are_neighbours_on_one_host() -> None:
    assert [take_place(rank, 2) for rank in range(2)] == [0, 1]
    assert not any(name in os.environ for name in NCCL)


def test_ranks_that_share_a_gpu_are_on_hosts_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "2")
    hosts = []
    for rank in range(4):
        assert take_place(rank, 4) == rank % 2
        hosts.append(os.environ["NCCL_HOSTID"])
    assert len(set(hosts)) == 4


def test_too_many_ranks_are_refused_with_the_variable() -> None:
    with pytest.raises(ValueError, match=rf"3 ranks .* 2 GPU\(s\); set {VARIABLE}=2 to let"):
        take_place(0, 3)


def test_a_script_that_takes_its_gpu_from_the_local_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import json, os, sys\nprint(json.dumps([sys.argv, os.environ['LOCAL_RANK'], __name__]))\n"
    )
    monkeypatch.setenv(VARIABLE, "2")
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(sys, "argv", ["shared_gpus.py", str(script), "--flag", "1"])
    shared_gpus.main()
    argv = [str(script), "--flag", "1"]
    assert json.loads(capsys.readouterr().out) == [argv, "1", "__main__"]
    assert os.environ["NCCL_HOSTID"] == "rank3"


def test_a_package_named_tools_of_another_checkout_is_not_taken(tmp_path: Path) -> None:
    other = tmp_path / "tools" / "__init__.py"
    other.parent.mkdir()
    other.touch()
    spec = importlib.machinery.PathFinder.find_spec("tools", [str(ROOT), str(tmp_path)])
    assert spec is not None
    assert spec.origin == str(ROOT / "tools" / "__init__.py")
