# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Names of modules, values of settings, and what a message shows."""

from __future__ import annotations

import argparse
import dataclasses
import enum
from types import SimpleNamespace
from typing import Any

import pytest
from model_options import VALID_MODEL

from megatron.slipstream.options.fields import OffloadConfig, parse_percent
from megatron.slipstream.options.model import (
    MODULE_NAMES,
    check_model_options,
    check_module_names,
    modules_at_the_edge_of_graphs,
)
from megatron.slipstream.options.modules import OWN_MODULES, own_modules
from megatron.slipstream.options.rules import always, check_rules, option_rule, require


def model_facts(**changed: Any) -> SimpleNamespace:
    """megatron-core's options of a valid model with offloading."""
    return SimpleNamespace(**{**VALID_MODEL, **changed})


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
    rule = option_rule("lr", always, lambda f: f.lr < 3, "lr={lr} is too large", "set 2")
    with pytest.raises(ValueError, match="lr=7 is too large; set 2"):
        require(check_rules([rule], SimpleNamespace(lr=7)))


def test_options_that_are_not_known_yet_refuse_nothing() -> None:
    """As for a framework's overrides, which are checked before its model is known."""
    require(check_model_options(model_facts(offload_modules=["mla_up_proj"])))


def test_a_misspelt_own_module_gets_its_name() -> None:
    with pytest.raises(ValueError, match="did you mean 'shared_experts'.*mlp_fc1"):
        require(check_model_options(model_facts(offload_modules=["shared_expert"])))


def test_own_modules_are_modules() -> None:
    assert own_modules(model_facts(offload_modules=["core_attn", *OWN_MODULES])) == [*OWN_MODULES]
    assert MODULE_NAMES.keys() > OWN_MODULES.keys()
