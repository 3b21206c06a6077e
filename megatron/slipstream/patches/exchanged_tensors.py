# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Keep tensors exchanged point to point alive while a pass before a capture is measured.

See [Note: Exchanged tensors stay during capture].
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

_kept: list[list[torch.Tensor]] = []
"""One list for each open context, the innermost last."""


# ``batch_isend_irecv`` compares the function of torch.distributed with that of another module, so
# both must be the same object.
@functools.cache
def keep_tensors(exchange: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``isend`` or ``irecv``."""

    @functools.wraps(exchange)
    def wrapper(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        if _kept:
            _kept[-1].append(tensor)
        return exchange(tensor, *arguments, **options)

    return wrapper


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Keep exchanged tensors alive inside this context, if the patches are applied."""
    _kept.append([])
    try:
        yield
    finally:
        _kept.pop()
