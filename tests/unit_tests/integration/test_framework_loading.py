# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The hooks through which frameworks load code: each installs the engine, and no more."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import run_ranks
from tiny_gpt import ModelCase, initialize, make_config, train as train_chunks

from megatron.slipstream.integration import install
from megatron.slipstream.integration.frameworks import loading, slime
from megatron.slipstream.integration.seam import compat
from megatron.slipstream.options import config_file, preflight
from megatron.slipstream.options.fields import OffloadConfig
from megatron.slipstream.patches import model_calls, releases

FRAMEWORKS = "megatron.slipstream.integration.frameworks"
CASE = ModelCase("dense", num_layers=3)
MODULES = ("core_attn", "attn_proj")


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def write(text: str) -> None:
        path = tmp_path / "slipstream.yaml"
        path.write_text(text)
        monkeypatch.setenv(config_file.VARIABLE, str(path))

    return write


def _is_ready() -> bool:
    return install.installed() is None and model_calls.before_first_call is not None


def test_loading_installs_nothing_yet() -> None:
    loading.load()
    assert _is_ready()
    install.uninstall()
    assert not _is_ready()


def test_loading_twice_or_beside_an_engine_changes_nothing(settings: Any) -> None:
    loading.load()
    loading.load()
    assert _is_ready()
    manager = install.install(OffloadConfig(offload_backend="cpu"))
    loading.load()
    assert install.installed() is manager
    assert model_calls.before_first_call is None


def test_a_file_that_cannot_be_used_is_refused_when_loading(settings: Any) -> None:
    settings("offload_speed: 11")
    with pytest.raises(ValueError, match="'offload_speed' is not a setting"):
        loading.load()
    assert not _is_ready()


def test_the_engine_of_megatron_core_stays_if_the_file_says_so(
    settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings("offload_engine: megatron")
    loading.logger.parent.propagate = True
    with caplog.at_level(logging.INFO):
        loading.load()
    assert not _is_ready()


def test_flags_that_were_added_to_megatrons_parser_are_the_settings() -> None:
    config = OffloadConfig(offload_prefetch_depth=3)
    args = SimpleNamespace(**vars(config), num_layers=2)
    assert loading.config_from_arguments(args) == config
    del args.offload_verify
    assert loading.config_from_arguments(args) is None


def test_a_switch_that_was_set_too_late_ends_the_first_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Transformer Engine reads it once, at import; later changes do not matter."""
    monkeypatch.setenv(preflight.TE_SWITCH, "1")
    facts = preflight.collect()
    late = SimpleNamespace(**vars(facts) | {"te_offload_v1": False, "te_import_error": None})
    late.te_offload_v1_environment = "1"
    monkeypatch.setattr(preflight, "collect", lambda: late)
    loading.load()
    assert model_calls.before_first_call is not None
    with pytest.raises(ValueError, match="it was set after Transformer Engine was imported"):
        model_calls.before_first_call()
    assert install.installed() is None


# By import.


def test_importing_gets_ready() -> None:
    sys.modules.pop(f"{FRAMEWORKS}.on_import", None)
    importlib.import_module(f"{FRAMEWORKS}.on_import")
    assert _is_ready()


def test_a_process_without_megatron_core_is_told_and_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A driver or a sampler may have no Transformer Engine that works, and needs none."""
    importlib.import_module(f"{FRAMEWORKS}.on_import")
    install.uninstall()
    # Its messages then go to stderr only.
    logging.getLogger("megatron.slipstream").addHandler(caplog.handler)
    monkeypatch.setitem(sys.modules, f"{FRAMEWORKS}.loading", None)
    on_import = importlib.reload(sys.modules[f"{FRAMEWORKS}.on_import"])
    assert "megatron-core does not import in this process (ModuleNotFound" in caplog.text
    assert on_import is not None
    assert not _is_ready()


# slime.


def test_slime_is_told_when_its_flags_leave_nothing_to_move(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("megatron.slipstream"), "propagate", True)
    monkeypatch.setattr(loading, "log_to_stderr", lambda: None)
    slime.init(SimpleNamespace(fine_grained_activation_offloading=False))
    (message,) = caplog.messages
    assert "slime silently drops unknown flags" in message
    assert _is_ready()
    caplog.clear()
    with caplog.at_level(logging.INFO):
        slime.init(
            SimpleNamespace(fine_grained_activation_offloading=True, offload_modules=["core_attn"])
        )
    assert caplog.messages[-1].endswith("offload_modules=['core_attn']")


def _parse_as_slime(rank: int, world_size: int, port: int, words: list[str]) -> list[Any]:
    from megatron.training.arguments import parse_args

    with mock.patch.object(sys, "argv", ["train.py", *words]):
        args = parse_args(None, ignore_unknown_args=True)
    return [args.fine_grained_activation_offloading, args.offload_modules]


@pytest.mark.releases
def test_a_flag_with_a_slip_vanishes_in_a_parser_that_ignores_unknown_ones() -> None:
    """The reason for the warning above: this is how slime calls megatron's parser."""
    right = ["--fine-grained-activation-offloading", "--offload-modules", "core_attn"]
    assert run_ranks(1, _parse_as_slime, right) == [[True, ["core_attn"]]]
    wrong = ["--fine-grained-activation-ofloading", "--offload-modules", "core_attn"]
    assert run_ranks(1, _parse_as_slime, wrong) == [[False, ["core_attn"]]]


# --spec.

GPT = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 127 --num-layers 3 --hidden-size 64
    --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 2
    --global-batch-size 2 --lr 1e-3 --train-iters 1 --eval-iters 0 --eval-interval 1
    --position-embedding-type rope --untie-embeddings-and-output-weights
    --min-offloaded-tensor-size 1
    --fine-grained-activation-offloading --offload-modules core_attn attn_proj
""".split()
SPEC = ["--spec", f"{FRAMEWORKS}.spec", "layer_spec"]
MOE = ["--num-experts", "4", "--moe-grouped-gemm"]


def _model(how: str, args: Any, spec: Any) -> torch.nn.Module:
    """A GPT model from a spec that was read from ``--spec``, in one of three ways."""
    from megatron.core.models.gpt import GPTModel
    from megatron.training.arguments import core_transformer_config_from_args

    config = core_transformer_config_from_args(args)
    if how == "called with arguments":
        spec = spec(args, config, None)
    elif how == "called with a model configuration":
        model_config = compat.gpt_config(args)
        model_config.transformer = config
        spec = spec(model_config, vp_stage=None)
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=128,
        max_sequence_length=32,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )
    model.model_type = 1
    return model


def _train_with_spec(
    rank: int, world_size: int, port: int, how: str, more: list[str]
) -> list[dict[str, Any]]:
    """With megatron's own spec and with ours: the layers of the model, and the bytes that move."""
    from megatron.slipstream.integration.entry.checks import parse_and_validate

    args = parse_and_validate(GPT + more)
    initialize(CASE)
    results = []
    for spec in (lambda args, config, stage: compat.gpt_block_spec(args, config, stage), None):
        if spec is None:
            from megatron.slipstream.integration.frameworks.spec import layer_spec

            model = _model(how, args, layer_spec)
            assert install.installed() is None
        else:
            args.fine_grained_activation_offloading = False
            model = _model("called with arguments", args, spec)
            args.fine_grained_activation_offloading = True
        torch.manual_seed(0)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        tensors = train_chunks(CASE, model.config, [model], [2, 2])
        manager = install.installed()
        results.append(
            {
                "layers": str(model),
                "tensors": [tensor.tolist() for step in tensors for tensor in step],
                "moved": 0 if manager is None else manager.report.d2h_bytes,
            }
        )
    return results


@pytest.mark.parametrize(
    "how, more",
    [
        pytest.param(
            "called with arguments", MOE, id="called with arguments", marks=pytest.mark.releases
        ),
        pytest.param("called with a model configuration", [], id="called with a configuration"),
        pytest.param("not called", [], id="not called, dense", marks=pytest.mark.releases),
        pytest.param("not called", MOE, id="not called, experts"),
    ],
)
def test_a_spec_makes_the_same_model_whoever_reads_it(how: str, more: list[str]) -> None:
    if how == "called with a model configuration" and not releases.is_since("0.19"):
        pytest.skip(f"{releases.release()} has no builder that calls a spec so")
    ((expected, actual),) = run_ranks(1, _train_with_spec, how, more)
    assert actual["layers"] == expected["layers"]
    assert actual["tensors"] == expected["tensors"]
    assert expected["moved"] == 0
    assert actual["moved"] > 0


def _build_by_flag(rank: int, world_size: int, port: int) -> tuple[bool, str, str]:
    """Handles the flag like ``megatron.training`` 0.19."""
    from megatron.core import parallel_state

    from megatron.slipstream.integration.entry.checks import parse_and_validate

    args = parse_and_validate(GPT + SPEC)
    initialize(CASE)
    from megatron.training.argument_utils import gpt_config_from_args

    built = []
    for spec in (args.spec, None):
        args.spec = spec
        config = gpt_config_from_args(args)
        builder = config.get_builder_cls()(config)
        from megatron.core.process_groups_config import ProcessGroupCollection

        groups = ProcessGroupCollection.use_mpu_process_groups()
        built.append(str(builder.build_model(groups, True, True, None)))
    assert parallel_state.is_initialized()
    return model_calls.before_first_call is not None, *built


def test_megatrons_own_builder_takes_the_flag() -> None:
    if not releases.is_since("0.19"):
        pytest.skip(f"{releases.release()} has no builder that reads --spec")
    ((is_ready, with_flag, without),) = run_ranks(1, _build_by_flag)
    assert is_ready
    assert with_flag == without


def _graphed(rank: int, world_size: int, port: int) -> list[bool]:
    """Whether the spec has our layers: without graphs, with them, and without offloading."""
    from megatron.training.arguments import core_transformer_config_from_args

    from megatron.slipstream.integration.entry.checks import parse_and_validate
    from megatron.slipstream.integration.frameworks.spec import layer_spec

    args = parse_and_validate(GPT)
    initialize(CASE)
    config = core_transformer_config_from_args(args)
    found = ["GraphOffload" in str(layer_spec(args, config, None))]
    config.cuda_graph_impl = "transformer_engine"
    found.append("GraphOffload" in str(layer_spec(args, config, None)))
    config.fine_grained_activation_offloading = False
    return [*found, "GraphOffload" in str(layer_spec(args, config, None))]


def test_the_spec_has_layers_that_offload_in_graphs_where_both_are_on() -> None:
    assert run_ranks(1, _graphed) == [[False, True, False]]


def _uncalled_with_stages(rank: int, world_size: int, port: int) -> str:
    from megatron.training import global_vars

    from megatron.slipstream.integration.frameworks.spec import layer_spec

    global_vars._GLOBAL_ARGS = SimpleNamespace(virtual_pipeline_model_parallel_size=2)
    with pytest.raises(ValueError, match="virtual pipeline stages") as caught:
        _ = layer_spec.layer_specs
    return str(caught.value)


def test_a_spec_that_is_not_called_does_not_guess_the_stage() -> None:
    (message,) = run_ranks(1, _uncalled_with_stages)
    assert "remove --spec and call" in message


def _hybrid_spec(rank: int, world_size: int, port: int) -> bool:
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
    from megatron.core.transformer.spec_utils import import_module

    # As megatron.training reads the flag.
    return import_module((f"{FRAMEWORKS}.spec", "hybrid_stack_spec")) is hybrid_stack_spec


def test_hybrid_models_get_their_own_spec() -> None:
    assert run_ranks(1, _hybrid_spec) == [True]


# Hooks before models are wrapped.


def _bind(rank: int, world_size: int, port: int) -> list[Any]:
    from tiny_gpt import build_chunks

    from megatron.slipstream import bind

    initialize(CASE)
    os.environ[config_file.VARIABLE] = os.devnull
    plain = build_chunks(CASE, make_config(CASE))
    assert bind(plain) == plain
    assert install.installed() is None, "a model without offloading needs no engine"
    policy = build_chunks(CASE, make_config(CASE, MODULES))
    critic = build_chunks(CASE, make_config(CASE, MODULES))
    wrapped = [torch.nn.Sequential(critic[0])]
    assert bind(policy) == policy
    assert bind(wrapped) == wrapped
    engine = install.installed()
    managers = [engine.router.manager_of(chunks[0]) for chunks in (policy, critic)]
    return [manager is engine.router.default for manager in managers]


def test_a_hook_binds_the_model_that_it_is_given() -> None:
    assert run_ranks(1, _bind) == [[True, False]]


def _pre_wrap_hook(rank: int, world_size: int, port: int) -> bool:
    """In the list of hooks of a model configuration of ``megatron.training``."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.argument_utils import gpt_config_from_args

    from megatron.slipstream import bind
    from megatron.slipstream.integration.entry.checks import parse_and_validate

    args = parse_and_validate(GPT)
    initialize(CASE)
    config = gpt_config_from_args(args)
    config.pre_wrap_hooks.append(bind)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    builder = config.get_builder_cls()(config)
    (chunk,) = builder.build_distributed_models(groups, wrap_with_ddp=False)
    engine = install.installed()
    assert engine is not None
    assert "slipstream" not in str(config.as_dict()), "a hook leaves no trace in a checkpoint"
    return chunk in engine.router._model_of


def test_the_hooks_of_a_model_configuration_take_it() -> None:
    if not releases.is_since("0.19"):
        pytest.skip(f"{releases.release()} has no model configurations with hooks")
    assert run_ranks(1, _pre_wrap_hook) == [True]
