# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The arguments of a chunk, flattened into tensors and other values."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Optional

import pytest
import torch

from megatron.slipstream.graphs.static_arguments import StaticArguments


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


def flat_arguments(**changed: Any) -> dict[str, Any]:
    """Arguments without containers, as with packed sequences."""
    offsets = torch.arange(3)
    packed = Packed(offsets, changed.pop("padded", offsets), **changed.pop("fields", {}))
    return {"mask": None, "table": torch.ones(4, 2), "scale": 1, "packed": packed, **changed}


@dataclass
class OtherPacked(Packed):
    pass


@dataclass
class One:
    tensor: torch.Tensor


GROUP = object()
CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "mask is given": ({"mask": torch.ones(1)}, "mask was None and is a tensor"),
    "mask": ({"mask": 3}, "mask was None and is 3"),
    "scale": ({"scale": 2}, "scale was 1 and is 2"),
    "scale is a tensor": ({"scale": torch.ones(())}, "scale was 1 and is a tensor"),
    "length": (
        {"table": torch.ones(5, 2)},
        r"table was float32 \[4x2\] on cpu and is float32 \[5x2\]",
    ),
    "type": ({"table": torch.ones(4, 2).half()}, "table was float32 .* and is float16"),
    "device": ({"table": torch.ones(4, 2, device="meta")}, "table was .* cpu and is .* on meta"),
    "no table": ({"table": None}, "table was a tensor and is None"),
    "two tensors": ({"padded": torch.arange(3)}, "padded=a tensor|different tensors were"),
    "field": (
        {"fields": {"longest": 9}},
        r"packed was Packed\(.*longest=8.*\) and is Packed\(.*longest=9",
    ),
    "group": ({"fields": {"group": object()}}, "group=None.*group=<object"),
    "kind": ({"packed": OtherPacked(torch.arange(3), torch.arange(3))}, "is OtherPacked"),
    "no packing": ({"packed": None}, "packed was Packed.* and is None"),
    "more": ({"more": 1}, "more was None and is 1"),
}


@pytest.mark.parametrize("changed, told", CHANGES.values(), ids=CHANGES)
def test_what_a_graph_cannot_take_is_told(changed: dict[str, Any], told: str) -> None:
    later = flat_arguments(**changed)
    call = StaticArguments.flatten(flat_arguments())
    assert call.tensors_of(later) is None
    assert re.search(told, "; ".join(call.differences(later)))


@pytest.mark.parametrize(
    "changed",
    [
        {"more": {"scale": 0.5}},
        {"more": {"scale": 0.5, "other": (torch.zeros(1), [torch.zeros(2)])}},
        {"more": {"scale": 0.5, "both": (torch.zeros(1), [])}},
        {"more": {"scale": 0.5, "both": (torch.zeros(1), (torch.zeros(2),))}},
        {"more": {"scale": 0.5, "both": (torch.zeros(1), [torch.zeros(3)])}},
        {"more": {"scale": 0.5, "both": 2 * (torch.zeros(1),)}},
        {"more": 0.5},
    ],
    ids=str,
)
def test_other_containers_are_noticed(changed: dict[str, Any]) -> None:
    call = StaticArguments.flatten(arguments())
    assert call.tensors_of(arguments(**changed)) is None
    assert call.differences(arguments(**changed))


def test_an_argument_that_is_missing_is_noticed() -> None:
    given = flat_arguments()
    del given["scale"]
    assert StaticArguments.flatten(flat_arguments()).tensors_of(given) is None
    given["other"] = None
    assert StaticArguments.flatten(flat_arguments()).tensors_of(given) is None


def test_one_tensor_where_two_were_is_told() -> None:
    apart, same = flat_arguments(padded=torch.arange(3)), torch.arange(3)
    call = StaticArguments.flatten(apart)
    assert call.tensors_of(flat_arguments(padded=torch.arange(3))) is not None
    for later in (flat_arguments(), {**apart, "packed": Packed(same, same)}):
        assert call.tensors_of(later) is None
        assert call.differences(later)


@pytest.mark.parametrize(
    "make",
    [
        flat_arguments,
        lambda: {"one": One(torch.ones(2))},  # a data class of one field
        arguments,  # with containers
        lambda: {"scale": math.nan, "group": GROUP, "parts": {"attn", "mlp"}},
    ],
)
def test_other_tensors_are_no_difference(make: Callable[[], dict[str, Any]]) -> None:
    given, later = make(), make()
    found = StaticArguments.flatten(given).tensors_of(later)
    assert found is not None
    expected = StaticArguments.flatten(later).tensors
    assert [id(tensor) for tensor in found] == [id(tensor) for tensor in expected]
    assert StaticArguments.flatten(given).differences(later) == []
