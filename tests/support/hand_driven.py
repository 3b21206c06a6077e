# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A store whose groups are saved and moved by hand, to test one situation at a time."""

from __future__ import annotations

from typing import Any

import torch

from megatron.slipstream.fine_grained_activation_offload.engine_setup import make_backend
from megatron.slipstream.fine_grained_activation_offload.group import OffloadTensorGroup
from megatron.slipstream.fine_grained_activation_offload.native_store import make_store
from megatron.slipstream.fine_grained_activation_offload.recorder import Recorder
from megatron.slipstream.plan.trace import GroupKey

LAZY_NATIVE = "cpu-lazy, native"
"""The backend that runs copies as late as possible, with the hooks in C++."""


def is_native_run(name: str) -> tuple[str, bool]:
    """The backend's name, and whether the hooks in C++ run."""
    backend, _, native = name.partition(", ")
    return backend, bool(native)


class HandDriven:
    """A store on the backend of that name; with ", native" after it, the one in C++."""

    def __init__(self, backend: str = "cpu-lazy") -> None:
        backend, is_native = is_native_run(backend)
        self.backend = make_backend(backend)
        self.recorder = Recorder(self.backend)
        self.recorder.reads_memory = not is_native  # reading memory disables the hooks in C++
        self.store = make_store(self.backend, self.recorder, is_native)
        self._pass = self.store.make_pass(0, 0, 1, 0)
        self.groups: dict[GroupKey, OffloadTensorGroup] = {}

    def group(self, name: str = "group") -> OffloadTensorGroup:
        """A new group."""
        group = self._pass.open_group(name)
        self.groups[group.key] = group
        return group

    def save(self, group: OffloadTensorGroup, *tensors: torch.Tensor, min_numel: int = 1) -> Any:
        """The objects that autograd keeps instead of ``tensors``; a single one if there is one."""
        group.min_numel = min_numel
        saved = [self.store.pack(group, tensor) for tensor in tensors]
        return saved[0] if len(saved) == 1 else saved

    def unpack(self, saved: Any) -> torch.Tensor:
        """Unpack a saved object as autograd does."""
        return self.store.hooks(None, self.store)[1](saved)

    def copy_out(self, group: OffloadTensorGroup) -> None:
        """Commit the group and start its copies out."""
        self.store.commit(group)
        self.store.copy_out(group)

    def send(self, group: OffloadTensorGroup) -> None:
        """Copy the group out and release its device memory."""
        self.copy_out(group)
        self.store.release(group)

    def copy_in(self, group: OffloadTensorGroup) -> None:
        """Start copying the group's storages back."""
        self.store.copy_in_group(group)

    @property
    def copies(self) -> int:
        """Number of copies out so far."""
        return sum(counters.d2h_copies for counters in self.store.modules.values())
