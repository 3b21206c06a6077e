# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Ranks that have to choose alike, since they take part in collectives of each other's forward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

import torch
from megatron.core import parallel_state

from megatron.slipstream.integration.packed.dynamic_context_parallel import DynamicGroupMixin
from megatron.slipstream.options.budget import GATHERED
from megatron.slipstream.plan.relaxation import Limits
from megatron.slipstream.plan.trace import Bandwidth

_SIZES = (
    *("pipeline_model_parallel_size", "tensor_model_parallel_size", "context_parallel_size"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size"),
)


NUM_ASKED = 32
"""The first iterations in which ranks ask each other whether something has changed, and after them
those whose number is a power of two: the question makes the host wait for the device."""


class Lack(NamedTuple):
    """What a rank lacks even with the most frugal settings."""

    needed_bytes: int
    """Device bytes that activations need."""
    allowed_bytes: int
    """Those that they may use."""
    rank: int


class StageRanks:
    """The ranks that compute a pipeline stage together, and the stages of the pipeline.

    Recomputation repeats collectives of forward, so these ranks choose from the same numbers. In
    plain data parallelism there are none, and each rank chooses alone.
    """

    def __init__(self) -> None:
        self._is_shared = False
        self._num_begun = 0
        self._hosts: Optional[torch.distributed.ProcessGroup] = None

    def add(self, chunk: torch.nn.Module) -> None:
        """Add a chunk of the model."""
        self._is_shared |= waits_for_others(chunk) is not None

    def begin(self) -> None:
        """Note that an iteration begins."""
        self._num_begun += 1

    @property
    def is_asked(self) -> bool:
        """Whether ranks ask each other in this iteration, which has the same number on all."""
        return self._num_begun <= NUM_ASKED or self._num_begun & (self._num_begun - 1) == 0

    @property
    def _group(self) -> Optional[torch.distributed.ProcessGroup]:
        if not (self._is_shared and parallel_state.model_parallel_is_initialized()):
            return None
        group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        return group if torch.distributed.get_world_size(group) > 1 else None

    def largest(self, values: Sequence[float]) -> list[float]:
        """Return the largest of each value over the ranks. A collective."""
        return _largest(values, self._group)

    def largest_size(self, size: float) -> float:
        """Return the largest size of a micro-batch over the ranks. A collective, for each pass.

        Hosts exchange it: through the device, each pass would wait until the device is idle. What
        ranks have seen before does not tell whether another has a larger one now.
        """
        group = self._group
        if group is not None and self._hosts is None:
            self._hosts = host_group(group)
        return _largest([size], self._hosts)[0]

    def tightest(self, limits: Limits) -> Limits:
        """Return the limits that hold on all ranks. A collective."""
        host_bytes = math.inf if limits.host_bytes is None else limits.host_bytes
        bandwidth = limits.bandwidth or [-1.0] * len(Bandwidth._fields)
        least = (limits.device_bytes - limits.resident_bytes, host_bytes, *bandwidth)
        most = (limits.resident_bytes, limits.base_bytes - limits.resident_bytes)
        resident, left, *rest = self.largest([*most, *(-value for value in least)])
        allowed, host, *rates = (-value for value in rest)
        return Limits(
            int(resident + allowed),
            int(resident),
            int(resident + left),
            Bandwidth(*rates) if min(rates) > 0 else None,
            None if math.isinf(host) else int(host),
        )

    @property
    def has_pipeline(self) -> bool:
        """Whether other stages exchange activations with this one."""
        is_parallel = parallel_state.model_parallel_is_initialized()
        return is_parallel and parallel_state.get_pipeline_model_parallel_world_size() > 1

    def worst(self, lack: Optional[Lack]) -> Optional[Lack]:
        """Return the largest lack of a stage; None if all fit, or if ranks are not asked.

        A collective of the pipeline.

        Args:
            lack: That of this stage.
        """
        if not (self.has_pipeline and self.is_asked):
            return None
        size = parallel_state.get_pipeline_model_parallel_world_size()
        rows = [[0.0] * len(Lack._fields) for _ in range(size)]
        rows[parallel_state.get_pipeline_model_parallel_rank()] = list(lack or rows[0])
        group = parallel_state.get_pipeline_model_parallel_group()
        flat = map(int, _largest([value for row in rows for value in row], group))
        found = [Lack(*row) for row in zip(*[flat] * len(Lack._fields), strict=True)]
        worst = max(found, key=lambda one: one.needed_bytes - one.allowed_bytes)
        return worst if worst.needed_bytes else None


def waits_for_others(chunk: Any) -> Optional[str]:
    """Say why other ranks wait inside the forward of a chunk; None if it is computed alone."""
    for option in _SIZES:
        size = getattr(chunk.config, option, None) or 1
        if size > 1:
            return f"with {option}={size} other ranks wait inside its collectives"
    is_alone = not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1
    if getattr(chunk.config, "hybrid_context_parallel", False) and not is_alone:
        return "with hybrid_context_parallel other ranks wait inside its collectives"
    for module in chunk.modules():
        if isinstance(module, DynamicGroupMixin) and not is_alone:
            return "with dynamic_context_parallel other ranks wait inside its collectives"
        if getattr(module, "global_tokens_per_expert", None) is not None and not is_alone:
            return "with global_aux_loss other ranks wait inside its collectives"
    return None


def check_model(chunk: torch.nn.Module, budget: object) -> None:
    """Check a model that is about to run, whose flags are not known.

    Args:
        chunk: A chunk of it.
        budget: ``activation_memory_budget``.

    Raises:
        ValueError: Its parameters are divided by megatron's FSDP or torch's.
    """
    is_fsdp = any(isinstance(one, torch.distributed.fsdp.FSDPModule) for one in chunk.modules())
    if is_fsdp or any(hasattr(one, "__fsdp_param__") for one in chunk.parameters()):
        raise ValueError(
            f"activation_memory_budget={budget} is not supported with FSDP because {GATHERED}; "
            "use distributed data parallelism (use_distributed_optimizer), or leave "
            "activation_memory_budget out"
        )


def host_group(group: torch.distributed.ProcessGroup) -> torch.distributed.ProcessGroup:
    """Return a group of the same ranks whose collectives run on the host. A collective."""
    if "nccl" not in torch.distributed.get_backend(group):
        return group
    ranks = torch.distributed.get_process_group_ranks(group)
    return torch.distributed.new_group(ranks, backend="gloo", use_local_synchronization=True)


def _largest(
    values: Sequence[float], group: Optional[torch.distributed.ProcessGroup]
) -> list[float]:
    if group is None:
        return list(values)
    device = "cuda" if "nccl" in torch.distributed.get_backend(group) else "cpu"
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX, group=group)
    return [float(value) for value in tensor.tolist()]
