# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Routers that leave padding out where megatron-core's (0.17 to 0.19) do not.

They take a padding mask and leave padding out of auxiliary losses and the z-loss. Three places are
missing:

- The counts for the expert bias: mask and routing map have shapes that do not go together, and the
  router raises.
- The capacity of experts: padding competes for it, so what is in the padding decides which tokens
  are dropped. With ``moe_pad_expert_input_to_capacity``, the one mode of static shapes that needs
  no special dispatcher, that changes the model's output.
- A buffer of nothing but padding, as a batch that its documents do not fill may have: auxiliary
  losses divide by its number of tokens, and all gradients become NaN.
"""

from __future__ import annotations

import functools
from typing import Any, Optional

import torch

_padding: list[torch.Tensor] = []
"""The masks of the routers whose forward pass runs now, the innermost last."""


def exclude_padding_from_routing() -> None:
    """Replace the three places in megatron-core's ``TopKRouter``. Idempotent.

    Without a padding mask the router does what it did. Nothing waits for the GPU, and nothing has a
    shape that depends on how much padding there is.
    """
    from megatron.core.transformer.moe import router

    if hasattr(router.TopKRouter.routing, "__wrapped__"):
        return
    router.TopKRouter.routing = _routing(router.TopKRouter.routing)
    router.TopKRouter._apply_expert_bias = _apply_expert_bias
    router.apply_router_token_dropping = _token_dropping(router.apply_router_token_dropping)
    router.get_tokens_per_expert_and_token_count = _counting(
        router.get_tokens_per_expert_and_token_count
    )


def include_padding_in_routing() -> None:
    """Undo :func:`exclude_padding_from_routing`, except for what would raise."""
    from megatron.core.transformer.moe import router

    replaced = (
        (router.TopKRouter, "routing"),
        (router, "apply_router_token_dropping"),
        (router, "get_tokens_per_expert_and_token_count"),
    )
    for owner, name in replaced:
        current = getattr(owner, name)
        setattr(owner, name, getattr(current, "__wrapped__", current))


def _routing(original: Any) -> Any:
    @functools.wraps(original)
    def routing(
        self: Any, logits: torch.Tensor, padding_mask: Optional[torch.Tensor] = None
    ) -> Any:
        if padding_mask is None:
            return original(self, logits)
        _padding.append(padding_mask.reshape(-1, 1))
        try:
            return original(self, logits, padding_mask=padding_mask)
        finally:
            _padding.pop()

    return routing


def _token_dropping(original: Any) -> Any:
    @functools.wraps(original)
    def dropping(probs: torch.Tensor, routing_map: torch.Tensor, *rest: Any, **options: Any) -> Any:
        if _padding:
            probs = probs.masked_fill(_padding[-1], 0.0)
            routing_map = routing_map & ~_padding[-1]
        return original(probs, routing_map, *rest, **options)

    return dropping


def _counting(original: Any) -> Any:
    @functools.wraps(original)
    def counting(*arguments: Any, **options: Any) -> Any:
        *counts, total = original(*arguments, **options)
        # What is divided by it is 0 if it is: no token is routed.
        return *counts, total.clamp(min=1) if isinstance(total, torch.Tensor) else total

    return counting


def _apply_expert_bias(
    self: Any, routing_map: torch.Tensor, padding_mask: Optional[torch.Tensor] = None
) -> None:
    """Count the tokens of each expert, once per forward pass in training."""
    if not self.enable_expert_bias or not torch.is_grad_enabled():
        return
    with torch.no_grad():
        if padding_mask is not None:
            routing_map = routing_map & ~padding_mask.reshape(-1, 1)
        self.local_tokens_per_expert += routing_map.sum(dim=0)
