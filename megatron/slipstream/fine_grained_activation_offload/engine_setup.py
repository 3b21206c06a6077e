# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""An engine's backend, from an ``OffloadConfig``, and this process's limit on host memory."""

from __future__ import annotations

import logging

from megatron.slipstream.fine_grained_activation_offload.backend import Backend
from megatron.slipstream.fine_grained_activation_offload.backends import make_backend
from megatron.slipstream.fine_grained_activation_offload.host_limit import SharedHostLimit
from megatron.slipstream.launcher import rank
from megatron.slipstream.options import host_memory
from megatron.slipstream.options.fields import OffloadConfig

logger = logging.getLogger(__name__)

host_limit = SharedHostLimit(host_memory.default_host_memory_limit_bytes)
"""The limit on pinned host memory of this process, which all its engines share."""


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
