# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The arguments of a chunk, flattened into tensors and other values."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Optional

import pytest
import torch

from megatron.slipstream.graphs.static_arguments import FastMatch, StaticArguments


@dataclass
class Packed:
    offsets: torch.Tensor
    padded: torch.Tensor
    longest: int = 8
    group: Optional[object] = None

    def __post_init__(self) -> None:
        self.num_made = getattr(self, "num_made", 0) + 1


def arguments(**changed: Any) -> dict[str, Any]:
    offsets = torch.arange(3)
    given = {
        "mask": None,
        "table": torch.ones(4, 2),
        "packed": Packed(offsets, offsets.clone()),
        "more": {"scale": 0.5, "both": (torch.zeros(1), [torch.zeros(2)])},
    }
    return {**given, **changed}


def test_what_is_taken_apart_goes_together_again() -> None:
    given = arguments()
    call = StaticArguments.flatten(given)
    assert len(call.tensors) == 5
    again = call.unflatten(call.tensors)
    assert again["mask"] is None
    assert again["table"] is given["table"]
    assert again["packed"].offsets is given["packed"].offsets
    assert again["packed"].longest == 8
    assert again["more"]["scale"] == 0.5
    assert type(again["more"]["both"]) is tuple
    assert type(again["more"]["both"][1]) is list
    assert again["more"]["both"][1][0] is given["more"]["both"][1][0]


def test_other_tensors_take_the_places_of_the_calls_own() -> None:
    call = StaticArguments.flatten(arguments())
    others = [torch.full_like(tensor, 7) for tensor in call.tensors]
    again = call.unflatten(others)
    assert again["packed"].padded is others[call.names.index("packed.padded")]


def test_one_tensor_at_two_places_stays_one() -> None:
    offsets = torch.arange(3)
    call = StaticArguments.flatten(arguments(packed=Packed(offsets, offsets)))
    again = call.unflatten([tensor.clone() for tensor in call.tensors])
    assert again["packed"].offsets is again["packed"].padded
    two = StaticArguments.flatten(arguments())
    again = two.unflatten([tensor.clone() for tensor in two.tensors])
    assert again["packed"].offsets is not again["packed"].padded


def test_a_data_class_is_made_without_running_its_code() -> None:
    call = StaticArguments.flatten(arguments())
    assert not hasattr(call.unflatten(call.tensors)["packed"], "num_made")


@pytest.mark.parametrize(
    "changed, told",
    [
        ({"table": torch.ones(5, 2)}, r"table was float32 \[4x2\] on cpu and is float32 \[5x2\]"),
        ({"table": torch.ones(4, 2).half()}, "table was float32 .* and is float16"),
        ({"mask": torch.ones(1)}, "mask was None and is a tensor"),
        ({"mask": 3}, "mask was None and is 3"),
        ({"new": 1}, "new was None and is 1"),
        (
            {"packed": Packed(torch.arange(3), torch.arange(3), longest=9)},
            r"packed was Packed\(.*longest=8.*\) and is Packed\(.*longest=9",
        ),
    ],
)
def test_what_a_graph_cannot_take_is_told(changed: dict[str, Any], told: str) -> None:
    call = StaticArguments.flatten(arguments())
    later = StaticArguments.flatten(arguments(**changed))
    assert not call.matches(later)
    (difference,) = call.differences(later)
    assert re.search(told, difference)


def test_one_tensor_where_two_were_is_told() -> None:
    call = StaticArguments.flatten(arguments())
    offsets = torch.arange(3)
    later = StaticArguments.flatten(arguments(packed=Packed(offsets, offsets)))
    assert not call.matches(later)
    assert call.differences(later)


def test_other_values_are_no_difference() -> None:
    call = StaticArguments.flatten(arguments())
    later = StaticArguments.flatten(arguments(table=torch.zeros(4, 2)))
    assert call.matches(later)
    assert call.differences(later) == []


def flat_arguments(**changed: Any) -> dict[str, Any]:
    """Arguments without containers, as with packed sequences."""
    offsets = torch.arange(3)
    packed = Packed(offsets, changed.pop("padded", offsets), **changed.pop("fields", {}))
    return {"mask": None, "table": torch.ones(4, 2), "scale": 1, "packed": packed, **changed}


def look_of(given: dict[str, Any]) -> FastMatch:
    return FastMatch(StaticArguments.flatten(given))


def test_a_quick_look_finds_the_tensors_of_a_call() -> None:
    look = look_of(flat_arguments())
    other = flat_arguments()
    found = look.tensors(other)
    assert found is not None
    expected = StaticArguments.flatten(other).tensors
    assert [id(tensor) for tensor in found] == [id(tensor) for tensor in expected]


@dataclass
class OtherPacked(Packed):
    pass


@pytest.mark.parametrize(
    "changed",
    [
        {"mask": torch.ones(1)},
        {"scale": 2},
        {"scale": torch.ones(())},
        {"scale": 1.0},
        {"table": torch.ones(4, 3)},
        {"table": torch.ones(4, 2, dtype=torch.float64)},
        {"table": torch.ones(4, 2, device="meta")},
        {"table": None},
        {"padded": torch.arange(3)},
        {"fields": {"longest": 9}},
        {"fields": {"group": object()}},
        {"packed": OtherPacked(torch.arange(3), torch.arange(3))},
        {"packed": None},
        {"more": 1},
    ],
    ids=lambda changed: "+".join(changed),
)
def test_what_a_quick_look_does_not_know_is_taken_apart(changed: dict[str, Any]) -> None:
    assert look_of(flat_arguments()).tensors(flat_arguments(**changed)) is None


def test_a_quick_look_tells_one_tensor_from_two() -> None:
    apart = flat_arguments(padded=torch.arange(3))
    look = look_of(apart)
    assert look.tensors(flat_arguments(padded=torch.arange(3))) is not None
    assert look.tensors(flat_arguments()) is None
    same = torch.arange(3)
    assert look.tensors({**apart, "packed": Packed(same, same)}) is None


def test_a_quick_look_misses_no_argument() -> None:
    given = flat_arguments()
    del given["mask"]
    assert look_of(flat_arguments()).tensors(given) is None
    given["other"] = None
    assert look_of(flat_arguments()).tensors(given) is None


def test_containers_are_taken_apart() -> None:
    assert look_of(arguments()).tensors(arguments()) is None


@dataclass
class One:
    tensor: torch.Tensor


def test_a_quick_look_into_a_data_class_of_one_field() -> None:
    look = look_of({"one": One(torch.ones(2))})
    other = torch.zeros(2)
    found = look.tensors({"one": One(other)})
    assert found[0] is other
