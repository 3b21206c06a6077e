# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Tensors of every kind that torch has: layouts, wrappers, and memory that is not there."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses import FakeTensorMode

from megatron.slipstream.plan.staying import Staying

SIZE = 8


def dense() -> torch.Tensor:
    """A plain matrix, the only kind here that moves."""
    return torch.arange(SIZE * SIZE, dtype=torch.float32).view(SIZE, SIZE)


class Subclass(torch.Tensor):
    """A subclass with the memory of a plain tensor."""


class Wrapper(torch.Tensor):
    """A subclass without memory of its own, like quantized and distributed tensors."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        opened = [item.inner if isinstance(item, Wrapper) else item for item in args]
        result = func(*opened, **(kwargs or {}))
        return Wrapper(result) if isinstance(result, torch.Tensor) else result


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(SIZE, SIZE)


def caught(transform: Callable[..., Any]) -> Callable[[], torch.Tensor]:
    """A tensor as it is inside of a transform of ``torch.func``."""

    def make() -> torch.Tensor:
        seen = []

        def note(tensor: torch.Tensor) -> torch.Tensor:
            seen.append(tensor + 0)
            return seen[0].sum()

        transform(note)(dense())
        return seen[0]

    return make


def nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(3), torch.ones(5)], layout=layout)


KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "coo": lambda: dense().to_sparse_coo(),
    "csr": lambda: dense().to_sparse_csr(),
    "csc": lambda: dense().to_sparse_csc(),
    "bsr": lambda: dense().to_sparse_bsr((2, 2)),
    "bsc": lambda: dense().to_sparse_bsc((2, 2)),
    "mkldnn": lambda: dense().to_mkldnn(),
    "quantized": lambda: torch.quantize_per_tensor(dense(), 1.0, 0, torch.quint8),
    "quantized by channel": lambda: torch.quantize_per_channel(
        dense(), torch.ones(SIZE), torch.zeros(SIZE), 0, torch.qint8
    ),
    "nested": lambda: nested(torch.strided),
    "jagged": lambda: nested(torch.jagged),
    "meta": lambda: torch.empty(SIZE, SIZE, device="meta"),
    "fake": fake,
    "vmap": caught(torch.func.vmap),
    "grad": caught(torch.func.grad),
    "functional": caught(torch.func.functionalize),
    "zero": lambda: torch._efficientzerotensor((SIZE, SIZE)),
    "conjugate": lambda: torch.complex(dense(), dense()).conj(),
    "negative": lambda: torch.complex(dense(), dense()).conj().imag,
    "empty": lambda: dense()[:0],
    "subclass": lambda: dense().as_subclass(Subclass),
    "wrapper": lambda: Wrapper(dense()),
}
"""Every kind of tensor that stays, by name."""

STAYING = {
    **dict.fromkeys(KINDS, Staying.NOT_DENSE),
    **dict.fromkeys(("nested", "jagged"), Staying.NESTED),
    **dict.fromkeys(("fake", "subclass", "wrapper"), Staying.SUBCLASS),
    **dict.fromkeys(("zero", "conjugate", "negative"), Staying.LAZY),
    "meta": Staying.ELSEWHERE,
    "empty": Staying.EMPTY,
}
"""What the engine says of each."""


def tensor_of_kind(kind: str) -> torch.Tensor:
    """A tensor of this kind; torch's warnings that a kind is experimental are silenced."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return KINDS[kind]()
