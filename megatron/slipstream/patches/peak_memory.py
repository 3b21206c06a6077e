# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Replacements that keep torch's peak memory statistics true while the engine measures."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron.slipstream.fine_grained_activation_offload import peak_statistics


def add_discarded_peaks(read: Callable[[int], Any]) -> Callable[[int], Any]:
    """Make ``read(device)`` return the peaks since the user's last reset."""

    @functools.wraps(read)
    def read_all(device: int) -> Any:
        return peak_statistics.with_discarded(device, read(device))

    return read_all


def forget_discarded_peaks(reset: Callable[[int], None]) -> Callable[[int], None]:
    """Make ``reset(device)`` forget earlier peaks too."""

    @functools.wraps(reset)
    def reset_all(device: int) -> None:
        reset(device)
        peak_statistics.forget(device)

    return reset_all
