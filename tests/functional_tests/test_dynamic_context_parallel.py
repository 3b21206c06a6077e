# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Dynamic context parallelism of whole models, with and without graphs of each size.

Each size gives the same bits as megatron-core with that static size, in any order of sizes. Between
sizes, sums have another order. Graphs of each size give the same bits as eager runs. On GPUs, in
bfloat16, through Transformer Engine's attention and NCCL; without, in float32, in processes whose
core attention gathers keys and values, and with replays that run the layers again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Optional

import pytest
from banked_gpt import (
    PER_TOKEN,
    SHORT_LENGTHS,
    SMALL,
    Banked,
    compare_bank,
    compare_layer_bank,
    dropless,
    every_order,
    on_four,
    on_two,
    random_sizes,
)
from ranks import TIMEOUT_S, run_ranks
from replayed_gpt import DROP_AND_PAD, LayersReplayed
from shared_documents import Found, Setting, Sizes, compare_sizes, losses_of_stages
from timed_backend import take_times_on_cpu
from tiny_gpt import DENSE_MODULES, MOE_MODULES, ModelCase, use_gpu

from megatron.slipstream.context_parallel.limits import RankLimits
from megatron.slipstream.fine_grained_activation_offload.step_clock import NUM_TIMED
from megatron.slipstream.graphs.chunks import NUM_TIMED_CAPTURES

# Up to two minutes with exclusive use of two GPUs. Longer than the timeout of run_ranks, whose
# error names the late rank.
pytestmark = pytest.mark.timeout(TIMEOUT_S + 60)

TOLERANCES = {True: (0.01, 0.05), False: (5e-6, 5e-6)}
"""With and without a GPU: of the mean loss, which is about 7 or 5, and of all gradients together,
relative to their norm. With the positions of another group the difference is as large as the
gradient."""

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

# No length is a multiple of the alignment of groups, and one is a single token. With room for 6 and
# a buffer of 2048 tokens, cuDNN's deterministic backward pass still finds its workspace.
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
"""Micro-batches by number of ranks and size; the same documents for every size."""


DROPOUT = {**PER_TOKEN, "hidden_dropout": 0.1}
RECOMPUTED = {
    **PER_TOKEN,
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
SHORT: dict[int, dict[int, Sizes]] = {
    2: {1: [(1, [4]), (1, [6])], 2: [(2, [4, 6])]},
    4: {
        1: [(1, [4]), (1, [6]), (1, [7]), (1, [9])],
        2: [(2, [4, 6]), (2, [7, 9])],
        4: [(4, [4, 6, 7, 9])],
    },
}


def setting_of(name: str, num_ranks: int) -> Setting:
    if name.startswith("small"):
        case = ModelCase(name.split()[1], **SMALL, overrides=PER_TOKEN)
        if case.kind == "hybrid":
            case = replace(case, pattern=name.split()[2], num_layers=2)
        return Setting(case, RankLimits(num_ranks, 32, 4), SHORT_LENGTHS, SHORT[num_ranks])
    limits = RankLimits(num_ranks, TOKENS_PER_RANK, MAX_SEQUENCES)
    return Setting(CASES[name], limits, LENGTHS, ON_RANKS[num_ranks])


@functools.cache
def found_on(num_ranks: int, name: str) -> list[Found]:
    """Results of each rank; the processes of a case start once."""
    return run_ranks(num_ranks, compare_sizes, setting_of(name, num_ranks))


RANKS_AND_CASES = [
    pytest.param(4, "small dense", id="4 ranks, small dense"),
    *(
        pytest.param(2, f"small {kind}", id=f"2 ranks, small {kind}")
        for kind in ("mla", "hybrid *-", "hybrid +-")
    ),
    *(pytest.param(2, name, marks=pytest.mark.gpus2, id=f"2 ranks, {name}") for name in CASES),
    pytest.param(4, "dense", marks=pytest.mark.gpus4, id="4 ranks, dense"),
    pytest.param(4, "MLA", marks=pytest.mark.gpus4, id="4 ranks, MLA"),
]


@pytest.mark.parametrize("num_ranks, name", RANKS_AND_CASES)
def test_one_size_throughout_is_the_static_size_bit_by_bit(num_ranks: int, name: str) -> None:
    for found in found_on(num_ranks, name):
        assert found.change_from_static == dict.fromkeys(setting_of(name, num_ranks).micro_batches)


@pytest.mark.parametrize("num_ranks, name", RANKS_AND_CASES)
def test_what_ran_before_changes_no_bit(num_ranks: int, name: str) -> None:
    for found in found_on(num_ranks, name):
        assert len(found.change_by_order) == {2: 4, 4: 12}[num_ranks]
        assert set(found.change_by_order.values()) == {None}, found.change_by_order


@pytest.mark.parametrize("num_ranks, name", RANKS_AND_CASES)
def test_sizes_differ_by_rounding_only(num_ranks: int, name: str) -> None:
    for found in found_on(num_ranks, name):
        print(found.difference_by_size)
        for differences in found.difference_by_size.values():
            pairs = zip(differences, TOLERANCES[use_gpu()], strict=True)
            assert all(difference <= most for difference, most in pairs)
        assert all(max(found.difference_by_size[size]) > 0 for size in (2, num_ranks))


@pytest.mark.parametrize(
    "name",
    ["small dense", *(pytest.param(name, marks=pytest.mark.gpus4) for name in ("dense", "MLA"))],
)
def test_two_stages_have_the_losses_of_one(name: str) -> None:
    one = setting_of(name, 2)
    one = replace(one, case=replace(one.case, num_layers=2))
    two = replace(one, case=replace(one.case, pp=2))
    sizes = (2, 1, 1, 2, 1)
    expected = run_ranks(2, losses_of_stages, one, sizes)
    assert run_ranks(4, losses_of_stages, two, sizes) == [[], [], *expected]


# Graphs of each size.

FUSED = "MLA, yarn, fused"
"""The only rotation of multi-latent attention that does not read lengths from the GPU."""
SYNC_FREE = replace(
    DENSE,
    kind="moe",
    sync_free_experts=True,
    overrides={**DENSE.overrides, "moe_permute_fusion": True, "hidden_dropout": 0.1},
)
GRAPHED: dict[str, ModelCase] = {
    "dense": replace(DENSE, overrides={**DENSE.overrides, "hidden_dropout": 0.1}),
    "dense, core attention recomputed": CASES["dense, core attention recomputed"],
    FUSED: CASES[FUSED],
    "experts": replace(
        DENSE,
        kind="moe",
        overrides={**DENSE.overrides, **DROP_AND_PAD, "moe_permute_fusion": True},
    ),
    "sync-free experts": SYNC_FREE,
    # Slots of this factor hold any routing, also of padding, which is one token many times.
    "sync-free experts on two ranks": replace(SYNC_FREE, ep=2, sync_free_capacity_factor=2.0),
    "hybrid": replace(SYNC_FREE, kind="hybrid", num_layers=4),
}
NUM_STEPS = 20
FLAT_BYTES = 1 << 20
"""Tolerance of the memory of tensors in the second half of a training."""


def check_bank(
    num_ranks: int,
    case: ModelCase,
    steps: Sequence[Sequence[int]],
    wrapper: Optional[dict[str, Any]] = None,
    offload_modules: Sequence[str] = (),
    backend: str = "auto",
) -> list[Banked]:
    """Train on ``num_ranks`` ranks; those of a tensor-parallel or pipeline group share data."""
    num_sharing = num_ranks // (case.tp * case.pp)
    setting = SETTINGS[use_gpu(), num_sharing](case)
    ranks = run_ranks(num_ranks, compare_bank, setting, steps, wrapper, offload_modules, backend)
    for found in ranks:
        print(*found.figures, sep="\n")
        assert found.difference is None
        assert found.num_other == 0
        assert len(found.figures) == (case.vpp or 1) * num_sharing.bit_length()
        assert (min(found.moved_bytes.values(), default=0) > 0) == bool(offload_modules)
        assert found.num_poisoned > 0
        half = found.allocated_bytes[len(found.allocated_bytes) // 2 :]
        assert not half or max(half) - min(half) <= FLAT_BYTES
    for size in setting.limits.sizes:
        replays = [found.num_replays[size] for found in ranks]
        assert max(replays) >= (case.vpp or 1) * sum(size in sizes for sizes in steps[1:])
        assert min(replays) > 0 or not use_gpu()
    return ranks


SETTINGS: dict[tuple[bool, int], Callable[[ModelCase], Setting]] = {
    **{
        (True, num_ranks): partial(
            Setting,
            limits=RankLimits(num_ranks, TOKENS_PER_RANK, MAX_SEQUENCES),
            lengths=LENGTHS,
            micro_batches=ON_RANKS[num_ranks],
        )
        for num_ranks in ON_RANKS
    },
    (False, 2): on_two,
    (False, 4): on_four,
}
"""The micro-batches of a training with graphs, with and without a GPU, by ranks that share them."""
ON_CPU: dict[str, tuple[int, ModelCase, dict[str, Any] | None]] = {
    "MLA, layers recomputed": (2, ModelCase("mla", **SMALL, overrides=RECOMPUTED), None),
    "experts on both ranks, reduction overlapped": (
        2,
        ModelCase("moe", ep=2, **SMALL, overrides={**PER_TOKEN, **DROP_AND_PAD}),
        {"overlap_grad_reduce": True},
    ),
    # Padding is one token many times: up to half of the rows are for the same expert.
    "dropless experts on ranks of all sizes": (
        4,
        ModelCase("moe", ep=4, **dropless(2.0), **SMALL, overrides=DROPOUT),
        None,
    ),
    "hybrid": (
        2,
        ModelCase(
            "hybrid", ep=2, **dropless(1.8), **{**SMALL, "num_layers": 4}, overrides=PER_TOKEN
        ),
        None,
    ),
    "TP2": (4, ModelCase(tp=2, **SMALL, overrides=DROPOUT), None),
    "PP2 VPP2": (
        4,
        ModelCase(pp=2, vpp=2, **{**SMALL, "num_layers": 4}, overrides=PER_TOKEN),
        None,
    ),
}


@pytest.mark.parametrize("name", ON_CPU)
def test_sizes_in_every_order_train_as_without_graphs(name: str) -> None:
    num_ranks, case, wrapper = ON_CPU[name]
    num_sharing = num_ranks // (case.tp * case.pp)
    sizes, num_steps = ((1, 2, 4), 7) if num_sharing == 4 else ((1, 2), 4)
    check_bank(num_ranks, case, every_order(sizes, num_steps), wrapper)


def test_any_number_of_micro_batches_of_any_sizes() -> None:
    case = ModelCase(pp=2, **{**SMALL, "num_layers": 2}, overrides=DROPOUT)
    check_bank(4, case, random_sizes((1, 2), 5, most=3))


MOVING: dict[str, tuple[int, ModelCase, Sequence[str]]] = {
    "dense": (
        4,
        ModelCase(pp=2, **{**SMALL, "num_layers": 4}, overrides=PER_TOKEN),
        DENSE_MODULES,
    ),
    "hybrid": (
        2,
        ModelCase(
            "hybrid", ep=2, **dropless(1.8), **{**SMALL, "num_layers": 6}, overrides=PER_TOKEN
        ),
        MOE_MODULES,
    ),
}


@pytest.mark.parametrize("name", MOVING)
def test_activations_move_inside_the_small_graphs_of_each_size(name: str) -> None:
    num_ranks, case, modules = MOVING[name]
    for found in check_bank(num_ranks, case, every_order((1, 2), 3), None, modules, "cpu-lazy"):
        # Sizes share the host memory of a slot.
        assert found.host_bytes[2] > found.moved_bytes[2]
        more = max(0, found.moved_bytes[1] - found.moved_bytes[2])
        assert found.host_bytes[1] <= 4 * more


def test_ranks_plan_from_the_times_of_their_own_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays of a size that are timed wait for one another, as passes do."""
    take_times_on_cpu(monkeypatch)
    layers = {**SMALL, "num_layers": 2}
    case = ModelCase("moe", ep=2, **dropless(2.0), **layers, overrides=PER_TOKEN)
    modules = ("core_attn", "expert_fc1", "moe_act")
    for found in check_bank(2, case, every_order((1, 2), 2), None, modules, "cpu"):
        assert found.num_timed == 2 * NUM_TIMED_CAPTURES * (1 + NUM_TIMED)


@pytest.mark.gpus2
@pytest.mark.parametrize("name", GRAPHED)
def test_graphs_of_two_sizes_train_as_without(name: str) -> None:
    check_bank(2, GRAPHED[name], every_order((1, 2), NUM_STEPS))


@pytest.mark.gpus2
@pytest.mark.parametrize("name", ["dense", FUSED, "sync-free experts on two ranks", "hybrid"])
def test_activations_move_inside_the_graphs_of_each_size(name: str) -> None:
    case = replace(GRAPHED[name], num_layers=8)
    steps = every_order((1, 2), 10)
    modules = MOE_MODULES if case.has_experts else DENSE_MODULES
    for found in check_bank(2, case, steps, offload_modules=modules):
        assert min(found.moved_bytes.values()) > 0
        assert found.host_bytes[1] < found.host_bytes[2]  # most of it is shared


@pytest.mark.gpus2
def test_gradients_are_reduced_while_graphs_of_each_size_run() -> None:
    check_bank(2, GRAPHED["dense"], every_order((1, 2), 10), {"overlap_grad_reduce": True})


@pytest.mark.gpus2
@pytest.mark.parametrize("name", ["dense", FUSED])
def test_graphs_under_a_hundred_steps_of_random_sizes(name: str) -> None:
    check_bank(2, GRAPHED[name], random_sizes((1, 2), 100))


@pytest.mark.gpus4
@pytest.mark.parametrize("name", GRAPHED)
def test_graphs_of_three_sizes_train_as_without(name: str) -> None:
    check_bank(4, GRAPHED[name], every_order((1, 2, 4), NUM_STEPS))


@pytest.mark.gpus4
@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}], ids=str)
@pytest.mark.parametrize("name", ["dense", FUSED])
def test_graphs_of_each_size_in_other_layouts(name: str, layout: dict[str, int]) -> None:
    case = ModelCase(**{**vars(GRAPHED[name]), **layout})
    check_bank(4, case, random_sizes((1, 2), 20))


@pytest.mark.gpus4
def test_three_sizes_under_a_hundred_steps_of_random_sizes() -> None:
    check_bank(4, GRAPHED["dense"], random_sizes((1, 2, 4), 100))


# Graphs of layers, of each size.

MAX_MEMORY_OF_SIZES = 1.15
"""Device memory of the graphs of all sizes, relative to that of the largest size alone."""
DROPLESS = replace(DENSE, kind="moe", overrides={**DENSE.overrides, "moe_permute_fusion": True})
LAYERS: dict[str, tuple[ModelCase, tuple[str, ...]]] = {
    "dense": (GRAPHED["dense"], ()),
    "dense, attention": (GRAPHED["dense"], ("attn",)),
    FUSED: (GRAPHED[FUSED], ()),
    "experts": (DROPLESS, ("attn", "moe_router")),
    "hybrid": (replace(DROPLESS, kind="hybrid", num_layers=4), ("attn", "mlp", "moe_router")),
}


def check_layers(
    num_ranks: int,
    name: str,
    steps: Sequence[Sequence[int]],
    offload_modules: Sequence[str] = (),
    **changes: Any,
) -> list[LayersReplayed]:
    case, scope = LAYERS[name]
    case = ModelCase(**{**vars(case), **changes})
    num_sharing = num_ranks // (case.tp * case.pp)
    limits = RankLimits(num_sharing, TOKENS_PER_RANK, MAX_SEQUENCES)
    setting = Setting(case, limits, LENGTHS, ON_RANKS[num_sharing])
    ranks = run_ranks(num_ranks, compare_layer_bank, setting, scope, steps, offload_modules)
    for found in ranks:
        print(found.graph_bytes)
        assert found.difference is None
        assert not found.were_too_few
        assert (found.moved_bytes > 0) == bool(offload_modules)
        half = found.allocated_bytes[len(found.allocated_bytes) // 2 :]
        assert max(half) - min(half) <= FLAT_BYTES
        together = found.graph_bytes[min(found.graph_bytes)]
        assert together <= MAX_MEMORY_OF_SIZES * found.graph_bytes[max(found.graph_bytes)]
    return ranks


@pytest.mark.gpus2
@pytest.mark.parametrize("name", LAYERS)
def test_layer_graphs_of_two_sizes_train_as_without(name: str) -> None:
    for found in check_layers(2, name, every_order((1, 2), NUM_STEPS)):
        assert found.num_poisoned > 0


@pytest.mark.gpus2
@pytest.mark.parametrize("name", ["dense", "experts"])
def test_activations_move_inside_the_layer_graphs_of_each_size(name: str) -> None:
    check_layers(2, name, every_order((1, 2), 10), DENSE_MODULES, num_layers=6)


@pytest.mark.gpus2
def test_layer_graphs_under_a_hundred_steps_of_random_sizes() -> None:
    check_layers(2, "experts", random_sizes((1, 2), 100))


@pytest.mark.gpus4
@pytest.mark.parametrize("name", ["dense", "experts"])
def test_layer_graphs_of_three_sizes_train_as_without(name: str) -> None:
    check_layers(4, name, every_order((1, 2, 4), NUM_STEPS))


@pytest.mark.gpus4
@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}], ids=str)
def test_layer_graphs_of_each_size_in_other_layouts(layout: dict[str, int]) -> None:
    check_layers(4, "dense", random_sizes((1, 2), 20), **layout)
