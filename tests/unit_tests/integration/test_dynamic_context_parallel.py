# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Micro-batches in groups of changing size train like the same documents on one rank.

Two or four processes without a GPU; core attention gathers keys and values. Numbers are close and
not equal, since sums have another order.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from ranks import run_ranks
from shared_documents import (
    Sizes,
    build,
    difference,
    documents,
    train,
    with_changing_groups,
    with_gathering_attention,
)
from tiny_gpt import ModelCase, initialize

from megatron.slipstream.context_parallel.limits import RankLimits
from megatron.slipstream.integration.packed.context_parallel_groups import context_parallel_groups

TOLERANCE = 5e-6
"""Tolerances of the loss (about 5), and of gradients relative to the largest; in float32."""

TOKENS_PER_RANK = 32
LENGTHS = (100, 17, 61, 1, 29, 9, 32, 30, 20, 3)
FOUR = RankLimits(4, TOKENS_PER_RANK, 4)
TWO = RankLimits(2, TOKENS_PER_RANK, 4)
ONE = RankLimits(1, 4 * TOKENS_PER_RANK, 4)

ON_FOUR: list[Sizes] = [
    [(2, [2]), (1, [4]), (1, [6])],
    [(4, [0, 1])],
    [(1, [7]), (1, []), (2, [8, 9, 3])],
    [(4, [5])],
]
ON_TWO: list[Sizes] = [
    [(1, [4]), (1, [6])],
    [(2, [2])],
    [(1, [7]), (1, [])],
    [(2, [8, 9, 3])],
    [(1, [1]), (1, [5])],
]

DENSE = ModelCase(num_layers=1, seq_length=128, micro_batch_size=1)
MLA = ModelCase(kind="mla", num_layers=1, seq_length=128, micro_batch_size=1)
RECOMPUTED: dict[str, tuple[ModelCase, dict[str, Any]]] = {
    "dense": (DENSE, {}),
    "dense, core attention recomputed": (
        DENSE,
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    ),
    "dense, layers recomputed": (
        DENSE,
        {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
    ),
    "MLA": (MLA, {}),
    "MLA, projections recomputed": (
        MLA,
        {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]},
    ),
    "MLA, core attention recomputed": (
        MLA,
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    ),
}


def alone(sizes_of_micro_batches: list[Sizes]) -> list[Sizes]:
    """The same documents, each a micro-batch of one rank."""
    return [
        [(1, [number])]
        for sizes in sizes_of_micro_batches
        for _, numbers in sizes
        for number in numbers
    ]


def _differences(
    rank: int, num_ranks: int, port: int, limits: RankLimits, micro_batches: list[Sizes]
) -> dict[str, float]:
    """Results of the documents one by one, for each model of RECOMPUTED."""
    found = {}
    initialize(DENSE, rank, num_ranks, port)
    groups = context_parallel_groups(limits)
    for name, (case, overrides) in RECOMPUTED.items():
        texts = documents(LENGTHS, case.vocab_size)
        plain = build(case, lambda spec: spec)
        expected = train(plain, ONE, alone(micro_batches), texts)
        model = build(case, with_changing_groups, **overrides)
        # So that others have run before anything is recomputed.
        actual = train(model, limits, micro_batches, texts, groups, in_flight=3)
        found[name] = difference(expected, actual)
    return found


@functools.cache
def differences() -> list[dict[str, float]]:
    return run_ranks(4, _differences, FOUR, ON_FOUR)


@pytest.mark.parametrize("name", RECOMPUTED)
def test_documents_train_alike_in_groups_of_any_size(name: str) -> None:
    for found in differences():
        assert found[name] <= TOLERANCE


# --- megatron-core's own behaviour ----------------------------------------------------------------


def fused_rotation(
    t: torch.Tensor,
    cu_seqlens: torch.Tensor,
    freqs: torch.Tensor,
    cp_size: int = 1,
    cp_rank: int = 0,
    interleaved: bool = False,
) -> torch.Tensor:
    """Rotates packed sequences like Transformer Engine's kernel, which checks no sizes."""
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

    positions = torch.zeros(int(cu_seqlens[-1]), dtype=torch.int64)
    for begin, end in itertools.pairwise((cu_seqlens // cp_size).tolist()):
        half = (end - begin) // 2
        first = torch.arange(cp_rank * half, (cp_rank + 1) * half)
        last = torch.arange(-(cp_rank + 1) * half, -cp_rank * half) + (end - begin) * cp_size
        whole = torch.arange(end - begin)
        positions[begin:end] = whole if cp_size == 1 else torch.cat([first, last])
    mine = freqs[positions[: len(t)]]
    return _apply_rotary_pos_emb_bshd(t.unsqueeze(1), mine, interleaved).squeeze(1)


def _as_is(rank: int, num_ranks: int, port: int) -> dict[str, Any]:
    """With the group in the micro-batch: megatron-core's own attention, and ours."""
    from megatron.core.models.common.embeddings import rope_utils

    initialize(DENSE, rank, num_ranks, port)
    rope_utils.fused_apply_rotary_pos_emb_thd = fused_rotation
    groups = context_parallel_groups(TWO)
    texts = documents(LENGTHS, DENSE.vocab_size)
    found: dict[str, Any] = {}
    for whose, change in (("megatron's", with_gathering_attention), ("ours", with_changing_groups)):
        model = build(DENSE, change)
        for sizes in ON_TWO[:2]:
            expected = train(model, ONE, alone([sizes]), texts)
            model.config.apply_rope_fusion = True
            actual = train(model, TWO, [sizes], texts, groups)
            found[f"{whose}, {sizes[0][0]} ranks"] = difference(expected, actual)
            model.config.apply_rope_fusion = False
    try:
        train(build(DENSE, with_gathering_attention), TWO, ON_TWO[1:2], texts, groups)
    except RuntimeError as error:
        found["unfused"] = str(error)
    return found


def test_megatron_core_rotates_by_positions_of_the_static_group() -> None:
    for found in run_ranks(2, _as_is):
        for name in ("megatron's, 1 ranks", "ours, 1 ranks", "ours, 2 ranks"):
            assert found[name] <= TOLERANCE
        # If one of these fails, megatron-core reads the micro-batch: delete uses_batch_group().
        assert found["megatron's, 2 ranks"] > 100 * TOLERANCE
        assert "split_sizes" in found["unfused"]


def _static(rank: int, num_ranks: int, port: int) -> dict[str, Any]:
    """A static size of 2: in megatron-core, and with sizes 1 and 2 alternating."""
    from megatron.core import parallel_state

    initialize(DENSE, rank, num_ranks, port, context_parallel_size=2)
    groups = context_parallel_groups(TWO)
    static_group = parallel_state.get_context_parallel_group()
    found: dict[str, Any] = {}
    shared = [[(2, numbers)] for ((_, numbers),) in (ON_TWO[1], ON_TWO[3])]
    for case in (DENSE, MLA):
        texts = documents(LENGTHS, case.vocab_size)
        static = build(case, with_gathering_attention, context_parallel_size=2)
        dynamic = build(case, with_changing_groups, context_parallel_size=2)
        expected = train(static, TWO, shared, texts)
        found[f"{case.kind}, same sizes"] = difference(
            expected, train(dynamic, TWO, shared, texts, groups)
        )
        alike = train(build(case, with_changing_groups), ONE, alone(shared), texts, groups)
        found[f"{case.kind}, alone"] = difference(alike, expected)
        train(dynamic, TWO, ON_TWO, texts, groups, in_flight=2)
        # Afterwards it is restored, and works without a group.
        found[f"{case.kind}, afterwards"] = difference(expected, train(dynamic, TWO, shared, texts))
        found[f"{case.kind}, group is back"] = all(
            layer.self_attention.pg_collection.cp is static_group
            and layer.self_attention.config.context_parallel_size == 2
            for layer in dynamic.decoder.layers
        )
    return found


def test_dynamic_groups_train_as_the_static_group_and_leave_it_as_it_was() -> None:
    for found in run_ranks(2, _static):
        for kind in ("dense", "mla"):
            assert found.pop(f"{kind}, group is back")
        assert max(found.values()) <= TOLERANCE, found


# --- Transformer Engine's core attention ----------------------------------------------------------


class StickyCoreAttention(torch.nn.Module):
    """Keeps the last group that it was given, as megatron-core's class for Transformer Engine."""

    cp_stream: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.set_context_parallel_group("static", [0, 1], None, "p2p")
        self.used: list[Any] = []

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any, cp_stream: Any, cp_comm_type: str = "p2p"
    ) -> None:
        self.cp_group, self.cp_global_ranks = cp_group, cp_global_ranks
        self.cp_stream, self.cp_comm_type = cp_stream, cp_comm_type

    def forward(self, query: Any, packed_seq_params: Any = None) -> Any:
        if packed_seq_params is not None and packed_seq_params.cp_group is not None:
            stream = StickyCoreAttention.cp_stream
            self.set_context_parallel_group(packed_seq_params.cp_group, [0], stream, "p2p")
        self.used.append((self.cp_group, self.cp_stream))
        if query is None:
            raise RuntimeError("no query")
        return query


def test_core_attention_has_its_static_group_between_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron.slipstream.integration.packed.batch_group import restores_group

    streams = iter(["a stream"])  # one for all
    monkeypatch.setattr(torch.cuda, "Stream", lambda: next(streams))
    monkeypatch.setattr(StickyCoreAttention, "cp_stream", None)
    forward = restores_group(StickyCoreAttention.forward)
    attention = type("Restored", (StickyCoreAttention,), {"forward": forward})()
    static = ("static", [0, 1], None, "p2p")

    def now() -> tuple[Any, ...]:
        return (
            attention.cp_group,
            attention.cp_global_ranks,
            attention.cp_stream,
            attention.cp_comm_type,
        )

    assert attention(1, packed_seq_params=PackedSeqParams(cp_group="other")) == 1
    assert now() == static
    with pytest.raises(RuntimeError, match="no query"):
        attention(None, packed_seq_params=PackedSeqParams(cp_group="third"))
    assert now() == static
    assert attention(2, packed_seq_params=PackedSeqParams()) == 2
    assert attention(3) == 3
    assert attention.used == [
        ("other", "a stream"),
        ("third", "a stream"),
        ("static", None),
        ("static", None),
    ]


# --- process groups -------------------------------------------------------------------------------


def _groups(
    rank: int, num_ranks: int, port: int, options: dict[str, Any], limits: RankLimits
) -> dict[str, Any]:
    from megatron.core import parallel_state

    initialize(DENSE, rank, num_ranks, port)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(**options)
    groups = context_parallel_groups(limits)
    assert context_parallel_groups(limits) is groups
    of_megatron = {
        "everyone": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "static": parallel_state.get_context_parallel_group(),
        **parallel_state._HYBRID_DP_CP_GROUPS,
    }
    return {
        "rank": groups.everyone.rank(),
        "ranks": {
            size: torch.distributed.get_process_group_ranks(group)
            for size, group in groups.of_size.items()
        },
        "of megatron": {
            size: [name for name, other in of_megatron.items() if other is group]
            for size, group in groups.of_size.items()
        },
    }


@pytest.mark.parametrize(
    "options, of_megatron",
    [
        ({}, {1: ["static"], 2: [], 4: ["everyone"]}),
        ({"context_parallel_size": 2}, {1: [], 2: ["static"], 4: ["everyone"]}),
        ({"hybrid_context_parallel": True}, {1: ["static"], 2: [2], 4: ["everyone"]}),
    ],
    ids=str,
)
def test_ranks_have_a_group_of_each_size(
    options: dict[str, Any], of_megatron: dict[int, list[Any]]
) -> None:
    for rank, found in enumerate(run_ranks(4, _groups, options, FOUR)):
        first = rank - rank % 2
        assert found["ranks"] == {1: [rank], 2: [first, first + 1], 4: [0, 1, 2, 3]}
        assert found["rank"] == rank
        assert found["of megatron"] == of_megatron


def test_every_stage_has_groups_of_its_own() -> None:
    options = {"pipeline_model_parallel_size": 2}
    for rank, found in enumerate(run_ranks(4, _groups, options, TWO)):
        first = rank - rank % 2
        assert found["ranks"] == {1: [rank], 2: [first, first + 1]}
        assert found["rank"] == rank % 2


def test_limits_of_another_number_of_ranks_are_refused() -> None:
    with pytest.raises(AssertionError, match="ValueError: dynamic_context_parallel is not .*; set"):
        run_ranks(2, _groups, {}, FOUR)


# --- agreement ------------------------------------------------------------------------------------


def _disagree(rank: int, num_ranks: int, port: int) -> list[str]:
    from megatron.slipstream.integration.packed.context_parallel_groups import (
        check_agreement,
        context_parallel_groups,
    )

    initialize(DENSE, rank, num_ranks, port)
    groups = context_parallel_groups(FOUR)
    said = []
    for sizes, documents_of_ranks in (
        ([2, 2, 1, 1], [5, 5, 6, 7]),
        ([4, 4, 4, 4], [5, 5, 5, 5]),
        ([2, 2, 2, 1], [5, 5, 6, 7]),
        ([4, 4, 2, 2], [5, 5, 5, 5]),
        ([2, 2, 1, 1], [5, 6, 7, 8]),
    ):
        try:
            check_agreement(groups, sizes[rank], documents_of_ranks[rank])
        except RuntimeError as error:
            said.append(str(error))
        else:
            said.append("")
    return said


def test_ranks_that_disagree_are_told_instead_of_waiting() -> None:
    first, *others = run_ranks(4, _disagree)
    assert all(said == first for said in others)
    assert first[:2] == ["", ""]
    assert "ranks 2 and 3 " in first[2]
    assert "different sizes (2 and 1 ranks)" in first[2]
    assert "ranks 0 and 2 " in first[3]
    assert "ranks 0 and 1 " in first[4]
    assert "different documents" in first[4]


# --- specs ----------------------------------------------------------------------------------------


def test_models_are_built_from_changed_specs() -> None:
    from types import SimpleNamespace

    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from megatron.slipstream.integration.packed import dynamic_context_parallel
    from megatron.slipstream.integration.seam.specs import change_model_spec

    def attention_of(spec: Any) -> Any:
        return spec.submodules.self_attention.module

    for latent, kind in ((False, "DynamicSelfAttention"), (True, "DynamicMLASelfAttention")):
        given = get_gpt_layer_local_spec(multi_latent_attention=latent)
        for spec in (given, lambda config, given=given: given):
            config = SimpleNamespace(transformer_layer_spec=spec)
            change_model_spec(config, dynamic_context_parallel.with_dynamic_context_parallelism)
            changed = config.transformer_layer_spec(None)
            assert attention_of(changed).__name__ == kind
        assert attention_of(given).__name__ == kind.removeprefix("Dynamic")
    stack = SimpleNamespace(hybrid_stack_spec=given)
    change_model_spec(stack, dynamic_context_parallel.with_dynamic_context_parallelism)
    assert attention_of(stack.hybrid_stack_spec).__name__ == "DynamicMLASelfAttention"
