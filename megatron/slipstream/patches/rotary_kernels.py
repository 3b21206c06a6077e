# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Restricts Triton's choice for megatron-core's fused rotation to what computes the right result.

megatron-core's kernels for multi-latent attention (``apply_rope_fusion``) are tuned when they first
run: the fastest of eight block sizes, in heads, is taken. Not all of them are right.

- The two for queries and their gradients permute a head's values in place, without a barrier
  between the threads that read and those that write. If these are in different warps, gradients of
  single tokens are wrong: with 4 heads a block and 32 rotated dimensions, or 2 and 64 (DeepSeek),
  in 257 and 300 of 300 launches on an H200. Within one warp all reads come before all writes.
  (https://github.com/NVIDIA/Megatron-LM/issues/4640)
- All four let a last block that is not full go on into the next token's heads, or beyond the end.
  (https://github.com/NVIDIA/Megatron-LM/issues/7103)

The gradient of the rotated part of keys, which all heads share, is summed block by block, so each
block size rounds otherwise. With deterministic algorithms the tuner gets one size.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.fusions import fused_mla_yarn_rope_apply as fused

IN_PLACE = ("rotary_fwd_q_kernel", "rotary_bwd_q_kernel")
"""Of the kernels in megatron-core's module, those that work in place."""
SUMMING = "rotary_bwd_kv_kernel"
"""The one that adds up heads."""
NAMES = (*IN_PLACE, "rotary_fwd_kv_kernel", SUMMING)

MOST_HEADS_SUMMED = 16
"""Heads in a block of the one size that is left where runs are to be the same."""


def is_tuned(name: str) -> bool:
    """Whether Triton tunes the kernel; megatron-core has a stand-in where there is no Triton."""
    return isinstance(getattr(getattr(fused, name, None), "configs", None), list)


def restrict_autotune_configs(kernel: Any) -> Any:
    """A new tuner of the same kernel, among configurations that compute the right result."""
    name = kernel.fn.__name__
    restricted = copy.copy(kernel)
    restricted.cache = {}
    restricted.early_config_prune = one_whole_block if name == SUMMING else whole_blocks
    restricted.configs = [copy.copy(config) for config in kernel.configs]
    if name in IN_PLACE:
        for config in restricted.configs:
            config.num_warps = 1
    return restricted


def whole_blocks(
    configs: Sequence[Any], arguments: Mapping[str, Any], **named: Any
) -> Sequence[Any]:
    """Configurations without a partly filled block, except a single one, which checks its bounds.

    Args:
        configs: Triton's, with the block size ``BLOCK_H``.
        arguments: Of the kernel, by name, as far as they were given by position.
        **named: The others.
    """
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
    """As :func:`whole_blocks`; only one, the same each time, with deterministic algorithms."""
    whole = whole_blocks(configs, arguments, **named)
    if not (
        torch.are_deterministic_algorithms_enabled()
        or os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO") == "0"
    ):
        return whole
    small = [config for config in whole if config.kwargs["BLOCK_H"] <= MOST_HEADS_SUMMED]
    return [max(small, key=lambda config: config.kwargs["BLOCK_H"])]
