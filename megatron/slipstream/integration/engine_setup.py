# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""An engine's backend and plan options from an :class:`OffloadConfig`."""

from __future__ import annotations

from collections.abc import Callable

from megatron.slipstream import preflight
from megatron.slipstream.config import OffloadConfig
from megatron.slipstream.fine_grained_activation_offload.backend import Backend
from megatron.slipstream.fine_grained_activation_offload.backends import make_backend
from megatron.slipstream.fine_grained_activation_offload.cuda_backend import CudaBackend
from megatron.slipstream.integration import numa
from megatron.slipstream.plan.candidates import PolicyOptions


def open_backend(config: OffloadConfig, gpu: Callable[[], int]) -> Backend:
    """The backend, on a GPU with the process bound to the CPUs beside it if the options say so.

    Args:
        config: The settings.
        gpu: Gives the number of the GPU that this process uses; called with a GPU only.

    Raises:
        ValueError: The backend is not available.
    """
    backend = make_backend(config.offload_backend)
    backend.names_ranges = config.offload_nvtx_ranges
    if isinstance(backend, CudaBackend) and config.offload_numa == "auto":
        backend.place_host_memory = numa.bind_to_gpu(gpu())
    return backend


def policy_options(config: OffloadConfig) -> PolicyOptions:
    """The options of plans.

    Raises:
        ValueError: The launcher's number of processes on this node is none.
    """
    target_gib = config.offload_target_memory_gib
    return PolicyOptions(
        release_lag=config.offload_release_lag,
        prefetch_depth=config.offload_prefetch_depth,
        host_memory_limit_bytes=(
            config.offload_host_memory_limit_bytes or preflight.default_host_memory_limit_bytes()
        ),
        target_memory_bytes=None if target_gib is None else int(target_gib * 2**30),
        max_overhead_percent=config.max_overhead_percent,
    )
