# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""One group: the tensors that one marked sub-module of one layer saved in one pass."""

from __future__ import annotations

import enum
import itertools
import weakref
from typing import Optional

from megatron.slipstream.fine_grained_activation_offload.storage import GroupLabel, SavedStorage
from megatron.slipstream.plan.trace import GroupKey, Trace

_serial_numbers = itertools.count()


class GroupState(enum.Enum):
    """The life cycle of a group. Each storage tracks where its own bytes are."""

    OPEN = "its operations run and save tensors"
    COMMITTED = "it has saved everything: copies out may start, and memory be released"
    IN_USE = "backward has reached it: nothing of it is offloaded any more"
    DONE = "backward has left it"

    __hash__ = object.__hash__


_ALLOWED = {
    (GroupState.OPEN, GroupState.COMMITTED),
    (GroupState.COMMITTED, GroupState.IN_USE),
    (GroupState.IN_USE, GroupState.DONE),
}


class OffloadTensorGroup:
    """The tensors that one marked sub-module saved in one pass.

    Tensors whose memory has fewer elements than ``min_numel`` stay on the device.
    """

    __slots__ = (
        *("serial", "label", "key", "name", "state", "min_numel", "is_read_first"),
        *("untracked_in", "held", "nbytes", "kinds_staying", "_storages", "__weakref__"),
    )

    def __init__(self, label: GroupLabel, min_numel: int = 1) -> None:
        self.serial = next(_serial_numbers)
        self.label = label
        self.key = label.key
        self.name = label.name
        self.state = GroupState.OPEN
        self.min_numel = min_numel
        self.is_read_first = False
        """See ``GroupTrace.is_read_first``."""
        self.untracked_in: Optional[Trace] = None
        """The trace of the plan that keeps the group on the device, if its saved tensors are
        therefore not tracked."""
        self.held: dict[int, GroupKey] = {}
        """The group that first saved each storage, by the storage's serial number, in the order in
        which this group first saved them."""
        self._storages: list[weakref.ref[SavedStorage]] = []
        """The storages in the same order. Autograd owns them."""
        self.kinds_staying = 0
        """Kinds of tensors that it saved and that cannot move: the bits of ``Staying``."""
        self.nbytes: dict[int, int] = {}
        """Bytes that a copy of each storage would move, by serial number, as of the commit."""

    def __str__(self) -> str:
        return str(self.label)

    def move_to(self, state: GroupState) -> None:
        """Change the state; raises ``RuntimeError`` if a group may not make this transition."""
        if (self.state, state) not in _ALLOWED:
            raise RuntimeError(f"group {self} cannot go from {self.state.name} to {state.name}")
        self.state = state

    def hold(self, storage: SavedStorage) -> None:
        """Record this group's first save of a view of ``storage``."""
        self.held[storage.serial] = storage.owner.key
        self._storages.append(weakref.ref(storage))

    def storages_or_none(self) -> list[Optional[SavedStorage]]:
        """Return the storages by position, with None for those that autograd has freed."""
        return [reference() for reference in self._storages]

    def storages(self) -> list[SavedStorage]:
        return [storage for storage in self.storages_or_none() if storage is not None]

    @property
    def is_alive(self) -> bool:
        return any(reference() is not None for reference in self._storages)


class SavedTensor:
    """Replaces a saved tensor in autograd: one view of a :class:`SavedStorage`."""

    __slots__ = ("storage", "index", "group", "__weakref__")

    def __init__(self, storage: SavedStorage, index: int, group: OffloadTensorGroup) -> None:
        self.storage = storage
        self.index = index
        self.group = group
        """The group that saved it."""
