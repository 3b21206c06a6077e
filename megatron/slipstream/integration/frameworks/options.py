# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Megatron-core's seven offloading options, typed, in the forms that frameworks accept.

:func:`to_transformer_overrides` returns a plain dictionary for code that assigns fields of a
model's configuration (NeMo-RL's ``megatron_cfg``, Megatron-Bridge's
``apply_overrides_and_finalize``, verl's ``override_transformer_config``, ms-swift's
``megatron_extra_kwargs``), and :func:`to_cli` returns flags for programs with megatron's parser
(slime, Megatron-LM). Both are pure, and neither needs torch or megatron-core.

[Note: Three values of on and off]
If ``fine_grained_activation_offloading`` is absent, the model's configuration keeps its value;
False disables offloading and empties the list of modules; True requires a non-empty list. An option
that is None (``null`` in YAML) is left out.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Iterable, Mapping
from typing import Any, get_type_hints

from megatron.slipstream.options.facts import Facts
from megatron.slipstream.options.fields import DEFAULTS, MODULES, SWITCH, OffloadOptions, check_type
from megatron.slipstream.options.model import check_model_options
from megatron.slipstream.options.modules import own_modules
from megatron.slipstream.options.rules import as_flag, nearest_name, require

logger = logging.getLogger(__name__)


def to_transformer_overrides(
    options: OffloadOptions | Mapping[str, Any], config: Any = None
) -> dict[str, Any]:
    """Return the fields of a model's configuration to set, with their values.

    Args:
        options: Options as the user wrote them; [Note: Three values of on and off].
        config: The ``TransformerConfig`` or Megatron-Bridge provider to set them in, or the class
            of either. None for a dense model on the newest megatron-core.

    Returns:
        A new dictionary of plain values. An option that the installed megatron-core lacks is left
        out, with a log message, if its value has no effect; otherwise it is refused.

    Raises:
        ValueError: A key is not an option, a value has the wrong type, or the options are
            incompatible with each other or the model. The message names option, value and fix.
    """
    given = {name: value for name, value in _typed(options).items() if value is not None}
    if given.get(SWITCH) is False:
        return {SWITCH: False, MODULES: []}
    overrides = _known(given, config)
    # Not the configuration's own list: enabling offloading requires naming the modules.
    modules = {MODULES: given.get(MODULES, [])} if given.get(SWITCH) else {}
    require(check_model_options(Facts(DEFAULTS, _facts_of(config), overrides, modules)))
    return overrides


def to_cli(options: OffloadOptions | Mapping[str, Any], config: Any = None) -> list[str]:
    """Return :func:`to_transformer_overrides` as flags for megatron's parser; empty if off."""
    overrides = to_transformer_overrides(options, config)
    if overrides.get(SWITCH) is False:
        return []  # The flag has no negation.
    words = []
    for name, value in overrides.items():
        flag = as_flag(name)
        if isinstance(value, bool):
            words += [flag] if value else []
        elif isinstance(value, list):
            words += [flag, *value]
        else:
            words += [flag, str(value)]
    return words


def apply_overrides(config: Any, overrides: Mapping[str, Any]) -> None:
    """Assign fields of a configuration and check its rules again.

    A configuration validates itself only on creation. This runs Slipstream's rules and then those
    of the configuration (``finalize`` of a Megatron-Bridge provider, else ``__post_init__``) with
    the new values, on a copy first.

    Args:
        config: A ``TransformerConfig`` or a provider. Unchanged if this raises.
        overrides: From :func:`to_transformer_overrides`.

    Raises:
        ValueError: A rule is violated, or ``config`` has no such field.
    """
    missing = [name for name in overrides if not hasattr(config, name)]
    if missing:
        raise ValueError(
            f"{missing[0]} is no field of {type(config).__name__}; give what "
            "to_transformer_overrides() returns for this configuration"
        )
    trial = copy.copy(config)
    for target in (trial, config):
        for name, value in overrides.items():
            # Separate lists, since a rule may append to one of them.
            setattr(target, name, copy.copy(value))
        revalidate(target)


def revalidate(config: Any) -> None:
    """Run a configuration's rules again, or raise ``ValueError``, after its fields have changed."""
    require(check_model_options(Facts(DEFAULTS, _facts_of(config))))
    if own_modules(config):
        from megatron.slipstream.patches import table

        table.apply(table.Feature.MODULE_NAMES)
    finish = getattr(config, "finalize", None) or config.__post_init__
    try:
        finish()
    except AssertionError as error:
        raise ValueError(str(error) or f"{type(config).__name__} refuses its fields") from error


def _typed(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with plain values, after checking their types."""
    given = {}
    for name, value in options.items():
        if name not in DEFAULTS:
            hint = nearest_name(name, DEFAULTS, cutoff=0.5)
            raise ValueError(
                f"{name!r} is not an offloading option; {hint}Options: {', '.join(DEFAULTS)}"
            )
        # OmegaConf, among others, has its own list type.
        is_list = isinstance(value, Iterable) and not isinstance(value, (str, Mapping))
        given[name] = list(value) if is_list else value
        check_type(name, given[name], get_type_hints(OffloadOptions)[name])
    return given


def _known(given: Mapping[str, Any], config: Any) -> dict[str, Any]:
    if config is None:
        return dict(given)
    fields = {field.name for field in dataclasses.fields(config)}
    for name in given.keys() - fields:
        if given[name] != DEFAULTS[name]:
            from megatron.slipstream.integration.seam import compat

            compat.refuse_later_option(name)
        logger.info(
            "%s=%s is left out: the installed megatron-core has no such option and behaves as "
            "with that value",
            *(name, given[name]),
        )
    return {name: value for name, value in given.items() if name in fields}


_OF_MODELS = ("num_moe_experts", "cpu_offloading", "cuda_graph_impl", "cuda_graph_warmup_steps")
"""What the options are checked against, beside the parts of layers in CUDA graphs."""


def _facts_of(config: Any) -> dict[str, Any]:
    names = [name for name in (*DEFAULTS, *_OF_MODELS) if hasattr(config, name)]
    # Before finalization, it may be a str, or have a deprecated name.
    parts = getattr(config, "cuda_graph_modules", None) or getattr(config, "cuda_graph_scope", None)
    parts = [] if parts in (None, "full") else [parts] if isinstance(parts, str) else list(parts)
    return {**{name: getattr(config, name) for name in names}, "cuda_graph_modules": parts}
