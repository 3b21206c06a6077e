# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Dynamic context parallelism on GPUs, through Transformer Engine's attention and NCCL.

What a size computes is what megatron-core computes with that static size, bit by bit, and in
whatever order sizes come. Between sizes, sums are made in another order, in bfloat16.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
from ranks import run_ranks
from shared_documents import Found, Setting, Sizes, compare_sizes, losses_of_stages
from tiny_gpt import ModelCase

from megatron.slipstream.context_parallel.limits import RankLimits

LOSS_TOLERANCE = 0.01
"""Of the mean loss, which is about 7."""
GRADIENT_TOLERANCE = 0.05
"""Of all gradients together, relative to their length. Positions of another group make the
difference as long as the gradient."""

TOKENS_PER_RANK = 512
DENSE = ModelCase(
    num_layers=2,
    hidden_size=512,
    num_attention_heads=8,
    seq_length=2048,
    micro_batch_size=1,
    vocab_size=1024,
    bf16=True,
    overrides={"apply_rope_fusion": True, "calculate_per_token_loss": True},
)
MLA = replace(
    DENSE,
    kind="mla",
    overrides={
        "qk_head_dim": 64,
        "qk_pos_emb_head_dim": 32,
        "v_head_dim": 64,
        "calculate_per_token_loss": True,
    },
)
CASES = {
    "dense": DENSE,
    "dense, core attention recomputed": replace(
        DENSE,
        overrides={
            **DENSE.overrides,
            "recompute_granularity": "selective",
            "recompute_modules": ["core_attn"],
        },
    ),
    "MLA": MLA,
    "MLA, yarn, fused": replace(
        MLA, overrides={**MLA.overrides, "rope_type": "yarn", "apply_rope_fusion": True}
    ),
    "MLA, projections recomputed": replace(
        MLA,
        overrides={
            **MLA.overrides,
            "recompute_granularity": "selective",
            "recompute_modules": ["mla_up_proj"],
        },
    ),
}

# None is a multiple of what groups need, and one is but a token. With room for 6 and a buffer of
# 2048 tokens, cuDNN's deterministic backward pass still finds its workspace.
LENGTHS = (301, 99, 377, 1, 150, 511)
MAX_SEQUENCES = 6
ON_RANKS: dict[int, dict[int, Sizes]] = {
    2: {1: [(1, [0, 1]), (1, [2, 3])], 2: [(2, [0, 1, 2, 3])]},
    4: {
        1: [(1, [0, 1]), (1, [2, 3]), (1, [4]), (1, [5])],
        2: [(2, [0, 1, 2, 3]), (2, [4, 5])],
        4: [(4, [0, 1, 2, 3, 4, 5])],
    },
}
"""By number of ranks and size; the same documents for every size."""


def setting_of(name: str, num_ranks: int) -> Setting:
    limits = RankLimits(num_ranks, TOKENS_PER_RANK, MAX_SEQUENCES)
    return Setting(CASES[name], limits, LENGTHS, ON_RANKS[num_ranks])


@functools.cache
def found_on(num_ranks: int, name: str) -> list[Found]:
    """What each rank has found; the processes of a case are started once."""
    return run_ranks(num_ranks, compare_sizes, setting_of(name, num_ranks))


RANKS_AND_CASES = [
    *(pytest.param(2, name, marks=pytest.mark.gpus2, id=f"2 ranks, {name}") for name in CASES),
    pytest.param(4, "dense", marks=pytest.mark.gpus4, id="4 ranks, dense"),
    pytest.param(4, "MLA", marks=pytest.mark.gpus4, id="4 ranks, MLA"),
]


@pytest.mark.parametrize("num_ranks, name", RANKS_AND_CASES)
def test_one_size_throughout_is_the_static_size_bit_by_bit(num_ranks: int, name: str) -> None:
    for found in found_on(num_ranks, name):
        assert found.change_from_static == dict.fromkeys(ON_RANKS[num_ranks])


@pytest.mark.parametrize("num_ranks, name", RANKS_AND_CASES)
def test_what_ran_before_changes_no_bit(num_ranks: int, name: str) -> None:
    for found in found_on(num_ranks, name):
        assert len(found.change_by_order) == {2: 4, 4: 12}[num_ranks]
        assert set(found.change_by_order.values()) == {None}, found.change_by_order


@pytest.mark.parametrize("num_ranks, name", RANKS_AND_CASES)
def test_sizes_differ_by_rounding_only(num_ranks: int, name: str) -> None:
    for found in found_on(num_ranks, name):
        print(found.difference_by_size)
        for loss, gradients in found.difference_by_size.values():
            assert loss <= LOSS_TOLERANCE
            assert gradients <= GRADIENT_TOLERANCE


@pytest.mark.gpus4
@pytest.mark.parametrize("name", ["dense", "MLA"])
def test_two_stages_have_the_losses_of_one(name: str) -> None:
    one = setting_of(name, 2)
    two = replace(one, case=replace(one.case, pp=2))
    sizes = (2, 1, 1, 2, 1)
    expected = run_ranks(2, losses_of_stages, one, sizes)
    assert run_ranks(4, losses_of_stages, two, sizes) == [[], [], *expected]
