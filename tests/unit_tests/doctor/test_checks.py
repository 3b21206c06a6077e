# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Each problem is found where it exists and nowhere else, with its cure."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
from doctor_facts import GIB, HEALTHY, environment, facts, first_gpu, host

from megatron.slipstream import preflight
from megatron.slipstream.doctor import command
from megatron.slipstream.doctor.check import NOT_CHECKED
from megatron.slipstream.doctor.checks import TOPICS, examine, findings_of, worst
from megatron.slipstream.doctor.facts import (
    BuildLock,
    Command,
    Facts,
    Link,
    Native,
    PatchTarget,
    Torch,
)
from megatron.slipstream.plan.trace import Bandwidth
from megatron.slipstream.preflight import ControlGroup
from megatron.slipstream.rules import Finding

NO_GPU = Torch("13.0", None, False)
OFFLOADING = Command((), 2, offloads=True)
DETERMINISTIC = OFFLOADING._replace(is_deterministic=True)
IN_GRAPHS = Command((), 2, offloads=True, graphs="transformer_engine")
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


MOVED = PatchTarget(
    "megatron.core.gone",
    ("`install()`",),
    "megatron.core.gone does not exist; install one of the tested releases",
)


class Case(NamedTuple):
    """A machine with a problem, and machines that almost have it."""

    severity: str
    sick: Facts
    words: tuple[str, ...]
    """Values in the message and the cure."""
    healthy: tuple[Facts, ...] = ()


def with_command(machine: Facts, flags: Command) -> Facts:
    return replace(machine, command=flags)


CASES = {
    # Versions
    "not-installed": Case(
        "error",
        facts({"megatron_core": None}),
        ("megatron-core is not installed", "pip install 'megatron-core>=0.18.2,<0.20'"),
    ),
    "torch-does-not-import": Case(
        "error",
        replace(HEALTHY, torch=None, torch_error="OSError: libcudart.so.13"),
        ("libcudart.so.13", "repair"),
    ),
    "version-not-supported": Case(
        "error",
        facts({"torch": "2.7.1"}),
        ("torch 2.7.1 is not supported", ">=2.8", "pip install"),
        # A container's build of an unreleased version.
        (facts({"torch": "2.8.0a0+5228986c39.nv25.5"}),),
    ),
    "torch-without-cuda": Case(
        "error",
        replace(HEALTHY, torch=Torch(None, None, False)),
        ("built without CUDA", "install torch with CUDA"),
        (replace(HEALTHY, torch=Torch(None, None, False), driver=None, gpus=()),),
    ),
    "patch-target-moved": Case(
        "error",
        facts(patches=(MOVED, *HEALTHY.patches)),
        (MOVED.name, "install one of the tested releases"),
    ),
    "stale-build-lock": Case(
        "warning",
        facts(build_locks=(BuildLock("/cache/torch_extensions/share_storage_ext/lock", 700.0),)),
        ("share_storage_ext/lock is 12 minutes old", "delete"),
        (facts(build_locks=(BuildLock("/cache/torch_extensions/share_storage_ext/lock", 30.0),)),),
    ),
    "cpp-not-usable": Case(
        "warning",
        facts(native=Native(False, "there is no C++ compiler", "install g++")),
        ("offload_native='auto' is not possible here", "there is no C++ compiler", "install g++"),
        (facts(native=Native(is_compiled=False)),),
    ),
    "driver-too-old": Case(
        "error",
        replace(HEALTHY, torch=NO_GPU, driver="570.86.10"),
        ("driver 570.86.10", "CUDA 13.0", "580", "update the driver"),
        (
            # The compatibility package makes it work.
            replace(HEALTHY, driver="570.86.10"),
            replace(HEALTHY, torch=NO_GPU),
            replace(HEALTHY, torch=Torch("12.8", None, False), driver="570.86.10"),
        ),
    ),
    "transformer-engine-missing": Case(
        "warning",
        facts({"transformer_engine": None, "te_offload_v1": None}),
        ("Transformer Engine is not installed", "transformer-engine[pytorch]>=2.14"),
        (facts({"transformer_engine": None, "te_offload_v1": None}, gpus=()),),
    ),
    "transformer-engine-does-not-import": Case(
        "error",
        facts({"te_import_error": "OSError: no lib", "te_offload_v1": None}),
        ("OSError: no lib", "complete the installation"),
    ),
    "too-old-for-graphs": Case(
        "error",
        with_command(facts({"torch": "2.8.1"}), IN_GRAPHS),
        ("torch 2.8.1", "only from 2.9 on", "install torch 2.9 or newer"),
        (with_command(facts({"torch": "2.9.0"}), IN_GRAPHS),),
    ),
    # Environment variables
    "offload-switch-off": Case(
        "error",
        with_command(facts({"te_offload_v1": False, "te_offload_v1_environment": "0"}), OFFLOADING),
        ("NVTE_CPU_OFFLOAD_V1=0", "set NVTE_CPU_OFFLOAD_V1=1"),
        # The value that Transformer Engine has read counts, not the current environment.
        (
            with_command(facts({"te_offload_v1_environment": "0"}), OFFLOADING),
            with_command(facts({"te_offload_v1": None}), OFFLOADING),
        ),
    ),
    "expandable-segments-in-graphs": Case(
        "error",
        with_command(environment(**EXPANDABLE), IN_GRAPHS),
        ("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", "set NCCL_GRAPH_REGISTER=0"),
        (
            with_command(environment(**EXPANDABLE, NCCL_GRAPH_REGISTER="0"), IN_GRAPHS),
            with_command(environment(**EXPANDABLE), OFFLOADING),
            with_command(
                environment(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:False"), IN_GRAPHS
            ),
        ),
    ),
    "debugging-variable": Case(
        "warning",
        environment(CUDA_LAUNCH_BLOCKING="1"),
        ("CUDA_LAUNCH_BLOCKING=1", "no copy overlaps", "unset CUDA_LAUNCH_BLOCKING"),
        (environment(CUDA_LAUNCH_BLOCKING="0"), environment(CUDA_LAUNCH_BLOCKING="")),
    ),
    "many-hardware-queues": Case(
        "warning",
        with_command(HEALTHY, OFFLOADING._replace(has_experts=True)),
        ("copies beside experts", "set CUDA_DEVICE_MAX_CONNECTIONS=1"),
        (
            with_command(HEALTHY, OFFLOADING),
            with_command(HEALTHY, OFFLOADING._replace(has_experts=True, offloads=False)),
            with_command(
                environment(CUDA_DEVICE_MAX_CONNECTIONS="8"), OFFLOADING._replace(graphs="chunk")
            ),
            with_command(facts(gpus=()), OFFLOADING._replace(graphs="chunk")),
        ),
    ),
    "not-deterministic": Case(
        "error",
        with_command(environment(NVTE_ALLOW_NONDETERMINISTIC_ALGO="1"), DETERMINISTIC),
        (
            "deterministic_mode=True is not supported with NVTE_ALLOW_NONDETERMINISTIC_ALGO=1",
            "set NVTE_ALLOW_NONDETERMINISTIC_ALGO=0",
        ),
        (
            with_command(HEALTHY, DETERMINISTIC),
            with_command(environment(NVTE_ALLOW_NONDETERMINISTIC_ALGO="1"), OFFLOADING),
            with_command(
                facts({"transformer_engine": None, "te_offload_v1": None}, environment={}, gpus=()),
                DETERMINISTIC,
            ),
        ),
    ),
    "no-graph-mixing": Case(
        "warning",
        with_command(environment(NCCL_GRAPH_MIXING_SUPPORT="0"), IN_GRAPHS),
        ("NCCL_GRAPH_MIXING_SUPPORT=0", "unset"),
        (
            with_command(environment(NCCL_GRAPH_MIXING_SUPPORT="1"), IN_GRAPHS),
            with_command(environment(NCCL_GRAPH_MIXING_SUPPORT="0"), OFFLOADING),
        ),
    ),
    # GPUs
    "no-gpu": Case(
        "note",
        replace(HEALTHY, torch=NO_GPU, driver=None, gpus=()),
        ("this machine has no GPU", "a machine that trains"),
        (replace(HEALTHY, torch=NO_GPU, gpus=()),),
    ),
    "gpu-not-seen": Case(
        "error",
        replace(environment(CUDA_VISIBLE_DEVICES=""), torch=NO_GPU),
        ("torch sees no GPU", "CUDA_VISIBLE_DEVICES=''", "unset CUDA_VISIBLE_DEVICES"),
        # Then the problem is another one.
        (replace(HEALTHY, torch=Torch(None, None, False)), replace(HEALTHY, torch=None)),
    ),
    "slow-copies": Case(
        "warning",
        first_gpu(bandwidth=Bandwidth(55.4, 20.0, 50.0, 20.0)),
        ("copies back reach 20.0 GB/s, 32%", "NUMA"),
        (
            first_gpu(bandwidth=Bandwidth(45.0, 45.0, 40.0, 40.0)),
            # The link is not PCIe.
            first_gpu(link=None, bandwidth=Bandwidth(20.0, 20.0, 20.0, 20.0)),
        ),
    ),
    "bandwidth-not-measured": Case(
        "warning",
        first_gpu(bandwidth=None, bandwidth_error="out of memory"),
        ("GPU 0", "out of memory", "another process"),
    ),
    "bound-to-another-node": Case(
        "warning",
        replace(HEALTHY, cpus=frozenset(range(8))),
        ("GPU 1 is on NUMA node 1", "CPUs 0-7", "numactl --cpunodebind=1 --membind=1"),
        (
            replace(HEALTHY, cpus=frozenset(range(8)), gpus=HEALTHY.gpus[:1]),
            replace(HEALTHY, cpus=frozenset(range(9))),
            replace(first_gpu(node=None), cpus=frozenset(range(8, 16))),
            # Each rank is bound to its own GPU.
            replace(environment(LOCAL_RANK="0"), cpus=frozenset(range(8))),
        ),
    ),
    "affinity-tools-missing": Case(
        "warning",
        facts({"affinity_tools": False}),
        ("cuda-python or pynvml is missing", "pip install cuda-python nvidia-ml-py"),
        (facts({"affinity_tools": False}, gpus=()),),
    ),
    # Host memory
    "little-host-memory": Case(
        "warning",
        facts({"available_memory_bytes": 9 * GIB}),
        ("each of 2 ranks may pin 3.6 GiB", "more host memory"),
        (
            facts({"available_memory_bytes": 11 * GIB}),
            facts({"available_memory_bytes": 9 * GIB}, gpus=()),
        ),
    ),
    "host-memory-limit-too-high": Case(
        "warning",
        with_command(HEALTHY, OFFLOADING._replace(host_memory_limit_bytes=501 * GIB)),
        ("1002.0 GiB", "1000.0 GiB are available", f"to {400 * GIB} or less"),
        (with_command(HEALTHY, OFFLOADING._replace(host_memory_limit_bytes=500 * GIB)),),
    ),
    "local-world-size-not-set": Case(
        "warning",
        replace(HEALTHY, environment={"SLURM_NTASKS_PER_NODE": "8"}),
        ("SLURM_NTASKS_PER_NODE=8", "export LOCAL_WORLD_SIZE=8"),
        (
            environment(SLURM_NTASKS_PER_NODE="8"),
            replace(HEALTHY, environment={"SLURM_NTASKS_PER_NODE": "1"}),
        ),
    ),
    "memlock-limit": Case(
        "warning",
        host(memlock_bytes=8 << 20),
        ("RLIMIT_MEMLOCK is 8.0 MiB", "--ulimit memlock=-1"),
        (host(memlock_bytes=8 << 20, has_rdma=False),),
    ),
    "small-shm": Case(
        "warning",
        host(shm_bytes=64 << 20),
        ("/dev/shm has 64.0 MiB", "--shm-size"),
        (host(shm_bytes=1 * GIB),),
    ),
}
"""Cases by the problem's name."""

OF_THE_COMMAND = {
    command.REFUSED_BY_MEGATRON.name,
    *(command.STAYS.name, command.NO_EFFECT.name, command.NO_EFFECT_ON_MEGATRON.name),
    *(command.NO_FILES.name, command.NOTHING_TO_MOVE.name),
    *(problem.name for problem in preflight.RULES if "data" in problem.name),
    preflight.TOKEN_OUTSIDE_VOCABULARY.name,
}
"""Found when the flags are checked; see test_command.py and integration/test_doctor.py."""


def found(machine: Facts, name: str) -> list[Finding]:
    return [finding for finding in findings_of(examine(machine)) if finding.rule == name]


def test_every_problem_has_a_case_here_or_is_about_flags() -> None:
    declared = {p.name for topic in TOPICS for check in topic.checks for p in check.rules}
    assert declared == CASES.keys() | OF_THE_COMMAND


def test_nothing_is_found_on_a_healthy_machine() -> None:
    assert [row for row in examine(HEALTHY) if row.findings] == []
    assert {row.severity for row in examine(HEALTHY)} == {"ok"}


@pytest.mark.parametrize("name", CASES)
def test_a_problem_is_found_with_its_cure(name: str) -> None:
    case = CASES[name]
    (finding,) = found(case.sick, name)
    assert finding.severity == case.severity
    for word in case.words:
        assert word in finding.text
    assert finding.cure


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.healthy])
def test_a_machine_that_all_but_has_a_problem_has_it_not(name: str) -> None:
    for number, machine in enumerate(CASES[name].healthy):
        assert found(machine, name) == [], number


def test_a_check_finds_only_what_it_declares() -> None:
    for machine in (HEALTHY, *(case.sick for case in CASES.values())):
        for topic in TOPICS:
            for check in topic.checks:
                names = {problem.name for problem in (*check.rules, NOT_CHECKED)}
                problems = {finding.rule for finding in check.look(machine).findings}
                assert problems <= names, check.label


# The severity depends on the training.


@pytest.mark.parametrize(
    "flags, value, severity",
    [
        (None, "0", "warning"),
        (OFFLOADING, "0", "error"),
        # pretrain_gpt.py sets unset variables.
        (OFFLOADING, None, "warning"),
        (Command((), 1), "0", "warning"),
    ],
)
def test_the_switch_is_an_error_for_a_training_that_offloads_with_it(
    flags: Command | None, value: str | None, severity: str
) -> None:
    machine = facts({"te_offload_v1": False, "te_offload_v1_environment": value}, command=flags)
    (finding,) = found(machine, "offload-switch-off")
    assert finding.severity == severity
    assert ("pretrain_gpt.py" in finding.cure) == (value is None)


@pytest.mark.parametrize("flags, severity", [(None, "warning"), (IN_GRAPHS, "error")])
@pytest.mark.parametrize("name", ["expandable-segments-in-graphs", "too-old-for-graphs"])
def test_what_graphs_do_not_allow_is_an_error_once_there_are_graphs(
    flags: Command | None, severity: str, name: str
) -> None:
    machine = replace(CASES[name].sick, command=flags)
    (finding,) = found(machine, name)
    assert finding.severity == ("note" if (flags, name[:3]) == (None, "too") else severity)


def test_expandable_segments_by_their_new_name_go_unnoticed_by_megatron() -> None:
    machine = environment(PYTORCH_ALLOC_CONF="max_split_size_mb:64, expandable_segments:true")
    (finding,) = found(with_command(machine, IN_GRAPHS), "expandable-segments-in-graphs")
    assert "it does not refuse the run" in finding.message
    (finding,) = found(CASES["expandable-segments-in-graphs"].sick, finding.rule)
    assert "it does not refuse the run" not in finding.message


@pytest.mark.parametrize("link", [Link(5, 5, 8, 16), Link(4, 5, 16, 16)])
def test_a_link_that_runs_below_its_maximum_makes_copies_slow(link: Link) -> None:
    machine = first_gpu(link=link, bandwidth=Bandwidth(27.0, 60.0, 25.0, 25.0))
    (finding,) = found(machine, "slow-copies")
    assert "copies out reach 27.0 GB/s, 43%" in finding.message
    assert f"runs with generation {link.generation}, {link.width} lanes" in finding.message


def test_each_debugging_variable_is_found() -> None:
    machine = environment(CUDA_LAUNCH_BLOCKING="1", PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    assert len(found(machine, "debugging-variable")) == 2


def test_every_check_names_the_failure_that_it_prevents() -> None:
    checks = [check for topic in TOPICS for check in topic.checks]
    assert [check.label for check in checks if not (check.prevents and check.rules)] == []
    assert len({check.prevents for check in checks}) == len(checks)


def test_a_row_is_as_bad_as_its_worst_finding() -> None:
    note, error = (Finding(severity, "", "", "") for severity in ("note", "error"))
    assert worst((note, error, note)) == "error"
    assert worst(()) == "ok"


# A skipped check says why.


@pytest.mark.parametrize(
    "machine, label, why",
    [
        (
            facts({"te_import_error": "OSError: no lib", "te_offload_v1": None}),
            "NVTE_CPU_OFFLOAD_V1",
            "does not import",
        ),
        (replace(HEALTHY, unseen={"bandwidth": "not asked"}), "Copies", "not asked"),
        (replace(HEALTHY, unseen={"command": "no torch"}), "Flags", "no torch"),
        (facts({"available_memory_bytes": None}), "May be pinned", "neither"),
        (host(shm_bytes=None), "/dev/shm", "no /dev/shm"),
    ],
)
def test_a_skipped_check_is_a_note(machine: Facts, label: str, why: str) -> None:
    (row,) = (row for row in examine(machine) if row.label == label)
    assert row.severity == "note"
    assert row.value == "unknown"
    assert row.findings[0].rule == NOT_CHECKED.name
    assert why in row.findings[0].message


# The output without problems.


@pytest.mark.parametrize(
    "machine, label, value",
    [
        (HEALTHY, "GPUs", "GPU 0: NVIDIA H200, 140.0 GiB\nGPU 1: NVIDIA H200, 140.0 GiB"),
        (HEALTHY, "CPU affinity", "all CPUs 0-15"),
        (
            replace(HEALTHY, cpus=frozenset({1, 2, 9})),
            "CPU affinity",
            "bound to CPUs 1-2,9",
        ),
        (HEALTHY, "May be pinned", "400.0 GiB for each of 2 (80% of 1000.0 GiB)"),
        (
            host(groups=(ControlGroup(2, 64 * GIB, 60 * GIB), ControlGroup(1, 1 << 62, 5))),
            "May be pinned",
            "400.0 GiB for each of 2 (80% of 1000.0 GiB)\n"
            "limit of the control group (v2): 64.0 GiB",
        ),
        (HEALTHY, "Ranks per host", "2 (LOCAL_WORLD_SIZE)"),
        (
            with_command(HEALTHY, OFFLOADING),
            "Flags",
            "a training with offloading, on 2 processes",
        ),
    ],
)
def test_a_check_shows_what_it_saw(machine: Facts, label: str, value: str) -> None:
    (row,) = (row for row in examine(machine) if row.label == label)
    assert row.value == value
