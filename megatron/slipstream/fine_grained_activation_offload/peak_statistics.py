# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Readings of torch's CUDA allocator, with the peaks that the engine's resets discard.

The allocator has one peak counter for each statistic, and measuring a short interval resets all of
them (see [Note: The recorder resets the peak counter]). Here they are kept, so that the functions
of torch that a user calls can return the peak since the user's own last reset. Two patches of
:mod:`megatron.slipstream.patches` do that; this module never calls the patched functions.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

_discarded: dict[int, dict[str, Any]] = {}
"""By device: the highest peaks that :func:`reset` discarded since the user's last reset."""


def read(device: int) -> dict[str, Any]:
    """Return the allocator's own statistics, with peaks since any reset, of a GPU by its index.

    A dictionary as ``torch.cuda.memory_stats_as_nested_dict()`` returns it.
    """
    statistics: dict[str, Any] = inspect.unwrap(torch._C._cuda_memoryStats)(device)
    return statistics


def obtainable_bytes() -> int:
    """Return the device bytes that torch's allocator has reserved or could reserve."""
    free, total = torch.cuda.mem_get_info()
    # Of torch.cuda.set_per_process_memory_fraction, or of PYTORCH_CUDA_ALLOC_CONF.
    allowed = int(total * torch.cuda.get_per_process_memory_fraction())
    return min(int(free) + torch.cuda.memory_reserved(), allowed)


def reset(device: int) -> None:
    """Start new peaks of a GPU at the present values; :func:`with_discarded` knows the old ones."""
    _discarded[device] = with_discarded(device, read(device))
    inspect.unwrap(torch._C._cuda_resetPeakMemoryStats)(device)


def with_discarded(device: int, statistics: dict[str, Any]) -> dict[str, Any]:
    """Return ``statistics`` with the peaks since the user's last reset."""
    return _merged(statistics, _discarded.get(device, {}))


def forget(device: int) -> None:
    """Forget what :func:`reset` discarded, since the user starts new peaks."""
    _discarded.pop(device, None)


def _merged(statistics: dict[str, Any], discarded: dict[str, Any]) -> dict[str, Any]:
    merged = dict(statistics)
    for name, before in discarded.items():
        value = statistics.get(name)
        if isinstance(value, dict):
            merged[name] = _merged(value, before)
        elif name == "peak":
            merged[name] = max(value, before)
    return merged
