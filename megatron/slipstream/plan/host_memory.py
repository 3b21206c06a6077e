# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""How host memory is in use, as numbers: the rules that the engine's pool follows."""

from __future__ import annotations

MIN_BUFFER_BYTES = 4096
BUFFER_ALIGNMENT_BYTES = 512
"""Buffers start and end at multiples of this, as device memory does."""
CLASSES_PER_OCTAVE = 16


def size_class_bytes(nbytes: int) -> int:
    """The buffer size that serves a request of ``nbytes``: from 8 KiB on less than 6.25% larger.

    Each power of two is divided into :data:`CLASSES_PER_OCTAVE` equal steps, so that sizes which
    vary from iteration to iteration, as tokens per expert do, leave holes that fit again.
    """
    nbytes = max(nbytes, MIN_BUFFER_BYTES)
    step = max(BUFFER_ALIGNMENT_BYTES, (1 << (nbytes.bit_length() - 1)) // CLASSES_PER_OCTAVE)
    return -(-nbytes // step) * step
