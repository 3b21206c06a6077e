# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The memory of one micro-batch in flight, shared by graphs that are used one at a time.

A bank has a slot for each context-parallel size in every slot memory. A micro-batch takes the
memory, and with it the slot of its size, so the graphs of the other sizes there are idle until its
backward has been launched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import torch

from megatron.slipstream.chunk_graphs.static_arguments import TensorFacts
from megatron.slipstream.fine_grained_activation_offload.backend import Backend
from megatron.slipstream.fine_grained_activation_offload.host_pool import HostPool


class Static:
    """A tensor that graphs read, and the last tensor that was copied to it."""

    def __init__(self, like: torch.Tensor) -> None:
        self.tensor = like.detach().clone()
        self._source: Optional[torch.Tensor] = None
        self._version = 0

    def renew(self, source: torch.Tensor) -> bool:
        """Note ``source`` as its next content. Returns whether it must be copied."""
        # Rotary tables are the same in every call.
        if self._source is source and self._version == source._version:
            return False
        self._source, self._version = source, source._version
        return True


def copy_to(statics: Sequence[Static], sources: Sequence[torch.Tensor]) -> None:
    """Copy a call's tensors to the static inputs of graphs, except those that are there already.

    No gradients are recorded. All tensors of one dtype are copied by one operation: packed
    sequences have half a dozen tensors of a few offsets each, and the launch costs the same.

    Args:
        statics: The destinations.
        sources: As many tensors of the same shapes, dtypes and device.
    """
    stale: dict[torch.dtype, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for static, source in zip(statics, sources, strict=True):
        if static.renew(source):
            stale.setdefault(source.dtype, []).append((static.tensor, source))
    for pairs in stale.values():
        torch._foreach_copy_([to for to, _ in pairs], [source for _, source in pairs])


class SlotMemory:
    """Memory for one micro-batch in flight.

    Args:
        pool: Device memory of the graphs.
    """

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.is_free = True
        """Whether no micro-batch in flight uses it."""
        self.host_pool: Optional[HostPool] = None
        """Host memory for activations that graphs here offload; None without offloading."""
        self._num_host_users = 0
        self._statics: dict[tuple[str, TensorFacts], Static] = {}

    def share_host_pool(self, backend: Backend) -> HostPool:
        """The host memory, shared with one more slot."""
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

    def static(self, name: str, like: torch.Tensor) -> Static:
        """The static input of that name; graphs with equal inputs share it.

        Args:
            name: Name of the argument.
            like: Gives its shape, dtype, device and first contents.
        """
        key = (name, TensorFacts.of(like))
        if key not in self._statics:
            self._statics[key] = Static(like)
        return self._statics[key]
