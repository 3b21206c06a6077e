# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""verl's own code with the lines of its page: ``./run test-frameworks verl``."""

from __future__ import annotations

import importlib
import os
import shlex
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import framework_pages
import pytest
import torch
from framework_runs import (
    WITHOUT_KERNELS,
    Training,
    check_training,
    last_line,
    local_spec,
    save_tiny_qwen,
    skip_without,
    use_torch_optimizers,
)
from ranks import run_ranks

from megatron.slipstream import to_transformer_overrides

verl = pytest.importorskip("verl", reason="verl is not installed; see ./run test-frameworks")

pytestmark = pytest.mark.timeout(600)

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


def _batch(step: int) -> Any:
    """Four samples of 32 tokens, in two micro-batches."""
    from verl.utils import tensordict_utils

    generator = torch.Generator().manual_seed(step)

    def nested(sample: Any) -> torch.Tensor:
        samples = [sample() for _ in range(4)]
        return torch.nested.as_nested_tensor(samples, layout=torch.jagged)

    return tensordict_utils.get_tensordict(
        {
            "input_ids": nested(lambda: torch.randint(1, 128, (32,), generator=generator)),
            "loss_mask": nested(lambda: torch.ones(32, dtype=torch.int64)),
            "position_ids": nested(lambda: torch.arange(32)),
            "temperature": torch.ones(4),
        },
        non_tensor_dict={"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2},
    )


def _import_engine() -> None:
    skip_without("megatron.bridge", "transformer_engine")
    for name in ("models.mcore.bridge", "workers.engine.megatron.transformer_impl"):
        importlib.import_module(f"verl.{name}")


def _engine(folder: Path, overrides: dict[str, Any], **settings: Any) -> Any:
    """verl's Megatron engine, with layers that run without a GPU."""
    from megatron.bridge import AutoBridge
    from verl.trainer.config import CheckpointConfig
    from verl.utils.megatron_utils import unwrap_model
    from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    save_tiny_qwen(folder)
    model = HFModelConfig(path=str(folder), load_tokenizer=False, use_remove_padding=False)
    model.tokenizer = SimpleNamespace(pad_token_id=0)
    spec = {} if "vanilla_mbridge" in settings else {"transformer_layer_spec": local_spec}
    config = McoreEngineConfig(
        **settings,
        use_remove_padding=False,
        sequence_parallel=False,
        use_distributed_optimizer=False,
        override_transformer_config={
            **overrides,
            **WITHOUT_KERNELS,
            **spec,
            "attention_backend": "unfused",
        },
    )
    optimizer = McoreOptimizerConfig(total_training_steps=3, lr=1e-3)
    engine = MegatronEngineWithLMHead(model, config, optimizer, CheckpointConfig())
    # The weights on disk are those of Transformer Engine's layers.
    with patch.object(AutoBridge, "load_hf_weights", lambda *_, **__: None):
        engine.initialize()

    def without_mask(_: Any, arguments: Any, named: dict[str, Any]) -> Any:
        """All samples have one length, and the local attention reads a mask of another form."""
        return arguments, {**named, "attention_mask": None}

    unwrap_model(engine.module[0]).register_forward_pre_hook(without_mask, with_kwargs=True)
    return engine


def _train(rank: int, world_size: int, port: int, offloads: bool) -> Any:
    """Steps of verl's engine, with the overrides of the page if it offloads."""
    from tiny_gpt import ModelCase, initialize
    from verl.workers.utils.losses import sft_loss

    initialize(ModelCase("dense"), rank, world_size, port)
    use_torch_optimizers()
    training = Training()
    overrides = {}
    if offloads:
        variables = framework_pages.variables("verl", "export VERL_USE_EXTERNAL_MODULES")
        importlib.import_module(variables["VERL_USE_EXTERNAL_MODULES"])
        overrides = _engine_config(_compose(*ON).actor_rollout_ref.actor)
        overrides["min_offloaded_tensor_size"] = 1
    with (
        tempfile.TemporaryDirectory() as folder,
        patch("torch.cuda.mem_get_info", lambda *_: (0, 0)),
    ):
        engine = _engine(Path(folder), overrides)
        for step in range(3):
            with engine.train_mode():
                output = engine.train_batch(_batch(step), partial(sft_loss, None))
            training.steps.append((output["loss"], output["metrics"]["grad_norm"]))
    return training.finish(engine.module[0] if offloads else None)


def test_its_engine_trains_the_same_and_logs_what_the_page_shows() -> None:
    _import_engine()
    check_training("verl", _train)


REFUSED = (
    ({"offload_module": ["core_attn"]}, {}, "has no attribute 'offload_module'"),
    ({}, {"vanilla_mbridge": True}, "no attribute 'encoder_and_decoder'"),
)
"""Overrides, settings of the engine, and the error."""


def _refuse(rank: int, world_size: int, port: int) -> int:
    from tiny_gpt import ModelCase, initialize

    initialize(ModelCase("dense"), rank, world_size, port)
    for overrides, settings, error in REFUSED:
        with (
            tempfile.TemporaryDirectory() as folder,
            pytest.raises(AttributeError, match=error),
        ):
            _engine(Path(folder), overrides, **settings)
    return len(REFUSED)


def test_misspelt_keys_and_the_old_mbridge_are_errors() -> None:
    _import_engine()
    assert run_ranks(1, _refuse) == [len(REFUSED)]
