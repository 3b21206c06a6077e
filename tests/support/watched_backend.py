# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""An engine whose backend notes the operations of each queue, and the waits of each queue.

From plans it takes only the trace's numbers of the storages that a group saves. From there it
identifies a storage by its memory, and in its copy back by the host bytes that it was copied to.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from megatron.slipstream.fine_grained_activation_offload.backend import Bytes, Copy
from megatron.slipstream.fine_grained_activation_offload.cpu_backends import CpuBackend
from megatron.slipstream.fine_grained_activation_offload.engine import OffloadEngine
from megatron.slipstream.fine_grained_activation_offload.group import (
    OffloadTensorGroup,
    SavedTensor,
)
from megatron.slipstream.integration.seam.manager import PipelineOffloadManager
from megatron.slipstream.plan.actions import ActionKind
from megatron.slipstream.plan.candidates import PolicyOptions
from megatron.slipstream.plan.edges import EDGES, OpKind, Queue
from megatron.slipstream.plan.host_layout import BUFFER_ALIGNMENT_BYTES, size_class_bytes
from megatron.slipstream.plan.trace import GroupKey, Trace


class Issued(NamedTuple):
    """An entry of a queue."""

    kind: OpKind
    step: int
    storages: tuple[int, ...]
    """Indices in :attr:`Trace.storages`."""
    waited: tuple[int, ...]
    """For each queue, the latest signal that this entry's queue waits for, by this entry or an
    earlier one. So a wait that an earlier one implies makes no difference."""


Queues = dict[Queue, list[Issued]]

SIGNALS = frozenset(edge.signal for edge in EDGES)


def num_signals(entries: Sequence[Issued]) -> int:
    return sum(entry.kind in SIGNALS for entry in entries)


class Event(NamedTuple):
    """A point in a queue of one iteration."""

    iteration: int
    queue: Queue
    num_signals: int


class WatchedBackend(CpuBackend):
    """Notes one iteration of one engine at a time."""

    names_ranges = True
    # One slab serves an iteration, as in the planner's ledger.
    host_slab_bytes = 64 << 20

    def __init__(self) -> None:
        super().__init__()
        self._compute = object()
        self.num_iterations = 0
        self.slabs: list[int] = []
        """The address of every slab."""

    def watch(self, manager: PipelineOffloadManager, trace: Trace | None) -> None:
        """Note the next iteration of ``manager``, which matches ``trace`` if given."""
        self.manager = manager
        self.num_iterations += 1
        self._trace = trace
        self.issued: Queues = {queue: [] for queue in Queue}
        self.performed: list[tuple[int, str]] = []
        """The actions, as the engine names them, with their steps."""
        self.saved: dict[GroupKey, list[int]] = {}
        """The storages that each group saved, by index in the trace."""
        self.addresses: dict[int, int] = {}
        """The host address of each storage."""
        self.used_before: dict[int, set[int]] = {}
        """For each storage, the storages whose copy back last read any of its host bytes."""
        self.in_use_bytes: dict[int, int] = {}
        """By step, the pool's bytes in use when the last copy out was issued."""
        self.num_blocked = 0
        """Number of times that the host has waited."""
        self.step = -1
        self._range = ""
        self._waited = {queue: [0 for _ in Queue] for queue in Queue}
        self._numbers: dict[int, int] = {}
        """The trace's index of each storage, by its serial number in the engine."""
        self._uncommitted: list[int] = []
        self._in_device: dict[int, int] = {}
        """The storage in each device memory, by the address of torch's storage object."""
        self._in_host: dict[int, int] = {}
        """The storage whose copy out wrote to each host address last."""
        self._last_read: dict[int, int] = {}
        """The storage whose copy back read each block of host memory last."""
        self._allocated: list[int] = []
        """Device memory allocated after the last START_IN."""
        self._returned: set[int] = set()

    # The interface of a backend.

    def current_stream(self) -> object:
        return self._compute

    def record(self, stream: object) -> Event:
        queue = self._queue(stream)
        if queue is Queue.COMPUTE:
            # The engine records there only to start a copy; its storages are known once it runs.
            is_out = self._range.endswith(f":{ActionKind.D2H.value}")
            self._issue(OpKind.START_OUT if is_out else OpKind.START_IN)
            self._returned.update(self._allocated)
            self._allocated.clear()
        return Event(self.num_iterations, queue, num_signals(self.issued[queue]))

    def wait(self, stream: object, event: Event) -> None:
        if event.iteration == self.num_iterations:
            waited = self._waited[self._queue(stream)]
            waited[event.queue] = max(waited[event.queue], event.num_signals)

    def wait_on_host(self, stream: object) -> None:
        self.num_blocked += 1

    def run_copies(self, copies: Sequence[Copy], stream: object) -> None:
        super().run_copies(copies, stream)
        is_out = self._queue(stream) is Queue.D2H
        storages = [self._copy_out(copy) if is_out else self._copy_in(copy) for copy in copies]
        start = self.issued[Queue.COMPUTE].pop()
        self.issued[Queue.COMPUTE].append(start._replace(storages=tuple(storages)))
        self._issue(OpKind.COPY_OUT if is_out else OpKind.COPY_IN, *storages)

    def allocate_device(self, nbytes: int, device: torch.device) -> torch.UntypedStorage:
        storage = super().allocate_device(nbytes, device)
        self._allocated.append(storage._cdata)
        return storage

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        slab = super().allocate_host(nbytes)
        self.slabs.append(slab.data_ptr())
        return slab

    def drop_device(self, storage: torch.UntypedStorage) -> None:
        is_returned = storage._cdata in self._returned
        kind = OpKind.ABANDON if is_returned else OpKind.RELEASE
        self._issue(kind, self._in_device[storage._cdata])

    @contextlib.contextmanager
    def profiler_range(self, label: str) -> Iterator[None]:
        self.performed.append((self.step, label))
        self._range = label
        yield
        self._range = ""

    def _queue(self, stream: object) -> Queue:
        if stream is self._compute:
            return Queue.COMPUTE
        return Queue.D2H if stream is self.manager.d2h_stream else Queue.H2D

    def _issue(self, kind: OpKind, *storages: int) -> None:
        waited = tuple(self._waited[kind.queue])
        self.issued[kind.queue].append(Issued(kind, self.step, storages, waited))

    def _copy_out(self, copy: Copy) -> int:
        buffer, source = copy
        number = self._in_device[source.storage._cdata]
        self.addresses[number] = buffer.address
        self._in_host[buffer.address] = number
        blocks = host_blocks(buffer)
        self.used_before[number] = {self._last_read[b] for b in blocks if b in self._last_read}
        self.in_use_bytes[self.step] = self.manager.store.host_pool.in_use_bytes
        return number

    def _copy_in(self, copy: Copy) -> int:
        destination, buffer = copy
        number = self._in_host[buffer.address]
        assert destination.storage._cdata in self._returned, "it was allocated after START_IN"
        self._in_device[destination.storage._cdata] = number
        self._last_read.update(dict.fromkeys(host_blocks(buffer), number))
        return number

    # Events of the engine other than backend calls.

    def note_commit(self) -> None:
        known = {number for entry in self.issued[Queue.COMPUTE] for number in entry.storages}
        self._issue(OpKind.WRITE, *(number for number in self._uncommitted if number not in known))
        self._issue(OpKind.SAVE, *(number for number in self._uncommitted if number in known))
        self._uncommitted.clear()

    def note_save(self, saved: Any, tensor: torch.Tensor, group: OffloadTensorGroup) -> None:
        if not isinstance(saved, SavedTensor):
            return
        number = self._numbers.get(saved.storage.serial, len(self._numbers))
        if self._trace is not None:
            position = list(group.held).index(saved.storage.serial)
            number = self._trace.group_by_key[group.key].storages[position]
        assert self._numbers.setdefault(saved.storage.serial, number) == number
        memory = tensor.untyped_storage()._cdata
        self._in_device[memory] = number
        self._returned.discard(memory)
        if number not in self.saved.setdefault(group.key, []):
            self.saved[group.key].append(number)
            self._uncommitted.append(number)

    def note_read(self, saved: Any) -> None:
        if isinstance(saved, SavedTensor):
            number = self._numbers[saved.storage.serial]
            known = (entry[:3] for entry in self.issued[Queue.COMPUTE])
            if (OpKind.USE, self.step, (number,)) not in known:
                self._issue(OpKind.USE, number)


def host_blocks(part: Bytes) -> range:
    """The blocks of the whole buffer that begins with ``part``."""
    start = part.address // BUFFER_ALIGNMENT_BYTES
    return range(start, start + size_class_bytes(part.nbytes) // BUFFER_ALIGNMENT_BYTES)


class _WatchedEngine(OffloadEngine):
    """Reports marks, saves and reads to its backend."""

    def __init__(self, backend: WatchedBackend, options: PolicyOptions) -> None:
        super().__init__(backend, options)
        self._watched = backend
        self.committed: list[OffloadTensorGroup] = []
        """This iteration's groups, in order."""
        self._pack, self._read = self.store.pack, self.store.read
        self.store.pack = self._noting_pack
        self.store.read = self._noting_read

    def start_group(self, name: str) -> None:
        self._watched.step += 1
        super().start_group(name)

    def commit_group(
        self, name: str, given_up: Sequence[torch.Tensor] = ()
    ) -> OffloadTensorGroup | None:
        self._watched.step += 1
        self._watched.note_commit()
        group = super().commit_group(name, given_up)
        assert group is not None
        self.committed.append(group)
        return group

    def use_group(self, group: OffloadTensorGroup) -> None:
        self._watched.step += 1
        super().use_group(group)

    def _noting_pack(self, group: OffloadTensorGroup, tensor: torch.Tensor) -> Any:
        saved = self._pack(group, tensor)
        self._watched.note_save(saved, tensor, group)
        return saved

    def _noting_read(self, saved: Any) -> torch.Tensor:
        tensor = self._read(saved)
        self._watched.note_read(saved)
        return tensor


class WatchedManager(PipelineOffloadManager):
    """The manager of an engine that reports to its backend."""

    def __init__(self, **options: int) -> None:
        self.watched = WatchedBackend()
        engine = _WatchedEngine(self.watched, PolicyOptions(**options))
        super().__init__(engine)
        self.committed = engine.committed
        """This iteration's groups, in order."""
        self.watch(None)

    def watch(self, trace: Trace | None) -> None:
        """Note the next iteration, which matches ``trace`` if given."""
        self.committed.clear()
        self.watched.watch(self, trace)
