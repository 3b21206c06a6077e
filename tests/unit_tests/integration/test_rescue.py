# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A forward that runs out of device memory is repeated once, and changes no bit; or one error."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from exhausted_gpt import (
    Exhausted,
    Settled,
    train_each,
    train_exhausted,
    train_until_settled,
    train_without_restoring,
)
from model_case import DENSE_MODULES, MOE_MODULES, ModelCase
from ranks import run_ranks

from megatron.slipstream.integration.budget import rescue
from megatron.slipstream.integration.budget.batch_sizes import MicroBatches
from megatron.slipstream.integration.budget.messages import Messages
from megatron.slipstream.plan.settings import WHOLE

NORM = {"normalization": "LayerNorm", "hidden_dropout": 0.1, "attention_dropout": 0.1}
DENSE = ModelCase("dense", num_layers=3, overrides=NORM)
ROUTED = {
    "moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"],
    "moe_aux_loss_coeff": [0.01, 0.01],
    "moe_z_loss_coeff": 0.001,
}
BIASED = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
MOE = ModelCase("moe", num_layers=3, overrides={**NORM, **ROUTED, **BIASED})
COUNTS = (2,) * 7
LATE = 2 * 5 + 1
"""A call in the first iteration whose layers are at their final settings, the least frugal."""


def _training(
    case: ModelCase,
    calls: tuple[int, ...],
    module: str = "decoder.layers.1",
    options: Any = None,
    changed: str = "",
    train: Any = train_exhausted,
    counts: tuple[int, ...] = COUNTS,
    in_backward: bool = False,
) -> tuple[Any, ...]:
    modules = DENSE_MODULES if case.kind == "dense" else MOE_MODULES
    return (train, case, modules, module, calls, counts, options or {}, changed, in_backward)


def _train_each(*trainings: tuple[Any, ...]) -> list[Exhausted]:
    (results,) = run_ranks(1, train_each, trainings)
    return list(results)


def _train(*arguments: Any, **options: Any) -> Exhausted:
    (result,) = _train_each(_training(*arguments, **options))
    return result


def _is_equal(left: Exhausted, right: Exhausted) -> bool:
    pairs = [*zip(left.results, right.results, strict=True), (left.state, right.state)]
    return all(len(a) == len(b) and all(map(torch.equal, a, b)) for a, b in pairs)


LAST = "decoder.layers.2"
INSIDE = f"{LAST}.self_attention.linear_proj"
TWO = (LATE - 1, LATE + 1)
"""Two forwards of an iteration fail."""


@pytest.mark.parametrize(
    "case, failures",
    [
        pytest.param(DENSE, ((LAST, TWO),), id="dense"),
        pytest.param(MOE, ((INSIDE, (0,)), (LAST, (3,)), (INSIDE, TWO)), id="moe"),
    ],
)
def test_a_repeated_forward_changes_no_bit(
    case: ModelCase, failures: tuple[tuple[str, tuple[int, ...]], ...]
) -> None:
    plain, broken, *results = _train_each(
        _training(case, ()),
        _training(case, (3,), train=train_without_restoring),
        *(_training(case, calls, module) for module, calls in failures),
    )
    assert len(plain.results) == len(COUNTS)
    for (_, calls), result in zip(failures, results, strict=True):
        assert len(result.settings) == len(calls)
        assert (set(result.settings[0]) == {WHOLE}) == (calls[0] == 0)
        assert result.errors == []
        assert _is_equal(plain, result)
        assert result.in_use_bytes == 0
        assert result.num_iterations == plain.num_iterations
        (warning,) = [text for text in result.warnings if "ran out" in text]
        assert "the forward is repeated (2.0 MiB" in warning
        assert not any("ended before its backward" in text for text in result.warnings)
    assert not _is_equal(plain, broken)


def test_later_settings_are_chosen_for_the_memory_that_there_was() -> None:
    counts = (2,) * 11
    result = _train(DENSE, (LATE,), "decoder.layers.2", counts=counts)
    before, after = result.assignments[4], result.assignments[-1]
    assert before != after != (WHOLE,) * 3
    assert max(result.peak_bytes[6:]) <= result.failed_bytes[0] < max(result.peak_bytes[:5])


MAX_UNTIL_SETTLED = 12
ENDS = {
    (8, 1): ((1.2, 0.8), (1.2, 0.6)),
    (8, 2): ((1.2, 0.6),),
    (24, 1): ((1.2, 0.7),),
}
"""For numbers of layers and micro-batches, where the device seems to end, and where it does."""


@pytest.mark.parametrize("num_layers, count", ENDS)
def test_few_iterations_are_measured_though_one_is_repeated(num_layers: int, count: int) -> None:
    case = ModelCase("dense", num_layers=num_layers, overrides={"normalization": "LayerNorm"})
    arguments = [
        (train_until_settled, case, count, ends, 3 * MAX_UNTIL_SETTLED)
        for ends in ENDS[num_layers, count]
    ]
    (results,) = run_ranks(1, train_each, arguments)
    for result in results:
        assert isinstance(result, Settled)
        (failed,) = result.failed
        assert result.num_iterations <= MAX_UNTIL_SETTLED
        assert max(result.peak_bytes[failed + 1 :]) <= result.end_bytes
        assert 0.9 * result.end_bytes < result.peak_bytes[-1], "what there is room for is kept"
        assert result.assignments[-1] != (WHOLE,) * num_layers


def test_memory_that_ends_below_what_frugal_settings_need_is_no_news_later() -> None:
    case = ModelCase("dense", num_layers=4, overrides={"normalization": "LayerNorm"})
    arguments = (train_until_settled, case, 1, (1.2, 0.1), 3 * MAX_UNTIL_SETTLED)
    ((result,),) = run_ranks(1, train_each, [arguments])
    assert isinstance(result, Settled)
    assert len(result.failed) == 1
    assert max(result.peak_bytes) > result.end_bytes, "so much is there after all"
    assert result.num_iterations <= MAX_UNTIL_SETTLED
    assert result.assignments[-1] == (WHOLE,) * 4


def test_where_the_second_attempt_fails_one_error_names_what_would_fit() -> None:
    result = _train(DENSE, (LATE, LATE + 1))
    assert len(result.settings) == 2
    assert len(result.errors) == 2
    assert "activation_memory_budget=0.01 is not supported" in result.errors[0]
    assert "every layer was recomputed in a second attempt" in result.errors[0]
    assert "seq_length to at most" in result.errors[0]
    assert result.errors[1].startswith("CUDA out of memory")


@pytest.mark.parametrize("is_frugal", [False, True])
def test_a_smaller_budget_is_no_cure_where_all_is_recomputed(is_frugal: bool) -> None:
    messages, shape = Messages("auto", 0), (4096, 1)
    failure = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0")
    error = messages.ran_out(failure, 6 << 30, shape, "it was in backward", is_frugal)
    smaller = "activation_memory_budget to at most 4.00, or "
    assert f"; set {'' if is_frugal else smaller}seq_length to at most 3072" in str(error)


def test_an_error_in_backward_names_what_would_fit() -> None:
    result = _train(DENSE, (LATE,), in_backward=True)
    error, cause = result.errors
    assert "activation_memory_budget=0.01 is not supported with this micro-batch" in error
    assert "a backward cannot be repeated; set " in error
    assert "seq_length to at most" in error
    assert cause.startswith("CUDA out of memory")


def test_other_ranks_wait_so_that_it_is_not_repeated() -> None:
    result = _train(DENSE, (LATE,), options={"tensor_model_parallel_size": 2})
    assert "with tensor_model_parallel_size=2 other ranks wait" in result.errors[0]
    assert result.errors[1].startswith("CUDA out of memory")
    assert not any("ran out" in text for text in result.warnings)
    assert result.num_copies == 0, "nothing is copied where nothing would be restored"


def test_a_buffer_that_cannot_be_restored_is_named() -> None:
    name = "decoder.layers.0.mlp.router.expert_bias"
    result = _train(MOE, (LATE,), changed=name)
    assert f"it may have changed buffer {name}" in result.errors[0]


@pytest.mark.parametrize(
    "option",
    [
        *("context_parallel_size", "expert_model_parallel_size", "pipeline_model_parallel_size"),
        *("fp8", "moe_shared_expert_overlap"),
    ],
)
def test_where_it_cannot_be_repeated_the_reason_names_the_option(option: str) -> None:
    chunk: Any = torch.nn.Linear(1, 1)
    chunk.config = SimpleNamespace(**{option: 2})
    assert option in str(rescue.why_not(chunk))
    chunk.config = SimpleNamespace(**{option: None})
    assert rescue.why_not(chunk) is None


def train_with_larger(*arguments: Any) -> Exhausted:
    """As ``train_exhausted``, with micro-batches that seem larger from the call on that fails in
    backward, and with GiB of activations."""
    share_of, ran_out = MicroBatches.share_of, Messages.ran_out
    sizes = iter([1.0] * LATE)

    def larger(batches: MicroBatches, stage: int, size: float, is_measured: bool) -> float:
        return share_of(batches, stage, size * next(sizes, 1000.0), is_measured)

    def much(messages: Messages, failure: Any, used_bytes: int, *others: Any) -> Any:
        return ran_out(messages, failure, used_bytes << 13, *others)

    with patch.object(MicroBatches, "share_of", larger), patch.object(Messages, "ran_out", much):
        return train_exhausted(*arguments)


def test_a_smaller_budget_is_no_cure_for_a_micro_batch_that_is_recomputed_as_a_whole() -> None:
    result = _train(DENSE, (LATE,), train=train_with_larger, in_backward=True)
    assert result.settings == [(WHOLE,) * 3]
    assert "activation_memory_budget to at most" not in result.errors[0]
    assert "; set micro_batch_size to at most 1" in result.errors[0]
    (warning,) = (text for text in result.warnings if "would not fit" in text)
    assert f"a micro-batch of {DENSE.micro_batch_size} x {DENSE.seq_length} tokens" in warning
