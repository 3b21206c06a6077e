# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The arguments of a model chunk: tensors and other values.

A captured graph reads its inputs at fixed addresses, so each call's tensors are copied there. All
other values are baked in: they must be the same in every call.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from typing import Any, NamedTuple, Optional

import torch


class TensorFacts(NamedTuple):
    """Properties of a tensor that a graph bakes in."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorFacts:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device)

    def __str__(self) -> str:
        sizes = "x".join(map(str, self.shape))
        return f"{str(self.dtype).removeprefix('torch.')} [{sizes}] on {self.device}"


@dataclasses.dataclass(frozen=True)
class _TensorIndex:
    index: int


@dataclasses.dataclass(frozen=True)
class StaticArguments:
    """The arguments of one call: its tensors, each once, and all other values.

    Two arguments that are the same tensor stay the same tensor, since Transformer Engine
    distinguishes this case (offsets of sequences with and without padding).
    """

    tensors: tuple[torch.Tensor, ...]
    rest: Mapping[str, Any]
    """The arguments by name, with a :class:`_TensorIndex` for every tensor."""

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The first path of each tensor, such as ``packed_seq_params.cu_seqlens_q``."""
        names: dict[int, str] = {}
        for name, value in self.rest.items():
            for index, path in _paths(value, name):
                names.setdefault(index, path)
        return tuple(names[index] for index in range(len(self.tensors)))

    @classmethod
    def flatten(cls, arguments: Mapping[str, Any]) -> StaticArguments:
        """Extract tensors, including those in tuples, lists, dictionaries and data classes."""
        tensors: list[torch.Tensor] = []
        places: dict[int, _TensorIndex] = {}

        def replace(tensor: torch.Tensor) -> _TensorIndex:
            place = places.get(id(tensor))
            if place is None:
                place = places[id(tensor)] = _TensorIndex(len(tensors))
                tensors.append(tensor)
            return place

        rest = {name: _with_indices(value, replace) for name, value in arguments.items()}
        return cls(tuple(tensors), rest)

    def unflatten(self, tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
        """Return the arguments with other tensors in place of the call's own."""
        return {name: _with_tensors(value, tensors) for name, value in self.rest.items()}

    def tensors_of(self, arguments: Mapping[str, Any]) -> Optional[Sequence[torch.Tensor]]:
        """Return the tensors of a later call, like :attr:`tensors`; None if graphs cannot run it.

        Runs for every micro-batch, so it takes nothing apart that it need not compare.
        """
        found: list[torch.Tensor] = []
        if not _match_inside(dict, self.rest, arguments, found):
            return None
        if list(map(_tensor_facts, found)) != self._facts:
            return None
        return found if len(set(map(id, found))) == len(found) else None

    @cached_property
    def _facts(self) -> list[tuple[Any, ...]]:
        return list(map(_tensor_facts, self.tensors))

    def differences(self, arguments: Mapping[str, Any]) -> list[str]:
        """Return a later call's differences in values that a graph bakes in; empty if none."""
        call = StaticArguments.flatten(arguments)
        found = []
        for name in {**self.rest, **call.rest}:
            was, now = _describe(self.rest.get(name)), _describe(call.rest.get(name))
            if was != now:
                found.append(f"{name} was {was} and is {now}")
        facts = {
            name: TensorFacts.of(tensor)
            for name, tensor in zip(self.names, self.tensors, strict=True)
        }
        for name, tensor in zip(call.names, call.tensors, strict=True):
            if name in facts and facts[name] != TensorFacts.of(tensor):
                found.append(f"{name} was {facts[name]} and is {TensorFacts.of(tensor)}")
        if not found and self.rest != call.rest:
            were, are = ", ".join(self.names), ", ".join(call.names)
            found.append(f"different tensors were {were} and are {are}")
        return found


_tensor_facts = operator.attrgetter("shape", "dtype", "device")
"""Returns a tensor's :class:`TensorFacts` as a plain tuple, which is faster to create."""


def _match(captured: Iterable[Any], values: Iterable[Any], tensors: list[torch.Tensor]) -> bool:
    """Whether values are the captured ones but for tensors, which are appended, each once."""
    for item, value in zip(captured, values, strict=True):
        if item is value:
            continue
        kind = type(item)
        if kind is _TensorIndex:
            if not isinstance(value, torch.Tensor):
                return False
            if item.index == len(tensors):
                tensors.append(value)
            elif tensors[item.index] is not value:
                return False
        elif kind in _CONTAINERS:
            if not _match_inside(kind, item, value, tensors):
                return False
        elif isinstance(value, torch.Tensor) or item != value:
            return False
    return True


def _match_inside(kind: Any, item: Any, value: Any, tensors: list[torch.Tensor]) -> bool:
    if kind is _Instance:
        if type(value) is not item.kind:
            return False
        values = [getattr(value, name, None) for name in item.fields]
        return _match(item.fields.values(), values, tensors)
    if not isinstance(value, Mapping if kind is dict else kind) or len(value) != len(item):
        return False
    if kind is not dict:
        return _match(item, value, tensors)
    if any(key not in value for key in item):
        return False
    return _match(item.values(), [value[key] for key in item], tensors)


def _with_indices(value: Any, replace: Callable[[torch.Tensor], _TensorIndex]) -> Any:
    # Runs for every argument of every micro-batch, so the most common types are first.
    if value is None or isinstance(value, (int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        return replace(value)
    if isinstance(value, Mapping):
        return {key: _with_indices(item, replace) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [_with_indices(item, replace) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            name: _with_indices(getattr(value, name, None), replace)
            for name in _field_names(type(value))
        }
        return _Instance(type(value), fields)
    return value


@cache
def _field_names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


class _Instance(NamedTuple):
    """Replaces an instance of a data class among the other values."""

    kind: type
    fields: Mapping[str, Any]


_CONTAINERS = (_Instance, dict, tuple, list)
"""What the values other than tensors may be in, apart from constants."""


def _with_tensors(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(value, _TensorIndex):
        return tensors[value.index]
    if isinstance(value, _Instance):
        # Without its __post_init__, which may compute tensors and wait for the GPU.
        instance: Any = object.__new__(value.kind)
        for name, item in value.fields.items():
            object.__setattr__(instance, name, _with_tensors(item, tensors))
        return instance
    if isinstance(value, Mapping):
        return {key: _with_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [_with_tensors(item, tensors) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return copy.copy(value) if isinstance(value, set) else value


def _paths(value: Any, name: str) -> Iterator[tuple[int, str]]:
    if isinstance(value, _TensorIndex):
        yield value.index, name
    elif isinstance(value, _Instance):
        for field, item in value.fields.items():
            yield from _paths(item, f"{name}.{field}")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _paths(item, f"{name}[{key!r}]")
    elif isinstance(value, (tuple, list)):
        for number, item in enumerate(value):
            yield from _paths(item, f"{name}[{number}]")


def _describe(value: Any) -> str:
    if isinstance(value, _TensorIndex):
        return "a tensor"
    if isinstance(value, _Instance):
        return f"{value.kind.__name__}({_describe(value.fields)})"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_describe(item)}" for key, item in value.items())
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_describe, value))}]"
    return repr(value)
