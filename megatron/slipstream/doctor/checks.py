# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""All checks: what each finds in the facts of the machine, and the failure that it prevents."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Optional

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from megatron.slipstream.doctor.facts import MachineFacts
from megatron.slipstream.options import preflight
from megatron.slipstream.options.host_memory import HOST_MEMORY_SHARE, host_memory_share_bytes
from megatron.slipstream.options.rules import Finding, Severity
from megatron.slipstream.patches.releases import OLDEST_TORCH, supported
from megatron.slipstream.plan.render import format_bytes
from megatron.slipstream.plan.trace import Bandwidth

SEVERITIES: tuple[Severity, ...] = ("ok", "note", "warning", "error")


class Findings(list[Finding]):
    """The findings of one check. Each has a name that is stable when its wording changes."""

    def error(self, name: str, message: str, cure: str) -> None:
        """Add what makes training fail, or compute something wrong."""
        self.append(Finding("error", message, cure, name))

    def warning(self, name: str, message: str, cure: str) -> None:
        """Add what makes training slow, or fail later."""
        self.append(Finding("warning", message, cure, name))

    def unknown(self, why: str) -> str:
        """Add that the check was not possible, and return its value."""
        self.append(Finding("note", f"not checked: {why}", rule="not-looked-at"))
        return "unknown"


Look = Callable[[MachineFacts, Findings], str]
"""Adds findings, and returns what to show next to the check's label: one line per item."""


class Check(NamedTuple):
    """One check of the machine, and the failure of a training that it prevents."""

    topic: str
    label: str
    prevents: str
    look: Look


class Row(NamedTuple):
    """A check's result."""

    check: Check
    value: str
    findings: Findings

    @property
    def severity(self) -> Severity:
        """The severity of the worst finding; 'ok' if there are none."""
        return max((f.severity for f in self.findings), key=SEVERITIES.index, default="ok")


# Versions

PACKAGES = {
    "torch": f"torch>={OLDEST_TORCH}",
    "megatron-core": f"megatron-core{supported()}",
    "Transformer Engine": "transformer-engine[pytorch]>=2.14",
}
"""What the package needs, as in pyproject.toml."""

MAX_BUILD_S = 600.0
"""Longer than any extension of megatron-core or Transformer Engine takes to compile."""


def _version(name: str, found: Optional[str], findings: Findings) -> str:
    needed = PACKAGES[name]
    cure = f"pip install '{needed}'"
    if found is None:
        findings.error("not-installed", f"{name} is not installed, but training needs it", cure)
        return "not installed"
    # A container's build of an unreleased version counts as released; a private build passes.
    with contextlib.suppress(InvalidVersion):
        if not Requirement(needed).specifier.contains(Version(found).base_version):
            message = f"{name} {found} is not supported because Slipstream needs {needed}"
            findings.error("version-not-supported", message, cure)
    return found


def _torch(facts: MachineFacts, findings: Findings) -> str:
    if facts.torch_error is None:
        return _version("torch", facts.process.torch, findings)
    findings.error(
        "torch-does-not-import",
        f"torch is installed but does not import ({facts.torch_error})",
        "reinstall it, or repair the libraries that the message names",
    )
    return str(facts.process.torch)


def _megatron(facts: MachineFacts, findings: Findings) -> str:
    return _version("megatron-core", facts.process.megatron_core, findings)


def _transformer_engine(facts: MachineFacts, findings: Findings) -> str:
    found = facts.process.transformer_engine
    if found is not None:
        findings += preflight.check_transformer_engine(facts.process)
        return _version("Transformer Engine", found, findings)
    if facts.gpus:
        message = "Transformer Engine is not installed, but only its layers offload on a GPU"
        cure = f"pip install '{PACKAGES['Transformer Engine']}'"
        findings.warning("transformer-engine-missing", message, cure)
    return "not installed"


def _extensions(facts: MachineFacts, findings: Findings) -> str:
    # Unlike Path.home(), this is no error for a user without a home directory.
    caches = facts.environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(facts.environment.get("TORCH_EXTENSIONS_DIR") or f"{caches}/torch_extensions")
    locks = sorted([*folder.glob("*/lock"), *folder.glob("*/*/lock")])
    for path in locks:
        with contextlib.suppress(OSError):  # It may have just been removed.
            age_s = time.time() - path.stat().st_mtime
            if age_s > MAX_BUILD_S:
                message = (
                    f"{path} is {age_s / 60:.0f} minutes old, so the process that compiled was "
                    "probably killed; all that need the extension wait for the lock indefinitely"
                )
                cure = "delete the file if no process is compiling"
                findings.warning("stale-build-lock", message, cure)
    return f"{len(locks) or 'none is'} being compiled"


def _patches(facts: MachineFacts, findings: Findings) -> str:
    if not facts.has_megatron:
        return findings.unknown("torch and megatron-core must be importable")
    moved = [problem for problem in facts.patches.values() if problem is not None]
    for problem in moved:
        message, _, cure = problem.rpartition("; ")
        findings.error("patch-target-moved", message, cure)
    count = len(facts.patches)
    return f"{count - len(moved)} of {count} targets as expected"


# Environment variables

ALLOCATORS = {
    "PYTORCH_CUDA_ALLOC_CONF": "",
    "PYTORCH_ALLOC_CONF": " (megatron-core reads only PYTORCH_CUDA_ALLOC_CONF, so it does not "
    "refuse the run)",
}


def _switch(facts: MachineFacts, findings: Findings) -> str:
    process = facts.process
    if process.transformer_engine is None:
        return "no Transformer Engine"
    if process.te_import_error is not None:
        return findings.unknown("Transformer Engine does not import")
    is_set = process.te_offload_v1_environment is not None
    for found in preflight.check_switch(process):
        severity: Severity = "error" if is_set and facts.offloads else "warning"
        cure = "" if is_set else ", as ./run train (pretrain_gpt.py) does automatically"
        findings.append(found._replace(severity=severity, cure=found.cure + cure))
    return {None: "no such switch", True: "1", False: "0"}[process.te_offload_v1]


def _nccl(facts: MachineFacts, findings: Findings) -> str:
    found = {name: facts.environment.get(name) for name in (*ALLOCATORS, "NCCL_GRAPH_REGISTER")}
    for name, unnoticed in ALLOCATORS.items():
        settings = (found[name] or "").lower().replace(" ", "").split(",")
        if "expandable_segments:true" not in settings:
            del found[name]
        elif found["NCCL_GRAPH_REGISTER"] != "0" and facts.graphs != "none":
            (findings.error if facts.graphs else findings.warning)(
                "expandable-segments-in-graphs",
                f"{name}={found[name]} is not supported with CUDA graphs unless "
                "NCCL_GRAPH_REGISTER=0, because NCCL registers the buffers of captured operations, "
                f"which with such memory leads to illegal accesses{unnoticed}",
                "set NCCL_GRAPH_REGISTER=0, or leave expandable_segments out",
            )
    return "\n".join(f"{n}={v}" for n, v in found.items() if v is not None) or "not set"


# GPUs

SLOW_GB_PER_S = 20.0
"""Copies of pinned memory reach 25 GB/s with PCIe 4 and 55 with PCIe 5, both with 16 lanes."""
FAR_BELOW_OTHERS = 0.7
"""Fraction of the rate of the host's fastest GPU."""


def _gpus(facts: MachineFacts, findings: Findings) -> str:
    if not facts.gpus and facts.driver is None:
        message = "this machine has no GPU: training simulates one on the CPU, for tests only"
        cure = "run the doctor on a machine that trains"
        findings.append(Finding("note", message, cure, "no-gpu"))
        return "none"
    # If torch is missing, its own check reports it.
    if facts.has_torch and not facts.gpus:
        visible = facts.environment.get("CUDA_VISIBLE_DEVICES")
        why = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
        cure = "unset CUDA_VISIBLE_DEVICES, or give the container its GPUs (--gpus all); check "
        cure += f"with nvidia-smi that the driver supports CUDA {facts.torch_cuda}"
        if facts.torch_cuda is None:
            why = ", since it was built without CUDA"
            cure = "install torch with CUDA from the index that https://pytorch.org names"
        message = f"an NVIDIA GPU or its driver is present, but torch sees no GPU{why}"
        findings.error("gpu-not-seen", message, cure)
    gpus = [f"GPU {gpu.number}: {gpu.name}, {format_bytes(gpu.memory_bytes)}" for gpu in facts.gpus]
    return "\n".join([*gpus, f"driver {facts.driver or 'unknown'}"])


def _copies(facts: MachineFacts, findings: Findings) -> str:
    if not facts.gpus:
        return "no GPU"
    if facts.gpus[0].bandwidth is None:
        return findings.unknown("--no-bandwidth was given")
    lines = []
    measured = [gpu.bandwidth for gpu in facts.gpus if isinstance(gpu.bandwidth, Bandwidth)]
    fastest = [max(rates, default=0.0) for rates in zip(*measured, strict=True)]
    for gpu in facts.gpus:
        rates = gpu.bandwidth
        if not isinstance(rates, Bandwidth):
            lines.append(f"GPU {gpu.number}: not measured")
            message = f"GPU {gpu.number}: copies could not be measured: {rates}"
            cure = "check whether another process uses the memory of the GPU, or pins the host's"
            findings.warning("bandwidth-not-measured", message, cure)
            continue
        lines.append(
            f"GPU {gpu.number}: D2H {rates.d2h_gb_per_s:.1f}, H2D {rates.h2d_gb_per_s:.1f} GB/s; "
            f"both {rates.d2h_both_gb_per_s:.1f} and {rates.h2d_both_gb_per_s:.1f} GB/s"
        )
        for direction, rate, best in zip(("out", "back"), rates, fastest, strict=False):
            if rate < max(SLOW_GB_PER_S, FAR_BELOW_OTHERS * best):
                findings.warning(
                    "slow-copies",
                    f"GPU {gpu.number}: copies {direction} reach {rate:.1f} GB/s; 16 lanes reach "
                    f"25 (PCIe 4) or 55 (PCIe 5), and the fastest GPU here {best:.1f}",
                    "compare lanes and generation of the link (nvidia-smi -q) with the card's; "
                    "reseat it, keep other users off it, or start the training with torchrun "
                    "--numa-binding=node",
                )
    return "\n".join(lines)


# Host memory

LAUNCHERS = ("SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE")
"""Variables of launchers for the number of processes on this host."""


def ranks_per_host(facts: MachineFacts) -> tuple[int, str]:
    """Return the number of processes on this host, and where it comes from."""
    if facts.ranks_per_host is not None:
        return facts.ranks_per_host, "--ranks-per-host"
    if facts.words.ranks_per_host is not None:
        return facts.words.ranks_per_host, "--nproc-per-node of the command"
    for name in ("LOCAL_WORLD_SIZE", *LAUNCHERS):
        if facts.environment.get(name, "").isdigit():
            return max(1, int(facts.environment[name])), name
    if facts.gpus:
        return len(facts.gpus), "one for each GPU; --ranks-per-host N changes it"
    return 1, "--ranks-per-host N changes it"


def _share(facts: MachineFacts, findings: Findings) -> str:
    for name in LAUNCHERS:
        number = facts.environment.get(name, "1")
        if number != "1" and "LOCAL_WORLD_SIZE" not in facts.environment:
            findings.warning(
                "local-world-size-not-set",
                f"{name}={number}, but LOCAL_WORLD_SIZE is not set: each rank assumes that it is "
                "the only one of the host, and may pin all available memory",
                f"start with torchrun, or export LOCAL_WORLD_SIZE={number}",
            )
    available, (ranks, source) = facts.process.available_memory_bytes, ranks_per_host(facts)
    if available is None:
        return findings.unknown("neither /proc/meminfo nor a control group reports any")
    share = host_memory_share_bytes(available, ranks)
    limit = facts.args and facts.args.offload_host_memory_limit_bytes
    if limit and limit * ranks > available:
        findings.warning(
            "host-memory-limit-too-high",
            f"offload_host_memory_limit_bytes={limit} lets {ranks} ranks pin "
            f"{format_bytes(limit * ranks)}, but only {format_bytes(available)} are available: the "
            "system may kill the job",
            f"set offload_host_memory_limit_bytes to {share} or less, or leave it out",
        )
    of = f"{HOST_MEMORY_SHARE:.0%} of {format_bytes(available)}"
    return f"{format_bytes(share)} for each of {ranks} ({of})\nranks: {ranks} ({source})"


# Training command


def _flags(facts: MachineFacts, findings: Findings) -> str:
    command = facts.command
    if command is None and facts.words.flags:
        return findings.unknown("torch and megatron-core must be importable")
    if command is None:
        return "none given (slipstream doctor -- FLAGS checks those of a training)"
    findings += command.findings
    if facts.offloads and facts.graphs == "transformer_engine":
        findings += preflight.check_graphs(facts.process)
    offloads = "with offloading" if facts.offloads else "without offloading"
    plural = "es" if command.num_processes > 1 else ""
    return f"a training {offloads}, on {command.num_processes} process{plural}"


CHECKS = (
    Check("Versions", "torch", "training does not start", _torch),
    Check("Versions", "megatron-core", "an import or a patch of megatron-core fails", _megatron),
    Check(
        "Versions",
        "Transformer Engine",
        "megatron-core does not import, or offloads nothing on a GPU",
        _transformer_engine,
    ),
    Check(
        "Versions",
        "Compiled extensions",
        "training waits indefinitely for the lock of a killed build",
        _extensions,
    ),
    Check("Versions", "Run-time patches", "`install()` ends with an error", _patches),
    Check(
        "Environment variables",
        preflight.TE_SWITCH,
        "Transformer Engine offloads weights as well; training refuses to start",
        _switch,
    ),
    Check(
        "Environment variables",
        "NCCL in CUDA graphs",
        "illegal memory accesses in captured collectives",
        _nccl,
    ),
    Check("GPUs", "GPUs", "training runs on the CPU", _gpus),
    Check("GPUs", "Copies", "compute waits for copies", _copies),
    Check(
        "Host memory",
        "May be pinned",
        "ranks pin more than the host has, and the job is killed",
        _share,
    ),
    Check(
        "Training command",
        "Flags",
        "training stops at the first wrong flag; the doctor finds all at once",
        _flags,
    ),
)


def examine(facts: MachineFacts) -> list[Row]:
    """Run every check."""
    rows = []
    for check in CHECKS:
        findings = Findings()
        rows.append(Row(check, check.look(facts, findings), findings))
    return rows
