# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Models of megatron-core with eager graphs of each context-parallel size, without a GPU.

Two or four processes; a replay runs the layers again, with their communication.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from banked_gpt import PER_TOKEN, SMALL, TOKENS_PER_RANK, TWO, SizedTraining, every_order, on_two
from ranks import run_ranks
from shared_documents import inputs_of, micro_batch_of, share_of
from tiny_gpt import ModelCase, initialize

from megatron.slipstream.context_parallel.limits import RankLimits


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
