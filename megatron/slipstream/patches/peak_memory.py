# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Replacements that keep torch's peak memory statistics true while the engine measures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.slipstream.fine_grained_activation_offload import peak_statistics
from megatron.slipstream.patches.patching import replacing


@replacing
def add_discarded_peaks(read: Callable[[int], Any], device: int) -> Any:
    """Make ``read(device)`` return the peaks since the user's last reset."""
    return peak_statistics.with_discarded(device, read(device))


@replacing
def forget_discarded_peaks(reset: Callable[[int], None], device: int) -> None:
    """Make ``reset(device)`` forget earlier peaks too."""
    reset(device)
    peak_statistics.forget(device)
