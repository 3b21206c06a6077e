# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Compiles the extensions that tests use.

Otherwise the first test that needs one compiles it, for half a minute, and the other processes soon
wait for its lock. ``.ci/run`` runs it beside lint, and several processes while they collect.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "megatron" / "slipstream" / "fine_grained_activation_offload" / "native"


def is_done() -> bool:
    """Whether this file has run since the sources changed.

    It imports neither torch nor megatron-core, which takes as long as to run this file again.
    """
    try:
        done = _stamp().stat().st_mtime
    except FileNotFoundError:
        return False
    return all(file.stat().st_mtime < done for file in SOURCES.glob("*.*"))


def _stamp() -> Path:
    return ROOT / ".cache" / f"compiled-{sys.implementation.cache_tag}-{version('torch')}"


def load_shared_storage() -> None:
    """Load megatron-core's extension for recomputed outputs, if this release has one.

    A forked process that inherits it does not take the lock of its folder. torch takes that lock
    with each load, and waits for it without end, also if its owner was killed.
    """
    from megatron.core.tensor_parallel import random
    from torch.utils import cpp_extension

    if getattr(random, "_share_storage_ext", random) is None:
        remove_left_lock(Path(cpp_extension._get_build_directory("share_storage_ext", False)))
        random._get_share_storage()


def remove_left_lock(folder: Path) -> bool:
    """Remove the lock of a folder of torch's extensions unless a process has it open.

    Returns:
        Whether it was removed.
    """
    lock = folder / "lock"
    try:
        number = lock.stat().st_ino
    except FileNotFoundError:
        return False
    if _is_open(lock):
        return False
    try:
        if lock.stat().st_ino != number:  # Another process has taken it meanwhile.
            return False
        lock.unlink()
    except FileNotFoundError:
        return False
    return True


def _is_open(file: Path) -> bool:
    """Whether a process of this user has a file open, as owners of torch's locks have it."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.path.samefile(link, file):
                return True
        except OSError:  # The process has ended, or belongs to another user.
            continue
    return False


if __name__ == "__main__":
    from megatron.slipstream.fine_grained_activation_offload.native import native_module

    native_module()
    load_shared_storage()
    _stamp().parent.mkdir(exist_ok=True)
    _stamp().touch()
