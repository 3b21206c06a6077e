# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Versions, against those that Slipstream supports and those that it was tested with."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, Optional

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from megatron.slipstream import __version__, preflight
from megatron.slipstream.doctor.check import Check, Seen, Topic, not_looked_at
from megatron.slipstream.doctor.facts import Facts
from megatron.slipstream.rules import Finding, Rule


class Package(NamedTuple):
    """A row of the matrix."""

    name: str
    supported: str
    """Version specifiers as in pyproject.toml; empty for any."""
    tested: tuple[str, ...]
    """Versions, or their beginnings."""
    cure: str
    """How to get one that is supported."""
    about: str


MATRIX = {
    package.name: package
    for package in (
        Package("Python", ">=3.12", ("3.12",), "use Python 3.12", ""),
        Package("torch", ">=2.8", ("2.11.0",), "pip install 'torch>=2.8'", "2.9 for CUDA graphs"),
        Package("CUDA runtime", "", ("13.0",), "", "comes with torch"),
        Package("NVIDIA driver", "", ("580",), "", "from 525 for CUDA 12, from 580 for CUDA 13"),
        Package(
            "megatron-core",
            ">=0.17.1,<0.20",
            ("0.17.1", "0.18.2", "0.19.2"),
            "pip install 'megatron-core>=0.17.1,<0.20'",
            "an older release has less: see Getting started",
        ),
        Package(
            "Transformer Engine",
            ">=2.14",
            ("2.20.2",),
            "pip install 'transformer-engine[pytorch]>=2.14'",
            "needed on a GPU, where megatron-core offloads only with its layers",
        ),
        Package("flash-attn", "", (), "", "not needed: Transformer Engine takes cuDNN's"),
    )
}
"""What Slipstream was tested with, by name. The documentation shows this table."""

MIN_DRIVER = {11: 450, 12: 525, 13: 580}
"""The oldest driver for each major version of the CUDA runtime, by NVIDIA's table of minor version
compatibility."""

MISSING = Rule(
    "not-installed", "error", "{package} is not installed, and training needs it", "{cure}"
)
UNSUPPORTED = Rule(
    "version-not-supported",
    "error",
    "{package} {found} is not supported because Slipstream needs {supported}",
    "{cure}",
)
UNTESTED = Rule(
    "version-not-tested",
    "note",
    "Slipstream was tested with {tested}, not with {package} {found}",
    "if something is odd, see whether it is with a tested version too",
)
TORCH_BROKEN = Rule(
    "torch-does-not-import",
    "error",
    "torch is installed but does not import ({error})",
    "install it anew, or repair the libraries that the message names",
)
TORCH_WITHOUT_CUDA = Rule(
    "torch-without-cuda",
    "error",
    "there is an NVIDIA GPU, and this torch was built without CUDA, so nothing can use it",
    "install torch with CUDA from the index that https://pytorch.org names",
)
ROCM = Rule(
    "rocm",
    "warning",
    "this torch is built for ROCm {hip}, with which Slipstream has never run",
    "use an NVIDIA GPU",
)
OLD_DRIVER = Rule(
    "driver-too-old",
    "error",
    "driver {driver} is not supported with CUDA {cuda} because that needs driver {needed} or newer",
    "update the driver, or install a torch that is built for an older CUDA",
)
MOVED = Rule(
    "patch-target-moved",
    "error",
    "{message}",
    "{cure}",
)
MAX_BUILD_S = 600.0
"""Nothing that megatron-core or Transformer Engine compile when they first use it takes so long."""
STALE_LOCK = Rule(
    "stale-build-lock",
    "warning",
    "{path} is {age} old, so that what held it was probably killed while it compiled; whatever "
    "needs that extension (megatron-core's recomputation needs one) waits for it without end",
    "if nothing is being compiled, delete the file",
)
TE_MISSING = Rule(
    "transformer-engine-missing",
    "warning",
    "Transformer Engine is not installed, and on a GPU megatron-core offloads only with its layers",
    'pip install --no-build-isolation "transformer-engine[pytorch]>=2.14"',
)
FLASH_ATTN = Rule(
    "flash-attn-not-tested",
    "note",
    "Slipstream was tested with the attention of cuDNN only, not with flash-attn",
    "if something is odd, see whether it is with --attention-backend fused too",
)


def _slipstream(_: Facts) -> Seen:
    return Seen(__version__)


def _python(facts: Facts) -> Seen:
    return Seen(facts.process.python, _compare("Python", facts.process.python))


def _torch(facts: Facts) -> Seen:
    found = facts.process.torch
    if facts.torch_error is not None:
        return Seen(str(found), (TORCH_BROKEN.found(error=facts.torch_error),))
    return _needed("torch", found)


def _cuda(facts: Facts) -> Seen:
    if facts.torch is None:
        return not_looked_at("torch tells it, and torch cannot be asked")
    if facts.torch.hip is not None:
        return Seen(f"ROCm {facts.torch.hip}", (ROCM.found(hip=facts.torch.hip),))
    if facts.torch.cuda is None:
        has_gpu = facts.driver is not None or bool(facts.gpus)
        return Seen("none", (TORCH_WITHOUT_CUDA.found(),) if has_gpu else ())
    return Seen(facts.torch.cuda, _compare("CUDA runtime", facts.torch.cuda))


def _driver(facts: Facts) -> Seen:
    driver, torch = facts.driver, facts.torch
    if driver is None:
        return Seen("none")
    findings = _compare("NVIDIA driver", driver)
    # A newer runtime on an older driver is all right where the compatibility package is: then
    # torch sees the GPU.
    if torch is not None and torch.cuda is not None and not torch.sees_gpus:
        needed = MIN_DRIVER.get(Version(torch.cuda).major, 0)
        if int(driver.split(".")[0]) < needed:
            old = OLD_DRIVER.found(driver=driver, cuda=torch.cuda, needed=needed)
            findings = (*findings, old)
    return Seen(driver, findings)


def _megatron(facts: Facts) -> Seen:
    return _needed("megatron-core", facts.process.megatron_core)


def _transformer_engine(facts: Facts) -> Seen:
    found = facts.process.transformer_engine
    if found is None:
        return Seen("not installed", (TE_MISSING.found(),) if facts.gpus else ())
    findings = [*preflight.check_transformer_engine(facts.process)]
    findings += _compare("Transformer Engine", found)
    return Seen(found, tuple(findings))


def _graphs(facts: Facts) -> Seen:
    command = facts.command
    findings = preflight.check_graphs(facts.process)
    if command is None or not (command.offloads and command.graphs == "transformer_engine"):
        findings = [finding._replace(severity="note") for finding in findings]
    if facts.process.torch is None or facts.process.transformer_engine is None:
        return Seen("needs torch and Transformer Engine", tuple(findings))
    return Seen("not supported" if findings else "supported", tuple(findings))


def _flash_attn(facts: Facts) -> Seen:
    if facts.flash_attn is None:
        return Seen("not installed")
    return Seen(facts.flash_attn, (FLASH_ATTN.found(),))


def _needed(name: str, found: Optional[str]) -> Seen:
    if found is None:
        return Seen("not installed", (MISSING.found(package=name, cure=MATRIX[name].cure),))
    return Seen(found, _compare(name, found))


def _compare(name: str, found: str) -> tuple[Finding, ...]:
    """A version against its row of the matrix."""
    package = MATRIX[name]
    tested = " or ".join(package.tested)
    untested = UNTESTED.found(package=name, found=found, tested=tested)
    try:
        version = Version(found)
    except InvalidVersion:  # of somebody's own build
        return (untested,)
    # Containers bring builds of versions that are yet to come: 2.11.0a0+abc is one of 2.11.0.
    if not SpecifierSet(package.supported).contains(version.base_version):
        return (
            UNSUPPORTED.found(
                package=name, found=found, supported=package.supported, cure=package.cure
            ),
        )
    return () if any(map(partial(_begins_with, version), package.tested)) else (untested,)


def _begins_with(version: Version, tested: str) -> bool:
    beginning = Version(tested).release
    return version.release[: len(beginning)] == beginning


def _extensions(facts: Facts) -> Seen:
    if not facts.build_locks:
        return Seen("none is being compiled")
    findings = tuple(
        STALE_LOCK.found(path=lock.path, age=f"{lock.age_s / 60:.0f} minutes")
        for lock in facts.build_locks
        if lock.age_s > MAX_BUILD_S
    )
    return Seen(f"{len(facts.build_locks)} being compiled", findings)


def _patches(facts: Facts) -> Seen:
    if not facts.patches:
        return not_looked_at("torch, megatron-core and what they import have to work first")
    moved = [target.problem for target in facts.patches if target.problem is not None]
    parts = [problem.rpartition("; ") for problem in moved]
    return Seen(
        f"{len(facts.patches) - len(moved)} of {len(facts.patches)} targets as expected",
        tuple(MOVED.found(message=message, cure=cure) for message, _, cure in parts),
    )


TOPIC = Topic(
    "Versions",
    "Supported is what the package accepts: another version is an error. Tested is what its tests "
    "have run with: another version is a note. Without torch or megatron-core nothing trains.",
    (
        Check("Slipstream", _slipstream, ()),
        Check("Python", _python, (UNSUPPORTED, UNTESTED)),
        Check("torch", _torch, (MISSING, TORCH_BROKEN, UNSUPPORTED, UNTESTED)),
        Check("CUDA runtime", _cuda, (TORCH_WITHOUT_CUDA, ROCM, UNTESTED)),
        Check("NVIDIA driver", _driver, (OLD_DRIVER, UNTESTED)),
        Check("megatron-core", _megatron, (MISSING, UNSUPPORTED, UNTESTED)),
        Check(
            "Transformer Engine",
            _transformer_engine,
            (TE_MISSING, preflight.TE_BROKEN, UNSUPPORTED, UNTESTED),
        ),
        Check("Offloading in graphs", _graphs, (preflight.TOO_OLD_FOR_GRAPHS,)),
        Check("flash-attn", _flash_attn, (FLASH_ATTN,)),
        Check("Compiled extensions", _extensions, (STALE_LOCK,)),
        Check("Run-time patches", _patches, (MOVED,)),
    ),
)
