# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Flags of packed training: what they do not go together with is refused, with the cure."""

from __future__ import annotations

import argparse
import dataclasses
from types import SimpleNamespace
from typing import Any, get_type_hints

import pytest

from megatron.slipstream.packed_sequences import options as options_module
from megatron.slipstream.packed_sequences.options import (
    PACKING_RULES,
    PackingOptions,
    check_packing,
    pack_limits,
)
from megatron.slipstream.packed_sequences.packing import PackLimits


def arguments(**options: Any) -> SimpleNamespace:
    """What megatron parses for a packed run; no more than the rules need on every release."""
    given: dict[str, Any] = {
        **dataclasses.asdict(PackingOptions(sequence_packing="greedy")),
        "seq_length": 128,
        "micro_batch_size": 1,
        "context_parallel_size": 1,
    }
    return SimpleNamespace(**given | options)


REFUSED: list[dict[str, Any]] = [
    {"sequence_packing": None, "thd_max_packed_sequences": 4},
    {"sequence_packing": None, "thd_max_tokens": 128},
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
    {"moe_router_load_balancing_type": "sinkhorn"},
    {"moe_router_load_balancing_type": ["aux_loss", "quantile_balancing"]},
    {"hybrid_layer_pattern": "M*-"},
    {"position_embedding_type": "mrope"},
    {"context_parallel_size": 2, "calculate_per_token_loss": True, "mtp_num_layers": 1},
    {"thd_max_packed_sequences": 0},
    {"seq_length": 6, "context_parallel_size": 2, "calculate_per_token_loss": True},
]

ACCEPTED: list[dict[str, Any]] = [
    {},
    {"sequence_packing": None, "micro_batch_size": 4, "reset_position_ids": True},
    {"sequence_packing": "balanced", "dataloader_type": "single", "eval_micro_batch_size": 1},
    {"dataloader_type": "cyclic", "rampup_batch_size": ["8", "8", "100"]},
    {"thd_max_tokens": 128, "thd_max_packed_sequences": 1},
    {"context_parallel_size": 2, "calculate_per_token_loss": True, "thd_max_tokens": 64},
    {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"], "mtp_num_layers": 1},
    {"hybrid_layer_pattern": "*-*E|*-"},
]


@pytest.mark.parametrize("options", REFUSED, ids=str)
def test_what_packing_does_not_go_with_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="=.*; (set|use|leave)") as caught:
        check_packing(arguments(**options))
    assert "{" not in str(caught.value)
    assert any(option in str(caught.value) for option in options)


def is_refused(options: dict[str, Any]) -> bool:
    try:
        check_packing(arguments(**options))
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
    check_packing(arguments(**options))


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
