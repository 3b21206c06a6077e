# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Host memory of an optimizer that keeps its state on the host.

megatron-core's ``HybridDeviceOptimizer`` (``optimizer_cpu_offload``) pins copies of its parameters
when it is built, and gradients and Adam's two moments in its first step, after the limit on the
engine's host memory has been read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state

BYTES_PER_PARAMETER = 12
"""Gradient and two moments in FP32. The copies of parameters exist before the first iteration."""


def optimizer_host_bytes(chunks: Sequence[torch.nn.Module]) -> int:
    """Return the host bytes that the optimizer's first step will allocate on this rank.

    Args:
        chunks: The model's chunks. Their script is megatron's, or nothing is known: 0.
    """
    args = _arguments()
    if args is None or not getattr(args, "optimizer_cpu_offload", False):
        return 0
    is_sharded = bool(getattr(args, "use_distributed_optimizer", False))
    count = sum(
        parameter.numel() / (_num_shards(parameter) if is_sharded else 1)
        for chunk in chunks
        for parameter in chunk.parameters()
        if parameter.requires_grad
    )
    return int(count * BYTES_PER_PARAMETER * float(args.optimizer_offload_fraction))


def _num_shards(parameter: Any) -> int:
    """Return over how many ranks the distributed optimizer divides a parameter's state."""
    if getattr(parameter, "allreduce", True):
        return int(parallel_state.get_data_parallel_world_size(with_context_parallel=True))
    return int(parallel_state.get_expert_data_parallel_world_size())


def _arguments() -> Any:
    from megatron.training import global_vars

    return global_vars._GLOBAL_ARGS
