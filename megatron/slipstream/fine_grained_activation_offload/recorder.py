# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Records an iteration: every mark, every saved storage, and the device memory between marks.

[Note: The recorder resets the peak counter]
A plan's peak drop is computed from the device peak in every interval between two marks, and the
allocator has only one peak counter. The recorder reads and resets it at each mark in the recorded
iteration (the first) and in one that follows the first plan (the third). :mod:`peak_statistics`
keeps what is discarded, so ``torch.cuda.max_memory_allocated()`` still covers everything since the
user's own reset. Other iterations do not reset it. The third iteration is read too because the
first one differs: its backward pass allocates the gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Optional, Protocol

from megatron.slipstream.fine_grained_activation_offload.backend import Backend
from megatron.slipstream.fine_grained_activation_offload.group import OffloadTensorGroup
from megatron.slipstream.fine_grained_activation_offload.storage import SavedStorage
from megatron.slipstream.plan.staying import texts_of
from megatron.slipstream.plan.trace import (
    GroupKey,
    GroupTrace,
    MemoryReading,
    Step,
    StorageTrace,
    Trace,
    bytes_by_step,
)


class StorageId(NamedTuple):
    """Identifies a storage of the model across micro-batches, for persistent records."""

    vp_stage: int
    group: int
    position: int

    @classmethod
    def of(cls, storage: SavedStorage) -> StorageId:
        owner = storage.owner
        return cls(owner.vp_stage, owner.key.group, storage.position)


@dataclass
class _Away:
    """Steps at which a storage's memory was released, actually freed, and allocated again."""

    storage: StorageId
    nbytes: int
    free_step: int
    gone_step: Optional[int] = None
    until_step: Optional[int] = None

    @property
    def lingers_until(self) -> int:
        """See ``StorageTrace.lingers_until``."""
        if self.gone_step is None:
            return self.until_step or 0
        return self.gone_step if self.gone_step > self.free_step else 0


@dataclass
class _StorageRecord:
    identity: Optional[StorageId]
    owner: GroupKey
    nbytes: int = 0
    held_outside: bool = False
    is_recomputed: bool = False
    lingers_until: int = 0
    holders: list[GroupKey] = field(default_factory=list)


class MemoryReader:
    """Reads the allocator between the steps of one iteration."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._allocated: list[int] = []
        """Bytes allocated after each mark's actions."""
        self._peaks: list[int] = []
        """Peaks between each mark and the next."""
        self._beside_gradients: list[int] = []
        """The same, excluding gradients."""
        self.gradient_bytes: Optional[int] = None
        """Bytes of gradients; None before the first mark, or if the parameters are unknown."""
        self._begin_interval()

    def begin_step(self) -> None:
        """Call when the host reaches a mark, and once at the end."""
        if len(self._peaks) < len(self._allocated):
            reading = self._backend.memory()
            if reading is not None:
                self._note_peak(reading[1])
                self._peaks.append(self._peak)
                self._beside_gradients.append(self._peak_beside_gradients)
                self._begin_interval()

    def end_step(self) -> None:
        """Call when the actions of the mark are done."""
        reading = self._backend.memory()
        if reading is not None:
            if not self._allocated and self._backend.gradients is not None:
                self.gradient_bytes = self._backend.gradients.count()
            self._allocated.append(reading[0])
            self._backend.reset_peak_memory()

    def come_to_gradient(self, nbytes: int) -> None:
        """Call when a parameter has a new gradient.

        Before that it counts as an ordinary tensor, like the gradients of later iterations, which
        are accumulated into the first one. From then on it counts as a gradient.
        """
        reading = self._backend.memory()
        if reading is not None and self.gradient_bytes is not None:
            self._note_peak(reading[1])
            self.gradient_bytes += nbytes
            self._backend.reset_peak_memory()

    def keep_peak(self) -> None:
        """Call before the allocator's peak is reset within a step."""
        reading = self._backend.memory()
        if reading is not None:
            self._note_peak(reading[1])

    def _begin_interval(self) -> None:
        self._peak = self._peak_beside_gradients = 0

    def _note_peak(self, peak_bytes: int) -> None:
        self._peak = max(self._peak, peak_bytes)
        if self.gradient_bytes is not None:
            beside = peak_bytes - self.gradient_bytes
            self._peak_beside_gradients = max(self._peak_beside_gradients, beside)

    def readings(self, absent_bytes: Sequence[int]) -> tuple[MemoryReading, ...]:
        """Return one reading per step; empty if any is missing.

        ``absent_bytes`` are bytes of managed storages on the host from each step until the next.
        """
        if not len(self._allocated) == len(self._peaks) == len(absent_bytes):
            return ()
        figures = (self._allocated, self._peaks, absent_bytes, self._beside_gradients)
        return tuple(map(MemoryReading, *figures))


class MarkObserver(Protocol):
    """Is told of the marks of an iteration while memory is read."""

    def before_mark(self) -> None:
        """Called when the host reaches a mark."""

    def after_mark(self) -> None:
        """Called when the actions of the mark are done."""


class Recorder:
    """Records one iteration at a time.

    Two of its attributes decide how storages move: what :attr:`held_outside` contains stays on the
    device where no plan is followed, and while :attr:`reads_memory` is set, Python performs all
    moves, since C++ does not record.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.held_outside: set[StorageId] = set()
        """Storages whose device memory was still alive when they were due to be reloaded."""
        self._recomputed: set[StorageId] = set()
        """The subset that forward discards and backward recomputes."""
        self.observer: Optional[MarkObserver] = None
        self.reads_memory = True
        """Whether to read the allocator at every mark. Each read takes tens of microseconds; see
        also [Note: The recorder resets the peak counter]."""
        self._begin()

    def forget_storages(self) -> None:
        """Forget which storages were held outside: their identities have changed."""
        self.held_outside.clear()
        self._recomputed.clear()

    def watch_gradients(self) -> None:
        """Track new gradients in the coming iteration, if memory is read."""
        if self.reads_memory and self._backend.gradients is not None:
            self._backend.gradients.begin(self._memory.come_to_gradient)

    def clear(self) -> None:
        """Discard the recorded iteration, but keep the per-storage records."""
        if self.steps or self.reads_memory:  # else nothing has been recorded
            self._begin()

    def _begin(self) -> None:
        self.steps: list[Step] = []
        self.absent_bytes = 0
        """Bytes of managed storages whose device memory is free now, while memory is read."""
        self._away: dict[int, _Away] = {}
        """Released storages by serial number; only while memory is read."""
        self._memory = MemoryReader(self._backend)
        if self._backend.gradients is not None:
            self._backend.gradients.end()
        self._lingering: dict[int, weakref.ref[SavedStorage]] = {}
        """Storages whose memory was released but is not yet freed, by serial number."""

    def add_step(self, step: Step) -> None:
        if self.reads_memory:
            if self.observer is not None:
                self.observer.before_mark()
            self._memory.begin_step()
        self.steps.append(step)
        self._note_what_is_gone()

    def end_step(self) -> None:
        """Record the memory after the actions of the latest mark."""
        self._note_what_is_gone()
        if self.reads_memory:
            self._memory.end_step()
            if self.observer is not None:
                self.observer.after_mark()

    def set_absent(self, storage: SavedStorage) -> None:
        """Record that the engine released the device memory at the latest mark."""
        if self.reads_memory:
            identity = StorageId.of(storage)
            self._away[storage.serial] = _Away(identity, storage.nbytes, len(self.steps) - 1)
            self._lingering[storage.serial] = weakref.ref(storage)

    def set_returned(self, storage: SavedStorage, was_held_outside: bool) -> None:
        """Record that the storage has device memory again since the latest mark."""
        away = self._away.get(storage.serial)
        if away is not None:
            if away.gone_step is not None and away.until_step is None:
                self.absent_bytes -= away.nbytes
            away.until_step = len(self.steps) - 1
            self._lingering.pop(storage.serial, None)
        if was_held_outside:
            self.held_outside.add(StorageId.of(storage))

    def absent_bytes_now(self) -> int:
        """Return :attr:`absent_bytes` with those whose memory is free since the latest mark."""
        return self.absent_bytes + sum(self._away[serial].nbytes for serial in self._gone())

    def set_recomputed(self, storage: SavedStorage) -> None:
        """Record that forward discards the storage and backward recomputes it."""
        identity = StorageId.of(storage)
        self._recomputed.add(identity)
        self.held_outside.add(identity)

    @property
    def gradient_bytes(self) -> Optional[int]:
        """Bytes of gradients that exist now, while memory is read; None before the first mark."""
        return self._memory.gradient_bytes

    def keep_peak(self) -> None:
        """Call before the allocator's peak is reset between two marks."""
        if self.reads_memory:
            self._memory.keep_peak()

    def _note_what_is_gone(self) -> None:
        for serial in self._gone():
            self._away[serial].gone_step = len(self.steps) - 1
            self.absent_bytes += self._away[serial].nbytes
            del self._lingering[serial]
        for reference in self._lingering.values():
            storage = reference()
            if storage is not None and storage.is_original_emptied:
                self.set_recomputed(storage)

    def _gone(self) -> list[int]:
        """Return the serial numbers of :attr:`_lingering` whose memory is free by now."""
        lingering = ((serial, one()) for serial, one in self._lingering.items())
        return [serial for serial, one in lingering if one is None or one.is_memory_gone]

    def is_held_outside(self, storage: SavedStorage) -> bool:
        """Return whether something else held this storage, in this pass or an earlier one."""
        return StorageId.of(storage) in self.held_outside

    def finish(self, pp_rank: int, groups: Mapping[GroupKey, OffloadTensorGroup]) -> Trace:
        """Return the iteration as a trace; its groups are in the order in which they started."""
        records: dict[Hashable, _StorageRecord] = {}
        saved: dict[GroupKey, list[Hashable]] = {}
        for group in groups.values():
            if group.untracked_in is not None:
                names = _add_as_in(group.untracked_in, group.key, records, groups)
            else:
                names = self._add(group, records)
            saved[group.key] = names
            for name in names:
                records[name].holders.append(group.key)
        index = {name: place for place, name in enumerate(records)}
        return Trace(
            tuple(self.steps),
            tuple(
                GroupTrace(
                    key,
                    group.name,
                    group.label.vp_stage,
                    tuple(index[n] for n in saved[key]),
                    group.is_read_first,
                    _kinds_staying(group),
                )
                for key, group in groups.items()
            ),
            tuple(self._storage_trace(name, record) for name, record in records.items()),
            pp_rank,
            self._readings(),
        )

    def _add(
        self, group: OffloadTensorGroup, records: dict[Hashable, _StorageRecord]
    ) -> list[Hashable]:
        nbytes = group.nbytes
        for position, (serial, owner) in enumerate(group.held.items()):
            record = records.get(serial)
            if record is None:
                record = records[serial] = _StorageRecord(None, owner)
            if owner == group.key:
                record.identity = StorageId(group.label.vp_stage, group.key.group, position)
            # A later holder may have saved more of it.
            record.nbytes = max(record.nbytes, nbytes.get(serial, 0))
        return list(group.held)

    def _storage_trace(self, name: Hashable, record: _StorageRecord) -> StorageTrace:
        owner_first = sorted(record.holders, key=lambda key: key != record.owner)
        held_outside = record.held_outside or record.identity in self.held_outside
        away = self._away.get(name) if isinstance(name, int) else None
        lingers_until = record.lingers_until if away is None else away.lingers_until
        is_recomputed = record.is_recomputed or record.identity in self._recomputed
        return StorageTrace(
            record.nbytes, tuple(owner_first), held_outside, lingers_until, is_recomputed
        )

    def _readings(self) -> tuple[MemoryReading, ...]:
        if not self.reads_memory:
            return ()
        self._memory.begin_step()
        num_steps = len(self.steps)
        absent = (
            (one.gone_step, num_steps if one.until_step is None else one.until_step, one.nbytes)
            for one in self._away.values()
            if one.storage not in self.held_outside and one.gone_step is not None
        )
        return self._memory.readings(bytes_by_step(num_steps, absent))


def _kinds_staying(group: OffloadTensorGroup) -> tuple[str, ...]:
    if group.untracked_in is not None:
        return group.untracked_in.group_by_key[group.key].stays
    return texts_of(group.kinds_staying)


def _add_as_in(
    trace: Trace,
    key: GroupKey,
    records: dict[Hashable, _StorageRecord],
    groups: Mapping[GroupKey, OffloadTensorGroup],
) -> list[Hashable]:
    """Add the storages of a group from another iteration's trace, unless already recorded."""
    names: list[Hashable] = []
    for index in trace.group_by_key[key].storages:
        storage = trace.storages[index]
        name: Hashable = (id(trace), index)
        for holder in storage.holders:
            watched = list(groups[holder].held) if holder in groups else []
            position = trace.group_by_key[holder].storages.index(index)
            if position < len(watched):
                name = watched[position]
        if name not in records:
            records[name] = _StorageRecord(None, storage.holders[0])
        record = records[name]
        record.nbytes = max(record.nbytes, storage.nbytes)
        record.held_outside |= storage.held_outside
        record.is_recomputed |= storage.is_recomputed
        record.lingers_until = max(record.lingers_until, storage.lingers_until)
        names.append(name)
    return names
