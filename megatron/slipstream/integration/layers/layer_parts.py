# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The parts of a layer that backward can recompute, and where megatron-core keeps each decision.

megatron-core decides when a layer is built, and reads its decision in every forward pass from an
attribute of the layer or of one of its modules. All supported releases have the same attributes.
What else it does for a decision when it builds a layer, and what it asserts in
``TransformerConfig``, is a reason here:

- In FP8 and FP4, linear layers are told to save their original input (``set_save_original_input``),
  and the amax history depends on recomputation. So such layers keep the settings of their flags.
- Fused grouped MLPs (``use_transformer_engine_op_fuser``) are compiled for the decision.
- Graphs of layers capture the decision, and checkpoints inside of them do nothing. Parts must lie
  inside or outside of graphs as a whole.
- Layers that run in nodes (``overlap_moe_expert_parallel_comm``) call neither the layer's nor the
  expert layer's ``forward``.

That megatron-core refuses to move parts of an expert layer that is recomputed does not matter here:
marks inside a checkpoint do nothing with Slipstream's engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Optional

import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron.slipstream.integration.layers.tiled_model import has_tiles
from megatron.slipstream.options.model import CHECKPOINTED_MODULES, graph_impl, graphed_modules
from megatron.slipstream.plan.settings import WHOLE_LAYER


class Decision(NamedTuple):
    """An attribute by which megatron-core decides whether a part is recomputed."""

    part: str
    owner: str
    """Path of the module that has the attribute, from the layer; empty: the layer itself."""
    attribute: str
    has_part: Callable[[Any], bool] = lambda owner: True
    """Whether the owner has the part."""

    def owner_in(self, layer: torch.nn.Module) -> Optional[Any]:
        """Return the module that has the attribute; None if the layer has no such part."""
        owner: Any = layer
        for name in filter(None, self.owner.split(".")):
            owner = getattr(owner, name, None)
        if owner is None or not hasattr(owner, self.attribute):
            return None
        return owner if self.has_part(owner) else None


def _is_module(name: str) -> Callable[[Any], bool]:
    return lambda owner: not isinstance(getattr(owner, name, None), (IdentityOp, type(None)))


DECISIONS = (
    Decision("moe", "mlp", "moe_layer_recompute"),
    Decision(
        *("mlp", "", "recompute_mlp"),
        lambda layer: not isinstance(layer.mlp, (IdentityOp, MoELayer)),
    ),
    Decision(
        *("shared_experts", "mlp", "shared_experts_recompute"),
        lambda mlp: bool(mlp.use_shared_expert) and not mlp.shared_expert_overlap,
    ),
    Decision("moe_act", "mlp.experts", "activation_recompute"),
    Decision("core_attn", "self_attention", "checkpoint_core_attention"),
    Decision("mla_up_proj", "self_attention", "recompute_up_proj"),
    Decision("gdn_norm_out", "self_attention", "recompute_norm_out"),
    Decision("layernorm", "", "recompute_input_layernorm", _is_module("input_layernorm")),
    Decision("layernorm", "", "recompute_pre_mlp_layernorm", _is_module("pre_mlp_layernorm")),
)
"""In the order of the memory that they usually save, the most first."""

CONTAINED = {"moe": frozenset(("moe_act", "shared_experts"))}
"""For a part, the parts inside of it, which it recomputes too."""


def decisions_of(layer: torch.nn.Module) -> Iterator[tuple[Decision, Any]]:
    """Yield the decisions that exist in a layer, each with the module that has its attribute."""
    for decision in DECISIONS:
        owner = decision.owner_in(layer)
        if owner is not None:
            yield decision, owner


def why_not(part: str, layer: Any, has_chunk_graphs: bool = False) -> str:
    """Return why settings cannot change whether a part is recomputed; empty if they can."""
    config = layer.config
    has_dropout = {
        WHOLE_LAYER: config.hidden_dropout or config.attention_dropout,
        "core_attn": config.attention_dropout,
    }
    if has_chunk_graphs and has_dropout.get(part):
        return "a graph cannot draw the same random numbers again"
    if config.fp8 or config.fp4:
        return (
            "layers in FP8 or FP4 are built for one choice: it decides what their linear layers "
            "save, and which scaling factors a recomputation reads"
        )
    if config.cpu_offloading:
        return "cpu_offloading moves the same tensors"
    if graph_impl(config) == "full_iteration":
        return "one graph of the whole iteration includes it"
    return _why_not_in_graphs(part, layer, config) or _why(part, layer)


def _why(part: str, layer: Any) -> str:
    config = layer.config
    if config.overlap_moe_expert_parallel_comm and part in (WHOLE_LAYER, "moe"):
        return "layers that run in nodes (overlap_moe_expert_parallel_comm) are not called as one"
    if part == "mlp" and config.mlp_chunks_for_training > 1:
        return "megatron-core leaves out mlp_chunks_for_training then, which rounds differently"
    if part in ("mlp", "moe_act") and has_tiles(layer.mlp):
        return "its tiles are computed again in backward anyway (mlp_sequence_tiles)"
    if part == "moe_act" and getattr(layer.mlp.experts, "_with_fused_impl", False):
        return "the fused experts (use_transformer_engine_op_fuser) are compiled for one choice"
    norms = (getattr(layer, name, None) for name in ("input_layernorm", "pre_mlp_layernorm"))
    if part == "layernorm" and any(isinstance(norm, torch.nn.RMSNorm) for norm in norms):
        return (
            "torch's RMSNorm is several operations, whose gradients are then summed in another "
            "order, which rounds differently"
        )
    if part == "core_attn" and not isinstance(
        layer.self_attention.core_attention, DotProductAttention
    ):
        return "fused attention saves little more than its inputs and its output"
    return ""


def _why_not_in_graphs(part: str, layer: Any, config: Any) -> str:
    """The reasons of ``TransformerConfig.__post_init__`` and of the layers themselves."""
    if graph_impl(config) == "none":
        return ""
    if part == WHOLE_LAYER:
        return "graphs of layers cannot be inside of a recomputed layer"
    if graph_impl(config) == "local":
        return "graphs of cuda_graph_impl='local' skip checkpoints"
    captured = graphed_modules(config)
    around = CHECKPOINTED_MODULES.get(part)
    if around is not None and (not captured or around in captured):
        return "a checkpoint in a graph recomputes nothing from megatron-core 0.18 on"
    is_moe = isinstance(getattr(layer, "mlp", None), MoELayer)
    if is_moe and "moe_router" in captured and part in ("moe", "layernorm"):
        return "it is partly inside of the graph of moe_router"
    return ""


def is_captured(layer: Any) -> bool:
    """Return whether CUDA graphs of the layer, or of its chunk, exist."""
    if getattr(layer, "cuda_graphs", None):
        return True
    managers = ("cudagraph_manager", "cudagraph_manager_router", "cudagraph_manager_postprocess")
    return any(getattr(getattr(layer, name, None), "cudagraph_runners", None) for name in managers)
