# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Putting other classes into megatron-core's layer specs."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec


def replace_classes(spec: Any, classes: Mapping[type, type]) -> Any:
    """A copy of a layer or block spec with other classes in it.

    Args:
        spec: A ``ModuleSpec``, a builder (``functools.partial``, as megatron-core 0.19 has them),
            an object that holds some, or a list of such.
        classes: What takes the place of what.
    """
    if isinstance(spec, type):
        return classes.get(spec, spec)
    if isinstance(spec, functools.partial):
        options = {key: replace_classes(value, classes) for key, value in spec.keywords.items()}
        return functools.partial(replace_classes(spec.func, classes), *spec.args, **options)
    if isinstance(spec, list | tuple):
        return type(spec)(replace_classes(item, classes) for item in spec)
    if isinstance(spec, ModuleSpec) or type(spec).__name__.endswith("Submodules"):
        changed = copy.copy(spec)
        for name, value in vars(spec).items():
            setattr(changed, name, replace_classes(value, classes))
        return changed
    return spec
