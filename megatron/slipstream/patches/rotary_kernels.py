# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Restrict Triton's autotuning of megatron-core's fused rotation to correct configurations.

megatron-core's kernels for multi-latent attention (``apply_rope_fusion``) are autotuned on their
first run, which selects the fastest of eight block sizes, in heads. Some give wrong results.

- The two kernels for queries and their gradients permute a head's values in place, without a
  barrier between the threads that read and those that write. If these are in different warps,
  gradients of single tokens are wrong: with 4 heads per block and 32 rotated dimensions, or 2 and
  64 (DeepSeek), in 257 and 300 of 300 launches on an H200. Within one warp all reads come before
  all writes. (https://github.com/NVIDIA/Megatron-LM/issues/4640)
- In all four kernels, a partly filled last block extends into the next token's heads, or beyond
  the end. (https://github.com/NVIDIA/Megatron-LM/issues/7103)

The gradient of the rotated part of keys, which all heads share, is summed block by block, so block
sizes round differently. With deterministic algorithms the autotuner gets one size.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import Mock

import torch

OLD_KERNELS = tuple(f"rotary_{name}_kernel" for name in ("fwd_q", "bwd_q", "fwd_kv", "bwd_kv"))
"""The kernels of megatron-core's module, by their names until July 2026."""
KERNELS = tuple(
    f"_mla_rope_{name}_kernel"
    for name in ("fwd_inplace", "bwd_inplace", "fwd_kv_split", "bwd_kv_split")
)
"""The same by their names since."""
IN_PLACE = (*OLD_KERNELS[:2], *KERNELS[:2])
SUMMING = (OLD_KERNELS[-1], KERNELS[-1])

MOST_HEADS_SUMMED = 16
"""Block size, in heads, for deterministic algorithms."""


def runs_triton() -> bool:
    """Whether Triton compiles the kernels; else megatron-core has a mock in its place."""
    from megatron.core.fusions import fused_mla_yarn_rope_apply as fused

    return not isinstance(vars(fused).get("triton"), Mock)


def restrict_autotune_configs(kernel: Any) -> Any:
    """Return a new autotuner of the same kernel, restricted to correct configurations.

    Without Triton, megatron-core has a plain function in its place, which is returned.
    """
    if not hasattr(kernel, "fn"):
        return kernel
    name = kernel.fn.__name__
    restricted = copy.copy(kernel)
    restricted.cache = {}
    restricted.early_config_prune = one_whole_block if name in SUMMING else whole_blocks
    restricted.configs = [copy.copy(config) for config in kernel.configs]
    if name in IN_PLACE:
        for config in restricted.configs:
            config.num_warps = 1
    return restricted


def whole_blocks(
    configs: Sequence[Any], arguments: Mapping[str, Any], **named: Any
) -> Sequence[Any]:
    """Return configurations without a partly filled block; a single block checks its bounds."""
    num_heads = {**arguments, **named}["head_num"]
    sizes = [config.kwargs["BLOCK_H"] for config in configs]
    return [
        config
        for config, size in zip(configs, sizes, strict=True)
        if num_heads % size == 0 or size > num_heads
    ]


def one_whole_block(
    configs: Sequence[Any], arguments: Mapping[str, Any], **named: Any
) -> Sequence[Any]:
    """Like :func:`whole_blocks`; with deterministic algorithms, always the same single one."""
    whole = whole_blocks(configs, arguments, **named)
    if not (
        torch.are_deterministic_algorithms_enabled()
        or os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO") == "0"
    ):
        return whole
    small = [config for config in whole if config.kwargs["BLOCK_H"] <= MOST_HEADS_SUMMED]
    return [max(small, key=lambda config: config.kwargs["BLOCK_H"])]
