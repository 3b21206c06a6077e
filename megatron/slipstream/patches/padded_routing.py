# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Exclude padding in routers where megatron-core (0.18, 0.19) does not.

megatron-core's routers take a padding mask and exclude padding from auxiliary losses and the
z-loss, but not from

- the counts for the expert bias: mask and routing map have shapes that do not match, and the
  router raises;
- the capacity of experts: padding competes for it, so its content decides which tokens are dropped;
- the number of tokens that auxiliary losses divide by: it is 0 for a buffer of only padding, and
  all gradients become NaN.
"""

from __future__ import annotations

from typing import Any, Optional

import torch

from megatron.slipstream.patches.patching import replacing

_padding: list[torch.Tensor] = []
"""The masks of the routers whose forward pass is running, the innermost last."""


@replacing
def pass_mask_on(
    original: Any, self: Any, logits: torch.Tensor, padding_mask: Optional[torch.Tensor] = None
) -> Any:
    """Replace ``TopKRouter.routing``: pass the padding mask to the functions below."""
    if padding_mask is None:
        return original(self, logits)
    _padding.append(padding_mask.reshape(-1, 1))
    try:
        return original(self, logits, padding_mask=padding_mask)
    finally:
        _padding.pop()


@replacing
def drop_padding_first(
    original: Any, probs: torch.Tensor, routing_map: torch.Tensor, *rest: Any, **options: Any
) -> Any:
    """Replace ``apply_router_token_dropping``: exclude padding from the capacity."""
    if _padding:
        probs = probs.masked_fill(_padding[-1], 0.0)
        routing_map = routing_map & ~_padding[-1]
    return original(probs, routing_map, *rest, **options)


@replacing
def count_at_least_one(original: Any, *arguments: Any, **options: Any) -> Any:
    """Replace ``get_tokens_per_expert_and_token_count``: divide by 1 if all tokens are padding."""
    *counts, total = original(*arguments, **options)
    # If the total is 0, the counts that it divides are 0 as well.
    return *counts, total.clamp(min=1) if isinstance(total, torch.Tensor) else total


@replacing
def count_without_padding(
    _: Any, self: Any, routing_map: torch.Tensor, padding_mask: Optional[torch.Tensor] = None
) -> None:
    """Replace ``TopKRouter._apply_expert_bias``: exclude padding from the counts."""
    if self.enable_expert_bias and torch.is_grad_enabled():
        with torch.no_grad():
            if padding_mask is not None:
                routing_map = routing_map & ~padding_mask.reshape(-1, 1)
            self.local_tokens_per_expert += routing_map.sum(dim=0)
