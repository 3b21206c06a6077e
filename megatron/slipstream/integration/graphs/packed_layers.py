# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Packed sequences in Transformer Engine's CUDA graphs of layers.

megatron-core captures layers for one sequence length, with a mask, and refuses packed sequences.
Here a layer's graphs are captured with the arguments of an eager iteration: their tensors (sequence
offsets, padding mask, rotary table) become static inputs, and everything else is a constant.

[Note: Slots of layer graphs]
megatron-core captures graphs for each micro-batch of an iteration. Here a model chunk has as many
sets of graphs as its schedule has micro-batches in flight. Micro-batches go through a chunk in one
order, forward and backward, so set ``m % number of sets`` is free for micro-batch ``m``, for any
number of micro-batches. With a schedule of another order it takes another free set, or runs
eagerly. The graphs of a set share one slot memory, which no other set uses.

[Note: A bank of layer graphs]
With dynamic context parallelism a set has graphs for each context-parallel size. They share its
memory: a set runs one micro-batch at a time, of one size, so the graphs of the other sizes are
idle. All ranks capture all sizes in the same order, largest first, and exchange after each size
whether it succeeded, as for a bank of chunk graphs.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import get_attr_wrapped_model

from megatron.slipstream.context_parallel.limits import RankLimits
from megatron.slipstream.fine_grained_activation_offload.activation_store import ActivationStore
from megatron.slipstream.fine_grained_activation_offload.graph_capture import ONE_SIZE
from megatron.slipstream.graphs.bank import CpSizes
from megatron.slipstream.graphs.capture import CudaGraphs, EagerGraphs
from megatron.slipstream.graphs.slots import (
    SlotAllocation,
    SlotMemories,
    SlotMemory,
    Static,
    StaticInputs,
)
from megatron.slipstream.graphs.static_arguments import StaticArguments, TensorFacts
from megatron.slipstream.integration.graphs.cp_sizes import sizes_of
from megatron.slipstream.integration.graphs.layer_copies import (
    delete_graphs,
    finish_replays,
    open_graphs,
    packed_of,
    preferred_set,
)
from megatron.slipstream.integration.graphs.rotary_tables import RotaryTables, constant_arguments
from megatron.slipstream.integration.graphs.schedules import chunk_slots
from megatron.slipstream.integration.seam.model_router import stage_of
from megatron.slipstream.options import preflight
from megatron.slipstream.options.model import graphed_modules
from megatron.slipstream.options.rules import require

NUM_WARMUPS = 3
"""Warm-up passes before a size's first set is captured; each other set has one."""


class PackedLayers:
    """The layers of a model chunk that support packed sequences in their graphs."""

    def __init__(self, model: torch.nn.Module, sizes: CpSizes) -> None:
        self.model: Any = model
        self.sizes = sizes
        self._stage = stage_of(model)
        self._anchor = torch.zeros((), requires_grad=True)
        """Input of a pass whose hidden states need no gradient."""
        self.size = ONE_SIZE
        """The context-parallel size of the capture or of the current micro-batch."""
        self._constants = constant_arguments(model)
        parts = graphed_modules(self.model.config)
        self.captures_attention = not parts or "attn" in parts
        """Whether attention is in the graphs."""
        self.mask_now: Optional[torch.Tensor] = None
        """The padding mask of the running capture or replay; megatron-core does not pass it on."""
        self.inputs_now: Mapping[str, torch.Tensor] = {}
        """Static inputs of the running replay, by keyword of the layer's graphs."""
        self._hidden: Optional[TensorFacts] = None
        self._learned: dict[torch.nn.Module, StaticArguments] = {}
        self._forget_graphs()

    def _forget_graphs(self) -> None:
        self.sets = SlotMemories()
        """The memory of each set of graphs."""
        self.number = 0
        """The set of the current micro-batch."""
        self._store: Optional[ActivationStore] = None
        """Copies inside the graphs; None if nothing moves."""
        self._taken: Optional[SlotAllocation] = None
        """Its use of the set, until autograd keeps it."""
        self._runs_eagerly = False
        """Whether the current micro-batch has no set."""
        self._layers: Sequence[Any] = ()
        """The captured layers, in the order of a forward pass."""
        self._static_hidden: list[list[torch.Tensor]] = []
        """Static inputs of each set and layer, during the capture."""
        self._tables: Optional[RotaryTables] = None
        """Rotary tables, kept alive as long as the graphs."""
        self._calls: dict[int, dict[torch.nn.Module, StaticArguments]] = {}
        """Captured arguments by size and layer."""
        self._graphs: dict[int, dict[torch.nn.Module, list[Any]]] = {}
        """Graphs by size, layer and set."""
        self._loaded: dict[tuple[int, ...], tuple[tuple[Any, ...], dict[str, torch.Tensor]]] = {}
        """By the identity of the current micro-batch's arguments: these arguments, which must live
        as long as they are identified so, and the static inputs that they are copied to."""

    @property
    def own_layers(self) -> list[Any]:
        return [layer for layer in self.model.decoder.layers if packed_of(layer) is self]

    @property
    def is_captured(self) -> bool:
        return bool(self._graphs)

    def has_learned(self, layer: torch.nn.Module) -> bool:
        return layer in self._learned

    def learn(self, layer: Any, *arguments: Any, **options: Any) -> None:
        if options.get("packed_seq_params") is None or layer in self._learned:
            return
        self._hidden = TensorFacts.of(arguments[0] if arguments else options["hidden_states"])
        seen = self._seen_by_graphs(_without_hidden(options))
        self._learned[layer] = StaticArguments.flatten(seen)

    # Capture

    @staticmethod
    def capture_with(helper: Any) -> None:
        """Capture the layers that have run with packed sequences.

        Raises ``ValueError`` if Transformer Engine is too old, ``RuntimeError`` if another rank
        failed.
        """
        require(preflight.check_graphs(preflight.collect(), is_packed=True))
        config = helper.config
        tracker = get_cuda_rng_tracker()
        start = helper._start_capturing()
        try:
            # As in megatron-core's capture.
            with tracker.fork() if config.sequence_parallel else contextlib.nullcontext():
                _capture(config, _of_chunks(helper))
        except BaseException:
            helper._graphs_created = True
            try:
                helper.delete_cuda_graphs()
            finally:
                cuda_graphs._set_capture_end()
            raise
        helper._graphs_created = True
        helper._finish_capturing(start)

    @staticmethod
    def delete_with(helper: Any) -> None:
        """Assign the helper's layers the graphs of every size; the helper then deletes them."""
        for layers in filter(None, _of_chunks(helper)):
            layers[0].packed.hand_over_graphs()

    def begin_capture(self, layers: Sequence[Any], sets: SlotMemories) -> None:
        """Allocate the inputs of these layers' graphs, in the memory of each set."""
        assert self._hidden is not None
        shape, dtype, device = self._hidden
        self._layers, self.sets = tuple(layers), sets
        self._tables = RotaryTables(self.model)
        self._static_hidden = [
            [torch.zeros(shape, dtype=dtype, device=device, requires_grad=True) for _ in layers]
            for _ in sets
        ]

    def capture_size(self, size: int, make_graphs: Callable[..., Any], engine: Any = None) -> None:
        """Capture the graphs of all sets for one size."""
        assert self._tables is not None
        self.size = size
        self._calls[size] = {layer: self._call_of(layer, size) for layer in self._layers}
        of_layers: dict[torch.nn.Module, list[Any]] = {layer: [] for layer in self._layers}
        for number, memory in enumerate(self.sets):
            named = []
            for layer in self._layers:
                statics = self._statics_of(layer, memory)
                # Another size may have left its own values here.
                StaticInputs(statics.values()).renew(self._calls[size][layer].tensors)
                named.append({name: static.tensor for name, static in statics.items()})
            if engine is not None:
                self._store = engine.store
                pool = memory.host_pool or memory.share_host_pool(engine.store)
                engine.graphs.begin_set(self._stage, number, size, pool)
            with self._tables.in_place():
                graphs = make_graphs(
                    self._layers,
                    [(hidden,) for hidden in self._static_hidden[number]],
                    sample_kwargs=named,
                    _order=[1, -1],
                    _num_layers_per_chunk=[len(self._layers)],
                    pool=memory.pool,
                    num_warmup_iters=1 if number else NUM_WARMUPS,
                )
            for layer, graph in zip(self._layers, graphs, strict=True):
                of_layers[layer].append(graph)
        self._graphs[size] = of_layers

    def end_capture(self) -> None:
        self._static_hidden.clear()  # Transformer Engine's functions keep them alive.
        for layer in self._layers:
            layer.cuda_graphs = self._graphs[self.size][layer]

    def hand_over_graphs(self) -> None:
        """Assign each layer its graphs of all sizes and sets, to be deleted, and release memory."""
        finish_replays()
        if self._store is not None:
            self._store.copy_streams.finish()  # edge E7
            for memory in self.sets:
                memory.leave_host_pool()
        for layer in self._layers:
            graphs = (of_layers[layer] for of_layers in self._graphs.values())
            layer.cuda_graphs = list(itertools.chain.from_iterable(graphs))
        self._forget_graphs()

    def close(self) -> None:
        layers = self._layers
        self.hand_over_graphs()
        delete_graphs(layers)
        for layer in self.own_layers:
            layer.packed = None

    def _call_of(self, layer: torch.nn.Module, size: int) -> StaticArguments:
        learned = self._learned[layer]
        arguments: Mapping[str, Any] = learned.unflatten(learned.tensors)
        if "packed_seq_params" in arguments:
            arguments = self.sizes.arguments_of(arguments, size)
        return StaticArguments.flatten(arguments)

    def _statics_of(self, layer: torch.nn.Module, memory: SlotMemory) -> dict[str, Static]:
        """Return the static inputs of a layer's graphs for the current size, by keyword."""
        call = self._calls[self.size][layer]
        statics = {}
        for name, tensor in zip(call.names, call.tensors, strict=True):
            statics[_keyword(name)] = memory.static(name, tensor, name in self._constants)
        return statics

    def capture(self, layer: Any, run: Callable[..., Any], *arguments: Any, **inputs: Any) -> Any:
        """Run what the graph contains, with the arguments that its static inputs stand for."""
        call = self._calls[self.size][layer]
        options = call.unflatten([inputs[_keyword(name)] for name in call.names])
        before, self.mask_now = self.mask_now, options.get("padding_mask")
        try:
            return run(*arguments, **(options if self.captures_attention else {}))
        finally:
            self.mask_now = before

    # Replay

    def replay(self, layer: Any, run: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Replay the graphs of a layer with ``run``, after :meth:`has_slot_for`."""
        call = _without_hidden(options)
        if layer is self._layers[0]:
            arguments, options = _with_hidden(arguments, options, self.enter)
        self.inputs_now = self.load(layer, call)
        self.mask_now = call.get("padding_mask")
        if self.captures_attention:  # Otherwise megatron-core runs it before the graph.
            options = {name: options[name] for name in options if name == "hidden_states"}
        try:
            return run(*arguments, **options)
        finally:
            self.inputs_now, self.mask_now = {}, None

    def load(self, layer: Any, options: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Copy the arguments of a call into the static inputs of its micro-batch's set.

        All layers of a pass have the same arguments, so they are copied once. Returns the static
        inputs by keyword of the layer's graphs; raises ``ValueError`` if these are of other
        micro-batches.
        """
        if layer is self._layers[0]:
            self._loaded.clear()
            self.size = self.sizes.size_of(options)
        graphs = self._graphs[self.size][layer]
        number = preferred_set(layer, len(graphs))
        if number != self.number:
            graphs = [*graphs]
            graphs[number] = graphs[self.number]
        layer.cuda_graphs = graphs
        arguments = tuple(options.values())
        key = tuple(map(id, arguments))
        if key not in self._loaded:
            self._loaded[key] = arguments, self._copied(layer, options)
        return self._loaded[key][1]

    def has_slot_for(self, layer: Any) -> bool:
        """Return whether the current micro-batch has a set of graphs, before its layer runs.

        The first layer takes one for the whole chunk: [Note: Slots of layer graphs].
        """
        if layer is self._layers[0]:
            self._taken = None
            name = f"the layers of model chunk {self._stage}"
            taken = self.sets.take(name, preferred_set(layer, len(self.sets)))
            self._runs_eagerly = taken is None
            if taken is not None:
                self.number, self._taken = taken
        return not self._runs_eagerly

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return a micro-batch's hidden states; their gradient frees its set."""
        anchor = None if hidden.requires_grad else self._anchor  # so that backward runs
        taken, self._taken = self._taken, None
        output: torch.Tensor = _Entered.apply(hidden, anchor, taken, not self.model.pre_process)
        return output

    def _copied(self, layer: Any, options: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        seen, call = self._seen_by_graphs(options), self._calls[self.size][layer]
        tensors = call.tensors_of(seen)
        if tensors is None:
            assert self._hidden is not None
            raise ValueError(
                "a micro-batch of packed sequences is not supported with graphs of layers that "
                f"were captured for {self._hidden.shape[0]} tokens because "
                f"{'; '.join(call.differences(seen))}; give all micro-batches one capacity "
                "(seq_length, thd_max_packed_sequences)"
            )
        statics = self._statics_of(layer, self.sets[self.number])
        StaticInputs(statics.values()).renew(tensors)
        return {name: static.tensor for name, static in statics.items()}

    def _seen_by_graphs(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arguments that the captured part of a layer reads."""
        if self.captures_attention:
            return options
        # Attention runs outside of graphs; only routers read more than hidden states.
        mask = options.get("padding_mask")
        return {} if mask is None else {"padding_mask": mask}


def pack_layers(chunk: torch.nn.Module, limits: Optional[RankLimits]) -> PackedLayers:
    """Make the layers of a model chunk take packed sequences, except those that do already.

    They must not be captured yet. ``limits`` are those of ``with_packed_layer_graphs``.
    """
    model: Any = get_attr_wrapped_model(chunk, "decoder", return_model_obj=True)
    packed = PackedLayers(model, sizes_of(model, limits))
    for layer in model.decoder.layers:
        if isinstance(layer, TransformerLayer) and packed_of(layer) is None:
            layer.packed = packed
    return packed


class _Entered(torch.autograd.Function):
    """Identity in front of a chunk's first layer, whose backward is the last of its graphs'."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        anchor: Optional[torch.Tensor],
        taken: SlotAllocation,
        is_sent: bool,
    ) -> torch.Tensor:
        ctx.taken, ctx.is_sent = taken, is_sent
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (grad,) = grad_outputs
        ctx.taken.end()
        # The send to the previous stage may still run when the next micro-batch uses the set that
        # owns the memory.
        return grad.clone() if ctx.is_sent else grad, None, None, None


def _of_chunks(helper: Any) -> list[list[Any]]:
    """Return the layers of each model chunk that have run with packed sequences."""
    return [
        [layer for layer in layers if (packed := packed_of(layer)) and packed.has_learned(layer)]
        for layers in helper.callables_per_chunk
    ]


def _capture(config: Any, of_chunks: Sequence[Sequence[Any]]) -> None:
    """See [Note: A bank of layer graphs]."""
    slots = chunk_slots(config)
    backend = CudaGraphs() if torch.cuda.is_available() else EagerGraphs()
    chunks: list[PackedLayers] = []
    engine = None
    for layers, num_sets in zip(of_chunks, slots, strict=True):
        if layers:
            engine = engine if chunks else open_graphs(layers[0], slots)
            chunks.append(layers[0].packed)
            chunks[-1].begin_capture(layers, SlotMemories.of(backend, num_sets))
    sizes = chunks[0].sizes if chunks else CpSizes()
    make_graphs = functools.partial(cuda_graphs.make_graphed_callables, **_options(config))

    def capture_all(size: int) -> None:
        for chunk in chunks:
            chunk.capture_size(size, make_graphs, engine)

    for size in sorted(sizes.sizes, reverse=True):
        sizes.together(size, functools.partial(capture_all, size))
    for chunk in chunks:
        chunk.end_capture()


def _options(config: Any) -> dict[str, Any]:
    options: dict[str, Any] = {
        "allow_unused_input": True,
        "retain_graph_in_backward": config.cuda_graph_retain_backward_graph,
        "_reuse_graph_input_output_buffers": True,
    }
    if config.gradient_accumulation_fusion:
        # Graphs then return dummy gradients; real ones must not be shared.
        options["clone_param_grads_on_return"] = False
    return options


def _with_hidden(
    arguments: tuple[Any, ...], options: dict[str, Any], change: Callable[..., torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a layer's arguments with ``change`` applied to the hidden states."""
    if arguments:
        return (change(arguments[0]), *arguments[1:]), options
    return arguments, {**options, "hidden_states": change(options["hidden_states"])}


def _without_hidden(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "hidden_states"}


def _keyword(name: str) -> str:
    """Return a static input's keyword, from the path of the tensor in the arguments."""
    return "".join(letter if letter.isalnum() else "_" for letter in name)
