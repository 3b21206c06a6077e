# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""megatron-core's options of a valid model with offloading."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

VALID_MODEL: Mapping[str, Any] = {
    "fine_grained_activation_offloading": True,
    "offload_modules": ["core_attn", "attn_proj"],
    "num_moe_experts": None,
    "activation_offload_fraction": 1.0,
    "min_offloaded_tensor_size": 1024 * 1024,
    "delta_offload_bytes_across_pp_ranks": 0,
    "moe_layer_freq": 1,
    "moe_shared_expert_intermediate_size": None,
    "recompute_granularity": None,
    "recompute_modules": None,
    "cpu_offloading": False,
    "cuda_graph_impl": "none",
    "cuda_graph_modules": [],
    "cuda_graph_warmup_steps": 3,
}
