# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""What an iteration within a budget may use of the device, and of the host beside an optimizer.

[Note: What stages exchange]
Where an iteration begins and where it ends, a schedule and autograd hold some hidden states that
stages have exchanged, not the same number at both. Added up over iterations, the difference would
pass for resident memory, and activations would exceed the budget by it. So resident memory changes
only by more than that. An optimizer's state is usually more, and comes once.

[Note: An optimizer on the host]
megatron-core's ``HybridDeviceOptimizer`` (``optimizer_cpu_offload``) pins copies of its parameters
when it is built, and gradients and Adam's two moments in its first step, after the limit on the
engine's host memory has been read.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, Literal, Optional, Union

import torch
from megatron.core import parallel_state

from megatron.slipstream.fine_grained_activation_offload.engine import OffloadEngine
from megatron.slipstream.integration.budget.batch_sizes import received_bytes
from megatron.slipstream.integration.budget.stage_ranks import StageRanks
from megatron.slipstream.plan import relaxation
from megatron.slipstream.plan.relaxation import Limits

MARGIN = 0.05
"""Share of the obtainable device memory that 'auto' leaves: the allocator reserves more than it
allocates."""
BYTES_PER_PARAMETER = 12
"""Gradient and two moments in FP32. The copies of parameters exist before the first iteration."""
Budget = Union[float, Literal["auto"]]


class DeviceLimits:
    """The limits of the coming iteration. The budget is in GiB of activations, or 'auto'.

    Raises:
        ValueError: The budget is 'auto', and the backend's device has no end.
    """

    def __init__(self, engine: OffloadEngine, budget: Budget) -> None:
        if budget == "auto" and engine.store.backend.obtainable_bytes() is None:
            raise ValueError(
                "activation_memory_budget='auto' is not supported with offload_backend="
                f"{engine.store.backend.name!r} because host memory stands in for the device's, "
                "and has no end of its own; set the GiB that activations may use"
            )
        self._engine = engine
        self._budget = budget
        self.now = Limits(0, 0, 0)
        """What is followed."""
        self.agreed = self.now
        """Those of all ranks of the stage, from which the last choice was made."""
        self._left_bytes: Optional[int] = None
        """What iterations have left allocated beside gradients; None before the first one."""
        self._received_bytes = self._exchanged_bytes = 0
        self._resident_bytes = 0
        self._end_bytes = math.inf
        """The device peak at which memory has run out."""

    @property
    def is_auto(self) -> bool:
        """Whether what is left for activations depends on what else is on the device."""
        return self._budget == "auto"

    @property
    def allowed_bytes(self) -> int:
        """Bytes of activations that all ranks of the stage may use, as of the last choice."""
        return self.agreed.allowed_bytes

    def find(self, chunks: Sequence[torch.nn.Module], frugal_bytes: int) -> Limits:
        """Return what the coming iteration may use, and what is in use before it.

        Activations need ``frugal_bytes`` with the most frugal settings; 0 if unknown.
        """
        backend = self._engine.store.backend
        reading = backend.memory()
        assert reading is not None
        base_bytes = reading[0] + _absent_gradient_bytes(chunks)
        resident_bytes = base_bytes - max(0, self._left_bytes or 0) - self._received_bytes
        change_bytes = resident_bytes - self._resident_bytes
        if self._left_bytes is not None and abs(change_bytes) <= self._exchanged_bytes:
            resident_bytes -= change_bytes
            self._left_bytes += change_bytes
        self._resident_bytes = resident_bytes
        if self._budget != "auto":
            device_bytes = resident_bytes + int(self._budget * 2**30)
        else:
            obtainable = backend.obtainable_bytes()
            assert obtainable is not None
            device_bytes = int(obtainable * (1 - MARGIN))
        # Frugal settings ran where others have run out.
        end_bytes = max(self._end_bytes, resident_bytes + frugal_bytes)
        bandwidth = (
            None if self._left_bytes is None else self._engine.lifecycle.planner.measure_bandwidth()
        )
        host_bytes = self._engine.store.host_pool.limit_bytes
        device_bytes = int(min(device_bytes, end_bytes))
        return Limits(device_bytes, resident_bytes, base_bytes, bandwidth, host_bytes)

    def begin(self, chunks: Sequence[torch.nn.Module], hidden_bytes: int) -> None:
        """Note what an iteration begins with: [Note: What stages exchange].

        Args:
            chunks: The chunks of the model.
            hidden_bytes: The bytes of a micro-batch's hidden states; 0 if they are not known yet.
        """
        self._received_bytes = received_bytes(chunks)
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            # Of each chunk an input and its gradient; of one, also an output's, and one more input.
            self._exchanged_bytes = 2 * (len(chunks) + 1) * hidden_bytes

    def note_growth(self, nbytes: int) -> None:
        """Note by how much an iteration has increased what is allocated beside gradients."""
        self._left_bytes = (self._left_bytes or 0) + nbytes

    def end_at(self, peak_bytes: int) -> None:
        """Note that memory has run out at a device peak: less is there than was assumed."""
        self._end_bytes = min(self._end_bytes, peak_bytes)

    def agree(self, limits: Limits, ranks: StageRanks) -> Limits:
        """Return the limits on all ranks of the stage, from which the coming choice is made."""
        self.agreed = ranks.tightest(limits)
        return self.agreed

    def shrunk(self, limits: Limits, ranks: StageRanks) -> Optional[int]:
        """Return the bytes left for activations; None if as many as at the last choice.

        Predictions leave a margin, which such a choice may use up.
        """
        allowed_bytes = ranks.tightest(limits).allowed_bytes
        is_less = allowed_bytes < (1 - relaxation.MARGIN) * self.allowed_bytes
        return allowed_bytes if is_less else None


def _absent_gradient_bytes(chunks: Sequence[torch.nn.Module]) -> int:
    """Return the bytes of gradients that backward will allocate."""
    parameters = (parameter for chunk in chunks for parameter in chunk.parameters())
    return sum(
        parameter.nbytes
        for parameter in parameters
        if parameter.requires_grad
        and parameter.grad is None
        and getattr(parameter, "main_grad", None) is None
    )


def optimizer_host_bytes(chunks: Sequence[torch.nn.Module]) -> int:
    """Return the host bytes that an optimizer's first step will allocate on this rank.

    See [Note: An optimizer on the host]. 0 if the script is not megatron's: nothing is known.
    """
    args: Any = getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
    if args is None or not getattr(args, "optimizer_cpu_offload", False):
        return 0
    num_shards = num_expert_shards = 1
    if getattr(args, "use_distributed_optimizer", False):
        num_shards = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        num_expert_shards = parallel_state.get_expert_data_parallel_world_size()
    count = sum(
        parameter.numel()
        / (num_shards if getattr(parameter, "allreduce", True) else num_expert_shards)
        for chunk in chunks
        for parameter in chunk.parameters()
        if parameter.requires_grad
    )
    return int(count * BYTES_PER_PARAMETER * float(args.optimizer_offload_fraction))
