# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Creates an engine's backend and plan options from an :class:`OffloadConfig`."""

from __future__ import annotations

import logging

from megatron.slipstream.fine_grained_activation_offload.backend import Backend
from megatron.slipstream.fine_grained_activation_offload.backends import make_backend
from megatron.slipstream.fine_grained_activation_offload.host_limit import SharedHostLimit
from megatron.slipstream.launcher import rank
from megatron.slipstream.options import host_memory
from megatron.slipstream.options.fields import OffloadConfig
from megatron.slipstream.plan.candidates import PolicyOptions

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


def policy_options(config: OffloadConfig) -> PolicyOptions:
    """Return the plan options; :data:`host_limit` sets that of host memory."""
    target_gib = config.offload_target_memory_gib
    return PolicyOptions(
        release_lag=config.offload_release_lag,
        prefetch_depth=config.offload_prefetch_depth,
        target_memory_bytes=None if target_gib is None else int(target_gib * 2**30),
        target_option=(
            PolicyOptions.target_option
            if config.activation_memory_budget is None
            else "activation_memory_budget"
        ),
        max_overhead_percent=config.max_overhead_percent,
    )
