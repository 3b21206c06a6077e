# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Options in the form of frameworks: three values, no unknown ones, all rules apply."""

from __future__ import annotations

import dataclasses
import logging
import subprocess
import sys
from collections import UserList
from collections.abc import Iterable
from typing import Any, get_type_hints
from unittest import mock

import pytest
from ranks import run_ranks

from megatron.slipstream.integration.frameworks.options import (
    apply_overrides,
    revalidate,
    to_cli,
    to_transformer_overrides,
)
from megatron.slipstream.options.fields import DEFAULTS, OffloadOptions
from megatron.slipstream.options.model import MODULE_NAMES
from megatron.slipstream.patches import releases

SWITCH = "fine_grained_activation_offloading"
ON = {SWITCH: True, "offload_modules": ["core_attn", "attn_proj"]}


def model(known: Iterable[str] = DEFAULTS, **values: Any) -> Any:
    """A configuration that has these offloading options, with other values."""
    fields = {name: DEFAULTS[name] for name in known} | values
    return dataclasses.make_dataclass("Model", fields.keys())(**fields)


MOE = model(num_moe_experts=8)


def transformer_config(**options: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4, **options)


# Given and missing options.


def test_what_is_left_out_leaves_the_configuration_alone() -> None:
    assert to_transformer_overrides({}) == {}
    assert to_transformer_overrides(dict.fromkeys(DEFAULTS)) == {}
    assert to_cli({}) == []


@pytest.mark.parametrize("modules", [None, [], ["core_attn"], ["moe_act"]], ids=str)
def test_off_empties_the_list_whatever_it_was(modules: Any) -> None:
    options = {SWITCH: False, "offload_modules": modules, "activation_offload_fraction": 0.5}
    assert to_transformer_overrides(options) == {SWITCH: False, "offload_modules": []}
    assert to_cli(options) == []


@pytest.mark.parametrize("modules", [None, []], ids=str)
def test_on_needs_modules_even_if_the_configuration_has_some(modules: Any) -> None:
    has_some = model(offload_modules=["core_attn"])
    for config in (None, model(), has_some):
        with pytest.raises(ValueError, match="needs at least one module to move; set offload_mod"):
            to_transformer_overrides({SWITCH: True, "offload_modules": modules}, config)


def test_all_pass_on_by_their_own_names() -> None:
    options: OffloadOptions = {
        "fine_grained_activation_offloading": True,
        "offload_modules": ["expert_fc1", "moe_act"],
        "activation_offload_fraction": 0.5,
        "delta_offload_bytes_across_pp_ranks": 1024,
        "min_offloaded_tensor_size": 0,
        "delay_offload_until_cuda_graph": True,
    }
    config = model(num_moe_experts=8, cuda_graph_impl="transformer_engine")
    overrides = to_transformer_overrides(options, config)
    assert overrides == options
    assert overrides["offload_modules"] is not options["offload_modules"]


def test_a_limit_of_copies_in_flight_passes_on() -> None:
    options = ON | {"fine_grained_offloading_max_inflight_offloads": 2}
    assert to_transformer_overrides(options) == options
    options = ON | {"fine_grained_offloading_max_inflight_offloads": -2}
    with pytest.raises(ValueError, match="max_inflight_offloads=-2 is negative; set"):
        to_transformer_overrides(options)


def test_a_list_of_another_kind_becomes_a_plain_one() -> None:
    overrides = to_transformer_overrides(ON | {"offload_modules": UserList(["core_attn"])})
    assert type(overrides["offload_modules"]) is list
    assert to_transformer_overrides(ON | {"offload_modules": ("core_attn",)}) == {
        SWITCH: True,
        "offload_modules": ["core_attn"],
    }


# Refusals.


@pytest.mark.parametrize(
    "wrong, near",
    [
        ("offload_module", "offload_modules"),
        ("fine_grained_activation_ofloading", SWITCH),
        ("activation_offload_fractions", "activation_offload_fraction"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(wrong: str, near: str) -> None:
    with pytest.raises(ValueError, match=f"'{wrong}' is not an offloading.*mean '{near}'"):
        to_transformer_overrides({wrong: None})


@pytest.mark.parametrize(
    "name, value",
    [
        (SWITCH, "true"),
        (SWITCH, 1),
        ("offload_modules", "core_attn"),
        ("offload_modules", {"core_attn": True}),
        ("offload_modules", [1]),
        ("activation_offload_fraction", "0.5"),
        ("min_offloaded_tensor_size", 1e6),
        ("delta_offload_bytes_across_pp_ranks", True),
    ],
    ids=str,
)
def test_a_value_of_the_wrong_type_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{name}=.* has the wrong type; set "):
        to_transformer_overrides(ON | {name: value})


@pytest.mark.parametrize(
    "options, config, message",
    [
        ({"offload_modules": ["core_atn"]}, MOE, "did you mean 'core_attn'"),
        ({"offload_modules": ["moe_act"]}, None, "the model has no experts"),
        ({"offload_modules": ["attn_proj"]}, MOE, "add 'core_attn'"),
        ({"activation_offload_fraction": 1.5}, MOE, "is outside"),
        ({}, model(cpu_offloading=True), "cpu_offloading=True is not supported .*leave it out"),
        ({}, model(cuda_graph_impl="full_iteration"), "set cuda_graph_impl="),
    ],
)
def test_the_rules_of_megatrons_options_hold(
    options: dict[str, Any], config: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        to_transformer_overrides(ON | options, config)


def test_what_the_configuration_has_counts_where_nothing_is_given() -> None:
    is_on = model(**{SWITCH: True, "offload_modules": ["core_attn"]})
    assert to_transformer_overrides({"activation_offload_fraction": 0.5}, is_on)
    with pytest.raises(ValueError, match="add 'core_attn'"):
        to_transformer_overrides({"offload_modules": ["attn_proj"]}, is_on)


# Releases.

OLDEST = frozenset({SWITCH, "offload_modules", "min_offloaded_tensor_size"})
"""Options of every release."""


@pytest.mark.parametrize("name", sorted(DEFAULTS.keys() - OLDEST))
def test_an_option_that_the_release_lacks_is_refused_or_left_out_with_a_message(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = model(known=OLDEST)
    value = {bool: True, float: 0.5, int: 3, type(None): 3}[type(DEFAULTS[name])]
    with pytest.raises(ValueError, match=rf"{name} is not supported with megatron-core.*install"):
        to_transformer_overrides(ON | {name: value}, config)
    if DEFAULTS[name] is None:
        return
    with caplog.at_level(logging.INFO):
        assert to_transformer_overrides(ON | {name: DEFAULTS[name]}, config) == ON
    assert f"{name}={DEFAULTS[name]} is left out" in caplog.text


@pytest.mark.releases
def test_the_options_and_their_defaults_are_those_of_the_release() -> None:
    config = transformer_config()
    known = {field.name for field in dataclasses.fields(config)} & DEFAULTS.keys()
    assert known >= OLDEST
    if releases.is_since("0.19"):
        assert known == DEFAULTS.keys() == get_type_hints(OffloadOptions).keys()
    assert {name: getattr(config, name) for name in known} == {n: DEFAULTS[n] for n in known}
    # Options of the installed release are accepted.
    changed = {SWITCH: True, "offload_modules": ["core_attn"], "min_offloaded_tensor_size": 7}
    apply_overrides(config, to_transformer_overrides(changed, config))
    assert {name: getattr(config, name) for name in changed} == changed


# After assignment.


@pytest.mark.releases
def test_a_configurations_own_rules_are_run_again() -> None:
    config = transformer_config()
    before = dict(vars(config))
    config.offload_modules = ["attn_proj"]
    setattr(config, SWITCH, True)
    with pytest.raises(ValueError, match="add 'core_attn'"):
        revalidate(config)
    setattr(config, SWITCH, False)
    config.offload_modules = before["offload_modules"]
    # A rule that only megatron-core has.
    with pytest.raises(ValueError, match="half must be"):
        apply_overrides(config, ON | {"recompute_granularity": "half"})
    assert vars(config) == before, "a refusal changes nothing"


def test_a_bare_assertion_becomes_an_error_for_the_user() -> None:
    config = transformer_config(
        recompute_granularity="selective", recompute_modules=["moe"], num_moe_experts=4
    )
    with pytest.raises(ValueError, match=r"Cannot offload .*moe_act"):
        apply_overrides(config, {SWITCH: True, "offload_modules": ["moe_act"]})


def test_a_provider_is_finished_not_made_again() -> None:
    """Like Megatron-Bridge's: their rules run when they are finalised."""

    @dataclasses.dataclass
    class Provider:
        fine_grained_activation_offloading: bool = False
        offload_modules: list[str] = dataclasses.field(default_factory=list)
        num_finished: int = 0

        def __post_init__(self) -> None:
            assert self.num_finished == 0

        def finalize(self) -> None:
            self.num_finished += 1

    provider = Provider()
    apply_overrides(provider, ON)
    assert provider.num_finished == 1


@pytest.mark.releases
def test_running_the_rules_again_changes_nothing_else() -> None:
    config = transformer_config(num_moe_experts=4, moe_grouped_gemm=True)
    before = {name: value for name, value in vars(config).items() if name not in ON}
    apply_overrides(config, ON)
    assert {name: value for name, value in vars(config).items() if name not in ON} == before
    assert config.offload_modules == ON["offload_modules"]
    assert config.offload_modules is not ON["offload_modules"]


def test_the_facts_of_a_class_that_is_not_made_yet() -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    assert to_transformer_overrides(ON, TransformerConfig) == ON


def test_a_field_that_the_configuration_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="is no field of TransformerConfig"):
        apply_overrides(transformer_config(), {"offload_everything": True})


# Flags.


def _parse(rank: int, world_size: int, port: int, words: list[str]) -> dict[str, Any]:
    from megatron.training.arguments import parse_args

    with mock.patch.object(sys, "argv", ["train.py", *words]):
        parsed = vars(parse_args())
    return {name: parsed[name] for name in DEFAULTS if parsed.get(name) is not None}


@pytest.mark.releases
def test_megatrons_parser_reads_the_flags_back() -> None:
    known = {field.name for field in dataclasses.fields(transformer_config())} & DEFAULTS.keys()
    config = model(known, num_moe_experts=8, cuda_graph_impl="transformer_engine")
    options: dict[str, Any] = {
        SWITCH: True,
        "offload_modules": ["core_attn", "moe_act"],
        "min_offloaded_tensor_size": 5,
        "activation_offload_fraction": 0.25,
        "delta_offload_bytes_across_pp_ranks": 6,
        "delay_offload_until_cuda_graph": True,
    }
    options = {name: value for name, value in options.items() if name in known}
    (parsed,) = run_ranks(1, _parse, to_cli(options, config))
    assert parsed == options


def test_a_switch_that_is_off_has_no_flag() -> None:
    off = ON | {"delay_offload_until_cuda_graph": False}
    assert to_cli(off) == to_cli(ON)


def test_the_options_need_neither_torch_nor_megatron_core() -> None:
    code = (
        "import sys\nfrom megatron.slipstream import to_transformer_overrides\n"
        f"to_transformer_overrides({ON!r})\n"
        "print([name for name in ('torch', 'megatron.core') if name in sys.modules])"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert output.strip() == "[]"


def test_every_module_that_can_move_can_be_named() -> None:
    for name in MODULE_NAMES:
        modules = [name] if name != "attn_proj" else ["core_attn", name]
        assert to_transformer_overrides({SWITCH: True, "offload_modules": modules}, MOE)
