# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""What layers recompute is chosen within its limits, and as well as by trying everything."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import replace
from typing import Any

import pytest

from megatron.slipstream.estimate.gpus import find_speed
from megatron.slipstream.estimate.model_shapes import Experts, ModelShape, Parallelism
from megatron.slipstream.estimate.synthetic import Workplan
from megatron.slipstream.plan import assignments, search
from megatron.slipstream.plan.arrange import Timing, arrange
from megatron.slipstream.plan.build import build_plan
from megatron.slipstream.plan.candidates import PolicyOptions
from megatron.slipstream.plan.check import check_plan
from megatron.slipstream.plan.choose import MAX_STEPS_OF_CHANGES, Limit, choose
from megatron.slipstream.plan.settings import NOTHING, WHOLE, LayerSetting
from megatron.slipstream.plan.templates import RankTemplates
from megatron.slipstream.plan.walk import simulate

MLP = LayerSetting({"mlp"})
MOE_ACT = LayerSetting({"moe_act"})
DENSE = ModelShape(
    num_layers=5,
    hidden_size=2048,
    num_attention_heads=16,
    ffn_hidden_size=8192,
    vocab_size=8192,
    seq_length=8192,
    num_query_groups=4,
)
MIXED = replace(
    DENSE,
    num_layers=4,
    experts=Experts(num_experts=8, topk=2, ffn_hidden_size=2048),
    layer_kinds=("*-", "*E", "*E", "*E"),
)
LONGER = replace(DENSE, num_layers=8)
MODULES = ("qkv_linear", "core_attn", "attn_proj", "expert_fc1", "moe_act")
STATE_BYTES = 10**9


def rank_of(
    shape: ModelShape,
    gb_per_s: float = 20.0,
    count: int = 1,
    pp_rank: int = 0,
    modules: tuple[str, ...] = MODULES,
) -> RankTemplates:
    work = Workplan(shape, find_speed("h100", gb_per_s=gb_per_s), modules, count)
    return work.rank_templates(pp_rank, STATE_BYTES, (NOTHING, MLP, MOE_ACT, WHOLE))


def budget_of(rank: RankTemplates, share: float) -> int:
    """A share of the activations, beside the state."""
    peak = max(rank.compose((NOTHING,) * len(rank.kinds)).present_bytes)
    return int(STATE_BYTES + share * (peak - STATE_BYTES))


def best_of_all(rank: RankTemplates, budget_bytes: int, host_bytes: int | None = None) -> float:
    """The least time of all assignments that are within the budget."""
    settings = [tuple(rank.templates[kind]) for kind in rank.kinds]
    options = PolicyOptions(target_memory_bytes=budget_bytes, host_memory_limit_bytes=host_bytes)
    best_ms = float("inf")
    traces = [
        rank.compose(assignment, marks_all=True) for assignment in itertools.product(*settings)
    ]
    for trace in sorted(traces, key=lambda trace: sum(trace.step_ms)):
        if sum(trace.step_ms) >= best_ms:
            break
        plan = build_plan(trace, options, MAX_STEPS_OF_CHANGES)
        if max(plan.device_bytes) <= budget_bytes:
            best_ms = min(best_ms, simulate(plan).total_ms)
    return best_ms


@pytest.mark.parametrize(
    ("shape", "share"), [(DENSE, 0.85), (DENSE, 0.45), (MIXED, 0.8), (MIXED, 0.5)]
)
def test_no_assignment_of_a_small_model_is_faster(shape: ModelShape, share: float) -> None:
    rank = rank_of(shape)
    budget = budget_of(rank, share)
    choice = choose(rank, budget)
    best_ms = best_of_all(rank, budget)
    assert choice.fits
    assert choice.peak_bytes <= budget
    assert choice.total_ms <= best_ms * 1.01


def test_an_assignment_that_fits_because_the_models_input_moves_is_found() -> None:
    layers = (*["*E"] * 4, "*-")
    rank = rank_of(replace(MIXED, num_layers=5, seq_length=32768, layer_kinds=layers), 50.0)
    budget = budget_of(rank, 0.2917)
    best = (WHOLE, WHOLE, WHOLE, MOE_ACT, MLP)
    options = PolicyOptions(target_memory_bytes=budget)
    plan = build_plan(rank.compose(best, marks_all=True), options, MAX_STEPS_OF_CHANGES)
    assert max(plan.device_bytes) <= budget
    choice = choose(rank, budget)
    assert choice.fits
    assert choice.total_ms <= simulate(plan).total_ms


@pytest.mark.parametrize("share", [0.7, 0.4])
def test_no_setting_of_all_layers_with_fewer_modules_is_faster(share: float) -> None:
    rank = rank_of(LONGER)
    budget = budget_of(rank, share)
    options, times = PolicyOptions(target_memory_bytes=budget), []
    for count in range(4):
        for modules in itertools.combinations(MODULES[:3], count):
            given = rank_of(LONGER, modules=modules)
            for setting in given.templates["*-"]:
                trace = given.compose((setting,) * 8, marks_all=True)
                plan = build_plan(trace, options, MAX_STEPS_OF_CHANGES)
                if max(plan.device_bytes) <= budget:
                    times.append(simulate(plan).total_ms)
    choice = choose(rank, budget)
    assert choice.peak_bytes <= budget
    assert choice.total_ms <= min(times) * 1.01


@pytest.mark.parametrize(("pp", "pp_rank"), [(1, 0), (2, 0)])
def test_a_long_iteration_is_planned_by_its_first_micro_batches(
    pp: int, pp_rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = replace(LONGER, parallelism=Parallelism(pp=pp))
    rank = rank_of(shape, count=6, pp_rank=pp_rank)
    budget = budget_of(rank, 0.5)
    whole = choose(rank, budget)
    monkeypatch.setattr("megatron.slipstream.plan.choose.MAX_STEPS_PLANNED", 1)
    choice = choose(rank, budget)
    assert len(choice.plan.trace.steps) <= len(whole.plan.trace.steps) / 2
    assert choice.assignment == whole.assignment
    assert choice.peak_bytes <= budget
    assert choice.total_ms == pytest.approx(whole.total_ms, rel=0.005)
    assert choice.moved_bytes == pytest.approx(whole.moved_bytes, rel=0.15)
    assert choice.recompute_ms == whole.recompute_ms > 0


def test_a_large_iteration_is_planned_in_seconds() -> None:
    rank = rank_of(replace(DENSE, num_layers=100), count=16)
    start = time.process_time()
    choice = choose(rank, budget_of(rank, 0.5))
    assert choice.fits
    assert time.process_time() - start < 5  # 0.6 to 1.1 on one busy core of 2026.


def test_the_plan_is_one_that_can_run_and_says_what_it_costs() -> None:
    rank = rank_of(DENSE)
    choice = choose(rank, budget_of(rank, 0.5))
    check_plan(choice.plan)
    assert choice.plan.trace == rank.compose(choice.assignment, marks_all=True)
    assert choice.peak_bytes == max(choice.plan.device_bytes)
    assert choice.total_ms == simulate(choice.plan).total_ms
    templates = rank.layer_templates(choice.assignment)
    assert choice.recompute_ms == sum(item.recompute_ms for item in templates) > 0
    assert choice.moved_bytes == choice.plan.moved_nbytes > 0


def test_nothing_is_recomputed_that_fits() -> None:
    rank = rank_of(DENSE)
    choice = choose(rank, budget_of(rank, 1.0))
    assert choice.assignment == (NOTHING,) * 5
    assert (choice.moved_bytes, choice.recompute_ms, choice.limit) == (0, 0, Limit.NONE)


def test_a_budget_that_nothing_meets_gives_the_lowest_peak() -> None:
    rank = rank_of(replace(DENSE, num_layers=3))
    choice = choose(rank, STATE_BYTES)
    assert not choice.fits
    assert choice.limit is Limit.STATE
    peaks = []
    for assignment in itertools.product(rank.templates["*-"], repeat=3):
        trace = rank.compose(assignment)
        plan = build_plan(trace, PolicyOptions(target_memory_bytes=STATE_BYTES), 1000)
        peaks.append(max(plan.device_bytes))
    assert choice.peak_bytes <= min(peaks) * 1.01
    assert choose(rank, choice.peak_bytes).fits


def test_a_small_host_recomputes_more() -> None:
    rank = rank_of(DENSE, gb_per_s=200.0)
    budget = budget_of(rank, 0.5)
    free = choose(rank, budget)
    limit = free.plan.peak_host_bytes // 3
    choice = choose(rank, budget, limit)
    assert choice.fits
    assert choice.plan.peak_host_bytes <= limit
    assert choice.recompute_ms > free.recompute_ms
    assert choice.limit is Limit.HOST
    assert choice.total_ms <= best_of_all(rank, budget, limit) * 1.01


@pytest.mark.parametrize("pp_rank", [0, 1])
def test_each_rank_of_a_pipeline_keeps_its_budget(pp_rank: int) -> None:
    shape = replace(DENSE, num_layers=8, parallelism=Parallelism(pp=2, vpp=2))
    rank = rank_of(shape, count=6, pp_rank=pp_rank)
    for share in (0.8, 0.5):
        budget = budget_of(rank, share)
        choice = choose(rank, budget)
        assert choice.fits
        assert choice.peak_bytes <= budget
        assert choice.recompute_ms > 0 or choice.moved_bytes > 0


def test_without_a_bandwidth_nothing_is_chosen() -> None:
    rank = replace(rank_of(DENSE), bandwidth=None)
    with pytest.raises(ValueError, match="bandwidth is None"):
        choose(rank, 10**12)


@pytest.mark.parametrize("host_bytes", [None, 5 * 10**8])
def test_candidates_that_are_given_up_early_would_not_be_chosen(
    host_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = rank_of(replace(DENSE, num_layers=20), 50.0)
    budget = budget_of(rank, 0.4)
    is_given_up = []

    def watched(*args: Any) -> Timing:
        timing = arrange(*args)
        is_given_up.append(math.isinf(timing.peak_bytes))
        return timing

    monkeypatch.setattr(assignments, "MAX_STEPS_EXACT_LAST", 0)  # None is where all marks count.
    monkeypatch.setattr(search, "arrange", watched)
    choice = choose(rank, budget, host_bytes)
    assert any(is_given_up)
    monkeypatch.setattr(search, "arrange", lambda *args: arrange(*args[:3]))
    whole = choose(rank, budget, host_bytes)
    assert (choice.assignment, choice.total_ms) == (whole.assignment, whole.total_ms)
