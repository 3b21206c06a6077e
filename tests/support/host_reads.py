# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Finds, without a GPU, operations for which the host would wait for one."""

from __future__ import annotations

import contextlib
import functools
import traceback
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_OPERATIONS = frozenset(
    {
        *("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim"),
        *("unique_consecutive", "equal", "is_nonzero", "bincount"),
    }
)
"""Of ATen: their results, or the sizes of these, are read on the host."""
_METHODS = ("cpu", "to", "numpy", "tolist", "item", "__bool__", "__int__", "__float__")
"""Of tensors: on a CPU they need not be operations."""


class HostReads(TorchDispatchMode):
    """Inside, :attr:`found` collects what the host reads of a tensor, and by which line."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._patches = contextlib.ExitStack()

    def __enter__(self) -> HostReads:
        for name in _METHODS:
            method = getattr(torch.Tensor, name)
            self._patches.enter_context(patch.object(torch.Tensor, name, self._noted(method)))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def _noted(self, method: Any) -> Any:
        @functools.wraps(method)
        def noted(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            name = method.__name__
            target = options.get("device", arguments[0] if arguments else None)
            # Without a GPU, torch.device("cpu") stands for one.
            if name != "to" or target == "cpu":
                self.found.append(_seen(name))
            return method(tensor, *arguments, **options)

        return noted

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        by_mask = name in ("index", "index_put_", "index_put") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in arguments[1]
        )
        by_counts = name == "repeat_interleave"
        if name in _OPERATIONS or by_mask or by_counts:
            self.found.append(_seen(name))
        return function(*arguments, **(options or {}))


def _seen(name: str) -> str:
    frames = [
        frame
        for frame in traceback.extract_stack()
        if "/torch/" not in frame.filename and "host_reads" not in frame.filename
    ]
    place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "?"
    return f"{name} at {place}"
