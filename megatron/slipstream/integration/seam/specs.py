# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Replace classes in megatron-core's layer specs."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Optional

from megatron.core.transformer.spec_utils import ModuleSpec


def replace_classes(spec: Any, classes: Mapping[type, type]) -> Any:
    """Return a copy of a spec with other classes, by class.

    It is a ``ModuleSpec``, a builder (``functools.partial``, as in megatron-core 0.19), an object
    that contains them, or a list of them.
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


def change_model_spec(model_config: Any, change: Callable[[Any], Any]) -> None:
    """Make a model be built from ``change(spec)``, a changed copy of its spec.

    ``megatron.training``'s configuration of a GPT or hybrid model has a spec, a function that
    returns one, or neither. It is changed in place.
    """
    if hasattr(model_config, "hybrid_stack_spec"):
        if model_config.hybrid_stack_spec is None:
            from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

            model_config.hybrid_stack_spec = hybrid_stack_spec
        model_config.hybrid_stack_spec = change(model_config.hybrid_stack_spec)
        return
    given = model_config.transformer_layer_spec

    def changed(config: Any, vp_stage: Optional[int] = None) -> Any:
        spec = given
        if spec is None:
            from megatron.training.models.gpt import default_layer_spec

            spec = default_layer_spec(config, vp_stage)
        elif not isinstance(spec, ModuleSpec) and callable(spec):
            takes_stage = "vp_stage" in inspect.signature(spec).parameters
            spec = spec(config, vp_stage=vp_stage) if takes_stage else spec(config)
        return change(spec)

    model_config.transformer_layer_spec = changed
