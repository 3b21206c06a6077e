# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Sizes of micro-batches, read before they are launched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention


def size_of(chunk: Any, tensors: Sequence[torch.Tensor]) -> Optional[float]:
    """Return a number to which what a micro-batch saves is proportional, or less.

    It is the number of tokens; with attention that is not fused, whose scores grow with the square
    of the length, that number times the length.

    Args:
        chunk: The model chunk that is about to run.
        tensors: Its arguments. The first chunk's begin with token ids ``[b, s]``; others have the
            hidden states ``[s, b, h]`` in ``decoder.input_tensor``.

    Returns:
        The size; None if it cannot be told.
    """
    shape = shape_of(chunk, tensors)
    if shape is None:
        return None
    length, batch = shape
    return float(batch * length * (length if _has_scores(chunk) else 1))


def shape_of(chunk: Any, tensors: Sequence[torch.Tensor]) -> Optional[tuple[int, int]]:
    """Return the sequence length and the batch of a micro-batch; None if they cannot be told.

    Args:
        chunk: As for :func:`size_of`.
        tensors: As for :func:`size_of`.
    """
    received = getattr(getattr(chunk, "decoder", None), "input_tensor", None)
    ids = [item for item in tensors if item.dim() == 2 and not item.is_floating_point()]
    if ids:
        batch, length = ids[0].shape
        return length, batch
    if isinstance(received, torch.Tensor):
        return received.shape[0], received.shape[1]
    return None


def smaller_sizes(share: float, shape: tuple[int, int]) -> list[str]:
    """Return settings with which a micro-batch takes a share of its memory.

    Args:
        share: The share.
        shape: The sequence length and the batch of the micro-batch.
    """
    length, batch = shape
    cures = []
    if batch > 1 and int(batch * share):
        cures.append(f"micro_batch_size to at most {int(batch * share)} (it is {batch})")
    if int(length * share):
        cures.append(f"seq_length to at most {int(length * share)} (it is {length})")
    return cures


def _has_scores(chunk: Any) -> bool:
    return any(isinstance(module, DotProductAttention) for module in chunk.modules())
