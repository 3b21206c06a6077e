# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""One group: what one marked sub-module of one layer saved in one pass."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Iterator
from typing import NamedTuple, Optional

from megatron.slipstream.fine_grained_activation_offload.storage import SavedStorage
from megatron.slipstream.plan.trace import GroupKey


class GroupState(enum.Enum):
    """How far a group has come. Where its bytes are is each storage's own state."""

    OPEN = "its operations run and save tensors"
    COMMITTED = "it has saved everything: copies out may start, and memory be let go"
    IN_USE = "backward has reached it: nothing of it leaves any more"


_ALLOWED = {
    (GroupState.OPEN, GroupState.COMMITTED),
    (GroupState.COMMITTED, GroupState.IN_USE),
}


class HeldStorage(NamedTuple):
    """A storage that a group saved. Autograd owns it: the reference is weak."""

    serial: int
    reference: weakref.ref[SavedStorage]


class OffloadTensorGroup:
    """What one marked sub-module saved in one pass."""

    def __init__(
        self, key: GroupKey, name: str, layer: int = 0, micro_batch: int = 0, vp_stage: int = 0
    ) -> None:
        self.key = key
        self.name = name
        self.layer = layer
        """How many groups of this name came before it in the pass."""
        self.micro_batch = micro_batch
        """How many passes through this model chunk came before it in the iteration."""
        self.vp_stage = vp_stage
        self.state = GroupState.OPEN
        self.held: list[HeldStorage] = []

    def __str__(self) -> str:
        return f"{self.key}.{self.name}"

    def describe(self) -> str:
        """The group in a user's words, for errors."""
        return (
            f"{self.name} of layer {self.layer} (of this model chunk, {self.vp_stage}) in "
            f"micro-batch {self.micro_batch}"
        )

    def move_to(self, state: GroupState) -> None:
        """Change the state.

        Raises:
            RuntimeError: The change is not one that a group may make.
        """
        if (self.state, state) not in _ALLOWED:
            raise RuntimeError(f"group {self} cannot go from {self.state.name} to {state.name}")
        self.state = state

    def hold(self, storage: SavedStorage) -> bool:
        """Note that this group saved a view of ``storage``; True if it is the first."""
        if any(held.serial == storage.serial for held in self.held):
            return False
        self.held.append(HeldStorage(storage.serial, weakref.ref(storage)))
        return True

    def storages_or_none(self) -> Iterator[Optional[SavedStorage]]:
        """The storages by position, None for those that autograd has freed."""
        return (held.reference() for held in self.held)

    def storages(self) -> Iterator[SavedStorage]:
        """The storages that are still alive."""
        return (storage for storage in self.storages_or_none() if storage is not None)
