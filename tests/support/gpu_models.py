# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Models large enough for meaningful memory measurements, and the sizes of smaller ones."""

from __future__ import annotations

from typing import Any

from model_case import ModelCase

DENSE = ModelCase(
    "dense",
    num_layers=6,
    hidden_size=2048,
    num_attention_heads=16,
    seq_length=4096,
    micro_batch_size=1,
    vocab_size=8192,
    bf16=True,
)
MOE = ModelCase(
    "moe",
    num_layers=6,
    hidden_size=1024,
    num_attention_heads=16,
    seq_length=2048,
    micro_batch_size=2,
    vocab_size=8192,
    bf16=True,
    overrides={"moe_permute_fusion": True},
)
MLA = ModelCase(
    "mla",
    num_layers=4,
    hidden_size=1024,
    num_attention_heads=8,
    seq_length=2048,
    micro_batch_size=1,
    vocab_size=8192,
    bf16=True,
    overrides={"qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128},
)
MIN_NUMEL = {"min_offloaded_tensor_size": 1024 * 1024}
PLAN_TOLERANCE = 0.002
"""Relative to the planned bytes; the allocator rounds each tensor to 512 bytes."""

SMALL_SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "num_attention_heads": 8,
    "seq_length": 1024,
    "micro_batch_size": 1,
    "vocab_size": 1024,
    "bf16": True,
}
"""Of models whose results alone are compared."""
MLA_SIZES: dict[str, Any] = {"qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128}
FUSED_ROPE: dict[str, Any] = {"apply_rope_fusion": True}
"""Rotation of packed sequences that does not read their lengths from the GPU."""


def on_gpu(case: ModelCase, **overrides: Any) -> ModelCase:
    """The case at those sizes, with more options of the ``TransformerConfig``."""
    merged = {**case.overrides, **overrides}
    return ModelCase(**{**vars(case), **SMALL_SIZES, "overrides": merged})
