# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Stores autograd's saved tensors, and offloads and reloads them.

Correctness depends on this module and ``copy_streams``. Each operation checks the state of its
storage, so backward gets the bytes that forward saved whatever the order of calls.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, Optional, Protocol

import torch
from torch.autograd import forward_ad

from megatron.slipstream.fine_grained_activation_offload.backend import Backend, Bytes
from megatron.slipstream.fine_grained_activation_offload.chunk import ChunkOffloadHandler
from megatron.slipstream.fine_grained_activation_offload.copy_streams import CopyStreams
from megatron.slipstream.fine_grained_activation_offload.counted_modules import CountedModules
from megatron.slipstream.fine_grained_activation_offload.group import (
    GroupState,
    OffloadTensorGroup,
    SavedTensor,
)
from megatron.slipstream.fine_grained_activation_offload.host_pool import HostMemoryFull, HostPool
from megatron.slipstream.fine_grained_activation_offload.markers import mark
from megatron.slipstream.fine_grained_activation_offload.recorder import Recorder
from megatron.slipstream.fine_grained_activation_offload.report import ModuleCounters
from megatron.slipstream.fine_grained_activation_offload.storage import (
    Residence,
    SavedStorage,
    is_dense,
    is_there,
    memory_of,
)
from megatron.slipstream.fine_grained_activation_offload.verify import Verifier
from megatron.slipstream.plan.actions import Plan
from megatron.slipstream.plan.staying import Staying
from megatron.slipstream.plan.trace import GroupKey, StepKind

MIN_KNOWN = 4096
"""Minimum number of addresses before those of freed storages, which hold no memory, are purged."""


@dataclass
class CaptureContext:
    """What a capture does not share with the iterations around it."""

    host_pool: HostPool
    modules: defaultdict[str, ModuleCounters] = field(
        default_factory=partial(defaultdict, ModuleCounters)
    )
    verifier: Optional[Verifier] = None


class Marks(Protocol):
    """The marks of a group and of the output layer: see the engine's methods of the same names.

    Each returns whether it has handled the mark. If not, it has had no effect.
    """

    def start(self, engine: Any, tensor: torch.Tensor, name: str) -> bool:
        """Start a group whose input is ``tensor``."""

    def enter(self, engine: Any, flag: Any) -> bool:
        """Enter the region of the last started group; ``flag`` is a ``RegionFlag`` or None."""

    def leave(self, flag: Any) -> bool:
        """Leave the last entered region."""

    def end(self, engine: Any, tensor: torch.Tensor, name: str) -> Optional[torch.Tensor]:
        """End a group at its output. Return the marked output; None if it is not handled."""

    def mark_output(self, engine: Any, kind: StepKind) -> bool:
        """Mark the output layer in forward."""

    def mark_gradient(self, engine: Any, kind: StepKind, tensors: list[torch.Tensor]) -> bool:
        """Mark the first gradient of any of the tensors."""


class MarksInPython:
    """Leaves all marks to the engine."""

    def _leave_to_engine(self, *_: Any) -> Any:
        return None

    start = enter = leave = end = mark_output = mark_gradient = _leave_to_engine


class ActivationStore:
    """Saves, offloads and reloads storages. Callers decide which and when.

    This one does so in Python; ``native_store`` leaves the common cases to C++ (``native``).
    """

    is_native = False
    saved_type: type[Any] = SavedTensor
    """Type of the object that autograd keeps instead of a tensor that may move."""

    def __init__(self, backend: Backend, recorder: Recorder, native: Any = None) -> None:
        self.backend = backend
        self._classes = native
        self.copy_streams = CopyStreams(backend, None if native is None else native.Waits(backend))
        self._outside = CaptureContext(self.new_host_pool())
        self._context = self._outside
        self.marks: Marks = MarksInPython()
        """What handles the marks of an iteration that follows its plan."""
        self.entered: list[Optional[bool]] = []
        """Stack of the regions that are entered, in Python or in C++: the previous value of the
        region's flag, or None for a region without saved-tensor hooks."""
        self.late_groups: dict[GroupKey, int] = {}
        """This iteration's number of late H2D copies, by the group that first saved the storage."""
        self._crosses_streams = False
        self._recorder = recorder
        self._max_known = MIN_KNOWN
        """Number of addresses above which those of freed storages are purged."""
        self._by_memory: dict[int, weakref.ref[SavedStorage]] = {}
        """The storages by the address of torch's storage object, which is not reused while the
        storage lives. (WeakValueDictionary's methods are Python functions, too slow for a lookup
        per saved tensor.)"""

    def end_iteration(self) -> CountedModules:
        """Purge the addresses of freed storages, and reset the counters. Return their values."""
        # Not in every iteration: later storages mostly reuse the same addresses.
        if len(self._by_memory) > self._max_known:
            found = self._by_memory.items()
            alive = {memory: known for memory, known in found if known() is not None}
            self._by_memory = alive
            self._max_known = MIN_KNOWN + 2 * len(alive)
        counted = CountedModules(self._context.modules, self.late_groups)
        self._context.modules, self.late_groups = defaultdict(ModuleCounters), {}
        return counted

    # What a capture has of its own.

    def begin_capture(self, context: CaptureContext) -> None:
        self._add_counts()
        self._context = context
        self._note_settings()

    def end_capture(self) -> None:
        self.begin_capture(self._outside)

    @property
    def host_pool(self) -> HostPool:
        return self._context.host_pool

    @host_pool.setter
    def host_pool(self, pool: HostPool) -> None:
        self._context.host_pool = pool
        self._note_settings()

    def new_host_pool(self, limit_bytes: Optional[int] = None) -> HostPool:
        """Return a pool whose buffers this store can use."""
        return HostPool(self.backend, limit_bytes, self._classes)

    @property
    def modules(self) -> defaultdict[str, ModuleCounters]:
        self._add_counts()
        return self._context.modules

    @property
    def verifier(self) -> Optional[Verifier]:
        """Compares reloaded bytes with offloaded bytes; None if verification is off."""
        return self._context.verifier

    @verifier.setter
    def verifier(self, verifier: Optional[Verifier]) -> None:
        self._context.verifier = verifier
        self._note_settings()

    def stop_verifying(self) -> None:
        if self.verifier is not None:
            self.verifier.stop()
            self.verifier = None

    @property
    def crosses_streams(self) -> bool:
        """Whether models read memory on streams other than its own: those that run in nodes."""
        return self._crosses_streams

    @crosses_streams.setter
    def crosses_streams(self, crosses_streams: bool) -> None:
        self._crosses_streams = crosses_streams
        self._note_settings()

    def _note_settings(self) -> None:
        """Called when the host pool or a setting has changed."""

    def _add_counts(self) -> None:
        """Add the counts from C++ to :attr:`modules`."""

    # Passes.

    def make_pass(
        self, index: int, vp_stage: int, min_numel: int, micro_batch: int
    ) -> ChunkOffloadHandler:
        """Create a pass; takes the arguments of ``ChunkOffloadHandler``."""
        return ChunkOffloadHandler(index, vp_stage, min_numel, micro_batch)

    def compile_steps(self, plan: Plan) -> Optional[Any]:
        """Compile a plan's steps for C++; None if Python runs them."""
        return None

    # Marks in the autograd graph.

    def mark(self, tensor: torch.Tensor, come: Callable[[], object]) -> torch.Tensor:
        """Return ``tensor`` with a graph node that calls ``come`` when backward reaches it."""
        return mark(tensor, come)

    def call_before(self, tensor: torch.Tensor, come: Callable[..., object]) -> None:
        """Call ``come`` when backward reaches the operation that computed ``tensor``."""
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(come)

    # Saved-tensor hooks.

    def hooks(
        self, group: Optional[OffloadTensorGroup], reader: Any
    ) -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
        """Return autograd's pack and unpack hooks for a region of ``group``; None: all stays.

        ``reader.read`` reads the saved tensors (with C++, those that it does not handle). Only the
        hook references it, not the store, so that an engine is freed with its last graph.
        """
        return partial(self.pack, group), reader.read

    def is_own_hook(self, pack: Any) -> bool:
        """Return whether this is an engine's pack hook."""
        return getattr(getattr(pack, "func", None), "__func__", None) is ActivationStore.pack

    def pack(self, group: Optional[OffloadTensorGroup], tensor: torch.Tensor) -> Any:
        """Pack ``tensor``, saved in a region of ``group``. Return what autograd keeps instead."""
        if group is None:
            return _keep(tensor)
        if type(tensor) is not torch.Tensor:
            # Subclasses (parameters, quantised and distributed tensors) hold memory that they do
            # not own.
            group.kinds_staying |= _kind_of_subclass(tensor).bit
            return tensor
        kind = self._why_it_stays(tensor)
        if kind is not None:
            group.kinds_staying |= kind.bit
            return _keep(tensor)
        memory = tensor.untyped_storage()._cdata
        known = self._by_memory.get(memory)
        storage = None if known is None else known()
        if storage is None or not storage.serves(tensor):
            kind = _why_its_storage_stays(tensor, group.min_numel)
            if kind is not None:
                group.kinds_staying |= kind.bit
                return _keep(tensor)
            position = len(group.held)
            storage = SavedStorage(tensor, group.label, position, self.host_pool, self.copy_streams)
            self._by_memory[memory] = weakref.ref(storage)
        if storage.serial not in group.held:
            group.hold(storage)
        stream_id = self.backend.current_stream_id()
        if stream_id not in storage.streams:
            storage.note_stream(stream_id, self.backend.current_stream())
        return SavedTensor(storage, storage.save(tensor, group.serial), group)

    def read(self, saved: Any) -> torch.Tensor:
        """Unpack a saved tensor, on the stream of the operation that reads it.

        Raises ``RuntimeError`` if the tensor was changed in place after it was saved.
        """
        if type(saved) is not self.saved_type:
            return saved
        storage, index = saved.storage, saved.index
        if storage.is_overwritten(index):
            _refuse(saved)
        if storage.residence is Residence.OFFLOADING:
            self._call_back(storage)  # backward needs it before its release
        if storage.is_on_device:
            return storage.alias(index)
        if storage.residence is Residence.HOST:
            self.copy_in([storage], late=True)
        if storage.residence is Residence.HELD_OUTSIDE:
            self._settle_original(storage)
        if storage.returned_on is not None and not storage.is_copy_current:
            _refuse(saved)  # changed through another version counter, in memory since freed
        stream_id = self.backend.current_stream_id()
        if storage.in_signal is not None:
            self.copy_streams.before_use(storage.in_signal, stream_id, storage.owner.name)
            if storage.residence is Residence.RELOADING:
                storage.move_to(Residence.RELOADED)
                if self.verifier is not None:
                    self.verifier.reads(storage, self.copy_streams.finish)
        returned = storage.view_returned(index)
        if storage.returned_on is not None and storage.returned_on[0] != stream_id:
            self.copy_streams.note_read(returned)
        return returned

    def _find(self, memory: int) -> Optional[SavedStorage]:
        known = self._by_memory.get(memory)
        return None if known is None else known()

    def _why_it_stays(self, tensor: torch.Tensor) -> Optional[Staying]:
        """Return why a plain tensor of any size cannot move; None if it can."""
        if not self.backend.manages(tensor):
            return Staying.ELSEWHERE
        if not is_dense(tensor):
            return Staying.NESTED if tensor.is_nested else Staying.NOT_DENSE
        if tensor.numel() == 0:
            return Staying.EMPTY
        if tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor():
            return Staying.LAZY
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
            return Staying.DUAL
        # Set by megatron-core on parameters and by Transformer Engine on weights. Not getattr(),
        # which raises an exception internally if the attribute is missing.
        attributes = tensor.__dict__
        if attributes.get("_do_not_offload") or attributes.get("_TE_do_not_offload"):
            return Staying.MARKED
        return None

    # Moves, in the compute stream's order.

    def commit(self, group: OffloadTensorGroup) -> None:
        """Fix which bytes of the group's storages would move, once it has saved everything."""
        for storage in group.storages():
            if storage.residence is Residence.DEVICE:
                storage.settle_extent()
            group.nbytes[storage.serial] = storage.nbytes

    def give_up(self, group: OffloadTensorGroup, tensors: Iterable[torch.Tensor]) -> None:
        """Free the memory of these tensors on release, even if other references exist.

        Forward no longer reads them, and backward only as saved tensors; others are skipped.
        """
        addresses = {memory_of(tensor) for tensor in tensors}
        for storage in group.storages():
            if storage.is_on_device and storage.source_bytes().storage._cdata in addresses:
                storage.is_given_up = True

    def copy_out(
        self,
        group: OffloadTensorGroup,
        may_move: Optional[Callable[[int, SavedStorage], bool]] = None,
        kept: Container[int] = (),
        numbers: Optional[Sequence[int]] = None,
    ) -> None:
        """Start offloading the group's storages that have not been copied yet.

        If host memory does not suffice for all of them, none is copied: the group stays.

        Args:
            group: A committed group.
            may_move: Whether a storage may move, given its position in the group and the storage.
            kept: Positions of storages that stay.
            numbers: By position, the index of each of the group's storages in the trace of the
                plan whose host layout is followed; None if none is followed.
        """
        storages, sources, planned = [], [], []
        for position, storage in enumerate(group.storages_or_none()):
            if storage is None or storage.residence is not Residence.DEVICE:
                continue
            storage.settle_extent()  # Another group may have saved more of it since the commit.
            source = storage.bytes_to_copy()
            may = position not in kept and (may_move is None or may_move(position, storage))
            if source is not None and may:
                storages.append(storage)
                sources.append(source)
                # A storage that is not in the trace gets its buffer from the pool.
                planned.append(numbers[position] if numbers and position < len(numbers) else -1)
        if not storages:
            return
        if not self._allocate(storages, planned):
            self.modules[group.name].num_kept_for_host_memory += 1
            return
        current_id, current = self.backend.here()
        producers = {current_id: current}
        moves = []
        for storage, source in zip(storages, sources, strict=True):
            storage.note_stream(current_id, current)
            if len(storage.streams) > 1:
                producers.update(storage.streams)
            storage.note_copy_out()
            assert storage.allocation is not None
            moves.append((source, storage.allocation))
        if self.crosses_streams:
            for source in sources:
                self.copy_streams.note_copy_out(source)
        verify = None
        if self.verifier is not None:
            verify = partial(self.verifier.leaves, storages, self.copy_streams.d2h)
        signal = self.copy_streams.copy_out(moves, producers, before=verify)
        counters = self.modules[group.name]
        counters.num_groups_moved += 1
        counters.d2h_copies += len(moves)
        for storage in storages:
            storage.out_signal = signal
            storage.move_to(Residence.OFFLOADING)
            counters.d2h_bytes += storage.nbytes

    def release(self, group: OffloadTensorGroup) -> None:
        """Release the group's storages; the last holder's release frees the memory."""
        for storage in group.storages():
            is_last = storage.drop_holder(group.serial)
            if is_last and storage.residence is Residence.OFFLOADING:
                if storage.is_emptied:
                    self._stay_for_recomputation(storage)
                    continue
                if not storage.is_copy_current:
                    self._stay(storage)  # The copy is out of date.
                    continue
                storage.release(group.name)
                if self._recorder.reads_memory:
                    self._recorder.set_absent(storage)

    def release_all(self, groups: Iterable[OffloadTensorGroup]) -> None:
        """Release those of ``groups`` that are being offloaded."""
        for group in groups:
            if group.state is GroupState.COMMITTED:
                self.release(group)

    def before_discard(self, tensor: torch.Tensor) -> None:
        """Note that the storage of ``tensor`` is discarded now, and recomputed before it is read.

        A D2H copy in flight is useless: it may read whatever is written there from now on.
        """
        memory = memory_of(tensor)
        storage = None if memory is None else self._find(memory)
        if storage is not None and storage.residence is Residence.OFFLOADING:
            self._stay_for_recomputation(storage)

    def _stay_for_recomputation(self, storage: SavedStorage) -> None:
        """OFFLOADING to STAYS: the storage is discarded, and recomputed before it is read."""
        self._recorder.set_recomputed(storage)
        self._stay(storage)

    def _stay(self, storage: SavedStorage) -> None:
        """OFFLOADING to STAYS: backward will not read the copy."""
        self._call_back(storage)
        self._recorder.set_returned(storage, was_held_outside=True)

    def _call_back(self, storage: SavedStorage) -> None:
        """OFFLOADING to STAYS; later work waits for the D2H copy before the memory is released."""
        self.copy_streams.follow_copy_out(storage.out_signal, storage.streams, storage.owner.name)
        storage.move_to(Residence.STAYS)
        storage.pool.free(storage.take_allocation())

    def copy_in_group(self, group: OffloadTensorGroup) -> None:
        self.copy_in(group.storages())

    def copy_in(self, storages: Iterable[SavedStorage], late: bool = False) -> None:
        """Start reloading the storages on the host; ``late`` if backward needs them already."""
        returning = []
        for storage in storages:
            if storage.residence is not Residence.HOST:
                continue
            if not self._find_original(storage):
                if self._recorder.reads_memory:
                    self._recorder.set_returned(storage, was_held_outside=False)
                returning.append(storage)
        if not returning:
            return
        self._start_copies_in(returning)
        for storage in returning:
            counters = self.modules[storage.owner.name]
            counters.freed_bytes += storage.nbytes
            counters.num_late += late
            if late:
                key = storage.owner.key
                self.late_groups[key] = self.late_groups.get(key, 0) + 1

    def _find_original(self, storage: SavedStorage) -> bool:
        """HOST to HELD_OUTSIDE, if another reference kept the memory. Return whether one did.

        Without the engine, backward would read this memory too, including later changes. It may be
        empty until a recomputation fills it. The host buffer is kept until backward reads.
        """
        original = storage.live_original()
        if original is None:
            return False
        self._recorder.set_returned(storage, was_held_outside=True)
        storage.returned = original
        storage.move_to(Residence.HELD_OUTSIDE)
        return True

    def trim_host_memory(self, nbytes: int) -> None:
        """Replace all host memory with one slab of ``nbytes`` bytes; nothing may be in use.

        Blocks the host until every copy has completed, and while the slab is pinned.
        """
        self.copy_streams.finish()
        self.host_pool.trim_to(nbytes)

    def recover(self) -> None:
        """Free the memory that an exception has left in use. Call before each iteration."""
        if self.copy_streams.keeps_memory:
            self.copy_streams.finish()
        if not self.host_pool.is_idle:
            self.host_pool.recover(self.copy_streams.finish)

    def close(self) -> None:
        """Free the host memory. Saved tensors cannot be read afterwards."""
        self.copy_streams.finish()
        self.host_pool.close()

    def _allocate(self, storages: Sequence[SavedStorage], numbers: Sequence[int]) -> bool:
        """Give each storage a host buffer. If memory does not suffice for all, return False."""
        try:
            for storage, number in zip(storages, numbers, strict=True):
                _free_buffer(storage)  # of a D2H copy that failed
                planned = storage.pool.allocate_planned(number, storage.nbytes)
                storage.own(planned or storage.pool.allocate(storage.nbytes))
        except HostMemoryFull:
            for storage in storages:
                _free_buffer(storage)
            return False
        return True

    def _start_copies_in(self, storages: Sequence[SavedStorage]) -> None:
        # Allocate everything before any state changes: the device may be out of memory.
        memory = [self.backend.allocate_device(s.nbytes, s.device) for s in storages]
        moves = [
            (Bytes(returned, 0, storage.nbytes), storage.buffer_to_read())
            for storage, returned in zip(storages, memory, strict=True)
        ]
        verify = None
        if self.verifier is not None:
            for storage, returned in zip(storages, memory, strict=True):
                storage.returned = returned
            verify = partial(self.verifier.returns, storages, self.copy_streams.h2d)
        copied_out = [s.out_signal for s in storages if s.out_signal is not None]
        here = self.backend.here()
        signal = self.copy_streams.copy_in(moves, copied_out, here, after=verify)
        for storage, (destination, allocation) in zip(storages, moves, strict=True):
            storage.returned, storage.in_signal = destination.storage, signal
            storage.returned_on = here
            storage.move_to(Residence.RELOADING)
            allocation.in_flight = None
            _free_buffer(storage)
            counters = self.modules[storage.owner.name]
            counters.h2d_bytes += destination.nbytes
            counters.h2d_copies += 1

    def _settle_original(self, storage: SavedStorage) -> None:
        """Use the original memory unless it was permanently discarded; then reload the copy."""
        if storage.returned is not None and storage.returned.nbytes() == storage.storage_nbytes:
            storage.move_to(Residence.RELOADED)
            storage.pool.free(storage.take_allocation())
            return
        storage.returned = None
        storage.move_to(Residence.HOST)
        self._start_copies_in([storage])


def _free_buffer(storage: SavedStorage) -> None:
    if storage.allocation is not None:
        storage.pool.free(storage.take_allocation())


def _why_its_storage_stays(tensor: torch.Tensor, min_numel: int) -> Optional[Staying]:
    """Return why the storage of a tensor that may move cannot; None if it can."""
    base = tensor._base  # A parameter's transpose, say, is a plain tensor.
    if base is not None and isinstance(base, torch.nn.Parameter):
        return Staying.PARAMETER
    if not is_there(tensor):
        return Staying.DISCARDED
    if tensor.untyped_storage().nbytes() // tensor.itemsize < min_numel:
        return Staying.SMALL
    return None


def _kind_of_subclass(tensor: torch.Tensor) -> Staying:
    if isinstance(tensor, torch.nn.Parameter):
        return Staying.PARAMETER
    return Staying.NESTED if tensor.is_nested else Staying.SUBCLASS


def _keep(tensor: torch.Tensor) -> torch.Tensor:
    """Return what autograd keeps for a tensor that stays on the device.

    An output saved by its own operation must not keep its graph: the reference cycle would never be
    freed. A leaf is kept as is, since operations read attributes of parameters.
    """
    is_plain_result = type(tensor) is torch.Tensor and tensor.grad_fn is not None
    return tensor.detach() if is_plain_result else tensor


def _refuse(saved: SavedTensor) -> NoReturn:
    raise RuntimeError(
        f"a tensor of shape {list(saved.storage.shape_of(saved.index))} that "
        f"{saved.group.label.describe()} saved for backward was changed by an in-place operation; "
        "change a copy of it instead"
    )
