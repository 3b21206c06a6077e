# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Give existing layers a class derived from their own, whichever framework built them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple


class _Conversion(NamedTuple):
    kind: type
    """The layer's own class."""
    mixins: list[type]
    """The mixins of its present class, the outermost last; each once for each of its users."""


_conversions: weakref.WeakKeyDictionary[Any, _Conversion] = weakref.WeakKeyDictionary()


def convert(layer: Any, mixin: type) -> Callable[[], None]:
    """Derive the class of a layer from a stateless ``mixin`` and its own, unless it already is.

    Returns a function that takes the mixin away, unless others have converted the layer with it
    too. Such functions may be called in any order. They do not keep the layer alive.
    """
    conversion = _conversions.setdefault(layer, _Conversion(type(layer), []))
    conversion.mixins.append(mixin)
    layer.__class__ = _class_of(conversion)

    def take_away(layer: Any) -> None:
        conversion = _conversions[layer]
        conversion.mixins.remove(mixin)
        layer.__class__ = _class_of(conversion)
        if not conversion.mixins:
            del _conversions[layer]

    return undo_on(layer, take_away)


def _class_of(conversion: _Conversion) -> Any:
    kind: Any = conversion.kind
    mixin: Any
    for mixin in conversion.mixins:
        if not issubclass(kind, mixin):
            kind = _derived(mixin, kind)
    return kind


@functools.cache
def _derived(mixin: Any, kind: Any) -> type:
    return type(f"{mixin.__name__.removesuffix('Mixin')}{kind.__name__}", (mixin, kind), {})


def undo_on(layer: Any, undo: Callable[[Any], None]) -> Callable[[], None]:
    """Return a function that calls ``undo`` with the layer once, without keeping it alive."""
    references = [weakref.ref(layer)]

    def call() -> None:
        layer = references.pop()() if references else None
        if layer is not None:
            undo(layer)

    return call
