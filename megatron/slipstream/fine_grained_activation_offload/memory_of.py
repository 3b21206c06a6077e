# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Which tensors have memory of their own.

Asking other tensors for their storage or address raises an exception (sparse, opaque and
``torch.func`` tensors) or returns a storage without bytes (functional and wrapper tensors).
"""

from __future__ import annotations

from typing import Optional

import torch


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether its elements are in one storage, found there by shape and strides alone."""
    return (
        tensor.layout is torch.strided
        and torch._C._has_storage(tensor)
        and not (tensor.is_nested or tensor.is_quantized)
        and not torch._is_functional_tensor(tensor)
    )


def memory_of(tensor: torch.Tensor) -> Optional[int]:
    """Return the identity of its storage, which is not reused while the storage lives.

    None if it has no storage. Works for tensors of any kind.
    """
    return tensor.untyped_storage()._cdata if torch._C._has_storage(tensor) else None
