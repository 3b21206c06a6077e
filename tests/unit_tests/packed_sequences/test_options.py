# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Flags of packed training: incompatible options are refused with a cure."""

from __future__ import annotations

import argparse
import dataclasses
import enum
from types import SimpleNamespace
from typing import Any, get_type_hints

import pytest

from megatron.slipstream.options import packing as options_module
from megatron.slipstream.options.fields import PackingOptions
from megatron.slipstream.options.packing import PACKING_RULES, check_corpora, check_packing
from megatron.slipstream.options.rules import require
from megatron.slipstream.packed_sequences.packing import PackLimits, pack_limits


def arguments(**options: Any) -> SimpleNamespace:
    """Parsed arguments of a packed run; only those that the rules need on every release."""
    given: dict[str, Any] = {
        **dataclasses.asdict(PackingOptions(sequence_packing="greedy")),
        "seq_length": 128,
        "micro_batch_size": 1,
        "context_parallel_size": 1,
    }
    return SimpleNamespace(**given | options)


class Backend(enum.Enum):
    """Options with megatron-core's names and defaults."""

    unfused = 3
    auto = 5


LAYERS = {"cuda_graph_impl": "transformer_engine"}
IN_PARTS = {"context_parallel_size": 2, "calculate_per_token_loss": True}

REFUSED: list[dict[str, Any]] = [
    {"sequence_packing": None, "thd_max_packed_sequences": 4},
    {"sequence_packing": None, "thd_max_tokens": 128},
    {"seq_length": None},
    {"micro_batch_size": 2},
    {"eval_micro_batch_size": 2},
    {"thd_max_tokens": 64},
    {"context_parallel_size": 2},
    {"reset_position_ids": True},
    {"reset_attention_mask": True},
    {"dataloader_inter_document_masking": True},
    {"sft": True},
    {"hybrid_context_parallel": True},
    {"dataloader_fast_cache_load": True},
    {"dataloader_defer_npy_index_mmap": True},
    {"dataloader_type": "external"},
    {"sequence_packing": "balanced", "dataloader_type": "cyclic"},
    {"sequence_packing": "balanced", "rampup_batch_size": ["8", "8", "100"]},
    {"sequence_packing": "balanced", "step_batch_size_schedule": "0:8 100:16"},
    {"sequence_packing": "balanced", "decrease_batch_size_if_needed": True},
    {"moe_router_load_balancing_type": "sinkhorn"},
    {"moe_router_load_balancing_type": ["aux_loss", "quantile_balancing"]},
    {"hybrid_layer_pattern": "M*-"},
    {"experimental_attention_variant": "gated_delta_net"},
    {"attention_backend": "flash", "transformer_impl": "transformer_engine"},
    {"attention_backend": Backend.unfused, "transformer_impl": "transformer_engine"},
    {"cuda_graph_impl": "local"},
    {**LAYERS, "cuda_graph_warmup_steps": 0},
    {**LAYERS, "apply_rope_fusion": False},
    {**LAYERS, "apply_rope_fusion": False, "cuda_graph_modules": ["attn", "moe_router"]},
    {**LAYERS, "fp8": "e4m3"},
    {**LAYERS, "fp4": "e2m1"},
    {**LAYERS, "overlap_moe_expert_parallel_comm": True},
    {**LAYERS, "delay_wgrad_compute": True},
    {**LAYERS, "fine_grained_activation_offloading": True, "offload_engine": "megatron"},
    {"position_embedding_type": "mrope"},
    {"mtp_num_layers": 1, **IN_PARTS},
    {"hybrid_layer_pattern": "*-/*-", **IN_PARTS},
    {"mtp_num_layers": 1, "pipeline_model_parallel_layout": "E|t|m|L"},
    {"mtp_num_layers": 1, "num_experts": 4, "sequence_parallel": True},
    {"hybrid_layer_pattern": "*-E/*-E", "num_experts": 4},
    {"thd_max_packed_sequences": 0},
    {"seq_length": 6, **IN_PARTS},
]

ACCEPTED: list[dict[str, Any]] = [
    {},
    {"sequence_packing": None, "micro_batch_size": 4, "reset_position_ids": True},
    {"sequence_packing": "balanced", "dataloader_type": "single", "eval_micro_batch_size": 1},
    {"dataloader_type": "cyclic", "rampup_batch_size": ["8", "8", "100"]},
    {"thd_max_tokens": 128, "thd_max_packed_sequences": 1},
    {"thd_max_tokens": 64, **IN_PARTS},
    {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"], "mtp_num_layers": 1},
    {"mtp_num_layers": 1, "num_experts": 4},
    {"mtp_num_layers": 1, "sequence_parallel": True},
    {"pipeline_model_parallel_layout": "E|t|tL"},
    {"hybrid_layer_pattern": "*-*E|*-", "num_experts": 4, "sequence_parallel": True},
    {"hybrid_layer_pattern": "*-/*-"},
    {"attention_backend": Backend.auto, "transformer_impl": "transformer_engine"},
    {"attention_backend": "fused", "transformer_impl": "transformer_engine"},
    {"attention_backend": "unfused", "transformer_impl": "local"},
    {"cuda_graph_impl": "none"},
    LAYERS,
    {**LAYERS, "apply_rope_fusion": False, "cuda_graph_modules": ["moe_router"]},
    {"fp8": "e4m3", "apply_rope_fusion": False, "offload_engine": "megatron"},
    {"cuda_graph_granularity": "chunk"},
    {"sequence_packing": None, "cuda_graph_impl": "local", "mtp_num_layers": 1, **IN_PARTS},
]


@pytest.mark.parametrize("options", REFUSED, ids=str)
def test_what_packing_does_not_go_with_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="=.*; (set|use|leave)") as caught:
        require(check_packing(arguments(**options)))
    assert "{" not in str(caught.value)
    assert any(option in str(caught.value) for option in options)


def is_refused(options: dict[str, Any]) -> bool:
    try:
        require(check_packing(arguments(**options)))
    except ValueError:
        return True
    return False


@pytest.mark.parametrize("index", range(len(PACKING_RULES)))
def test_no_rule_is_there_for_nothing(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    others = (*PACKING_RULES[:index], *PACKING_RULES[index + 1 :])
    monkeypatch.setattr(options_module, "PACKING_RULES", others)
    assert not all(map(is_refused, REFUSED))


@pytest.mark.parametrize("options", ACCEPTED, ids=str)
def test_what_packing_goes_with_is_accepted(options: dict[str, Any]) -> None:
    require(check_packing(arguments(**options)))


@pytest.mark.parametrize(
    "packing, blends, refused",
    [
        ("balanced", [["a"], ["b", "c"]], True),
        ("balanced", [["a"], ["b"]], False),
        ("balanced", [], False),
        ("greedy", [["a", "b"]], False),
        (None, [["a", "b"]], False),
    ],
)
def test_packs_of_several_corpora_cannot_be_balanced(
    packing: Any, blends: list[list[str]], refused: bool
) -> None:
    args = arguments(sequence_packing=packing)
    if refused:
        with pytest.raises(ValueError, match="data_path with 2 corpora.*; set data_path"):
            require(check_corpora(args, blends))
    else:
        require(check_corpora(args, blends))


@pytest.mark.parametrize(
    "options, limits",
    [
        ({}, PackLimits(128, 2)),
        ({"seq_length": 100}, PackLimits(100, 2)),
        ({"thd_max_packed_sequences": 9}, PackLimits(128, 9)),
        ({"context_parallel_size": 2}, PackLimits(128, 2, alignment=4)),
    ],
)
def test_limits_are_those_of_all_context_parallel_ranks(
    options: dict[str, Any], limits: PackLimits
) -> None:
    assert pack_limits(arguments(**options)) == limits


def test_rules_look_at_options_that_megatron_has() -> None:
    from megatron.training.arguments import add_megatron_arguments

    from megatron.slipstream.integration.entry.arguments import add_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(add_megatron_arguments(parser))
    known = {action.dest for action in parser._actions}
    looked_at = {rule.name for rule in PACKING_RULES}
    looked_at |= {option for options in (*REFUSED, *ACCEPTED) for option in options}
    assert looked_at - known == set()


@pytest.mark.releases
def test_flags_are_read_as_megatron_makes_them_of_the_options() -> None:
    from megatron.training.argument_utils import ArgumentGroupFactory

    types = get_type_hints(PackingOptions)
    for field in dataclasses.fields(PackingOptions):
        field.type = types[field.name]
    parser = argparse.ArgumentParser()
    ArgumentGroupFactory(PackingOptions).build_group(parser, "packed sequences")
    flags = "--sequence-packing balanced --thd-max-packed-sequences 8 --thd-max-tokens 256".split()
    assert PackingOptions(**vars(parser.parse_args(flags))) == PackingOptions("balanced", 8, 256)
    assert PackingOptions(**vars(parser.parse_args([]))) == PackingOptions()
