# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A model that tests and benchmarks train. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from megatron.slipstream.plan.tiles import NumTiles

DENSE_MODULES = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm")
MOE_MODULES = (*DENSE_MODULES, "expert_fc1", "moe_act")
GDN_MODULES = ("gdn_in_proj", "gdn_rule", "gdn_out_proj")
MAMBA_MODULES = ("mamba_in_proj", "mamba_scan", "mamba_out_proj")
MLP_MODULES = ("mlp_fc1", "mlp_act", "mlp_fc2")
OWN_MODULES = {
    "dense": (*MLP_MODULES, "embedding", "output_layer"),
    "moe": ("expert_fc2", "shared_experts", "embedding", "output_layer"),
    "mixed": (*MLP_MODULES, "expert_fc2", "shared_experts", "embedding", "output_layer"),
    "mla": ("mla_down_proj", "mla_up_proj", *MLP_MODULES, "embedding", "output_layer"),
    "hybrid": (*GDN_MODULES, *MAMBA_MODULES, *MLP_MODULES, "embedding", "output_layer"),
}
"""Modules that Slipstream marks itself, by kind of model."""
SHARED_EXPERTS = {"moe_shared_expert_intermediate_size": 64}


@dataclass(frozen=True)
class ModelCase:
    """A model and its training options, by megatron-core's names."""

    kind: str = "dense"
    """dense, moe, mixed (every second layer dense), mla, or hybrid (a ``HybridModel``)."""
    num_layers: int = 4
    pattern: str = "*-*E"
    """Letters of a hybrid model's ``num_layers`` layers, repeated unless it has ``|`` or ``/``."""
    hidden_size: int = 64
    num_attention_heads: int = 4
    seq_length: int = 32
    micro_batch_size: int = 2
    vocab_size: int = 128
    bf16: bool = False
    pp: int = 1
    vpp: Optional[int] = None
    tp: int = 1
    dp: int = 1
    """Data-parallel ranks, each with its own data; a multiple of ``ep``."""
    ep: int = 1
    cp: int = 1
    """Context-parallel ranks; ``seq_length`` is the length on each of them."""
    is_packed: bool = False
    """Micro-batches are packs of documents (THD), each with room for ``seq_length`` tokens;
    ``micro_batch_size`` is 1."""
    te_rng_tracker: bool = False
    """Use Transformer Engine's random number tracker, as CUDA graphs require (on a GPU)."""
    keeps_layers: bool = False
    """Keep megatron-core's own layers even if they are captured, for its own engine."""
    sync_free_experts: bool = False
    """With ``with_sync_free_experts``."""
    sync_free_capacity_factor: Optional[float] = None
    """Its ``capacity_factor``."""
    has_own_norms: bool = False
    """Norms of dense layers are modules, not a part of the linear layer that follows."""
    loss_sequence_tiles: NumTiles = 1
    mlp_sequence_tiles: NumTiles = 1
    is_tied: bool = False
    """The output layer has the weights of the embedding."""
    overrides: dict[str, Any] = field(default_factory=dict)

    @property
    def hybrid_layer_pattern(self) -> str:
        """The letters of all layers of a hybrid model."""
        repeated = (self.pattern * self.num_layers)[: self.num_layers]
        return self.pattern if set("|/") & set(self.pattern) else repeated

    @property
    def has_experts(self) -> bool:
        """Whether some layers have experts."""
        is_hybrid = self.kind == "hybrid" and "E" in self.hybrid_layer_pattern
        return self.kind in ("moe", "mixed") or is_hybrid
