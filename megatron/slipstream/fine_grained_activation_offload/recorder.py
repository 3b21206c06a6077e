# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Observing an iteration: every mark, every saved storage, and the device memory between marks.

[Note: The recorder resets the peak counter]
What a plan saves is told by the device peak of every interval between two marks, and the allocator
has only one peak counter. In the iteration that is recorded (the first) the recorder reads and
resets it at each mark, so ``torch.cuda.max_memory_allocated()`` then only covers the time since.
Later iterations leave it alone.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

from megatron.slipstream.fine_grained_activation_offload.backend import Backend
from megatron.slipstream.fine_grained_activation_offload.group import OffloadTensorGroup
from megatron.slipstream.fine_grained_activation_offload.storage import SavedStorage
from megatron.slipstream.plan.trace import (
    GroupKey,
    GroupTrace,
    MemoryReading,
    Step,
    StepKind,
    StorageTrace,
    Trace,
)


class StorageId(NamedTuple):
    """Names a storage of the model whatever the micro-batch: what is learnt of it holds on."""

    vp_stage: int
    group: int
    position: int


class _StorageRecord:
    def __init__(self, identity: StorageId) -> None:
        self.identity = identity
        self.nbytes = 0
        self.holders: list[GroupKey] = []
        self.absent_from: Optional[int] = None
        self.absent_until: Optional[int] = None


class Recorder:
    """Collects one iteration at a time. Never changes what the engine does."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.held_outside: set[StorageId] = set()
        """Storages that were found alive on the device when they were to be copied back."""
        self.reads_memory = True
        """Whether to read the allocator at every mark: tens of microseconds each, and see [Note:
        The recorder resets the peak counter]."""
        self.clear()

    def clear(self) -> None:
        """Forget the iteration (not what was learnt about storages)."""
        self.steps: list[Step] = []
        self._groups: dict[GroupKey, tuple[str, int, list[int]]] = {}
        self._storages: dict[int, _StorageRecord] = {}
        self._allocated: list[int] = []
        """After each mark, once what is due there has been done."""
        self._peaks: list[int] = []
        """Between each mark and the next."""

    def add_step(self, kind: StepKind, group: OffloadTensorGroup) -> int:
        """Note a mark. Returns its place in the iteration."""
        self._end_interval()
        self.steps.append(Step(kind, group.key, group.name))
        return len(self.steps) - 1

    def end_step(self) -> None:
        """Note the memory once what is due at the newest mark has been done."""
        reading = self._backend.memory() if self.reads_memory else None
        if reading is not None:
            self._allocated.append(reading[0])
            self._backend.reset_peak_memory()

    def add_group(self, group: OffloadTensorGroup, vp_stage: int) -> None:
        """Note a new group."""
        self._groups[group.key] = (group.name, vp_stage, [])

    def add_save(self, group: OffloadTensorGroup, storage: SavedStorage) -> None:
        """Note that ``group`` saved a view of ``storage``, the first of that group."""
        _, vp_stage, serials = self._groups[group.key]
        record = self._storages.get(storage.serial)
        if record is None:
            identity = StorageId(vp_stage, group.key.group, len(serials))
            record = self._storages[storage.serial] = _StorageRecord(identity)
        record.holders.append(group.key)
        serials.append(storage.serial)

    def set_nbytes(self, storage: SavedStorage) -> None:
        """Note the final size of a storage, at the commit of a group that holds it."""
        self._storages[storage.serial].nbytes = storage.nbytes

    def set_absent(self, storage: SavedStorage) -> None:
        """Note that the engine let go of the device memory at the newest mark."""
        record = self._storages.get(storage.serial)
        if record is not None:
            record.absent_from = len(self.steps) - 1

    def set_returned(self, storage: SavedStorage, was_held_outside: bool) -> None:
        """Note that the bytes have device memory again since the newest mark."""
        record = self._storages.get(storage.serial)
        if record is None:
            return  # Backward may outlive its iteration's end.
        record.absent_until = len(self.steps) - 1
        if was_held_outside:
            self.held_outside.add(record.identity)

    def is_held_outside(self, storage: SavedStorage) -> bool:
        """Whether this storage, or its like in an earlier pass, was held by others."""
        record = self._storages.get(storage.serial)
        return record is not None and record.identity in self.held_outside

    def finish(self, pp_rank: int) -> Trace:
        """The iteration as a trace."""
        index = {serial: place for place, serial in enumerate(self._storages)}
        storages = tuple(
            StorageTrace(record.nbytes, tuple(record.holders), record.identity in self.held_outside)
            for record in self._storages.values()
        )
        groups = tuple(
            GroupTrace(key, name, vp_stage, tuple(index[serial] for serial in serials))
            for key, (name, vp_stage, serials) in self._groups.items()
        )
        return Trace(tuple(self.steps), groups, storages, pp_rank, self._memory())

    def _end_interval(self) -> None:
        if self.reads_memory and len(self._peaks) < len(self._allocated):
            reading = self._backend.memory()
            if reading is not None:
                self._peaks.append(reading[1])

    def _memory(self) -> tuple[MemoryReading, ...]:
        self._end_interval()
        if len(self._peaks) != len(self.steps):
            return ()
        change = [0] * (len(self.steps) + 1)
        for record in self._storages.values():
            if record.absent_from is not None and record.identity not in self.held_outside:
                change[record.absent_from] += record.nbytes
                until = record.absent_until
                change[len(self.steps) if until is None else until] -= record.nbytes
        absent, memory = 0, []
        for step, (allocated, peak) in enumerate(zip(self._allocated, self._peaks, strict=True)):
            absent += change[step]
            memory.append(MemoryReading(allocated, peak, absent))
        return tuple(memory)
