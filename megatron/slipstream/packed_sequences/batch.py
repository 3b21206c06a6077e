# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Converts a pack to the tensors of a micro-batch, with the same shapes and dtypes for every pack.

A CUDA graph replays with the addresses, shapes and Python numbers of its capture, so packs differ
only in the content of these tensors:

[Note: Static packed sequences]

- ``tokens``, ``labels``, ``position_ids`` (int64 ``[1, T]``): the pieces in order, then padding to
  the T tokens of ``PackLimits.max_tokens``. Positions begin at 0 in every piece. Padding is token,
  label and position 0, for which every embedding has a row.
- ``loss_mask`` (float32 ``[1, T]``): 1 where a label counts, 0 at padding.
- ``padding_mask`` (bool ``[1, T]``): True at padding, as megatron-core's routers interpret it
  (contrary to the docstrings of its router). They exclude such tokens from auxiliary losses and
  statistics. It is not ``loss_mask == 0``: a token whose label does not count is routed like any
  other.
- ``cu_seqlens`` (int32 ``[1, N + 1]``, N is ``PackLimits.max_sequences``): the offset of each
  sequence without padding, so that differences are the lengths that attention sees. The number of
  entries is fixed by repeating the last one: empty sequences, which fused attention accepts.
- ``cu_seqlens_padded`` (int32 ``[1, N + 1]``): the offset of each sequence in the buffer. It always
  ends with T: the rest after the last piece is one more sequence, of 0 tokens in ``cu_seqlens``;
  with N pieces there is no entry for one more, and the rest is padding of the last piece. It must
  cover the buffer because rotary embeddings write exactly the tokens that it covers: fused ones
  leave the rest of their output uninitialized, possibly NaN, and unfused ones raise.

The two offsets are different tensors even where they hold the same numbers. If both are the same
object, Transformer Engine assumes that there is no padding between the sequences, unless
``pad_between_seqs`` says otherwise; older releases of megatron-core cannot pass that.

``max_seqlen`` is the Python number T, for every pack. Without it Transformer Engine reads it from
the GPU, and the rotary table gets its length from it. It is T rather than the longest document's
length, since the padding at the end is a sequence too and may be nearly the whole buffer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Optional

import numpy as np
import torch
from numpy.typing import NDArray

from megatron.slipstream.packed_sequences.packing import PackLimits

SEQUENCE_KEYS: Mapping[str, torch.dtype] = {
    "tokens": torch.int64,
    "labels": torch.int64,
    "position_ids": torch.int64,
    "loss_mask": torch.float32,
    "padding_mask": torch.bool,
}
"""Tensors with an entry for each token of the buffer; context parallelism divides them."""

OFFSET_KEYS: Mapping[str, torch.dtype] = {
    "cu_seqlens": torch.int32,
    "cu_seqlens_padded": torch.int32,
}
"""Tensors with an entry for each sequence; every rank has all of them."""

Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def static_layout(limits: PackLimits, context_parallel_size: int = 1) -> Layout:
    """Return shape and dtype of every tensor of a micro-batch on one rank; see the note above.

    ``limits.max_tokens`` counts the tokens of all context-parallel ranks.
    """
    num_tokens = limits.max_tokens // context_parallel_size
    return {
        **{key: ((1, num_tokens), dtype) for key, dtype in SEQUENCE_KEYS.items()},
        **{key: ((1, limits.max_sequences + 1), dtype) for key, dtype in OFFSET_KEYS.items()},
    }


def packed_sample(
    texts: Sequence[NDArray[Any]], limits: PackLimits, masked_token: Optional[int] = None
) -> dict[str, torch.Tensor]:
    """Return the tensors of one pack without the first dimension, which collating adds.

    A text has the tokens of a piece and the next one, which is the last label: integers ``[length +
    1]``. No texts give a micro-batch of padding. Labels after ``masked_token`` do not count
    (megatron's ``eod_mask_loss``). Raises ``ValueError`` if the pieces exceed the limits.
    """
    lengths = [len(text) - 1 for text in texts]
    footprints = [limits.footprint(length) for length in lengths]
    if sum(footprints) > limits.max_tokens or len(texts) > limits.max_sequences:
        raise ValueError(
            f"{len(texts)} sequences of {sum(footprints)} tokens exceed a pack's limits of "
            f"{limits.max_sequences} sequences and {limits.max_tokens} tokens; pack with the same "
            "limits"
        )
    sample = {
        key: torch.zeros(limits.max_tokens, dtype=dtype) for key, dtype in SEQUENCE_KEYS.items()
    }
    sample["padding_mask"].fill_(True)
    begin = 0
    for text, length, footprint in zip(texts, lengths, footprints, strict=True):
        here = slice(begin, begin + length)
        ids = torch.from_numpy(np.asarray(text, dtype=np.int64))
        sample["tokens"][here] = ids[:-1]
        sample["labels"][here] = ids[1:]
        sample["position_ids"][here] = torch.arange(length)
        sample["loss_mask"][here] = 1.0
        sample["padding_mask"][here] = False
        begin += footprint
    if masked_token is not None:
        sample["loss_mask"][sample["tokens"] == masked_token] = 0.0
    sample["cu_seqlens"] = _offsets(lengths, limits.max_sequences)
    sample["cu_seqlens_padded"] = _offsets(footprints, limits.max_sequences)
    # The rest of the buffer is one more sequence, or the padding of the last one.
    sample["cu_seqlens_padded"][len(texts) + 1 :] = limits.max_tokens
    sample["cu_seqlens_padded"][-1] = limits.max_tokens
    return sample


def _offsets(lengths: Sequence[int], max_sequences: int) -> torch.Tensor:
    """Return the cumulative lengths from 0, int32 ``[max_sequences + 1]``; the last repeats."""
    offsets = torch.full((max_sequences + 1,), sum(lengths), dtype=torch.int32)
    offsets[: len(lengths) + 1] = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0)
    return offsets


def context_parallel_positions(
    cu_seqlens_padded: torch.Tensor, context_parallel_size: int, context_parallel_rank: int
) -> torch.Tensor:
    """Return the buffer positions of a context-parallel rank's tokens, in the rank's order.

    Each sequence is cut into ``2 * context_parallel_size`` equal parts, of which rank r has the
    r-th from the start and the r-th from the end: with causal attention all ranks have equal work.
    Transformer Engine's attention and rotary embeddings expect packed sequences in this order.

    The offsets are integers ``[N + 1]`` on the CPU; the result is int64 ``[T /
    context_parallel_size]``. Raises ``ValueError`` if a sequence cannot be cut into so many equal
    parts.
    """
    num_parts = 2 * context_parallel_size
    begins = cu_seqlens_padded[:-1].long()
    sizes = cu_seqlens_padded.long().diff()
    if bool((sizes % num_parts).any()):
        raise ValueError(
            f"context_parallel_size={context_parallel_size} is not supported with these packed "
            f"sequences because each is cut into {num_parts} equal parts; set an alignment of "
            f"{num_parts} tokens"
        )
    parts = sizes // num_parts
    mine = (context_parallel_rank, num_parts - 1 - context_parallel_rank)
    pieces = [
        torch.arange(begin + part * index, begin + part * (index + 1))
        for begin, part in zip(begins.tolist(), parts.tolist(), strict=True)
        if part
        for index in mine
    ]
    return torch.cat(pieces)


def for_context_parallel_rank(
    batch: Mapping[str, torch.Tensor], context_parallel_size: int, context_parallel_rank: int
) -> dict[str, torch.Tensor]:
    """Return a rank's part of a CPU micro-batch: its tokens, and the offsets of the whole buffer.

    Attention takes the offsets of the undivided sequences and divides them itself. Tensors are as
    :func:`static_layout` describes them for one rank.
    """
    if context_parallel_size == 1:
        return dict(batch)
    positions = context_parallel_positions(
        batch["cu_seqlens_padded"][0], context_parallel_size, context_parallel_rank
    )
    return {
        key: tensor.index_select(1, positions) if key in SEQUENCE_KEYS else tensor
        for key, tensor in batch.items()
    }
