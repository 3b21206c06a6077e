# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Models of megatron-core with eager graphs of each context-parallel size, without a GPU.

Two or four processes; a replay runs the layers again, with their communication.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from banked_gpt import Banked, SizedTraining, compare_bank, every_order, random_sizes
from ranks import run_ranks
from replayed_gpt import DROP_AND_PAD
from shared_documents import Setting, inputs_of, micro_batch_of, share_of
from timed_backend import take_times_on_cpu
from tiny_gpt import DENSE_MODULES, MOE_MODULES, ModelCase, initialize

from megatron.slipstream.context_parallel.limits import RankLimits
from megatron.slipstream.fine_grained_activation_offload.step_clock import NUM_TIMED
from megatron.slipstream.graphs.chunks import NUM_TIMED_CAPTURES

TOKENS_PER_RANK = 32
LENGTHS = (100, 17, 61, 1, 29, 9, 32, 30, 20, 3)
FOUR = RankLimits(4, TOKENS_PER_RANK, 4)
TWO = RankLimits(2, TOKENS_PER_RANK, 4)
SMALL: dict[str, Any] = {"num_layers": 1, "seq_length": 128, "micro_batch_size": 1}
PER_TOKEN = {"calculate_per_token_loss": True}
DROPOUT = {**PER_TOKEN, "hidden_dropout": 0.1}
RECOMPUTED = {
    **PER_TOKEN,
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def dropless(capacity_factor: float) -> dict[str, Any]:
    return {"sync_free_experts": True, "sync_free_capacity_factor": capacity_factor}


def on_four(case: ModelCase) -> Setting:
    """One kind of micro-batch has groups of different sizes."""
    return Setting(
        case,
        FOUR,
        LENGTHS,
        {
            1: [(1, [4]), (1, [6]), (1, [7]), (1, [])],
            2: [(2, [2]), (1, [4]), (1, [6])],
            4: [(4, [0, 1])],
        },
    )


def on_two(case: ModelCase) -> Setting:
    return Setting(case, TWO, LENGTHS, {1: [(1, [4]), (1, [6])], 2: [(2, [2])]})


CASES: dict[str, tuple[int, Setting, tuple[Any, ...]]] = {
    "dense": (4, on_four(ModelCase(**SMALL, overrides=DROPOUT)), ()),
    "MLA, layers recomputed": (2, on_two(ModelCase("mla", **SMALL, overrides=RECOMPUTED)), ()),
    "experts on both ranks, reduction overlapped": (
        2,
        on_two(ModelCase("moe", ep=2, **SMALL, overrides={**PER_TOKEN, **DROP_AND_PAD})),
        ({"overlap_grad_reduce": True},),
    ),
    "dropless experts on both ranks": (
        2,
        on_two(ModelCase("moe", ep=2, **dropless(1.8), **SMALL, overrides=PER_TOKEN)),
        (),
    ),
    # Padding is one token many times: up to half of the rows are for the same expert.
    "dropless experts on ranks of all sizes": (
        4,
        on_four(ModelCase("moe", ep=4, **dropless(2.0), **SMALL, overrides=DROPOUT)),
        (),
    ),
    "TP2": (4, on_two(ModelCase(tp=2, **SMALL, overrides=DROPOUT)), ()),
    "PP2 VPP2": (
        4,
        on_two(ModelCase(pp=2, vpp=2, **{**SMALL, "num_layers": 4}, overrides=PER_TOKEN)),
        (),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_sizes_in_every_order_train_as_without_graphs(name: str) -> None:
    num_ranks, setting, more = CASES[name]
    sizes = setting.limits.sizes
    num_chunks = setting.case.vpp or 1
    # All orders of three sizes with the cheapest model only.
    steps = every_order(sizes, 7 if name == "dense" else 4)
    ranks = run_ranks(num_ranks, compare_bank, setting, steps, *more)
    for size in sizes:
        replays = [found.num_replays[size] for found in ranks]
        assert max(replays) >= num_chunks * (len(steps) - 1)
    for found in ranks:
        assert found.difference is None
        assert found.num_other == 0
        assert len(found.figures) == num_chunks * len(sizes)
        assert found.num_poisoned > 0


def test_any_number_of_micro_batches_of_any_sizes() -> None:
    setting = on_two(ModelCase(pp=2, **{**SMALL, "num_layers": 2}, overrides=DROPOUT))
    for found in run_ranks(4, compare_bank, setting, random_sizes((1, 2), 5, most=3)):
        assert found.difference is None
        assert found.num_other == 0


@functools.cache
def offloaded() -> list[Banked]:
    case = ModelCase(pp=2, **{**SMALL, "num_layers": 4}, overrides=PER_TOKEN)
    steps = every_order((1, 2), 3)
    return run_ranks(4, compare_bank, on_two(case), steps, None, DENSE_MODULES, "cpu-lazy")


def test_ranks_plan_from_the_times_of_their_own_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays of a size that are timed wait for one another, as passes do."""
    take_times_on_cpu(monkeypatch)
    layers = {**SMALL, "num_layers": 2}
    case = ModelCase("moe", ep=2, **dropless(2.0), **layers, overrides=PER_TOKEN)
    steps = every_order((1, 2), 2)
    for found in run_ranks(2, compare_bank, on_two(case), steps, None, MOE_MODULES, "cpu"):
        assert found.difference is None
        assert found.num_other == 0
        assert min(found.moved_bytes[size] for size in (1, 2)) > 0
        assert found.num_timed == 2 * NUM_TIMED_CAPTURES * (1 + NUM_TIMED)


def test_activations_move_inside_the_graphs_of_every_size() -> None:
    for found in offloaded():
        assert found.difference is None
        assert found.num_other == 0
        assert min(found.moved_bytes[size] for size in (1, 2)) > 0


def test_activations_of_dropless_experts_move_inside_the_graphs_of_every_size() -> None:
    options = {**SMALL, "num_layers": 2}  # the last layer stays
    setting = on_two(ModelCase("moe", ep=2, **dropless(1.8), **options, overrides=PER_TOKEN))
    steps = every_order((1, 2), 3)
    modules = ("core_attn", "expert_fc1", "moe_act")
    for found in run_ranks(2, compare_bank, setting, steps, None, modules, "cpu-lazy"):
        assert found.difference is None
        assert found.num_other == 0
        assert min(found.moved_bytes[size] for size in (1, 2)) > 0


def test_sizes_share_the_host_memory_of_a_place() -> None:
    for found in offloaded():
        assert found.host_bytes[2] > found.moved_bytes[2]
        more = max(0, found.moved_bytes[1] - found.moved_bytes[2])
        assert found.host_bytes[1] <= 4 * more


def _after_eviction(rank: int, num_ranks: int, port: int) -> int:
    """Replays layers that cannot compute a rotary table."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    setting = on_two(ModelCase("mla", **SMALL, overrides=PER_TOKEN))
    initialize(setting.case, rank, num_ranks, port)
    training = SizedTraining(setting, replays=True)
    (bank,) = training.graphs
    training.run([(1,)])
    training.chunks[0].zero_grad_buffer()
    assert bank.is_captured
    RotaryEmbedding.get_emb = None
    training.run([(2, 1, 1, 2)])
    return int(bank.num_replays)


def test_graphs_do_not_need_the_tables_that_megatron_core_keeps() -> None:
    assert run_ranks(2, _after_eviction) == [4, 4]


# --- refusals -------------------------------------------------------------------------------------


def _refusals(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """Errors for micro-batches that no graph can run, and whether the rank continues."""
    setting = on_two(ModelCase(**SMALL, overrides=PER_TOKEN))
    initialize(setting.case, rank, num_ranks, port)
    training = SizedTraining(setting, replays=True)
    training.run(every_order((1, 2), 2))
    (bank,) = training.graphs
    model, groups = training.chunks[0], training.groups
    texts = setting.texts
    share = share_of(micro_batch_of(setting.micro_batches[2], texts), rank)

    def said(limits: RankLimits, group: Any, **changes: Any) -> str:
        inputs, _ = inputs_of(share, texts, limits, group)
        for name, value in changes.items():
            setattr(inputs["packed_seq_params"], name, value)
        try:
            model(**inputs)
        except ValueError as error:
            return str(error)
        return "nothing"

    other = torch.distributed.new_group([0, 1])
    mine = groups.of_size[2]
    told = {
        "no group": said(TWO, None),
        "other group": said(TWO, other),
        "too long": said(RankLimits(2, 2 * TOKENS_PER_RANK, 4), mine),
        "too many": said(RankLimits(2, TOKENS_PER_RANK, 9), mine),
        "other length": said(TWO, mine, max_seqlen_q=62),
    }
    num_replays = bank.num_replays
    training.run([(2, 1)])
    told["went on"] = str(bank.num_replays - num_replays)
    return told


def test_what_no_graph_can_run_is_refused_with_its_figures() -> None:
    messages = {
        "no group": "a micro-batch without PackedSeqParams.cp_group is not supported",
        "other group": "group of ranks [0, 1] that graphs of context_parallel_size=2 were not",
        "too long": "a pack of 128 tokens and room for 4 sequences is not supported with the "
        "graphs of context_parallel_size=2 because they are captured for 64 tokens (32 of each "
        "rank) and 4 sequences; set a larger",
        "too many": "a pack of 64 tokens and room for 9 sequences is not",
        "other length": "packed_seq_params was",
    }
    for told in run_ranks(2, _refusals):
        for name, message in messages.items():
            assert message in told[name], told[name]
        assert told["went on"] == "2"


# --- ranks together -------------------------------------------------------------------------------


def _abort(rank: int, num_ranks: int, port: int, failing_rank: int) -> dict[str, Any]:
    """One rank has no room for the second size: each rank's error, graphs and next iteration."""
    from megatron.slipstream.graphs.chunks import SizeGraphs

    setting = on_two(ModelCase(tp=2, **SMALL, overrides=PER_TOKEN))
    initialize(setting.case, rank, num_ranks, port)
    training = SizedTraining(setting, replays=True)
    (bank,) = training.graphs
    training.run([(1,)])
    tried: list[str] = []
    check = SizeGraphs._check_room

    def fails(graphs: Any, _: int) -> None:
        tried.append(graphs.chunk.name)
        if rank == failing_rank and len(tried) == 2:
            raise ValueError("no room")

    SizeGraphs._check_room = fails
    told = ""
    try:
        training.run([(1,)])
    except (RuntimeError, ValueError) as error:
        told = f"{type(error).__name__}: {error}"
    left = [bool(one.slots) for one in bank.of_size.values()]
    SizeGraphs._check_room = check
    training.run([(2, 1)])  # the next iteration captures again
    return {"told": told, "tried": tried, "left": left, "replays": bank.num_replays}


@pytest.mark.parametrize("failing_rank", [0, 3])
def test_if_one_rank_cannot_capture_all_give_up_and_say_so(failing_rank: int) -> None:
    """With two tensor-parallel ranks: one of the four shares no group with the first."""
    for rank, found in enumerate(run_ranks(4, _abort, failing_rank)):
        if rank == failing_rank:
            assert found["told"] == "ValueError: no room"
        else:
            assert found["told"].startswith(
                "RuntimeError: CUDA graphs of context_parallel_size=1 could not be captured on "
                "every rank"
            )
        assert found["tried"] == [
            "model chunk 0, context-parallel size 2",
            "model chunk 0, context-parallel size 1",
        ]
        assert found["left"] == [False, False]
        assert found["replays"] == 2


def _disagreement(rank: int, num_ranks: int, port: int) -> tuple[str, int]:
    """One rank of two would replay the graphs of another size."""
    from megatron.slipstream.integration.packed.context_parallel_groups import check_agreement

    setting = on_two(ModelCase(**SMALL, overrides=PER_TOKEN))
    initialize(setting.case, rank, num_ranks, port)
    training = SizedTraining(setting, replays=True)
    training.run(every_order((1, 2), 2))
    (bank,) = training.graphs
    num_replays = bank.num_replays
    told = ""
    try:
        check_agreement(training.groups, 1 + rank, fingerprint=0)
        training.run([(1 + rank,)])
    except RuntimeError as error:
        told = str(error)
    return told, bank.num_replays - num_replays


def test_ranks_that_would_replay_different_sizes_are_told_before_they_do() -> None:
    for told, num_replays in run_ranks(2, _disagreement):
        assert "data-parallel ranks 0 and 1 were to share a micro-batch" in told or (
            "data-parallel ranks 1 and 0 were to share a micro-batch" in told
        )
        assert num_replays == 0
