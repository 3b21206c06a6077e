# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Reads Slipstream's own settings from a YAML file, for frameworks without options for them.

The environment variable :data:`VARIABLE` names the file. Its keys are the fields of
:class:`~megatron.slipstream.options.fields.OffloadConfig`:

    offload_max_overhead_percent: 1
    offload_host_memory_limit_bytes: 64000000000
"""

from __future__ import annotations

import dataclasses
import logging
import os
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from megatron.slipstream.launcher import rank
from megatron.slipstream.options.fields import DEFAULTS as MEGATRON_OPTIONS, OffloadConfig
from megatron.slipstream.options.rules import nearest_name

logger = logging.getLogger(__name__)

VARIABLE = "SLIPSTREAM_CONFIG"


def config_from_environment() -> OffloadConfig:
    """Return the settings of the file that :data:`VARIABLE` names; the defaults without it.

    Raises ``ValueError`` as :func:`load_config`.
    """
    path = os.environ.get(VARIABLE)
    return load_config(path) if path else OffloadConfig()


def log_settings(config: OffloadConfig) -> None:
    """Log every setting with its effective value, on the first rank only."""
    if rank() == 0:
        path = os.environ.get(VARIABLE)
        source = f"{VARIABLE}={path}" if path else f"{VARIABLE} is not set"
        logger.info("settings (%s): %s", source, describe(config))


def load_config(path: str | Path) -> OffloadConfig:
    """Read a settings file; a ``ValueError`` names the file and the key that is wrong."""
    hints = get_type_hints(OffloadConfig)
    values = _read(path)
    for name in values:
        if name not in hints:
            # Users often omit the prefix that all settings share.
            near = nearest_name(name, hints) or nearest_name(f"offload_{name}", hints, cutoff=0.85)
            hint = f"{near}Settings: {', '.join(hints)}"
            if name in MEGATRON_OPTIONS:
                hint = "it is an option of megatron-core's: give it to the model's configuration"
            raise ValueError(f"{path}: {name!r} is not a setting; {hint}")
    try:
        return OffloadConfig(**values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def describe(config: OffloadConfig) -> str:
    """List every setting with its value, those that differ from the defaults first."""
    default = OffloadConfig()
    fields = [field.name for field in dataclasses.fields(OffloadConfig)]
    given = [name for name in fields if getattr(config, name) != getattr(default, name)]
    others = [name for name in fields if name not in given]

    def listed(names: list[str]) -> str:
        return ", ".join(f"{name}={getattr(config, name)!r}" for name in names)

    return f"{listed(given) or 'none given'}; by default {listed(others)}"


def _read(path: str | Path) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"{VARIABLE}={path} cannot be read ({reason}); set it to a YAML file of settings that "
            "every node can read, or unset it"
        ) from error
    try:
        node = yaml.compose(text, yaml.SafeLoader)
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no settings; write one 'name: value' a line")
    # YAML keeps the last of duplicate keys.
    names = [key.value for key, _ in node.value]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{path}: {twice[0]} is set twice; remove one of the two")
    return values
