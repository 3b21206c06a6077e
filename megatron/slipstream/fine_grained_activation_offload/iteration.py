# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The engine's state for one iteration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from megatron.slipstream.fine_grained_activation_offload.chunk import ChunkOffloadHandler
from megatron.slipstream.fine_grained_activation_offload.group import OffloadTensorGroup
from megatron.slipstream.fine_grained_activation_offload.plan_cache import (
    IterationProbe,
    PlanEntry,
    TrialIteration,
)
from megatron.slipstream.plan.actions import Plan
from megatron.slipstream.plan.trace import GroupKey


@dataclass(slots=True)
class Iteration:
    """From the first entry of forward into a model chunk until the schedule has issued everything.

    C++ accesses some of the slots directly: ``native/steps.h``.
    """

    has_begun: bool = False
    """Whether forward has entered a model chunk."""
    num_entered: int = 0
    """Number of times that forward has entered a model chunk, with or without the engine."""
    trial: Optional[TrialIteration] = None
    """Its part in a cost trial, which may run it without the engine."""
    entry: Optional[PlanEntry] = None
    """The plan being followed; None if no plan matches."""
    has_layout: bool = False
    """Whether host buffers follow the plan's layout: [Note: Layouts] in ``host_pool``."""
    probe: Optional[IterationProbe] = None
    """Measures the iteration while it follows its plan; None if it is not measured."""
    steps: Optional[Any] = None
    """The steps of the plan in C++, if nothing is measured; None if Python performs them."""
    num_steps: int = 0
    """Number of steps so far."""
    is_incomplete: bool = False
    """Whether it departed from its plan after marks were left out, so that no plan can be built
    from it: [Note: Silent groups] in ``plan_executor``."""
    passes: list[ChunkOffloadHandler] = field(default_factory=list)
    """Passes in the order in which forward began them."""
    chunk: Optional[ChunkOffloadHandler] = None
    """The current forward pass; None outside training passes."""
    started: Optional[OffloadTensorGroup] = None
    """A started group whose region is not yet entered."""

    @property
    def plan(self) -> Optional[Plan]:
        """The plan being followed; None if no plan matches."""
        return None if self.entry is None else self.entry.plan

    @property
    def groups(self) -> dict[GroupKey, OffloadTensorGroup]:
        """All groups by key, in the order of their passes and starts."""
        return {group.key: group for chunk in self.passes for group in chunk.groups}

    def find(self, key: GroupKey) -> Optional[OffloadTensorGroup]:
        """Return the group with that key; None if it has not started."""
        if key.chunk_pass >= len(self.passes):
            return None
        return self.passes[key.chunk_pass].find(key.group)
