# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The flags of tiles of the sequence, and the options that they are incompatible with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megatron.slipstream.options.model import MOE_MODULE_NAMES, graphed_modules
from megatron.slipstream.options.modules import OF_DENSE_MLP
from megatron.slipstream.options.rules import Condition, Predicate, Rule, value_rule


def _tiles_loss(facts: Any) -> bool:
    return bool(facts.loss_sequence_tiles != 1)


def _tiles_mlps(facts: Any) -> bool:
    return bool(facts.mlp_sequence_tiles != 1)


_LOSS, _MLPS = "loss_sequence_tiles", "mlp_sequence_tiles"
_with_loss = Condition(f"with {_LOSS}={{{_LOSS}}}", _tiles_loss)
_with_mlps = Condition(f"with {_MLPS}={{{_MLPS}}}", _tiles_mlps)
_with_tiles = Condition("with tiles of the sequence", lambda f: _tiles_loss(f) or _tiles_mlps(f))

_IN_MLPS = MOE_MODULE_NAMES | OF_DENSE_MLP | {"expert_fc2"}
"""Names for ``offload_modules`` of what is inside a tile."""
_RECOMPUTED_BY_TILES = frozenset({"mlp", "moe_act"})
"""Names for ``recompute_modules`` of what each tile computes again."""
_GRAPHS_WITHOUT_MLPS = frozenset({"attn", "mamba", "moe_router", "moe_preprocess"})
"""Names for ``cuda_graph_modules`` of what is outside of tiles."""


def _has_no_tiles_in_graphs(facts: Any) -> bool:
    if facts.cuda_graph_impl not in ("transformer_engine", "local"):
        return True
    captured = graphed_modules(facts)
    is_outside = bool(captured) and captured <= _GRAPHS_WITHOUT_MLPS
    return is_outside or facts.cuda_graph_granularity == "chunk"


def _names_none_of(option: str, names: Iterable[str]) -> Predicate:
    return lambda facts: not {*names} & {*(getattr(facts, option) or ())}


TILE_RULES: tuple[Rule, ...] = (
    *(
        value_rule(
            option,
            lambda number: number == "auto" or (type(number) is int and number >= 1),
            "is no number of tiles",
            f"set {option}=1 or more, or 'auto'",
        )
        for option in (_LOSS, _MLPS)
    ),
    *_with_tiles.rows(
        """
        overlap_moe_expert_parallel_comm:
            the layers of two micro-batches then run in parts of their own
        gtp_weight_remat_size in 1: each tile would gather the weights once more;
            set gtp_weight_remat_size=1
        use_megatron_fsdp use_torch_fsdp2:
            it gathers parameters and takes gradients by hooks, which a tile does not run
        cuda_graph_impl: a backward inside the backward has not been captured in a graph of the
            whole iteration and compared; set cuda_graph_impl=none
        """,
        cuda_graph_impl=lambda f: f.cuda_graph_impl != "full_iteration",
    ),
    *_with_loss.rows(
        """
        mtp_num_layers: the acceptance rate of its predictions is computed from whole logits;
            set loss_sequence_tiles=1
        defer_embedding_wgrad_compute: it keeps the gradient of whole logits
        use_mup: it scales logits between the output layer and the loss
        fp8_output_proj: a tile of logits would have a scale of its own
        """
    ),
    *_with_mlps.rows(
        """
        fp8 fp4: what is computed again in backward could be quantized by another scale
        delay_wgrad_compute overlap_dispatch_backward_with_experts_wgrad:
            it computes the weights' gradients after backward, from the last tile alone
        mlp_chunks_for_training in 1: both divide the same sequence; set mlp_chunks_for_training=1
        tp_comm_overlap: its buffers have the size of a whole sequence
        moe_paged_stash: it keeps the tensors that a tile computes again
        """
    ),
    _with_mlps(
        "recompute_modules",
        "each tile is computed again anyway",
        "leave " + " and ".join(sorted(_RECOMPUTED_BY_TILES)) + " out of recompute_modules",
        lambda f: (
            f.recompute_granularity != "selective"
            or _names_none_of("recompute_modules", _RECOMPUTED_BY_TILES)(f)
        ),
    ),
    _with_mlps(
        "offload_modules",
        "an MLP then saves its input only, which offload_checkpoint_inputs moves",
        "leave " + ", ".join(sorted(_IN_MLPS)) + " out of offload_modules",
        lambda f: (
            not f.fine_grained_activation_offloading
            or _names_none_of("offload_modules", _IN_MLPS)(f)
        ),
    ),
    _with_mlps(
        "cuda_graph_impl",
        "a backward inside the backward has not been captured in graphs of layers and compared",
        "set cuda_graph_modules=attn",
        _has_no_tiles_in_graphs,
    ),
)
