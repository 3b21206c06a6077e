# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Capture layers with packed sequences, in place of megatron-core's helper."""

from __future__ import annotations

import functools
from typing import Any, Optional


def capture_packed(original: Any) -> Any:
    """Replace ``TECudaGraphHelper.create_cudagraphs``."""

    @functools.wraps(original)
    def create(helper: Any) -> None:
        packed = _packed(helper)
        if packed is None:
            original(helper)
        else:
            packed.capture_with(helper)

    return create


def delete_packed(original: Any) -> Any:
    """Replace ``TECudaGraphHelper.delete_cuda_graphs``."""

    @functools.wraps(original)
    def delete(helper: Any) -> None:
        packed = _packed(helper)
        if packed is not None:
            packed.delete_with(helper)
        original(helper)

    return delete


def _packed(helper: Any) -> Optional[Any]:
    """Return the ``PackedLayers`` of a layer that has run with packed sequences, or None."""
    for layer in helper.flattened_callables:
        packed = getattr(layer, "packed", None)
        if packed is not None and packed.has_learned(layer):
            return packed
    return None
