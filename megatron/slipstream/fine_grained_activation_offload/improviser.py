# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""What moves where no plan says: everything, by counting marks.

So it is in the iteration that a plan is made of, and in the rest of one that departs from its plan.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Optional

from megatron.slipstream.fine_grained_activation_offload.chunk import ChunkOffloadHandler
from megatron.slipstream.fine_grained_activation_offload.group import (
    GroupState,
    OffloadTensorGroup,
)
from megatron.slipstream.fine_grained_activation_offload.recorder import Recorder
from megatron.slipstream.fine_grained_activation_offload.storage import SavedStorage
from megatron.slipstream.fine_grained_activation_offload.transfer import ActivationStore
from megatron.slipstream.plan.policy import PolicyOptions
from megatron.slipstream.plan.trace import StepKind


class Improviser:
    """Lets groups go ``release_lag`` commits after their own, and fetches ``prefetch_depth`` ahead.

    Args:
        store: What moves them.
        recorder: Knows which storages somebody else holds, so that there is no use in moving them.
    """

    def __init__(self, store: ActivationStore, recorder: Recorder) -> None:
        self._store = store
        self._recorder = recorder
        self._waiting: deque[OffloadTensorGroup] = deque()
        """Committed groups that have not let go."""

    def take_over(self, committed: Iterable[OffloadTensorGroup]) -> None:
        """A plan is followed no longer, under which these groups were committed."""
        self._waiting.extend(g for g in committed if g.state is GroupState.COMMITTED)

    def forget(self) -> None:
        """The iteration has ended."""
        self._waiting.clear()

    def come_to_group(
        self,
        kind: StepKind,
        group: OffloadTensorGroup,
        chunk: ChunkOffloadHandler,
        options: PolicyOptions,
    ) -> None:
        """Do what is due at a mark of a group.

        Args:
            kind: Of the mark.
            group: The group.
            chunk: Its pass.
            options: How far to lag behind and to look ahead.
        """
        if kind is StepKind.FORWARD_COMMIT:
            self._store.copy_out(group, self._may_move)
            self._waiting.append(group)
            while len(self._waiting) > options.release_lag:
                self._release(self._waiting.popleft())
            if options.max_inflight_offloads is not None:
                of_name = [waiting for waiting in self._waiting if waiting.name == group.name]
                for early in of_name[: len(of_name) - options.max_inflight_offloads]:
                    self._waiting.remove(early)
                    self._release(early)
        elif kind is StepKind.BACKWARD_USE:
            self._store.copy_in(group.storages(), late=True)
            self._fetch_before(group, chunk, options)

    def come_to_end(
        self, kind: StepKind, chunk: ChunkOffloadHandler, options: PolicyOptions
    ) -> None:
        """Let go of the last groups of a pass, which no commits follow; fetch as backward begins.

        A plan may do so, before the loss: so what else holds their memory has to show. It does as
        long as backward has not come to what holds it, which may be right before the group.

        Args:
            kind: Of the mark: OUTPUT_START or BACKWARD_START.
            chunk: The pass.
            options: How far to look ahead.
        """
        for group in list(self._waiting):
            if group.key.chunk_pass == chunk.index:
                self._waiting.remove(group)
                self._release(group)
        if kind is StepKind.BACKWARD_START:
            self._fetch_before(None, chunk, options)

    def _release(self, group: OffloadTensorGroup) -> None:
        if group.state is GroupState.COMMITTED:
            self._store.release(group)

    def _fetch_before(
        self,
        group: Optional[OffloadTensorGroup],
        chunk: ChunkOffloadHandler,
        options: PolicyOptions,
    ) -> None:
        for ahead in chunk.used_before(group, options.prefetch_depth):
            self._store.copy_in(ahead.storages())

    def _may_move(self, _: int, storage: SavedStorage) -> bool:
        return not self._recorder.is_held_outside(storage)
