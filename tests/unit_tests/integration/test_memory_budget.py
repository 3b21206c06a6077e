# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A budget for activations is kept in every iteration, from the first, and changes no bit."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from budgeted_training import Budgeted, train_within
from model_case import DENSE_MODULES, MOE_MODULES, ModelCase
from ranks import run_ranks
from tiny_gpt import build_chunks, initialize, make_config, train_steps

from megatron.slipstream.integration import install
from megatron.slipstream.integration.layers import layer_settings
from megatron.slipstream.options.budget import complete_arguments
from megatron.slipstream.options.fields import OffloadConfig
from megatron.slipstream.plan.relaxation import Stage
from megatron.slipstream.plan.settings import NOTHING, WHOLE, describe_setting

NORM = {"normalization": "LayerNorm"}
"""One operation, as Transformer Engine's norms are."""
DENSE = ModelCase("dense", num_layers=6, overrides=NORM)
MIXED = ModelCase("mixed", num_layers=4, overrides=NORM)
NUM_STEPS = 12
MAX_UNTIL_SETTLED = 11


def _train(case: ModelCase, budget: float, counts: tuple[int, ...] = (2,) * NUM_STEPS) -> Budgeted:
    modules = DENSE_MODULES if case.kind == "dense" else MOE_MODULES
    (result,) = run_ranks(1, train_within, case, modules, "cpu", budget, counts)
    return result


def _check(result: Budgeted) -> None:
    assert result.error == ""
    assert result.difference is None
    assert max(result.activation_bytes) <= result.budget_bytes
    assert set(result.assignments[0]) == {WHOLE}
    assert result.num_until_settled <= MAX_UNTIL_SETTLED


def _check_report(result: Budgeted) -> None:
    """The report has the settings, and what moves adds up to what the engine counts."""
    assert abs(result.reported_bytes - result.budget_bytes) <= 1
    final = result.assignments[-1]
    assert [layer.setting for layer in result.layers] == [*map(describe_setting, final)]
    assert [layer.kind for layer in result.layers] == [*result.kinds]
    assert {layer.reason for layer in result.layers} == {"the least time that fits"}
    moved = 2 * sum(layer.moved_bytes for layer in result.layers)
    assert moved == pytest.approx(result.moved_bytes, abs=2 * len(final))
    kept = {layer.kind for layer in result.layers if layer.setting == describe_setting(NOTHING)}
    for layer in result.layers:
        is_whole = layer.setting == describe_setting(WHOLE)
        assert layer.recomputed_bytes > 0 or not (is_whole and layer.kind in kept)
    for layer, setting, least in zip(result.layers, final, result.least, strict=True):
        assert not layer.recomputed_bytes or setting != least
        assert layer.moved_bytes + layer.recomputed_bytes <= layer.saved_bytes


@pytest.mark.parametrize("budget", [0.8, 0.5], ids=str)
@pytest.mark.parametrize("case", [DENSE, MIXED], ids=lambda case: case.kind)
def test_training_is_bitwise_that_without_and_never_above_the_budget(
    case: ModelCase, budget: float
) -> None:
    result = _train(case, budget)
    _check(result)
    assert result.planned_bytes == pytest.approx(result.activation_bytes[-1], rel=0.01)
    _check_report(result)
    used = max(result.activation_bytes[result.num_until_settled :]) / result.budget_bytes
    assert used > 0.5, "what there is room for is kept"


def test_with_room_to_spare_nothing_is_recomputed_and_nothing_moves() -> None:
    result = _train(DENSE, 1.5)
    _check(result)
    assert result.assignments[-1] == result.least
    assert result.moved_bytes == 0


def test_where_nothing_fits_an_error_names_what_would() -> None:
    result = _train(DENSE, 0.05)
    assert "even if every layer is recomputed" in result.error
    assert "set activation_memory_budget to 0.01 or more, or seq_length to at most" in result.error


def test_iterations_of_other_numbers_of_micro_batches_stay_within_it() -> None:
    result = _train(DENSE, 0.5, (2, 3, 1, 2) * 4)
    _check(result)


SHORT, LONG = 24, 48
LENGTHS = {
    "shorter": [LONG, *[SHORT, LONG, SHORT + 8] * 5],
    "longer while settling": [SHORT, SHORT, LONG, SHORT, LONG, *[SHORT] * 11],
    "spikes later": [*[SHORT] * 12, LONG, SHORT, LONG, LONG],
}


@pytest.mark.parametrize("name", LENGTHS)
def test_sequences_of_other_lengths_stay_within_it(name: str) -> None:
    """A longer one is planned from its size before it runs. The last step's has the longest."""
    lengths = [*LENGTHS[name][:-1], LONG]
    arguments = (DENSE, DENSE_MODULES, "cpu", 0.5, (2,) * len(lengths), None, lengths)
    (result,) = run_ranks(1, train_within, *arguments)
    assert result.error == ""
    assert result.difference is None
    assert max(result.activation_bytes) <= result.budget_bytes
    assert Stage.SETTLED in result.stages


@pytest.mark.parametrize("shape", [(2, None), (2, 2)], ids=str)
def test_the_stages_of_a_pipeline_have_each_its_own(shape: tuple[int, Any]) -> None:
    pp, vpp = shape
    case = ModelCase("dense", num_layers=8, pp=pp, vpp=vpp, overrides=NORM)
    results = run_ranks(pp, train_within, case, DENSE_MODULES, "cpu-lazy", 0.6, (4,) * NUM_STEPS)
    for result in results:
        _check(result)


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"dp": 2, "ep": 2}], ids=str)
def test_ranks_that_share_a_stage_choose_alike(sizes: dict[str, int]) -> None:
    """Otherwise one would wait for a collective of a recomputation that the other does not run."""
    case = ModelCase("moe" if "ep" in sizes else "dense", overrides=NORM, **sizes)
    modules = MOE_MODULES if case.kind == "moe" else DENSE_MODULES
    results = run_ranks(2, train_within, case, modules, "cpu", 0.6, (2,) * NUM_STEPS)
    for result in results:
        _check(result)
    assert results[0].assignments == results[1].assignments


def train_without_readings(rank: int, world_size: int, port: int) -> tuple[list[str], Stage]:
    """The warnings about the budget, and the stage after two iterations."""
    case = ModelCase(num_layers=2)
    initialize(case, rank, world_size, port)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatron.slipstream").addHandler(handler)
    manager = install.install(OffloadConfig(offload_backend="cpu", activation_memory_budget=1.0))
    config = make_config(case, DENSE_MODULES)
    chunks = build_chunks(case, config)
    for _ in train_steps(case, config, chunks, (1, 1)):
        assert set(layer_settings.assignment_of(chunks)) == {WHOLE}
    assert manager.budget is not None
    assert manager.budget.relaxation is not None
    told = [text for text in said if "is not followed" in text]
    return told, manager.budget.relaxation.stage


def test_without_readings_of_memory_layers_stay_recomputed_and_a_warning_says_so() -> None:
    (((warning, *others), stage),) = run_ranks(1, train_without_readings)
    assert warning.startswith("activation_memory_budget=1.0 is not followed")
    assert not others
    assert stage is Stage.FRUGAL


def test_auto_needs_a_device_with_an_end() -> None:
    with pytest.raises(ValueError, match="activation_memory_budget='auto' .* set the GiB"):
        install.install(OffloadConfig(offload_backend="cpu", activation_memory_budget="auto"))


@pytest.mark.parametrize(
    "model, has, lacks",
    [
        ({}, {"core_attn", "mlp_fc2"}, {"expert_fc1", "fused_group_mlp", "mla_up_proj"}),
        ({"num_experts": 4, "moe_grouped_gemm": True}, {"expert_fc1", "expert_fc2"}, set()),
        ({"recompute_granularity": "selective", "recompute_modules": ["mlp"]}, set(), {"mlp_fc2"}),
    ],
    ids=["dense", "experts", "MLP recomputed"],
)
def test_the_flag_alone_moves_all_that_the_model_can(
    model: dict[str, Any], has: set[str], lacks: set[str]
) -> None:
    args = SimpleNamespace(
        **{
            "activation_memory_budget": 1.0,
            "fine_grained_activation_offloading": False,
            "offload_modules": None,
            "num_experts": None,
            "multi_latent_attention": False,
            **model,
        }
    )
    complete_arguments(args)
    assert args.fine_grained_activation_offloading
    assert has <= set(args.offload_modules)
    assert not lacks & set(args.offload_modules)


def test_modules_that_are_given_stay_as_they_are() -> None:
    args = SimpleNamespace(
        activation_memory_budget="auto",
        fine_grained_activation_offloading=True,
        offload_modules=["core_attn"],
    )
    complete_arguments(args)
    assert args.offload_modules == ["core_attn"]
