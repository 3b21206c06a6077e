# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Packed sequences in Transformer Engine's CUDA graphs of layers.

megatron-core captures layers for one sequence length, with a mask, and refuses packed sequences.
Here a layer's graphs are captured with the arguments of an eager iteration: their tensors (sequence
offsets, padding mask, rotary table) become static inputs, and everything else is a constant.

[Note: Slots of layer graphs]
megatron-core captures graphs for each micro-batch of an iteration. Here a model chunk has as many
sets of graphs as its schedule has micro-batches in flight. Micro-batches go through a chunk in one
order, forward and backward, so set ``m % number of sets`` is free for micro-batch ``m``, for any
number of micro-batches. The graphs of a set share one pool of device memory, which no other set
uses.

[Note: A bank of layer graphs]
With dynamic context parallelism a set has graphs for each context-parallel size. They share its
pool and its static inputs: a set runs one micro-batch at a time, of one size, so the graphs of the
other sizes are idle. Ranks of a group wait for one another while a size is warmed up and captured,
so all ranks capture all sizes in the same order, largest first, and exchange after each size
whether it succeeded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Optional

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import get_attr_wrapped_model

from megatron.slipstream.chunk_graphs.bank import CpSizes
from megatron.slipstream.chunk_graphs.static_arguments import (
    FastMatch,
    StaticArguments,
    TensorFacts,
)
from megatron.slipstream.context_parallel.limits import RankLimits
from megatron.slipstream.fine_grained_activation_offload.graph_capture import ONE_SIZE
from megatron.slipstream.integration.graphs.cp_graph_inputs import DynamicSizes
from megatron.slipstream.integration.graphs.graph_layers import GraphedMixin
from megatron.slipstream.integration.graphs.packed_layer_capture import capture, delete
from megatron.slipstream.integration.graphs.rotary_tables import RotaryTables
from megatron.slipstream.integration.packed.context_parallel_groups import context_parallel_groups
from megatron.slipstream.integration.seam.layer_classes import convert, undo_on
from megatron.slipstream.patches import table
from megatron.slipstream.patches.table import Feature

Tensors = dict[str, torch.Tensor]


class _Call(NamedTuple):
    """A layer's arguments except hidden states, as captured in its graphs for one size."""

    arguments: StaticArguments
    match: FastMatch

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> _Call:
        static = StaticArguments.flatten(arguments)
        return cls(static, FastMatch(static))

    def tensors_of(self, arguments: Mapping[str, Any], num_tokens: int) -> Sequence[torch.Tensor]:
        """Return the tensors of a later call.

        Raises:
            ValueError: The graphs were not captured for such a call.
        """
        tensors = self.match.tensors(arguments)
        if tensors is not None:
            return tensors
        call = StaticArguments.flatten(arguments)
        if self.arguments.matches(call):
            return call.tensors
        raise ValueError(
            f"a micro-batch of packed sequences is not supported with graphs of layers that were "
            f"captured for {num_tokens} tokens because "
            f"{'; '.join(self.arguments.differences(call))}; give all micro-batches one capacity "
            "(seq_length, thd_max_packed_sequences)"
        )


class PackedLayers:
    """The layers of a model chunk that support packed sequences in their graphs.

    Args:
        model: The chunk, without wrappers.
        sizes: The context-parallel sizes of micro-batches; None if there is only one.
    """

    def __init__(self, model: torch.nn.Module, sizes: Optional[CpSizes] = None) -> None:
        self.model: Any = model
        self.sizes = sizes
        self._hidden: Optional[TensorFacts] = None
        self._learned: dict[torch.nn.Module, StaticArguments] = {}
        self.pools: list[Any] = []
        """The device memory of each set of graphs."""
        self._tables: Optional[RotaryTables] = None
        """Rotary tables, kept alive as long as the graphs."""
        self._calls: dict[int, dict[torch.nn.Module, _Call]] = {}
        """Captured arguments by size and layer."""
        self._graphs: dict[int, list[dict[torch.nn.Module, Any]]] = {}
        """Graphs by size, set and layer."""
        self._static: list[Tensors] = []
        """The static inputs of each set except hidden states, by name."""
        self._static_hidden: list[list[torch.Tensor]] = []
        """Static inputs of each set and layer, during the capture."""
        self._first: Optional[torch.nn.Module] = None
        """The first layer of a pass."""
        self._size = ONE_SIZE
        """See :attr:`size`."""
        self._loaded: dict[tuple[int, ...], tuple[tuple[Any, ...], Tensors]] = {}
        """By the identity of the current micro-batch's arguments: these arguments, which must live
        as long as they are identified so, and the static inputs that they are copied to."""

    @property
    def size(self) -> int:
        """The context-parallel size of the capture or of the current micro-batch."""
        return self._size

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

    def capture_with(self, helper: Any) -> None:
        """Capture the graphs of all chunks of megatron-core's ``TECudaGraphHelper``."""
        capture(helper)

    def delete_with(self, helper: Any) -> None:
        """Assign the helper's layers all their graphs; the helper then deletes them."""
        delete(helper)

    def begin_capture(self, layers: Sequence[torch.nn.Module], pools: Sequence[Any]) -> None:
        """Allocate the static inputs of all sets for these layers.

        Args:
            layers: The layers.
            pools: Pools of device memory, one for each set.
        """
        assert self._hidden is not None
        self.pools, num_sets = list(pools), len(pools)
        self._first = layers[0]
        self._tables = RotaryTables(self.model)
        self._static = [{} for _ in range(num_sets)]
        self._static_hidden = [
            [self._new_hidden(self._hidden) for _ in layers] for _ in range(num_sets)
        ]

    def capture_size(
        self,
        size: int,
        layers: Sequence[torch.nn.Module],
        begin_set: Callable[[int], Mapping[str, Any]],
        make_graphs: Callable[..., Any],
    ) -> None:
        """Capture the graphs of all sets for one size.

        Args:
            size: The context-parallel size.
            layers: The layers, in the order of a forward pass.
            begin_set: Called before each set with its number; returns options of ``make_graphs``.
            make_graphs: Transformer Engine's ``make_graphed_callables``.
        """
        assert self._tables is not None
        self._size = size
        self._calls[size] = self._calls_of(size, layers)
        of_sets: list[dict[torch.nn.Module, Any]] = []
        for number in range(len(self._static)):
            named = [self._inputs_of(layer, number) for layer in layers]
            for layer, inputs in zip(layers, named, strict=True):
                # Another size may have left its own values here.
                arguments = self._calls[size][layer].arguments
                _copy(arguments.tensors, arguments, inputs)
            with self._tables.in_place():
                graphs = make_graphs(
                    tuple(layers),
                    [(hidden,) for hidden in self._static_hidden[number]],
                    sample_kwargs=named,
                    _order=[1, -1],
                    _num_layers_per_chunk=[len(layers)],
                    pool=self.pools[number],
                    **begin_set(number),
                )
            of_sets.append(dict(zip(layers, graphs, strict=True)))
        self._graphs[size] = of_sets

    def end_capture(self, layers: Sequence[Any]) -> None:
        """Assign the layers their graphs."""
        self._static_hidden.clear()  # Transformer Engine's functions keep them alive.
        for layer in layers:
            self._use(layer, self._size)

    @property
    def all_graphs(self) -> dict[torch.nn.Module, list[Any]]:
        """The graphs of each layer, for all sizes and sets."""
        found: dict[torch.nn.Module, list[Any]] = {}
        for of_sets in self._graphs.values():
            for of_layers in of_sets:
                for layer, graph in of_layers.items():
                    found.setdefault(layer, []).append(graph)
        return found

    def forget_graphs(self) -> None:
        """Release the memory of the graphs, after they are deleted."""
        self._graphs, self._calls, self._loaded = {}, {}, {}
        self._static, self._static_hidden, self.pools = [], [], []
        self._tables, self._first = None, None

    def _calls_of(self, size: int, layers: Sequence[torch.nn.Module]) -> dict[Any, _Call]:
        """Return the call of each layer in graphs for a size; equal calls are shared."""
        made: list[tuple[StaticArguments, _Call]] = []
        calls = {}
        for layer in layers:
            learned = self._learned[layer]
            call = next((call for other, call in made if _is_same(other, learned)), None)
            if call is None:
                call = _Call.of(self._resized(learned, size))
                made.append((learned, call))
            calls[layer] = call
        return calls

    def _resized(self, learned: StaticArguments, size: int) -> Mapping[str, Any]:
        arguments = learned.unflatten(learned.tensors)
        if self.sizes is None or "packed_seq_params" not in arguments:
            return arguments
        return self.sizes.arguments_of(arguments, size)

    def _inputs_of(self, layer: torch.nn.Module, number: int) -> Tensors:
        """Return the static inputs of a layer in a set, for graphs of the current size."""
        call, static = self._calls[self._size][layer].arguments, self._static[number]
        inputs = {}
        for name, tensor in zip(call.names, call.tensors, strict=True):
            key = f"{name} of {self._size}" if tensor.is_floating_point() else name
            if key not in static:
                # Tables do not change, so layers and sets share the given one.
                static[key] = tensor if tensor.is_floating_point() else tensor.clone()
            inputs[_keyword(name)] = static[key]
        return inputs

    @staticmethod
    def _new_hidden(facts: TensorFacts) -> torch.Tensor:
        return torch.zeros(facts.shape, dtype=facts.dtype, device=facts.device, requires_grad=True)

    def captured_arguments(self, layer: Any, inputs: Tensors) -> dict[str, Any]:
        """Return the arguments of a layer that is captured with these static inputs."""
        call = self._calls[self._size][layer].arguments
        return call.unflatten([inputs[_keyword(name)] for name in call.names])

    # Replay

    def load(self, layer: Any, options: Mapping[str, Any]) -> Tensors:
        """Copy the arguments of a call into the static inputs of its micro-batch's set.

        All layers of a pass have the same arguments, so they are copied once.

        Returns:
            The static inputs, by keyword of the layer's graphs.

        Raises:
            ValueError: The graphs were not captured for such a micro-batch.
        """
        if layer is self._first:
            self._loaded.clear()
            self._size = ONE_SIZE if self.sizes is None else self.sizes.size_of(options)
        if self.sizes is not None:
            self._use(layer, self._size)
        arguments = tuple(options.values())
        key = tuple(map(id, arguments))
        if key not in self._loaded:
            self._loaded[key] = arguments, self._copied(layer, options)
        return self._loaded[key][1]

    def sends_gradient(self, layer: torch.nn.Module) -> bool:
        """Whether the gradient of a layer's input goes to another pipeline stage."""
        return layer is self._first and not self.model.pre_process

    def _copied(self, layer: Any, options: Mapping[str, Any]) -> Tensors:
        number = layer.current_microbatch % len(self._static)
        inputs = self._inputs_of(layer, number)
        call = self._calls[self._size][layer]
        assert self._hidden is not None
        tensors = call.tensors_of(_seen_by_graphs(layer, options), self._hidden.shape[0])
        _copy(tensors, call.arguments, inputs)
        return inputs

    def _use(self, layer: Any, size: int) -> None:
        """Make the layer replay the graphs of a size."""
        layer.cuda_graphs = [of_layers[layer] for of_layers in self._graphs[size]]


def _copy(tensors: Sequence[torch.Tensor], call: StaticArguments, inputs: Tensors) -> None:
    """Copy the tensors of a call to static inputs."""
    for name, tensor in zip(call.names, tensors, strict=True):
        static = inputs[_keyword(name)]
        if static is not tensor:
            static.copy_(tensor)


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
            if isinstance(layer, TransformerLayer) and getattr(layer, "packed", None) is None:
                if not isinstance(layer, GraphedMixin):
                    undo.append(convert(layer, GraphedMixin))
                layer.packed = packed
                undo.append(undo_on(layer, _forget_packed))
    return undo


def _forget_packed(layer: Any) -> None:
    layer.packed = None
