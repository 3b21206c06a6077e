# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Layers that offload or support packed sequences inside Transformer Engine's CUDA graphs.

Those that offload replace megatron-core's layers in the model's spec:

    spec = with_graph_offloading(get_gpt_decoder_block_spec(config, use_transformer_engine=True))

If a framework builds its own layers, ``install()`` is enough: it gives them the classes of this
module when their model is first called with gradients, before any capture.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.transformer.transformer_layer import MoETransformerLayer, TransformerLayer

from megatron.slipstream.context_parallel.limits import RankLimits
from megatron.slipstream.integration.graphs.layer_copies import (
    FindEngine,
    LayerCopies,
    enable_offload,
    offload_layers,
)
from megatron.slipstream.integration.graphs.packed_layers import PackedLayers, pack_layers
from megatron.slipstream.integration.seam import compat
from megatron.slipstream.integration.seam.layer_classes import convert, undo_on
from megatron.slipstream.integration.seam.model_router import stage_of
from megatron.slipstream.integration.seam.specs import replace_classes
from megatron.slipstream.patches import patching, table
from megatron.slipstream.patches.graph_calls import (
    captures_copies,
    notes_replay,
    replays_beside_copies,
    replays_with_backward,
)
from megatron.slipstream.patches.layer_capture import (
    captures_packed,
    keeps_padding_mask,
    learns_arguments,
    needs_free_graphs,
    passes_static_inputs,
    replays_packed,
)
from megatron.slipstream.patches.table import Feature


class GraphedMixin(torch.nn.Module):
    """Mixin for megatron-core's graphable layers, on the methods that capture and replay.

    It orders the layer's graphs with the engine's copies, and supports packed sequences in them.
    ``install()`` checks that the methods exist (``compat.check_layers_are_graphed``).
    """

    config: Any
    layer_number: int
    cuda_graphs: list[Any]
    graph_copies: Optional[LayerCopies] = None
    """Notifies the engine of its captures and replays; None if it does not offload in them."""
    packed: Optional[PackedLayers] = None
    """The layers of its chunk in graphs of packed sequences; None if it does not support them."""

    @learns_arguments
    def forward(self, *arguments: Any, **options: Any) -> Any:
        return super().forward(*arguments, **options)

    @needs_free_graphs
    @replays_with_backward
    def _should_call_te_cudagraph(self, *arguments: Any, **options: Any) -> Any:
        return super()._should_call_te_cudagraph(*arguments, **options)  # type: ignore[misc]

    @keeps_padding_mask
    def _forward_mlp(self, *arguments: Any, **options: Any) -> Any:
        return super()._forward_mlp(*arguments, **options)  # type: ignore[misc]

    @captures_copies
    @captures_packed
    def _te_cuda_graph_capture(self, *arguments: Any, **inputs: Any) -> Any:
        return super()._te_cuda_graph_capture(*arguments, **inputs)  # type: ignore[misc]

    @notes_replay
    @replays_packed
    def _te_cuda_graph_replay(self, *arguments: Any, **options: Any) -> Any:
        return super()._te_cuda_graph_replay(*arguments, **options)  # type: ignore[misc]

    @replays_beside_copies
    @passes_static_inputs
    def _get_te_cuda_graph_replay_args(self, *arguments: Any, **options: Any) -> Any:
        return super()._get_te_cuda_graph_replay_args(  # type: ignore[misc]
            *arguments, **options
        )


class _OffloadsFromTheStart(GraphedMixin):
    """Mixin for layers that a spec builds: they offload in their graphs."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        enable_offload(self, options.get("vp_stage") or 0)


class GraphOffloadTransformerLayer(_OffloadsFromTheStart, TransformerLayer):
    """A ``TransformerLayer`` that also offloads inside its CUDA graphs."""


class GraphOffloadMoETransformerLayer(_OffloadsFromTheStart, MoETransformerLayer):
    """The same for the expert layers of a ``HybridModel``."""


class GraphOffloadMambaLayer(_OffloadsFromTheStart, MambaLayer):
    """A ``MambaLayer`` whose graphs are replayed in order with those of other layers."""


def with_graph_offloading(spec: Any) -> Any:
    """Return a copy of a layer or block spec with this module's layers."""
    return replace_classes(
        spec,
        {
            TransformerLayer: GraphOffloadTransformerLayer,
            MoETransformerLayer: GraphOffloadMoETransformerLayer,
            MambaLayer: GraphOffloadMambaLayer,
        },
    )


def offload_in_graphs(chunk: torch.nn.Module, find_engine: FindEngine) -> list[Callable[[], None]]:
    """Make layers of a chunk, not captured yet, offload in their graphs; return how to undo it.

    Each layer gets a class derived from its own, whichever framework built it.
    """
    layers = [one for one in chunk.modules() if isinstance(one, (TransformerLayer, MambaLayer))]
    undo = [convert(layer, GraphedMixin) for layer in layers]
    return undo + offload_layers(layers, stage_of(chunk), find_engine)


def with_packed_layer_graphs(
    chunks: Sequence[torch.nn.Module], limits: Optional[RankLimits] = None
) -> list[torch.nn.Module]:
    """Make the layers of model chunks support packed sequences in their graphs.

    For ``cuda_graph_impl='transformer_engine'``, whichever framework built the layers: each gets a
    class derived from its own. For megatron's ``ModelConfig.post_wrap_hooks``.

    Args:
        chunks: The rank's model chunks, wrapped or not, before their layers are captured.
        limits: With dynamic context parallelism, the ranks that share micro-batches; layers are
            captured for each size, which needs the process groups, a collective of all ranks. None:
            micro-batches have one size.

    Returns:
        The same chunks.

    Raises:
        RuntimeError: A patch's target has moved.
    """
    take_packed_sequences(chunks, limits)
    return list(chunks)


def take_packed_sequences(
    chunks: Sequence[torch.nn.Module], limits: Optional[RankLimits] = None
) -> list[Callable[[], None]]:
    """Do the same as :func:`with_packed_layer_graphs`; return functions that undo it."""
    compat.check_layers_are_graphed()
    table.apply(Feature.FUSED_ROTATION)
    user = object()  # Others may go on when these chunks no longer take part.
    patching.apply(table.TABLE[Feature.PACKED_LAYER_GRAPHS], user)
    undo: list[Callable[[], None]] = [functools.partial(patching.undo, user)]
    for chunk in chunks:
        packed = pack_layers(chunk, limits)
        undo.append(undo_on(packed, PackedLayers.close))
        undo += [convert(layer, GraphedMixin) for layer in packed.own_layers]
    return undo
