# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Each check finds its problem, with a cure, and nothing on a machine that almost has it."""

from __future__ import annotations

import os
import pwd
import re
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from doctor_facts import GIB, HEALTHY, environment, facts, first_gpu, training
from packaging.requirements import Requirement

from megatron.slipstream.doctor import checks
from megatron.slipstream.doctor.checks import CHECKS, PACKAGES, SEVERITIES, Row, examine
from megatron.slipstream.doctor.facts import MachineFacts
from megatron.slipstream.estimate.training_command import Words
from megatron.slipstream.integration.entry.checks import Checked
from megatron.slipstream.options.preflight import TOO_OLD_FOR_GRAPHS
from megatron.slipstream.options.rules import Finding
from megatron.slipstream.options.training import STAYS
from megatron.slipstream.patches import releases
from megatron.slipstream.plan.trace import Bandwidth

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "user-guide" / "doctor.md").read_text(encoding="utf-8")

MOVED = {"megatron.core.gone": "megatron.core.gone does not exist; install a tested release"}
LAYER_GRAPHS = {"cuda_graph_impl": "transformer_engine"}
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
EXPANDS = environment(**EXPANDABLE)
NO_TE = {"transformer_engine": None, "te_offload_v1": None}
SWITCH_OFF = facts({"te_offload_v1": False, "te_offload_v1_environment": "0"})
SWITCH_NOT_SET = facts({"te_offload_v1": False, "te_offload_v1_environment": None})
OLD_TE = facts({"transformer_engine": "2.13.1"})


class Case(NamedTuple):
    """A machine with a problem, and machines that almost have it."""

    name: str
    severity: str
    sick: MachineFacts
    words: tuple[str, ...]
    """Of the message and the cure."""
    healthy: tuple[MachineFacts, ...] = ()


CASES = (
    # Versions
    Case(
        "not-installed",
        "error",
        facts({"megatron_core": None}),
        ("megatron-core is not installed", f"pip install 'megatron-core{releases.supported()}'"),
    ),
    Case(
        "torch-does-not-import",
        "error",
        replace(HEALTHY, torch_error="OSError: libcudart.so.13"),
        ("libcudart.so.13", "repair"),
    ),
    Case(
        "version-not-supported",
        "error",
        facts({"torch": "2.7.1"}),
        ("torch 2.7.1 is not supported", f">={releases.OLDEST_TORCH}", "pip install"),
        # A container's build of an unreleased version, and one of one's own.
        (
            facts({"torch": f"{releases.OLDEST_TORCH}.0a0+5228986c39.nv25.5"}),
            facts({"torch": "of-mine"}),
        ),
    ),
    Case(
        "transformer-engine-missing",
        "warning",
        facts(NO_TE),
        ("Transformer Engine is not installed", "transformer-engine[pytorch]>=2.14"),
        (facts(NO_TE, gpus=()),),
    ),
    Case(
        "transformer-engine-does-not-import",
        "error",
        facts({"te_import_error": "OSError: no lib", "te_offload_v1": None}),
        ("OSError: no lib", "complete the installation"),
    ),
    Case(
        "patch-target-moved",
        "error",
        facts(patches={**MOVED, **HEALTHY.patches}),
        ("megatron.core.gone does not exist", "install a tested release"),
    ),
    # Environment variables
    Case(
        "offload-switch-off",
        "error",
        training(SWITCH_OFF),
        ("NVTE_CPU_OFFLOAD_V1=0", "set NVTE_CPU_OFFLOAD_V1=1"),
        # The value that Transformer Engine has read counts, not the current environment.
        (training(facts({"te_offload_v1_environment": "0"})), facts({"te_offload_v1": None})),
    ),
    Case("offload-switch-off", "warning", SWITCH_OFF, ("NVTE_CPU_OFFLOAD_V1=0",)),
    Case("offload-switch-off", "warning", training(SWITCH_NOT_SET), ("as ./run train",)),
    Case(
        "offload-switch-off",
        "warning",
        training(SWITCH_OFF, fine_grained_activation_offloading=False),
        ("NVTE_CPU_OFFLOAD_V1=0",),
    ),
    Case(
        "expandable-segments-in-graphs",
        "error",
        training(EXPANDS, **LAYER_GRAPHS),
        ("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", "set NCCL_GRAPH_REGISTER=0"),
        (
            training(environment(EXPANDS, NCCL_GRAPH_REGISTER="0"), **LAYER_GRAPHS),
            training(EXPANDS),
            replace(EXPANDS, command=Checked(None)),
            environment(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:False"),
        ),
    ),
    Case(
        "expandable-segments-in-graphs",
        "error",
        training(
            environment(PYTORCH_ALLOC_CONF="max_split_size_mb:64, expandable_segments:true"),
            cuda_graph_granularity="chunk",
        ),
        ("PYTORCH_ALLOC_CONF=max", "so it does not refuse the run"),
    ),
    Case("expandable-segments-in-graphs", "warning", EXPANDS, ("set NCCL_GRAPH_REGISTER=0",)),
    # GPUs
    Case(
        "no-gpu",
        "note",
        replace(HEALTHY, driver=None, gpus=()),
        ("this machine has no GPU", "a machine that trains"),
        (replace(HEALTHY, gpus=()),),
    ),
    Case(
        "gpu-not-seen",
        "error",
        replace(environment(CUDA_VISIBLE_DEVICES=""), gpus=()),
        ("torch sees no GPU (CUDA_VISIBLE_DEVICES='')", "unset CUDA_VISIBLE_DEVICES", "CUDA 13.0"),
        # Then the problem is another one.
        (facts({"torch": None}, gpus=()), replace(HEALTHY, gpus=(), torch_error="no lib")),
    ),
    Case(
        "gpu-not-seen",
        "error",
        replace(HEALTHY, gpus=(), torch_cuda=None),
        ("since it was built without CUDA", "install torch with CUDA"),
    ),
    Case(
        "slow-copies",
        "warning",
        first_gpu(bandwidth=Bandwidth(55.4, 38.0, 50.0, 20.0)),
        ("GPU 0: copies back reach 38.0 GB/s", "the fastest GPU here 55.6", "--numa-binding"),
        (first_gpu(bandwidth=Bandwidth(40.0, 40.0, 10.0, 10.0)),),
    ),
    Case(
        "slow-copies",
        "warning",
        replace(HEALTHY, gpus=first_gpu(bandwidth=Bandwidth(12.0, 24.0, 9.0, 9.0)).gpus[:1]),
        ("GPU 0: copies out reach 12.0 GB/s", "25 (PCIe 4)"),
    ),
    Case(
        "bandwidth-not-measured",
        "warning",
        first_gpu(bandwidth="out of memory"),
        ("GPU 0", "out of memory", "another process"),
    ),
    # Host memory
    Case(
        "local-world-size-not-set",
        "warning",
        replace(HEALTHY, environment={"SLURM_NTASKS_PER_NODE": "8"}),
        ("SLURM_NTASKS_PER_NODE=8", "export LOCAL_WORLD_SIZE=8"),
        (
            environment(SLURM_NTASKS_PER_NODE="8"),
            replace(HEALTHY, environment={"SLURM_NTASKS_PER_NODE": "1"}),
        ),
    ),
    Case(
        "host-memory-limit-too-high",
        "warning",
        training(offload_host_memory_limit_bytes=501 * GIB),
        ("1002.0 GiB", "1000.0 GiB are available", f"to {400 * GIB} or less"),
        (training(offload_host_memory_limit_bytes=500 * GIB),),
    ),
    # Flags
    Case(
        "too-old-for-graphs",
        "error",
        training(OLD_TE, **LAYER_GRAPHS),
        ("transformer_engine 2.13.1", "only from 2.14 on", "install transformer_engine 2.14"),
        (
            training(OLD_TE),
            training(OLD_TE, **LAYER_GRAPHS, fine_grained_activation_offloading=False),
        ),
    ),
)


def found(machine: MachineFacts, name: str) -> list[Finding]:
    return [finding for row in examine(machine) for finding in row.findings if finding.rule == name]


def test_every_problem_has_a_case() -> None:
    source = Path(checks.__file__).read_text()
    names = set(re.findall(r'findings\.(?:error|warning)\)?\(\s*"([\w-]+)"', source))
    elsewhere = {"stale-build-lock"}
    assert elsewhere < names
    assert names - elsewhere <= {case.name for case in CASES}
    assert len(names) > 10


def test_nothing_is_found_on_a_healthy_machine() -> None:
    assert [row for row in examine(HEALTHY) if row.findings] == []
    assert {row.severity for row in examine(HEALTHY)} == {"ok"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}-{case.severity}")
def test_a_problem_is_found_with_its_cure_and_nothing_where_it_is_almost_there(case: Case) -> None:
    (finding,) = found(case.sick, case.name)
    assert finding.severity == case.severity
    assert [word for word in case.words if word not in finding.text] == []
    assert finding.cure
    for number, machine in enumerate(case.healthy):
        assert found(machine, case.name) == [], number


def test_all_that_is_wrong_with_flags_is_found() -> None:
    wrong = Finding("error", "a=1 is not supported with b because c", "set a=2; or b", "a")
    stays = STAYS.found(names="attn_norm, mlp_norm")
    machine = training(OLD_TE, **LAYER_GRAPHS)
    assert machine.command is not None
    machine = replace(machine, command=machine.command._replace(findings=(wrong, stays)))
    row = examine(machine)[-1]
    assert row.findings[:2] == [wrong, stays]
    assert [finding.rule for finding in row.findings[2:]] == [TOO_OLD_FOR_GRAPHS.name]


def test_a_row_is_as_bad_as_its_worst_finding() -> None:
    note, error = (Finding(severity, "", "", "") for severity in ("note", "error"))
    assert Row(CHECKS[0], "", checks.Findings((note, error, note))).severity == "error"


# What reads the machine


@pytest.mark.parametrize("variable", ["XDG_CACHE_HOME", "TORCH_EXTENSIONS_DIR"])
def test_locks_of_extensions_are_found_where_torch_puts_them(
    variable: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from torch.utils.cpp_extension import _get_build_directory

    for name in ("XDG_CACHE_HOME", "TORCH_EXTENSIONS_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    machine = facts(environment={variable: str(tmp_path)})
    assert shown(machine, "Compiled extensions").value == "none is being compiled"
    lock = Path(_get_build_directory("an_extension", False)) / "lock"
    lock.touch()
    row = shown(machine, "Compiled extensions")
    assert (row.value, row.findings) == ("1 being compiled", [])
    os.utime(lock, (0, time.time() - 700))
    (finding,) = shown(machine, "Compiled extensions").findings
    assert f"{lock} is 12 minutes old" in finding.message
    assert finding.severity == "warning"
    assert "delete" in finding.cure


def test_a_user_without_a_home_has_no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: int) -> None:
        raise KeyError("uid not found")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.delenv("HOME", raising=False)
    row = shown(facts(environment={}), "Compiled extensions")
    assert row.value == "none is being compiled"


@pytest.mark.parametrize(
    "machine, ranks",
    [
        (replace(HEALTHY, ranks_per_host=3, words=Words((), 2)), "3 (--ranks-per-host)"),
        (replace(HEALTHY, words=Words((), 6)), "6 (--nproc-per-node of the command)"),
        (environment(LOCAL_WORLD_SIZE="8", SLURM_NTASKS_PER_NODE="4"), "8 (LOCAL_WORLD_SIZE)"),
        (facts(environment={"SLURM_NTASKS_PER_NODE": "4"}), "4 (SLURM_NTASKS_PER_NODE)"),
        (facts(environment={"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}), "2 (OMPI_COMM_WORLD_LOCAL_SIZE)"),
        (
            facts(environment={"LOCAL_WORLD_SIZE": "many"}),
            "2 (one for each GPU; --ranks-per-host N changes it)",
        ),
        (facts(environment={}, gpus=()), "1 (--ranks-per-host N changes it)"),
    ],
)
def test_how_many_ranks_share_the_memory(machine: MachineFacts, ranks: str) -> None:
    assert shown(machine, "May be pinned").value.endswith(f"\nranks: {ranks}")


# What is shown


def shown(machine: MachineFacts, label: str) -> Row:
    (row,) = (row for row in examine(machine) if row.check.label == label)
    return row


@pytest.mark.parametrize(
    "machine, label, why",
    [
        (facts({"megatron_core": None}), "Run-time patches", "must be importable"),
        (facts({"te_import_error": "no lib"}), "NVTE_CPU_OFFLOAD_V1", "does not import"),
        (first_gpu(bandwidth=None), "Copies", "--no-bandwidth"),
        (facts({"te_import_error": "no lib"}, words=Words(("--lr",))), "Flags", "be importable"),
        (facts({"available_memory_bytes": None}), "May be pinned", "neither"),
    ],
)
def test_a_skipped_check_is_a_note(machine: MachineFacts, label: str, why: str) -> None:
    row = shown(machine, label)
    assert (row.severity, row.value) == ("note", "unknown")
    assert row.findings[0].rule == "not-looked-at"
    assert why in row.findings[0].message


@pytest.mark.parametrize(
    "machine, label, value",
    [
        (
            HEALTHY,
            "GPUs",
            "GPU 0: NVIDIA H200, 140.0 GiB\nGPU 1: NVIDIA H200, 140.0 GiB\ndriver 580.65.06",
        ),
        (
            HEALTHY,
            "May be pinned",
            "400.0 GiB for each of 2 (80% of 1000.0 GiB)\nranks: 2 (LOCAL_WORLD_SIZE)",
        ),
        (training(), "Flags", "a training with offloading, on 2 processes"),
        (
            replace(HEALTHY, command=Checked(None)),
            "Flags",
            "a training without offloading, on 1 process",
        ),
        (HEALTHY, "Flags", "none given (slipstream doctor -- FLAGS checks those of a training)"),
    ],
)
def test_a_check_shows_what_it_saw(machine: MachineFacts, label: str, value: str) -> None:
    assert shown(machine, label).value == value


# The page


def test_the_page_lists_every_check_with_the_failure_that_it_prevents() -> None:
    rows = re.findall(r"^\| (.+) \| (.+) \|$", PAGE, re.M)
    expected = [(check.label, check.prevents) for check in CHECKS]
    start = rows.index(expected[0])
    assert rows[start : start + len(expected)] == expected
    assert len({check.prevents for check in CHECKS}) == len(CHECKS)


def test_the_example_has_every_check_in_its_order() -> None:
    example = PAGE.split("example -->")[1].splitlines()
    marked = [line for line in example if line.split(" ")[0] in SEVERITIES]
    # A finding's line has no label.
    labels = [line[9:32].strip() for line in marked if line[9] != " "]
    assert labels == [check.label for check in CHECKS]
    topics = list(dict.fromkeys(check.topic for check in CHECKS))
    assert [line for line in example if line in topics] == topics


# Versions


def test_supported_versions_are_those_that_the_package_accepts_and_a_cure_installs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"], *project["optional-dependencies"]["te"]]
    accepted = {r.name: r.specifier for r in map(Requirement, requirements)}
    for name, needed in PACKAGES.items():
        assert Requirement(needed).specifier == accepted[name.lower().replace(" ", "-")]
