# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""How types of settings are checked without pydantic."""

from typing import Any, Literal, Union, get_origin, get_type_hints

from megatron.slipstream.options.fields import OffloadConfig


def _check_types(config: OffloadConfig) -> None:
    """Check the types of values, without conversion.

    Raises:
        ValueError: A value has another type, or is not a choice. The message names the setting.
    """
    for name, hint in get_type_hints(OffloadConfig).items():
        value = getattr(config, name)
        members = hint.__args__ if get_origin(hint) is Union else (hint,)
        if not any(_is_member(value, member) for member in members):
            shown = " or ".join(getattr(member, "__name__", str(member)) for member in members)
            raise ValueError(f"{name}={value!r} is neither a choice nor of its type; set {shown}")


def _is_member(value: object, hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return value in hint.__args__
    if hint is float:
        return type(value) in (int, float)
    return type(value) is (get_origin(hint) or hint)
