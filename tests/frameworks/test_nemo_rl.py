# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""NeMo-RL's own code with the lines of its page, if NeMo-RL is installed (not from PyPI)."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Optional

import framework_pages
import pytest
import yaml
from ranks import run_ranks
from tiny_gpt import ModelCase, build_chunks, initialize, make_config, run_step

from megatron.slipstream import to_transformer_overrides
from megatron.slipstream.options import preflight

if not preflight.is_installed("nemo_rl.models.megatron.setup"):
    pytest.skip("nemo_rl is not installed", allow_module_level=True)

pytestmark = pytest.mark.timeout(300)

(PAGE,) = framework_pages.blocks("nemo-rl", "yaml")
MEGATRON = yaml.safe_load(PAGE)["policy"]["megatron_cfg"]
SWITCH = "fine_grained_activation_offloading"
OWN = (SWITCH, "offload_modules")

REQUIRED = {
    "activation_checkpointing": False,
    "apply_rope_fusion": False,
    "bias_activation_fusion": False,
    "gradient_accumulation_fusion": False,
    "use_fused_weighted_squared_relu": False,
}
"""Settings that NeMo-RL's recipes always have."""


def _setup() -> Any:
    return importlib.import_module("nemo_rl.models.megatron.setup")


def _apply(config: dict[str, Any], **model: Any) -> dict[str, Any]:
    """NeMo-RL's changes to a configuration that already offloads."""
    target = SimpleNamespace(
        gated_linear_unit=True, num_moe_experts=None, **{SWITCH: True, "offload_modules": ["x"]}
    )
    vars(target).update(model)
    _setup()._apply_performance_config(target, {"megatron_cfg": {**REQUIRED, **config}})
    return {name: getattr(target, name) for name in OWN}


@pytest.mark.parametrize(
    "options",
    [
        {name: MEGATRON[name] for name in OWN},
        {},
        {SWITCH: False},
        {SWITCH: False, "offload_modules": None},
        {SWITCH: False, "offload_modules": ["core_attn"]},
        {"offload_modules": None},
    ],
    ids=str,
)
def test_our_three_values_are_nemo_rls(options: dict[str, Any]) -> None:
    before = {SWITCH: True, "offload_modules": ["x"]}
    assert _apply(options) == before | to_transformer_overrides(options)


@pytest.mark.parametrize(
    "options", [{SWITCH: True}, {SWITCH: True, "offload_modules": ["moe_act"]}], ids=str
)
def test_what_nemo_rl_refuses_so_do_we(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="offload"):
        _apply(options)
    with pytest.raises(ValueError, match="offload"):
        to_transformer_overrides(options)


@dataclass
class Provider:
    """The fields of a provider that matter here."""

    min_offloaded_tensor_size: int = 1024 * 1024
    activation_offload_fraction: float = 1.0
    fine_grained_activation_offloading: bool = False
    offload_modules: Optional[list[str]] = field(default_factory=list)


def test_the_other_options_go_where_the_page_has_them() -> None:
    setup = _setup()
    overrides = MEGATRON["model_overrides"]
    setup._validate_model_override_conflicts(MEGATRON, overrides)
    merged = setup._merge_model_overrides(Provider(), overrides)
    assert {name: getattr(merged, name) for name in overrides} == overrides
    assert overrides == to_transformer_overrides(overrides, merged)
    with pytest.raises(ValueError, match="conflicts with"):
        setup._validate_model_override_conflicts(MEGATRON, {"offload_modules": ["core_attn"]})
    with pytest.raises(AttributeError, match="min_offloaded_tensor_sise"):
        setup._merge_model_overrides(Provider(), {"min_offloaded_tensor_sise": 1})


def test_the_switch_of_transformer_engine_is_a_string_as_ray_wants_it() -> None:
    assert MEGATRON["env_vars"][preflight.TE_SWITCH] == "1"


def _guarded(rank: int, world_size: int, port: int) -> list[Any]:
    """Log-probabilities with NeMo-RL's guard between training steps. Returns the figures."""
    from megatron.slipstream import OffloadConfig, install
    from megatron.slipstream.integration.install import installed

    train_module = importlib.import_module("nemo_rl.models.megatron.train")
    case = ModelCase("dense")
    initialize(case)
    manager = install(OffloadConfig(offload_backend="cpu-lazy"))
    config = make_config(case, ("core_attn", "attn_proj"))
    chunks = build_chunks(case, config)
    for step in range(3):
        run_step(case, config, chunks, step, 2)
        with train_module.suspend_activation_offload_for_forward_only(chunks, True):
            assert not manager.do_offload
            assert not config.fine_grained_activation_offloading
            run_step(case, config, chunks, step, 2, forward_only=True)  # with gradients, even
        assert manager.do_offload
    engine = installed()
    assert engine is manager
    report = manager.report
    return [report.num_iterations, report.num_plans, report.total.num_late, report.d2h_bytes > 0]


def test_nemo_rls_guard_leaves_the_plan_alone() -> None:
    assert run_ranks(1, _guarded) == [[3, 1, 0, True]]
