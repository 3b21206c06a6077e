# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Fields of TransformerConfig select the engine, and are checked when it is made."""

import pytest
from megatron.core.pipeline_parallel import fine_grained_activation_offload as facade
from megatron.core.pipeline_parallel.offload_engine.select import deselect
from megatron.core.transformer.transformer_config import TransformerConfig
from offloaded_models import MODULES, build, finish, same, train

from megatron.slipstream.patches import model_calls

SIZES = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2}
ON = {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn"]}


@pytest.fixture(autouse=True)
def _nothing_is_selected(monkeypatch) -> None:
    monkeypatch.setattr(model_calls, "before_first_call", None)


def make(**options):
    return TransformerConfig(**SIZES, **ON, transformer_impl="local", **options)


def test_the_built_in_engine_is_the_default() -> None:
    make()
    assert model_calls.before_first_call is None


def test_the_field_selects_the_engine_when_a_model_is_called() -> None:
    make(offload_engine="slipstream", offload_backend="cpu")
    assert model_calls.before_first_call is not None


@pytest.mark.parametrize(
    "options",
    [
        {"offload_backend": "gpu"},
        {"offload_release_lag": -1},
        {"offload_release_lag": 1.5},
        {"offload_target_memory_gib": 0.0},
        {"offload_target_memory_gib": 1.0, "offload_max_overhead_percent": 1.0},
    ],
)
def test_a_wrong_value_is_an_error_that_names_it(options) -> None:
    with pytest.raises(ValueError, match=next(iter(options)).rpartition("_")[0]):
        make(offload_engine="slipstream", **options)


def test_the_field_alone_offloads_and_changes_no_bit() -> None:
    try:
        expected = train(build("dense"))
        options = {"offload_engine": "slipstream", "offload_backend": "cpu-lazy"}
        found = train(build("dense", MODULES["dense"], offload_native="off", **options))
        assert facade.PipelineOffloadManager.OFFLOAD_MGR.report.d2h_bytes > 0
        assert same(expected, found)
    finally:
        deselect()
        finish()
