# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Packed sequences in Transformer Engine's CUDA graphs of layers.

megatron-core captures layers for one sequence length, with a mask, and refuses packed sequences.
Here a layer's graphs are captured with the arguments of an eager iteration: their tensors (sequence
offsets, padding mask, rotary table) become static inputs, and everything else is a constant.

[Note: Slots of layer graphs]
megatron-core captures graphs for each micro-batch of an iteration. Here a model chunk has as many
sets of graphs as its schedule has micro-batches in flight. Micro-batches go through a chunk in one
order, forward and backward, so set ``m % number of sets`` is free for micro-batch ``m``, for any
number of micro-batches. The graphs of a set share one slot memory, which no other set uses.

[Note: A bank of layer graphs]
With dynamic context parallelism a set has graphs for each context-parallel size. They share its
memory: a set runs one micro-batch at a time, of one size, so the graphs of the other sizes are
idle. All ranks capture all sizes in the same order, largest first, and exchange after each size
whether it succeeded, as for a bank of chunk graphs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import get_attr_wrapped_model

from megatron.slipstream.context_parallel.limits import RankLimits
from megatron.slipstream.fine_grained_activation_offload.graph_capture import ONE_SIZE
from megatron.slipstream.graphs.bank import CpSizes, together
from megatron.slipstream.graphs.capture import Tail
from megatron.slipstream.graphs.slots import SlotMemory, Static, StaticInputs
from megatron.slipstream.graphs.static_arguments import (
    CapturedCall,
    StaticArguments,
    TensorFacts,
)
from megatron.slipstream.integration.graphs.cp_sizes import DynamicSizes
from megatron.slipstream.integration.graphs.layers import GraphedMixin, open_graphs
from megatron.slipstream.integration.graphs.rotary_tables import RotaryTables
from megatron.slipstream.integration.graphs.schedules import chunk_slots
from megatron.slipstream.integration.packed.context_parallel_groups import context_parallel_groups
from megatron.slipstream.integration.seam.layer_classes import convert, undo_on
from megatron.slipstream.options import preflight
from megatron.slipstream.options.rules import require
from megatron.slipstream.patches import table
from megatron.slipstream.patches.table import Feature

NUM_WARMUPS = 3
"""Warm-up passes before a size's first set is captured; each other set has one."""


class PackedLayers:
    """The layers of a model chunk that support packed sequences in their graphs.

    Args:
        model: The chunk, without wrappers.
        sizes: The context-parallel sizes of micro-batches; None if there is only one.
    """

    def __init__(self, model: torch.nn.Module, sizes: Optional[CpSizes] = None) -> None:
        self.model: Any = model
        self.sizes = sizes
        self.size = ONE_SIZE
        """The context-parallel size of the capture or of the current micro-batch."""
        self._hidden: Optional[TensorFacts] = None
        self._learned: dict[torch.nn.Module, StaticArguments] = {}
        self._forget_graphs()

    def _forget_graphs(self) -> None:
        self.sets: list[SlotMemory] = []
        """The memory of each set of graphs."""
        self._layers: Sequence[Any] = ()
        """The captured layers, in the order of a forward pass."""
        self._static_hidden: list[list[torch.Tensor]] = []
        """Static inputs of each set and layer, during the capture."""
        self._tables: Optional[RotaryTables] = None
        """Rotary tables, kept alive as long as the graphs."""
        self._calls: dict[int, dict[torch.nn.Module, CapturedCall]] = {}
        """Captured arguments by size and layer."""
        self._graphs: dict[int, list[dict[torch.nn.Module, Any]]] = {}
        """Graphs by size, set and layer."""
        self._loaded: dict[tuple[int, ...], tuple[tuple[Any, ...], dict[str, torch.Tensor]]] = {}
        """By the identity of the current micro-batch's arguments: these arguments, which must live
        as long as they are identified so, and the static inputs that they are copied to."""

    @property
    def is_captured(self) -> bool:
        """Whether graphs are captured."""
        return bool(self._graphs)

    def has_learned(self, layer: torch.nn.Module) -> bool:
        """Whether a layer has run with packed sequences."""
        return layer in self._learned

    def learn(self, layer: Any, hidden: torch.Tensor, options: Mapping[str, Any]) -> None:
        """Store a layer's arguments, except hidden states, from an eager iteration."""
        if options.get("packed_seq_params") is None or layer in self._learned:
            return
        self._hidden = TensorFacts.of(hidden)
        self._learned[layer] = StaticArguments.flatten(_seen_by_graphs(layer, options))

    # Capture

    @staticmethod
    def capture_with(helper: Any) -> None:
        """Capture the layers that have run with packed sequences.

        Args:
            helper: megatron-core's ``TECudaGraphHelper``.

        Raises:
            RuntimeError: The capture failed on another rank.
            ValueError: Transformer Engine is too old.
        """
        require(preflight.check_packed_graphs(preflight.collect()))
        config = helper.config
        tracker = get_cuda_rng_tracker()
        start = helper._start_capturing()
        try:
            # As in megatron-core's capture.
            with tracker.fork() if config.sequence_parallel else contextlib.nullcontext():
                _capture(config, _of_chunks(helper))
        except BaseException:
            helper._graphs_created = True
            helper.delete_cuda_graphs()
            cuda_graphs._set_capture_end()
            raise
        helper._graphs_created = True
        helper._finish_capturing(start)

    @staticmethod
    def delete_with(helper: Any) -> None:
        """Assign the helper's layers the graphs of every size; the helper then deletes them."""
        for layers in filter(None, _of_chunks(helper)):
            layers[0].packed.hand_over_graphs()

    def begin_capture(self, layers: Sequence[Any], sets: Sequence[SlotMemory]) -> None:
        """Allocate the inputs of these layers' graphs, in the memory of each set."""
        assert self._hidden is not None
        shape, dtype, device = self._hidden
        self._layers, self.sets = tuple(layers), list(sets)
        self._tables = RotaryTables(self.model)
        self._static_hidden = [
            [torch.zeros(shape, dtype=dtype, device=device, requires_grad=True) for _ in layers]
            for _ in sets
        ]

    def capture_size(self, size: int, make_graphs: Callable[..., Any], engine: Any = None) -> None:
        """Capture the graphs of all sets for one size.

        Args:
            size: The context-parallel size.
            make_graphs: Transformer Engine's ``make_graphed_callables``.
            engine: Offloads inside them; None if nothing moves.
        """
        assert self._tables is not None
        self.size = size
        self._calls[size] = self._calls_of(size)
        stage = getattr(self.model, "vp_stage", None) or 0
        of_sets: list[dict[torch.nn.Module, Any]] = []
        for number, memory in enumerate(self.sets):
            named = []
            for layer in self._layers:
                statics = self._statics_of(layer, memory)
                # Another size may have left its own values here.
                StaticInputs(statics.values()).renew(self._calls[size][layer].arguments.tensors)
                named.append({name: static.tensor for name, static in statics.items()})
            if engine is not None:
                engine.graphs.begin_set(stage, number, size)
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
            of_sets.append(dict(zip(self._layers, graphs, strict=True)))
        self._graphs[size] = of_sets

    def end_capture(self) -> None:
        """Assign the layers their graphs."""
        self._static_hidden.clear()  # Transformer Engine's functions keep them alive.
        for layer in self._layers:
            self._use(layer)

    def hand_over_graphs(self) -> None:
        """Assign each layer its graphs of all sizes and sets, to be deleted, and release memory."""
        for layer in self._layers:
            layer.cuda_graphs = [
                of_layers[layer] for of_sets in self._graphs.values() for of_layers in of_sets
            ]
        self._forget_graphs()

    def _calls_of(self, size: int) -> dict[torch.nn.Module, CapturedCall]:
        """Return the call of each layer in graphs for a size; equal calls are shared."""
        made: list[tuple[StaticArguments, CapturedCall]] = []
        calls = {}
        for layer in self._layers:
            learned = self._learned[layer]
            call = next((call for other, call in made if _is_same(other, learned)), None)
            if call is None:
                resized = StaticArguments.flatten(self._resized(learned, size))
                call = CapturedCall(resized)
                made.append((learned, call))
            calls[layer] = call
        return calls

    def _resized(self, learned: StaticArguments, size: int) -> Mapping[str, Any]:
        arguments = learned.unflatten(learned.tensors)
        if self.sizes is None or "packed_seq_params" not in arguments:
            return arguments
        return self.sizes.arguments_of(arguments, size)

    def _statics_of(self, layer: torch.nn.Module, memory: SlotMemory) -> dict[str, Static]:
        """Return the static inputs of a layer's graphs for the current size, by keyword."""
        call = self._calls[self.size][layer].arguments
        statics = {}
        for name, tensor in zip(call.names, call.tensors, strict=True):
            # Tables do not change, so layers and sets share the given one.
            is_table = tensor.is_floating_point()
            known_as = f"{name} of {self.size}" if is_table else name
            statics[_keyword(name)] = memory.static(known_as, tensor, is_shared=is_table)
        return statics

    def captured_arguments(self, layer: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Return the arguments of a layer that is captured with these static inputs."""
        call = self._calls[self.size][layer].arguments
        return call.unflatten([inputs[_keyword(name)] for name in call.names])

    # Replay

    def load(self, layer: Any, options: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Copy the arguments of a call into the static inputs of its micro-batch's set.

        All layers of a pass have the same arguments, so they are copied once.

        Returns:
            The static inputs, by keyword of the layer's graphs.

        Raises:
            ValueError: The graphs were not captured for such a micro-batch.
        """
        if layer is self._layers[0]:
            self._loaded.clear()
            self.size = ONE_SIZE if self.sizes is None else self.sizes.size_of(options)
        if self.sizes is not None:
            self._use(layer)
        arguments = tuple(options.values())
        key = tuple(map(id, arguments))
        if key not in self._loaded:
            self._loaded[key] = arguments, self._copied(layer, options)
        return self._loaded[key][1]

    def sends_gradient(self, layer: torch.nn.Module) -> bool:
        """Whether the gradient of a layer's input goes to another pipeline stage."""
        return layer is self._layers[0] and not self.model.pre_process

    def _copied(self, layer: Any, options: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        seen, call = _seen_by_graphs(layer, options), self._calls[self.size][layer]
        tensors = call.tensors_of(seen)
        if tensors is None:
            assert self._hidden is not None
            raise ValueError(
                "a micro-batch of packed sequences is not supported with graphs of layers that "
                f"were captured for {self._hidden.shape[0]} tokens because "
                f"{'; '.join(call.differences(seen))}; give all micro-batches one capacity "
                "(seq_length, thd_max_packed_sequences)"
            )
        memory = self.sets[layer.current_microbatch % len(self.sets)]
        statics = self._statics_of(layer, memory)
        StaticInputs(statics.values()).renew(tensors)
        return {name: static.tensor for name, static in statics.items()}

    def _use(self, layer: Any) -> None:
        """Make the layer replay the graphs of the current size."""
        layer.cuda_graphs = [of_layers[layer] for of_layers in self._graphs[self.size]]


def _of_chunks(helper: Any) -> list[list[Any]]:
    """Return the layers of each model chunk that have run with packed sequences."""
    return [
        [layer for layer in layers if (packed := _packed_of(layer)) and packed.has_learned(layer)]
        for layers in helper.callables_per_chunk
    ]


def _packed_of(layer: Any) -> Optional[PackedLayers]:
    return getattr(layer, "packed", None)


def _capture(config: Any, of_chunks: Sequence[Sequence[Any]]) -> None:
    """See [Note: A bank of layer graphs]."""
    slots = chunk_slots(config)
    chunks: list[PackedLayers] = []
    engine = None
    for layers, num_sets in zip(of_chunks, slots, strict=True):
        if layers:
            engine = engine if chunks else open_graphs(layers[0], slots)
            chunks.append(layers[0].packed)
            chunks[-1].begin_capture(layers, [_new_memory() for _ in range(num_sets)])
    sizes = chunks[0].sizes if chunks else None
    make_graphs = functools.partial(cuda_graphs.make_graphed_callables, **_options(config))

    def capture_all(size: int) -> None:
        for chunk in chunks:
            chunk.capture_size(size, make_graphs, engine)

    for size in (ONE_SIZE,) if sizes is None else sorted(sizes.sizes, reverse=True):
        together(sizes, size, functools.partial(capture_all, size))
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


def _new_memory() -> SlotMemory:
    pool = torch.cuda.graph_pool_handle() if torch.cuda.is_available() else None
    return SlotMemory(pool, Tail())


def _seen_by_graphs(layer: Any, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments that the captured part of a layer reads."""
    if layer.captures_attention:
        return options
    # Attention runs outside of graphs; only routers read more than hidden states.
    mask = options.get("padding_mask")
    return {} if mask is None else {"padding_mask": mask}


def _keyword(name: str) -> str:
    """Return a static input's keyword, from the path of the tensor in the arguments."""
    return "".join(letter if letter.isalnum() else "_" for letter in name)


def _is_same(left: StaticArguments, right: StaticArguments) -> bool:
    """Whether two calls have the same tensors and the same other values."""
    return left.rest == right.rest and list(map(id, left.tensors)) == list(map(id, right.tensors))


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
    table.apply(Feature.PACKED_LAYER_GRAPHS, Feature.FUSED_ROTATION)
    undo: list[Callable[[], None]] = [functools.partial(table.undo, Feature.PACKED_LAYER_GRAPHS)]
    for chunk in chunks:
        model: Any = get_attr_wrapped_model(chunk, "decoder", return_model_obj=True)
        sizes = None
        if limits is not None:
            sizes = DynamicSizes(model, limits, context_parallel_groups(limits))
        packed = PackedLayers(model, sizes)
        for layer in model.decoder.layers:
            if isinstance(layer, TransformerLayer) and _packed_of(layer) is None:
                if not isinstance(layer, GraphedMixin):
                    undo.append(convert(layer, GraphedMixin))
                layer.packed = packed
                undo.append(undo_on(layer, _forget_packed))
    return undo


def _forget_packed(layer: Any) -> None:
    layer.packed = None
