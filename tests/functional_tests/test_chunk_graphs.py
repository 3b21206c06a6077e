# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Chunk graphs of real models give the losses, gradients, randomness and metrics of eager runs."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any, Optional

import pytest
from fp8_recipes import RECIPES, skip_without_recipe
from gpu_models import FUSED_ROPE, MLA_SIZES, on_gpu
from model_case import GDN_MODULES, MAMBA_MODULES, MLP_MODULES
from ranks import TIMEOUT_S, run_ranks
from replayed_gpt import (
    DROP_AND_PAD,
    EXPERT_BIAS,
    Replayed,
    compare,
    hybrid_and_gpt,
    replay_again,
    train_and_leave,
)
from state_space_layers import GATED_DELTA_NET, LARGE, MAMBA
from timed_backend import take_times_on_cpu
from tiny_gpt import DENSE_MODULES, MOE_MODULES, ModelCase

from megatron.slipstream.fine_grained_activation_offload.step_clock import NUM_TIMED
from megatron.slipstream.graphs.chunks import NUM_TIMED_CAPTURES

DROPOUT = {"attention_dropout": 0.1, "hidden_dropout": 0.1}
FURTHER_TOKEN = {"mtp_num_layers": 1}
"""Predicted by layers that run eagerly, beside the graphs."""
FP8 = RECIPES["tensorwise"]
"""Without a GPU the quantization is simulated."""
ONE_RANK = {
    "MLA": ModelCase("mla"),
    "packed experts, dropless": ModelCase(
        "moe", sync_free_experts=True, is_packed=True, micro_batch_size=1
    ),
    "norms recomputed": ModelCase(
        "dense",
        overrides={
            "recompute_granularity": "selective",
            "recompute_modules": ["layernorm"],
            **DROPOUT,
        },
    ),
    "attention recomputed": ModelCase(
        "dense",
        overrides={
            "recompute_granularity": "selective",
            "recompute_modules": ["core_attn"],
            "hidden_dropout": 0.1,
        },
    ),
    "MLPs in tiles": ModelCase("dense", mlp_sequence_tiles=3, loss_sequence_tiles=3),
    "dropless experts in tiles": ModelCase("moe", sync_free_experts=True, mlp_sequence_tiles=3),
    "packed, MLA": ModelCase("mla", is_packed=True, micro_batch_size=1),
    "further tokens": ModelCase("dense", overrides={**DROPOUT, **FURTHER_TOKEN}),
    "packed hybrid, further tokens": ModelCase(
        "hybrid",
        pattern="*-*-/*-",
        is_packed=True,
        micro_batch_size=1,
        overrides={**DROPOUT, **FURTHER_TOKEN},
    ),
    "packed hybrid, MLA, dropless": ModelCase(
        "hybrid", pattern="+-+E", sync_free_experts=True, is_packed=True, micro_batch_size=1
    ),
}
PIPELINES = {
    "PP2": (ModelCase("dense", pp=2, overrides=DROPOUT), (3, 2, 1, 4)),
    "PP2 VPP2": (ModelCase("dense", pp=2, vpp=2, overrides=DROPOUT), (2, 2, 4)),
    "PP2 VPP2, experts": (ModelCase("moe", pp=2, vpp=2, overrides=DROP_AND_PAD), (2, 2, 4)),
    "PP2, FP8": (ModelCase("dense", pp=2, overrides={**FP8, **DROPOUT}), (3, 2, 1, 4)),
    "PP2 VPP2, packed experts": (
        ModelCase(
            "moe",
            pp=2,
            vpp=2,
            is_packed=True,
            micro_batch_size=1,
            overrides={**DROP_AND_PAD, **EXPERT_BIAS, "hidden_dropout": 0.1},
        ),
        (2, 2, 4),
    ),
    "PP2, hybrid": (
        ModelCase(
            "hybrid",
            pattern="*-*E|*-*E/*E",
            num_layers=8,
            pp=2,
            overrides={**DROP_AND_PAD, **EXPERT_BIAS, **FURTHER_TOKEN},
        ),
        (3, 2, 1),
    ),
    "PP2, Mamba and gated delta nets": (
        ModelCase(
            "hybrid",
            pattern="*GM-|*GM-",
            num_layers=8,
            pp=2,
            overrides={**GATED_DELTA_NET, **MAMBA, **DROPOUT},
        ),
        (3, 2, 1),
    ),
    "PP2 VPP2, hybrid": (
        ModelCase(
            "hybrid",
            pattern="*-*E|*E*-*E|*-*E|*E*-",
            num_layers=18,
            pp=2,
            vpp=2,
            sync_free_experts=True,
            overrides=EXPERT_BIAS,
        ),
        (2, 2, 4),
    ),
}


def check(
    num_ranks: int,
    case: ModelCase,
    counts: Sequence[int],
    wrapper: Optional[dict[str, Any]] = None,
    offload_modules: Sequence[str] = (),
    backend: str = "auto",
) -> list[Replayed]:
    results = run_ranks(
        num_ranks, compare, case, tuple(counts), wrapper, tuple(offload_modules), backend
    )
    assert [result.difference for result in results] == [None] * num_ranks
    for result in results:
        print(*result.figures, sep="\n")
        assert result.num_replays == (sum(counts[1:]),) * (case.vpp or 1)
        assert result.num_poisoned >= sum(counts[1:])
        assert (result.num_experts_metrics > 0) == case.has_experts
    return results


@pytest.mark.parametrize("case", ONE_RANK.values(), ids=ONE_RANK)
def test_one_rank(case: ModelCase) -> None:
    num_layers = case.num_layers if case.kind == "hybrid" else 2
    check(1, dataclasses.replace(case, num_layers=num_layers), (1, 2, 1))


OFFLOADED = (
    *("PP2", "PP2 VPP2, experts", "PP2, FP8"),
    *("PP2, hybrid", "PP2 VPP2, hybrid", "PP2, Mamba and gated delta nets"),
)


@pytest.mark.parametrize("name", [name for name in PIPELINES if name not in OFFLOADED])
def test_pipelines(name: str) -> None:
    check(2, *PIPELINES[name])


@pytest.mark.parametrize("name", OFFLOADED)
def test_offloading_inside_the_graphs(name: str) -> None:
    case, counts = PIPELINES[name]
    # The last layer of a chunk stays.
    case = dataclasses.replace(case, num_layers=max(case.num_layers, 4 * (case.vpp or 1)))
    modules = MOE_MODULES if case.has_experts else DENSE_MODULES + MLP_MODULES
    if set("GM") & set(case.pattern):
        modules = GDN_MODULES + MAMBA_MODULES
    for rank, result in enumerate(check(2, case, counts[:3], None, modules, "cpu-lazy")):
        assert len(result.moved_bytes) == (case.vpp or 1)
        assert min(result.moved_bytes) > 0
        assert result.host_bytes[0] > sum(result.moved_bytes)
        assert result.host_bytes[1] == 0
        # Host memory of the iterations before the capture is not held in addition, but that of the
        # layers beside the graphs is.
        predicts_more = "mtp_num_layers" in case.overrides and rank == 1
        assert (result.eager_host_bytes > 0) == predicts_more


SAME_TRANSFORMERS = {
    "dense": ModelCase(num_layers=2, overrides=DROPOUT),
    "experts": ModelCase("moe", num_layers=2, overrides={**DROP_AND_PAD, **EXPERT_BIAS}),
}


@pytest.mark.parametrize("case", SAME_TRANSFORMERS.values(), ids=SAME_TRANSFORMERS)
def test_a_hybrid_model_trains_like_the_same_gpt_model(case: ModelCase) -> None:
    assert run_ranks(1, hybrid_and_gpt, case, (1, 2, 1)) == [[None, None]]


def test_all_slots_together_keep_to_the_limit_of_host_memory() -> None:
    case = ModelCase("dense", pp=2, vpp=2, num_layers=8)
    arguments = (case, (2, 2), None, DENSE_MODULES, "cpu")
    free = run_ranks(2, compare, *arguments)
    limit_bytes = max(rank.host_bytes[0] + rank.eager_host_bytes for rank in free) * 2 // 3
    for rank in run_ranks(2, compare, *arguments, limit_bytes):
        assert rank.difference is None
        assert sum(rank.moved_bytes) > 0
        assert rank.host_bytes[0] + rank.eager_host_bytes <= limit_bytes


def test_a_chunk_is_replayed_once_until_its_graphs_are_closed() -> None:
    ((errors, states),) = run_ranks(1, replay_again, ModelCase("dense"))
    assert len(errors) == 2
    for error in errors:
        assert error.startswith("replay_chunks() is not supported with a model chunk that it")
        assert error.endswith("give each chunk once, or call close_graphs() first")
    # Twice at once, once, again; closed; and once more.
    assert states == [True, False, False, True, False]


def test_two_data_parallel_ranks() -> None:
    case = ModelCase("dense", num_layers=2, overrides=DROPOUT)
    check(2, case, (1, 2, 1), {"overlap_grad_reduce": True})


def test_tensor_parallel_ranks() -> None:
    check(2, ModelCase("dense", num_layers=2, tp=2, overrides=DROPOUT), (1, 2))


@pytest.mark.parametrize("is_dropless", [False, True], ids=["drop and pad", "dropless"])
def test_offloading_inside_the_graphs_of_expert_parallel_ranks(is_dropless: bool) -> None:
    overrides = {**EXPERT_BIAS, "hidden_dropout": 0.1, **({} if is_dropless else DROP_AND_PAD)}
    case = ModelCase("moe", ep=2, num_layers=2, sync_free_experts=is_dropless, overrides=overrides)
    wrapper = {"overlap_grad_reduce": not is_dropless}
    for result in check(2, case, (1, 2, 1), wrapper, MOE_MODULES, "cpu-lazy"):
        assert min(result.moved_bytes) > 0


def test_ranks_plan_from_the_times_of_their_own_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timed graphs exchange tokens too, so all ranks replay them equally often."""
    take_times_on_cpu(monkeypatch)
    case = ModelCase("moe", sync_free_experts=True, pp=2, vpp=2, num_layers=8)
    modules = ("core_attn", "expert_fc1", "moe_act")
    for result in check(2, case, (2, 2), None, modules, "cpu"):
        assert result.num_timed == 2 * NUM_TIMED_CAPTURES * (1 + NUM_TIMED)
        assert min(result.moved_bytes) > 0


# With a GPU: CUDA graphs of Transformer Engine's modules.

EXPERTS = {**DROP_AND_PAD, "moe_permute_fusion": True}
DROPLESS = {"moe_permute_fusion": True}
BLOCKS = RECIPES["blockwise"]
UNEVEN_EXPERTS = {**EXPERTS, "moe_expert_capacity_factor": 1.1}
"""564 tokens for each, which layers in FP8 pad to 576."""


PACKED = {
    "dense": on_gpu(ModelCase(is_packed=True), hidden_dropout=0.1, **FUSED_ROPE),
    "MLA": on_gpu(ModelCase("mla", is_packed=True), **MLA_SIZES, rope_type="yarn", **FUSED_ROPE),
    "experts": on_gpu(ModelCase("moe", is_packed=True), **EXPERTS, **EXPERT_BIAS, **FUSED_ROPE),
    "dropless experts": on_gpu(
        ModelCase("moe", sync_free_experts=True, is_packed=True),
        **DROPLESS,
        **EXPERT_BIAS,
        **FUSED_ROPE,
    ),
}
ON_GPU = {
    **{f"packed, {name}": case for name, case in PACKED.items()},
    "dense": on_gpu(ModelCase(), **DROPOUT),
    "MLA": on_gpu(ModelCase("mla"), **MLA_SIZES),
    "experts, drop and pad": on_gpu(ModelCase("moe"), **EXPERTS),
    "expert bias": on_gpu(ModelCase("moe"), **EXPERTS, **EXPERT_BIAS),
    "experts, dropless": on_gpu(ModelCase("moe", sync_free_experts=True), **DROPLESS),
    "hybrid, dense": on_gpu(ModelCase("hybrid", pattern="*-"), **DROPOUT),
    "further tokens": on_gpu(ONE_RANK["further tokens"]),
    "hybrid, drop and pad": on_gpu(
        ModelCase("hybrid", pattern="*-*E/*E"),
        **EXPERTS,
        **EXPERT_BIAS,
        **FURTHER_TOKEN,
        **DROPOUT,
    ),
    "hybrid, MLA": on_gpu(ModelCase("hybrid", pattern="+-"), **MLA_SIZES),
    "hybrid, Mamba and gated delta nets": on_gpu(
        ModelCase("hybrid", pattern="*GM-"), **LARGE, **DROPOUT
    ),
    "hybrid, dropless": on_gpu(ModelCase("hybrid", sync_free_experts=True), **DROPLESS),
    "norms recomputed": on_gpu(ONE_RANK["norms recomputed"], **DROPOUT),
    "attention recomputed": on_gpu(ONE_RANK["attention recomputed"]),
    "MLPs in tiles": on_gpu(ONE_RANK["MLPs in tiles"], **DROPOUT),
    "dropless experts in tiles": on_gpu(ONE_RANK["dropless experts in tiles"], **DROPLESS),
    "FP8": on_gpu(ModelCase(), **FP8, **DROPOUT),
    "FP8, blocks": on_gpu(ModelCase(), **BLOCKS, **DROPOUT),
    "FP8, experts": on_gpu(ModelCase("moe"), **FP8, **EXPERTS),
    "FP8, blocks, experts": on_gpu(ModelCase("moe"), **BLOCKS, **EXPERTS),
    "FP8, uneven experts": on_gpu(ModelCase("moe"), **FP8, **UNEVEN_EXPERTS),
    "FP8, MLA": on_gpu(ModelCase("mla"), **FP8, **MLA_SIZES),
    "FP8, recomputed": on_gpu(
        ModelCase(),
        **FP8,
        recompute_granularity="selective",
        recompute_modules=["layernorm", "mlp"],
    ),
    "FP8, first and last layer in bf16": on_gpu(
        ModelCase(),
        **FP8,
        first_last_layers_bf16=True,
        num_layers_at_start_in_bf16=1,
        num_layers_at_end_in_bf16=1,
    ),
}


def random_counts(num_iterations: int, step: int = 1) -> tuple[int, ...]:
    draw = random.Random(5)
    return tuple(step * draw.randint(1, 8 // step) for _ in range(num_iterations))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_GPU)
def test_one_gpu(name: str) -> None:
    skip_without_recipe(ON_GPU[name].overrides)
    check(1, ON_GPU[name], random_counts(8))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name",
    [
        *("packed, dense", "packed, MLA", "packed, experts", "packed, dropless experts"),
        *("FP8", "FP8, blocks", "FP8, experts", "FP8, blocks, experts"),
    ],
)
def test_fifty_iterations(name: str) -> None:
    skip_without_recipe(ON_GPU[name].overrides)
    check(1, on_gpu(ON_GPU[name]), random_counts(50))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["FP8", "FP8, blocks", "experts, dropless", "hybrid, dropless"])
def test_offloading_inside_the_graphs_on_one_gpu(name: str) -> None:
    skip_without_recipe(ON_GPU[name].overrides)
    case = ModelCase(**{**vars(ON_GPU[name]), "num_layers": 8})  # the last layer stays
    modules = DENSE_MODULES + MLP_MODULES if case.kind == "dense" else MOE_MODULES
    (result,) = check(1, case, random_counts(8), None, modules)
    assert min(result.moved_bytes) > 0


@pytest.mark.gpus2
@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.parametrize("name", [*(f"packed, {name}" for name in PACKED), "dense", "FP8"])
@pytest.mark.parametrize("vpp", [None, 2], ids=["PP2", "PP2 VPP2"])
def test_pipelines_of_two_gpus(name: str, vpp: Optional[int]) -> None:
    case = ModelCase(**{**vars(ON_GPU[name]), "pp": 2, "vpp": vpp})
    check(2, case, random_counts(20, 2))


LAYOUTS = {
    "EP2": dataclasses.replace(PACKED["experts"], ep=2),
    "EP2, dropless": dataclasses.replace(PACKED["dropless experts"], ep=2),
    "EP2, FP8": dataclasses.replace(ON_GPU["FP8, experts"], ep=2),
    "TP2, sequence parallel": on_gpu(ModelCase(tp=2), sequence_parallel=True, **DROPOUT),
    "TP2, sequence parallel, experts": on_gpu(
        ModelCase("moe", tp=2), sequence_parallel=True, **EXPERTS
    ),
    "CP2": on_gpu(ModelCase(cp=2), hidden_dropout=0.1),
    "CP2, MLA": on_gpu(ModelCase("mla", cp=2), **MLA_SIZES),
}


@pytest.mark.gpus2
@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.parametrize("name", LAYOUTS)
def test_other_layouts_of_two_gpus(name: str) -> None:
    skip_without_recipe(LAYOUTS[name].overrides)
    check(2, LAYOUTS[name], random_counts(10))


@pytest.mark.gpus2
@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.parametrize("name", ["EP2", "EP2, dropless", "TP2, sequence parallel", "CP2"])
def test_offloading_inside_the_graphs_of_other_layouts(name: str) -> None:
    case = dataclasses.replace(LAYOUTS[name], num_layers=8)  # the last layer stays
    modules = DENSE_MODULES + MLP_MODULES if case.kind == "dense" else MOE_MODULES
    for result in check(2, case, random_counts(6), None, modules):
        assert min(result.moved_bytes) > 0


@pytest.mark.gpus2
def test_overlapped_reduction_on_two_gpus() -> None:
    check(2, ON_GPU["dense"], random_counts(10), {"overlap_grad_reduce": True})


def check_leaving(num_ranks: int, case: ModelCase) -> None:
    for num_replays in run_ranks(num_ranks, train_and_leave, case, (2, 2, 2)):
        assert min(num_replays) > 0


def test_closed_graphs_are_gone() -> None:
    check_leaving(1, ModelCase("dense"))


@pytest.mark.gpus2
def test_process_groups_can_go_though_graphs_have_communicated() -> None:
    """With graphs left it would reach the time limit, because NCCL waits for them."""
    check_leaving(2, ModelCase(**{**vars(ON_GPU["dense"]), "tp": 2}))


@pytest.mark.gpus4
def test_a_pipeline_of_four_gpus() -> None:
    check(4, ModelCase(**{**vars(PACKED["dense"]), "pp": 4}), random_counts(20))
