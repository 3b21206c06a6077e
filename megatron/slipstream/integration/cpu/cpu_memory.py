# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""``torch.cuda.max_memory_allocated`` for a machine without a GPU."""

from __future__ import annotations

import functools
import time
import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.slipstream.fine_grained_activation_offload.storage import memory_of

GLOO_RELEASES_S = 0.0005
"""After a collective returns, gloo's thread keeps its tensors alive for about 0.15 ms."""
MAX_RELEASES = 8
"""Maximum waits of :data:`GLOO_RELEASES_S` for a new peak: the thread may be waiting for a CPU."""


class DeviceMemoryMeter(TorchDispatchMode):
    """Counts the bytes of live CPU tensors, as if the CPU were the device.

    Use as a context manager: every storage that an operation creates inside it counts until it is
    freed, once regardless of how many tensors view it. Storages that existed before do not count.
    Memory that represents the *host* (an engine's staging buffers) does not count either, since no
    operation of torch creates it.

    Limitations: counts only the thread that entered it (autograd on the CPU runs there as well). A
    storage that is resized in place keeps its first size, unless :meth:`note_size` is called.
    Tensors without a storage (sparse, opaque) do not count. A gloo thread keeps what it reduces or
    gathers alive for 0.1 ms longer, which may raise the peak. Costs about 40 us per operation.
    """

    def __init__(self) -> None:
        super().__init__()
        # Storages by identity. A weak reference keeps its callback but not the storage alive.
        self._live: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._allocated_bytes = 0
        self._peak_bytes = 0
        self._gloo_holds = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would wrap each operation in a guard against compiling it, which costs as much as
        # counting it. Nothing is compiled when the CPU emulates a device.
        return False

    @property
    def allocated_bytes(self) -> int:
        return self._allocated_bytes

    @property
    def peak_bytes(self) -> int:
        """Maximum of live bytes since the start or the last :meth:`reset_peak`."""
        return self._peak_bytes

    def reset_peak(self) -> None:
        self._peak_bytes = self._allocated_bytes

    def note_size(self, storage: torch.UntypedStorage) -> None:
        """Update the size of a storage that was resized in place."""
        entry = self._live.get(storage._cdata)
        if entry is not None:
            self._live[storage._cdata] = (entry[0], storage.nbytes())
            self._allocated_bytes += storage.nbytes() - entry[1]
            self._note_peak()

    def _note_peak(self) -> None:
        if self._allocated_bytes > self._peak_bytes:
            if self._gloo_holds:
                for _ in range(MAX_RELEASES):
                    time.sleep(GLOO_RELEASES_S)
                    if self._allocated_bytes <= self._peak_bytes:
                        break
                self._gloo_holds = False
            self._peak_bytes = max(self._peak_bytes, self._allocated_bytes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs) if kwargs else func(*args)
        if _returns_arguments_only(func):
            return result
        if func.namespace == "c10d":
            self._gloo_holds = True
        outputs = result if isinstance(result, (tuple, list)) else (result,)
        for output in outputs:
            if isinstance(output, torch.Tensor):
                self._see(output, args, kwargs)
            elif isinstance(output, (tuple, list)):
                for inner in output:
                    if isinstance(inner, torch.Tensor):
                        self._see(inner, args, kwargs)
        return result

    def _see(self, output: torch.Tensor, args: Any, kwargs: Any) -> None:
        """Count the storage of an operation's result unless it was passed to the operation.

        So storages that existed before, or that no operation created, are never counted later.
        """
        key = memory_of(output)
        # The second saves the search below.
        if key is None or key in self._live:
            return
        if _holds(args, key) or (kwargs and _holds(kwargs.values(), key)):
            return
        storage = output.untyped_storage()
        num_bytes = storage.nbytes()
        self._live[key] = (weakref.ref(storage, functools.partial(self._freed, key)), num_bytes)
        self._allocated_bytes += num_bytes
        self._note_peak()

    def _freed(self, key: int, _: Any) -> None:
        entry = self._live.pop(key, None)
        if entry is not None:
            self._allocated_bytes -= entry[1]


@functools.cache
def _returns_arguments_only(func: Any) -> bool:
    """Whether all that an operation returns has storages of its arguments, such as a view.

    What consists of other operations, such as ``reshape``, may copy although its schema names an
    alias. Communication never counts as such: its tensors live longer.
    """
    return (
        func.namespace != "c10d"
        and not func._can_decompose()
        and all(output.alias_info is not None for output in func._schema.returns)
    )


def _holds(values: Any, key: int) -> bool:
    """Return whether an operation's arguments have a tensor with this storage."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if memory_of(value) == key:
                return True
        elif isinstance(value, (tuple, list)) and _holds(value, key):
            return True
    return False
