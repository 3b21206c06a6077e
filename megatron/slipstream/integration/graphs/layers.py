# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Layers that offload or support packed sequences inside Transformer Engine's CUDA graphs.

Those that offload replace megatron-core's layers in the model's spec:

    spec = with_graph_offloading(get_gpt_decoder_block_spec(config, use_transformer_engine=True))

If a framework builds its own layers, ``install()`` is enough: it gives them the classes of this
module when their model is first called with gradients, before any capture.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

import torch
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.transformer.transformer_layer import MoETransformerLayer, TransformerLayer
from megatron.core.utils import get_attr_wrapped_model

from megatron.slipstream.context_parallel.limits import RankLimits
from megatron.slipstream.integration.graphs.cp_sizes import sizes_of
from megatron.slipstream.integration.graphs.layer_copies import (
    FindEngine,
    LayerCopies,
    enable_offload,
    offload_layers,
    packed_of,
)
from megatron.slipstream.integration.graphs.packed_layers import PackedLayers
from megatron.slipstream.integration.seam import compat
from megatron.slipstream.integration.seam.layer_classes import convert, undo_on
from megatron.slipstream.integration.seam.specs import replace_classes
from megatron.slipstream.options.model import graphed_modules
from megatron.slipstream.patches import patching, table
from megatron.slipstream.patches.graph_calls import (
    captures_copies,
    notes_replay,
    replays_beside_copies,
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
    _inputs_now: Optional[Mapping[str, torch.Tensor]] = None
    """Static inputs of the running replay."""
    _mask_now: Optional[torch.Tensor] = None
    """The padding mask of the running capture or replay; megatron-core does not pass it on."""

    @functools.cached_property
    def captures_attention(self) -> bool:
        """Whether attention is in the layer's graphs."""
        parts = graphed_modules(self.config)
        return not parts or "attn" in parts

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """Run the layer's own forward; the first calls record the arguments to capture."""
        if self.packed is not None and self.training and torch.is_grad_enabled():
            hidden = arguments[0] if arguments else options["hidden_states"]
            self.packed.learn(self, hidden, _without_hidden(options))
        return super().forward(*arguments, **options)

    def _should_call_te_cudagraph(self, *arguments: Any, **options: Any) -> bool:
        is_graphed = super()._should_call_te_cudagraph(*arguments, **options)  # type: ignore[misc]
        if not is_graphed or not self.cuda_graphs:
            return bool(is_graphed)
        if not torch.is_grad_enabled():
            return False  # A pass without backward would use the graphs of one in flight.
        packed = self.packed
        return packed is None or not packed.is_captured or packed.has_slot_for(self)

    def _forward_mlp(self, hidden_states: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        if self._mask_now is not None:
            options.setdefault("padding_mask", self._mask_now)
        return super()._forward_mlp(hidden_states, *arguments, **options)  # type: ignore[misc]

    # Capture

    @captures_copies
    def _te_cuda_graph_capture(self, *arguments: Any, **inputs: Any) -> Any:
        return self._run_captured(*arguments, **inputs)

    def _run_captured(self, *arguments: Any, **inputs: Any) -> Any:
        """Run what the graph contains, with the arguments that its static inputs stand for."""
        run = super()._te_cuda_graph_capture  # type: ignore[misc]
        if self.packed is None or not self.packed.has_learned(self):
            return run(*arguments, **inputs)
        options = self.packed.captured_arguments(self, inputs)
        before, self._mask_now = self._mask_now, options.get("padding_mask")
        try:
            return run(*arguments, **(options if self.captures_attention else {}))
        finally:
            self._mask_now = before

    # Replay

    @notes_replay
    def _te_cuda_graph_replay(self, *arguments: Any, **options: Any) -> Any:
        replay = super()._te_cuda_graph_replay  # type: ignore[misc]
        if self.packed is None or not self.packed.is_captured:
            return replay(*arguments, **options)
        return self._replay_packed(self.packed, replay, *arguments, **options)

    def _replay_packed(
        self, packed: PackedLayers, replay: Callable[..., Any], *arguments: Any, **options: Any
    ) -> Any:
        call = _without_hidden(options)
        if packed.is_first(self):
            arguments, options = _with_hidden(arguments, options, packed.enter)
        self._inputs_now = packed.load(self, call)
        self._mask_now = call.get("padding_mask")
        if self.captures_attention:  # Otherwise megatron-core runs it before the graph.
            options = {name: options[name] for name in options if name == "hidden_states"}
        try:
            return replay(*arguments, **options)
        finally:
            self._inputs_now = self._mask_now = None

    @replays_beside_copies
    def _get_te_cuda_graph_replay_args(
        self, *arguments: Any, **options: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        positional, named = super()._get_te_cuda_graph_replay_args(  # type: ignore[misc]
            *arguments, **options
        )
        return positional, {**named, **(self._inputs_now or {})}


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
    """Make the layers of a model chunk that is not captured yet offload inside their graphs.

    Each layer gets a class derived from its own, whichever framework built it.

    Returns:
        Functions that undo the change.
    """
    layers = [one for one in chunk.modules() if isinstance(one, (TransformerLayer, MambaLayer))]
    undo = [convert(layer, GraphedMixin) for layer in layers]
    return undo + offload_layers(layers, getattr(chunk, "vp_stage", None) or 0, find_engine)


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
        model: Any = get_attr_wrapped_model(chunk, "decoder", return_model_obj=True)
        packed = PackedLayers(model, sizes_of(model, limits))
        undo.append(undo_on(packed, PackedLayers.close))
        for layer in model.decoder.layers:
            if isinstance(layer, TransformerLayer) and packed_of(layer) is None:
                undo.append(convert(layer, GraphedMixin))
                layer.packed = packed
    return undo


def _with_hidden(
    arguments: tuple[Any, ...], options: dict[str, Any], change: Callable[..., torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a layer's arguments with ``change`` applied to the hidden states."""
    if arguments:
        return (change(arguments[0]), *arguments[1:]), options
    return arguments, {**options, "hidden_states": change(options["hidden_states"])}


def _without_hidden(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "hidden_states"}
