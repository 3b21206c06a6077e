# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Saved leaves that only autograd's own bookkeeping keeps alive.

[Note: Hidden leaves]
A leaf that requires gradients has an AccumulateGrad node, which holds a reference to the leaf.
Autograd keeps that node as long as the leaf is saved, even if a hook has replaced the saved tensor.
So the leaf keeps its memory, and copying it to the host frees nothing. This does not matter for the
user's inputs and parameters, since the user holds them anyway. But a checkpoint that detaches its
inputs before it saves them (megatron-core's ``CheckpointWithoutOutput``) creates a leaf that no
other code can reach. The memory of such a leaf is freed when the storage is released, and restored
before backward reads the saved tensor.
"""

from __future__ import annotations

import functools
import sys
import weakref
from typing import Any, NamedTuple, Optional

import torch
from torch.autograd.graph import saved_tensors_hooks

LeafReference = weakref.ref[torch.Tensor]


class _References(NamedTuple):
    """Reference counts of a tensor, from :func:`_count`."""

    from_cpp: int
    from_python: int


def hidden_leaf_candidate(tensor: torch.Tensor) -> Optional[LeafReference]:
    """Return a weak reference to a saved tensor if it is a leaf that may become hidden."""
    return weakref.ref(tensor) if tensor.is_leaf and tensor.requires_grad else None


def empty_if_hidden(reference: LeafReference) -> bool:
    """Free a leaf's memory if nothing else references it; return whether to :func:`refill` it."""
    if _count(reference) != _references_of_a_hidden_leaf():
        return False
    leaf = reference()
    assert leaf is not None
    leaf.data = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
    return True


def refill(reference: LeafReference, tensor: torch.Tensor) -> None:
    """Make the leaf, if it is still alive, use the memory, shape and strides of ``tensor``."""
    leaf = reference()
    if leaf is not None:
        leaf.data = tensor


def _count(reference: LeafReference) -> Optional[_References]:
    leaf = reference()
    if leaf is None:
        return None
    # torch counts all Python references as one. The method is missing in the type stubs.
    from_cpp: int = leaf._use_count()  # type: ignore[attr-defined]
    return _References(from_cpp, sys.getrefcount(leaf))


@functools.cache
def _references_of_a_hidden_leaf() -> Optional[_References]:
    """Return the counts of a known hidden leaf, which depend on the Python and torch versions.

    None if this torch version does not hide leaves this way; then no leaf counts as hidden.
    """
    found: list[LeafReference] = []

    def pack(tensor: torch.Tensor) -> None:
        found.append(weakref.ref(tensor))

    with torch.inference_mode(False), torch.enable_grad(), saved_tensors_hooks(pack, _unpack):
        output = _SavesALeaf.apply(torch.zeros(1, requires_grad=True))
    counts = _count(found[0])
    del output
    return counts


def _unpack(_: None) -> torch.Tensor:
    raise AssertionError("nothing reads this tensor")


class _SavesALeaf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tensor.detach().requires_grad_())
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]
