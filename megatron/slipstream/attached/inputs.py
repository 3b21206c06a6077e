# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Offloads the module inputs that checkpoints save.

[Note: Inputs of checkpointed modules]
Of a module inside ``torch.utils.checkpoint``, only the inputs are kept. The checkpoint saves them
outside of the module: before it runs if non-reentrant, after it if reentrant. So hooks around the
whole forward of the model record what is saved. When a chosen module runs inside a checkpoint,
those of its inputs that have been saved, or are saved next, become a group. What a checkpoint
*inside* a chosen module saves belongs to the module's region.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Optional

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.slipstream.attached.engine import AttachedEngine, BackwardHook, VersionCheckedTensor
from megatron.slipstream.fine_grained_activation_offload.group import OffloadTensorGroup
from megatron.slipstream.fine_grained_activation_offload.storage import is_dense


class _Saved:
    """Replaces a tensor that autograd saves outside of regions."""

    __slots__ = ("held", "hook", "__weakref__")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.held: Any = VersionCheckedTensor(tensor)
        """The tensor, or its replacement by the engine."""
        self.hook: Optional[BackwardHook] = None
        """The hook of the group that the tensor is an input of."""

    def lies_in(self, storages: frozenset[StorageWeakRef]) -> bool:
        """Whether it is an unchanged tensor in one of these storages."""
        kept = self.held
        return (
            type(kept) is VersionCheckedTensor
            and _is_plain(kept.tensor)
            and kept.is_intact
            and storage_of(kept.tensor) in storages
        )


def storage_of(tensor: torch.Tensor) -> StorageWeakRef:
    """Return the identity of a tensor's storage, which is unique while the result is alive."""
    return StorageWeakRef(tensor.untyped_storage())


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and is_dense(tensor)


class CheckpointInputs:
    """Collects inputs as described in [Note: Inputs of checkpointed modules] for the engine."""

    def __init__(self, engine: AttachedEngine) -> None:
        self._engine = engine
        self._is_wanted = True
        """Whether to set hooks in the next pass: it is the first, or a chosen module ran in a
        checkpoint in the last one."""
        self._is_seen = False
        """Whether a chosen module has run in a checkpoint in this pass."""
        self.labels: set[str] = set()
        """Labels of modules whose inputs a checkpoint saved while hooks were set."""
        self._hooks: Optional[saved_tensors_hooks] = None
        self._recent: list[weakref.ref[_Saved]] = []
        """Tensors saved since a chosen module last ran."""
        self._ran: list[tuple[str, frozenset[StorageWeakRef]]] = []
        """Labels and input storages of chosen modules that ran without gradients since the last
        tensor was saved: a reentrant checkpoint saves the inputs of the first of them next."""
        self._open: Optional[tuple[str, OffloadTensorGroup, BackwardHook]] = None
        """The group of the reentrant checkpoint that is saving its inputs."""

    # Around the model's forward.

    def start(self) -> None:
        """Call when the model's forward begins without other hooks."""
        if self._is_wanted:
            self._hooks = saved_tensors_hooks(self._pack, self._unpack)
            self._hooks.__enter__()

    def stop(self, is_here: bool = True) -> None:
        """Call when the model's forward ends, in this thread (``is_here``) or one that ended."""
        self.close()
        self._recent.clear()
        if self._hooks is not None and is_here:
            self._hooks.__exit__()
        self._hooks = None
        self._is_wanted, self._is_seen = self._is_seen, False

    def is_own(self, pack: Any) -> bool:
        return self._hooks is not None and pack is self._hooks.pack_hook

    # Around a chosen module's forward.

    def enter_without_gradients(self) -> None:
        """Call when a chosen module starts without gradients while the model runs with them."""
        if self._open is not None:
            self.close()

    def enter(self, label: str, inputs: Iterable[torch.Tensor]) -> None:
        """Call when a chosen module starts under other hooks, most likely a checkpoint's."""
        self.close()
        self._is_seen = True
        if self._hooks is None:
            return
        storages = _storages_of(inputs)
        found = [saved for saved in self._alive() if saved.lies_in(storages)]
        self._recent.clear()
        if found:
            self._begin(label)
            for saved in found:
                self._give(saved)
            self._commit()

    def leave(self, label: str, inputs: Iterable[torch.Tensor]) -> None:
        """Call when a module of :meth:`enter_without_gradients` has run."""
        self._is_seen = True
        if self._hooks is not None:
            self._ran.append((label, _storages_of(inputs)))

    def close(self) -> None:
        """Call when the next chosen module begins or a checkpoint has saved its inputs."""
        self._ran.clear()
        if self._open is not None:
            self._commit()

    # Saved-tensor hooks.

    @torch.compiler.disable
    def _pack(self, tensor: torch.Tensor) -> Any:
        saved = _Saved(tensor)
        if self._ran:
            self._take_from_reentrant(saved)
        self._recent.append(weakref.ref(saved))
        return saved

    @torch.compiler.disable
    def _unpack(self, saved: Any) -> torch.Tensor:
        if saved.hook is not None:
            saved.hook()
        return self._engine.read(saved.held)

    def _take_from_reentrant(self, saved: _Saved) -> None:
        for label, storages in self._ran:
            if saved.lies_in(storages):
                if self._open is None:
                    self._begin(label)
                    for earlier in self._alive():
                        if earlier.lies_in(storages):
                            self._give(earlier)
                self._give(saved)
                return
        self.close()

    # The group of inputs.

    def _begin(self, label: str) -> None:
        name = f"inputs of {label}"
        group = self._engine.begin_inputs(name)
        self.labels.add(label)
        if group is not None:
            self._open = (name, group, BackwardHook(self._engine, group))

    def _give(self, saved: _Saved) -> None:
        if self._open is not None:
            _, group, saved.hook = self._open
            saved.held = self._engine.save(group, saved.held.tensor)

    def _commit(self) -> None:
        if self._open is not None:
            name, group, hook = self._open
            self._open = None
            self._engine.commit_inputs(name, group, hook)

    def _alive(self) -> list[_Saved]:
        return [saved for reference in self._recent if (saved := reference()) is not None]


def _storages_of(inputs: Iterable[torch.Tensor]) -> frozenset[StorageWeakRef]:
    return frozenset(storage_of(tensor) for tensor in inputs if _is_plain(tensor))
