# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""What graphs of layers with packed sequences read and return, call by call."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, Optional
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron.slipstream.fine_grained_activation_offload.graph_capture import ONE_SIZE
from megatron.slipstream.graphs.bank import CpSizes
from megatron.slipstream.graphs.capture import Tail
from megatron.slipstream.graphs.slots import SlotMemories, SlotMemory
from megatron.slipstream.integration.graphs.layer_copies import offload_layers
from megatron.slipstream.integration.graphs.packed_layers import PackedLayers
from megatron.slipstream.patches.layer_capture import keeps_padding_mask, replays_packed

OFFSETS = "packed_seq_params_cu_seqlens_q"


def arguments(end: int) -> dict[str, Any]:
    """Of a micro-batch whose first sequence has ``end`` tokens."""
    offsets = torch.tensor([0, end, 8], dtype=torch.int32)
    mask = torch.arange(8)[None] >= end
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=offsets, cu_seqlens_kv=offsets)
    return {"packed_seq_params": packed, "padding_mask": mask}


def captured(*layers: Any, num_sets: int = 1, pre_process: bool = True) -> PackedLayers:
    """Layers with graphs; a graph is its static inputs."""
    model: Any = torch.nn.Module()
    model.pre_process = pre_process
    model.config = SimpleNamespace()
    packed, learned = PackedLayers(model, CpSizes()), arguments(4)
    for layer in layers:
        packed.learn(layer, torch.ones(8, 1, 4), **learned)
    packed.begin_capture(layers, SlotMemories(SlotMemory(None, Tail()) for _ in range(num_sets)))

    def make_graphs(*_: Any, sample_kwargs: list[Mapping[str, Any]], **options: Any) -> Any:
        return sample_kwargs

    packed.capture_size(ONE_SIZE, make_graphs)
    packed.end_capture()
    return packed


def new_layer(set_number: int = 0) -> Any:
    return _FakeLayer(current_microbatch=set_number)


class _FakeLayer(SimpleNamespace):
    __hash__ = object.__hash__


def ends(inputs: Mapping[str, torch.Tensor]) -> list[int]:
    """First ends of sequences that a graph reads, by its offsets and by its mask."""
    return [int(inputs[OFFSETS][1]), int((~inputs["padding_mask"]).sum())]


def test_each_set_of_graphs_has_inputs_of_its_own() -> None:
    layer = new_layer()
    packed = captured(layer, num_sets=2)
    loaded, in_flight = [], []
    for number, end in enumerate((3, 5)):
        layer.current_microbatch = number
        in_flight.append(entered(packed, layer))
        loaded.append(packed.load(layer, arguments(end)))
    assert [ends(inputs) for inputs in loaded] == [[3, 3], [5, 5]]
    for inputs, graph in zip(loaded, layer.cuda_graphs, strict=True):
        assert all(inputs[name] is graph[name] for name in graph)


WRITERS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "autograd": lambda to, source: to.copy_(source),
    "data": lambda to, source: to.data.copy_(source),
    "what torch does not see, as NCCL": lambda to, source: np.copyto(to.numpy(), source.numpy()),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_arguments_that_are_filled_again_are_read_again_in_the_next_pass(writer: str) -> None:
    first, second = new_layer(), new_layer()
    packed = captured(first, second)
    given = arguments(3)
    assert ends(packed.load(first, given)) == [3, 3]
    other = arguments(6)
    WRITERS[writer](given["padding_mask"], other["padding_mask"])
    offsets = [each["packed_seq_params"].cu_seqlens_q for each in (given, other)]
    WRITERS[writer](*offsets)
    for layer in (first, second):
        assert ends(packed.load(layer, given)) == [6, 6]


def test_arguments_live_as_long_as_they_are_known_by_their_identity() -> None:
    """Otherwise another layer's own arguments could have the identity of freed ones."""
    first, second = new_layer(), new_layer()
    packed = captured(first, second)
    given = arguments(3)
    masks = [weakref.ref(given["padding_mask"])]
    packed.load(first, given)
    given = arguments(5)
    assert ends(packed.load(second, given)) == [5, 5]
    assert masks[0]() is not None
    packed.load(first, given)
    assert masks[0]() is None, "of an earlier pass"


# Sets


def entered(packed: PackedLayers, layer: Any) -> Optional[torch.Tensor]:
    """The hidden states of a micro-batch that enters the chunk; None if it runs eagerly."""
    if not packed.has_slot_for(layer):
        return None
    return packed.enter(torch.ones(8, 1, 4, requires_grad=True))


ORDERS = {
    # name: (F is a forward pass, B the backward of the micro-batch of this number, - it is dropped;
    # micro-batch number of megatron-core, the sets taken; None: eagerly)
    "pipeline": ("F0 F1 B0 F2 B1 F3 B2 B3", [0, 1, 0, 1]),
    "one after the other": ("F0 B0 F1 B1 F2 B2", [0, 1, 0]),
    "last first": ("F0 F1 B1 F2 B2 F3", [0, 1, 1, 1]),
    "more than planned": ("F0 F1 F2 B0 F3 F4", [0, 1, None, 0, None]),
    "without backward": ("F0 F1 -1 F2", [0, 1, 1]),
    "not counted": ("F0 F0 F0 B0 F0", [0, 1, None, 0]),
}


@pytest.mark.parametrize("name", ORDERS)
def test_a_micro_batch_takes_a_set_that_no_other_uses(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the schedule is; megatron-core's finds the set of its own choice free."""
    order, expected = ORDERS[name]
    layer, second = new_layer(), new_layer()
    packed = captured(layer, second, num_sets=2)
    graphs = layer.cuda_graphs
    in_flight: dict[str, Any] = {}
    taken: list[Optional[int]] = []
    for kind, number in order.split():
        if kind == "F":
            layer.current_microbatch = second.current_microbatch = int(number)
            hidden = entered(packed, layer)
            assert packed.has_slot_for(second) == (hidden is not None)
            taken.append(None if hidden is None else packed.number)
            if hidden is not None:
                in_flight[f"{number} {len(taken)}"] = hidden
                packed.load(layer, arguments(3))
                assert layer.cuda_graphs[int(number) % 2] is graphs[packed.number]
        else:
            hidden = in_flight.pop(min(key for key in in_flight if key.split()[0] == number))
            if kind == "B":
                hidden.sum().backward()
            del hidden
    assert taken == expected
    warnings = [record for record in caplog.records if "micro-batches of" in record.getMessage()]
    assert len(warnings) == (None in expected)


def test_hidden_states_without_a_gradient_hold_their_set_until_backward() -> None:
    layer = new_layer()
    packed = captured(layer)
    assert packed.has_slot_for(layer)
    hidden = packed.enter(torch.ones(8, 1, 4))
    assert not packed.has_slot_for(layer)
    hidden.sum().backward()
    assert packed.has_slot_for(layer)


def test_graphs_are_deleted_when_no_replay_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("waited"))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    layer = new_layer()
    packed = captured(layer)
    layer.packed = packed
    packed.model.decoder = SimpleNamespace(layers=[layer])
    layer.cuda_graphs[0] = SimpleNamespace(reset=lambda: done.append("deleted"))
    packed.close()
    assert done == ["waited", "waited", "deleted"]
    assert (layer.cuda_graphs, layer.packed, packed.is_captured) == ([], None, False)


# A layer's replay


class Layer(torch.nn.Module):
    """Replays a graph whose gradient of the input is in the graph's memory."""

    packed: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(cuda_graph_modules=[])
        self.current_microbatch = 0
        self.masks: list[Any] = []
        self.gradient = torch.full((8, 1, 4), 7.0)
        self.error: Optional[Exception] = None

    @replays_packed
    def _te_cuda_graph_replay(self, hidden_states: torch.Tensor) -> torch.Tensor:
        self._forward_mlp(hidden_states)
        if self.error is not None:
            raise self.error
        return _Graph.apply(hidden_states, self.gradient)

    @keeps_padding_mask
    def _forward_mlp(self, hidden_states: torch.Tensor, padding_mask: Any = None) -> None:
        self.masks.append(padding_mask)


class _Graph(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.gradient = gradient
        return hidden * 2

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return ctx.gradient, None


def packed_layers(pre_process: bool) -> list[Any]:
    layers: list[Any] = [Layer(), Layer()]
    packed = captured(*layers, pre_process=pre_process)
    for layer in layers:
        layer.packed = packed
    return layers


@pytest.mark.parametrize("pre_process", [True, False])
def test_a_gradient_that_is_sent_to_another_stage_is_not_in_the_graphs_memory(
    pre_process: bool,
) -> None:
    for place, layer in enumerate(packed_layers(pre_process)):
        hidden = torch.ones(8, 1, 4, requires_grad=True)
        layer.packed.has_slot_for(layer)
        output = layer._te_cuda_graph_replay(hidden, **arguments(3))
        (gradient,) = torch.autograd.grad(output.sum(), hidden)
        assert torch.equal(gradient, layer.gradient)
        is_graphs = gradient.data_ptr() == layer.gradient.data_ptr()
        # Only the first layer's is sent, and only by a stage that has another before it.
        assert is_graphs == (pre_process or place == 1)


@pytest.mark.parametrize("fails", [False, True])
def test_the_mask_of_a_replay_is_not_the_next_passs(fails: bool) -> None:
    layer, _ = packed_layers(pre_process=True)
    layer.error = KeyError("of the graph") if fails else None
    given = arguments(3)
    assert layer.packed.has_slot_for(layer)
    with pytest.raises(KeyError) if fails else nullcontext():
        layer._te_cuda_graph_replay(torch.ones(8, 1, 4), **given)
    layer._forward_mlp(torch.ones(8, 1, 4))  # an evaluation, without a graph
    assert layer.masks[0] is given["padding_mask"]
    assert layer.masks[1:] == [None]


def test_a_layer_that_leaves_the_engine_keeps_graphs_of_no_size() -> None:
    """They copy to host memory that the engine has freed."""
    layer, made = new_layer(), []
    layer.graph_copies = None
    packed = layer.packed = captured(layer)

    def make_graphs(*_: Any, **__: Any) -> Any:
        made.append(MagicMock())
        return made[-1:]

    packed.begin_capture([layer], packed.sets)
    for size in (2, 4):
        packed.capture_size(size, make_graphs)
    packed.end_capture()
    for undo in offload_layers([layer], 0, MagicMock()):
        undo()
    assert [graph.reset.call_count for graph in made] == [1, 1]
    assert layer.cuda_graphs == []
    assert not packed.is_captured
