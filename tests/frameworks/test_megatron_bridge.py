# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Megatron-Bridge's own code with its page's lines: ``./run test-frameworks megatron-bridge``."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass
from functools import partial
from types import ModuleType
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
    skip_without,
    use_torch_optimizers,
)
from ranks import run_ranks
from tiny_gpt import ModelCase, first_difference, initialize, train

from megatron.slipstream.options import preflight

skip_without("megatron.bridge", "transformer_engine")
# Once, for all the processes that are forked from this one.
importlib.import_module("megatron.bridge.models.gpt_provider")
importlib.import_module("megatron.bridge.training.config")

pytestmark = pytest.mark.timeout(600)

CASE = ModelCase("dense")
FIELDS, CHECKED = framework_pages.blocks("megatron-bridge", "python", "provider")


def _provider() -> Any:
    """A GPT model of megatron-core's local layers, which run without a GPU."""
    from megatron.bridge.models.gpt_provider import GPTModelProvider

    return GPTModelProvider(
        num_layers=CASE.num_layers,
        hidden_size=CASE.hidden_size,
        num_attention_heads=CASE.num_attention_heads,
        num_query_groups=2,
        ffn_hidden_size=192,
        vocab_size=CASE.vocab_size,
        seq_length=CASE.seq_length,
        position_embedding_type="rope",
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        min_offloaded_tensor_size=1,
        transformer_layer_spec=local_spec,
        **WITHOUT_KERNELS,
    )


def _model(provider: Any) -> Any:
    torch.manual_seed(0)
    provider.params_dtype = torch.float32
    provider.finalize()
    (model,) = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)
    return model


def _run_page(block: str) -> Any:
    provider = _provider()
    exec(block, {"provider": provider})
    return provider


def _train(rank: int, world_size: int, port: int) -> list[int]:
    """Trains a model without and two with the page's lines. Returns the bytes that the two move."""
    from megatron.slipstream import OffloadConfig, install, report
    from megatron.slipstream.integration.install import installed

    initialize(CASE)
    plain = _model(_provider())
    expected = train(CASE, plain.config, [plain], [2, 2, 2])
    assert installed() is None
    install(OffloadConfig(offload_backend="cpu-lazy"))
    moved = []
    for _ in range(2):
        model = _model(_run_page(FIELDS))
        actual = train(CASE, model.config, [model], [2, 2, 2])
        assert first_difference(expected, actual) is None
        (figures,) = report(model).ranks
        assert figures.num_iterations == 3
        moved.append((model, figures.d2h_bytes))
    engine = installed()
    assert len(engine.router.managers) == 2
    return [num_bytes for _, num_bytes in moved]


def test_models_of_providers_with_the_hook_have_an_engine_each() -> None:
    ((first, second),) = run_ranks(1, _train)
    assert first == second > 0


def _checked(rank: int, world_size: int, port: int) -> tuple[dict[str, Any], dict[str, Any]]:
    from megatron.slipstream import apply_overrides

    initialize(CASE)
    names = ("fine_grained_activation_offloading", "offload_modules")
    by_field, checked = _run_page(FIELDS), _run_page(CHECKED)
    by_field.finalize()
    with pytest.raises(AttributeError, match="offload_module'"):
        _provider().apply_overrides_and_finalize(overrides={"offload_module": []})
    # A value that assignment does not check.
    with pytest.raises(ValueError, match="add 'core_attn'"):
        apply_overrides(checked, {"offload_modules": ["attn_proj"]})
    return tuple(
        {name: getattr(provider, name) for name in names} for provider in (by_field, checked)
    )


def test_fields_and_checked_overrides_come_to_the_same() -> None:
    ((by_field, checked),) = run_ranks(1, _checked)
    assert by_field == checked
    assert checked["offload_modules"] == ["core_attn", "attn_proj"]


@dataclass
class Container:
    """The part of a recipe that the page's command line sets."""

    model: Any


def _overridden(rank: int, world_size: int, port: int) -> list[str]:
    initialize(CASE)
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

    # The words are in the text, not in a block.
    text = (framework_pages.FOLDER / "megatron-bridge.md").read_text()
    (line,) = [part for part in text.split("`") if part.startswith("model.fine_grained")]
    container = process_config_with_overrides(Container(_provider()), cli_overrides=line.split())
    assert container.model.fine_grained_activation_offloading is True
    return list(container.model.offload_modules)


def test_a_recipes_command_line_sets_the_fields() -> None:
    assert run_ranks(1, _overridden) == [["core_attn", "attn_proj"]]


SWITCH_SET_LATE = f"""
import os, types
import transformer_engine.pytorch
from megatron.bridge.training.config import _validate_fine_grained_activation_offloading
from megatron.slipstream.options import preflight
os.environ[{preflight.TE_SWITCH!r}] = "1"
model = types.SimpleNamespace(
    fine_grained_activation_offloading=True, transformer_impl="transformer_engine"
)
_validate_fine_grained_activation_offloading(types.SimpleNamespace(model=model))
(finding,) = preflight.check_process(preflight.collect(), offloading=True)
print(finding.text)
"""


def test_only_our_check_sees_that_the_switch_was_set_too_late() -> None:
    environment = {name: v for name, v in os.environ.items() if name != preflight.TE_SWITCH}
    finding = last_line(SWITCH_SET_LATE, environment=environment)
    assert "it was set after Transformer Engine was imported" in finding


def _serialised(rank: int, world_size: int, port: int) -> str:
    initialize(CASE)
    from megatron.bridge.training.utils.config_utils import _ConfigContainerBase

    return str(_ConfigContainerBase._convert_value_to_dict(_run_page(FIELDS)))


def test_a_hook_leaves_no_trace_in_what_is_written_into_checkpoints() -> None:
    (written,) = run_ranks(1, _serialised)
    assert "fine_grained_activation_offloading" in written
    assert "slipstream" not in written


def _import_pretrain() -> None:
    """Import ``pretrain``, with a stand-in for a type that it names.

    The registry's nvidia-resiliency-ext is too old for megatron-core.
    """
    names = ("nvidia_resiliency_ext", "nvidia_resiliency_ext.inprocess")
    package, inprocess = map(ModuleType, names)
    inprocess.CallWrapper = type("CallWrapper", (), {})  # type: ignore[attr-defined]
    sys.modules.update(zip(names, (package, inprocess), strict=True))
    importlib.import_module("megatron.bridge.training.pretrain")
    importlib.import_module("megatron.bridge.training.gpt_step")
    for name in names:
        del sys.modules[name]


def _recipe(provider: Any) -> Any:
    """A configuration of three steps on mock data."""
    from megatron.bridge.training import config

    return config.ConfigContainer(
        model=provider,
        train=config.TrainingConfig(train_iters=3, global_batch_size=2, micro_batch_size=1),
        validation=config.ValidationConfig(eval_iters=0),
        optimizer=config.OptimizerConfig(optimizer="adam", lr=1e-3, min_lr=1e-4),
        scheduler=config.SchedulerConfig(
            start_weight_decay=0.01,
            end_weight_decay=0.01,
            weight_decay_incr_style="constant",
            lr_decay_style="constant",
            lr_decay_iters=3,
            lr_warmup_iters=0,
        ),
        ddp=config.DistributedDataParallelConfig(),
        dataset=config.MockGPTDatasetConfig(
            random_seed=1,
            seq_length=CASE.seq_length,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            dataloader_type="single",
            num_workers=0,
        ),
        logger=config.LoggerConfig(log_interval=1, tensorboard_dir=None),
        tokenizer=config.TokenizerConfig(
            tokenizer_type="NullTokenizer", vocab_size=CASE.vocab_size - 1
        ),
        checkpoint=config.CheckpointConfig(save=None),
        dist=config.DistributedInitConfig(distributed_backend="gloo"),
    )


def _pretrain(rank: int, world_size: int, port: int, offloads: bool) -> Any:
    """``pretrain()``, with the page's lines if it offloads."""
    from megatron.bridge.training import initialize as initializing, setup
    from megatron.bridge.training.callbacks import Callback
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    from megatron.slipstream.integration.cpu.cpu_only import install_training_shims

    install_training_shims()
    use_torch_optimizers()
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    training = Training()

    class Steps(Callback):
        def on_train_step_end(self, context: Any) -> None:
            losses = {name: float(loss) for name, loss in context.loss_dict.items()}
            training.steps.append((losses, float(context.grad_norm)))
            self.model = context.model[0]

    steps = Steps()
    on_cpu = partial(setup.initialize_megatron, allow_no_cuda=True)
    with (
        patch("torch.cuda.device_count", lambda: 1),
        patch.object(setup, "initialize_megatron", on_cpu),
        patch.object(setup, "set_jit_fusion_options", lambda *_: None),
        patch.object(initializing, "compile_helpers", lambda: None),
    ):
        provider = _run_page(FIELDS) if offloads else _provider()
        pretrain(_recipe(provider), forward_step, callbacks=[steps])
    return training.finish(steps.model if offloads else None)


def test_pretrain_is_the_same_and_logs_what_the_page_shows() -> None:
    skip_without("modelopt")
    _import_pretrain()
    check_training("megatron-bridge", _pretrain)
