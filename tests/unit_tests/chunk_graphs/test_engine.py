# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Chunk graphs, with eager graphs instead of a GPU: bitwise the same results as without."""

from __future__ import annotations

import gc
import logging
from typing import Any, Optional

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from toy_chunk import TOKENS, WIDTH, ToyChunk, Training, equal

from megatron.slipstream.chunk_graphs.backend import Cost, EagerGraphs, Recorded, Work
from megatron.slipstream.chunk_graphs.chunk import Chunk
from megatron.slipstream.chunk_graphs.engine import ChunkGraphs

SCHEDULES = ["FB", "FFBB", "FFBFBB", "FFFBFBFBBB", "FB"]
"""Schedules of one iteration each, with at most three micro-batches in flight."""


def trained(num_slots: Optional[int], schedules: list[str] = SCHEDULES, **options: Any) -> Training:
    training = Training(num_slots, **options)
    for number, schedule in enumerate(schedules):
        training.iteration(schedule, first=10 * number)
    return training


def captured(num_slots: int) -> Training:
    """A training in its second iteration: captured, before any micro-batch."""
    training = Training(num_slots)
    training.iteration("FB")
    training.begin_iteration()
    return training


@pytest.mark.parametrize("options", [{}, {"checkpoint": True}, {"num_layers": 6}], ids=str)
def test_losses_gradients_state_and_randomness_are_those_without_graphs(
    options: dict[str, Any],
) -> None:
    with_graphs = trained(3, **options)
    assert equal(with_graphs, trained(None, **options))
    assert with_graphs.graphs.num_replays == sum(s.count("F") for s in SCHEDULES[1:])
    assert not any(torch.isnan(result).any() for result in with_graphs.results)


def test_data_decides_the_results() -> None:
    """Otherwise the equality above could compare constants."""
    assert not equal(trained(3), trained(None, seed=1))
    assert len({float(result) for result in trained(3).results if result.numel() == 1}) > 10


def iterated(num_slots: Optional[int], num_iterations: int) -> Training:
    """A training after iterations of one micro-batch each."""
    training = Training(num_slots)
    for number in range(num_iterations):
        training.iteration("FB", number)
    return training


@pytest.mark.parametrize("num_warmup_iterations", [0, 1, 3])
def test_iterations_run_eagerly_at_first(num_warmup_iterations: int) -> None:
    training = Training(1, num_warmup_iterations=num_warmup_iterations)
    captured = []
    for number in range(5):
        training.iteration("FB", number)
        captured.append(training.graphs.is_captured)
    eager = max(num_warmup_iterations, 1)
    assert captured == [False] * eager + [True] * (5 - eager)
    assert training.graphs.num_replays == 5 - eager
    assert equal(training, iterated(None, 5))


@pytest.mark.parametrize("checkpoint", [False, True])
def test_hooks_of_parameters_do_not_run_for_a_replay(checkpoint: bool) -> None:
    training = Training(2, checkpoint=checkpoint)
    training.iteration("FFBB")
    training.hooks.clear()
    training.iteration("FFBB")
    outside = ["hook"] * len(list(training.before.parameters()))
    assert training.hooks == ["before"] * 2 + ["after", *outside] * 2


def test_what_an_eager_layer_noted_of_a_gradient_does_not_count_for_the_graphs() -> None:
    def run(num_slots: Optional[int]) -> Training:
        training = Training(num_slots)
        training.iteration("FB")
        bias: Any = training.module.layers[0].linear.bias
        bias.grad_added_to_main_grad = True
        training.iteration("FB", 1)
        return training

    assert equal(run(1), run(None))


def test_slots_are_taken_and_given_back_in_any_order() -> None:
    def run(num_slots: Optional[int]) -> Training:
        training = Training(num_slots)
        training.iteration("FB")
        training.begin_iteration()
        losses = {number: training.forward(number) for number in range(3)}
        losses[1].backward()
        losses[3] = training.forward(3)
        for number in (0, 3, 2):
            losses[number].backward()
        training.results += [p.main_grad.clone() for p in training.parameters() if p.requires_grad]
        return training

    assert equal(run(3), run(None))


def test_what_lies_in_free_slots_is_never_read() -> None:
    training = Training(3)
    for number, schedule in enumerate(SCHEDULES):
        for slot in training.graphs._slots:
            assert slot.is_free
            with torch.no_grad():
                for tensor in (slot.hidden, slot.output, slot.grad_output, slot.grad_hidden):
                    tensor.fill_(float("nan"))
        training.iteration(schedule, first=10 * number)
    assert equal(training, trained(None))


def test_an_output_is_not_overwritten_by_the_next_micro_batch() -> None:
    training = captured(1)
    scale = torch.ones(TOKENS, 1, 1)
    first = training.graphs(torch.randn(TOKENS, 1, WIDTH, requires_grad=True), {"scale": scale})
    kept = first.detach().clone()
    first.sum().backward()
    training.graphs(torch.randn(TOKENS, 1, WIDTH, requires_grad=True), {"scale": scale})
    assert torch.equal(first, kept)
    assert first._base is None


class _Operations(TorchDispatchMode):
    """The names of operations inside, other than views, which launch nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        if name not in ("view", "detach", "alias"):
            self.names.append(name)
        return function(*args, **(kwargs or {}))


class _WithoutWork(EagerGraphs):
    """A replay does nothing."""

    def record(self, work: Work, pool: Any) -> Recorded:
        graph, results = super().record(work, pool)
        graph.replay = lambda: None  # type: ignore[method-assign]
        return Recorded(graph, results)


def test_a_replay_launches_a_copy_of_each_large_tensor_and_one_of_all_small_ones() -> None:
    def arguments() -> dict[str, torch.Tensor]:
        offsets = {name: torch.arange(3, dtype=torch.int32) for name in ("offsets", "padded")}
        return {"scale": torch.ones(TOKENS, 1, 1), "mask": torch.ones(1, 8).bool(), **offsets}

    module = ToyChunk()
    for parameter in module.parameters():
        parameter.main_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]
    run = lambda hidden, scale, **_: module(hidden, scale)  # noqa: E731
    graphs = ChunkGraphs(Chunk("chunk 0", module, run), 1, 1, _WithoutWork())
    graphs.begin_iteration()
    hidden = torch.randn(TOKENS, 1, WIDTH, requires_grad=True)
    graphs(hidden, arguments())
    graphs.begin_iteration()
    call = arguments()
    with _Operations() as forward:
        output = graphs(hidden, call)
    grad = torch.randn_like(output)
    with _Operations() as backward:
        (_,) = torch.autograd.grad(output, hidden, grad)
    assert forward.names == ["copy_", "_foreach_copy_", "clone"]
    visited = [node for node, _ in output.grad_fn.next_functions if node is not None]
    assert len(visited) == 1, "that of the hidden states"
    assert backward.names == ["copy_", "clone"]


def test_hidden_states_that_need_no_gradient() -> None:
    def run(num_slots: Optional[int]) -> Training:
        training = Training(num_slots)
        training.before.requires_grad_(False)
        for number in range(3):
            training.iteration("FFBB", first=10 * number)
        return training

    with_graphs = run(2)
    assert equal(with_graphs, run(None))
    assert with_graphs.graphs.num_replays == 4


@pytest.mark.parametrize("how", ["no_grad", "eval"])
def test_evaluation_runs_eagerly(how: str) -> None:
    training = iterated(1, 2)
    num_replays, num_runs = training.graphs.num_replays, training.module.num_runs
    training.module.train(how != "eval")
    with torch.set_grad_enabled(how != "no_grad"):
        for number in range(3):
            training.forward(number)
    training.module.train()
    assert training.graphs.num_replays == num_replays
    assert training.module.num_runs == num_runs + 3
    training.iteration("FB")
    assert training.graphs.num_replays == num_replays + 1


def test_a_slot_is_free_again_if_backward_never_comes() -> None:
    training = captured(1)
    loss = training.forward(0)
    assert not training.graphs._slots[0].is_free
    del loss
    gc.collect()
    assert training.graphs._slots[0].is_free


def test_backward_runs_once() -> None:
    training = captured(1)
    loss = training.forward(0)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="ran twice"):
        loss.backward()


def test_with_too_few_slots_the_rest_runs_eagerly_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    schedules = ["FFFBBB", "FFFBBB", "FFFBBB"]
    with caplog.at_level(logging.WARNING):
        training = trained(2, schedules)
    assert equal(training, trained(None, schedules))
    assert training.graphs.num_replays == 4
    (record,) = caplog.records
    assert "more than 2 micro-batches of chunk 0 are in flight" in record.getMessage()


def test_other_shapes_are_refused_with_both() -> None:
    training = captured(1)
    hidden = torch.zeros(TOKENS + 1, 1, WIDTH, requires_grad=True)
    with pytest.raises(
        ValueError,
        match=rf"hidden_states was float32 \[{TOKENS}x1x{WIDTH}\] on cpu and is float32 "
        rf"\[{TOKENS + 1}x1x{WIDTH}\].*scale was .*delete the graphs",
    ):
        training.graphs(hidden, {"scale": torch.ones(TOKENS + 1, 1, 1)})


def test_graphs_are_captured_again_after_they_were_deleted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    training = iterated(1, 2)
    with caplog.at_level(logging.INFO):
        training.graphs.delete()
        for number in range(2, 5):
            training.iteration("FB", number)
    assert [record.getMessage()[:33] for record in caplog.records] == [
        "CUDA graphs of chunk 0 are delete",
        "eager graphs of chunk 0: 1 slots",
    ]
    assert equal(training, iterated(None, 5))
    assert training.graphs.num_replays == 3


def test_graphs_in_use_are_not_deleted() -> None:
    training = captured(2)
    loss = training.forward(0)
    with pytest.raises(RuntimeError, match="while 1 micro-batches are in flight"):
        training.graphs.delete()
    loss.backward()
    training.graphs.delete()


def test_the_backward_of_an_eager_micro_batch_may_come_after_deletion() -> None:
    training = captured(1)
    replayed, eager = training.forward(0), training.forward(1)
    replayed.backward()
    training.graphs.delete()
    eager.backward()


@pytest.mark.parametrize("what", ["parameter", "main_grad"])
def test_memory_that_moved_is_noticed(what: str) -> None:
    training = Training(1)
    training.iteration("FB")
    training.iteration("FB")
    parameter: Any = training.module.layers[1].weight
    if what == "parameter":
        parameter.data = parameter.data.clone()
    else:
        parameter.main_grad = parameter.main_grad.clone()
    with pytest.raises(RuntimeError, match="have moved since"):
        training.begin_iteration()


def test_parameters_need_a_main_grad() -> None:
    training = Training(1)
    training.iteration("FB")
    training.module.layers[1].weight.main_grad = None
    with pytest.raises(ValueError, match=r"layers\.1\.weight of chunk 0 has no main_grad"):
        training.graphs.begin_iteration()


def test_only_hidden_states_get_gradients() -> None:
    training = Training(1)
    training.begin_iteration()
    scale = torch.ones(TOKENS, 1, 1, requires_grad=True)
    with pytest.raises(ValueError, match="scale of chunk 0 needs a gradient"):
        training.graphs(torch.zeros(TOKENS, 1, WIDTH), {"scale": scale})


def test_a_chunk_returns_hidden_states_only() -> None:
    module = ToyChunk()
    for parameter in module.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
    graphs = ChunkGraphs(Chunk("c", module, lambda x: (x, x)), 1, 1, EagerGraphs())
    graphs.begin_iteration()
    graphs(torch.zeros(TOKENS, 1, WIDTH), {})
    with pytest.raises(ValueError, match="c returns tuple"):
        graphs.begin_iteration()


class _Watched(EagerGraphs):
    """Notes the number of runs of a module before each capture."""

    module: ToyChunk

    def __init__(self) -> None:
        self.num_runs: list[int] = []

    def measure(self, work: Any) -> Cost:
        self.num_runs.append(self.module.num_runs)
        return super().measure(work)

    def record(self, work: Any, pool: Any) -> Any:
        self.num_runs.append(self.module.num_runs)
        return super().record(work, pool)


def test_what_is_captured_has_been_run_and_then_measured() -> None:
    """First-use work cannot be captured, and does not count as a pass's memory."""
    backend = _Watched()
    training = Training(1, backend=backend)
    backend.module = training.module
    training.iteration("FB")
    training.begin_iteration()
    assert backend.num_runs == [2, 3, 4]


class _Small(EagerGraphs):
    """A device on which a slot takes 1 GiB and 2.5 GiB are free."""

    def measure(self, work: Any) -> Cost:
        work()
        return Cost(2**30)

    def free_bytes(self) -> int:
        return 5 * 2**29

    def record(self, work: Any, pool: Any) -> Any:
        pytest.fail("captured though it does not fit")


def test_graphs_that_would_not_fit_are_refused_before_they_are_captured() -> None:
    training = Training(3, backend=_Small())
    training.iteration("FB")
    state = [buffer.clone() for buffer in training.module.buffers()]
    with pytest.raises(ValueError, match=r"3 slots of 1.0 GiB are 3.0 GiB, and 2.5 GiB are free"):
        training.begin_iteration()
    after = list(training.module.buffers())
    assert all(torch.equal(one, other) for one, other in zip(state, after, strict=True))


def test_an_argument_that_comes_again_is_copied_once() -> None:
    training = captured(1)
    (slot,) = training.graphs._slots
    scale = torch.ones(TOKENS, 1, 1)

    def run() -> int:
        version = slot.tensors[0]._version
        hidden = torch.zeros(TOKENS, 1, WIDTH, requires_grad=True)
        training.graphs(hidden, {"scale": scale}).sum().backward()
        return slot.tensors[0]._version - version

    assert [run(), run()] == [1, 0]
    scale.mul_(2)
    assert run() == 1
    assert torch.equal(slot.tensors[0], scale)
