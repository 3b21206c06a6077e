# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Loss and every gradient of real models bitwise equal those of the engine switched off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from ranks import run_ranks
from tiny_gpt import (
    DENSE_MODULES,
    MOE_MODULES,
    Comparison,
    ModelCase,
    compare,
    compare_on_ranks,
    skip_without_model,
)

DROPOUT = {"attention_dropout": 0.1, "hidden_dropout": 0.1}
ONE_RANK = {
    "dense": ModelCase("dense"),
    "moe": ModelCase("moe"),
    "moe, sync-free": ModelCase("moe", num_layers=3, sync_free_experts=True),
    "dense and moe layers mixed": ModelCase("mixed"),
    "mla": ModelCase("mla", num_layers=3),
    "hybrid": ModelCase("hybrid", num_layers=8),
    "moe, odd sizes": ModelCase(
        "moe",
        num_layers=3,
        hidden_size=132,
        num_attention_heads=6,
        seq_length=19,
        micro_batch_size=3,
    ),
    "moe, dropout": ModelCase("moe", num_layers=3, overrides=DROPOUT),
    "qk norm": ModelCase("dense", num_layers=3, overrides={"qk_layernorm": True}),
    "moe, multi-token prediction": ModelCase("moe", num_layers=2, overrides={"mtp_num_layers": 1}),
    "hybrid, multi-token prediction": ModelCase(
        "hybrid", pattern="*-*E/*E/*E", overrides={"mtp_num_layers": 2}
    ),
}


IMMEDIATE = "moe, sync-free", "dense and moe layers mixed", "mla"
"""Kinds of models whose copies no other test here makes at once."""


OF_A_RELEASE = (
    *("moe, sync-free", "moe, multi-token prediction", "hybrid, multi-token prediction"),
    *("expert parallel, sync-free", "PP2, multi-token prediction"),
    "PP2, hybrid, multi-token prediction",
)
"""Models that differ by release. Others are in test_module_groups, where they move more."""
LONG = "moe", "hybrid"
"""Models that train with more micro-batches, and with several changes of their number."""


def _on_backends(cases: Mapping[str, Any], immediate: Sequence[str]) -> list[Any]:
    """Each case with copies that run as late as waits allow, some with immediate copies too.

    What differs between backends depends on the kind of model and on its schedule, not on the
    other options of a case.
    """
    chosen = []
    for name, case in cases.items():  # Neighbours share the training without the engine.
        marks = [pytest.mark.releases] if name in OF_A_RELEASE else []
        chosen += [pytest.param(case, "cpu-lazy", id=name, marks=marks)]
        chosen += [pytest.param(case, "cpu", id=f"{name}, cpu")] if name in immediate else []
    return chosen


def _modules(case: ModelCase) -> tuple[str, ...]:
    return DENSE_MODULES if case.kind in ("dense", "mla") else MOE_MODULES


def _check(
    case: ModelCase,
    modules: tuple[str, ...],
    backend: str,
    counts: tuple[int, ...],
    offload: dict[str, Any] | None = None,
    num_ranks: int = 1,
    reads_memory: bool = False,
    keeps_gradients: bool = False,
) -> list[Comparison]:
    skip_without_model(case)
    arguments = (case, modules, backend, counts, offload, reads_memory, keeps_gradients)
    results = compare_on_ranks(num_ranks, *arguments)
    assert [result.difference for result in results] == [None] * num_ranks
    return results


@pytest.mark.parametrize("case, backend", _on_backends(ONE_RANK, IMMEDIATE))
def test_one_rank(case: ModelCase, backend: str) -> None:
    is_long = case in [ONE_RANK[name] for name in LONG]
    counts = (1, 3, 3, 2, 3) if is_long else (1, 2, 2)
    (result,) = _check(case, _modules(case), backend, counts)
    assert result.moved_bytes > 0


def test_norms_are_discarded_while_copies_read_them() -> None:
    recomputed = {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}
    case = ModelCase("dense", overrides=recomputed, num_layers=5)
    modules = ("qkv_linear", "core_attn")
    (result,) = _check(case, modules, "cpu-lazy", (3, 4, 2, 3), {"offload_release_lag": 3})
    assert result.moved_bytes > 0


@pytest.mark.parametrize("name, counts", [("moe", (2, 2, 2)), ("hybrid", (2, 2, 1, 2))], ids=str)
def test_the_peak_drops_as_planned(name: str, counts: tuple[int, ...]) -> None:
    """With the longer counts, the engine reads the memory of the same step that is measured."""
    case = ONE_RANK[name]
    (result,) = _check(case, _modules(case), "cpu", counts, reads_memory=True)
    assert result.peak_drop_bytes == result.planned_drop_bytes > 0
    assert result.claimed_drop_bytes == result.reported_drop_bytes == result.peak_drop_bytes
    assert result.peak_drop_bytes < result.freed_bytes


@pytest.mark.parametrize("modules", [("expert_fc1",), MOE_MODULES], ids=str)
def test_what_is_claimed_after_one_iteration_is_what_the_peak_falls_by(
    modules: tuple[str, ...],
) -> None:
    """As in a test of megatron-core's engine: gradients of the first iteration stay allocated."""
    case = ModelCase("moe", num_layers=3, bf16=True)
    (result,) = _check(case, modules, "cpu", (2,), reads_memory=True, keeps_gradients=True)
    assert result.claimed_drop_bytes == result.peak_drop_bytes > 0


def test_layers_that_predict_further_tokens_move_as_any_other() -> None:
    predicting = ModelCase("dense", overrides={"mtp_num_layers": 2})
    found = [
        _check(case, DENSE_MODULES, "cpu", (1, 1, 1), reads_memory=True)[0]
        for case in (predicting, replace(predicting, num_layers=6, overrides={}))
    ]
    assert found[0].moved_bytes == found[1].moved_bytes > 0
    assert found[0].peak_drop_bytes == found[0].planned_drop_bytes == found[1].peak_drop_bytes


def test_what_lingers_moves_if_the_peak_lies_elsewhere_once_gradients_stay() -> None:
    """The gradients of the first iteration put its peak at the end of backward, when some layers'
    queries, keys and values are reloaded. Later iterations need them offloaded."""
    overrides = {
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 64,
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
        "recompute_granularity": "selective",
        "recompute_modules": ["layernorm", "moe_act"],
    }
    case, modules = ModelCase("mla", num_layers=8, overrides=overrides), ("core_attn", "attn_proj")
    (result,) = _check(case, modules, "cpu", (1,), reads_memory=True, keeps_gradients=True)
    assert result.claimed_drop_bytes == result.peak_drop_bytes == result.moved_bytes
    assert result.moved_bytes % 7 == 0, "the layers but the last do not move the same"


def test_one_layer_has_nothing_to_hide_a_copy_behind() -> None:
    (result,) = _check(ModelCase("dense", num_layers=1), DENSE_MODULES, "cpu-lazy", (1, 3, 3))
    assert result.moved_bytes == 0


def _compare_all(
    rank: int,
    world_size: int,
    port: int,
    counts: tuple[int, ...],
    engines: Sequence[tuple[tuple[str, ...], dict[str, Any]]],
) -> list[Comparison]:
    """Train one model with several engines, in a process that trains once without."""
    settings = rank, world_size, port, ModelCase("moe")
    return [
        compare(*settings, modules, "cpu-lazy", counts, options) for modules, options in engines
    ]


def test_each_module_alone() -> None:
    alone = [("core_attn", name) if name == "attn_proj" else (name,) for name in MOE_MODULES]
    engines = [(modules, {}) for modules in alone]
    (results,) = run_ranks(1, _compare_all, (2, 2, 2), engines)
    for module, result in zip(MOE_MODULES, results, strict=True):
        assert result.difference is None, module
        assert module in result.moved_modules or module == "attn_proj"
        assert result.num_late == 0


OPTIONS = (
    {"activation_offload_fraction": 0.5},
    {"activation_offload_fraction": 0.0},
    {"delta_offload_bytes_across_pp_ranks": 4096},
    {"min_offloaded_tensor_size": 5000},
    {"offload_release_lag": 0, "offload_prefetch_depth": 0},
    {"offload_release_lag": 4, "offload_prefetch_depth": 3},
)


def test_options() -> None:
    engines = [(MOE_MODULES, options) for options in OPTIONS]
    (results,) = run_ranks(1, _compare_all, (2, 2, 3), engines)
    for options, result in zip(OPTIONS, results, strict=True):
        assert result.difference is None, options


TWO_RANKS = {
    "expert parallel, sync-free": (ModelCase("moe", ep=2, sync_free_experts=True), (1, 2, 2)),
    "PP2": (ModelCase("dense", pp=2), (3, 2, 4, 1, 3)),
    "PP2, multi-token prediction": (
        ModelCase("dense", pp=2, overrides={"mtp_num_layers": 1}),
        (4, 3, 3),
    ),
    "PP2, hybrid, multi-token prediction": (
        ModelCase("hybrid", pp=2, pattern="*-|*E/*E", overrides={"mtp_num_layers": 1}),
        (4, 3, 3),
    ),
    "PP2 VPP2, one layer per chunk": (ModelCase("dense", pp=2, vpp=2), (2, 4, 2)),
    "PP2 VPP2, MoE": (ModelCase("moe", pp=2, vpp=2), (4, 2, 4)),
}
"""Further ones, with all modules that move, are in test_module_groups, and data-parallel ranks in
test_pretrain."""


IMMEDIATE_TWO_RANKS = "expert parallel, sync-free", "PP2 VPP2, MoE"


@pytest.mark.parametrize("layout, backend", _on_backends(TWO_RANKS, IMMEDIATE_TWO_RANKS))
def test_two_ranks(layout: tuple[ModelCase, tuple[int, ...]], backend: str) -> None:
    case, counts = layout
    results = _check(case, _modules(case), backend, counts, num_ranks=2)
    assert results[0].moved_bytes > 0


KEPT_BYTES = 50_000


def test_later_stages_keep_more() -> None:
    """The second of two stages keeps whole groups, until they have the option's bytes."""
    case, counts = TWO_RANKS["PP2"][0], (4, 4)
    modules = ("core_attn",)
    without = _check(case, modules, "cpu", counts, num_ranks=2)
    offload = {"delta_offload_bytes_across_pp_ranks": KEPT_BYTES}
    found = _check(case, modules, "cpu", counts, offload, num_ranks=2)
    kept = [a.moved_bytes - b.moved_bytes for a, b in zip(without, found, strict=True)]
    assert kept[0] == 0
    assert KEPT_BYTES <= kept[1] < without[1].moved_bytes
