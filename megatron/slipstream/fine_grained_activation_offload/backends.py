# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The backends by name."""

from __future__ import annotations

import torch

from megatron.slipstream.fine_grained_activation_offload.backend import Backend
from megatron.slipstream.fine_grained_activation_offload.cpu_backends import (
    CpuBackend,
    LazyCpuBackend,
)
from megatron.slipstream.fine_grained_activation_offload.cuda_backend import CudaBackend


def make_backend(name: str) -> Backend:
    """Create the backend of that name; 'auto' is 'cuda' if torch sees a GPU, else 'cpu'.

    Raises:
        ValueError: The name is 'cuda' and torch sees no GPU, or the name is unknown.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "offload_backend='cuda' is not supported here because torch sees no GPU; set "
            "offload_backend='auto', or 'cpu' to imitate one in host memory"
        )
    kinds = {kind.name: kind for kind in (CudaBackend, CpuBackend, LazyCpuBackend)}
    if name not in kinds:
        known = ", ".join(repr(kind) for kind in kinds)
        raise ValueError(f"offload_backend={name!r} is unknown; set 'auto', {known}")
    return kinds[name]()
