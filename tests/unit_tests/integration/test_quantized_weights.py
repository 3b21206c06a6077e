# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Replays of layers in FP8 use the current weights, and accumulate all gradients."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any, Optional

import pytest
import torch
from quantized_linears import MarksBakedIn, QuantizedLinear
from toy_chunk import run_in_order

from megatron.slipstream.fine_grained_activation_offload.graph_capture import ONE_SIZE
from megatron.slipstream.graphs.bank import ChunkGraphs
from megatron.slipstream.graphs.capture import Recorded, Work
from megatron.slipstream.graphs.chunk import Chunk
from megatron.slipstream.integration.graphs.chunks import _transformer_engine_captures
from megatron.slipstream.integration.graphs.quantized_weights import quantize_weights_in_every_pass

WIDTH, TOKENS = 8, 6
SCHEDULES = ["FB", "FFBB", "FBFBFB", "FB"]
"""Schedules of one iteration each."""


class CapturedAsFirst(MarksBakedIn):
    """Eager graphs that are captured with layers in their first micro-batch."""

    def record(self, work: Work, pool: Any) -> Recorded:
        for layer in self._layers:
            layer.is_first_microbatch = True
        return super().record(work, pool)


class Training:
    """Trains two layers whose first micro-batch is marked as by megatron-core.

    Args:
        num_slots: Number of slots; None to train eagerly with cached quantized weights.
        keeps_weights: Whether layers cache them in graphs too.
        backend: Captures graphs.
        evaluates: Whether to evaluate after each iteration.
    """

    def __init__(
        self,
        num_slots: Optional[int],
        keeps_weights: bool = False,
        backend: type[MarksBakedIn] = MarksBakedIn,
        evaluates: bool = True,
    ) -> None:
        torch.manual_seed(0)
        self.module = torch.nn.Sequential(
            QuantizedLinear(WIDTH), torch.nn.Tanh(), QuantizedLinear(WIDTH)
        )
        self.results: list[torch.Tensor] = []
        self.graphs: Optional[ChunkGraphs] = None
        self._evaluates = evaluates
        for parameter in self.parameters():
            parameter.main_grad = torch.zeros_like(parameter)
        if num_slots is not None:
            if not keeps_weights:
                quantize_weights_in_every_pass(self.module)
            chunk = Chunk("chunk 0", self.module, self.module)
            self.graphs = ChunkGraphs({ONE_SIZE: chunk}, num_slots, 1, backend([self.module]))

    def parameters(self) -> list[Any]:
        """All parameters of the model."""
        return list(self.module.parameters())

    def mark_first(self) -> None:
        """Make the next micro-batch the first one."""
        for layer in self.module.modules():
            if isinstance(layer, QuantizedLinear):
                layer.is_first_microbatch = True

    def forward(self, micro_batch: int) -> torch.Tensor:
        """One micro-batch's loss."""
        generator = torch.Generator().manual_seed(micro_batch)
        hidden = torch.randn(TOKENS, 1, WIDTH, generator=generator).requires_grad_()
        output = self.module(hidden) if self.graphs is None else self.graphs(hidden, {})
        return (output * torch.randn(TOKENS, 1, WIDTH, generator=generator)).sum()

    def iteration(self, schedule: str, first: int = 0) -> None:
        """One iteration with its optimizer step, optionally with an evaluation.

        Args:
            schedule: ``F`` is the forward of the next micro-batch, ``B`` the oldest one's backward.
            first: Number of the first micro-batch.
        """
        if self.graphs is not None:
            self.graphs.begin_iteration()
        for parameter in self.parameters():
            parameter.main_grad.zero_()
        self.mark_first()
        self.results += run_in_order(schedule, self.forward, first)
        for parameter in self.parameters():
            parameter.grad = None
            self.results.append(parameter.main_grad.clone())
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.sub_(parameter.main_grad, alpha=0.05)
            if self._evaluates:
                self.mark_first()
                self.results += [self.forward(1000 + number) for number in range(2)]


def trained(num_slots: Optional[int], schedules: list[str] = SCHEDULES, **how: Any) -> Training:
    training = Training(num_slots, **how)
    for number, schedule in enumerate(schedules):
        training.iteration(schedule, first=10 * number)
    return training


def equal(left: Training, right: Training) -> bool:
    """Whether all results are bitwise equal, and none is missing."""
    pairs = zip(left.results, right.results, strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("evaluates", [False, True])
def test_losses_gradients_and_evaluation_are_those_without_graphs(evaluates: bool) -> None:
    with_graphs = trained(2, evaluates=evaluates)
    assert equal(with_graphs, trained(None, evaluates=evaluates))
    assert with_graphs.graphs.num_replays == sum(s.count("F") for s in SCHEDULES[1:])


@pytest.mark.parametrize("backend", [MarksBakedIn, CapturedAsFirst])
def test_kept_weights_would_be_wrong_whatever_pass_is_captured(backend: type[MarksBakedIn]) -> None:
    """Otherwise the equality above would show nothing."""
    with_graphs = trained(2, keeps_weights=True, backend=backend, evaluates=False)
    assert not equal(with_graphs, trained(None, evaluates=False))
    assert equal(trained(2, backend=backend, evaluates=False), trained(None, evaluates=False))


def test_micro_batches_beyond_the_slots_add_to_the_gradients_of_replays() -> None:
    schedules = ["FB", "FFBB", "FFFBBB"]
    with_graphs = trained(1, schedules)
    assert equal(with_graphs, trained(None, schedules))
    assert with_graphs.graphs.num_replays == 2


def test_layers_keep_nothing() -> None:
    layers = [layer for layer in trained(2).module if isinstance(layer, QuantizedLinear)]
    assert len(layers) == 2
    assert all(layer.kept is None for layer in layers)
    kept = [layer.kept for layer in trained(None).module if isinstance(layer, QuantizedLinear)]
    assert None not in kept


def test_layers_that_cannot_be_told_to_keep_nothing_are_refused() -> None:
    module = torch.nn.Sequential(torch.nn.Tanh(), QuantizedLinear(WIDTH))
    del module[1].disable_parameter_transpose_cache
    with pytest.raises(ValueError, match=r"a QuantizedLinear \(1\) is not supported in FP8 .*bf16"):
        quantize_weights_in_every_pass(module)


@pytest.mark.parametrize("is_in_class", [False, True])
def test_flags_of_other_graphs_do_not_reach_what_is_captured(
    is_in_class: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With either form of Transformer Engine's module in its place."""
    flag = torch.ones(1)
    state = SimpleNamespace(skip_fp8_weight_update_tensor=flag)
    manager = state if is_in_class else SimpleNamespace(quantization_state=state)
    happened: list[str] = []
    modules = {
        "transformer_engine": {},
        "transformer_engine.pytorch": {},
        "transformer_engine.pytorch.fp8": {"FP8GlobalStateManager": manager},
        "transformer_engine.pytorch.graph": {
            "set_capture_start": lambda: happened.append("start"),
            "set_capture_end": lambda: happened.append("end"),
        },
    }
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    with _transformer_engine_captures():
        assert state.skip_fp8_weight_update_tensor is None
        happened.append("captured")
    assert state.skip_fp8_weight_update_tensor is flag
    assert happened == ["start", "captured", "end"]
