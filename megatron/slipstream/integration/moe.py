# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Expert layers whose token dispatch does not make the host wait.

megatron-core's DeepEP dispatcher turns expert indices into a multi-hot map by boolean indexing and
``repeat_interleave``, whose result sizes only the GPU knows: the host waits for it three times a
layer. The map has a fixed size, so one scatter can fill it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron.slipstream.integration.specs import replace_classes


def indices_to_multihot(
    indices: torch.Tensor, probs: torch.Tensor, num_local_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A multi-hot map and its probabilities, without a wait of the host.

    Args:
        indices: int ``[num_tokens, topk]``, local experts; -1 is none.
        probs: float ``[num_tokens, topk]``.
        num_local_experts: Columns of the results.

    Returns:
        bool and float32 ``[num_tokens, num_local_experts]``. Gradients flow into ``probs``.
    """
    # What is masked goes to a column of its own, which is cut off.
    column = torch.where(indices < 0, num_local_experts, indices).long()
    shape = (indices.shape[0], num_local_experts + 1)
    chosen = torch.zeros(shape, dtype=torch.bool, device=indices.device)
    chosen = chosen.scatter(1, column, True)
    weights = torch.zeros(shape, dtype=torch.float, device=indices.device)
    weights = weights.scatter(1, column, probs.float())
    return chosen[:, :-1].contiguous(), weights[:, :-1].contiguous()


class SyncFreeMoELayer(MoELayer):
    """A ``MoELayer`` whose dispatcher, if it converts indices, does so without a wait."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        manager: Any = getattr(self.token_dispatcher, "_comm_manager", None)
        if hasattr(manager, "_indices_to_multihot"):
            multihot = partial(indices_to_multihot, num_local_experts=manager.num_local_experts)
            manager._indices_to_multihot = multihot


def with_sync_free_dispatch(spec: Any) -> Any:
    """A copy of a layer or block spec with :class:`SyncFreeMoELayer` for every ``MoELayer``.

    Example:
        spec = with_sync_free_dispatch(get_gpt_decoder_block_spec(config, use_te))
    """
    return replace_classes(spec, {MoELayer: SyncFreeMoELayer})
