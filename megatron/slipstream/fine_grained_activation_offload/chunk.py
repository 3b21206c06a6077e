# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""One pass: one micro-batch through one model chunk (one virtual pipeline stage)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Optional

from megatron.slipstream.fine_grained_activation_offload.group import GroupState, OffloadTensorGroup
from megatron.slipstream.fine_grained_activation_offload.storage import GroupLabel
from megatron.slipstream.plan.trace import BACKWARD, OUTPUT_LAYER, GroupKey, Step, StepKind


class ChunkOffloadHandler:
    """The groups of one pass, in the order in which forward started and committed them."""

    def __init__(
        self, index: int, vp_stage: int, min_offloaded_tensor_size: int, micro_batch: int = 0
    ) -> None:
        self.index = index
        """Index among the forward passes of the iteration."""
        self.vp_stage = vp_stage
        self.micro_batch = micro_batch
        """Number of earlier passes through the same model chunk in the iteration."""
        self.given_up_by: Collection[str] = ()
        """Names of groups whose release frees memory despite other references: [Note: Layers that
        run in nodes]."""
        self.min_offloaded_tensor_size = min_offloaded_tensor_size
        """Tensors of fewer elements stay on the device."""
        self.groups: list[OffloadTensorGroup] = []
        self._num_layers: dict[str, int] = {}
        """Number of groups so far, by name."""
        self._committed: list[OffloadTensorGroup] = []
        self.num_outputs = 0
        """Number of output layer calls so far."""
        self._is_over = False
        """Whether backward has reached all groups, after forward has ended."""

    def open_group(self, name: str) -> OffloadTensorGroup:
        layer = self._num_layers.get(name, 0)
        self._num_layers[name] = layer + 1
        key = GroupKey(self.index, len(self.groups))
        label = GroupLabel(key, name, layer, self.micro_batch, self.vp_stage)
        group = OffloadTensorGroup(label, self.min_offloaded_tensor_size)
        self._is_over = False
        self.groups.append(group)
        return group

    def find(self, place: int) -> Optional[OffloadTensorGroup]:
        """Return the group at this position in start order; None if it has not started."""
        return self.groups[place] if 0 <= place < len(self.groups) else None

    def commit_group(self, name: str) -> Optional[OffloadTensorGroup]:
        """Commit the innermost open group called ``name``; None if there is none.

        A layer that recomputes a sub-module marks its end without having marked its start.
        """
        for group in reversed(self.groups):
            if group.name == name and group.state is GroupState.OPEN:
                group.move_to(GroupState.COMMITTED)
                self._committed.append(group)
                return group
        return None

    def used_before(
        self, group: Optional[OffloadTensorGroup], depth: int
    ) -> Sequence[OffloadTensorGroup]:
        """Return ``depth`` groups that backward most likely reaches after ``group``, or first."""
        place = len(self._committed) if group is None else self._committed.index(group)
        return self._committed[max(0, place - depth) : place][::-1]

    @property
    def lacks_backward(self) -> bool:
        """Whether backward has not reached a group that has saved tensors."""
        # Called for all passes whenever one begins, so skip finished ones.
        if self._is_over:
            return False
        waiting = [
            group
            for group in self.groups
            if group.state is GroupState.OPEN or group.state is GroupState.COMMITTED
        ]
        self._is_over = bool(self.groups) and not waiting
        return any(group.held for group in waiting)

    @property
    def awaits_backward(self) -> bool:
        """Whether any tensor that forward saved is still kept for backward."""
        return any(group.is_alive for group in self.groups)


def mark_of_no_group(chunk: ChunkOffloadHandler, kind: StepKind) -> Step:
    """Return the mark where backward begins, or a mark of the latest output layer call."""
    if kind is StepKind.BACKWARD_START:
        return Step(kind, GroupKey(chunk.index, -1), BACKWARD)
    chunk.num_outputs += kind is StepKind.OUTPUT_START
    return Step(kind, GroupKey(chunk.index, -1 - chunk.num_outputs), OUTPUT_LAYER)
