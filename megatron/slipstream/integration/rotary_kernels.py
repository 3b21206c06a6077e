# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Keeps the fused rotation of multi-latent attention's queries from reading what it has written.

megatron-core's two kernels (``apply_rope_fusion``) rotate queries and their gradients in place, and
bring a head's values into another order meanwhile: a thread writes where another one reads. Nothing
orders the two if they are in different warps, which is so for some of the block sizes that Triton's
tuner chooses from: with 4 heads a block and 32 rotated dimensions, or 2 and 64 (as DeepSeek has),
gradients of single tokens come out wrong, and another time other ones. On an H200 that was so in
257 of 300 launches alone, and in 300 of 300. Within one warp all reads come before all writes.
"""

from __future__ import annotations

import logging
from typing import Any

from megatron.core.fusions import fused_mla_yarn_rope_apply as fused

logger = logging.getLogger(__name__)

NAMES = ("rotary_fwd_q_kernel", "rotary_bwd_q_kernel")
"""Of the kernels in megatron-core's module that work in place."""


def tuned_kernels() -> list[Any]:
    """Triton's tuners of those kernels; none where Triton cannot be used."""
    kernels = [getattr(fused, name, None) for name in NAMES]
    # megatron-core puts a mock or the bare function there if it finds no Triton.
    return [kernel for kernel in kernels if isinstance(getattr(kernel, "configs", None), list)]


def use_one_warp() -> None:
    """Have a block's threads read everything before any of them writes; results are the same bits.

    What has been tuned before is tuned anew. Calling it again changes nothing.
    """
    changed = False
    for kernel in tuned_kernels():
        for config in kernel.configs:
            changed = changed or config.num_warps != 1
            config.num_warps = 1
        if changed:
            kernel.cache.clear()
    if changed:
        logger.debug("the fused rotation of queries uses one warp a block")
