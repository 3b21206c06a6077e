# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""One group: what one marked sub-module of one layer saved in one pass."""

from __future__ import annotations

import enum
import weakref
from typing import NamedTuple, Optional

from megatron.slipstream.fine_grained_activation_offload.storage import SavedStorage
from megatron.slipstream.plan.trace import GroupKey


class GroupState(enum.Enum):
    """How far a group has come. Where its bytes are is each storage's own state."""

    OPEN = "its operations run and save tensors"
    COMMITTED = "it has saved everything: copies out may start, and memory be let go"
    IN_USE = "backward has reached it: nothing of it leaves any more"
    DONE = "backward has left it"

    __hash__ = object.__hash__


_ALLOWED = {
    (GroupState.OPEN, GroupState.COMMITTED),
    (GroupState.COMMITTED, GroupState.IN_USE),
    (GroupState.IN_USE, GroupState.DONE),
}


class HeldStorage(NamedTuple):
    """A storage that a group saved. Autograd owns it: the reference is weak."""

    reference: weakref.ref[SavedStorage]
    owner: GroupKey
    """The group that saved it first."""


class OffloadTensorGroup:
    """What one marked sub-module saved in one pass."""

    __slots__ = (
        *("key", "name", "layer", "micro_batch", "vp_stage", "state", "min_numel"),
        *("is_read_first", "held", "nbytes", "__weakref__"),
    )

    def __init__(
        self,
        key: GroupKey,
        name: str,
        layer: int = 0,
        micro_batch: int = 0,
        vp_stage: int = 0,
        min_numel: int = 1,
    ) -> None:
        self.key = key
        self.name = name
        self.layer = layer
        """How many groups of this name came before it in the pass."""
        self.micro_batch = micro_batch
        """How many passes through this model chunk came before it in the iteration."""
        self.vp_stage = vp_stage
        self.state = GroupState.OPEN
        self.min_numel = min_numel
        """Tensors of fewer elements stay on the device."""
        self.is_read_first = False
        """See ``GroupTrace``."""
        self.held: dict[int, HeldStorage] = {}
        """By serial number, in order of their first save by this group."""
        self.nbytes: dict[int, int] = {}
        """Bytes that a copy of each would move, by serial number, as of the commit."""

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

    def hold(self, storage: SavedStorage) -> None:
        """Note that this group saved a view of ``storage``, its first."""
        self.held[storage.serial] = HeldStorage(weakref.ref(storage), storage.owner.key)

    def storages_or_none(self) -> list[Optional[SavedStorage]]:
        """The storages by position, None for those that autograd has freed."""
        return [held.reference() for held in self.held.values()]

    def storages(self) -> list[SavedStorage]:
        """The storages that are still alive."""
        return [storage for storage in self.storages_or_none() if storage is not None]
