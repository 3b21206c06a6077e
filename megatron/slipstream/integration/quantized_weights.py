# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Weights of a replayed chunk that trains in FP8.

[Note: Weights are quantized in every replay]
megatron-core tells each linear layer whether a micro-batch is the first since the optimizer's step.
In the first, Transformer Engine quantizes the weight into memory that it keeps, and the weight's
gradient overwrites the main gradient. In others it uses the kept weight, and adds. A graph repeats
the captured pass: all gradients but the last micro-batch's would be lost, or the weights would be
those of the captured step.

With ``disable_parameter_transpose_cache`` a layer quantizes its weight in every pass, keeps
nothing, and adds. That gives the same bits: weights do not change between micro-batches, and main
gradients begin at zero. It holds in eager passes too: a replay runs no ``forward``, which is what
clears the mark of the first micro-batch, so a later eager micro-batch would overwrite gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


def quantize_weights_in_every_pass(block: torch.nn.Module) -> None:
    """Disable cached quantized weights in the chunk's layers that cache them.

    Raises:
        ValueError: A layer does not support it.
    """
    for name, module in block.named_modules():
        if not hasattr(module, "is_first_microbatch"):
            continue
        if not hasattr(module, "disable_parameter_transpose_cache"):
            raise ValueError(
                f"a {type(module).__name__} ({name}) is not supported in FP8 with "
                "cuda_graph_granularity=chunk because it may keep quantized weights that replays "
                "would go on using after the optimizer has changed them; train in bf16, or with "
                "megatron-core's layers of Transformer Engine"
            )
        module.disable_parameter_transpose_cache = True


@contextlib.contextmanager
def without_fp8_skip_flag() -> Iterator[None]:
    """Context of a capture without the global tensor of other graphs.

    With it graphs of Transformer Engine or megatron-core control when quantized weights are kept.
    While it exists, every captured layer reads it.
    """
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

    # In older releases these were attributes of the class.
    state: Any = getattr(FP8GlobalStateManager, "quantization_state", FP8GlobalStateManager)
    tensor, state.skip_fp8_weight_update_tensor = state.skip_fp8_weight_update_tensor, None
    try:
        yield
    finally:
        state.skip_fp8_weight_update_tensor = tensor
