# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The memory of one micro-batch in flight, shared by graphs that are used one at a time.

A bank has graphs of each context-parallel size in every slot memory. A micro-batch takes the
memory, and with it the graphs of its size, so those of the other sizes there are idle until its
backward has been launched. The graphs of a chunk's layers use it in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Optional

import torch

from megatron.slipstream.fine_grained_activation_offload.backend import Backend
from megatron.slipstream.fine_grained_activation_offload.host_pool import HostPool
from megatron.slipstream.graphs.capture import GraphBackend, Tail
from megatron.slipstream.graphs.static_arguments import TensorFacts

MAX_SMALL_BYTES = 64 * 1024
"""Tensors up to this size are copied together, whatever their types: the launch costs more than the
copy. Larger ones are copied faster one by one."""


class Static:
    """A tensor that graphs read, and the last tensor that was copied to it.

    Args:
        like: Gives its shape, dtype, device and first contents.
        is_shared: Whether it is that tensor itself.
    """

    def __init__(self, like: torch.Tensor, is_shared: bool = False) -> None:
        self.tensor = like if is_shared else like.detach().clone()
        self.source: Optional[torch.Tensor] = like if is_shared else None
        self.version = like._version
        is_small = self.tensor.nbytes <= MAX_SMALL_BYTES
        self.words = _as_words(self.tensor) if is_small else None
        """Its memory as int32; None if that is impossible, or the tensor is large."""


class StaticInputs:
    """The static inputs of graphs, in the order of a call's tensors."""

    def __init__(self, statics: Iterable[Static]) -> None:
        self._statics = tuple(statics)

    def renew(self, sources: Sequence[torch.Tensor]) -> None:
        """Copy a call's tensors, except those already copied; call with autograd off.

        Small tensors are copied by one operation: packed sequences have offsets and masks of a few
        thousand bytes, and each launch costs as much as that of a large copy.

        Args:
            sources: As many tensors as inputs, of the same shapes, dtypes and device.
        """
        to: list[Any] = []
        words: list[torch.Tensor] = []
        for static, source in zip(self._statics, sources, strict=True):
            # Rotary tables are the same in every call.
            if static.source is source and static.version == source._version:
                continue
            static.source, static.version = source, source._version
            source_words = None if static.words is None else _as_words(source)
            if source_words is None:
                static.tensor.copy_(source)
            else:
                to.append(static.words)
                words.append(source_words)
        if to:
            torch._foreach_copy_(to, words)


def _as_words(tensor: torch.Tensor) -> Any:
    """Return a view of a tensor as int32; None if it is not contiguous, or not in whole words."""
    if not tensor.is_contiguous():
        return None
    if tensor.dtype == torch.int32:
        return tensor
    size = tensor.element_size()
    if not tensor.dim() or tensor.shape[-1] * size % 4 or tensor.storage_offset() * size % 4:
        return None
    return tensor.view(torch.int32)


class SlotMemory:
    """Memory for one micro-batch in flight.

    Args:
        pool: Device memory of the graphs.
        tail: Tail of the forward graphs.
    """

    def __init__(self, pool: Any, tail: Tail) -> None:
        self.pool = pool
        self.tail = tail
        self.is_free = True
        """Whether no micro-batch in flight uses it."""
        self.host_pool: Optional[HostPool] = None
        """Host memory for activations that graphs here offload; None without offloading."""
        self._num_host_users = 0
        self._statics: dict[tuple[str, TensorFacts], Static] = {}

    @classmethod
    def of(cls, backend: GraphBackend, count: int) -> list[SlotMemory]:
        """Create ``count`` memories for graphs of this backend."""
        return [cls(backend.new_pool(), backend.new_tail()) for _ in range(count)]

    def share_host_pool(self, backend: Backend) -> HostPool:
        """Return the host memory, shared with one more slot."""
        if self.host_pool is None:
            self.host_pool = HostPool(backend, 0)
        self._num_host_users += 1
        return self.host_pool

    def leave_host_pool(self) -> None:
        """Call when a slot makes no more copies. The last slot frees the host memory."""
        self._num_host_users -= 1
        if self.host_pool is not None and not self._num_host_users:
            self.host_pool.close()
            self.host_pool = None

    def static(self, name: str, like: torch.Tensor, is_shared: bool = False) -> Static:
        """Return the static input of that name; graphs with equal inputs share it.

        Args:
            name: Name of the argument.
            like: See :class:`Static`.
            is_shared: See there.
        """
        key = (name, TensorFacts.of(like))
        if key not in self._statics:
            self._statics[key] = Static(like, is_shared)
        return self._statics[key]
