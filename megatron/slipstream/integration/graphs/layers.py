# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Layers that offload activations inside Transformer Engine's CUDA graphs.

Transformer Engine captures the forward and the backward of each layer as graphs. The layers here
notify the engine where each graph begins and ends, and replay them on a separate stream, so that
work after a graph waits only for its computation, not for its last copies.

They replace megatron-core's layers in the model's spec:

    spec = with_graph_offloading(get_gpt_decoder_block_spec(config, use_transformer_engine=True))

If a framework builds its own layers, ``install()`` is enough: it gives them the classes of this
module when their model is first called with gradients, before any capture.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional

import torch
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.transformer.transformer_layer import MoETransformerLayer, TransformerLayer

from megatron.slipstream.fine_grained_activation_offload.graph_capture import (
    ONE_SIZE,
    GraphedLayer,
    GraphId,
)
from megatron.slipstream.integration.graphs.goals import warn_of_untimed_plan
from megatron.slipstream.integration.seam import compat, model_router
from megatron.slipstream.integration.seam.layer_classes import convert, undo_on
from megatron.slipstream.integration.seam.manager import PipelineOffloadManager
from megatron.slipstream.integration.seam.specs import replace_classes
from megatron.slipstream.options import preflight
from megatron.slipstream.options.model import graphed_modules
from megatron.slipstream.options.rules import require
from megatron.slipstream.patches.releases import is_since

if TYPE_CHECKING:
    from megatron.slipstream.integration.graphs.packed_layers import PackedLayers


class GraphedMixin(torch.nn.Module):
    """Mixin for megatron-core's graphable layers, on the three methods that capture and replay.

    It orders the layer's graphs with the engine's copies, and supports packed sequences in them.
    """

    config: Any
    layer_number: int
    cuda_graphs: list[Any]
    offloads = False
    """Whether it notifies the engine of its captures and replays."""
    find_engine: Optional[Callable[[], model_router.RoutedManager]] = None
    """Returns the layer's engine; set when the model is first called with gradients."""
    packed: Optional[PackedLayers] = None
    """The layers of its chunk in graphs of packed sequences; None if it does not support them."""
    _vp_stage = 0
    _graph_event: Optional[torch.cuda.Event] = None
    """Recorded in each graph of the layer once only copies remain."""
    _inputs_now: Optional[Mapping[str, torch.Tensor]] = None
    """Static inputs of the running replay."""
    _mask_now: Optional[torch.Tensor] = None
    """The padding mask of the running capture or replay; megatron-core does not pass it on."""

    @functools.cached_property
    def captures_attention(self) -> bool:
        """Whether attention is in the layer's graphs."""
        parts = graphed_modules(self.config)
        return not parts or "attn" in parts

    def enable_offload(self, vp_stage: int) -> None:
        """Make this layer of model chunk ``vp_stage`` notify the engine of its captures."""
        self.offloads, self._vp_stage, self._graph_event = True, vp_stage, None
        compat.unmark_norms_at_graph_edges(self)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """Run the layer's own forward; the first calls record the arguments to capture."""
        if self.packed is not None and self.training and torch.is_grad_enabled():
            hidden = arguments[0] if arguments else options["hidden_states"]
            self.packed.learn(self, hidden, _without_hidden(options))
        return super().forward(*arguments, **options)

    def _set_offload_modules(self) -> None:
        if isinstance(self, MambaLayer):
            return  # It has no offload marks.
        super()._set_offload_modules()  # type: ignore[misc]
        # Disable megatron-core's own event records and waits: ours surround the whole layer, in
        # every release, whichever part of it is captured.
        self.offload_module_in_cuda_graph = False

    def _should_call_te_cudagraph(self, *arguments: Any, **options: Any) -> bool:
        is_graphed = super()._should_call_te_cudagraph(*arguments, **options)  # type: ignore[misc]
        if self.packed is None or not self.cuda_graphs:
            return bool(is_graphed)
        if not is_graphed or not torch.is_grad_enabled():
            return False  # A pass without backward would use the graphs of one in flight.
        return not self.packed.is_captured or self.packed.has_slot_for(self)

    def _forward_mlp(self, hidden_states: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        if self._mask_now is not None:
            options.setdefault("padding_mask", self._mask_now)
        return super()._forward_mlp(hidden_states, *arguments, **options)  # type: ignore[misc]

    # Capture

    def _te_cuda_graph_capture(self, *arguments: Any, **inputs: Any) -> Any:
        manager = _engine_of(self)
        if manager is None:
            return self._run_captured(*arguments, **inputs)
        with model_router.marks_go_to(manager):
            if manager.store.backend.is_capturing():
                return self._capture(manager, *arguments, **inputs)
            # Transformer Engine is warming up: copies would be useless.
            open_graphs(self)
            with manager.suspended():
                outputs = self._run_captured(*arguments, **inputs)
            manager.graphs.reserve()
            return outputs

    def _capture(self, manager: model_router.RoutedManager, *arguments: Any, **inputs: Any) -> Any:
        if self._graph_event is None:
            self._graph_event = torch.cuda.Event(external=True)
        record = self._graph_event.record
        tensors = [item for item in (*arguments, *inputs.values()) if torch.is_tensor(item)]
        graphed = manager.graphs.begin_forward(self._vp_stage, self.layer_number, tensors)
        try:
            outputs = tuple(self._run_captured(*arguments, **inputs))
        finally:
            manager.graphs.end_forward(record)
        return _mark_backward(outputs, manager, graphed, record)

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

    @property
    def _set_now(self) -> tuple[int, int]:
        """Number and context-parallel size of the graphs that the current micro-batch replays."""
        if self.packed is not None and self.packed.is_captured:
            return self.packed.number, self.packed.size
        return getattr(self, "current_microbatch", 0) % len(self.cuda_graphs), ONE_SIZE

    def _te_cuda_graph_replay(self, *arguments: Any, **options: Any) -> Any:
        replay = super()._te_cuda_graph_replay  # type: ignore[misc]
        if self.packed is None or not self.packed.is_captured:
            outputs = replay(*arguments, **options)
        else:
            outputs = self._replay_packed(self.packed, replay, *arguments, **options)
        manager = _engine_of(self)
        if manager is not None:
            graph = GraphId(self._vp_stage, self.layer_number, *self._set_now)
            manager.graphs.note_replay(graph)
            # Copies may be delayed until the next graph launch (delay_offload_until_cuda_graph):
            # none follows the last graph.
            if manager.graphs.is_last(self._vp_stage, self.layer_number):
                manager.flush_delayed_groups()
        return outputs

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

    def _get_te_cuda_graph_replay_args(
        self, *arguments: Any, **options: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        positional, named = super()._get_te_cuda_graph_replay_args(  # type: ignore[misc]
            *arguments, **options
        )
        named = {**named, **(self._inputs_now or {})}
        manager = _engine_of(self)
        # All graphs or none: they share memory, so one stream must order them.
        if manager is not None and manager.graphs.moves_anything:
            named["cuda_graph_stream"] = manager.cuda_graph_stream
            named["cuda_graph_event"] = self._graph_event
        return positional, named


class _OffloadsFromTheStart(GraphedMixin):
    """Mixin for layers that a spec builds: they offload in their graphs."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.enable_offload(options.get("vp_stage") or 0)


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


def offload_in_graphs(
    chunk: torch.nn.Module, find_engine: Callable[[], model_router.RoutedManager]
) -> list[Callable[[], None]]:
    """Make the layers of a model chunk that is not captured yet offload inside their graphs.

    Each layer gets a class derived from its own, whichever framework built it.

    Returns:
        Functions that undo the change.
    """
    stage = getattr(chunk, "vp_stage", None) or 0
    undo: list[Callable[[], None]] = []
    for layer in chunk.modules():
        if not isinstance(layer, (TransformerLayer, MambaLayer)):
            continue
        undo.append(convert(layer, GraphedMixin))
        if not layer.offloads:
            marks = {name: vars(layer)[name] for name in _MARKS if name in vars(layer)}
            if is_since("0.19"):
                layer._set_offload_modules()
            layer.enable_offload(stage)
            undo.append(undo_on(layer, functools.partial(_disable_offload, marks)))
        layer.find_engine = find_engine
        undo.append(undo_on(layer, _leave_engine))
    return undo


_MARKS = ("offload_attn_norm", "offload_mlp_norm", "offload_module_in_cuda_graph")
"""Attributes of a layer that depend on whether it offloads in its graphs."""


def _disable_offload(marks: Mapping[str, Any], layer: Any) -> None:
    layer.offloads = False
    vars(layer).update(marks)


def _leave_engine(layer: Any) -> None:
    delete_graphs([layer])  # They copy to host memory of the engine.
    layer.find_engine = None


def delete_graphs(layers: Iterable[Any]) -> None:
    """Delete the graphs of layers, which run eagerly until they are captured again."""
    for layer in layers:
        graphs = getattr(layer, "cuda_graphs", None)
        if not graphs:
            continue
        finish_replays()
        for graph in graphs:
            if hasattr(graph, "reset"):  # since Transformer Engine 2.10
                graph.reset()
        layer.cuda_graphs, layer.cuda_graph_manual_hooks = [], []


def finish_replays() -> None:
    """Wait until no graph runs, before what graphs use is freed."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # H2


def open_graphs(
    layer: Any, num_sets: Optional[Sequence[int]] = None
) -> Optional[model_router.RoutedManager]:
    """Prepare the engine for graph capture; do nothing if it is already prepared.

    Args:
        layer: A layer of the model.
        num_sets: Number of sets of graphs of each model chunk, which micro-batches use in turn.
            None: each micro-batch has its own graphs.

    Returns:
        The engine of the model, or None if it has none.

    Raises:
        ValueError: The installed packages cannot capture copies.
    """
    manager = _engine_of(layer)
    if manager is not None and not manager.graphs.is_open:
        require(preflight.check_graphs(preflight.collect()))
        manager.engine.lifecycle.read_times()  # The device is idle: a capture begins.
        warn_of_untimed_plan(manager.engine)
        manager.graphs.open(manager.plan, num_sets)
    return manager


def _engine_of(layer: Any) -> Optional[model_router.RoutedManager]:
    """Return the engine of the layer's model, or None if it has none."""
    if not (layer.offloads and layer.config.fine_grained_activation_offloading):
        return None
    current, find = model_router.installed(), layer.find_engine
    return current if current is None or find is None else find()


class _BackwardGraph(torch.autograd.Function):
    """Identity whose backward is the first operation in the layer's backward graph."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        manager: PipelineOffloadManager,
        graphed: GraphedLayer,
        record: Any,
    ) -> torch.Tensor:
        ctx.captured = (manager.graphs, graphed, record)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        graphs, graphed, record = ctx.captured
        graphs.begin_backward(graphed)
        # Runs after the last backward operation is captured, whichever it is.
        torch.autograd.Variable._execution_engine.queue_callback(
            lambda: graphs.end_backward(record)
        )
        return grad_outputs[0], None, None, None


def _mark_backward(
    outputs: tuple[Any, ...],
    manager: PipelineOffloadManager,
    graphed: GraphedLayer,
    record: Any,
) -> tuple[Any, ...]:
    """Mark the beginning of backward on the first output that requires a gradient.

    Its node is created last, so autograd runs it before all other ready nodes.
    """
    for index, output in enumerate(outputs):
        if torch.is_tensor(output) and output.requires_grad:
            marked = _BackwardGraph.apply(output, manager, graphed, record)
            return (*outputs[:index], marked, *outputs[index + 1 :])
    return outputs


def _with_hidden(
    arguments: tuple[Any, ...], options: dict[str, Any], change: Callable[..., torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a layer's arguments with ``change`` applied to the hidden states."""
    if arguments:
        return (change(arguments[0]), *arguments[1:]), options
    return arguments, {**options, "hidden_states": change(options["hidden_states"])}


def _without_hidden(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "hidden_states"}
