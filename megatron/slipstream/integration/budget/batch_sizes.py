# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Sizes of micro-batches, read before they are launched, and how many are in flight."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Optional

import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention

from megatron.slipstream.patches.model_calls import tensors_in

_with_scores: weakref.WeakKeyDictionary[torch.nn.Module, bool] = weakref.WeakKeyDictionary()
"""Whether attention of chunks has scores in memory, or their gradients."""


class MicroBatches:
    """The micro-batches of a model beside those for which settings were chosen."""

    def __init__(self) -> None:
        self.varies = False
        """Whether they have had several sizes."""
        self.largest_share = 0.0
        """The largest share of a known size in this iteration."""
        self.are_more = False
        """Whether more have been in flight than known."""
        self._sizes: dict[int, float] = {}
        """For each virtual stage, the largest that is known."""
        self._num_in_flight = 0
        self.most_in_flight = 0
        """The most in flight for which settings were chosen."""
        self._sees_more = False
        """Whether more are in flight in this iteration than known."""
        self.has_backward = False
        """Whether the gradient of an output has come in this iteration."""
        self._iteration = 0

    def begin(self) -> None:
        """Begin an iteration."""
        self.largest_share, self._num_in_flight = 0.0, 0
        self._sees_more = self.has_backward = False
        self._iteration += 1

    def end(self, is_trained: bool) -> None:
        """End it; unless it had a backward, what was seen in it says nothing."""
        self.are_more |= self._sees_more and is_trained
        self.largest_share *= is_trained

    def enlarge(self, factor: float) -> None:
        """Note that settings are chosen for larger ones from now on."""
        self._sizes = {stage: size * factor for stage, size in self._sizes.items()}

    def share_of(self, stage: int, size: float, is_measured: bool) -> float:
        """Return the coming one's size as a share of the largest known of a virtual stage."""
        known = self._sizes.setdefault(stage, size)
        self.varies |= size != known
        if is_measured:
            known = self._sizes[stage] = max(known, size)
        self.largest_share = max(self.largest_share, size / known)
        return size / known

    def is_one_more(self, is_measured: bool) -> bool:
        """Return whether with the coming one more are in flight than known."""
        number = self._num_in_flight + 1
        if is_measured:
            self.most_in_flight = max(self.most_in_flight, number)
        is_more = number > self.most_in_flight
        self._sees_more |= is_more
        return is_more

    def launched(self, output: Any) -> None:
        """Count a pass as in flight until backward has the gradient of its output."""
        tensors = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        if tensors:
            self._num_in_flight += 1
            tensors[0].register_hook(_InFlight(self, self._iteration))

    def land(self, iteration: int, by_backward: bool) -> None:
        """Note that backward of a pass begins, or that it has none."""
        if iteration == self._iteration:
            self._num_in_flight -= 1
            self.has_backward |= by_backward


class _InFlight:
    """A pass in flight. Autograd's graph owns it, and may be freed without a backward."""

    def __init__(self, batches: MicroBatches, iteration: int) -> None:
        self._batches = weakref.ref(batches)
        self._iteration: Optional[int] = iteration

    def __call__(self, _: torch.Tensor) -> None:
        self._end(by_backward=True)

    def __del__(self) -> None:
        self._end(by_backward=False)

    def _end(self, by_backward: bool) -> None:
        batches, iteration = self._batches(), self._iteration
        self._iteration = None
        if batches is not None and iteration is not None:
            batches.land(iteration, by_backward)


def size_of(chunk: Any, shape: Optional[tuple[int, int]]) -> Optional[float]:
    """Return a number to which what a micro-batch saves is proportional, or less.

    It is the number of tokens; with attention that is not fused or deterministic, whose scores or
    their gradients ([Note: Deterministic attention] in ``estimate.layers``) grow with the square of
    the length, that number times the length.

    Args:
        chunk: The model chunk that is about to run.
        shape: Length and batch of the micro-batch; None if they are not known.

    Returns:
        The size; None if it cannot be told.
    """
    if shape is None:
        return None
    # Each pass asks, and a walk over all modules takes as long as several kernel launches.
    if chunk not in _with_scores:
        _with_scores[chunk] = _has_scores(chunk)
    length, batch = shape
    return float(batch * length * (length if _with_scores[chunk] else 1))


def _has_scores(chunk: Any) -> bool:
    if os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO") == "0":
        return True
    backend = getattr(chunk.config, "attention_backend", None)
    return getattr(backend, "name", None) == "unfused" or any(
        isinstance(module, DotProductAttention) for module in chunk.modules()
    )


def received_bytes(chunks: Iterable[Any]) -> int:
    """Return the bytes of the hidden states that model chunks have from other stages."""
    received = filter(torch.is_tensor, map(_received, chunks))
    return sum(item.untyped_storage().nbytes() for item in received)


def _received(chunk: Any) -> Any:
    return getattr(getattr(chunk, "decoder", None), "input_tensor", None)


def shape_of(chunk: Any, tensors: Sequence[torch.Tensor]) -> Optional[tuple[int, int]]:
    """Return length and batch of a micro-batch; None if they are not known.

    Args:
        chunk: The model chunk that is about to run.
        tensors: Its arguments. The first chunk's begin with token ids ``[b, s]``; others have the
            hidden states ``[s, b, h]`` in ``decoder.input_tensor``.
    """
    received = _received(chunk)
    ids = [item for item in tensors if item.dim() == 2 and not item.is_floating_point()]
    if ids:
        batch, length = ids[0].shape
        return length, batch
    if isinstance(received, torch.Tensor):
        return received.shape[0], received.shape[1]
    return None
