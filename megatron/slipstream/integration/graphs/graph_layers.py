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

from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.transformer.transformer_layer import MoETransformerLayer, TransformerLayer

from megatron.slipstream import preflight
from megatron.slipstream.fine_grained_activation_offload.graph_capture import (
    ONE_SIZE,
    GraphedLayer,
    GraphId,
)
from megatron.slipstream.fine_grained_activation_offload.manager import PipelineOffloadManager
from megatron.slipstream.integration.graphs.graph_goals import warn_of_untimed_plan
from megatron.slipstream.integration.seam import compat, model_router
from megatron.slipstream.integration.seam.layer_classes import convert, undo_on
from megatron.slipstream.integration.seam.specs import replace_classes
from megatron.slipstream.patches.releases import is_since
from megatron.slipstream.rules import require


class GraphOffloadMixin(torch.nn.Module):
    """Mixin for megatron-core's graphable modules: orders their graphs with the engine's copies."""

    config: Any
    layer_number: int
    cuda_graphs: list[Any]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.take_part(options.get("vp_stage") or 0)

    def take_part(self, vp_stage: int) -> None:
        """Set up this layer to notify the engine of its captures.

        Args:
            vp_stage: Index of its model chunk.
        """
        self._vp_stage = vp_stage
        self.find_engine: Callable[[], model_router.RoutedManager] | None = None
        """Returns the layer's engine; set when the model is first called with gradients."""
        self._graph_event: Optional[torch.cuda.Event] = None
        """Recorded in each graph of the layer once only copies remain."""
        compat.unmark_norms_at_graph_edges(self)

    def _set_offload_modules(self) -> None:
        super()._set_offload_modules()  # type: ignore[misc]
        # Disable megatron-core's own event records and waits: ours surround the whole layer, in
        # every release, whichever part of it is captured.
        self.offload_module_in_cuda_graph = False

    def _te_cuda_graph_capture(self, *arguments: Any, **options: Any) -> Any:
        capture = super()._te_cuda_graph_capture  # type: ignore[misc]
        manager = _engine_of(self)
        if manager is None:
            return capture(*arguments, **options)
        with model_router.marks_go_to(manager):
            return self._capture(manager, capture, *arguments, **options)

    def _capture(
        self,
        manager: model_router.RoutedManager,
        capture: Callable[..., Any],
        *arguments: Any,
        **options: Any,
    ) -> Any:
        if not manager.store.backend.is_capturing():
            # Transformer Engine is warming up: copies would be useless.
            open_graphs(self)
            with manager.suspended():
                outputs = capture(*arguments, **options)
            manager.graphs.reserve()
            return outputs
        if self._graph_event is None:
            self._graph_event = torch.cuda.Event(external=True)
        record = self._graph_event.record
        inputs = [item for item in (*arguments, *options.values()) if torch.is_tensor(item)]
        graphed = manager.graphs.begin_forward(self._vp_stage, self.layer_number, inputs)
        try:
            outputs = tuple(capture(*arguments, **options))
        finally:
            manager.graphs.end_forward(record)
        return _mark_backward(outputs, manager, graphed, record)

    def _te_cuda_graph_replay(self, *arguments: Any, **options: Any) -> Any:
        outputs = super()._te_cuda_graph_replay(*arguments, **options)  # type: ignore[misc]
        manager = _engine_of(self)
        if manager is not None:
            manager.graphs.note_replay(self._replayed_graph())
        # Copies may be delayed until the next graph launch (delay_offload_until_cuda_graph): none
        # follows the last graph.
        if manager is not None and manager.graphs.is_last(self._vp_stage, self.layer_number):
            manager.flush_delayed_groups()
        return outputs

    def _replayed_graph(self) -> GraphId:
        """Return the graph replayed last, which megatron-core chooses in this way."""
        number = getattr(self, "current_microbatch", 0) % len(self.cuda_graphs)
        size = getattr(self, "replayed_size", ONE_SIZE)
        return GraphId(self._vp_stage, self.layer_number, number, size)

    def _get_te_cuda_graph_replay_args(
        self, *arguments: Any, **options: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        positional, named = super()._get_te_cuda_graph_replay_args(  # type: ignore[misc]
            *arguments, **options
        )
        manager = _engine_of(self)
        # All graphs or none: they share memory, so one stream must order them.
        if manager is not None and manager.graphs.moves_anything:
            named["cuda_graph_stream"] = manager.cuda_graph_stream
            named["cuda_graph_event"] = self._graph_event
        return positional, named


class GraphOffloadTransformerLayer(GraphOffloadMixin, TransformerLayer):
    """A ``TransformerLayer`` that also offloads inside its CUDA graphs."""


class GraphOffloadMoETransformerLayer(GraphOffloadMixin, MoETransformerLayer):
    """The same for the expert layers of a ``HybridModel``."""


class GraphOffloadMambaMixin(GraphOffloadMixin):
    """Mixin for ``MambaLayer``: orders the replay of its graphs with those of other layers."""

    def _set_offload_modules(self) -> None:
        """Do nothing: the layer has no offload marks."""


class GraphOffloadMambaLayer(GraphOffloadMambaMixin, MambaLayer):
    """A ``MambaLayer`` with :class:`GraphOffloadMambaMixin`."""


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
    """Make the layers of a model chunk offload inside their graphs, whichever framework built them.

    Each layer gets a class derived from its own.

    Args:
        chunk: A model chunk, not yet captured.
        find_engine: Returns the engine of its model.

    Returns:
        Functions that undo the change.
    """
    stage = getattr(chunk, "vp_stage", None) or 0
    undo: list[Callable[[], None]] = []
    for layer in chunk.modules():
        if not isinstance(layer, (TransformerLayer, MambaLayer)):
            continue
        if not isinstance(layer, GraphOffloadMixin):
            undo += _take_part(layer, stage)
        layer.find_engine = find_engine
        undo.append(undo_on(layer, _forget_engine))
    return undo


def _forget_engine(layer: Any) -> None:
    layer.find_engine = None


_MARKS = ("offload_attn_norm", "offload_mlp_norm", "offload_module_in_cuda_graph")
"""Attributes of a layer that depend on whether it offloads in its graphs."""


def _take_part(layer: Any, stage: int) -> list[Callable[[], None]]:
    """Convert one layer; return functions that undo it."""
    marks = {name: vars(layer)[name] for name in _MARKS if name in vars(layer)}
    is_mamba = isinstance(layer, MambaLayer)
    undo = convert(layer, GraphOffloadMambaMixin if is_mamba else GraphOffloadMixin)
    if is_since("0.19") and not is_mamba:
        layer._set_offload_modules()
    layer.take_part(stage)
    return [undo, undo_on(layer, lambda layer: vars(layer).update(marks))]


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
        manager.read_times()  # The device is idle: a capture begins.
        warn_of_untimed_plan(manager)
        manager.graphs.open(manager.plan, num_sets)
    return manager


def _engine_of(layer: Any) -> Optional[model_router.RoutedManager]:
    """Return the engine of the layer's model, or None if it has none."""
    if not layer.config.fine_grained_activation_offloading:
        return None
    current = model_router.installed()
    find = getattr(layer, "find_engine", None)
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
