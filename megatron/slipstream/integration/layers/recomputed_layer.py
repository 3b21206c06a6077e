# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A layer of which backward recomputes everything from its input."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel


class RecomputedMixin(torch.nn.Module):
    """Mixin for a layer: its forward keeps no more than its input for backward.

    megatron-core's blocks checkpoint layers of their own choice (``recompute_method``); this one
    is checked out layer by layer. It is megatron-core's checkpoint, which restores all random
    states and divides its input among tensor-parallel ranks with ``distribute_saved_activations``.
    The engine can move that input: ``OffloadConfig.offload_checkpoint_inputs``.
    """

    config: Any

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """Run the layer, in training in a checkpoint.

        The checkpoint saves the tensors that have gradients, the hidden states first. Everything
        else (masks, rotary embeddings, packed sequence parameters) is shared by all layers and
        referred to. If the hidden states have no gradient, as after a frozen embedding, the layer
        runs as it is: a re-entrant checkpoint would give its parameters none.
        """
        run = super().forward
        values: dict[Any, Any] = {**dict(enumerate(arguments)), **options}
        first = "hidden_states" if "hidden_states" in values else 0
        is_trained = self.training and torch.is_grad_enabled()
        if not is_trained or not values[first].requires_grad:
            return run(*arguments, **options)
        with_gradients = [name for name, value in values.items() if _has_gradient(value)]
        names = sorted(with_gradients, key=lambda name: name != first)
        # What the checkpoint saves must have no other reference, or moving it would free nothing.
        inputs = [values.pop(name) for name in names]
        num_positional = len(arguments)

        def run_again(*tensors: torch.Tensor) -> Any:
            given = {**values, **dict(zip(names, tensors, strict=True))}
            return run(*(given.pop(place) for place in range(num_positional)), **given)

        is_divided = self.config.distribute_saved_activations
        return tensor_parallel.checkpoint(run_again, is_divided, *inputs)


def _has_gradient(value: Any) -> bool:
    return torch.is_tensor(value) and value.requires_grad
