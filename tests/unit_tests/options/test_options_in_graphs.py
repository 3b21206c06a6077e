# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Warnings about options that do nothing inside CUDA graphs."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from rule_cases import TABLES

from megatron.slipstream.options import rules
from megatron.slipstream.options.facts import Facts
from megatron.slipstream.options.model import check_options_in_graphs
from megatron.slipstream.options.rules import require, warn_once

BASE = TABLES["graphs"].valid
LAYERS = {"cuda_graph_impl": "transformer_engine"}
CHUNKS = {"cuda_graph_granularity": "chunk"}


def _found(*changes: dict[str, Any], has_gpu: bool = True) -> list[str]:
    facts = Facts(BASE, *changes, has_gpu=has_gpu)
    return [finding.rule for finding in check_options_in_graphs(facts)]


def test_imitated_graphs_are_verified() -> None:
    verified = {"offload_verify": 5}
    assert _found(CHUNKS, verified, has_gpu=False) == []


@pytest.mark.parametrize(
    "captured, recomputed, names",
    [
        ([], ["core_attn", "layernorm"], "core_attn"),
        (["attn"], ["core_attn", "mlp"], "core_attn"),
        (["mlp"], ["core_attn", "mlp"], "mlp"),
        (["mlp"], ["core_attn"], ""),
        (["attn", "moe_router"], ["moe", "layernorm"], ""),
    ],
)
def test_inputs_of_captured_checkpoints_are_said_to_stay(
    captured: list[str], recomputed: list[str], names: str
) -> None:
    selective = {
        "offload_checkpoint_inputs": True,
        "recompute_granularity": "selective",
        "recompute_modules": recomputed,
        "cuda_graph_modules": captured,
    }
    findings = check_options_in_graphs(Facts(BASE, LAYERS, selective))
    assert [finding.message.split(" because")[0] for finding in findings] == [
        f"offload_checkpoint_inputs=True has no effect on {names} in recompute_modules"
    ] * bool(names)
    assert _found(selective) == []


def test_a_warning_of_the_command_line_is_not_repeated_when_the_model_is_built(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "_said", set())
    facts = Facts(BASE, LAYERS, offload_verify=5)
    with caplog.at_level(logging.WARNING):
        require(check_options_in_graphs(facts))
        warn_once(check_options_in_graphs(facts))
        assert len(caplog.messages) == 1
        warn_once(check_options_in_graphs(Facts(facts, offload_verify=6)))
        assert len(caplog.messages) == 2
