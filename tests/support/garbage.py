# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Keeps the garbage collector, and memory that it would free, out of measurements."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_is_frozen = False
"""Whether this process, or the one that it is forked from, has frozen objects for good."""


def freeze() -> None:
    """Freeze what is alive now for good: the garbage collector skips it."""
    global _is_frozen
    gc.freeze()
    _is_frozen = True


def give_back_unused_memory() -> None:
    """Collect garbage, and empty the cache of the device's allocator."""
    import torch

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
    # Objects frozen for good stay frozen. To count frozen objects would take longer than a step.
    if not _is_frozen:
        gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if not _is_frozen:
            gc.unfreeze()
