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

    While C++ follows its plan, :attr:`native` has the number of steps and knows of each pass.
    """

    has_begun: bool = False
    is_over: bool = False
    """Whether it is being ended; it stays so if an exception interrupts that."""
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
    native: Optional[Any] = None
    """The iteration in C++, which performs the steps; None if Python does."""
    _num_steps: int = 0
    is_incomplete: bool = False
    """Whether it departed from its plan after marks were left out, so that no plan can be built
    from it: [Note: Silent groups] in ``plan_executor``."""
    passes: list[ChunkOffloadHandler] = field(default_factory=list)
    chunk: Optional[ChunkOffloadHandler] = None
    started: Optional[OffloadTensorGroup] = None
    """A started group whose region is not yet entered."""

    @property
    def num_steps(self) -> int:
        return self._num_steps if self.native is None else int(self.native.num_steps)

    def count_step(self) -> int:
        """Count a step that Python performs. Return its index."""
        self._num_steps += 1
        return self._num_steps - 1

    def go_on_in_python(self) -> None:
        if self.native is not None:
            self.native.end()
            self._num_steps, self.native = self.native.num_steps, None

    def begin_pass(self, chunk: ChunkOffloadHandler) -> None:
        self.chunk = chunk
        self.passes.append(chunk)
        if self.native is not None:
            self.native.begin_pass(chunk)

    def leave_pass(self) -> None:
        """Note that marks from now on belong to no pass."""
        self.chunk = None
        if self.native is not None:
            self.native.leave_pass()

    @property
    def plan(self) -> Optional[Plan]:
        return None if self.entry is None else self.entry.plan

    @property
    def groups(self) -> dict[GroupKey, OffloadTensorGroup]:
        """All groups by key, in the order of their passes and starts."""
        return {group.key: group for chunk in self.passes for group in chunk.groups}

    def find(self, key: GroupKey) -> Optional[OffloadTensorGroup]:
        if key.chunk_pass >= len(self.passes):
            return None
        return self.passes[key.chunk_pass].find(key.group)
