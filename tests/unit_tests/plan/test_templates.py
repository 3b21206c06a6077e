# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A trace that is composed from templates of layers is that of the whole model."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from megatron.slipstream.estimate.gpus import find_speed
from megatron.slipstream.estimate.layers import (
    CHECKPOINT_INPUTS,
)
from megatron.slipstream.estimate.model_shapes import Experts, ModelShape, Parallelism
from megatron.slipstream.estimate.synthetic import Workplan, synthetic_trace
from megatron.slipstream.plan.build import build_plan
from megatron.slipstream.plan.candidates import PolicyOptions
from megatron.slipstream.plan.check import check_plan
from megatron.slipstream.plan.settings import NOTHING, WHOLE, LayerSetting
from megatron.slipstream.plan.templates import Work
from megatron.slipstream.plan.trace import StepKind

MLP, MOE = LayerSetting({"mlp"}), LayerSetting({"moe_act", "layernorm"})
SHAPE = ModelShape(
    num_layers=4,
    hidden_size=1024,
    num_attention_heads=8,
    ffn_hidden_size=4096,
    vocab_size=4096,
    seq_length=2048,
    num_query_groups=4,
    experts=Experts(num_experts=4, topk=2, ffn_hidden_size=512),
    layer_kinds=("*-", "*E") * 2,
)
MODULES = ("qkv_linear", "core_attn", "expert_fc1", "moe_act", CHECKPOINT_INPUTS)
SETTINGS = (NOTHING, MLP, MOE, WHOLE)


def work_of(shape: ModelShape = SHAPE, modules: tuple[str, ...] = MODULES) -> Workplan:
    return Workplan(shape, find_speed("h200"), modules, 2, 1)


@pytest.mark.parametrize(
    "assignment",
    [
        (NOTHING,) * 4,
        (WHOLE,) * 4,
        (MLP, MOE, NOTHING, WHOLE),
        (WHOLE, NOTHING, MLP, MOE),
    ],
)
def test_layers_of_any_settings_are_composed(assignment: tuple[LayerSetting, ...]) -> None:
    own = work_of(replace(SHAPE, layer_settings=assignment))
    rank = work_of().rank_templates(0, 10**9, SETTINGS)
    composed = rank.compose(assignment)
    assert composed.assignment == assignment
    assert replace(composed, assignment=()) == synthetic_trace(own, 0, 10**9)


def test_a_kind_has_templates_of_the_settings_that_it_takes() -> None:
    rank = work_of().rank_templates(0, 0, SETTINGS)
    assert set(rank.templates["*-"]) == {NOTHING, MLP, WHOLE}
    assert set(rank.templates["*E"]) == {NOTHING, MOE, WHOLE}
    with pytest.raises(KeyError):
        rank.compose((MOE,) * 4)
    with pytest.raises(ValueError, match="shorter"):
        rank.compose((NOTHING,) * 3)


def test_what_a_layer_recomputes_is_on_the_device_in_its_backward() -> None:
    templates = work_of().rank_templates(0, 0, SETTINGS).templates["*-"]
    whole, kept = templates[WHOLE], templates[NOTHING]
    inside = whole.in_forward.net_bytes + whole.in_backward.peak_bytes
    assert inside > kept.in_forward.net_bytes > 5 * whole.in_forward.net_bytes
    assert whole.recompute_ms == pytest.approx(whole.in_forward.ms)
    assert whole.in_backward.net_bytes == -whole.in_forward.net_bytes
    assert 0 < templates[MLP].recompute_ms < whole.recompute_ms


def test_only_a_first_layer_has_the_input_of_its_stage() -> None:
    shape = replace(SHAPE, parallelism=Parallelism(pp=2))
    for pp_rank in range(2):
        trace = work_of(shape).rank_templates(pp_rank, 0, SETTINGS).compose((WHOLE,) * 2)
        first, second = trace.storages[:2]
        assert (first.held_outside, bool(first.lingers_until)) == (pp_rank == 1, pp_rank == 0)
        assert (second.held_outside, second.lingers_until) == (False, 0)


def test_a_pass_without_groups_has_marks_only_if_asked() -> None:
    rank = work_of(modules=()).rank_templates(0, 0, (NOTHING,))
    assert not rank.compose((NOTHING,) * 4).steps
    trace = rank.compose((NOTHING,) * 4, marks_all=True)
    assert trace.steps
    assert {step.kind for step in trace.steps}.isdisjoint(
        {StepKind.FORWARD_COMMIT, StepKind.BACKWARD_USE}
    )
    assert max(trace.present_bytes) == max(
        work_of().rank_templates(0, 0, (NOTHING,)).compose((NOTHING,) * 4).present_bytes
    )
    check_plan(build_plan(trace, PolicyOptions(target_memory_bytes=1)))


@pytest.mark.parametrize("count", [1, 3])
def test_a_coarser_template_takes_as_much_of_everything(count: int) -> None:
    for template in work_of().rank_templates(0, 0, SETTINGS).templates["*-"].values():
        coarse = template.as_one_group(count)
        assert coarse.compute_ms == count * template.compute_ms
        assert coarse.movable_bytes == count * template.movable_bytes
        assert coarse.in_forward.net_bytes == count * template.in_forward.net_bytes
        assert coarse.in_backward.peak_bytes == template.in_backward.peak_bytes
        inputs = sum(item.nbytes for item in coarse.storages if item.is_input)
        assert inputs == sum(item.nbytes for item in template.storages if item.is_input)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(-9, 9), st.integers(0, 9)), min_size=1, max_size=6))
def test_work_adds_up_to_the_highest_peak(parts: list[tuple[int, int]]) -> None:
    works = [Work(1.0, net, max(0, net) + more) for net, more in parts]
    total = works[0]
    for work in works[1:]:
        total = total.then(work)
    before = itertools.accumulate((work.net_bytes for work in works), initial=0)
    assert total.peak_bytes == max(
        start + work.peak_bytes for start, work in zip(before, works, strict=False)
    )
    assert (total.ms, total.net_bytes) == (len(works), sum(net for net, _ in parts))
