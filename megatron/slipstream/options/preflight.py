# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Facts of this process and machine, and checks of them, before training starts.

Nothing here imports megatron-core or starts CUDA, so it can run first. Each text is in one
``Rule``: errors of training, the report of ``slipstream doctor`` and its documentation are
generated from it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
from dataclasses import dataclass
from importlib import metadata
from typing import Optional

from packaging.version import Version

from megatron.slipstream.options.host_memory import available_memory_bytes
from megatron.slipstream.options.rules import Finding, Rule

TE_SWITCH = "NVTE_CPU_OFFLOAD_V1"
_TE_SWITCH_HOME = "transformer_engine.pytorch.cpu_offload"


@dataclass(frozen=True)
class ProcessFacts:
    """Result of :func:`collect`. Versions are None for packages that are not installed."""

    python: str
    torch: Optional[str]
    megatron_core: Optional[str]
    transformer_engine: Optional[str]

    te_import_error: Optional[str]
    """Import error of an installed Transformer Engine; None if it imports or is absent."""

    te_offload_v1: Optional[bool]
    """Value of the switch that Transformer Engine read on import. None without Transformer Engine,
    or if it has no such switch."""

    te_offload_v1_environment: Optional[str]
    """Current value of the switch in the environment, possibly set too late."""

    available_memory_bytes: Optional[int]
    """Host memory that can still be pinned: see :func:`available_memory_bytes`."""


def collect() -> ProcessFacts:
    """Collect the facts of this process. Imports Transformer Engine if installed."""
    switch, error = _transformer_engine_switch()
    return ProcessFacts(
        python=platform.python_version(),
        torch=installed_version("torch"),
        megatron_core=installed_version("megatron-core"),
        transformer_engine=installed_version("transformer-engine"),
        te_import_error=error,
        te_offload_v1=switch,
        te_offload_v1_environment=os.environ.get(TE_SWITCH),
        available_memory_bytes=available_memory_bytes(),
    )


TE_BROKEN = Rule(
    "transformer-engine-does-not-import",
    "error",
    "transformer_engine is installed but does not import ({error}), and megatron-core imports it",
    "complete the installation (transformer_engine[pytorch]) or uninstall it",
)
TE_SWITCH_OFF = Rule(
    "offload-switch-off",
    "error",
    TE_SWITCH + "{value} is not supported with fine_grained_activation_offloading because "
    "{late}Transformer Engine, which reads it once at import, would offload weights as well",
    f"set {TE_SWITCH}=1 in the environment before Python starts",
)
TOO_OLD_FOR_GRAPHS = Rule(
    "too-old-for-graphs",
    "error",
    "cuda_graph_impl='transformer_engine' is not supported with offloading on transformer_engine "
    "{found} because it replays graphs on a stream of their own only from {needed} on",
    "install transformer_engine {needed} or newer, or set cuda_graph_impl='none'",
)
TOO_OLD_FOR_PACKS = Rule(
    "too-old-for-packs",
    "error",
    "cuda_graph_impl='transformer_engine' is not supported with packed sequences on "
    "transformer_engine {found} because its attention waits for the GPU in a capture before "
    "{needed}",
    "install transformer_engine {needed} or newer, or set cuda_graph_granularity=chunk",
)


def check_process(facts: ProcessFacts, offloading: bool) -> list[Finding]:
    """Check the process, with offloading also the switch of Transformer Engine."""
    findings = check_transformer_engine(facts)
    return findings + check_switch(facts) if offloading else findings


def check_transformer_engine(facts: ProcessFacts) -> list[Finding]:
    """Check that an installed Transformer Engine imports."""
    if facts.te_import_error is None:
        return []
    return [TE_BROKEN.found(error=facts.te_import_error)]


def check_switch(facts: ProcessFacts) -> list[Finding]:
    """Check the value of the switch that Transformer Engine read."""
    if facts.te_offload_v1 is not False:
        return []
    value = facts.te_offload_v1_environment
    late = "it was set after Transformer Engine was imported: " if value == "1" else ""
    return [TE_SWITCH_OFF.found(value=" (not set)" if value is None else f"={value}", late=late)]


def check_graphs(facts: ProcessFacts, is_packed: bool = False) -> list[Finding]:
    """Check package versions for Transformer Engine's graphs, of packed or of moved activations."""
    rule, needed = (TOO_OLD_FOR_PACKS, "2.18") if is_packed else (TOO_OLD_FOR_GRAPHS, "2.14")
    found = facts.transformer_engine
    if found is None or Version(found) >= Version(needed):
        return []
    return [rule.found(found=found, needed=needed)]


def _transformer_engine_switch() -> tuple[Optional[bool], Optional[str]]:
    """Return the switch that Transformer Engine read, and its import error."""
    if not is_installed("transformer_engine"):
        return None, None
    try:
        module = importlib.import_module(_TE_SWITCH_HOME)
    except ModuleNotFoundError as error:
        if error.name == _TE_SWITCH_HOME:
            return None, None
        return None, _describe(error)
    # An incomplete Transformer Engine raises various errors (missing shared objects, undefined
    # symbols, assertions); each is a fact to report here.
    except Exception as error:
        return None, _describe(error)
    switch = getattr(module, TE_SWITCH, None)
    return (None if switch is None else bool(switch)), None


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition('\n')[0]}"


def is_installed(module: str) -> bool:
    """Return whether ``module`` exists, importing only the packages that contain it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
    except (ImportError, ValueError):  # ValueError: a module in sys.modules without a spec
        return True


def installed_version(distribution: str) -> Optional[str]:
    """Return the version of a distribution; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
