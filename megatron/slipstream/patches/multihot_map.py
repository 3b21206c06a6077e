# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Build the expert map of a flex dispatcher without blocking the host.

megatron-core's DeepEP dispatcher converts expert indices to a multi-hot map by boolean indexing and
``repeat_interleave``, whose result sizes depend on values on the GPU: the host waits three times
per layer. The map has a fixed size, so one scatter can fill it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def convert_by_scatter(_: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``_DeepepManager._indices_to_multihot``."""

    def convert(
        self: Any, indices: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return indices_to_multihot(indices, probs, self.num_local_experts)

    return convert


def indices_to_multihot(
    indices: torch.Tensor, probs: torch.Tensor, num_local_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a multi-hot map and its probabilities, without blocking the host.

    ``indices`` (int ``[num_tokens, topk]``) are local experts, -1 means none. The results are bool
    and float32 ``[num_tokens, num_local_experts]``. Gradients flow into ``probs``.
    """
    # Masked entries go to an extra column, which is dropped.
    column = torch.where(indices < 0, num_local_experts, indices).long()
    shape = (indices.shape[0], num_local_experts + 1)
    chosen = torch.zeros(shape, dtype=torch.bool, device=indices.device)
    chosen = chosen.scatter(1, column, True)
    weights = torch.zeros(shape, dtype=torch.float, device=indices.device)
    weights = weights.scatter(1, column, probs.float())
    return chosen[:, :-1].contiguous(), weights[:, :-1].contiguous()
