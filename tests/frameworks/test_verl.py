# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""verl's own code with the lines of its page: ``./run test-frameworks verl``."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import framework_pages
import pytest
from framework_runs import last_line, skip_without
from ranks import run_ranks

from megatron.slipstream import to_transformer_overrides

verl = pytest.importorskip("verl", reason="verl is not installed; see ./run test-frameworks")

pytestmark = pytest.mark.timeout(300)

OVERRIDES = {
    "fine_grained_activation_offloading": True,
    "offload_modules": ["core_attn", "attn_proj"],
    "min_offloaded_tensor_size": 1048576,
}


def _compose(*overrides: str) -> Any:
    """verl's configuration with the changes of a command line of the page."""
    from hydra import compose, initialize_config_dir

    folder = Path(verl.__file__).parent / "trainer" / "config"
    with initialize_config_dir(str(folder), version_base=None):
        return compose("ppo_megatron_trainer", overrides=list(overrides))


def _overrides_on_page(containing: str) -> list[str]:
    """The words of a command of the page that Hydra reads."""
    command = framework_pages.words("verl", containing)
    script = ["python3", "-m", "verl.trainer.main_ppo", "--config-name=ppo_megatron_trainer"]
    assert command[:4] == script
    return command[4:]


ON = _overrides_on_page("actor.megatron")


def _engine_config(section: Any) -> dict[str, Any]:
    """A model's overrides as verl's engine gets them."""
    from verl.utils.config import omega_conf_to_dataclass

    config: Any = omega_conf_to_dataclass(section.megatron)
    assert type(config).__name__ == "McoreEngineConfig"
    return {**config.override_transformer_config}


def test_the_lines_reach_the_engine_as_our_options_would() -> None:
    actor = _engine_config(_compose(*ON).actor_rollout_ref.actor)
    given = {name: actor[name] for name in OVERRIDES}
    assert given == OVERRIDES == to_transformer_overrides(given)


def test_the_critic_has_options_of_its_own() -> None:
    cfg = _compose(*ON, *(line.replace("actor_rollout_ref.actor", "critic") for line in ON))
    assert cfg.critic.megatron.override_transformer_config.fine_grained_activation_offloading
    cfg = _compose(*ON)
    assert "offload_modules" not in cfg.critic.megatron.override_transformer_config


def test_the_reference_inherits_and_can_only_be_given_all_again() -> None:
    from hydra.errors import ConfigCompositionException

    reference = _engine_config(_compose(*ON).actor_rollout_ref.ref)
    assert {name: reference[name] for name in OVERRIDES} == OVERRIDES
    key = "actor_rollout_ref.ref.megatron.override_transformer_config"
    for sign in ("", "+"):
        with pytest.raises(ConfigCompositionException):
            _compose(*ON, f"{sign}{key}.fine_grained_activation_offloading=False")
    (replaced,) = [line for line in _overrides_in_list() if line.startswith(key)]
    cfg = _compose(*ON, replaced)
    assert _engine_config(cfg.actor_rollout_ref.ref) == {"attention_backend": "flash"}
    assert _engine_config(cfg.actor_rollout_ref.actor)["offload_modules"] == [
        "core_attn",
        "attn_proj",
    ]


def _overrides_in_list() -> list[str]:
    """The words of an indented command in a list of the page."""
    text = (framework_pages.FOLDER / "verl.md").read_text()
    block = text.split("  ```bash\n")[1].split("  ```")[0]
    return shlex.split(block.replace("\\\n", " "))


def test_rays_workers_get_the_variables_of_the_page() -> None:
    from omegaconf import OmegaConf
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

    cfg = _compose(*_overrides_on_page("runtime_env"))
    # As main_ppo merges the two.
    merged = OmegaConf.merge(get_ppo_ray_runtime_env(cfg), cfg.ray_kwargs.ray_init.runtime_env)
    variables = framework_pages.variables("verl", "export VERL_USE_EXTERNAL_MODULES")
    for name in ("NVTE_CPU_OFFLOAD_V1", "VERL_USE_EXTERNAL_MODULES"):
        assert merged.env_vars[name] == variables[name]


def test_importing_verl_gets_ready_and_installs_nothing() -> None:
    code = (
        "import verl\n"
        "from megatron.slipstream.integration import install\n"
        "from megatron.slipstream.patches import model_calls\n"
        "print(model_calls.before_first_call is not None, install.installed())"
    )
    variables = framework_pages.variables("verl", "export VERL_USE_EXTERNAL_MODULES")
    results = [
        last_line(code, environment=os.environ | more)
        for more in ({name: value for name, value in variables.items() if "CONFIG" not in name}, {})
    ]
    assert results == ["True None", "False None"]


def _mbridge(rank: int, world_size: int, port: int, overrides: dict[str, Any]) -> dict[str, Any]:
    from tiny_gpt import ModelCase, initialize

    initialize(ModelCase("dense"))
    from mbridge import AutoBridge
    from transformers import Qwen2Config

    hf_config = Qwen2Config(
        num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2
    )
    bridge = AutoBridge.from_config(hf_config)
    bridge.set_extra_args(**overrides)
    with pytest.raises(TypeError, match="offload_module'"):
        bridge.set_extra_args(offload_module=["core_attn"])
    return {name: getattr(bridge.config, name) for name in overrides}


def test_mbridge_makes_a_configuration_that_has_them() -> None:
    skip_without("mbridge", "transformer_engine")
    assert run_ranks(1, _mbridge, OVERRIDES) == [OVERRIDES]
