# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Handle the weights of a replayed chunk that trains in FP8.

[Note: Weights are quantized in every replay]
megatron-core tells each linear layer whether a micro-batch is the first since the optimizer's step.
In the first, Transformer Engine quantizes the weight into a cache, and the weight's gradient
overwrites the main gradient. In the others it uses the cached weight and accumulates. A graph
repeats the captured pass: either all gradients but the last micro-batch's would be lost, or the
weights would be those of the captured step.

With ``disable_parameter_transpose_cache`` a layer quantizes its weight in every pass, caches
nothing, and accumulates. The result is bitwise the same: weights do not change between
micro-batches, and main gradients start at zero. The setting also applies to eager passes: a replay
runs no ``forward``, which clears the first-micro-batch flag, so a later eager micro-batch would
overwrite gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


def quantize_weights_in_every_pass(block: torch.nn.Module) -> None:
    """Disable cached quantized weights where layers have them, or raise ``ValueError``."""
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
    """Hide the global tensor of other graphs during a capture.

    Graphs of Transformer Engine or megatron-core use it to control when quantized weights are kept.
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
