# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Replace an attribute of an object, and undo it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

_INHERITED = object()
"""Sentinel: the owner itself has no such attribute."""


def replace_on(owner: Any, name: str, replacement: Any) -> Callable[[], None]:
    """Replace an attribute of an instance, a class or a module; return a function that undoes it.

    An inherited attribute is inherited again afterwards.
    """
    before = vars(owner).get(name, _INHERITED)
    setattr(owner, name, replacement)
    if before is _INHERITED:
        return partial(delattr, owner, name)
    return partial(setattr, owner, name, before)
