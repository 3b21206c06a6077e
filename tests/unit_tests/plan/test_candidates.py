# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Each policy keeps exactly its groups, with its reason."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Optional

import pytest
from make_trace import (
    DEFAULT_NBYTES,
    Model,
    Schedule,
    interleaved,
    keys,
    one_f_one_b,
    one_pass,
    passes_that_turn_around,
    trace_of,
)

from megatron.slipstream.plan.candidates import (
    BACKWARD_FOLLOWS,
    DELTA,
    FRACTION,
    NEVER_USED,
    NOTHING_SAVED,
    PolicyOptions,
    keep_by_fraction,
    keep_empty,
    keep_for_pp_rank,
    keep_unused,
    keep_where_backward_follows,
    select_groups,
)
from megatron.slipstream.plan.trace import GroupKey, Trace


def all_keys(trace: Trace) -> list[GroupKey]:
    return [group.key for group in trace.groups]


def make_schedule(pp_size: int, pp_rank: int, vp_size: Optional[int]) -> Schedule:
    num_micro_batches = 2 * pp_size
    if vp_size is None:
        return one_f_one_b(pp_size, pp_rank, num_micro_batches)
    return interleaved(pp_size, pp_rank, num_micro_batches, vp_size)


def pipelines() -> list[tuple[int, int, Optional[int]]]:
    """First, middle and last rank of every pipeline; one chunk per rank or several."""
    found = []
    for pp_size, vp_size in itertools.product([1, 2, 4, 8], [None, 1, 2, 3, 4]):
        found += [(pp_size, rank, vp_size) for rank in sorted({0, pp_size // 2, pp_size - 1})]
    return found


# The layer before backward.


def test_with_one_micro_batch_every_stage_keeps_its_last_layer() -> None:
    trace = trace_of(one_f_one_b(4, 0, 1), Model(num_layers=2))
    assert set(keep_where_backward_follows(trace, all_keys(trace))) == keys(0, {1})


@pytest.mark.parametrize("encloses", [False, True], ids=["in-a-row", "enclosing"])
@pytest.mark.parametrize(
    "pp_size, pp_rank, vp_size",
    pipelines(),
    ids=[f"pp{size}-rank{rank}-vp{vp or 'none'}" for size, rank, vp in pipelines()],
)
def test_a_layer_stays_exactly_where_its_pass_turns_around(
    pp_size: int, pp_rank: int, vp_size: Optional[int], encloses: bool
) -> None:
    schedule = make_schedule(pp_size, pp_rank, vp_size)
    model = Model(num_layers=2, modules=("attn_norm", "core_attn", "mlp_norm"), encloses=encloses)
    trace = trace_of(schedule, model)
    kept = keep_where_backward_follows(trace, all_keys(trace))
    turning = passes_that_turn_around(schedule)
    assert set(kept) == set().union(*(keys(index, model.last_groups()) for index in turning))
    assert set(kept.values()) <= {BACKWARD_FOLLOWS}


def test_a_module_of_an_early_layer_only_stays_too() -> None:
    # By name: copies of a module that only one layer has are never hidden by another layer's.
    model = Model(num_layers=1, modules=("moe_act", "core_attn", "qkv_linear"))
    trace = one_pass(model)
    assert set(keep_where_backward_follows(trace, all_keys(trace))) == keys(0, {0, 1, 2})


QKV, MLP, SCAN = ("qkv_linear", "core_attn"), ("mlp_fc1", "mlp_act"), ("in_proj", "scan")


@pytest.mark.parametrize(
    "pattern, staying",
    {
        "*-M*-": "*-",
        "M*-*-": "*-",
        "MM*-*-": "*-",
        "*-*M-": "*-",
        "*-*-M": "*-M",
        "M*M*": "M*",
        "-*-": "-",
        "*-*E*E": "*E",
        "*-*E": "*E",
        "*": "*",
    }.items(),
)
def test_what_only_one_kind_of_layers_has_moves_if_others_follow(
    pattern: str, staying: str
) -> None:
    """Letters as in a hybrid pattern; a layer after it, of whichever kind, hides the copies."""
    of = {"*": QKV, "-": MLP, "M": SCAN, "E": ("expert_fc1", "moe_act")}
    names = tuple(itertools.chain.from_iterable(of[letter] for letter in pattern))
    trace = one_pass(Model(num_layers=1, modules=names))
    kept = keep_where_backward_follows(trace, all_keys(trace))
    groups = itertools.chain.from_iterable(
        range(2 * pattern.rindex(letter), 2 * pattern.rindex(letter) + 2) for letter in staying
    )
    assert set(kept) == keys(0, set(groups))


def test_only_groups_that_still_move_are_kept() -> None:
    trace = one_pass(Model(num_layers=2))
    assert keep_where_backward_follows(trace, [GroupKey(0, 0)]) == {}


# Groups with nothing to move, or without a use in backward.


def test_a_group_without_storages_stays() -> None:
    trace = one_pass(Model(num_layers=3, saves={1: ()}))
    assert keep_empty(trace, all_keys(trace)) == {GroupKey(0, 1): NOTHING_SAVED}


def test_a_group_that_saves_only_what_stays_names_the_kinds() -> None:
    trace = one_pass(Model(num_layers=3, saves={1: ()}))
    groups = [replace(group, stays=("nested tensors", "views")) for group in trace.groups]
    kept = keep_empty(replace(trace, groups=tuple(groups)), all_keys(trace))
    assert kept == {GroupKey(0, 1): "it saves only nested tensors, views"}


def test_a_group_that_only_shares_a_storage_is_not_empty() -> None:
    trace = one_pass(Model(num_layers=3, saves={0: ("x",), 1: ("x",)}))
    assert keep_empty(trace, all_keys(trace)) == {}


def test_a_group_that_backward_never_reaches_stays() -> None:
    trace = one_pass(Model(num_layers=3, without_use=(0,)))
    assert keep_unused(trace, all_keys(trace)) == {GroupKey(0, 0): NEVER_USED}


def test_a_forward_without_backward_moves_nothing() -> None:
    forward_only = [item for item in one_f_one_b(1, 0, 3) if item.direction == "F"]
    moving, kept = select_groups(trace_of(forward_only, Model(num_layers=2)), PolicyOptions())
    assert moving == frozenset()
    assert set(kept.values()) == {NEVER_USED}


# activation_offload_fraction.


@pytest.mark.parametrize(
    "fraction, num_groups, num_kept",
    [
        (1.0, 4, 0),
        (0.75, 4, 1),
        (0.5, 4, 2),
        (0.0, 4, 4),
        # The number of kept groups is rounded down: a fraction of a group moves as a whole one.
        (0.5, 5, 2),
        (0.51, 4, 1),
        (0.9, 4, 0),
        (0.25, 1, 0),
        # 10 * (1 - 0.9) is a little less than 1 in floating point, and int() makes it 0, as in
        # megatron-core.
        (0.9, 10, 0),
    ],
)
def test_the_fraction_keeps_the_latest_groups_of_a_pass_rounded_down(
    fraction: float, num_groups: int, num_kept: int
) -> None:
    trace = one_pass(Model(num_layers=num_groups))
    kept = keep_by_fraction(trace, all_keys(trace), fraction)
    assert set(kept) == keys(0, range(num_groups - num_kept, num_groups))
    assert set(kept.values()) <= {FRACTION}


def test_the_fraction_counts_groups_and_not_bytes() -> None:
    huge_last = Model(num_layers=4, saves={3: ("huge",)}, nbytes={"huge": 10**9})
    trace = one_pass(huge_last)
    assert set(keep_by_fraction(trace, all_keys(trace), 0.5)) == keys(0, {2, 3})


def test_the_fraction_holds_for_each_pass_by_itself() -> None:
    trace = trace_of(one_f_one_b(2, 0, 3), Model(num_layers=4))
    kept = keep_by_fraction(trace, all_keys(trace), 0.75)
    assert set(kept) == {GroupKey(chunk_pass, 3) for chunk_pass in range(3)}


def test_the_fraction_leaves_out_groups_without_bytes_of_their_own() -> None:
    # Groups 1 and 3 only share what 0 and 2 saved; two groups count, and one of them stays.
    trace = one_pass(Model(num_layers=4, saves={0: "a", 1: "a", 2: "b", 3: "b"}))
    assert set(keep_by_fraction(trace, all_keys(trace), 0.5)) == keys(0, {2})


def test_the_fraction_is_of_what_the_other_policies_left() -> None:
    # Of 5 layers the last stays in any case; half of the other four are kept.
    _, kept = select_groups(
        one_pass(Model(num_layers=5)), PolicyOptions(activation_offload_fraction=0.5)
    )
    assert kept == {
        GroupKey(0, 4): BACKWARD_FOLLOWS,
        GroupKey(0, 3): FRACTION,
        GroupKey(0, 2): FRACTION,
    }


# delta_offload_bytes_across_pp_ranks.


@pytest.mark.parametrize(
    "pp_rank, delta_bytes, num_kept",
    [
        (0, 10**9, 0),
        (1, 0, 0),
        (1, 1, 1),
        (1, DEFAULT_NBYTES, 1),
        (1, DEFAULT_NBYTES + 1, 2),
        (3, DEFAULT_NBYTES, 3),
        (1, 10**9, 4),
    ],
    ids="rank0 no-delta one-byte one-group a-byte-more rank3 more-than-all".split(),
)
def test_delta_keeps_whole_groups_until_rank_times_delta_bytes_stay(
    pp_rank: int, delta_bytes: int, num_kept: int
) -> None:
    trace = one_pass(Model(num_layers=4), pp_rank)
    kept = keep_for_pp_rank(trace, all_keys(trace), delta_bytes)
    assert set(kept) == keys(0, range(num_kept))
    assert set(kept.values()) <= {DELTA}


def test_delta_begins_with_the_pass_whose_backward_comes_first() -> None:
    # Interleaved, the first backward is of the last chunk, whose forward was not the first.
    trace = trace_of(interleaved(2, 0, 2, 2), Model(num_layers=2), pp_rank=1)
    first_used = trace.uses()[0].key.chunk_pass
    assert first_used != 0
    assert set(keep_for_pp_rank(trace, all_keys(trace), DEFAULT_NBYTES + 1)) == keys(
        first_used, {0, 1}
    )


def test_delta_goes_on_to_the_next_pass_in_backward_order() -> None:
    trace = trace_of(one_f_one_b(2, 0, 2), Model(num_layers=2), pp_rank=1)
    kept = keep_for_pp_rank(trace, all_keys(trace), 3 * DEFAULT_NBYTES)
    assert set(kept) == keys(0, {0, 1}) | keys(1, {0})


def test_delta_counts_a_shared_storage_once() -> None:
    # Groups 0 and 1 hold one storage: together they keep DEFAULT_NBYTES, so that 2 must stay too.
    trace = one_pass(Model(num_layers=4, saves={0: "a", 1: "a"}), pp_rank=1)
    kept = keep_for_pp_rank(trace, all_keys(trace), DEFAULT_NBYTES + 1)
    assert set(kept) == keys(0, {0, 1, 2})


def test_delta_does_not_count_what_stays_anyway() -> None:
    trace = one_pass(Model(num_layers=3), pp_rank=1)
    _, kept = select_groups(
        trace, PolicyOptions(delta_offload_bytes_across_pp_ranks=DEFAULT_NBYTES)
    )
    assert kept == {GroupKey(0, 2): BACKWARD_FOLLOWS, GroupKey(0, 0): DELTA}


def test_delta_does_not_count_a_storage_that_a_staying_group_holds_too() -> None:
    trace = one_pass(Model(num_layers=4, saves={0: "a", 3: "a"}), pp_rank=1)
    kept = keep_for_pp_rank(trace, sorted(keys(0, {0, 1, 2})), DEFAULT_NBYTES)
    assert set(kept) == keys(0, {0, 1})


def test_bytes_that_others_hold_count_neither_for_the_fraction_nor_for_the_delta() -> None:
    """They stay anyway, so such a group must not count towards the bytes to keep."""
    trace = one_pass(Model(num_layers=4))
    held = replace(trace, storages=tuple(replace(s, held_outside=True) for s in trace.storages))
    keys = [group.key for group in held.groups]
    assert all(held.group_nbytes(key) == 0 for key in keys)
    assert keep_by_fraction(held, keys, 0.0) == {}
