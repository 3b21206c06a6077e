# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Names of Slipstream's own modules on every way to a model, and the hooks that mark them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from model_case import MLP_MODULES, OWN_MODULES
from ranks import run_ranks
from tiny_gpt import ModelCase, build_chunks, initialize, make_config, run_step

from megatron.slipstream.integration import install
from megatron.slipstream.integration.cpu import cpu_only
from megatron.slipstream.integration.entry import arguments, checks
from megatron.slipstream.integration.frameworks.options import apply_overrides
from megatron.slipstream.integration.seam import module_groups
from megatron.slipstream.options.fields import OffloadConfig
from megatron.slipstream.patches import table
from megatron.slipstream.patches.table import Feature

MODULES = ("core_attn", *OWN_MODULES["dense"])
CASE = ModelCase("dense", num_layers=2)
FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 "
    "--max-position-embeddings 32 --vocab-size 128 --tokenizer-type NullTokenizer --lr 1e-3 "
    "--train-iters 2 --eval-interval 1 --mock-data --fine-grained-activation-offloading "
    "--offload-modules"
).split()


@pytest.fixture(autouse=True)
def _uninstalled() -> Iterator[None]:
    yield
    install.uninstall()


def test_a_configuration_names_them_once_the_engine_is_installed() -> None:
    with pytest.raises(AssertionError, match="mlp_fc1"):
        make_config(CASE, MODULES)
    install.install(OffloadConfig(offload_backend="cpu"))
    assert make_config(CASE, MODULES).offload_modules == [*MODULES]
    assert make_config(CASE, MLP_MODULES).offload_modules == [*MLP_MODULES]
    install.uninstall()
    with pytest.raises(AssertionError, match="mlp_fc1"):
        make_config(CASE, MODULES)


def test_a_configuration_names_them_before_the_engine_is_installed_at_the_first_call() -> None:
    install.install_at_first_call(OffloadConfig(offload_backend="cpu"))
    assert make_config(ModelCase("mla"), ["mla_up_proj"]).offload_modules == ["mla_up_proj"]


def test_a_configuration_refuses_what_cannot_move() -> None:
    install.install(OffloadConfig(offload_backend="cpu"))
    with pytest.raises(ValueError, match="without multi_latent_attention because .*; remove mla"):
        make_config(CASE, ["mla_up_proj"])
    recomputing = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
    with pytest.raises(ValueError, match="'mlp' in recompute_modules"):
        make_config(ModelCase("dense", overrides=recomputing), ["core_attn", "mlp_act"])
    with pytest.raises(AssertionError, match="Invalid choices.*mlp_fc3"):
        make_config(CASE, ["mlp_fc1", "mlp_fc3"])
    with pytest.raises(ValueError, match="attn_proj cannot be set"):  # megatron-core's own rule
        make_config(CASE, ["mlp_fc1", "attn_proj"])


def test_overrides_of_a_framework_name_them() -> None:
    config = make_config(CASE)
    overrides = {"fine_grained_activation_offloading": True, "offload_modules": [*MODULES]}
    apply_overrides(config, overrides)
    assert config.offload_modules == [*MODULES]
    table.undo(Feature.MODULE_NAMES)


def test_flags_name_them() -> None:
    cpu_only.install_training_shims()
    args = arguments.parse([*FLAGS, *MODULES], arguments.defaults_of_machine([]))
    assert args.offload_modules == [*MODULES]
    checked = checks.check_flags([*FLAGS, *MODULES])
    assert [item.text for item in checked.findings if item.severity == "error"] == []


def errors(*flags: str) -> list[str]:
    found = checks.check_flags([*FLAGS, *flags]).findings
    return [item.text for item in found if item.severity == "error"]


def test_flags_are_refused_for_another_engine_and_model() -> None:
    found = errors("core_attn", "mlp_fc1", "--offload-engine", "megatron")
    assert any("offload_engine='megatron' because that engine moves only" in text for text in found)
    (found_one,) = errors("core_attn", "shared_experts")
    assert "without moe_shared_expert_intermediate_size" in found_one
    (found_one,) = errors("mlp_fc3")
    assert all(name in found_one for name in ("did you mean 'mlp_fc", *MODULES))


def hooks_of(chunk: torch.nn.Module) -> int:
    return sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) for module in chunk.modules()
    )


def _live(rank: int, world_size: int, port: int) -> dict[str, Any]:
    """What remains of the marks after a failed forward, and after the end of the engine."""
    initialize(CASE)
    manager = install.install(OffloadConfig(offload_backend="cpu"))
    config = make_config(CASE, MODULES)
    chunks = build_chunks(CASE, config)
    plain = hooks_of(chunks[0])

    def run() -> list[torch.Tensor]:
        return run_step(CASE, config, chunks, 0, 1)

    found: dict[str, Any] = {"losses": [run()[0].item()]}
    found["functions of a second engine"] = module_groups.mark_modules(chunks[0])
    fails = chunks[0].decoder.layers[1].mlp
    activation = fails.config.activation_func

    def fail(_: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    fails.config.activation_func = fail
    with pytest.raises(KeyboardInterrupt):
        run()
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    found["hooks after a failure"] = hooks is not None
    found["regions after a failure"] = len(manager.engine.regions.entered)
    fails.config.activation_func = activation
    found["losses"] += [run()[0].item(), run()[0].item()]
    found["groups"] = {name: item.num_groups for name, item in manager.report.modules.items()}
    install.uninstall()
    found["hooks left"] = hooks_of(chunks[0]) - plain
    return found


def test_marks_survive_a_failure_and_end_with_the_engine() -> None:
    (found,) = run_ranks(1, _live)
    assert len(set(found.pop("losses"))) == 1
    assert found.pop("groups") == {
        **dict.fromkeys(("core_attn", *MLP_MODULES, "output_layer"), 2),
        "embedding": 1,
    }
    assert found == {
        "functions of a second engine": [],
        "hooks after a failure": False,
        "regions after a failure": 0,
        "hooks left": 0,
    }


HYBRID = "--num-experts 4 --cuda-graph-impl transformer_engine --te-rng-tracker".split()


@pytest.mark.parametrize("pattern, expected", [("*-*E", 2), ("*E*E", 1)])
def test_graphs_of_the_mlps_of_a_pattern_need_no_other_flag(pattern: str, expected: int) -> None:
    """megatron-core asks ``moe_layer_freq``, though hybrid layers follow the pattern alone."""
    cpu_only.install_training_shims()
    flags = [*HYBRID, "--hybrid-layer-pattern", pattern, "--cuda-graph-modules", "attn"]
    assert arguments.parse(flags, arguments.defaults_of_machine([])).moe_layer_freq == 1
    args = arguments.parse([*flags, "mlp"], arguments.defaults_of_machine([]))
    assert args.moe_layer_freq == expected
