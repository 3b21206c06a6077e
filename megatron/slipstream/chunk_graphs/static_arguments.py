# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The arguments of a model chunk: tensors and other values.

A captured graph reads its inputs at fixed addresses, so each call's tensors are copied there. All
other values are baked in: they must be the same in every call.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
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
        """The properties of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device)

    def __str__(self) -> str:
        sizes = "x".join(map(str, self.shape))
        return f"{str(self.dtype).removeprefix('torch.')} [{sizes}] on {self.device}"


@dataclasses.dataclass(frozen=True)
class _TensorIndex:
    """Replaces a tensor among the other values."""

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
        """Extract the tensors of arguments, also from tuples, lists, dictionaries and data classes.

        Args:
            arguments: The arguments by name.
        """
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
        """The arguments with other tensors instead of the call's own.

        Args:
            tensors: As many tensors as :attr:`tensors`.
        """
        return {name: _with_tensors(value, tensors) for name, value in self.rest.items()}

    def differences(self, call: StaticArguments) -> list[str]:
        """The differences of a later call in values that a graph bakes in; empty if none.

        Args:
            call: The later call.
        """
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

    def matches(self, call: StaticArguments) -> bool:
        """Whether :meth:`differences` is empty, computed without the texts."""
        return self.rest == call.rest and _facts(self.tensors) == _facts(call.tensors)


class FastMatch:
    """Matches calls against the captured one without flattening them.

    A small model runs hundreds of calls per second, and each call's values are compared with the
    captured ones: here by a few operations over all of them.

    Args:
        captured: The call that all others must match.
    """

    def __init__(self, captured: StaticArguments) -> None:
        self._names = tuple(captured.rest)
        self._instances: list[tuple[int, Callable[[Any], tuple[Any, ...]]]] = []
        """Indices of values that are data classes, and functions that return their fields."""
        self._facts = _facts(captured.tensors)
        values: list[Any] = [captured.rest[name] for name in self._names]
        for place, value in enumerate(values):  # values grows in the loop
            if isinstance(value, _Instance):
                self._instances.append((place, _getter(tuple(value.fields))))
                values += value.fields.values()
        self._kinds = [_kind(value) for value in values]
        self._places: list[int] = [-1] * len(captured.tensors)
        """For each tensor, its first index."""
        self._repeated: list[tuple[int, int]] = []
        """Each later index of a tensor, with its first index."""
        for place, value in enumerate(values):
            if not isinstance(value, _TensorIndex):
                continue
            if self._places[value.index] < 0:
                self._places[value.index] = place
            else:
                self._repeated.append((place, self._places[value.index]))
        self._constant_places = [
            place
            for place, value in enumerate(values)
            if not isinstance(value, (_TensorIndex, _Instance))
        ]
        self._constants = [values[place] for place in self._constant_places]
        self._is_possible = not any(isinstance(value, _CONTAINERS) for value in self._constants)

    def tensors(self, arguments: Mapping[str, Any]) -> Optional[Sequence[torch.Tensor]]:
        """The tensors of a call that matches, as :attr:`StaticArguments.tensors`.

        Args:
            arguments: The call's arguments by name.

        Returns:
            None if the call must be flattened to decide: it differs, or has tensors in containers.
        """
        if not self._is_possible or len(arguments) != len(self._names):
            return None
        try:
            values = [arguments[name] for name in self._names]
            for place, fields in self._instances:
                values += fields(values[place])
        except (AttributeError, KeyError):
            return None
        # Kinds first: comparing a tensor with a value runs a tensor operation.
        if list(map(type, values)) != self._kinds:
            return None
        if [values[place] for place in self._constant_places] != self._constants:
            return None
        if any(values[place] is not values[first] for place, first in self._repeated):
            return None
        tensors = [values[place] for place in self._places]
        if len(set(map(id, tensors))) != len(tensors):
            return None
        return tensors if _facts(tensors) == self._facts else None


_CONTAINERS = (Mapping, tuple, list)


def _facts(tensors: Sequence[torch.Tensor]) -> list[tuple[Any, ...]]:
    """The :class:`TensorFacts` of each tensor as plain tuples, which are faster to create."""
    return [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]


def _kind(value: Any) -> type:
    if isinstance(value, _TensorIndex):
        return torch.Tensor
    return value.kind if isinstance(value, _Instance) else type(value)


def _getter(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    """A function that returns those attributes of an object."""
    if len(names) > 1:
        return operator.attrgetter(*names)
    return lambda value: tuple(getattr(value, name) for name in names)


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
    """The index and the path of each tensor."""
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
