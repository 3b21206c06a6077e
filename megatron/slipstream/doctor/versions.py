# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Checks of versions, drivers and compiled extensions that could keep training from starting."""

from __future__ import annotations

from typing import NamedTuple, Optional

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from megatron.slipstream import preflight
from megatron.slipstream.doctor.check import Check, Seen, Topic, not_checked
from megatron.slipstream.doctor.facts import Facts
from megatron.slipstream.rules import Finding, Rule


class Package(NamedTuple):
    """The versions of a package that Slipstream supports."""

    name: str
    supported: str
    """Version specifiers as in pyproject.toml."""
    cure: str
    """How to install a supported version."""


PACKAGES = {
    package.name: package
    for package in (
        Package("torch", ">=2.8", "pip install 'torch>=2.8'"),
        Package("megatron-core", ">=0.18.2,<0.20", "pip install 'megatron-core>=0.18.2,<0.20'"),
        Package("Transformer Engine", ">=2.14", "pip install 'transformer-engine[pytorch]>=2.14'"),
    )
}

MIN_DRIVER = {11: 450, 12: 525, 13: 580}
"""The oldest driver for each major version of the CUDA runtime, from NVIDIA's table of minor
version compatibility."""

MISSING = Rule(
    "not-installed", "error", "{package} is not installed, but training needs it", "{cure}"
)
UNSUPPORTED = Rule(
    "version-not-supported",
    "error",
    "{package} {found} is not supported because Slipstream needs {supported}",
    "{cure}",
)
TORCH_BROKEN = Rule(
    "torch-does-not-import",
    "error",
    "torch is installed but does not import ({error})",
    "reinstall it, or repair the libraries that the message names",
)
TORCH_WITHOUT_CUDA = Rule(
    "torch-without-cuda",
    "error",
    "this machine has an NVIDIA GPU, but this torch was built without CUDA and cannot use it",
    "install torch with CUDA from the index that https://pytorch.org names",
)
OLD_DRIVER = Rule(
    "driver-too-old",
    "error",
    "driver {driver} is not supported with CUDA {cuda} because it needs driver {needed} or newer",
    "update the driver, or install a torch that is built for an older CUDA",
)
MOVED = Rule("patch-target-moved", "error", "{message}", "{cure}")
MAX_BUILD_S = 600.0
"""Longer than any extension of megatron-core or Transformer Engine takes to compile on first use.
"""
STALE_LOCK = Rule(
    "stale-build-lock",
    "warning",
    "{path} is {age} old, so the process that compiled was probably killed; processes that need "
    "the extension (megatron-core's recomputation needs one) wait for the lock indefinitely",
    "delete the file if no process is compiling",
)
NO_NATIVE = Rule(
    "cpp-not-usable",
    "warning",
    "offload_native='auto' is not possible here because {problem}; the engine then takes the host "
    "several times as long for each group",
    "{cure}",
)
TE_MISSING = Rule(
    "transformer-engine-missing",
    "warning",
    "Transformer Engine is not installed, but on a GPU megatron-core offloads only its layers",
    'pip install --no-build-isolation "transformer-engine[pytorch]>=2.14"',
)


def _torch(facts: Facts) -> Seen:
    found = facts.process.torch
    if facts.torch_error is not None:
        return Seen(str(found), (TORCH_BROKEN.found(error=facts.torch_error),))
    seen = _needed("torch", found)
    if facts.torch is None or facts.torch.cuda is not None or facts.torch.hip is not None:
        return seen
    has_gpu = facts.driver is not None or bool(facts.gpus)
    return Seen(seen.value, (*seen.findings, *[TORCH_WITHOUT_CUDA.found()] * has_gpu))


def _driver(facts: Facts) -> Seen:
    driver, torch = facts.driver, facts.torch
    # If torch sees the GPU, the compatibility package makes a newer runtime work with this driver.
    if driver is None or torch is None or torch.cuda is None or torch.sees_gpus:
        return Seen(driver or "none")
    needed = MIN_DRIVER.get(Version(torch.cuda).major, 0)
    if int(driver.split(".")[0]) >= needed:
        return Seen(driver)
    return Seen(driver, (OLD_DRIVER.found(driver=driver, cuda=torch.cuda, needed=needed),))


def _megatron(facts: Facts) -> Seen:
    return _needed("megatron-core", facts.process.megatron_core)


def _transformer_engine(facts: Facts) -> Seen:
    found = facts.process.transformer_engine
    if found is None:
        return Seen("not installed", (TE_MISSING.found(),) if facts.gpus else ())
    findings = [*preflight.check_transformer_engine(facts.process)]
    return Seen(found, (*findings, *_compare("Transformer Engine", found)))


def _graphs(facts: Facts) -> Seen:
    command = facts.command
    findings = preflight.check_graphs(facts.process)
    if command is None or not (command.offloads and command.graphs == "transformer_engine"):
        findings = [finding._replace(severity="note") for finding in findings]
    if facts.process.torch is None or facts.process.transformer_engine is None:
        return Seen("needs torch and Transformer Engine", tuple(findings))
    return Seen("not supported" if findings else "supported", tuple(findings))


def _needed(name: str, found: Optional[str]) -> Seen:
    if found is None:
        return Seen("not installed", (MISSING.found(package=name, cure=PACKAGES[name].cure),))
    return Seen(found, _compare(name, found))


def _compare(name: str, found: str) -> tuple[Finding, ...]:
    package = PACKAGES[name]
    try:
        # Containers ship builds of unreleased versions: 2.11.0a0+abc counts as 2.11.0.
        version = Version(found).base_version
    except InvalidVersion:  # a private build
        return ()
    if SpecifierSet(package.supported).contains(version):
        return ()
    return (
        UNSUPPORTED.found(
            package=name, found=found, supported=package.supported, cure=package.cure
        ),
    )


def _extensions(facts: Facts) -> Seen:
    findings = tuple(
        STALE_LOCK.found(path=lock.path, age=f"{lock.age_s / 60:.0f} minutes")
        for lock in facts.build_locks
        if lock.age_s > MAX_BUILD_S
    )
    num_locks = len(facts.build_locks)
    return Seen(f"{num_locks} being compiled" if num_locks else "none is being compiled", findings)


def _native(facts: Facts) -> Seen:
    native = facts.native
    if native is None:
        return not_checked("torch has to work first")
    if native.problem is not None:
        return Seen("not compiled", (NO_NATIVE.found(problem=native.problem, cure=native.cure),))
    return Seen("compiled" if native.is_compiled else "compiled at the first use")


def _patches(facts: Facts) -> Seen:
    if not facts.patches:
        return not_checked("torch and megatron-core must be importable")
    moved = [target.problem for target in facts.patches if target.problem is not None]
    parts = [problem.rpartition("; ") for problem in moved]
    return Seen(
        f"{len(facts.patches) - len(moved)} of {len(facts.patches)} targets as expected",
        tuple(MOVED.found(message=message, cure=cure) for message, _, cure in parts),
    )


TOPIC = Topic(
    "Versions",
    (
        Check(
            "torch",
            "training does not start, or uses no GPU",
            _torch,
            (MISSING, TORCH_BROKEN, UNSUPPORTED, TORCH_WITHOUT_CUDA),
        ),
        Check("NVIDIA driver", "torch sees no GPU", _driver, (OLD_DRIVER,)),
        Check(
            "megatron-core",
            "an import or a patch of megatron-core fails",
            _megatron,
            (MISSING, UNSUPPORTED),
        ),
        Check(
            "Transformer Engine",
            "megatron-core does not import, or offloads nothing on a GPU",
            _transformer_engine,
            (TE_MISSING, preflight.TE_BROKEN, UNSUPPORTED),
        ),
        Check(
            "Offloading in graphs",
            "`--cuda-graph-impl transformer_engine` is refused at start",
            _graphs,
            (preflight.TOO_OLD_FOR_GRAPHS,),
        ),
        Check(
            "Compiled extensions",
            "training waits indefinitely for the lock of a killed build",
            _extensions,
            (STALE_LOCK,),
        ),
        Check(
            "Engine in C++",
            "each group takes the host several times as long",
            _native,
            (NO_NATIVE,),
        ),
        Check("Run-time patches", "`install()` ends with an error", _patches, (MOVED,)),
    ),
)
