# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Facts of this process and machine, and checks of them, before training starts.

Nothing here imports megatron-core or starts CUDA, so it can run first. Each text is in one
:class:`~megatron.slipstream.rules.Rule`: errors of training, the report of ``slipstream doctor``
and its documentation are generated from it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import NamedTuple, Optional

from packaging.version import Version

from megatron.slipstream.launcher import num_local_ranks
from megatron.slipstream.rules import Finding, Rule

TE_SWITCH = "NVTE_CPU_OFFLOAD_V1"
_TE_SWITCH_HOME = "transformer_engine.pytorch.cpu_offload"


@dataclass(frozen=True)
class Facts:
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

    affinity_tools: bool
    """Whether cuda-python and pynvml, with which megatron pins a process to its GPU's node, are
    installed."""


def collect() -> Facts:
    """Collect the facts of this process. Imports Transformer Engine if installed."""
    switch, error = _transformer_engine_switch()
    return Facts(
        python=platform.python_version(),
        torch=installed_version("torch"),
        megatron_core=installed_version("megatron-core"),
        transformer_engine=installed_version("transformer-engine"),
        te_import_error=error,
        te_offload_v1=switch,
        te_offload_v1_environment=os.environ.get(TE_SWITCH),
        available_memory_bytes=available_memory_bytes(),
        # Other packages share the folder 'cuda' with cuda-python.
        affinity_tools=is_installed("cuda.bindings") and is_installed("pynvml"),
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
    "cuda_graph_impl='transformer_engine' is not supported with offloading on {package} {found} "
    "because {why} only from {needed} on",
    "install {package} {needed} or newer, or set cuda_graph_impl='none'",
)
TOO_OLD_FOR_PACKS = Rule(
    "too-old-for-packs",
    "error",
    "cuda_graph_impl='transformer_engine' is not supported with packed sequences on "
    "transformer_engine {found} because its attention waits for the GPU in a capture before "
    "{needed}",
    "install transformer_engine {needed} or newer, or set cuda_graph_granularity=chunk",
)


def check_process(facts: Facts, offloading: bool) -> list[Finding]:
    """Check the process.

    Args:
        facts: From :func:`collect`.
        offloading: Whether fine-grained activation offloading is on.
    """
    findings = check_transformer_engine(facts)
    return findings + check_switch(facts) if offloading else findings


def check_transformer_engine(facts: Facts) -> list[Finding]:
    """Check that an installed Transformer Engine imports."""
    if facts.te_import_error is None:
        return []
    return [TE_BROKEN.found(error=facts.te_import_error)]


def check_switch(facts: Facts) -> list[Finding]:
    """Check the value of the switch that Transformer Engine read."""
    if facts.te_offload_v1 is not False:
        return []
    value = facts.te_offload_v1_environment
    late = "it was set after Transformer Engine was imported: " if value == "1" else ""
    return [TE_SWITCH_OFF.found(value=" (not set)" if value is None else f"={value}", late=late)]


def check_graphs(facts: Facts) -> list[Finding]:
    """Check package versions for moving activations inside Transformer Engine's CUDA graphs.

    Args:
        facts: From :func:`collect`.
    """
    return [
        TOO_OLD_FOR_GRAPHS.found(package=package, found=found, needed=needed, why=why)
        for package, found, needed, why in (
            ("torch", facts.torch, "2.9", "it records events for others inside of graphs"),
            (
                "transformer_engine",
                facts.transformer_engine,
                "2.14",
                "it replays graphs on a stream of their own",
            ),
        )
        if found is not None and Version(found) < Version(needed)
    ]


def check_packed_graphs(facts: Facts) -> list[Finding]:
    """Check package versions for packed sequences inside Transformer Engine's CUDA graphs.

    Args:
        facts: From :func:`collect`.
    """
    found, needed = facts.transformer_engine, "2.18"
    if found is None or Version(found) >= Version(needed):
        return []
    return [TOO_OLD_FOR_PACKS.found(found=found, needed=needed)]


# Datasets. Layout of an index: magic, version (u64), dtype code (u8), number of sequences (u64),
# number of document ends (u64), then lengths (i32 each), byte offsets (i64 each), document ends
# (i64 each). The tokens themselves are in the .bin file, back to back.

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_ITEM_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
"""Numpy's names for the dtype codes of an index."""

_MAX_BYTES_TO_SCAN = 64 * 2**20

DATASET_MISSING = Rule(
    "dataset-missing",
    "error",
    "data_path={prefix} does not exist (no {missing})",
    "set the prefix without .bin or .idx, or make it with tools/preprocess_text.py",
)
DATASET_CORRUPT = Rule(
    "dataset-corrupt",
    "error",
    "data_path={prefix} is corrupt: {what}",
    "make it again with tools/preprocess_text.py",
)
TOKEN_OUTSIDE_VOCABULARY = Rule(
    "token-outside-vocabulary",
    "error",
    "vocab_size={vocab_size} is not supported with data_path={prefix} because the data contains "
    "token {largest}",
    "set tokenizer_json to the file written with the data, or vocab_size to at least {needed}",
)

RULES = (
    *(TE_BROKEN, TE_SWITCH_OFF, TOO_OLD_FOR_GRAPHS),
    *(DATASET_MISSING, DATASET_CORRUPT, TOKEN_OUTSIDE_VOCABULARY),
)
"""All rules of this module."""


def check_dataset(prefix: str, vocab_size: Optional[int] = None) -> list[Finding]:
    """Check a tokenised dataset ``<prefix>.bin`` and ``<prefix>.idx``.

    Reads the index's header, its last sequence, and the first 64 MiB of tokens. Prefixes in object
    storage ('s3://...') are not checked.

    Args:
        prefix: Path without '.bin' or '.idx'.
        vocab_size: Tokens must be below it; not checked if None.
    """
    if "://" in prefix:
        return []
    index, tokens = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    missing = [str(path) for path in (index, tokens) if not path.is_file()]
    if missing:
        return [DATASET_MISSING.found(prefix=prefix, missing=" and no ".join(missing))]
    problem = _index_problem(index, tokens)
    if problem is not None:
        return [DATASET_CORRUPT.found(prefix=prefix, what=problem)]
    if vocab_size is None:
        return []
    largest = _largest_token(index, tokens)
    if largest < vocab_size:
        return []
    return [
        TOKEN_OUTSIDE_VOCABULARY.found(
            prefix=prefix, vocab_size=vocab_size, largest=largest, needed=largest + 1
        )
    ]


def _largest_token(index: Path, tokens: Path) -> int:
    """Return the largest token in the part that is scanned."""
    import numpy

    with index.open("rb") as stream:
        item_type = numpy.dtype(_ITEM_TYPES[_HEADER.unpack(stream.read(_HEADER.size))[2]])
    count = _MAX_BYTES_TO_SCAN // item_type.itemsize
    return int(numpy.fromfile(tokens, dtype=item_type, count=count).max(initial=0))


def _index_problem(index: Path, tokens: Path) -> Optional[str]:
    try:
        index_bytes, token_bytes = index.stat().st_size, tokens.stat().st_size
        with index.open("rb") as stream:
            header = stream.read(_HEADER.size)
            if len(header) < _HEADER.size:
                return f"{index} is {index_bytes} bytes long, shorter than its header"
            magic, version, dtype_code, num_sequences, num_documents = _HEADER.unpack(header)
            if magic != _MAGIC:
                return f"{index} does not begin with the marks of an index file"
            if version != 1 or dtype_code not in _ITEM_TYPES:
                return f"{index} has unknown version {version} or dtype code {dtype_code}"
            expected = _HEADER.size + 12 * num_sequences + 8 * num_documents
            # A multimodal index adds one byte per sequence.
            if index_bytes not in (expected, expected + num_sequences):
                return f"{index} is {index_bytes} bytes long, its header says {expected}"
            if num_sequences == 0:
                return f"{index} lists no sequences"
            stream.seek(_HEADER.size + 4 * (num_sequences - 1))
            (last_length,) = struct.unpack("<i", stream.read(4))
            stream.seek(_HEADER.size + 4 * num_sequences + 8 * (num_sequences - 1))
            (last_offset,) = struct.unpack("<q", stream.read(8))
    except OSError as error:
        return f"{error.filename} cannot be read ({error.strerror})"
    end = last_offset + last_length * int(_ITEM_TYPES[dtype_code][-1])
    if end != token_bytes:
        return f"{tokens} is {token_bytes} bytes long, its index says {end}"
    return None


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


HOST_MEMORY_SHARE = 0.8
"""Share of available memory to pin by default: data loaders and checkpoints need the rest."""


def default_host_memory_limit_bytes(root: Path = Path("/")) -> Optional[int]:
    """Return this process's share of the node's available memory, in bytes; None if unknown.

    Args:
        root: Folder that contains /proc and /sys.

    Raises:
        ValueError: The launcher's number of processes on this node is invalid.
    """
    available = available_memory_bytes(root)
    if available is None:
        return None
    return host_memory_share_bytes(available, num_local_ranks())


def host_memory_share_bytes(available_bytes: int, num_processes: int) -> int:
    """Return the bytes that each of a node's processes may pin by default."""
    return int(available_bytes * HOST_MEMORY_SHARE) // max(1, num_processes)


def available_memory_bytes(root: Path = Path("/")) -> Optional[int]:
    """Return the host memory that this process can still allocate, in bytes; None if unknown.

    It is the minimum of the kernel's estimate for the machine and the remainder of each control
    group's limit (a container's). File caches that a group can drop do not count as used, as in the
    kernel's estimate.

    Args:
        root: Folder that contains /proc and /sys.
    """
    found = [group.left_bytes for group in control_groups(root)]
    for line in read_lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) * 1024)
    return max(0, min(found)) if found else None


class _MemoryController(NamedTuple):
    """Files of one version of control groups: mount point, limit, usage, droppable caches."""

    mount: str
    limit: str
    used: str
    droppable: str


_CONTROLLERS = {
    2: _MemoryController("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file "),
    1: _MemoryController(
        "sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file ",
    ),
}
"""Files of control groups, by version."""


class ControlGroup(NamedTuple):
    """A control group with a memory limit, such as a container's."""

    version: int
    limit_bytes: int
    left_bytes: int
    """Part of the limit that is unused, or used for file caches that can be dropped."""


def control_groups(root: Path = Path("/")) -> Iterator[ControlGroup]:
    """Yield the control groups whose memory limits apply to this process.

    Args:
        root: Folder that contains /proc and /sys.
    """
    for line in read_lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        version = 1 if controllers else 2
        mount = root / _CONTROLLERS[version].mount
        # Limits of all parent groups apply too. Inside a container the path may exist only on the
        # host; then the mount point is the container's own group.
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):
            found = _control_group(folder, version)
            if found is not None:
                yield found
            if folder == mount:
                break


def _control_group(folder: Path, version: int) -> Optional[ControlGroup]:
    files = _CONTROLLERS[version]
    limit, used = read_lines(folder / files.limit), read_lines(folder / files.used)
    if not limit or not used or limit[0] == "max":
        return None
    droppable = [
        int(line.split()[1])
        for line in read_lines(folder / "memory.stat")
        if line.startswith(files.droppable)
    ]
    return ControlGroup(version, int(limit[0]), int(limit[0]) - int(used[0]) + sum(droppable))


def read_lines(path: Path) -> list[str]:
    """Return the lines of a file; none if it cannot be read."""
    try:
        # Names of control groups may have any encoding.
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
