# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Slipstream's own modules are refused where they cannot move, and each cure is accepted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from model_options import VALID_MODEL

from megatron.slipstream.options.model import MODULE_NAMES, check_model_options
from megatron.slipstream.options.modules import OWN_MODULE_RULES, OWN_MODULES, own_modules
from megatron.slipstream.options.rules import require

EXPERTS = {"num_moe_experts": 8, "moe_layer_freq": 2, "moe_shared_expert_intermediate_size": 64}
MODEL = {**VALID_MODEL, **EXPERTS, "multi_latent_attention": True, "moe_grouped_gemm": True}


def recomputing(name: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": ["layernorm", name]}


# One entry per rule, in the table's order: a module, options that break the rule, and the cure.
BREAKS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("mlp_act", {"offload_engine": "megatron"}, {"offload_engine": "slipstream"}),
    (
        "mlp_act",
        {"cuda_graph_impl": "local", "cuda_graph_modules": ["attn"]},
        {"cuda_graph_impl": "transformer_engine"},
    ),
    (
        "embedding",
        {"cuda_graph_granularity": "chunk"},
        {"cuda_graph_granularity": "layer"},
    ),
    ("mlp_fc1", {"moe_layer_freq": [1, 1]}, {}),
    ("mlp_fc1", recomputing("mlp"), {"recompute_modules": ["layernorm"]}),
    (
        "mlp_fc2",
        {"use_transformer_engine_op_fuser": True},
        {"use_transformer_engine_op_fuser": False},
    ),
    ("expert_fc2", {"moe_grouped_gemm": False}, {}),
    ("expert_fc2", recomputing("moe"), {"recompute_modules": ["layernorm"]}),
    ("expert_fc2", {"moe_paged_stash": True}, {"moe_paged_stash": False}),
    ("shared_experts", {"moe_shared_expert_intermediate_size": None}, {}),
    ("shared_experts", recomputing("shared_experts"), {"recompute_modules": ["layernorm"]}),
    ("shared_experts", {"moe_shared_expert_overlap": True}, {"moe_shared_expert_overlap": False}),
    ("mla_down_proj", {"multi_latent_attention": False}, {"offload_modules": ["qkv_linear"]}),
    ("mla_up_proj", recomputing("mla_up_proj"), {"recompute_modules": ["layernorm"]}),
]


def facts(*modules: str, **changed: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**MODEL, "offload_modules": ["expert_fc1", *modules], **changed})


def test_every_rule_has_a_case_here() -> None:
    assert len(BREAKS) == len(OWN_MODULE_RULES)


@pytest.mark.parametrize("index", range(len(BREAKS)))
def test_a_module_that_cannot_move_is_refused_with_reason_and_cure(index: int) -> None:
    module, broken, cure = BREAKS[index]
    found = facts(module, **broken)
    violated = [
        number
        for number, rule in enumerate(OWN_MODULE_RULES)
        if rule.when(found) and not rule.requires(found)
    ]
    assert violated == [index]
    with pytest.raises(
        ValueError, match=rf"^offload_modules=\['expert_fc1', '{module}'\]"
    ) as error:
        require(check_model_options(found))
    assert " because " in str(error.value)
    assert module in str(error.value).partition("; remove ")[2]
    require(check_model_options(facts(**broken)))  # without the module
    if cure:
        assert all(str(name) in str(error.value) for name in cure if name != "offload_modules")
        require(check_model_options(facts(module, **{**broken, **cure})))
    found.fine_grained_activation_offloading = False
    require(check_model_options(found))


def test_all_own_modules_are_accepted_together() -> None:
    require(check_model_options(facts(*OWN_MODULES)))
    assert own_modules(facts(*OWN_MODULES)) == [*OWN_MODULES]
    assert MODULE_NAMES.keys() > OWN_MODULES.keys()


def test_options_that_are_not_known_yet_refuse_nothing() -> None:
    """As for a framework's overrides, which are checked before its model is known."""
    known = SimpleNamespace(**{**VALID_MODEL, "offload_modules": ["mla_up_proj"]})
    require(check_model_options(known))


def test_a_misspelt_own_module_gets_its_name() -> None:
    with pytest.raises(ValueError, match="did you mean 'shared_experts'.*mlp_fc1"):
        require(check_model_options(facts("shared_expert")))
