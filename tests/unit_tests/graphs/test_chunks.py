# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Chunk graphs, with eager graphs instead of a GPU: bitwise the same results as without.

Micro-batches have one size or several, whose graphs share memory.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any, Optional

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from toy_chunk import (
    SCHEDULES,
    SIZES,
    STEP,
    TOKENS,
    WIDTH,
    ToyChunk,
    Training,
    captured,
    equal,
    fill_free_slots,
    table_of,
    trained,
)

from megatron.slipstream.fine_grained_activation_offload.graph_capture import ONE_SIZE
from megatron.slipstream.graphs.bank import ChunkGraphs
from megatron.slipstream.graphs.capture import EagerGraphs, Recorded, Work
from megatron.slipstream.graphs.chunk import Chunk
from megatron.slipstream.graphs.slots import (
    MAX_SMALL_BYTES,
    Static,
    StaticInputs,
)

with_and_without_sizes = pytest.mark.parametrize("is_sized", [False, True], ids=["", "sizes"])


def of_one_size(training: Training) -> Any:
    """The graphs of a training whose micro-batches have one size."""
    (graphs,) = training.graphs.of_size.values()
    return graphs


def hidden_states(num_tokens: int = TOKENS) -> torch.Tensor:
    return torch.randn(num_tokens, 1, WIDTH, requires_grad=True)


@pytest.mark.parametrize(
    "options", [{}, {"checkpoint": True}, {"num_layers": 6}, {"is_sized": True}], ids=str
)
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


def test_each_micro_batch_replays_the_graphs_of_its_size() -> None:
    graphs = trained(3, is_sized=True).graphs
    numbers = [STEP * i + n for i, s in enumerate(SCHEDULES) for n in range(s.count("F")) if i]
    replays = {size: of_size.num_replays for size, of_size in graphs.of_size.items()}
    assert replays == {size: sum(SIZES[n % 3] == size for n in numbers) for size in SIZES}
    assert min(replays.values()) > 2


@pytest.mark.parametrize("num_warmup_iterations", [0, 1, 3])
def test_iterations_run_eagerly_at_first(num_warmup_iterations: int) -> None:
    training = Training(1, num_warmup_iterations=num_warmup_iterations)
    captured = []
    for number in range(5):
        training.iteration("FB", STEP * number)
        captured.append(training.graphs.is_captured)
    eager = max(num_warmup_iterations, 1)
    assert captured == [False] * eager + [True] * (5 - eager)
    assert training.graphs.num_replays == 5 - eager
    assert equal(training, trained(None, ["FB"] * 5))


def test_all_sizes_are_captured_after_one_micro_batch_from_the_largest() -> None:
    training = trained(2, ["FB"], is_sized=True)  # of size 1
    assert training.graphs.figures == {}
    training.begin_iteration()
    assert training.graphs.is_captured
    assert training.sizes is not None
    assert training.sizes.told == [(size, None) for size in (4, 2, 1, 4, 2, 1)]
    assert list(training.graphs.figures) == [4, 2, 1]


@pytest.mark.parametrize("checkpoint", [False, True])
def test_hooks_of_parameters_do_not_run_for_a_replay(checkpoint: bool) -> None:
    training = trained(2, ["FFBB"], checkpoint=checkpoint)
    training.hooks.clear()
    training.iteration("FFBB")
    outside = ["hook"] * len(list(training.before.parameters()))
    assert training.hooks == ["before"] * 2 + ["after", *outside] * 2


def test_an_object_of_a_module_may_refer_to_parameters_of_others() -> None:
    training = Training(1)
    training.module.layers[0].parts.tied = training.before.weight
    for number in range(2):
        training.iteration("FB", STEP * number)
    assert training.graphs.num_replays == 1
    assert equal(training, trained(None, ["FB"] * 2))


def test_what_an_eager_layer_noted_of_a_gradient_does_not_count_for_the_graphs() -> None:
    def run(num_slots: Optional[int]) -> Training:
        training = trained(num_slots, ["FB"])
        bias: Any = training.module.layers[0].linear.bias
        bias.grad_added_to_main_grad = True
        training.iteration("FB", 1)
        return training

    assert equal(run(1), run(None))


# Slots


def test_slots_are_taken_and_given_back_in_any_order() -> None:
    def run(num_slots: Optional[int]) -> Training:
        training = trained(num_slots, ["FB"])
        training.begin_iteration()
        losses = {number: training.forward(number) for number in range(3)}
        losses[1].backward()
        losses[3] = training.forward(3)
        for number in (0, 3, 2):
            losses[number].backward()
        training.results += [p.main_grad.clone() for p in training.parameters() if p.requires_grad]
        return training

    assert equal(run(3), run(None))


@with_and_without_sizes
def test_what_lies_in_free_slots_is_never_read(is_sized: bool) -> None:
    training = Training(3, is_sized=is_sized)
    for number, schedule in enumerate(SCHEDULES):
        fill_free_slots(training)
        training.iteration(schedule, first=STEP * number)
    assert equal(training, trained(None, is_sized=is_sized))


def test_a_slot_memory_is_taken_whatever_the_size() -> None:
    training = captured(3, is_sized=True)
    losses = [training.forward(number) for number in range(3)]
    for graphs in training.graphs.of_size.values():
        assert [slot.memory.is_free for slot in graphs.slots] == [False] * 3
        assert graphs.num_replays == 1
    losses.pop(1).backward()
    for graphs in training.graphs.of_size.values():
        assert [slot.memory.is_free for slot in graphs.slots] == [False, True, False]


def test_sizes_share_a_slot_memory_and_memories_share_nothing() -> None:
    class Pools(EagerGraphs):
        def new_pool(self) -> Any:
            return object()

    training = trained(3, backend=Pools(), is_sized=True)
    slots = [graphs.slots for graphs in training.graphs.of_size.values()]
    for largest, *others in zip(*slots, strict=True):
        for slot in others:
            assert slot.memory.pool is largest.memory.pool
            assert slot.hidden is largest.hidden
            assert slot.grad_output is largest.grad_output
            assert slot.tensors[0] is not largest.tensors[0]  # tables are of different lengths
    for size_slots in slots:
        assert len({id(slot.memory.pool) for slot in size_slots}) == 3
        assert len({id(slot.hidden) for slot in size_slots}) == 3


def test_a_slot_is_free_again_if_backward_never_comes() -> None:
    training = captured(1)
    loss = training.forward(0)
    (slot,) = of_one_size(training).slots
    assert not slot.memory.is_free
    del loss
    gc.collect()
    assert slot.memory.is_free


def test_backward_runs_once() -> None:
    training = captured(1)
    loss = training.forward(0)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="ran twice"):
        loss.backward()


@with_and_without_sizes
def test_with_too_few_slots_the_rest_runs_eagerly_with_a_warning(
    is_sized: bool, caplog: pytest.LogCaptureFixture
) -> None:
    schedules = ["FB", "FFFBBB", "FFFBBB"]
    with caplog.at_level(logging.WARNING):
        training = trained(2, schedules, is_sized=is_sized)
    assert equal(training, trained(None, schedules, is_sized=is_sized))
    assert training.graphs.num_replays == 4
    assert "more than 2 micro-batches of chunk 0" in caplog.text
    assert is_sized or len(caplog.records) == 1


# Calls


def test_an_output_is_not_overwritten_by_the_next_micro_batch() -> None:
    training, scale = captured(1), torch.ones(TOKENS, 1, 1)
    first = training.graphs(hidden_states(), {"scale": scale})
    kept = first.detach().clone()
    first.sum().backward()
    training.graphs(hidden_states(), {"scale": scale})
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
        if name not in ("view", "as_strided", "detach", "alias"):
            self.names.append(name)
        return function(*args, **(kwargs or {}))


class _WithoutWork(EagerGraphs):
    """A replay does nothing."""

    def record(self, work: Work, pool: Any) -> Recorded:
        graph, results = super().record(work, pool)
        graph.replay = lambda: None  # type: ignore[method-assign]
        return Recorded(graph, results)


def graphs_of(
    run: Callable[..., Any], module: ToyChunk, backend: EagerGraphs, **options: Any
) -> ChunkGraphs:
    """Graphs in their first iteration."""
    for parameter in module.parameters():
        parameter.main_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]
    graphs = ChunkGraphs({ONE_SIZE: Chunk("c", module, run, **options)}, 1, 1, backend)
    graphs.begin_iteration()
    return graphs


def test_a_replay_launches_a_copy_of_each_large_tensor_and_one_of_all_small_ones() -> None:
    def arguments() -> dict[str, torch.Tensor]:
        offsets = {name: torch.arange(3, dtype=torch.int32) for name in ("offsets", "padded")}
        return {"scale": torch.ones(TOKENS, 1, 1), "mask": torch.ones(1, 8).bool(), **offsets}

    module, hidden = ToyChunk(), hidden_states()
    run = lambda hidden, scale, **_: module(hidden, scale)  # noqa: E731
    graphs = graphs_of(run, module, _WithoutWork())
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
            training.iteration("FFBB", first=STEP * number)
        return training

    with_graphs = run(2)
    assert equal(with_graphs, run(None))
    assert with_graphs.graphs.num_replays == 4


@pytest.mark.parametrize("how", ["no_grad", "eval", "no_grad of another size"])
def test_evaluation_runs_eagerly(how: str) -> None:
    is_sized = how == "no_grad of another size"
    training = trained(1, ["FB", "FB"], is_sized=is_sized)
    num_replays, num_runs = training.graphs.num_replays, training.module.num_runs
    training.module.train(how != "eval")
    with torch.set_grad_enabled(how == "eval"):
        for number in range(3):
            if is_sized:
                training.graphs(hidden_states(), {"table": table_of(3), "size": 3})
            else:
                training.forward(number)
    training.module.train()
    assert training.graphs.num_replays == num_replays
    assert training.module.num_runs == num_runs + 3
    training.iteration("FB")
    assert training.graphs.num_replays == num_replays + 1


def test_other_shapes_are_refused_with_both() -> None:
    training = captured(1)
    with pytest.raises(
        ValueError,
        match=rf"hidden_states was float32 \[{TOKENS}x1x{WIDTH}\] on cpu and is float32 "
        rf"\[{TOKENS + 1}x1x{WIDTH}\].*scale was .*delete the graphs",
    ):
        training.graphs(hidden_states(TOKENS + 1), {"scale": torch.ones(TOKENS + 1, 1, 1)})


@pytest.mark.parametrize("num_iterations", [1, 2])
def test_other_sizes_are_refused(num_iterations: int) -> None:
    training = trained(1, ["FB"] * num_iterations, is_sized=True)
    training.begin_iteration()
    with pytest.raises(ValueError, match="size 3"):
        training.graphs(hidden_states(), {"table": table_of(3), "size": 3})


def test_only_hidden_states_get_gradients() -> None:
    training = Training(1)
    training.begin_iteration()
    scale = torch.ones(TOKENS, 1, 1, requires_grad=True)
    with pytest.raises(ValueError, match="scale of chunk 0 needs a gradient"):
        training.graphs(hidden_states(), {"scale": scale})


def test_a_chunk_returns_hidden_states_only() -> None:
    graphs = graphs_of(lambda x: (x, x), ToyChunk(), EagerGraphs())
    graphs(hidden_states(), {})
    with pytest.raises(ValueError, match="c returns tuple"):
        graphs.begin_iteration()


WRITERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "autograd": lambda tensor: tensor.add_(1),
    "data": lambda tensor: tensor.data.add_(1),
    "what torch does not see, as NCCL": lambda tensor: np.add(tensor, 1, out=tensor.numpy()),
}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("size", [4, MAX_SMALL_BYTES], ids=["small", "large"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.float32], ids=str)
def test_a_tensor_that_is_filled_again_is_copied_again(
    name: str, size: int, dtype: torch.dtype
) -> None:
    source = torch.zeros(size, dtype=dtype)
    static = Static(source)
    for _ in range(3):
        StaticInputs([static]).renew([source])
        assert torch.equal(static.tensor, source)
        WRITERS[name](source)
    assert source[0] == 3


def test_graphs_read_the_constants_of_the_call_that_they_are_captured_with() -> None:
    module, scale = ToyChunk(), torch.ones(TOKENS, 1, 1)
    run = lambda hidden, scale, other: module(hidden, scale + other)  # noqa: E731
    graphs = graphs_of(run, module, EagerGraphs(), constant_arguments=frozenset(("scale",)))
    other = torch.zeros(TOKENS, 1, 1)
    graphs(hidden_states(), {"scale": scale, "other": other})
    graphs.begin_iteration()
    (slot,) = graphs.of_size[ONE_SIZE].slots
    assert [tensor is scale for tensor in slot.tensors] == [True, False]
    again = scale.clone()  # as a table that is computed again
    graphs(hidden_states(), {"scale": again, "other": other + 2})
    assert torch.equal(slot.tensors[1], other + 2)
    assert scale._version == 0, "it is not copied to itself"


def test_an_input_that_sizes_share_is_copied_again_when_another_size_had_it() -> None:
    (first, second, _) = captured(1, is_sized=True).graphs.of_size.values()
    shared = first.slots[0].memory.static("mask", torch.zeros(3))
    assert shared is second.slots[0].memory.static("mask", torch.ones(3))
    one, other = torch.ones(3), torch.full((3,), 2.0)
    for source in (one, other, one):
        StaticInputs([shared]).renew([source])
        assert torch.equal(shared.tensor, source)


def test_small_inputs_of_all_types_are_copied_by_one_operation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copied: list[int] = []
    copy = torch._foreach_copy_
    monkeypatch.setattr(
        torch, "_foreach_copy_", lambda to, sources: copied.append(len(to)) or copy(to, sources)
    )
    sources = [
        torch.arange(3, dtype=torch.int32),
        torch.ones(2),
        torch.arange(4),
        torch.tensor([[True, False, True, True]]),
        torch.randn(2, 6, dtype=torch.bfloat16),
        torch.ones(()),
        torch.arange(8)[::5][:1],
        # The others are copied one by one: of no whole number of words, not contiguous, large.
        torch.tensor([True]),
        torch.arange(6).view(2, 3).t(),
        torch.ones(MAX_SMALL_BYTES // 4 + 1),
    ]
    statics = [Static(torch.zeros_like(source)) for source in sources]
    inputs = StaticInputs(statics)
    inputs.renew(sources)
    assert copied == [7]
    assert all(map(torch.equal, (static.tensor for static in statics), sources))
    mask = torch.tensor([False, True, True, False, True, False])
    places = {
        "not contiguous": (mask.repeat(4).view(4, 6)[:, 1:2].t(), 6),
        "not at the start of a word": (mask[1:5].view(1, 4), 6),
        "a dimension of size 1 with a stride of its own": (mask.as_strided((1, 4), (3, 1)), 7),
    }
    for place, (elsewhere, num_together) in places.items():
        sources[3] = elsewhere
        inputs.renew(sources)
        assert copied.pop() == num_together, place
        assert torch.equal(statics[3].tensor, elsewhere), place
