# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Keeps the garbage collector, and memory that it would free, out of measurements."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import torch


def give_back_unused_memory() -> None:
    """Collect garbage, and empty the cache of the device's allocator."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Disable Python's garbage collector during timing; call ``gc.collect()`` in between.

    Such calls are cheap, since they skip objects that are alive now.
    """
    gc.collect()
    # Objects frozen by the caller stay frozen. The interpreter itself freezes some hundreds.
    is_frozen = gc.get_freeze_count() > 10_000
    if not is_frozen:
        gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if not is_frozen:
            gc.unfreeze()
