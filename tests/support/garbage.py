# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Keeps the garbage collector, and memory that it would free, out of what is measured."""

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
    """Keep Python's garbage collector out of what is timed; call ``gc.collect()`` in between.

    Such calls are cheap, as they do not look again at what is alive now.
    """
    gc.collect()
    # By whoever started this: so it is to stay. The interpreter itself freezes some hundreds.
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
