# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""One saved storage: where its bytes are, and what keeps them alive.

Autograd saves tensors, but their storages own the memory, so storages are what moves. All views of
one storage, in any groups, share one :class:`SavedStorage` and so move once. Autograd keeps a
``SavedTensor`` instead of each tensor; the storage lives exactly as long as any of them does, as
without offloading.

[Note: Changes in place]
Autograd refuses to read a saved tensor that was changed in place since it was saved; changes to
other tensors in the same memory do not matter. It detects this with the version counter that a
tensor shares with its views, so a storage keeps each saved tensor's counter even without the
memory.

- Before the D2H copy: the copy has the changed bytes. Tensors saved before the change are refused;
  tensors saved after it are correct.
- Between the D2H copy and the release: the copy is stale, and the storage stays.
- After the release: backward reads the memory itself if it is still referenced. If not, the copy is
  correct for every saved tensor that is not refused. The exception is memory that was changed
  through a tensor with its own version counter (``.data``): if a saved tensor's counter shows the
  change, all are refused; if none does, the change goes undetected.
"""

from __future__ import annotations

import enum
import itertools
import weakref
from collections.abc import Hashable
from typing import NamedTuple, Optional

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.slipstream.fine_grained_activation_offload.backend import Bytes, Here, Stream
from megatron.slipstream.fine_grained_activation_offload.copy_streams import CopyStreams, Signal
from megatron.slipstream.fine_grained_activation_offload.hidden_leaves import (
    LeafReference,
    empty_if_hidden,
    hidden_leaf_candidate,
    refill,
)
from megatron.slipstream.fine_grained_activation_offload.host_pool import HostAllocation, HostPool
from megatron.slipstream.plan.trace import GroupKey

DEVICE_ALIGNMENT_BYTES = 512
"""A copied part of a storage starts at a multiple of this, like every device allocation: kernels
are selected by alignment, and another kernel would round differently."""


class GroupLabel(NamedTuple):
    """A group's position in the iteration and in the model."""

    key: GroupKey
    name: str
    layer: int = 0
    """Number of earlier groups of this name in the pass."""
    micro_batch: int = 0
    """Number of earlier passes through this model chunk in the iteration."""
    vp_stage: int = 0

    def __str__(self) -> str:
        return f"{self.key}.{self.name}"

    def describe(self) -> str:
        return (
            f"{self.name} of layer {self.layer} (of this model chunk, {self.vp_stage}) in "
            f"micro-batch {self.micro_batch}"
        )


class Residence(enum.Enum):
    """Where the bytes are and what keeps them alive."""

    DEVICE = "in their own device memory, kept by the saved aliases, and may be offloaded"
    OFFLOADING = "in their own device memory, kept by the saved aliases, while a copy out reads it"
    STAYS = "in their own device memory, kept by the saved aliases: no copy of it will be read"
    HOST = "in a host buffer, kept by its allocation"
    HELD_OUTSIDE = "in their own device memory, kept by another reference, and in a host buffer"
    RELOADING = "in new device memory that a copy in is writing, kept by this object"
    RELOADED = "in device memory that backward may read, kept by this object"

    __hash__ = object.__hash__  # Enum's own is a Python function, too slow for frequent changes.


_ALLOWED = {
    (Residence.DEVICE, Residence.OFFLOADING),
    (Residence.OFFLOADING, Residence.STAYS),
    (Residence.OFFLOADING, Residence.HOST),
    (Residence.HOST, Residence.RELOADING),
    (Residence.HOST, Residence.HELD_OUTSIDE),
    (Residence.HELD_OUTSIDE, Residence.RELOADED),
    (Residence.HELD_OUTSIDE, Residence.HOST),
    (Residence.RELOADING, Residence.RELOADED),
}

_ON_DEVICE = frozenset({Residence.DEVICE, Residence.OFFLOADING, Residence.STAYS})


_View = tuple[torch.dtype, torch.Size, tuple[int, ...], int]
"""The view of a saved tensor in its storage: dtype, shape, strides and offset."""


def _view_of(tensor: torch.Tensor) -> _View:
    return tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset())


class SavedStorage:
    """The bytes ``[start, stop)`` of one storage that autograd saved."""

    __slots__ = (
        *("serial", "owner", "position", "device", "storage_nbytes", "start", "stop", "nbytes"),
        *("residence", "aliases", "returned", "allocation", "_holders", "streams"),
        *("out_signal", "in_signal", "returned_on", "copied_versions", "pool"),
        "is_given_up",
        *("copied_address", "_views", "_leaves", "_original", "_copies", "__weakref__"),
    )

    _serials = itertools.count()

    def __init__(
        self,
        tensor: torch.Tensor,
        owner: GroupLabel,
        position: int,
        pool: HostPool,
        copies: CopyStreams,
    ) -> None:
        self.serial = next(self._serials)
        self.owner = owner
        """The group that saved it first: reports attribute its moves to this group."""
        self.position = position
        """Index among the owner's storages."""
        self.device = tensor.device
        self.storage_nbytes = tensor.untyped_storage().nbytes()
        self.start, self.stop = self.storage_nbytes, 0
        self.nbytes = 0
        """Bytes that a copy moves, from start to stop; cached because it is read often."""
        self.aliases: list[tuple[torch.Tensor, int]] = []
        """The saved tensors, detached, with their versions when saved. They lose their memory when
        it is released, but still share the version counters of the original tensors."""
        self.returned: Optional[torch.UntypedStorage] = None
        """The device memory that backward reads: a copy, or the original if it stayed alive."""
        self.allocation: Optional[HostAllocation] = None
        self._holders: set[int] = set()
        """Moving groups that have not released it, by serial number; the last one frees it."""
        self.streams: dict[Hashable, Stream] = {}
        """Streams that computed or used the memory, by id."""
        self.out_signal: Optional[Signal] = None
        """The signal after the D2H copy, if any."""
        self.in_signal: Optional[Signal] = None
        """The signal after the H2D copy, if any."""
        self.returned_on: Optional[Here] = None
        """The stream that ``returned`` was allocated on; None if not allocated by the engine."""
        self.is_given_up = False
        """Whether a release frees the memory even if other references exist."""
        self.copied_versions: list[int] = []
        """The version of each alias when the D2H copy began: [Note: Changes in place]."""
        self.copied_address = 0
        """Address of the D2H copy's source."""
        self._views: list[_View] = []
        """Set on release: the views of the aliases, and of tensors saved since."""
        self._leaves: dict[int, LeafReference] = {}
        """Saved leaves by index; after the release, only those whose memory was freed."""
        self._original: Optional[StorageWeakRef] = None
        """Detects other references to the memory after its release. It also keeps torch from
        reusing the address of the storage object, which identifies saved tensors."""
        self.pool = pool
        """The pool of its host buffer."""
        self._copies = copies
        self.residence = Residence.DEVICE  # last, for __del__

    def __del__(self) -> None:
        residence = getattr(self, "residence", None)
        if residence is None:
            return  # __init__ was interrupted.
        # Autograd has freed it, but a copy may still use the device memory.
        if residence is Residence.OFFLOADING:
            self.release()
        elif residence is Residence.RELOADING:
            self._copies.abandon(self.returned, self.in_signal, self.returned_on)
        if self.allocation is not None:
            self.pool.free(self.allocation)

    def move_to(self, residence: Residence) -> None:
        """Change the state; raises ``RuntimeError`` if a storage may not make this transition."""
        if (self.residence, residence) not in _ALLOWED:
            raise RuntimeError(
                f"storage of {self.owner} of {self.nbytes} bytes cannot go from "
                f"{self.residence.name} to {residence.name}"
            )
        if self.returned is not None:
            # Until backward has waited for the copy: an interrupt may end __del__ before it waits.
            if residence is Residence.RELOADING:
                self._copies.keep_until_finished(self.returned)
            elif self.residence is Residence.RELOADING:
                self._copies.keep_no_longer(self.returned)
        self.residence = residence

    def serves(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor``, a view of the same storage, can be saved as part of this one.

        Always before the D2H copy begins; later only if the copy includes its bytes and they have
        not changed since.
        """
        if tensor.untyped_storage().nbytes() != self.storage_nbytes:
            return False
        if self.residence is Residence.DEVICE:
            return True
        if self.is_given_up and not self.is_on_device:
            return False  # The discarded storage's owner may have filled it with other bytes.
        start, stop = _extent(tensor)
        if start < self.start or self.stop < stop or not self.is_copy_current:
            return False
        return tensor._version == self.copied_versions[0]

    def save(self, tensor: torch.Tensor, holder: int) -> int:
        """Add a saved view, for the group with serial number ``holder``. Return its index."""
        index, version = len(self.aliases), tensor._version
        # detach() shares the version counter, so that later in-place changes are detected.
        self.aliases.append((tensor.detach(), version))
        if self.copied_versions:
            self.copied_versions.append(version)
        if self.residence in _ON_DEVICE:
            self._holders.add(holder)
            start, stop = _extent(tensor)
            self.start, self.stop = min(self.start, start), max(self.stop, stop)
            self.nbytes = self.stop - self.start
            leaf = hidden_leaf_candidate(tensor)
            if leaf is not None:
                self._leaves[index] = leaf
        else:
            self._views.append(_view_of(tensor))
            _drop_memory(self.aliases[index][0])
        return index

    def drop_holder(self, holder: int) -> bool:
        """Release it for the group with this serial number. Return whether all groups have."""
        self._holders.discard(holder)
        return not self._holders

    def note_stream(self, stream_id: Hashable, stream: Stream) -> None:
        """Record that a stream computed or used the memory."""
        if stream_id not in self.streams:
            self.streams[stream_id] = stream

    def settle_extent(self) -> None:
        """Fix which bytes move: the whole storage if at least half of it was saved."""
        if 2 * self.nbytes >= self.storage_nbytes:
            self.start, self.stop = 0, self.storage_nbytes
        else:
            self.start -= self.start % DEVICE_ALIGNMENT_BYTES
        self.nbytes = self.stop - self.start

    @property
    def is_on_device(self) -> bool:
        """Whether its bytes are in their original device memory."""
        return self.residence in _ON_DEVICE

    def alias(self, index: int) -> torch.Tensor:
        """Return a saved tensor, detached, backed by its original memory."""
        return self.aliases[index][0]

    def source_bytes(self) -> Bytes:
        return Bytes(self.aliases[0][0].untyped_storage(), self.start, self.nbytes)

    def bytes_to_copy(self) -> Optional[Bytes]:
        """Return the bytes to offload; None if the storage was discarded since it was saved."""
        source = self.source_bytes()
        return source if source.storage.nbytes() == self.storage_nbytes else None

    def note_copy_out(self) -> None:
        """Record that a D2H copy of the current bytes begins."""
        self.copied_versions = [alias._version for alias, _ in self.aliases]
        self.copied_address = self.aliases[0][0].untyped_storage().data_ptr()

    def is_overwritten(self, index: int) -> bool:
        """Return whether a saved tensor was changed in place, so autograd would refuse it."""
        alias, version = self.aliases[index]
        return alias._version != version

    @property
    def is_copy_current(self) -> bool:
        """Whether no saved tensor was changed in place since the D2H copy began."""
        # A loop: a generator would cost a Python call per saved tensor of each group.
        for (alias, _), copied in zip(self.aliases, self.copied_versions, strict=True):
            if alias._version != copied:
                return False
        return True

    @property
    def is_emptied(self) -> bool:
        """Whether the source of the D2H copy has been freed since.

        megatron-core discards outputs this way before it recomputes them. The memory may have been
        overwritten before the copy read it, but discarded tensors are recomputed.
        """
        original = self.aliases[0][0].untyped_storage()
        is_whole = original.nbytes() == self.storage_nbytes
        return not is_whole or original.data_ptr() != self.copied_address

    def release(self, label: str = "") -> None:
        """OFFLOADING to HOST: release the device memory, for which group ``label`` waits."""
        self._copies.before_release(self.out_signal, self.streams, label)
        original = self.aliases[0][0].untyped_storage()
        self._original = StorageWeakRef(original)
        self._views = [_view_of(alias) for alias, _ in self.aliases]
        self.move_to(Residence.HOST)
        for alias, _ in self.aliases:
            _drop_memory(alias)
        # [Note: Hidden leaves]
        hidden = [index for index, leaf in self._leaves.items() if empty_if_hidden(leaf)]
        self._leaves = {index: self._leaves[index] for index in hidden}
        self._copies.drop(original)
        if self.is_given_up:
            self._copies.empty(original)

    @property
    def is_memory_gone(self) -> bool:
        """Whether the released device memory has no reference left."""
        if self.is_given_up:
            return not self.is_on_device
        return self._original is not None and self._original.expired()

    @property
    def is_original_emptied(self) -> bool:
        """Whether the original storage object is alive, but its memory has been freed."""
        original = self.live_original()
        return original is not None and original.nbytes() != self.storage_nbytes

    def live_original(self) -> Optional[torch.UntypedStorage]:
        """Return the original storage if another reference keeps it alive."""
        if self._original is None or self.is_given_up or self._original.expired():
            return None
        return torch.UntypedStorage._new_with_weak_ptr(self._original.cdata)

    def own(self, allocation: HostAllocation) -> None:
        allocation.owner = weakref.ref(self)
        self.allocation = allocation

    def buffer_to_read(self) -> HostAllocation:
        """Return the host buffer for an H2D copy; ``RuntimeError`` after one that failed."""
        if self.allocation is None or self.allocation.in_flight is not None:
            raise RuntimeError(
                f"storage of {self.owner} cannot be reloaded because an earlier reload of it "
                "failed; run forward again"
            )
        return self.allocation

    def take_allocation(self) -> HostAllocation:
        allocation, self.allocation = self.allocation, None
        if allocation is None:
            raise RuntimeError(
                f"storage of {self.owner} has no host buffer in {self.residence.name}"
            )
        return allocation

    def shape_of(self, index: int) -> torch.Size:
        return self._views[index][1] if self._views else self.aliases[index][0].shape

    def view_returned(self, index: int) -> torch.Tensor:
        """Return a saved view of ``returned``, with its original shape, strides and alignment."""
        if self.returned is None:
            raise RuntimeError(f"storage of {self.owner} is in {self.residence.name}")
        dtype, shape, stride, offset = self._views[index]
        if self.returned.nbytes() != self.storage_nbytes:
            offset -= self.start // dtype.itemsize
        empty = torch.empty(0, dtype=dtype, device=self.device)
        view = empty.set_(self.returned, offset, shape, stride)
        if index in self._leaves:
            refill(self._leaves[index], view)
        return view


_empty: dict[torch.device, torch.Tensor] = {}


def _drop_memory(alias: torch.Tensor) -> None:
    """Drop a detached tensor's memory, but keep its version counter."""
    empty = _empty.get(alias.device)
    if empty is None:
        with torch.inference_mode(False):
            empty = _empty[alias.device] = torch.empty(0, device=alias.device)
    alias.data = empty  # keeps the counter, and does not count as a change


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte and last byte + 1 of a strided tensor within its storage."""
    itemsize = tensor.itemsize
    start = int(tensor.storage_offset()) * itemsize
    if tensor.is_contiguous():
        return start, start + tensor.numel() * itemsize
    dims = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in dims)
    return start, start + (last + 1) * itemsize


def is_there(tensor: torch.Tensor) -> bool:
    """Return whether it has its memory: a tensor to be recomputed has none until backward."""
    return _extent(tensor)[1] <= tensor.untyped_storage().nbytes()


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether its elements are in one storage, found there by shape and strides alone.

    Asking other tensors for their storage or address raises an exception (sparse, opaque and
    ``torch.func`` tensors) or returns a storage without bytes (functional and wrapper tensors).
    """
    return (
        tensor.layout is torch.strided
        and torch._C._has_storage(tensor)
        and not (tensor.is_nested or tensor.is_quantized)
        and not torch._is_functional_tensor(tensor)
    )


def memory_of(tensor: torch.Tensor) -> Optional[int]:
    """Return the identity of any tensor's storage while it lives; None if it has none."""
    return tensor.untyped_storage()._cdata if torch._C._has_storage(tensor) else None
