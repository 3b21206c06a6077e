# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A trace from a shape is one that an engine could have recorded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from megatron.slipstream.estimate.gpus import find_speed
from megatron.slipstream.estimate.layers import (
    CHECKPOINT_INPUTS,
    MEGATRON_MODULES,
    Cost,
    layer_parts,
)
from megatron.slipstream.estimate.model_shapes import (
    Experts,
    LatentAttention,
    LayerKind,
    ModelShape,
    Parallelism,
)
from megatron.slipstream.estimate.synthetic import Workplan, synthetic_trace
from megatron.slipstream.plan.build import build_plan
from megatron.slipstream.plan.candidates import PolicyOptions
from megatron.slipstream.plan.check import check_plan
from megatron.slipstream.plan.files import load_trace, save_plan, save_trace
from megatron.slipstream.plan.settings import NOTHING, WHOLE, LayerSetting
from megatron.slipstream.plan.trace import StepKind, Trace
from megatron.slipstream.plan.walk import simulate

SHAPE = ModelShape(
    num_layers=4,
    hidden_size=1024,
    num_attention_heads=8,
    ffn_hidden_size=2048,
    vocab_size=4096,
    seq_length=2048,
    num_query_groups=4,
)
EXPERTS = Experts(num_experts=4, topk=2, ffn_hidden_size=512)
ATTENTION = ("qkv_linear", "core_attn", "attn_proj")
SPEED = find_speed("h200")
HIDDEN_BYTES = 2048 * 1024 * 2


def workplan(shape: ModelShape = SHAPE, modules: tuple[str, ...] = ATTENTION, count: int = 2,
             min_numel: int = 1) -> Workplan:  # fmt: skip
    return Workplan(shape, SPEED, modules, count, min_numel)


def pipeline(**fields: int) -> ModelShape:
    return replace(SHAPE, parallelism=Parallelism(**fields))


def saved_by(trace: Trace, group: int) -> list[tuple[int, bool, int]]:
    """For each storage of the first pass: bytes, whether something else holds it, its holders."""
    return [
        (item.nbytes, item.held_outside, len(item.holders))
        for item in (trace.storages[index] for index in trace.groups[group].storages)
    ]


def test_the_output_of_attention_is_one_storage_of_two_groups() -> None:
    trace = synthetic_trace(workplan(), 0)
    assert [group.name for group in trace.groups[:3]] == list(ATTENTION)
    assert saved_by(trace, 2) == [(HIDDEN_BYTES, False, 2)]
    assert (HIDDEN_BYTES, False, 2) in saved_by(trace, 1)


def test_what_a_module_that_is_not_chosen_saves_too_is_held_outside() -> None:
    trace = synthetic_trace(workplan(modules=("core_attn",)), 0)
    assert [held for _, held, _ in saved_by(trace, 0)] == [False, False, False, True, False]
    assert saved_by(trace, 0)[3] == (HIDDEN_BYTES, True, 1)


def test_the_schedule_holds_the_input_of_every_stage_but_the_first() -> None:
    work = workplan(pipeline(pp=2))
    first, second = (synthetic_trace(work, rank) for rank in range(2))
    assert [held for _, held, _ in saved_by(first, 0)] == [False, False, False]
    assert [held for _, held, _ in saved_by(second, 0)] == [True, False, False]
    assert [held for _, held, _ in saved_by(second, 3)] == [False, False, False]


def test_the_models_input_lingers_until_its_forward_has_returned() -> None:
    trace = synthetic_trace(workplan(), 0)
    index = trace.groups[0].storages[0]
    until = trace.storages[index].lingers_until
    assert trace.steps[until - 1].kind is StepKind.OUTPUT_END
    assert trace.steps[until].kind is StepKind.BACKWARD_START
    assert not any(item.lingers_until for item in trace.storages[index + 1 : len(trace.groups)])


def test_small_tensors_stay() -> None:
    least = HIDDEN_BYTES // 2  # In elements: that of the hidden state.
    trace = synthetic_trace(workplan(min_numel=least), 0)
    assert {item.nbytes for item in trace.storages} == {HIDDEN_BYTES}
    trace = synthetic_trace(workplan(min_numel=least + 1), 0)
    assert not trace.storages
    assert trace.groups


def test_expert_layers_and_dense_ones_mark_their_own_modules() -> None:
    shape = replace(SHAPE, experts=EXPERTS, layer_kinds=("*-", "*E") * 2)
    trace = synthetic_trace(workplan(shape, ("core_attn", "expert_fc1", "moe_act"), 1), 0)
    names = [group.name for group in trace.groups]
    assert names == ["core_attn", "core_attn", "expert_fc1", "moe_act"] * 2


def test_the_second_product_of_the_experts_runs_before_the_activations_group_ends() -> None:
    shape = replace(SHAPE, experts=EXPERTS)
    trace = synthetic_trace(workplan(shape, ("moe_act",), 1), 0)
    costs = {part.name: part.cost for part in layer_parts(shape, 0)}
    inside_ms = sum(
        SPEED.compute_ms(costs[part].flops, costs[part].traffic_bytes)
        for part in ("moe_act", "expert_fc2")
    )
    assert trace.steps[0].kind is StepKind.FORWARD_START
    before_ms = SPEED.compute_ms(
        sum(cost.flops for cost in before_activation(costs)),
        sum(cost.traffic_bytes for cost in before_activation(costs)),
    )
    assert trace.step_ms[0] == pytest.approx(before_ms + inside_ms, rel=0.05)


def before_activation(costs: dict[str, Cost]) -> list[Cost]:
    names = list(costs)
    return [costs[name] for name in names[: names.index("moe_act")]]


def test_a_rank_without_a_chosen_module_has_no_steps() -> None:
    layers = ("*-", "*-", "*E", "*E")
    shape = replace(pipeline(pp=2), experts=EXPERTS, layer_kinds=layers)
    work = workplan(shape, ("expert_fc1",))
    assert not synthetic_trace(work, 0).steps
    assert synthetic_trace(work, 1).steps


def test_an_iteration_takes_what_its_passes_and_its_waits_take() -> None:
    work = workplan(pipeline(pp=2), count=4)
    for rank in range(2):
        chunk = work.chunks[rank, 0]
        passes = 4 * (chunk.forward_ms + chunk.backward_ms)
        assert sum(synthetic_trace(work, rank).step_ms) == passes + sum(work.idle_ms[rank])
    assert sum(work.idle_ms[0]) > 0


def test_time_goes_to_the_mark_before_it_whatever_is_marked() -> None:
    totals = {sum(synthetic_trace(workplan(modules=names), 0).step_ms)
              for names in (ATTENTION, ("core_attn",), ("qkv_linear",))}  # fmt: skip
    assert len(totals) == 1


def test_memory_peaks_with_all_passes_in_flight_and_returns() -> None:
    work = workplan(pipeline(pp=4), count=8)
    state = 10**9
    for rank in range(4):
        trace = synthetic_trace(work, rank, state)
        peak = max(reading.peak_bytes for reading in trace.memory)
        saved = (4 - rank) * work.chunks[rank, 0].saved_bytes
        assert state + saved <= peak <= 1.1 * (state + saved)
        assert trace.memory[0].allocated_bytes >= state
        assert trace.memory[-1].allocated_bytes < state + 0.3 * saved
        assert not any(reading.absent_bytes for reading in trace.memory)


def test_recomputation_costs_time_and_gives_memory() -> None:
    plain = replace(SHAPE, experts=EXPERTS)
    less = replace(plain, recompute_modules=frozenset({"moe_act", "layernorm"}))
    before, after = (workplan(shape).chunks[0, 0] for shape in (plain, less))
    assert after.saved_bytes < before.saved_bytes
    assert after.backward_ms > before.backward_ms
    assert after.forward_ms == before.forward_ms


PIPELINE = Parallelism(pp=2, vpp=2)
ALIKE = {
    "dense": {},
    "mixed": {"experts": EXPERTS, "layer_kinds": ("*-", "*E") * 2},
    "experts": {"experts": replace(EXPERTS, shared_ffn_hidden_size=512)},
    "pipeline": {"parallelism": PIPELINE, "layers_per_chunk": ((1, 1), (1, 1))},
    "latent": {"latent_attention": LatentAttention(64, 32, 16, 8, 16), "hidden_dropout": 0.1},
    "local": {"attention_backend": "local", "normalization": "LayerNorm"},
    "selective": {"experts": EXPERTS, "recompute_modules": frozenset({"layernorm", "moe_act"})},
    "tiles": {"mlp_sequence_tiles": True, "loss_sequence_tiles": True},
    "whole": {"recompute_modules": WHOLE},
}


@pytest.mark.parametrize("changes", ALIKE.values(), ids=ALIKE)
def test_a_pattern_gives_the_plan_of_the_same_transformer(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    shape = replace(SHAPE, **changes)
    letters: tuple[LayerKind, ...] = tuple("".join(map(shape.kind_of, range(shape.num_layers))))
    pattern = replace(
        shape,
        num_layers=len(letters),
        layer_kinds=letters,
        layers_per_chunk=tuple(tuple(2 * n for n in rank) for rank in shape.layers_per_chunk),
        layers_per_checkpoint=2 if shape.recompute_modules == WHOLE else 1,
    )
    for rank in range(shape.parallelism.pp):
        files = tmp_path / "gpt.json", tmp_path / "hybrid.json"
        for path, each in zip(files, (shape, pattern), strict=True):
            trace = synthetic_trace(workplan(each, (*MEGATRON_MODULES, CHECKPOINT_INPUTS)), rank)
            assert trace.steps
            save_plan(build_plan(trace, PolicyOptions()), path)
        assert files[0].read_bytes() == files[1].read_bytes()


MOVABLE = ["qkv_linear", "core_attn", "mlp_norm", "mlp_act", "moe_act", "expert_fc2",
           "shared_experts", "checkpoint_inputs"]  # fmt: skip
SETTINGS = [NOTHING, WHOLE, frozenset({"mlp", "moe_act"}), frozenset({"layernorm", "core_attn"})]


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([(1, None), (2, None), (2, 2)]),
    st.sampled_from([(), ("*E",) * 4, ("*-", "*E", "*E", "*-"), ("*", "E", "-", "*")]),
    st.sets(st.sampled_from(MOVABLE), min_size=1),
    st.sampled_from(["fused", "local"]),
    st.lists(st.sampled_from(SETTINGS), min_size=4, max_size=4),
)
def test_every_trace_can_be_planned_proved_and_simulated(
    pipeline: tuple[int, int | None],
    moe: tuple[bool, ...],
    modules: set[str],
    backend: str,
    recomputed: list[LayerSetting],
) -> None:
    pp, vpp = pipeline
    shape = replace(
        SHAPE,
        experts=replace(EXPERTS, shared_ffn_hidden_size=512) if moe else None,
        layer_kinds=moe,
        attention_backend=backend,
        layer_settings=tuple(recomputed),
        parallelism=Parallelism(pp=pp, vpp=vpp),
    )
    trace = synthetic_trace(workplan(shape, tuple(sorted(modules)), 2 * pp), pp - 1)
    if trace.steps:
        plan = build_plan(trace, PolicyOptions())
        check_plan(plan)
        simulation = simulate(plan)
        assert simulation.total_ms >= simulation.compute_ms
        assert simulation.peak_bytes is not None


def test_a_trace_can_be_written_and_read(tmp_path: Path) -> None:
    trace = synthetic_trace(workplan(pipeline(pp=2)), 0)
    save_trace(trace, tmp_path / "trace.json")
    assert load_trace(tmp_path / "trace.json") == trace


def test_more_bandwidth_never_makes_a_step_longer() -> None:
    times = []
    for gb_per_s in (5, 50, 50000):
        work = replace(workplan(), speed=find_speed("h200", gb_per_s=gb_per_s))
        times.append(simulate(build_plan(synthetic_trace(work, 0), PolicyOptions())).total_ms)
    assert times == sorted(times, reverse=True)
    compute_ms = sum(synthetic_trace(workplan(), 0).step_ms)
    assert times[0] > 1.1 * times[-1]
    assert times[-1] == pytest.approx(compute_ms, rel=0.01)
