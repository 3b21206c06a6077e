# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Copies inside the CUDA graphs of layers.

Transformer Engine captures the forward and the backward of each layer as graphs. A layer's
:class:`LayerCopies` notifies the engine where each graph begins and ends, and replays them on a
separate stream, so that work after a graph waits only for its computation, not for its last copies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Optional

import torch

from megatron.slipstream.fine_grained_activation_offload.graph_capture import (
    ONE_SIZE,
    GraphedLayer,
    GraphId,
)
from megatron.slipstream.integration.graphs.goals import warn_of_untimed_plan
from megatron.slipstream.integration.seam import compat, model_router
from megatron.slipstream.integration.seam.layer_classes import undo_on
from megatron.slipstream.integration.seam.manager import PipelineOffloadManager
from megatron.slipstream.options import preflight
from megatron.slipstream.options.rules import require

FindEngine = Callable[[], model_router.RoutedManager]


class LayerCopies:
    """Notifies the engine of the captures and replays of one layer, which its methods are given."""

    def __init__(self, vp_stage: int) -> None:
        self.vp_stage = vp_stage
        self.find_engine: Optional[FindEngine] = None
        """Returns the engine of the layer's model; None for that of the process."""
        self.event: Optional[torch.cuda.Event] = None
        """Recorded in each graph of the layer once only copies remain."""

    def engine_of(self, layer: Any) -> Optional[model_router.RoutedManager]:
        """Return the engine of the layer's model, or None if it has none."""
        if not layer.config.fine_grained_activation_offloading:
            return None
        current, find = model_router.installed(), self.find_engine
        return current if current is None or find is None else find()

    def capture(self, layer: Any, run: Callable[..., Any], *arguments: Any, **inputs: Any) -> Any:
        """Call ``run``, of which Transformer Engine makes a graph, or which it warms up."""
        manager = self.engine_of(layer)
        if manager is None:
            return run(*arguments, **inputs)
        with model_router.marks_go_to(manager):
            if manager.store.backend.is_capturing():
                return self._capture(layer, manager, run, *arguments, **inputs)
            # Transformer Engine is warming up: copies would be useless.
            open_graphs(layer)
            with manager.suspended():
                outputs = run(*arguments, **inputs)
            manager.graphs.reserve()
            return outputs

    def _capture(
        self,
        layer: Any,
        manager: model_router.RoutedManager,
        run: Callable[..., Any],
        *arguments: Any,
        **inputs: Any,
    ) -> Any:
        if self.event is None:
            self.event = torch.cuda.Event(external=True)
        record = self.event.record
        tensors = [item for item in (*arguments, *inputs.values()) if torch.is_tensor(item)]
        graphed = manager.graphs.begin_forward(self.vp_stage, layer.layer_number, tensors)
        try:
            outputs = run(*arguments, **inputs)
        finally:
            manager.graphs.end_forward(record)
        return _mark_backward(outputs, manager, graphed, record)

    def note_replay(self, layer: Any) -> None:
        manager = self.engine_of(layer)
        if manager is None:
            return
        manager.graphs.note_replay(GraphId(self.vp_stage, layer.layer_number, *_set_of(layer)))
        # Copies may be delayed until the next graph launch (delay_offload_until_cuda_graph):
        # none follows the last graph.
        if manager.graphs.is_last(self.vp_stage, layer.layer_number):
            manager.flush_delayed_groups()

    def stream_of(self, layer: Any) -> dict[str, Any]:
        """Return the arguments of Transformer Engine's graphs that say where they are replayed."""
        manager = self.engine_of(layer)
        # All graphs or none: they share memory, so one stream must order them.
        if manager is None or not manager.graphs.moves_anything:
            return {}
        return {"cuda_graph_stream": manager.cuda_graph_stream, "cuda_graph_event": self.event}


def offload_layers(
    layers: Iterable[Any], vp_stage: int, find_engine: FindEngine
) -> list[Callable[[], None]]:
    """Make layers, not captured yet, offload inside their graphs; return how to undo it.

    They are graphable layers of one chunk, with ``graph_copies``.
    """
    undo: list[Callable[[], None]] = []
    for layer in layers:
        if layer.graph_copies is None:
            marks = {name: vars(layer)[name] for name in _MARKS if name in vars(layer)}
            enable_offload(layer, vp_stage)
            undo.append(undo_on(layer, functools.partial(_disable_offload, marks)))
        # A hybrid model does not tell its layers their chunk when it builds them.
        layer.graph_copies.vp_stage, layer.graph_copies.find_engine = vp_stage, find_engine
        undo.append(undo_on(layer, _leave_engine))
    return undo


_MARKS = ("offload_attn_norm", "offload_mlp_norm", "offload_module_in_cuda_graph")
"""Attributes of a layer that depend on whether it offloads in its graphs."""


def enable_offload(layer: Any, vp_stage: int) -> None:
    """Make a layer of model chunk ``vp_stage`` notify the engine of its captures and replays."""
    layer.graph_copies = LayerCopies(vp_stage)
    # Disable megatron-core's own event records and waits: ours surround the whole layer, in every
    # release, whichever part of it is captured.
    layer.offload_module_in_cuda_graph = False
    compat.unmark_norms_at_graph_edges(layer)


def _disable_offload(marks: Mapping[str, Any], layer: Any) -> None:
    layer.graph_copies = None
    vars(layer).update(marks)


def _leave_engine(layer: Any) -> None:
    # They copy to host memory of the engine. Those of other sizes are not the layer's now.
    packed = packed_of(layer)
    if packed is not None:
        packed.hand_over_graphs()
    delete_graphs([layer])
    if layer.graph_copies is not None:
        layer.graph_copies.find_engine = None


def _set_of(layer: Any) -> tuple[int, int]:
    """Return number and context-parallel size of the graphs that a layer's micro-batch replays."""
    packed = packed_of(layer)
    if packed is not None and packed.is_captured:
        return packed.number, packed.size
    return preferred_set(layer, len(layer.cuda_graphs)), ONE_SIZE


def preferred_set(layer: Any, num_sets: int) -> int:
    """Return the number of the set that megatron-core's replay chooses."""
    return int(getattr(layer, "current_microbatch", 0)) % num_sets


def packed_of(layer: Any) -> Any:
    """Return the ``PackedLayers`` that a layer belongs to, or None."""
    return getattr(layer, "packed", None)


def open_graphs(
    layer: Any, num_sets: Optional[Sequence[int]] = None
) -> Optional[model_router.RoutedManager]:
    """Return the model's engine, prepared for graph capture; None if it has none.

    ``num_sets`` is the number of sets of graphs of each model chunk, which micro-batches use in
    turn. None: each micro-batch has its own graphs. Raises ``ValueError`` if the installed packages
    cannot capture copies.
    """
    copies: Optional[LayerCopies] = layer.graph_copies
    manager = copies.engine_of(layer) if copies is not None else None
    if manager is not None and not manager.graphs.is_open:
        require(preflight.check_graphs(preflight.collect()))
        manager.engine.lifecycle.read_times()  # The device is idle: a capture begins.
        warn_of_untimed_plan(manager.engine)
        manager.graphs.open(manager.plan, num_sets)
    return manager


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
    outputs: Any, manager: PipelineOffloadManager, graphed: GraphedLayer, record: Any
) -> Any:
    """Mark the beginning of backward on the first output that requires a gradient.

    Its node is created last, so autograd runs it before all other ready nodes. A Mamba layer
    returns a tensor, other layers a tuple or a list.
    """
    if torch.is_tensor(outputs):
        return _mark_backward((outputs,), manager, graphed, record)[0]
    for index, output in enumerate(outputs):
        if torch.is_tensor(output) and output.requires_grad:
            marked = _BackwardGraph.apply(output, manager, graphed, record)
            return (*outputs[:index], marked, *outputs[index + 1 :])
    return outputs
