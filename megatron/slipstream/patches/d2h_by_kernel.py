# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Copy the token dispatcher's small tensors without queueing behind the engine's large copies.

megatron-core's dispatcher copies token counts to the host, about a hundred bytes, and the host
waits for them in every expert layer. One copy engine of the GPU serves all copies to the host, of
any stream, priority or size, in issue order, so the host waits milliseconds for activations and
launches nothing meanwhile. A kernel that writes the counts into pinned memory needs no copy engine:
70 us instead of 4360 us behind 256 MiB (docs/design/overhead.md).
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

SLOT_NUMEL = 256
"""Maximum number of elements of a copy; larger ones still use the copy engine."""

_DTYPES = (torch.int64, torch.int32)

_Kind = tuple[torch.dtype, int, int]
"""Dtype, device and stream of the kernels that use a slot."""


class _Slot(NamedTuple):
    host: torch.Tensor
    device: torch.Tensor


class D2HByKernel:
    """Replaces ``maybe_move_tensor_to_cpu`` of megatron-core's token dispatcher, ``original``."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self._original = original
        self._free: defaultdict[_Kind, deque[_Slot]] = defaultdict(deque)
        self._in_use: dict[int, tuple[weakref.ref[Any], _Kind, _Slot]] = {}
        """Slots in use by the identity of a weak reference, whose callback frees the slot."""

    def __call__(self, tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        """Return a copy of a GPU tensor in host memory, valid once the current stream reaches it.

        All but small integer GPU tensors are left to megatron-core. ``record_stream`` keeps the
        tensor's memory until the current stream reaches the copy.
        """
        if not (
            torch.is_tensor(tensor)
            and tensor.is_cuda
            and tensor.dtype in _DTYPES
            and 0 < tensor.numel() <= SLOT_NUMEL
            and not torch.cuda.is_current_stream_capturing()
        ):
            return self._original(tensor, as_numpy=as_numpy, record_stream=record_stream)
        device = tensor.device.index
        kind = (tensor.dtype, device, torch._C._cuda_getCurrentRawStream(device))
        free = self._free[kind]
        slot = free.popleft() if free else _new_slot(tensor.dtype)
        numel = tensor.numel()
        # An addition, because a copy between two tensors would use a copy engine after all.
        torch.add(tensor.reshape(-1), 0, out=slot.device[:numel])
        result: Any = slot.host[:numel].view(tensor.shape)
        if as_numpy:
            result = result.numpy()
        reference = weakref.ref(result, self._return)
        self._in_use[id(reference)] = (reference, kind, slot)
        if record_stream:
            tensor.record_stream(torch.cuda.current_stream())  # edge E8
        return result

    def _return(self, reference: weakref.ref[Any]) -> None:
        # The kernel that writes this value may not have run yet, but the next one to write the slot
        # follows in the same stream.
        _, kind, slot = self._in_use.pop(id(reference))
        self._free[kind].append(slot)


class _DeviceView:
    """Exposes pinned memory so that torch can create a GPU tensor from it."""

    def __init__(self, host: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(host.shape),
            "typestr": f"<i{host.element_size()}",
            "data": (host.data_ptr(), False),
            "version": 3,
        }


def _new_slot(dtype: torch.dtype) -> _Slot:
    host = torch.empty(SLOT_NUMEL, dtype=dtype, pin_memory=True)
    return _Slot(host, torch.as_tensor(_DeviceView(host), device="cuda"))
