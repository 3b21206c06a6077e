# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Flags of a training from a file: as text, or as YAML.

Text is what would follow the script on a command line; ``#`` begins a comment. YAML is a mapping
from flags to values, under ``MODEL_ARGS`` as in megatron's own test cases, or at the top:

    MODEL_ARGS:
      --num-layers: 32
      --swiglu: true
      --offload-modules: [core_attn, attn_proj]
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.slipstream.estimate.file_errors import wrong_with


def read_flags(path: Path) -> list[str]:
    """The words of a file of flags.

    Raises:
        ValueError: It is not one, or cannot be read; names the place.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"--args-file={path} {wrong_with(error)}; give a file of megatron's flags, as text or "
            "YAML"
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"--args-file={path} is not a text file: {error}; give a file of megatron's flags, as "
            "text or YAML"
        ) from error
    if path.suffix not in (".yaml", ".yml"):
        try:
            return shlex.split(text.replace("\\\n", " "), comments=True)
        except ValueError as error:
            raise ValueError(f"{path} is no list of flags: {error}; close the quotes") from error
    values = _yaml(path, text)
    values = values.get("MODEL_ARGS", values)
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no flags; write one '--name: value' a line")
    return [word for name, value in values.items() for word in _words(path, name, value)]


def _yaml(path: Path, text: str) -> dict[Any, Any]:
    try:
        import yaml
    except ImportError:
        raise ValueError(
            f"--args-file={path} needs PyYAML, which is not installed; pip install pyyaml, or "
            "write the flags as text"
        ) from None
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no flags; write one '--name: value' a line")
    return values


def _words(path: Path, name: Any, value: Any) -> Iterator[str]:
    if not isinstance(name, str):
        raise ValueError(f"{path}: {name!r} is no flag; write one '--name: value' a line")
    if isinstance(value, dict):
        raise ValueError(f"{path}: {name} holds a mapping, not a value; write '--name: value'")
    if value is None or value is False:
        return
    yield "--" + name.removeprefix("--").replace("_", "-")
    if value is not True:
        for word in value if isinstance(value, list) else [value]:
            yield str(word)
