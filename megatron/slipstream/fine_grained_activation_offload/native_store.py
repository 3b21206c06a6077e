# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The activation store whose common cases C++ handles.

C++ works on the same objects. Where it cannot handle a case (timing, capture, verification, memory
with other references), it returns False with no effect, and the Python method does.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any, Optional, Protocol

import torch

from megatron.slipstream.fine_grained_activation_offload.activation_store import ActivationStore
from megatron.slipstream.fine_grained_activation_offload.backend import Backend
from megatron.slipstream.fine_grained_activation_offload.chunk import ChunkOffloadHandler
from megatron.slipstream.fine_grained_activation_offload.counted_modules import (
    CountedModules,
    add_counters,
)
from megatron.slipstream.fine_grained_activation_offload.group import OffloadTensorGroup
from megatron.slipstream.fine_grained_activation_offload.native import native_module
from megatron.slipstream.fine_grained_activation_offload.recorder import Recorder
from megatron.slipstream.fine_grained_activation_offload.storage import SavedStorage
from megatron.slipstream.plan.actions import Action, ActionKind, Plan
from megatron.slipstream.plan.trace import Step, StepKind


class EngineOfMarks(Protocol):
    """What C++ calls of an engine, by these names."""

    def depart(self, kind: StepKind, at: OffloadTensorGroup | Step) -> None:
        """Handle a mark that is not the next one of the plan."""

    def perform(self, actions: Sequence[Action]) -> None:
        """Perform actions of the plan: the first is a rare case, the others follow it."""

    def use_group(self, group: OffloadTensorGroup) -> None:
        """Note that backward needs the group, in an iteration that no longer follows its plan."""

    def end_group(self, group: OffloadTensorGroup) -> None:
        """Note that backward has left the group, in such an iteration."""

    def come_to_gradient(self, mark: Step, chunk: ChunkOffloadHandler) -> None:
        """Handle the arrival of a marked gradient, in such an iteration."""

    def read(self, saved: Any) -> torch.Tensor:
        """Read a saved tensor in a rare case."""


def make_store(backend: Backend, recorder: Recorder, is_native: bool) -> ActivationStore:
    """Create a store: in C++ if ``is_native`` and it can be compiled, else in Python."""
    module = native_module() if is_native else None
    if module is None:
        return ActivationStore(backend, recorder)
    return NativeStore(backend, recorder, module)


class NativeStore(ActivationStore):
    """An activation store with the common cases in C++."""

    is_native = True

    def __init__(self, backend: Backend, recorder: Recorder, module: Any) -> None:
        super().__init__(backend, recorder, module)
        self._module = module
        streams = self.copy_streams
        self.native = module.Store(backend, streams.waits, self.host_pool, streams, self.entered)
        """The C++ object."""
        self.marks = self.native
        self.saved_type = module.SavedTensor

    def end_iteration(self) -> CountedModules:
        counted = super().end_iteration()
        counted.in_cpp = self.native.take_counters()
        return counted

    def _note_settings(self) -> None:
        self.native.pool = self.host_pool
        self.native.is_verified = self.verifier is not None
        self.native.crosses_streams = self.crosses_streams

    def _add_counts(self) -> None:
        add_counters(self.native.take_counters(), self._context.modules)

    # Passes.

    def make_pass(
        self, index: int, vp_stage: int, min_numel: int, micro_batch: int
    ) -> ChunkOffloadHandler:
        made: ChunkOffloadHandler = self.native.make_pass(index, vp_stage, min_numel, micro_batch)
        return made

    def compile_steps(self, plan: Plan) -> Optional[Any]:
        """Compile a plan's steps for C++; None if ranges of profiles are named in Python."""
        if self.backend.names_ranges:
            return None
        kinds = list(ActionKind)
        groups = plan.trace.group_by_key

        def compiled(action: Action) -> tuple[Any, ...]:
            kept = frozenset(plan.group_by_key[action.key].kept_storages)
            key = action.key
            return (kinds.index(action.kind), key, kept, groups[key].storages, action)

        return self._module.Steps(
            self.native,
            (
                (step.kind, step.key, step.name, [compiled(action) for action in actions])
                for step, actions in zip(plan.trace.steps, plan.actions, strict=True)
            ),
            [key for key in groups if not plan.tracks(key)],
            plan.silent,
            plan.trace,
        )

    # Marks in the autograd graph.

    def mark(self, tensor: torch.Tensor, come: Callable[[], object]) -> torch.Tensor:
        if type(tensor) is not torch.Tensor:
            return super().mark(tensor, come)
        marked: torch.Tensor = self._module.mark(tensor, come)
        return marked

    def call_before(self, tensor: torch.Tensor, come: Callable[..., object]) -> None:
        self._module.call_before(tensor, come)

    # Saved-tensor hooks.

    def hooks(
        self, group: Optional[OffloadTensorGroup], reader: Any
    ) -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
        hooks: tuple[Any, Any] = self.native.hooks(group, reader)
        return hooks

    def is_own_hook(self, pack: Any) -> bool:
        return type(pack) is self._module.PackHook or super().is_own_hook(pack)

    def pack(self, group: Optional[OffloadTensorGroup], tensor: torch.Tensor) -> Any:
        return self.native.pack(group, tensor)

    def _find(self, memory: int) -> Optional[SavedStorage]:
        found: Optional[SavedStorage] = self.native.find(memory)
        return found

    # Moves, in the compute stream's order.

    def commit(self, group: OffloadTensorGroup) -> None:
        self.native.commit(group)

    def copy_out(
        self,
        group: OffloadTensorGroup,
        may_move: Optional[Callable[[int, SavedStorage], bool]] = None,
        kept: Container[int] = (),
        numbers: Optional[Sequence[int]] = None,
    ) -> None:
        layout = None if numbers is None else self.host_pool.layout
        if (
            may_move is not None
            or self._recorder.reads_memory
            or not self.native.copy_out(group, kept, numbers, layout)
        ):
            super().copy_out(group, may_move, kept, numbers)

    def release(self, group: OffloadTensorGroup) -> None:
        if self._recorder.reads_memory or not self.native.release(group):
            super().release(group)

    def copy_in_group(self, group: OffloadTensorGroup) -> None:
        if self._recorder.reads_memory or not self.native.copy_in(group):
            super().copy_in_group(group)
