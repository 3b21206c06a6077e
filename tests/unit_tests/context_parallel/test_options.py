# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Flags, limits and costs of dynamic context parallelism."""

from __future__ import annotations

import argparse
import dataclasses
from types import SimpleNamespace
from typing import Any, get_type_hints

import pytest

from megatron.slipstream.context_parallel.limits import RankLimits, cost_model, rank_limits
from megatron.slipstream.options.context_parallel import (
    ONE_SIZE,
    check_dynamic_context_parallel,
)
from megatron.slipstream.options.fields import DynamicContextParallelOptions, PackingOptions


def arguments(**options: Any) -> SimpleNamespace:
    """Parsed arguments of a run on 8 ranks; only those that the rules need on every release."""
    given: dict[str, Any] = {
        **dataclasses.asdict(PackingOptions(sequence_packing="balanced")),
        **dataclasses.asdict(DynamicContextParallelOptions(dynamic_context_parallel=True)),
        "seq_length": 128,
        "context_parallel_size": 1,
        "data_parallel_size": 8,
        "calculate_per_token_loss": True,
    }
    return SimpleNamespace(**given | options)


@pytest.mark.parametrize("data_parallel_size", [1, 3, 7])
def test_a_number_of_ranks_that_no_size_divides_is_warned_of(data_parallel_size: int) -> None:
    (finding,) = check_dynamic_context_parallel(arguments(data_parallel_size=data_parallel_size))
    assert (finding.severity, finding.rule) == ("warning", ONE_SIZE.name)
    assert f"ranks ({data_parallel_size})" in finding.text
    assert "more than 128 tokens are cut" in finding.text
    chosen = arguments(data_parallel_size=data_parallel_size, max_dynamic_context_parallel_size=1)
    even = arguments(data_parallel_size=data_parallel_size + 1)
    for cured in (chosen, even):
        assert check_dynamic_context_parallel(cured) == []


@pytest.mark.parametrize(
    "options, limits, sizes",
    [
        ({}, RankLimits(8, 128, 2), (1, 2, 4, 8)),
        ({"data_parallel_size": 6}, RankLimits(6, 128, 2), (1, 2)),
        (
            {"data_parallel_size": 4, "context_parallel_size": 2, "thd_max_packed_sequences": 9},
            RankLimits(8, 64, 9),
            (1, 2, 4, 8),
        ),
        (
            {"min_dynamic_context_parallel_size": 2, "max_dynamic_context_parallel_size": 4},
            RankLimits(8, 128, 2, 2, 4),
            (2, 4),
        ),
    ],
)
def test_every_rank_has_the_buffer_of_the_static_size(
    options: dict[str, Any], limits: RankLimits, sizes: tuple[int, ...]
) -> None:
    assert rank_limits(arguments(**options)) == limits
    assert limits.sizes == sizes


def test_a_buffer_that_cannot_be_halved_is_refused() -> None:
    with pytest.raises(ValueError, match="^thd_max_tokens=127 .*; set an even"):
        RankLimits(8, 127, 2)
    assert RankLimits(8, 127, 2, max_size=1).sizes == (1,)


def test_no_group_holds_a_document_longer_than_all_buffers() -> None:
    limits = RankLimits(4, 10, 2)
    assert [limits.smallest_for(length) for length in (1, 10, 11, 20, 21, 40)] == [1, 1, 2, 2, 4, 4]
    with pytest.raises(ValueError, match="^a sequence of 41 tokens .*; cut it"):
        limits.smallest_for(41)


# --- costs ----------------------------------------------------------------------------------------

LAYER: dict[str, Any] = {
    "hidden_size": 8,
    "num_attention_heads": 4,
    "kv_channels": 2,
    "num_query_groups": 2,
    "group_query_attention": True,
    "swiglu": True,
    "ffn_hidden_size": 16,
    "num_experts": None,
}


def test_costs_are_those_of_the_models_layers() -> None:
    dense = cost_model(SimpleNamespace(**LAYER))
    assert dense.linear == 2 * (2 * 8 * 8 + 2 * 8 * 4 + 3 * 8 * 16)
    assert dense.attention == 2 * 8
    experts = {
        "num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 5,
        "moe_shared_expert_intermediate_size": 7, "group_query_attention": False, "swiglu": False,
    }  # fmt: skip
    routed = cost_model(SimpleNamespace(**LAYER | experts))
    assert routed.linear == 2 * (4 * 8 * 8 + 2 * 8 * (2 * 5 + 7))
    latent = {
        "multi_latent_attention": True, "qk_head_dim": 4, "qk_pos_emb_head_dim": 2, "v_head_dim": 6,
        "q_lora_rank": 5, "kv_lora_rank": 3,
    }  # fmt: skip
    model = cost_model(SimpleNamespace(**LAYER | latent))
    projections = (8 + 24) * 5 + 8 * (3 + 2) + 3 * 4 * (4 + 6) + 4 * 6 * 8
    assert model.linear == 2 * (projections + 3 * 8 * 16)
    assert model.attention == 2 * 4 * (4 + 2 + 6) // 2
    without = cost_model(SimpleNamespace(**LAYER | latent | {"q_lora_rank": None}))
    assert without.linear - model.linear == 2 * (8 * 24 - (8 + 24) * 5)


@pytest.mark.releases
def test_flags_are_read_as_megatron_makes_them_of_the_options() -> None:
    from megatron.training.argument_utils import ArgumentGroupFactory

    types = get_type_hints(DynamicContextParallelOptions)
    for field in dataclasses.fields(DynamicContextParallelOptions):
        field.type = types[field.name]
    parser = argparse.ArgumentParser()
    ArgumentGroupFactory(DynamicContextParallelOptions).build_group(parser, "context parallelism")
    given = "--dynamic-context-parallel --max-dynamic-context-parallel-size 4"
    parsed = DynamicContextParallelOptions(**vars(parser.parse_args(given.split())))
    assert parsed == DynamicContextParallelOptions(True, 1, 4)
    unset = DynamicContextParallelOptions(**vars(parser.parse_args([])))
    assert unset == DynamicContextParallelOptions()
