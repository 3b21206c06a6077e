# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Give existing layers a class derived from their own, whichever framework built them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

_classes: dict[tuple[type, type], type] = {}
"""Derived classes, keyed by mixin and the layers' own class."""


def convert(layer: Any, mixin: type) -> Callable[[], None]:
    """Derive the class of one layer from ``mixin`` and its own class.

    Args:
        layer: A module.
        mixin: A class without state of its own.

    Returns:
        A function that restores the layer's class. It does not keep the layer alive.
    """
    kind = type(layer)
    if (mixin, kind) not in _classes:
        name = f"{mixin.__name__.removesuffix('Mixin')}{kind.__name__}"
        _classes[mixin, kind] = type(name, (mixin, kind), {})
    layer.__class__ = _classes[mixin, kind]
    return undo_on(layer, lambda layer: setattr(layer, "__class__", kind))


def undo_on(layer: Any, undo: Callable[[Any], None]) -> Callable[[], None]:
    """Return a function that calls ``undo`` with the layer, without keeping the layer alive."""
    reference = weakref.ref(layer)

    def call() -> None:
        layer = reference()
        if layer is not None:
            undo(layer)

    return call
