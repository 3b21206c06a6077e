# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Each offloading option works inside CUDA graphs, or a warning says that it does not.

A new option fails here until it has a row.
"""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.slipstream.options import rules
from megatron.slipstream.options.fields import OffloadConfig, OffloadOptions
from megatron.slipstream.options.model import check_model_options, check_options_in_graphs
from megatron.slipstream.options.rules import require, warn_once

BASE: dict[str, Any] = {
    **dataclasses.asdict(OffloadConfig()),
    "fine_grained_activation_offloading": True,
    "offload_modules": ["core_attn"],
    "activation_offload_fraction": 1.0,
    "min_offloaded_tensor_size": 1 << 20,
    "delta_offload_bytes_across_pp_ranks": 0,
    "fine_grained_offloading_max_inflight_offloads": None,
    "delay_offload_until_cuda_graph": False,
    "recompute_granularity": None,
    "recompute_modules": None,
    "cpu_offloading": False,
    "num_moe_experts": None,
    "cuda_graph_impl": "none",
    "cuda_graph_granularity": "layer",
    "cuda_graph_modules": [],
    "cuda_graph_warmup_steps": 3,
}
LAYERS = {"cuda_graph_impl": "transformer_engine"}
CHUNKS = {"cuda_graph_granularity": "chunk"}
WORKS, WARNED = False, True
ROWS: dict[str, tuple[Any, bool, bool]] = {
    # option: (a value other than the default, warned of with layer graphs, with chunk graphs)
    "fine_grained_activation_offloading": (True, WORKS, WORKS),
    "offload_modules": (["core_attn", "attn_proj"], WORKS, WORKS),
    "activation_offload_fraction": (0.5, WORKS, WORKS),
    "min_offloaded_tensor_size": (1, WORKS, WORKS),
    "delta_offload_bytes_across_pp_ranks": (5, WORKS, WORKS),
    "fine_grained_offloading_max_inflight_offloads": (0, WARNED, WORKS),
    "delay_offload_until_cuda_graph": (True, WORKS, WORKS),
    "offload_engine": ("megatron", WORKS, WORKS),
    "offload_backend": ("cuda", WORKS, WORKS),
    "offload_release_lag": (2, WARNED, WORKS),
    "offload_prefetch_depth": (0, WARNED, WORKS),
    # Followed if timed; see integration/test_graph_goals.py.
    "offload_target_memory_gib": (1.0, WORKS, WORKS),
    "offload_max_overhead_percent": (1.0, WORKS, WORKS),
    # Refused by its own rules.
    "activation_memory_budget": (1.0, WORKS, WORKS),
    "offload_host_memory_limit_bytes": (1 << 30, WORKS, WORKS),
    # A replay runs neither C++ nor Python.
    "offload_native": ("off", WORKS, WORKS),
    # Except where the checkpoint is captured, below.
    "offload_checkpoint_inputs": (True, WORKS, WORKS),
    "offload_verify": (5, WARNED, WARNED),
    "offload_trace_path": ("trace.json", WORKS, WORKS),
    "offload_report_path": ("report.json", WORKS, WORKS),
    "offload_nvtx_ranges": (True, WARNED, WARNED),
}


def _options() -> set[str]:
    own = {field.name for field in dataclasses.fields(OffloadConfig)}
    return own | set(OffloadOptions.__annotations__)


def _found(*changes: dict[str, Any], has_gpu: bool = True) -> list[str]:
    facts = SimpleNamespace(**BASE)
    for change in changes:
        vars(facts).update(change)
    return [finding.rule for finding in check_options_in_graphs(facts, has_gpu)]


def test_each_option_has_a_row() -> None:
    assert set(ROWS) == _options()


@pytest.mark.parametrize("option", ROWS)
def test_an_option_without_effect_inside_graphs_is_warned_of(option: str) -> None:
    value, in_layers, in_chunks = ROWS[option]
    given = {option: value}
    assert _found(given) == []
    assert _found(LAYERS, given) == [option] * in_layers
    assert _found(CHUNKS, given) == [option] * in_chunks
    off = {"fine_grained_activation_offloading": False}
    others = {"offload_engine": "megatron"}
    for without in (off, others):
        assert _found(LAYERS, given, without) == _found(CHUNKS, given, without) == []


@pytest.mark.parametrize("option", [name for name, row in ROWS.items() if True in row[1:]])
def test_the_warning_names_value_and_cure_and_the_cure_helps(option: str) -> None:
    value = ROWS[option][0]
    facts = SimpleNamespace(**{**BASE, **LAYERS, option: value})
    (finding,) = check_options_in_graphs(facts, True)
    assert finding.severity == "warning"
    assert finding.message.startswith(
        f"{option}={value} has no effect inside CUDA graphs of layers"
    )
    default = BASE[option]
    assert finding.cure.startswith(f"set {option}={default}, its default")
    setattr(facts, option, default)
    assert check_options_in_graphs(facts, True) == []


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
    facts = SimpleNamespace(**{**BASE, **LAYERS, **selective})
    findings = check_options_in_graphs(facts, True)
    assert [finding.message.split(" because")[0] for finding in findings] == [
        f"offload_checkpoint_inputs=True has no effect on {names} in recompute_modules"
    ] * bool(names)
    assert _found(selective) == []


def test_delayed_copies_need_graphs_that_tell_when_they_are_launched() -> None:
    experts = {"offload_modules": ["moe_act"], "num_moe_experts": 8}
    local = {**experts, "cuda_graph_impl": "local", "cuda_graph_modules": ["attn"]}
    facts = SimpleNamespace(**{**BASE, **local, "delay_offload_until_cuda_graph": True})
    (finding,) = check_model_options(facts)
    assert "delay_offload_until_cuda_graph=True is not supported" in finding.text
    assert "set cuda_graph_impl='transformer_engine'" in finding.cure
    assert finding.cure.endswith("or leave it out")
    for cure in (LAYERS, {"delay_offload_until_cuda_graph": False}):
        cured = SimpleNamespace(**{**vars(facts), **cure})
        assert check_model_options(cured) == []


def test_a_warning_of_the_command_line_is_not_repeated_when_the_model_is_built(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "_said", set())
    facts = SimpleNamespace(**{**BASE, **LAYERS, "offload_verify": 5})
    with caplog.at_level(logging.WARNING):
        require(check_options_in_graphs(facts, True))
        warn_once(check_options_in_graphs(facts, True))
        assert len(caplog.messages) == 1
        vars(facts).update(offload_verify=6)
        warn_once(check_options_in_graphs(facts, True))
        assert len(caplog.messages) == 2
