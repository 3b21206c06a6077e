# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""C++ reads no private attribute of a Python object, and of public ones those listed here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.slipstream.fine_grained_activation_offload import native
from megatron.slipstream.fine_grained_activation_offload.backend import Backend
from megatron.slipstream.fine_grained_activation_offload.copy_streams import CopyStreams
from megatron.slipstream.fine_grained_activation_offload.engine import OffloadEngine
from megatron.slipstream.fine_grained_activation_offload.host_pool import HostPool
from megatron.slipstream.fine_grained_activation_offload.native_store import EngineOfMarks

CALLED: dict[type, set[str]] = {
    EngineOfMarks: {"depart", "perform", "use_group", "end_group", "come_to_gradient", "read"},
    Backend: {
        *("name", "device_type", "poisons_dropped", "here", "stream_id", "record", "wait"),
        *("run_copies", "drop_host_contents", "allocate_device", "drop_device"),
    },
    CopyStreams: {
        *("d2h", "h2d", "before_release", "drop", "empty", "keep_until_finished", "abandon"),
    },
    HostPool: {"allocate", "free"},
}
"""What C++ reads or calls by name, of each interface of the package."""

OF_OTHERS = {
    *("cuda", "Event", "record", "cuda_event", "cuda_stream", "stream_id", "device_index"),
    *("_do_not_offload", "_TE_do_not_offload"),
}
"""What it reads of torch, and marks that megatron-core and Transformer Engine set on tensors."""

SOURCES = [
    path
    for path in sorted(Path(native.__file__).parent.glob("*.[ch]*"))
    if path.name != "python.h"  # It has the functions that look a given name up.
]
LOOKUP = re.compile(
    r"(?:\battr\(|\bGET\(\w+, |InternFromString\()(?P<name>[^)]*)"
    r"|PyObject_(?:GetAttr|SetAttr|HasAttr|CallMethod)|py::getattr"
)
SET_ON_ITS_MODULE = {'"SavedTensor"', '"PackHook"'}


def names_read(text: str) -> Iterator[str]:
    """The names that a source looks up in Python objects; another expression as it is."""
    for found in LOOKUP.finditer(text):
        literal = re.fullmatch(r'"(\w+)"', found["name"] or "")
        if found["name"] not in SET_ON_ITS_MODULE:
            yield found[0] if literal is None else literal[1]


def test_cpp_reads_the_listed_names_alone() -> None:
    found = {name for path in SOURCES for name in names_read(path.read_text())}
    assert found == OF_OTHERS.union(*CALLED.values())


def test_no_name_is_private() -> None:
    names = set().union(*CALLED.values())
    assert not [name for name in names if name.startswith("_")]


def _has(interface: Any, name: str) -> bool:
    return hasattr(interface, name) or name in getattr(interface, "__annotations__", {})


@pytest.mark.parametrize("interface", [*CALLED, OffloadEngine], ids=lambda kind: kind.__name__)
def test_the_interfaces_have_these_names(interface: type) -> None:
    names = CALLED.get(interface, CALLED[EngineOfMarks])
    assert [name for name in names if not _has(interface, name)] == []


def test_the_protocol_of_an_engine_is_what_cpp_calls() -> None:
    declared = {name for name in vars(EngineOfMarks) if not name.startswith("_")}
    assert declared == CALLED[EngineOfMarks]


@pytest.mark.parametrize(
    "line",
    [
        'engine.attr("_private")(kind);',
        'GET(engine, "_private");',
        "engine.attr(name);",
        'PyUnicode_InternFromString("_private")',
        'PyObject_GetAttrString(engine, "_private")',
    ],
)
def test_another_name_is_noticed(line: str) -> None:
    (found,) = names_read(line)
    assert found not in OF_OTHERS.union(*CALLED.values())


def test_torch_has_what_is_read_of_it() -> None:
    assert hasattr(torch, "cuda")
    assert hasattr(torch.cuda, "Event")
