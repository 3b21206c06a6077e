# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Every rule refuses its bad value, names the option and the value, and says what to set."""

from __future__ import annotations

import argparse
import dataclasses
import enum
from types import SimpleNamespace
from typing import Any

import pytest
from model_options import VALID_MODEL

from megatron.slipstream.launcher import num_local_ranks
from megatron.slipstream.options.fields import RULES, OffloadConfig, parse_percent
from megatron.slipstream.options.model import (
    MODEL_RULES,
    MODULE_NAMES,
    MOE_MODULE_NAMES,
    check_model_options,
    check_module_names,
    modules_at_the_edge_of_graphs,
)
from megatron.slipstream.options.rules import Rule, always, check_rules, option_rule, require

CURES = ("set ", "add ", "remove ")

# One entry per rule, in the table's order: options that break only this rule.
BREAKS_RULE: list[dict[str, Any]] = [
    {"offload_engine": "slipsteam"},
    {"offload_native": "on"},
    {"offload_backend": "gpu"},
    {"offload_release_lag": -1},
    {"offload_prefetch_depth": -1},
    {"offload_target_memory_gib": 0.0},
    {"offload_max_overhead_percent": -0.5},
    {"offload_max_overhead_percent": 1.5, "offload_target_memory_gib": 40.0},
    {"activation_memory_budget": 0.0},
    {"activation_memory_budget": 1.0, "offload_target_memory_gib": 40.0},
    {"offload_host_memory_limit_bytes": 0},
    {"offload_verify": -1},
]
BREAKS_MODEL_RULE: list[dict[str, Any]] = [
    {"offload_modules": []},
    {"offload_modules": ["attn_proj"]},
    {"offload_modules": ["core_attn", "moe_act"]},
    {"activation_offload_fraction": 1.5},
    {"min_offloaded_tensor_size": -1},
    {"delta_offload_bytes_across_pp_ranks": -1},
    {"fine_grained_offloading_max_inflight_offloads": -1},
    {"delay_offload_until_cuda_graph": True},
    {"cpu_offloading": True},
    {"cuda_graph_impl": "full_iteration"},
    {"cuda_graph_impl": "local", "cuda_graph_modules": ["attn"]},
    {"cuda_graph_modules": ["moe"], "cuda_graph_impl": "transformer_engine"},
    {"cuda_graph_warmup_steps": 0, "cuda_graph_impl": "transformer_engine"},
]


def model_facts(**changed: Any) -> SimpleNamespace:
    """megatron-core's options of a valid model with offloading."""
    return SimpleNamespace(**{**VALID_MODEL, **changed})


def broken_rules(rules: tuple[Rule, ...], facts: Any) -> list[int]:
    return [i for i, rule in enumerate(rules) if rule.when(facts) and not rule.requires(facts)]


def test_defaults_meet_every_rule() -> None:
    assert broken_rules(RULES, OffloadConfig()) == []
    require(check_model_options(model_facts()))


def test_every_rule_has_a_case_here() -> None:
    assert len(BREAKS_RULE) == len(RULES)
    assert len(BREAKS_MODEL_RULE) == len(MODEL_RULES)


@pytest.mark.parametrize(
    "index, changed",
    list(enumerate(BREAKS_RULE)),
    ids=[f"{i}-{rule.name}" for i, rule in enumerate(RULES)],
)
def test_a_bad_setting_is_refused_with_option_value_and_cure(
    index: int, changed: dict[str, Any]
) -> None:
    assert RULES[index].name == next(iter(changed))
    with pytest.raises(ValueError) as refused:
        OffloadConfig(**changed)
    for option, value in changed.items():
        assert f"{option}=" in str(refused.value)
        assert str(value) in str(refused.value)
    assert any(cure in str(refused.value) for cure in CURES)
    facts = SimpleNamespace(**(dataclasses.asdict(OffloadConfig()) | changed))
    assert broken_rules(RULES, facts) == [index]


@pytest.mark.parametrize(
    "index, changed",
    list(enumerate(BREAKS_MODEL_RULE)),
    ids=[f"{i}-{rule.name}" for i, rule in enumerate(MODEL_RULES)],
)
def test_a_bad_model_option_is_refused_with_option_and_cure(
    index: int, changed: dict[str, Any]
) -> None:
    facts = model_facts(**changed)
    with pytest.raises(ValueError, match=MODEL_RULES[index].name) as refused:
        require(check_model_options(facts))
    assert any(cure in str(refused.value) for cure in CURES)
    assert broken_rules(MODEL_RULES, facts) == [index]


@pytest.mark.parametrize("changed", BREAKS_MODEL_RULE, ids=lambda changed: next(iter(changed)))
def test_model_options_are_not_judged_while_offloading_is_off(changed: dict[str, Any]) -> None:
    require(check_model_options(model_facts(fine_grained_activation_offloading=False, **changed)))


@pytest.mark.parametrize(
    "changed",
    [
        {"offload_release_lag": 0},
        {"offload_prefetch_depth": 0},
        {"offload_backend": "cpu-lazy"},
        {"offload_engine": "megatron"},
        {"offload_target_memory_gib": 0.5},
        {"offload_max_overhead_percent": 0.0},
        {"offload_max_overhead_percent": "auto"},
        {"activation_memory_budget": "auto"},
        {"activation_memory_budget": 0.5},
        {"offload_host_memory_limit_bytes": 1},
        {"offload_host_memory_limit_bytes": None},
    ],
    ids=str,
)
def test_values_at_the_edge_of_a_rule_are_accepted(changed: dict[str, Any]) -> None:
    config = OffloadConfig(**changed)
    assert {name: getattr(config, name) for name in changed} == changed


@pytest.mark.parametrize(
    "changed",
    [
        {"activation_offload_fraction": 0.0},
        {"activation_offload_fraction": 1.0},
        {"min_offloaded_tensor_size": 0},
        {"offload_modules": ["core_attn"]},
        {
            "offload_modules": sorted(MODULE_NAMES),
            "num_moe_experts": 8,
            "moe_layer_freq": 2,
            "moe_shared_expert_intermediate_size": 64,
        },
        {"cuda_graph_impl": "transformer_engine"},
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn", "moe_router"]},
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_warmup_steps": 1},
        {
            "cuda_graph_impl": "local",
            "cuda_graph_modules": ["attn"],
            "num_moe_experts": 8,
            "offload_modules": ["expert_fc1", "moe_act"],
        },
        {"cuda_graph_warmup_steps": 0},
        {"cuda_graph_impl": "transformer_engine", "delay_offload_until_cuda_graph": True},
        {"fine_grained_offloading_max_inflight_offloads": None},
        {"fine_grained_offloading_max_inflight_offloads": 0},
        {
            "offload_engine": "megatron",
            "fine_grained_offloading_max_inflight_offloads": 2,
            "delay_offload_until_cuda_graph": True,
        },
    ],
    ids=str,
)
def test_model_values_at_the_edge_of_a_rule_are_accepted(changed: dict[str, Any]) -> None:
    require(check_model_options(model_facts(**changed)))


class _Part(enum.Enum):
    """Options with megatron-core's names and defaults."""

    attn = 1
    mlp = 2
    moe_router = 3


@pytest.mark.parametrize(
    "captured, at_the_edge",
    [
        ([], ["attn_norm"]),
        (["attn"], ["attn_norm", "mlp_norm"]),
        ([_Part.attn], ["attn_norm", "mlp_norm"]),
        ([_Part.attn, _Part.mlp], ["attn_norm"]),
        (["mlp"], ["mlp_norm"]),
        (["attn", "moe_router"], ["attn_norm", "mlp_norm"]),
        (["moe_router"], ["mlp_norm"]),
    ],
)
def test_modules_whose_tensors_graphs_hand_on_are_known(
    captured: list[Any], at_the_edge: list[str]
) -> None:
    modules = ["attn_norm", "core_attn", "mlp_norm"]
    facts = model_facts(
        offload_modules=modules,
        cuda_graph_impl="transformer_engine",
        cuda_graph_modules=captured,
    )
    assert modules_at_the_edge_of_graphs(facts) == at_the_edge
    facts.cuda_graph_impl = "none"
    assert modules_at_the_edge_of_graphs(facts) == []


@pytest.mark.parametrize(
    "wrong, meant",
    [("core_attention", "core_attn"), ("attn_projection", "attn_proj"), ("moe_activ", "moe_act")],
)
def test_an_unknown_module_gets_the_nearest_name(wrong: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"'{wrong}'.*did you mean '{meant}'"):
        require(check_model_options(model_facts(offload_modules=[wrong])))


def test_an_unknown_module_far_from_all_gets_the_list_and_no_guess() -> None:
    with pytest.raises(ValueError, match="Known modules: ") as refused:
        require(check_module_names(["zzz"]))
    assert "did you mean" not in str(refused.value)
    assert all(name in str(refused.value) for name in MODULE_NAMES)


def test_every_expert_module_is_a_module() -> None:
    assert set(MODULE_NAMES) >= MOE_MODULE_NAMES


def test_settings_cannot_change_after_they_were_checked() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        OffloadConfig().offload_release_lag = -1  # type: ignore[misc]


@pytest.mark.parametrize("given, percent", [(None, None), (2.5, 2.5), ("auto", 1.0)])
def test_the_limit_of_the_overhead_is_a_number_or_auto(given: Any, percent: Any) -> None:
    assert OffloadConfig(offload_max_overhead_percent=given).max_overhead_percent == percent


def test_another_word_for_the_limit_of_the_overhead_is_refused() -> None:
    with pytest.raises(ValueError, match="offload_max_overhead_percent='atuo' is no limit; set"):
        OffloadConfig(offload_max_overhead_percent="atuo")  # type: ignore[arg-type]
    with pytest.raises(argparse.ArgumentTypeError, match="'atuo' is neither a number nor 'auto'"):
        parse_percent("atuo")


def test_a_message_shows_the_value_that_was_given() -> None:
    rule = option_rule("x", always, lambda facts: facts.x < 3, "x={x} is too large", "set 2")
    with pytest.raises(ValueError, match="x=7 is too large; set 2"):
        require(check_rules([rule], SimpleNamespace(x=7)))


@pytest.mark.parametrize("text", ["many", "0", "-1", "1.5", ""], ids=repr)
def test_a_launchers_number_of_processes_that_is_none_is_refused(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", text)
    with pytest.raises(ValueError, match=f"^LOCAL_WORLD_SIZE='{text}' is not supported .*; set it"):
        num_local_ranks()


def test_the_number_of_processes_on_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert num_local_ranks() == 8
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert num_local_ranks() == 1
