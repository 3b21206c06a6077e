# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""What graphs of layers with packed sequences read and return, call by call."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, Optional

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron.slipstream.fine_grained_activation_offload.graph_capture import ONE_SIZE
from megatron.slipstream.graphs.capture import Tail
from megatron.slipstream.graphs.slots import SlotMemory
from megatron.slipstream.integration.graphs.layers import GraphedMixin
from megatron.slipstream.integration.graphs.packed_layers import PackedLayers

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
    packed, learned = PackedLayers(model), arguments(4)
    for layer in layers:
        packed.learn(layer, torch.ones(8, 1, 4), learned)
    packed.begin_capture(layers, [SlotMemory(None, Tail()) for _ in range(num_sets)])

    def make_graphs(*_: Any, sample_kwargs: list[Mapping[str, Any]], **options: Any) -> Any:
        return sample_kwargs

    packed.capture_size(ONE_SIZE, make_graphs)
    packed.end_capture()
    return packed


def new_layer(set_number: int = 0) -> Any:
    return _FakeLayer(captures_attention=True, current_microbatch=set_number)


class _FakeLayer(SimpleNamespace):
    __hash__ = object.__hash__


def ends(inputs: Mapping[str, torch.Tensor]) -> list[int]:
    """First ends of sequences that a graph reads, by its offsets and by its mask."""
    return [int(inputs[OFFSETS][1]), int((~inputs["padding_mask"]).sum())]


def test_each_set_of_graphs_has_inputs_of_its_own() -> None:
    layer = new_layer()
    packed = captured(layer, num_sets=2)
    loaded = []
    for number, end in enumerate((3, 5)):
        layer.current_microbatch = number
        loaded.append(packed.load(layer, arguments(end)))
    assert [ends(inputs) for inputs in loaded] == [[3, 3], [5, 5]]
    for inputs, graph in zip(loaded, layer.cuda_graphs, strict=True):
        assert all(inputs[name] is graph[name] for name in graph)


def test_arguments_that_are_filled_again_are_read_again_in_the_next_pass() -> None:
    first, second = new_layer(), new_layer()
    packed = captured(first, second)
    given = arguments(3)
    assert ends(packed.load(first, given)) == [3, 3]
    other = arguments(6)
    given["padding_mask"].copy_(other["padding_mask"])
    given["packed_seq_params"].cu_seqlens_q.copy_(other["packed_seq_params"].cu_seqlens_q)
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


# A layer's replay


class MegatronsLayer(torch.nn.Module):
    """Replays a graph whose gradient of the input is in the graph's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(cuda_graph_modules=[])
        self.current_microbatch = 0
        self.masks: list[Any] = []
        self.gradient = torch.full((8, 1, 4), 7.0)
        self.error: Optional[Exception] = None

    def _te_cuda_graph_replay(self, hidden_states: torch.Tensor) -> torch.Tensor:
        self._forward_mlp(hidden_states)
        if self.error is not None:
            raise self.error
        return _Graph.apply(hidden_states, self.gradient)

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


class Layer(GraphedMixin, MegatronsLayer):  # type: ignore[misc]
    captures_attention = True


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
    with pytest.raises(KeyError) if fails else nullcontext():
        layer._te_cuda_graph_replay(torch.ones(8, 1, 4), **given)
    layer._forward_mlp(torch.ones(8, 1, 4))  # an evaluation, without a graph
    assert layer.masks[0] is given["padding_mask"]
    assert layer.masks[1:] == [None]
