# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Ranks that have to choose alike, since they take part in collectives of each other's forward."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Optional

import torch
from megatron.core import parallel_state

from megatron.slipstream.integration.packed.dynamic_context_parallel import DynamicGroupMixin
from megatron.slipstream.options.budget import GATHERED, OTHER_PASSES
from megatron.slipstream.plan.relaxation import Limits
from megatron.slipstream.plan.trace import Bandwidth

_SIZES = (
    *("pipeline_model_parallel_size", "tensor_model_parallel_size", "context_parallel_size"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size"),
)
NUM_ASKED = 32
"""The first iterations in which ranks ask each other whether something has changed; later only in
multiples of this number, since no host gets ahead of another that is asked."""


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
    plain data parallelism there are none, and each rank chooses alone. Hosts exchange the numbers:
    through the device, each exchange would wait until the device is idle.
    """

    def __init__(self) -> None:
        self._is_shared = False
        self._shares_passes = self._sizes_vary = False
        """Whether ranks wait for others that have other data, and whether its size varies."""
        self._num_begun = 0

    def add(self, chunk: torch.nn.Module) -> None:
        """Add a chunk of the model."""
        self._is_shared |= waits_for_others(chunk) is not None
        self._shares_passes |= any(_waits_across_data(chunk))
        self._sizes_vary |= bool(getattr(chunk.config, "variable_seq_lengths", False))

    def begin(self) -> None:
        """Note that an iteration begins."""
        self._num_begun += 1

    @property
    def is_asked(self) -> bool:
        """Whether ranks ask each other in this iteration, which has the same number on all."""
        return self._num_begun <= NUM_ASKED or self._num_begun % NUM_ASKED == 0

    @property
    def is_alone(self) -> bool:
        """Whether no other rank takes part in an iteration of the model."""
        return not _groups()

    def largest(self, values: Sequence[float]) -> list[float]:
        """Return the largest of each value over the ranks. A collective."""
        return _largest(values, _stage_group() if self._is_shared else None)

    def agreed_size(self, size: Optional[float]) -> Optional[float]:
        """Return the size of a micro-batch for which all ranks that share its collectives choose.

        A collective, for each pass, where sizes vary: what ranks have seen before does not tell
        whether another has a larger one now. None if the largest cannot be told, or is the same in
        all passes.
        """
        if not self._shares_passes:
            return size
        return (self.largest([size or 0.0])[0] or None) if self._sizes_vary else None

    def tightest(self, limits: Limits) -> Limits:
        """Return the limits that hold on all ranks. A collective."""
        host_bytes = math.inf if limits.host_bytes is None else limits.host_bytes
        bandwidth = limits.bandwidth or [-1.0] * len(Bandwidth._fields)
        least = (limits.allowed_bytes, host_bytes, *bandwidth)
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

    def worst(self, lack: Optional[Lack]) -> Optional[Lack]:
        """Return the largest lack; None if all fit, or are not asked. A collective of all ranks."""
        for group in _groups() if self.is_asked else ():
            rows = [[0.0] * len(Lack._fields) for _ in range(group.size())]
            rows[group.rank()] = list(lack or rows[0])
            flat = map(int, _largest([value for row in rows for value in row], group))
            found = [Lack(*row) for row in zip(*[flat] * len(Lack._fields), strict=True)]
            worst = max(found, key=lambda one: one.needed_bytes - one.allowed_bytes)
            lack = worst if worst.needed_bytes else None
        return lack if self.is_asked else None


def waits_for_others(chunk: Any) -> Optional[str]:
    """Say why other ranks wait inside the forward of a chunk; None if it is computed alone."""
    for option in _SIZES:
        size = getattr(chunk.config, option, None) or 1
        if size > 1:
            return f"with {option}={size} other ranks wait inside its collectives"
    for option in _waits_across_data(chunk):
        return f"with {option} other ranks wait inside its collectives"
    return None


def _waits_across_data(chunk: Any) -> Iterator[str]:
    """Yield options by which ranks with other data wait inside the forward of a chunk."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return
    config = chunk.config
    if (getattr(config, "expert_model_parallel_size", None) or 1) > 1:
        yield "expert_model_parallel_size"
    expert_size = getattr(config, "expert_tensor_parallel_size", None) or 1
    if expert_size > (getattr(config, "tensor_model_parallel_size", None) or 1):
        yield "expert_tensor_parallel_size"
    for module in chunk.modules():
        if isinstance(module, DynamicGroupMixin):
            yield "dynamic_context_parallel"
        if getattr(module, "global_tokens_per_expert", None) is not None:
            yield "global_aux_loss"


def check_model(chunk: torch.nn.Module, budget: object) -> None:
    """Check a chunk of a model that is about to run, whose flags are not known.

    Raises:
        ValueError: Its parameters are divided by megatron's FSDP or torch's, or its ranks run
            different passes.
    """
    refusal = f"activation_memory_budget={budget} is not supported with"
    is_fsdp = any(isinstance(one, torch.distributed.fsdp.FSDPModule) for one in chunk.modules())
    if is_fsdp or any(hasattr(one, "__fsdp_param__") for one in chunk.parameters()):
        raise ValueError(
            f"{refusal} FSDP because {GATHERED}; use distributed data parallelism "
            "(use_distributed_optimizer), or leave activation_memory_budget out"
        )
    config: Any = getattr(chunk, "config", None)
    if getattr(config, "hybrid_context_parallel", False):
        raise ValueError(
            f"{refusal} hybrid_context_parallel=True because {OTHER_PASSES}; leave "
            "hybrid_context_parallel out, or leave activation_memory_budget out"
        )


def _stage_group() -> Optional[torch.distributed.ProcessGroup]:
    """Return the group of all ranks of this stage; None if there is no other."""
    if not parallel_state.model_parallel_is_initialized():
        return None
    group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    return group if group.size() > 1 else None


def _groups() -> list[torch.distributed.ProcessGroup]:
    """Return groups over which all ranks of the model ask each other, one after the other."""
    if not parallel_state.model_parallel_is_initialized():
        return []
    groups = [_stage_group(), parallel_state.get_pipeline_model_parallel_group()]
    return [group for group in groups if group is not None and group.size() > 1]


_hosts: weakref.WeakKeyDictionary[torch.distributed.ProcessGroup, Any] = weakref.WeakKeyDictionary()
"""Answers of :func:`_hosts_of`."""


def _hosts_of(group: torch.distributed.ProcessGroup) -> Any:
    """Return a group of the same ranks whose collectives run on hosts. At first a collective.

    ``torch.distributed.new_group`` derives a group's name from the number of groups that the rank
    knows, which may differ (weight updates of RL frameworks); such ranks would wait for each other.
    """
    if group not in _hosts:
        name = f"slipstream/{group.group_name}"
        store = torch.distributed.PrefixStore(
            name, torch.distributed.distributed_c10d._get_default_store()
        )
        _hosts[group] = torch.distributed.ProcessGroupGloo(
            store, group.rank(), group.size(), torch.distributed.constants.default_pg_timeout
        )
    return _hosts[group]


def _largest(
    values: Sequence[float], group: Optional[torch.distributed.ProcessGroup]
) -> list[float]:
    if group is None:
        return list(values)
    tensor = torch.tensor(values, dtype=torch.float64)
    torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX, group=_hosts_of(group))
    return [float(value) for value in tensor.tolist()]
