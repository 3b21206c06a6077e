# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""An engine's backend, and its share of the process's limit on pinned host memory.

[Note: One limit for a process]
``offload_host_memory_limit_bytes`` limits a process, which may have several engines: of the models
behind ``install()``, and of each ``attach()``. Each engine's pool gets a share as its own limit.
Pinned memory stays pinned, so a pool keeps at least what it holds; the others divide the rest
evenly. Shares change when an engine is made or closed. If engines were given different limits, the
lowest holds.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from typing import Optional

import torch

from megatron.slipstream.fine_grained_activation_offload.backend import Backend
from megatron.slipstream.fine_grained_activation_offload.cpu_backends import (
    CpuBackend,
    LazyCpuBackend,
)
from megatron.slipstream.fine_grained_activation_offload.cuda_backend import CudaBackend
from megatron.slipstream.fine_grained_activation_offload.host_pool import HostPool, ProcessLimit
from megatron.slipstream.launcher import rank
from megatron.slipstream.options import host_memory
from megatron.slipstream.options.fields import OffloadConfig

logger = logging.getLogger(__name__)


def make_backend(name: str) -> Backend:
    """Create the backend of that name; 'auto' is 'cuda' if torch sees a GPU, else 'cpu'.

    Raises ``ValueError`` if the name is 'cuda' and torch sees no GPU, or the name is unknown.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "offload_backend='cuda' is not supported here because torch sees no GPU; set "
            "offload_backend='auto', or 'cpu' to imitate one in host memory"
        )
    kinds = {kind.name: kind for kind in (CudaBackend, CpuBackend, LazyCpuBackend)}
    if name not in kinds:
        known = ", ".join(repr(kind) for kind in kinds)
        raise ValueError(f"offload_backend={name!r} is unknown; set 'auto', {known}")
    return kinds[name]()


def open_backend(config: OffloadConfig) -> Backend:
    """Create the backend; raise ``ValueError`` if it is not available."""
    backend = make_backend(config.offload_backend)
    backend.names_ranges = config.offload_nvtx_ranges
    if config.offload_nvtx_ranges and backend.device_type != "cuda" and rank() == 0:
        logger.warning(
            "offload_nvtx_ranges=True: no effect without a GPU, which Nsight Systems watches; "
            "leave it out"
        )
    return backend


class SharedHostLimit:
    """The limit of a process: [Note: One limit for a process].

    ``default_bytes`` returns the limit if the user sets none. It is called when the first engine
    joins, since later ones would find less memory available.
    """

    def __init__(self, default_bytes: Callable[[], Optional[int]]) -> None:
        self._find_default = default_bytes
        self._default_bytes: Optional[int] = None
        self._reserved_bytes = 0
        self._members: dict[weakref.ref[HostPool], Optional[int]] = {}
        """The pools, and the limits that they were given."""
        self._lock = threading.RLock()

    @property
    def pools(self) -> list[HostPool]:
        """The pools that share the limit, in the order in which they joined."""
        with self._lock:
            return [pool for pool in (known() for known in self._members) if pool is not None]

    def join(self, pool: HostPool, given_bytes: Optional[int] = None) -> None:
        """Give a new engine's pool its share, until :meth:`leave` or until the pool is deleted.

        ``given_bytes`` is the limit of the process that its user has set, if any.
        """
        with self._lock:
            if not self._members:
                self._default_bytes = self._find_default()
            self._members[weakref.ref(pool, self._forget)] = given_bytes
            self._share()

    def reserve(self, nbytes: int) -> None:
        """Leave this much of the default limit, not of the user's, to what is allocated later."""
        with self._lock:
            self._reserved_bytes = max(self._reserved_bytes, nbytes)
            self._share()

    def leave(self, pool: HostPool) -> None:
        """Give the share of a closed pool to the others. Does nothing if it has left."""
        self._forget(weakref.ref(pool))

    def _forget(self, pool: weakref.ref[HostPool]) -> None:
        # Also called by the garbage collector, perhaps within another method: the shares of that
        # call are then too small until the next one, never too large.
        with self._lock:
            self._members.pop(pool, None)
            self._share()

    def _limit(self) -> Optional[ProcessLimit]:
        given = [limit for limit in self._members.values() if limit is not None]
        if given:
            return ProcessLimit(min(given))
        if self._default_bytes is None:
            return None
        left_bytes = max(0, self._default_bytes - self._reserved_bytes)
        return ProcessLimit(left_bytes, is_default=True)

    def _share(self) -> None:
        pools, limit = self.pools, self._limit()
        if limit is None:
            return
        # A pool that was refused memory must not request it again.
        pools.sort(key=lambda pool: (not pool.was_refused, -pool.held_bytes))
        left_bytes = limit.nbytes
        for index, pool in enumerate(pools):
            share = 0 if pool.was_refused else left_bytes // (len(pools) - index)
            share = max(share, pool.held_bytes)
            pool.process_limit = limit
            pool.limit_bytes = share - pool.parts_bytes
            left_bytes = max(0, left_bytes - share)


host_limit = SharedHostLimit(host_memory.default_host_memory_limit_bytes)
"""The limit on pinned host memory of this process, which all its engines share."""
