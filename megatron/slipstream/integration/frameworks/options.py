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
from typing import Any, Optional

from pydantic import TypeAdapter, ValidationError

from megatron.slipstream.options.facts import Facts
from megatron.slipstream.options.fields import DEFAULTS, MODULES, SWITCH, OffloadOptions
from megatron.slipstream.options.model import check_model_options
from megatron.slipstream.options.modules import own_modules
from megatron.slipstream.options.rules import nearest_name, require

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ModelFacts:
    """Model facts to check the options against; :meth:`of` reads them from a configuration."""

    num_moe_experts: Optional[int] = None
    """None for a dense model."""
    cpu_offloading: bool = False
    cuda_graph_impl: str = "none"
    cuda_graph_modules: tuple[Any, ...] = ()
    cuda_graph_warmup_steps: int = 3
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Offloading options that the configuration already has, by name."""
    known_options: frozenset[str] = frozenset(DEFAULTS)
    """Names of options that the installed megatron-core has."""

    @classmethod
    def of(cls, config: Any) -> ModelFacts:
        """Read a ``TransformerConfig``, a Megatron-Bridge provider, or the class of either."""
        known = frozenset(DEFAULTS) & {field.name for field in dataclasses.fields(config)}
        return cls(
            num_moe_experts=getattr(config, "num_moe_experts", None),
            cpu_offloading=bool(getattr(config, "cpu_offloading", False)),
            cuda_graph_impl=str(getattr(config, "cuda_graph_impl", None) or "none"),
            cuda_graph_modules=_graph_modules(config),
            cuda_graph_warmup_steps=getattr(config, "cuda_graph_warmup_steps", 3),
            options={name: getattr(config, name) for name in known if hasattr(config, name)},
            known_options=known,
        )


DENSE = ModelFacts()
"""A dense model on the newest megatron-core."""


def to_transformer_overrides(
    options: OffloadOptions | Mapping[str, Any], model_facts: ModelFacts = DENSE
) -> dict[str, Any]:
    """Return the fields of a model's configuration to set, with their values.

    Args:
        options: Options as the user wrote them; [Note: Three values of on and off].
        model_facts: Facts of the model to configure.

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
    overrides = _known(given, model_facts)
    effective = {**DEFAULTS, **model_facts.options, **overrides}
    if given.get(SWITCH):
        # Not the configuration's own list: enabling offloading requires naming the modules.
        effective[MODULES] = given.get(MODULES, [])
    require(check_model_options(Facts(model_facts, effective)))
    return overrides


def to_cli(
    options: OffloadOptions | Mapping[str, Any], model_facts: ModelFacts = DENSE
) -> list[str]:
    """Return :func:`to_transformer_overrides` as flags for megatron's parser; empty if off."""
    overrides = to_transformer_overrides(options, model_facts)
    if overrides.get(SWITCH) is False:
        return []  # The flag has no negation.
    words = []
    for name, value in overrides.items():
        flag = "--" + name.replace("_", "-")
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
            "to_transformer_overrides() returns for ModelFacts.of(config)"
        )
    trial = copy.copy(config)
    for target in (trial, config):
        for name, value in overrides.items():
            # Separate lists, since a rule may append to one of them.
            setattr(target, name, copy.copy(value))
        revalidate(target)


def revalidate(config: Any) -> None:
    """Run a configuration's rules again after its fields have been changed.

    Raises:
        ValueError: A rule is violated.
    """
    facts = ModelFacts.of(config)
    require(check_model_options(Facts(facts, DEFAULTS, facts.options)))
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
    try:
        TypeAdapter(OffloadOptions).validate_python(given, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        name, expected = str(first["loc"][0]), first["msg"].removeprefix("Input should be ")
        raise ValueError(f"{name}={given[name]!r} has the wrong type; set {expected}") from error
    return given


def _known(given: Mapping[str, Any], facts: ModelFacts) -> dict[str, Any]:
    """Return the options that the installed megatron-core has."""
    known = {}
    for name, value in given.items():
        if name in facts.known_options:
            known[name] = value
        elif value == DEFAULTS[name]:
            logger.info(
                "%s=%s is left out: the installed megatron-core has no such option and behaves as "
                "with that value",
                name,
                value,
            )
        else:
            from megatron.slipstream.integration.seam import compat

            compat.refuse_later_option(name)
    return known


def _graph_modules(config: Any) -> tuple[Any, ...]:
    """Read the field by its current or deprecated name; it may be a str before finalization."""
    given = getattr(config, "cuda_graph_modules", None) or getattr(config, "cuda_graph_scope", None)
    if given is None or given == "full":
        return ()
    return (given,) if isinstance(given, str) else tuple(given)
