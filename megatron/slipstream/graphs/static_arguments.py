# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The arguments of a model chunk: tensors and other values.

A captured graph reads its inputs at fixed addresses, so each call's tensors are copied there. All
other values are baked in: they must be the same in every call.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
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
        """Return the properties of a tensor."""
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
        """Extract tensors, including those in tuples, lists, dictionaries and data classes.

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
        """Return the arguments with other tensors in place of the call's own.

        Args:
            tensors: As many tensors as :attr:`tensors`.
        """
        return {name: _with_tensors(value, tensors) for name, value in self.rest.items()}

    def differences(self, call: StaticArguments) -> list[str]:
        """Return a later call's differences in values that a graph bakes in; empty if none.

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
    captured ones: here by a few operations over all of them, without a loop in Python.

    Args:
        captured: The call that all others must match.
    """

    def __init__(self, captured: StaticArguments) -> None:
        names = tuple(captured.rest)
        self._num_names = len(names)
        self._values = _getter(operator.itemgetter, names)
        self._instances: list[tuple[int, Callable[[Any], tuple[Any, ...]]]] = []
        """Indices of values that are data classes, and functions that return their fields."""
        self._facts = _facts(captured.tensors)
        values: list[Any] = [captured.rest[name] for name in names]
        for place, value in enumerate(values):  # values grows in the loop
            if isinstance(value, _Instance):
                fields = _getter(operator.attrgetter, tuple(value.fields))
                self._instances.append((place, fields))
                values += value.fields.values()
        self._kinds = tuple(_kind(value) for value in values)
        first: dict[int, int] = {}  # first place of each tensor among the values
        repeated: list[tuple[int, int]] = []
        constants: list[int] = []
        for place, value in enumerate(values):
            if isinstance(value, _TensorIndex):
                if first.setdefault(value.index, place) != place:
                    repeated.append((place, first[value.index]))
            elif not isinstance(value, _Instance):
                constants.append(place)
        # Tensors in containers have no index of their own.
        self._is_possible = len(first) == len(captured.tensors) and not any(
            isinstance(values[place], _CONTAINERS) for place in constants
        )
        self._constant_values = tuple(values[place] for place in constants)
        self._constants = _getter(operator.itemgetter, constants)
        self._tensors = _getter(operator.itemgetter, [first[index] for index in sorted(first)])
        self._same = _pairs(repeated)
        """Pairs of values that are the same tensor."""
        alike = [
            (first[one], first[other])
            for one, other in itertools.combinations(sorted(first), 2)
            if self._facts[one] == self._facts[other]
        ]
        self._different = _pairs(alike)
        """Pairs of different tensors with equal properties."""

    def tensors(self, arguments: Mapping[str, Any]) -> Optional[Sequence[torch.Tensor]]:
        """Return the tensors of a matching call, like :attr:`StaticArguments.tensors`.

        Args:
            arguments: The call's arguments by name.

        Returns:
            None if the call must be flattened to decide: it differs, or has tensors in containers.
        """
        if not self._is_possible or len(arguments) != self._num_names:
            return None
        try:
            values = self._values(arguments)
            for place, fields in self._instances:
                values += fields(values[place])
        except (AttributeError, KeyError):
            return None
        # Kinds first: comparing a tensor with a value runs a tensor operation.
        if tuple(map(type, values)) != self._kinds:
            return None
        if self._constants(values) != self._constant_values:
            return None
        tensors = self._tensors(values)
        if _facts(tensors) != self._facts:
            return None
        left, right = self._same
        if not all(map(operator.is_, left(values), right(values))):
            return None
        left, right = self._different
        if not all(map(operator.is_not, left(values), right(values))):
            return None
        return tensors


class CapturedCall:
    """A call that graphs are captured with; replayed calls must match it."""

    def __init__(self, arguments: StaticArguments) -> None:
        self.arguments = arguments
        self._fast_match = FastMatch(arguments)

    def tensors_of(self, arguments: Mapping[str, Any]) -> Optional[Sequence[torch.Tensor]]:
        """Return the tensors of a call with these arguments; None if it does not match."""
        tensors = self._fast_match.tensors(arguments)
        if tensors is not None:
            return tensors
        call = StaticArguments.flatten(arguments)
        return call.tensors if self.arguments.matches(call) else None

    def differences(self, arguments: Mapping[str, Any]) -> list[str]:
        """Return in what a call with these arguments differs; empty if it matches."""
        return self.arguments.differences(StaticArguments.flatten(arguments))


_CONTAINERS = (Mapping, tuple, list)


_tensor_facts = operator.attrgetter("shape", "dtype", "device")


def _facts(tensors: Sequence[torch.Tensor]) -> list[tuple[Any, ...]]:
    """Return each tensor's :class:`TensorFacts` as a plain tuple, which is faster to create."""
    return list(map(_tensor_facts, tensors))


def _kind(value: Any) -> type:
    if isinstance(value, _TensorIndex):
        return torch.Tensor
    return value.kind if isinstance(value, _Instance) else type(value)


def _getter(
    make: Callable[..., Callable[[Any], Any]], keys: Sequence[Any]
) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that gets some items or attributes of an object as a tuple.

    Args:
        make: ``operator.itemgetter`` or ``operator.attrgetter``.
        keys: Keys of the items, or names of the attributes.
    """
    if len(keys) > 1:
        return make(*keys)
    single = [make(key) for key in keys]
    return lambda value: tuple(get(value) for get in single)


def _pairs(
    places: Sequence[tuple[int, int]],
) -> tuple[Callable[[Any], tuple[Any, ...]], Callable[[Any], tuple[Any, ...]]]:
    """Return functions that get the first and the second values of pairs."""
    first, second = [one for one, _ in places], [other for _, other in places]
    return _getter(operator.itemgetter, first), _getter(operator.itemgetter, second)


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
    """Yield the index and the path of each tensor."""
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
